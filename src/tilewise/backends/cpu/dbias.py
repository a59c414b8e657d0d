"""Where the CPU's tiles sum the gradient of a bias."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.backends import Inputs, lse_dtype
from tilewise.backends.cpu.parts import band_hides, in_huge_pages
from tilewise.spec.problem import Problem


def is_full(problem: Problem, bias: Tensor) -> bool:
    """Nothing broadcasts: each element belongs to one score."""
    return bias.shape == (problem.batch, problem.heads, problem.queries, problem.keys)


def empty_dbias(problem: Problem, inputs: Inputs) -> Tensor:
    """dBias to be written: zeros where something is added to it, or where tiles may be skipped."""
    assert inputs.bias is not None
    # A bias by distance may hide tiles that the band does not tell of.
    whole = problem.mask is None and inputs.parts is None and not band_hides(problem)
    written = is_full(problem, inputs.bias) and whole
    return in_huge_pages(torch.empty_like(inputs.bias)) if written else torch.zeros_like(inputs.bias)


def dbias_sum(problem: Problem, place: Tensor, total: Tensor | None, dbias: Tensor) -> Tensor:
    """Where the rows ``place`` of dBias are gathered: there, or in the tiles' dtype if that is wider and tiles add.

    ``total`` is where the rows before were gathered: the same ones if dBias has a single row.
    """
    dtype = lse_dtype(problem.dtype)
    if dbias.dtype == dtype or is_full(problem, dbias):
        return place
    if total is not None and dbias.shape[2] == 1:
        return total
    if total is not None and total.shape == place.shape:
        return total.zero_()
    return place.new_zeros(place.shape, dtype=dtype)
