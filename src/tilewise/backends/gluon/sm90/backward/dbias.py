"""Buffers that the kernels write dBias to, and dBias from these."""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import StrEnum
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
from tilewise.spec.operands import BiasKind
from tilewise.spec.problem import Problem


class ProgramGroup(NamedTuple):
    """Batch elements and key/value heads that share a bias tile, and programs of these in a group."""

    batch: int
    heads: int
    programs: int


class DBiasMode(StrEnum):
    """Ways in which dS tiles become dBias; kernels get the value."""

    NONE = "none"  # no bias gradient, or one of a bias over the queries, which moves the LSE alone
    STORE = "store"  # every element has one dS: stored by TMA from shared memory
    ACCUMULATE = "accumulate"  # shared: added to dBias in memory
    REDUCE = "reduce"  # shared: stored in the dS buffer and summed by groups of programs
    BATCHED = "batched"  # shared: summed over the batch elements of a CTA, then added
    SUM = "sum"  # over the keys: summed over the queries in registers
    ADD = "add"  # relative positions: added to the entries


def reduction(problem: Problem) -> DBiasMode:
    """Return how dS tiles become dBias."""
    bias, axes = problem.bias, bias_axes(problem)
    if bias is None or not problem.bias_grad or axes == BiasKind.ROWS:
        return DBiasMode.NONE
    if axes == BiasKind.COLS:
        return DBiasMode.SUM
    if problem.score.query is not None:
        return DBiasMode.ADD
    if is_batched(problem):
        return DBiasMode.BATCHED
    if problem.broadcast_group(bias).single:
        return DBiasMode.STORE
    return DBiasMode.ACCUMULATE if dbias_sums(problem) else DBiasMode.REDUCE


def broadcast_group(problem: Problem) -> ProgramGroup:
    """Return the `ProgramGroup`; in the batched CTA the elements are a group, and their batch is padded."""
    bias = problem.bias
    if is_batched(problem):
        assert bias is not None
        return ProgramGroup(-(-(problem.batch // bias.batch) // ELEMENTS) * ELEMENTS, 1, ELEMENTS)
    if bias is None or bias_axes(problem) != BiasKind.MATRIX:
        return ProgramGroup(1, 1, 1)
    group = problem.broadcast_group(bias)
    most = heads_in_cache(problem, problem.queries) if longest_first(problem) else MOST_PROGRAMS
    return ProgramGroup(group.batch, group.kv_heads, math.gcd(group.batch * group.kv_heads, min(most, MOST_PROGRAMS)))


def adds(problem: Problem) -> bool:
    """True if more programs share an element of dBias than a group has: groups then add to a float32 sum."""
    found = broadcast_group(problem)
    return reduction(problem) in (DBiasMode.REDUCE, DBiasMode.BATCHED) and found.batch * found.heads > found.programs


def zeroes_ahead(problem: Problem) -> bool:
    """True if persistent programs zero dBias for later groups, not the host all of it.

    The host does if tiles are skipped, or if more programs than a group add to them."""
    found = broadcast_group(problem)
    if reduction(problem) != DBiasMode.ACCUMULATE or problem.mask is not None or not problem.score.band.unlimited:
        return False
    return found.batch * found.heads == found.programs > 1


def sums_sparsely(problem: Problem) -> bool:
    """True if `sparse_sum` zeroes the sums and casts them; a single sum in dBias's dtype is dBias."""
    bias = problem.bias
    if problem.mask is None or bias is None or problem.bias_in_runs or is_batched(problem):
        return False
    if reduction(problem) == DBiasMode.ACCUMULATE:
        return dbias_sums(problem) > 1
    return adds(problem) and bias.dtype != torch.float32


def bias_gradient_allocation(
    problem: Problem, bias: Tensor | None, ahead: bool = False
) -> Callable[..., Tensor] | None:
    """Return the function that allocates, on a ``device=``, what the kernels write, or None.

    That is dBias in its dtype, `dbias_sums` of these one after the other, or with `adds` a float32 sum of its shape;
    for a bias over the keys the sums of each head, float32 (B, H, N), or (1, H, T) of a packed batch. Relative position
    biases use `values.Skewed`. ahead: see `zeroes_ahead`."""
    how = reduction(problem)
    if how in (DBiasMode.NONE, DBiasMode.ADD) or bias is None:
        return None
    if how == DBiasMode.SUM and problem.totals is not None:  # keys outside of sequences get 0
        total = problem.totals[1]
        return lambda device: torch.zeros(1, problem.heads, total, dtype=torch.float32, device=device)
    if how == DBiasMode.SUM:
        size = problem.batch, problem.heads, problem.keys
        return lambda device: torch.empty(size, dtype=torch.float32, device=device)
    # Programs store only the tiles that they visit; tiles that a mask hides from all of them are not summed.
    everywhere = problem.score.band.unlimited and not adds(problem) and problem.mask is None
    stored = everywhere and (how != DBiasMode.ACCUMULATE or ahead)
    fill = torch.empty if stored or sums_sparsely(problem) else torch.zeros
    B, *shape, cols = bias.shape
    sums, width = max(1, dbias_sums(problem)), padded(cols) if pads_gradient(problem) else cols
    dtype = torch.float32 if adds(problem) else bias.dtype
    return lambda device: fill((sums * B, *shape, width), dtype=dtype, device=device)[..., :cols]


def bias_gradient(
    problem: Problem, bias: Tensor, found: Tensor | None, lse: Tensor | None, dlse: Tensor | None
) -> Tensor:
    """Return dBias from what the kernels wrote.

    A bias that is constant along the keys moves the LSE alone: its gradient is dLSE, and 0 in rows that are fully
    masked or outside of sequences.
    """
    if bias_axes(problem) == BiasKind.MATRIX and found is not None:
        if found.shape[0] > bias.shape[0]:  # two sums, rounded once; a sum over an axis has half the speed of a copy
            found = torch.add(*found.chunk(2))
        return found.to(bias.dtype).contiguous()  # rows may be padded
    if found is not None:
        found = found[:, :, None]
    elif lse is None or dlse is None:
        return torch.zeros_like(bias)
    else:
        found = dlse.masked_fill(lse == -torch.inf, 0.0)[..., None]
    if bias.shape[1] not in (1, problem.heads):
        found = found.unflatten(1, (bias.shape[1], -1)).sum(2)
    return found.sum_to_size(bias.shape).to(bias.dtype)
