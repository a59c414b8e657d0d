"""Buffers in which the CPU's tiles sum the gradient of a bias."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.backends import Inputs, lse_dtype
from tilewise.backends.cpu.parts import band_hides, in_huge_pages
from tilewise.spec.problem import Problem


def is_full(problem: Problem, bias: Tensor) -> bool:
    """True if no axis broadcasts: each element belongs to one score."""
    return bias.shape == (problem.batch, problem.heads, problem.queries, problem.keys)


def empty_dbias(problem: Problem, inputs: Inputs) -> Tensor:
    """Return a tensor for dBias: zeros if tiles add to it or may be skipped, else uninitialised."""
    assert inputs.bias is not None
    # A relative-position bias may hide tiles inside the window.
    whole = problem.mask is None and inputs.parts is None and not band_hides(problem)
    written = is_full(problem, inputs.bias) and whole
    return in_huge_pages(torch.empty_like(inputs.bias)) if written else torch.zeros_like(inputs.bias)


def dbias_sum(problem: Problem, place: Tensor, total: Tensor | None, dbias: Tensor) -> Tensor:
    """Return the buffer that sums the rows ``place`` of dBias: itself, or one in the tiles' wider dtype.

    ``total`` is the buffer of the previous rows, reused if possible; if dBias has a single row, it holds their sum.
    """
    dtype = lse_dtype(problem.dtype)
    if dbias.dtype == dtype or is_full(problem, dbias):
        return place
    if total is not None and dbias.shape[2] == 1:
        return total
    if total is not None and total.shape == place.shape:
        return total.zero_()
    return place.new_zeros(place.shape, dtype=dtype)
