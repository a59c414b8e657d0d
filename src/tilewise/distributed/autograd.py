"""Collectives with a first derivative, and methods with a backward of their own: gathered head groups, and the ring.

Gradients of 16 bits are summed over ranks in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from tilewise.backends import Needs, Outputs
from tilewise.bias.terms import wide
from tilewise.distributed.collectives import all_to_all, gathered, scattered
from tilewise.distributed.layout import Chunk, Ranks, shards_of, whole_of
from tilewise.distributed.operands import ShardedCall
from tilewise.operator.dispatch import backward_of
from tilewise.spec.bias_components import DIFFERENTIABLE
from tilewise.spec.score import ScoreNumbers


def _to_heads(x: Tensor, ranks: Ranks, heads: int, rows: int) -> Tensor:
    stacked = x.unflatten(heads, (ranks.size, x.shape[heads] // ranks.size)).movedim(heads, 0)
    return whole_of(all_to_all(stacked, ranks), rows, ranks.split)


def _to_rows(x: Tensor, ranks: Ranks, heads: int, rows: int) -> Tensor:
    return all_to_all(shards_of(x, rows, ranks.split), ranks).movedim(0, heads).flatten(heads, heads + 1)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, dim: int) -> Tensor:
        ctx.where = ranks, dim
        return gathered(x, ranks, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return scattered(grad, *ctx.where), None, None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        total = wide(grad).clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.ranks.group)
        return total.to(grad.dtype), None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, heads: int, rows: int, to_heads: bool) -> Tensor:
        ctx.where, ctx.to_heads = (ranks, heads, rows), to_heads
        return (_to_heads if to_heads else _to_rows)(x, ranks, heads, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (_to_rows if ctx.to_heads else _to_heads)(grad, *ctx.where), None, None, None, None


def gather(x: Tensor, ranks: Ranks, dim: int) -> Tensor:
    """Return the whole tensor, gathered from shards along ``dim``. Backward: reduce-scatter of the gradient (sum)."""
    found: Tensor = _Gather.apply(x, ranks, dim)
    return found


def summed(x: Tensor, ranks: Ranks) -> Tensor:
    """Return ``x``, which is equal on all ranks; its gradient is the sum over ranks."""
    found: Tensor = _Summed.apply(x, ranks)
    return found


def to_heads(x: Tensor, ranks: Ranks, heads: int, rows: int) -> Tensor:
    """Trade rows for heads: from a shard along axis ``rows`` with all heads to all rows of this rank's heads."""
    found: Tensor = _Exchange.apply(x, ranks, heads, rows, True)
    return found


def to_rows(x: Tensor, ranks: Ranks, heads: int, rows: int) -> Tensor:
    """Trade heads for rows: the inverse of `to_heads`."""
    found: Tensor = _Exchange.apply(x, ranks, heads, rows, False)
    return found


# --- methods with a backward of their own ---


class _Parts(torch.autograd.Function):
    """The function ``(*tensors, call, method) -> (o, lse, o_low)``, with tensors in the order of ``call.slots``."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor | None, ...]:
        *tensors, call, method = arguments
        outputs = method.forward(call, tensors)
        ctx.call, ctx.method = call, method
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *outputs)
        return (*outputs,)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        *tensors, o, lse, o_low = ctx.saved_tensors
        needs = ctx.needs_input_grad[:-2]
        # resolve_neg: as in tilewise.operator.autograd
        do, dlse = torch.zeros_like(o) if do is None else do.resolve_neg(), None if dlse is None else dlse.resolve_neg()
        cotangents = Outputs(do, dlse)
        found = ctx.method.backward(ctx.call, tensors, Outputs(o, lse, o_low), cotangents, needs, part_gradients)
        return *found, None, None


def by_parts(call: ShardedCall, tensors: Sequence[Tensor], method: Any) -> Outputs:
    """Run ``method``, `ring` or `head_groups.Gathered`; autograd calls its backward."""
    return Outputs(*_Parts.apply(*tensors, call, method))


def part_gradients(
    call: ShardedCall, tensors: Sequence[Tensor], at: tuple[Chunk, Chunk], outputs: Outputs, cotangents: Outputs,
    needs: Sequence[bool], *, sink: bool = False, first_head: int = 0,
) -> list[Tensor | None]:  # fmt: skip
    """Return what some queries and some keys add to the gradients of ``tensors``, which are cut to these.

    dS = P ∘ (dP − D) holds for a part of a row with the LSE and o of the whole row, ``outputs``: this is the operator's
    backward with them. Autograd differentiates the step from a bias term's tensors to its bias components."""
    leaves = [x.detach().requires_grad_(need) for x, need in zip(tensors, needs, strict=True)]
    with torch.enable_grad():
        local = call.local(leaves, *at, sink=sink, first_head=first_head)
    inputs = local.inputs
    named = {name: getattr(inputs, name) for name in ("q", "k", "v", "bias", "sink")}
    if inputs.parts is not None:
        named |= {name: getattr(inputs.parts, name) for name in DIFFERENTIABLE}
    asked = {name: x for name, x in named.items() if x is not None and x.requires_grad}
    if not asked:
        return [None] * len(leaves)
    wanted = Needs(*(name in asked for name in Needs._fields))
    terms = ScoreNumbers.of(local.score, local.deterministic, local.backend)
    grads = backward_of(inputs, outputs, cotangents, terms, wanted)(inputs, outputs, cotangents)
    made, given = list(asked.values()), [getattr(grads, name) for name in asked]
    targets = [x for x in leaves if x.requires_grad]
    found = iter(torch.autograd.grad(made, targets, given, allow_unused=True))
    return [next(found) if x.requires_grad else None for x in leaves]
