"""The operator ``tilewise::context_parallel``: for a compiler, a call on shards is one operator with a derivative.

The operator's backward has no graph of the forward: it receives the tensors with o and lse, and computes
dS = P ∘ (dP − D) for this rank's queries and keys, or heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tilewise.backends import Outputs, lse_dtype
from tilewise.distributed.autograd import gradients, through
from tilewise.distributed.compiled import Traced, arguments_of, ranks_of, traced
from tilewise.distributed.methods import method_of
from tilewise.distributed.operands import ContextParallelCall
from tilewise.distributed.plan import Method
from tilewise.distributed.prepare import prepare, share_seed
from tilewise.operator.custom_op import autograd_again, operator_of_lists
from tilewise.spec.dropout import threshold
from tilewise.spec.rounding import keeps_low_bits


def _prepared(
    tensors: Sequence[Tensor], call: Traced
) -> tuple[Method, ContextParallelCall, list[Tensor], list[Tensor]]:  # fmt: skip
    """Return the method that all ranks agreed on, the call and its tensors, and those of the operator, of which they
    are views or casts."""
    leaves = [x.detach().requires_grad_(need) for x, need in zip(tensors, call.needs, strict=True)]
    with torch.enable_grad():
        name, sharded, found = prepare(ranks_of(call), arguments_of(call, leaves))
    if call.drawn:
        share_seed(sharded)
    return method_of(name, sharded, found), sharded, found, leaves


def _forward(tensors: Sequence[Tensor], call: str) -> tuple[Tensor, Tensor, Tensor]:
    what = traced(call)
    with autograd_again(), torch.no_grad():
        method, sharded, found, _ = _prepared(tensors, what)
        (o, lse, o_low), _ = method.forward(sharded, found, _has_lse(what), True)
    lse = o.new_empty(0, dtype=lse_dtype(o.dtype)) if lse is None or not _has_lse(what) else lse.contiguous()
    return o.contiguous(), lse, o.new_empty(0, dtype=torch.int16) if o_low is None else o_low.contiguous()


def _has_lse(call: Traced) -> bool:
    return call.return_lse or any(call.needs)


def _forward_fake(tensors: Sequence[Tensor], call: str) -> tuple[Tensor, Tensor, Tensor]:
    what = traced(call)
    q, v = tensors[0], tensors[2]
    o = q.new_empty((*q.shape[:3], v.shape[3]))
    shape = tuple(q.shape[:3]) if _has_lse(what) else (0,)
    low = keeps_low_bits(q.dtype, threshold(what.options.dropout_p))
    return (
        o, q.new_empty(shape, dtype=lse_dtype(q.dtype)), q.new_empty(o.shape if low else (0,), dtype=torch.int16)
    )  # fmt: skip


def _backward(
    do: Tensor | None, dlse: Tensor | None, tensors: Sequence[Tensor], o: Tensor, lse: Tensor, o_low: Tensor, call: str
) -> list[Tensor]:
    with autograd_again(), torch.no_grad():
        method, sharded, found, leaves = _prepared(tensors, traced(call))
        saved = method.saved(sharded, found, Outputs(o, lse, o_low if o_low.shape == o.shape else None))
        grads = gradients(method, sharded, saved, do, dlse, [x.requires_grad for x in found])
        made = [n for n, grad in enumerate(grads) if grad is not None]
        mine = through([found[n] for n in made], [grads[n].to(found[n].dtype) for n in made], leaves)  # type: ignore[union-attr]
    return [x.new_empty(0) if grad is None else grad.contiguous() for x, grad in zip(tensors, mine, strict=True)]


def _backward_fake(
    do: Tensor | None, dlse: Tensor | None, tensors: Sequence[Tensor], o: Tensor, lse: Tensor, o_low: Tensor, call: str
) -> list[Tensor]:
    needs = traced(call).needs
    return [x.new_empty(x.shape if need else (0,)) for x, need in zip(tensors, needs, strict=True)]


def _setup(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor, Tensor]) -> None:
    tensors, ctx.call = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, do: Tensor | None, dlse: Tensor | None, _: None) -> tuple[list[Tensor | None], None]:
    *tensors, o, lse, o_low = ctx.saved_tensors
    needs = traced(ctx.call).needs
    if do is None and dlse is None:
        return [None] * len(tensors), None
    grads = torch.ops.tilewise.context_parallel_backward(do, dlse, tensors, o, lse, o_low, ctx.call)
    return [grad if need else None for grad, need in zip(grads, needs, strict=True)], None


operator_of_lists("context_parallel", _forward, _forward_fake, setup=_setup, backward=_differentiate)
operator_of_lists("context_parallel_backward", _backward, _backward_fake)
