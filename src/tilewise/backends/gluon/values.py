"""Bias by relative position with values per query: kernel arguments, and the memory layout for TMA.

Nothing here imports triton: the plan calls it on machines without triton.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.backends import address
from tilewise.spec.operands import TensorSpec
from tilewise.spec.problem import Problem
from tilewise.spec.relative import skewed
from tilewise.spec.score import Distances
from tilewise.spec.tiles import NO_HI, NO_LO
from tilewise.spec.tma import tensor_fits_tma

WIDEST = 256  # the most keys of a tile


class Ends(NamedTuple):
    """Flags: visible pairs exist below the least distance with an entry, or above the largest."""

    lo: bool
    hi: bool


def ends(problem: Problem) -> Ends:
    distances, band = problem.score.query, problem.score.band
    if distances is None:
        return Ends(False, False)
    least, most = 1 - problem.queries, problem.keys - 1
    if problem.totals is not None:  # distances count from the last query and key of each sequence
        least, most = 1 - problem.keys, problem.queries - 1
    if band.lo is not None:
        least = max(band.lo, least)
    if band.hi is not None:
        most = min(band.hi, most)
    return Ends(distances.lo > least, distances.hi < most)


def range_numbers(problem: Problem) -> dict[str, Any]:
    """Return the range fields of `GluonScoreArgs` for a problem `as_matrix`; an end without visible pairs beyond is
    open."""
    distances, band, found = problem.score.query, problem.score.band, ends(problem)
    if distances is None or problem.bias is None:
        return {}
    return {
        "column": front_of(distances, problem.bias.dtype) - distances.lo,
        "first": distances.lo,
        "range_lo": distances.lo if found.lo else NO_LO,
        "range_hi": distances.hi if found.hi else NO_HI,
        "entries": distances.count,
        "inner_lo": distances.lo if band.lo is None else max(distances.lo, band.lo),
        "inner_hi": distances.hi if band.hi is None else min(distances.hi, band.hi),
    }


def range_constants(problem: Problem) -> dict[str, bool]:
    """Return compile-time constants: True for a bias by relative position, and for ends of its range that cut tiles."""
    found = ends(problem)
    return {"RELATIVE": problem.score.query is not None, "RANGE_LO": found.lo, "RANGE_HI": found.hi}


def as_matrix(problem: Problem) -> Problem:
    """Return the problem with the matrix that its values per query represent as bias; other problems unchanged."""
    parts = problem.parts
    if parts is None or parts.query is None:
        return problem
    values = parts.query
    bias = TensorSpec(values.dtype, values.batch, values.heads, problem.queries, problem.keys)
    return replace(problem, bias=bias, parts=None, bias_grad="query" in parts.grads)


def step_of(dtype: torch.dtype) -> int:
    """Return the elements of 16 bytes: a TMA box must begin in its row at a multiple, or the instruction is illegal."""
    return 16 // dtype.itemsize


def front_of(distances: Distances, dtype: torch.dtype) -> int:
    """Return the padding columns before the first entry.

    They make key tiles begin at a multiple of 16 bytes, and none at a negative column: where the first entry is of a
    key after the query's, a tile that includes it begins up to the tile's width before it, unless it begins with it.
    (On an H200 negative columns raised an illegal instruction.)
    """
    return distances.lo % step_of(dtype) + (WIDEST if distances.lo > 0 and distances.lo % WIDEST else 0)


def fits(values: Tensor, distances: Distances) -> bool:
    """True if TMA can read the values (B|1, H|Hkv|1, M, R) in place. Entries must ascend from a distance that is a
    multiple of 16 bytes; the row stride must be one element more than such a multiple."""
    contiguous = values.stride(3) == 1 or values.shape[3] == 1
    if distances.reverse or front_of(distances, values.dtype):
        return False
    if not contiguous or values.stride(2) < values.shape[3]:
        return False
    return tensor_fits_tma(skewed(values), address(values) % 16 == 0)


def empty_values(values: Tensor, distances: Distances, device: torch.device | str | None = None) -> Tensor:
    """Return an uninitialised tensor for values in the layout that TMA reads: `front_of` columns, then the entries."""
    B, H, M, R = values.shape
    step, width = step_of(values.dtype), front_of(distances, values.dtype) + R
    row = -(-max(width - 1, 1) // step) * step + 1
    rows = -(-M // step) * step
    return values.new_empty(B, H, rows, row, device=device)[:, :, :M, :width]


class Skewed:
    """Values of one layout, and their gradient, as TMA reads and adds to them.

    like: `skewed` values, for a descriptor. gradient_like: likewise for the gradient; gradient_laid: the accumulated
    gradient, with gradient_front padding columns; gradient_plain: its entries. All are on the meta device, because
    prepared calls are kept.
    """

    def __init__(self, values: Tensor, distances: Distances):
        self.distances = distances
        self.copies = not fits(values, distances)
        like = skewed(empty_values(values, distances, "meta") if self.copies else values)
        self.like = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta")
        plain = torch.empty_like(values, device="meta")
        self.gradient_copies = not fits(plain, distances)
        laid = empty_values(values, distances, "meta") if self.gradient_copies else plain
        self.gradient_laid, self.gradient_like = laid, skewed(laid)
        self.gradient_front = front_of(distances, laid.dtype)
        self.gradient_plain = self.entries(laid)

    def entries(self, laid: Tensor) -> Tensor:
        """Return values, or the result of `empty_values`, without the padding columns."""
        return laid[..., front_of(self.distances, laid.dtype) :]

    def laid_out(self, values: Tensor) -> Tensor:
        """Return the values, or a copy of them with padding columns."""
        if not self.copies:
            return values
        laid = empty_values(values, self.distances)
        self.entries(laid).copy_(values.flip(3) if self.distances.reverse else values)
        return laid

    def empty_gradient(self, values: Tensor) -> Tensor:
        """Return an uninitialised tensor to accumulate the gradient, with padding columns."""
        return empty_values(values, self.distances) if self.gradient_copies else torch.empty_like(values)

    def gradient(self, found: Tensor, values: Tensor) -> Tensor:
        """Return the gradient of the values from a filled `empty_gradient`."""
        if not self.gradient_copies:
            return found
        found = self.entries(found)
        return torch.empty_like(values).copy_(found.flip(3) if self.distances.reverse else found)
