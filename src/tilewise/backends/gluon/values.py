"""Values by distance, a row a query: what the kernels of this folder are told of them, and how they lie for TMA.

Nothing here imports triton: the plan asks on machines that have none.
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

WIDEST = 256  # keys, no tile has more


class Ends(NamedTuple):
    """Whether pairs that the band leaves visible lie below the least distance with an entry, or above the largest."""

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
    """Of `GluonScoreArgs`, for a problem `as_matrix`; an end beyond which no visible pair lies is none."""
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
    """What kernels know of it when they are compiled: whether the bias is one by distance, and what cuts its tiles."""
    found = ends(problem)
    return {"RELATIVE": problem.score.query is not None, "RANGE_LO": found.lo, "RANGE_HI": found.hi}


def as_matrix(problem: Problem) -> Problem:
    """With the matrix that the values per query stand for as its bias; other problems as they are."""
    parts = problem.parts
    if parts is None or parts.query is None:
        return problem
    values = parts.query
    bias = TensorSpec(values.dtype, values.batch, values.heads, problem.queries, problem.keys)
    return replace(problem, bias=bias, parts=None, bias_grad="query" in parts.grads)


def step_of(dtype: torch.dtype) -> int:
    """Elements of 16 bytes: where a box of TMA begins in a row is a multiple of it, else the instruction is illegal."""
    return 16 // dtype.itemsize


def front_of(distances: Distances, dtype: torch.dtype) -> int:
    """Columns without a use before the first entry, so that tiles of keys begin at a multiple of 16 bytes, and none at
    a negative column: where the first entry belongs to a key behind the query's, a tile that reaches it begins up to
    its own width before it, unless it begins with it. (Negative columns ended in an illegal instruction on an H200
    wherever there were some.)"""
    return distances.lo % step_of(dtype) + (WIDEST if distances.lo > 0 and distances.lo % WIDEST else 0)


def fits(values: Tensor, distances: Distances) -> bool:
    """Whether TMA reads the values (B|1, H|Hkv|1, M, R) where they are: entries that ascend from a distance that is a
    multiple of 16 bytes on, and in bytes a row stride of 1 element more than such a multiple."""
    contiguous = values.stride(3) == 1 or values.shape[3] == 1
    if distances.reverse or front_of(distances, values.dtype):
        return False
    if not contiguous or values.stride(2) < values.shape[3]:
        return False
    return tensor_fits_tma(skewed(values), address(values) % 16 == 0)


def empty_values(values: Tensor, distances: Distances, device: torch.device | str | None = None) -> Tensor:
    """Uninitialised, of the same dtype, as TMA reads it: `front_of` columns, and then the entries."""
    B, H, M, R = values.shape
    step, width = step_of(values.dtype), front_of(distances, values.dtype) + R
    row = -(-max(width - 1, 1) // step) * step + 1
    rows = -(-M // step) * step
    return values.new_empty(B, H, rows, row, device=device)[:, :, :M, :width]


class Skewed:
    """The values of a layout, and their gradient, for TMA to read and add to.

    like: `skewed` values, for a descriptor. gradient_like: the same of the gradient; gradient_laid, gradient_plain: as
    it comes together, with gradient_front columns in front, and its entries. None of them has memory: what is prepared
    is kept.
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
        """Of what `empty_values` gives, or of values, all but the columns in front."""
        return laid[..., front_of(self.distances, laid.dtype) :]

    def laid_out(self, values: Tensor) -> Tensor:
        """The values, or a copy of them with columns in front."""
        if not self.copies:
            return values
        laid = empty_values(values, self.distances)
        self.entries(laid).copy_(values.flip(3) if self.distances.reverse else values)
        return laid

    def empty_gradient(self, values: Tensor) -> Tensor:
        """Where the gradient comes together, uninitialised, with columns in front."""
        return empty_values(values, self.distances) if self.gradient_copies else torch.empty_like(values)

    def gradient(self, found: Tensor, values: Tensor) -> Tensor:
        """That of the values from `empty_gradient`, filled."""
        if not self.gradient_copies:
            return found
        found = self.entries(found)
        return torch.empty_like(values).copy_(found.flip(3) if self.distances.reverse else found)
