"""How dBias comes about: what the main kernel writes, and dBias from it."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.problem import Problem


def bias_axes(problem: Problem) -> str:
    """Which axes of queries and keys the bias is full along: "matrix", "cols" or "rows"; one of neither is "rows"."""
    bias = problem.bias
    if bias is None:
        return "none"
    return "rows" if bias.cols == 1 else "cols" if bias.rows == 1 else "matrix"


def reduction(problem: Problem) -> str:
    """How tiles of dS become dBias."""
    bias, axes = problem.bias, bias_axes(problem)
    if bias is None or not problem.bias_grad or axes == "rows":
        return "none"
    if axes == "cols":
        return "sum"
    return "store" if (bias.batch, bias.heads) == (problem.batch, problem.heads) else "add"


def empty_bias_gradient(problem: Problem, bias: Tensor | None, device: torch.device) -> Tensor | None:
    """What the main kernel writes: dBias in its own dtype where every element is stored once, else a float32 sum of its
    shape; for a bias over the keys the sums of each head, float32 (B, H, N)."""
    how = reduction(problem)
    if how == "none" or bias is None:
        return None
    if how == "sum":
        return torch.empty(problem.batch, problem.heads, problem.keys, dtype=torch.float32, device=device)
    dtype = bias.dtype if how == "store" else torch.float32
    fill = torch.empty if how == "store" and problem.score.band.unlimited else torch.zeros
    return fill(bias.shape, dtype=dtype, device=device)


def bias_gradient(
    problem: Problem, bias: Tensor, found: Tensor | None, lse: Tensor | None, dlse: Tensor | None
) -> Tensor:
    """dBias from what the main kernel wrote.

    A bias that is constant along the keys moves the LSE alone: its gradient is dLSE, 0 in rows that see nothing.
    """
    if bias_axes(problem) == "matrix" and found is not None:
        return found.to(bias.dtype)
    if found is not None:
        found = found[:, :, None]
    elif lse is None or dlse is None:
        return torch.zeros_like(bias)
    else:
        found = dlse.masked_fill(lse == -torch.inf, 0.0)[..., None]
    if bias.shape[1] not in (1, problem.heads):
        found = found.unflatten(1, (bias.shape[1], -1)).sum(2)
    return found.sum_to_size(bias.shape).to(bias.dtype)
