"""Collectives of one tensor, with a first derivative, and methods with a backward of their own.

Gradients of 16 bits are summed over ranks in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from tilewise.backends import Needs, Outputs
from tilewise.bias.terms import wide
from tilewise.distributed.layout import Chunk, Flags, Grads, Ranks, Tensors
from tilewise.distributed.operands import ContextParallelCall
from tilewise.distributed.plan import Method, Saved
from tilewise.operator.dispatch import backward_of
from tilewise.spec.score import ScoreNumbers

# PyTorch has renamed two of its collectives.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def as_bytes(x: Tensor) -> Tensor:
    """Return bool and 16-bit integer tensors, which not every transport supports, as bytes; others unchanged."""
    return x.view(torch.uint8) if x.dtype in (torch.bool, torch.int16) else x


def gathered(x: Tensor, ranks: Ranks, dim: int) -> Tensor:
    """Return the whole tensor, gathered from the ranks' shards along ``dim``."""
    sent = as_bytes(x.contiguous())
    stacked = sent.new_empty((ranks.size * sent.shape[0], *sent.shape[1:]))
    all_gather(stacked, sent, group=ranks.group)
    return ranks.split.whole_of(stacked.view(x.dtype).unflatten(0, (ranks.size, -1)), dim)


def scattered(x: Tensor, ranks: Ranks, dim: int) -> Tensor:
    """Return this rank's shard of the sum over ranks; 16-bit numbers are summed in float32."""
    sent = ranks.split.shards_of(wide(x), dim).contiguous()
    found = sent.new_empty(sent.shape[1:])
    _reduce_scatter(found, sent.flatten(0, 1), group=ranks.group)
    return found.to(x.dtype)


def all_to_all(stacked: Tensor, ranks: Ranks) -> Tensor:
    """Return what every rank has stacked for this one; ``stacked`` and the result are (ranks, ...)."""
    sent = as_bytes(stacked.contiguous())
    found = torch.empty_like(sent)
    dist.all_to_all_single(found, sent, group=ranks.group)
    return found.view(stacked.dtype)


def heads_of_rows(x: Tensor, ranks: Ranks, heads: int, rows: int) -> Tensor:
    """Trade rows for heads: from a shard along axis ``rows`` with all heads to all rows of this rank's heads."""
    stacked = x.unflatten(heads, (ranks.size, x.shape[heads] // ranks.size)).movedim(heads, 0)
    return ranks.split.whole_of(all_to_all(stacked, ranks), rows)


def rows_of_heads(x: Tensor, ranks: Ranks, heads: int, rows: int) -> Tensor:
    """Trade heads for rows: the inverse of `heads_of_rows`."""
    return all_to_all(ranks.split.shards_of(x, rows), ranks).movedim(0, heads).flatten(heads, heads + 1)


def summed(call: ContextParallelCall, grads: Grads, ranks: Ranks) -> Grads:
    """Return the gradients of the call's tensors, summed over ranks if the tensor is equal on all."""
    for n, slot in enumerate(call.slots):
        grad = grads[n]
        if slot.replicated and grad is not None:
            total = wide(grad).clone(memory_format=torch.contiguous_format)
            dist.all_reduce(total, group=ranks.group)
            grads[n] = total.to(grad.dtype)
    return grads


# --- with a first derivative ---


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Callable[..., Tensor], back: Callable[..., Tensor], *where: Any) -> Tensor:
        ctx.back, ctx.where = back, where
        return there(x, *where)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.back(grad, *ctx.where), None, None, *(None for _ in ctx.where)


def gather(x: Tensor, ranks: Ranks, dim: int) -> Tensor:
    """Return the whole tensor, gathered from shards along ``dim``. Backward: reduce-scatter of the gradient (sum)."""
    found: Tensor = _Linear.apply(x, gathered, scattered, ranks, dim)
    return found


def to_heads(x: Tensor, ranks: Ranks, heads: int, rows: int) -> Tensor:
    """Return `heads_of_rows`. Backward: the inverse trade."""
    found: Tensor = _Linear.apply(x, heads_of_rows, rows_of_heads, ranks, heads, rows)
    return found


# --- methods ---


class _Run(torch.autograd.Function):
    """The function ``(*tensors, call, method, return_lse) -> (o, lse)``."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor | None, Tensor | None]:
        *tensors, ctx.call, ctx.method, return_lse = arguments
        outputs, saved = ctx.method.forward(ctx.call, tensors, (True, return_lse, False))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*saved.tensors, *saved.outputs[:3])
        return outputs.o, outputs.lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        *tensors, o, lse, o_low = ctx.saved_tensors
        saved = Saved(tensors, Outputs(o, lse, o_low))
        return *gradients(ctx.method, ctx.call, saved, do, dlse, ctx.needs_input_grad[:-3]), None, None, None


def run(method: Method, call: ContextParallelCall, tensors: Tensors, return_lse: bool) -> tuple[Tensor, Tensor]:
    """Return differentiable ``(o, lse)`` of this rank's rows; without ``return_lse`` lse is undefined."""
    found: tuple[Tensor, Tensor] = _Run.apply(*tensors, call, method, return_lse)
    return found


def gradients(
    method: Method, call: ContextParallelCall, saved: Saved, do: Tensor | None, dlse: Tensor | None,
    needs: Flags,
) -> Grads:  # fmt: skip
    """Return the gradients of the call's tensors, without an autograd graph."""
    # resolve_neg: as in tilewise.operator.autograd
    o, sizes = saved.outputs.o, call.sizes
    do = o.new_zeros((sizes.B, sizes.H, call.queries, o.shape[3])) if do is None else do.resolve_neg()
    cotangents = Outputs(do, None if dlse is None else dlse.resolve_neg())
    grads = method.backward(call, saved, cotangents, needs)
    return summed(call, grads, call.ranks.inside)


def part_gradients(
    call: ContextParallelCall, tensors: Tensors, outputs: Outputs, cotangents: Outputs,
    at: tuple[Chunk, Chunk], needs: Flags, *, sink: bool = True, first_head: int = 0,
) -> Grads:  # fmt: skip
    """Return what the queries and keys ``at`` add to the gradients of ``tensors``, cut to these.

    dS = P ∘ (dP − D) holds for a part of a row with the LSE and o of the whole row, ``outputs``: this is the operator's
    backward with them. Autograd differentiates the step from a bias term's tensors to its bias components."""
    leaves = [x.detach().requires_grad_(need) for x, need in zip(call.cut(tensors, *at), needs, strict=True)]
    with torch.enable_grad():
        local = call.local(leaves, *at, sink=sink, first_head=first_head)
    inputs = local.inputs
    named = zip(Needs._fields, inputs.differentiable(), strict=True)
    asked = {name: x for name, x in named if x is not None and x.requires_grad}
    if not asked:
        return [None] * len(leaves)
    wanted = Needs(*(name in asked for name in Needs._fields))
    terms = ScoreNumbers.of(local.score, local.deterministic, local.backend)
    grads = backward_of(inputs, outputs, cotangents, terms, wanted)(inputs, outputs, cotangents)
    return through(list(asked.values()), [getattr(grads, name) for name in asked], leaves)


def through(made: list[Tensor], grads: list[Tensor], leaves: list[Tensor]) -> Grads:
    """Return the gradients of ``leaves`` from those of tensors that are made of them."""
    found = iter(torch.autograd.grad(made, [x for x in leaves if x.requires_grad], grads, allow_unused=True))
    return [next(found) if x.requires_grad else None for x in leaves]
