"""Choice of the reduction for bias gradients: stored per pair, or summed. Does not import triton."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.spec.operands import TensorSpec
from tilewise.spec.problem import Problem


def bias_reduction(problem: Problem) -> str:
    """Return how dS becomes dBias: "none", "store", "add" if shared, "rows" or "cols" (also a scalar)."""
    if problem.bias is None:
        return "none"
    if problem.bias.axes != "matrix":
        return "rows" if problem.bias.axes == "rows" else "cols"
    return "store" if problem.broadcast_group(problem.bias).single else "add"


def is_stored_whole(problem: Problem, reduction: str) -> bool:
    """True if every element of dBias that belongs to a pair is stored once; a ragged dBias may have gaps."""
    padded = problem.totals is not None and (problem.score.packed is None or "ragged" not in problem.score.packed.forms)
    return reduction == "store" and problem.score.band.unlimited and problem.mask is None and not padded


def is_summed(problem: Problem, name: str) -> bool:
    """True if several pairs may share an element of the bias component ``name``."""
    distances = {"query": problem.score.query, "key": problem.score.key}.get(name)
    if distances is None or problem.parts is None:  # a vector or a Toeplitz bias
        return True
    operand = getattr(problem.parts, name)
    assert isinstance(operand, TensorSpec)
    within_a_row = distances.outside == "clamp" or name in problem.parts.buckets
    return within_a_row or not problem.broadcast_group(operand).single


def is_ordered(problem: Problem, reduction: str) -> bool:
    """True if dBias is a sum that must be computed in a fixed order."""
    return problem.deterministic and reduction not in ("none", "store")


def empty_bias_gradient(problem: Problem, bias: Tensor | None, reduction: str, device: torch.device) -> Tensor | None:
    """Return a buffer for dBias: the bias's dtype if every element is stored once, else float32 for a sum."""
    if reduction == "none" or bias is None:
        return None
    dtype = bias.dtype if reduction == "store" else torch.float32
    fill = torch.empty if is_stored_whole(problem, reduction) else torch.zeros
    return fill(bias.shape, dtype=dtype, device=device)
