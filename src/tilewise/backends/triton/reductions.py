"""Which gradients of biases are sums over several pairs. Imports no triton."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.spec.operands import TensorSpec
from tilewise.spec.problem import Problem


def bias_reduction(problem: Problem) -> str:
    """How tiles of dS become dBias: "store" each, "add" those that share one, or sum to "rows" or "cols" vectors, of
    which a number is one of the second kind."""
    if problem.bias is None:
        return "none"
    if problem.bias.axes != "matrix":
        return "rows" if problem.bias.axes == "rows" else "cols"
    return "store" if problem.broadcast_group(problem.bias).single else "add"


def is_stored_whole(problem: Problem, reduction: str) -> bool:
    """Whether every element of dBias that a pair has is stored once: of a ragged one those of its sequences."""
    padded = problem.totals is not None and (problem.score.packed is None or "ragged" not in problem.score.packed.forms)
    return reduction == "store" and problem.score.band.unlimited and problem.mask is None and not padded


def is_summed(problem: Problem, name: str) -> bool:
    """Whether several pairs may share an element of the part of that name."""
    distances = {"query": problem.score.query, "key": problem.score.key}.get(name)
    if distances is None or problem.parts is None:  # along keys or queries, or along diagonals
        return True
    operand = getattr(problem.parts, name)
    assert isinstance(operand, TensorSpec)
    within_a_row = distances.outside == "clamp" or name in problem.parts.buckets
    return within_a_row or not problem.broadcast_group(operand).single


def is_ordered(problem: Problem, reduction: str) -> bool:
    """Whether dBias is a sum that must run in one order."""
    return problem.deterministic and reduction not in ("none", "store")


def empty_bias_gradient(problem: Problem, bias: Tensor | None, reduction: str, device: torch.device) -> Tensor | None:
    """Where dBias is written: in its own dtype where every element is stored once, else a float32 sum of its shape."""
    if reduction == "none" or bias is None:
        return None
    dtype = bias.dtype if reduction == "store" else torch.float32
    fill = torch.empty if is_stored_whole(problem, reduction) else torch.zeros
    return fill(bias.shape, dtype=dtype, device=device)
