"""Choice of the reduction for bias gradients: stored per pair, or summed. Does not import triton."""

from __future__ import annotations

from enum import StrEnum

import torch
from torch import Tensor

from tilewise.spec.operands import BiasKind, TensorSpec
from tilewise.spec.problem import Problem


class BiasReduction(StrEnum):
    """Ways in which dS tiles become dBias in the Triton kernels, which get the value."""

    NONE = "none"
    STORE = "store"  # every element has one dS
    ADD = "add"  # a matrix that batch elements or heads share
    ROWS = "rows"  # a bias over the queries
    COLS = "cols"  # a bias over the keys, or one number for each head


def bias_reduction(problem: Problem) -> BiasReduction:
    """Return how dS becomes dBias."""
    if problem.bias is None:
        return BiasReduction.NONE
    if problem.bias.axes != BiasKind.MATRIX:
        return BiasReduction.ROWS if problem.bias.axes == BiasKind.ROWS else BiasReduction.COLS
    shared = not problem.broadcast_group(problem.bias).single
    return BiasReduction.ADD if shared else BiasReduction.STORE


def is_stored_whole(problem: Problem, reduction: BiasReduction) -> bool:
    """True if every element of dBias that belongs to a pair is stored once; a ragged dBias may have gaps."""
    padded = problem.totals is not None and (problem.score.packed is None or "ragged" not in problem.score.packed.forms)
    return reduction == BiasReduction.STORE and problem.score.band.unlimited and problem.mask is None and not padded


def is_summed(problem: Problem, name: str) -> bool:
    """True if several pairs may share an element of the bias component ``name``."""
    distances = {"query": problem.score.query, "key": problem.score.key}.get(name)
    if distances is None or problem.parts is None:  # a vector or a Toeplitz bias
        return True
    operand = getattr(problem.parts, name)
    assert isinstance(operand, TensorSpec)
    within_a_row = distances.outside == "clamp" or name in problem.parts.buckets
    return within_a_row or not problem.broadcast_group(operand).single


def is_ordered(problem: Problem, reduction: BiasReduction) -> bool:
    """True if dBias is a sum that must be computed in a fixed order."""
    return problem.deterministic and reduction not in (BiasReduction.NONE, BiasReduction.STORE)


def empty_bias_gradient(
    problem: Problem, bias: Tensor | None, reduction: BiasReduction, device: torch.device
) -> Tensor | None:
    """Return a buffer for dBias: the bias's dtype if every element is stored once, else float32 for a sum."""
    if reduction == BiasReduction.NONE or bias is None:
        return None
    dtype = bias.dtype if reduction == BiasReduction.STORE else torch.float32
    fill = torch.empty if is_stored_whole(problem, reduction) else torch.zeros
    return fill(bias.shape, dtype=dtype, device=device)
