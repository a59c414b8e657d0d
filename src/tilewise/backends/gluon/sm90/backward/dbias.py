"""How dBias comes about: what the kernels write, and dBias from it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.backends.gluon.sm90.common.config import (
    ELEMENTS,
    MOST_PROGRAMS,
    dbias_sums,
    heads_in_cache,
    is_batched,
    longest_first,
)
from tilewise.backends.gluon.sm90.common.copied_bias import padded, pads_gradient
from tilewise.backends.gluon.sm90.common.traits import bias_axes
from tilewise.spec.problem import Problem


class ProgramGroup(NamedTuple):
    """Who reads the same bias tile: batch elements, key/value heads, and of these the programs that form a group."""

    batch: int
    heads: int
    programs: int


def reduction(problem: Problem) -> str:
    """How tiles of dS become dBias; see `BackwardConstants.DBIAS`."""
    bias, axes = problem.bias, bias_axes(problem)
    if bias is None or not problem.bias_grad or axes == "rows":
        return "none"
    if axes == "cols":
        return "sum"
    if problem.score.query is not None:
        return "add"
    if is_batched(problem):
        return "elements"
    if problem.broadcast_group(bias).single:
        return "store"
    return "accumulate" if dbias_sums(problem) else "reduce"


def broadcast_group(problem: Problem) -> ProgramGroup:
    """Where a program has elements, these are a group; the last elements of a head may have no batch element."""
    bias = problem.bias
    if is_batched(problem):
        return ProgramGroup(-(-problem.batch // ELEMENTS) * ELEMENTS, 1, ELEMENTS)
    if bias is None or bias_axes(problem) != "matrix":
        return ProgramGroup(1, 1, 1)
    group = problem.broadcast_group(bias)
    most = heads_in_cache(problem, problem.queries) if longest_first(problem) else MOST_PROGRAMS
    return ProgramGroup(group.batch, group.kv_heads, math.gcd(group.batch * group.kv_heads, min(most, MOST_PROGRAMS)))


def adds(problem: Problem) -> bool:
    """Whether more programs share an element of dBias than a group has: groups then add to a float32 sum."""
    found = broadcast_group(problem)
    return reduction(problem) in ("reduce", "elements") and found.batch * found.heads > found.programs


def zeroes_ahead(problem: Problem) -> bool:
    """Whether persistent programs zero dBias for groups to come, before these add to it; else the host does, all of it:
    where tiles are left out, or added to by more programs than a group has."""
    found = broadcast_group(problem)
    if reduction(problem) != "accumulate" or problem.mask is not None or not problem.score.band.unlimited:
        return False
    return found.batch * found.heads == found.programs > 1


def sums_sparsely(problem: Problem) -> bool:
    """Whether `sparse_sum` zeroes what programs add to, and makes dBias of it: a single sum in dBias's dtype is dBias
    itself."""
    bias = problem.bias
    if problem.mask is None or bias is None or is_batched(problem):
        return False
    if reduction(problem) == "accumulate":
        return dbias_sums(problem) > 1
    return adds(problem) and bias.dtype != torch.float32


def bias_gradient_allocation(
    problem: Problem, bias: Tensor | None, ahead: bool = False
) -> Callable[..., Tensor] | None:
    """What makes, on a ``device=``, what the kernels write: dBias in its own dtype where every element is stored once,
    or `dbias_sums` of its shape one after the other, else a float32 sum of its shape; for a bias over the keys the sums
    of each head, float32 (B, H, N), or (1, H, T) of a packed batch. Of a bias by distance `values.Skewed` does.

    ahead: persistent programs zero it, see `zeroes_ahead`.
    """
    how = reduction(problem)
    if how in ("none", "add") or bias is None:
        return None
    if how == "sum" and problem.totals is not None:  # keys that no sequence has get none
        total = problem.totals[1]
        return lambda device: torch.zeros(1, problem.heads, total, dtype=torch.float32, device=device)
    if how == "sum":
        size = problem.batch, problem.heads, problem.keys
        return lambda device: torch.empty(size, dtype=torch.float32, device=device)
    # A program stores the tiles that it visits, and those that a mask hides from all who share them are not added up.
    everywhere = problem.score.band.unlimited and not adds(problem) and problem.mask is None
    stored = everywhere and (how != "accumulate" or ahead)
    fill = torch.empty if stored or sums_sparsely(problem) else torch.zeros
    B, *shape, cols = bias.shape
    sums, width = max(1, dbias_sums(problem)), padded(cols) if pads_gradient(problem) else cols
    dtype = torch.float32 if adds(problem) else bias.dtype
    return lambda device: fill((sums * B, *shape, width), dtype=dtype, device=device)[..., :cols]


def bias_gradient(
    problem: Problem, bias: Tensor, found: Tensor | None, lse: Tensor | None, dlse: Tensor | None
) -> Tensor:
    """dBias from what the kernels wrote.

    A bias that is constant along the keys moves the LSE alone: its gradient is dLSE, 0 in rows that see nothing or
    that no sequence has.
    """
    if bias_axes(problem) == "matrix" and found is not None:
        if found.shape[0] > bias.shape[0]:  # two sums, rounded once; one over an axis has half of a copy's speed
            found = torch.add(*found.chunk(2))
        return found.to(bias.dtype).contiguous()  # of rows that were longer
    if found is not None:
        found = found[:, :, None]
    elif lse is None or dlse is None:
        return torch.zeros_like(bias)
    else:
        found = dlse.masked_fill(lse == -torch.inf, 0.0)[..., None]
    if bias.shape[1] not in (1, problem.heads):
        found = found.unflatten(1, (bias.shape[1], -1)).sum(2)
    return found.sum_to_size(bias.shape).to(bias.dtype)
