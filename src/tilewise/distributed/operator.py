"""The operator ``tilewise::context_parallel``: for a compiler, a call on shards is one operator with a derivative.

Eager calls use autograd's graph of collectives and local calls. The operator's backward has no graph: it receives the
tensors with o and lse, and computes dS = P ∘ (dP − D) for this rank's queries and keys, or heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tilewise.backends import Outputs, lse_dtype
from tilewise.bias.terms import wide
from tilewise.distributed import ring
from tilewise.distributed.api import prepare
from tilewise.distributed.autograd import part_gradients, scattered, to_heads, to_rows
from tilewise.distributed.compiled import Description, described, given_by, ranks_of
from tilewise.distributed.head_groups import Gathered, groups_of
from tilewise.distributed.layout import Chunk
from tilewise.distributed.methods import of_heads, outputs_of
from tilewise.distributed.operands import CallOptions, ShardedCall
from tilewise.operator.custom_op import autograd_again, operator_of_lists
from tilewise.spec.dropout import threshold
from tilewise.spec.rounding import keeps_low_bits

Grads = list[Tensor | None]
Prepared = tuple[str, ShardedCall, list[Tensor]]


def _prepared(tensors: Sequence[Tensor], call: Description) -> Prepared:
    """Return the method that all ranks agreed on, the call and its tensors."""
    leaves = [x.detach().requires_grad_(need) for x, need in zip(tensors, call.needs, strict=True)]
    if call.drawn and call.seed is not None:  # a copy, as an operator must not write to its arguments
        leaves[call.seed] = tensors[call.seed].clone()
    qkv, given, options = given_by(call, leaves)
    how: Any = {"method": call.method, "validate": call.validate, "return_lse": call.return_lse}
    with torch.enable_grad():  # else views of tensors that require grad would not require it
        method, sharded, found = prepare(ranks_of(call), qkv, given, options, {}, **how)
    if call.drawn and sharded.seed is not None:
        group = sharded.ranks.group
        dist.broadcast(sharded.seed, dist.get_global_rank(group, 0), group=group)
    return method, sharded, [x.detach().requires_grad_(x.requires_grad) for x in found]


def _forward(tensors: Sequence[Tensor], call: str) -> tuple[Tensor, Tensor, Tensor]:
    what = described(call)
    with autograd_again(), torch.no_grad():
        o, lse, o_low = outputs_of(*_prepared(tensors, what), _has_lse(what))
    assert lse is not None
    return (
        o.contiguous(), lse.contiguous() if _has_lse(what) else lse.new_empty(0),
        o.new_empty(0, dtype=torch.int16) if o_low is None else o_low.contiguous(),
    )  # fmt: skip


def _has_lse(call: Description) -> bool:
    return call.return_lse or any(call.needs)


def _forward_fake(tensors: Sequence[Tensor], call: str) -> tuple[Tensor, Tensor, Tensor]:
    what = described(call)
    q, v = tensors[0], tensors[2]
    o = q.new_empty((*q.shape[:3], v.shape[3]))
    shape = tuple(q.shape[:3]) if _has_lse(what) else (0,)
    low = keeps_low_bits(q.dtype, threshold(CallOptions(*what.options).dropout_p))
    return (
        o, q.new_empty(shape, dtype=lse_dtype(q.dtype)), q.new_empty(o.shape if low else (0,), dtype=torch.int16)
    )  # fmt: skip


def _backward(
    do: Tensor | None, dlse: Tensor | None, tensors: Sequence[Tensor], o: Tensor, lse: Tensor, o_low: Tensor, call: str
) -> list[Tensor]:
    what = described(call)
    do = torch.zeros_like(o) if do is None else do.resolve_neg()
    cotangents = Outputs(do, None if dlse is None else dlse.resolve_neg())
    with autograd_again(), torch.no_grad():
        method, sharded, inputs = _prepared(tensors, what)
        outputs = Outputs(o, lse, o_low if o_low.shape == o.shape else None)
        grads = _gradients(method, sharded, inputs, outputs, cotangents)
    # The call's tensors may be in another order than the operator's.
    places = _places(what)
    found: list[Tensor] = [x.new_empty(0) for x in tensors]
    for n, grad in enumerate(grads):
        if grad is not None:
            found[places[n]] = grad.reshape(tensors[places[n]].shape).to(tensors[places[n]].dtype).contiguous()
    return found


def _backward_fake(
    do: Tensor | None, dlse: Tensor | None, tensors: Sequence[Tensor], o: Tensor, lse: Tensor, o_low: Tensor, call: str
) -> list[Tensor]:
    needs = described(call).needs
    return [x.new_empty(x.shape if need else (0,)) for x, need in zip(tensors, needs, strict=True)]


def _places(call: Description) -> list[int]:
    """Return the index in the operator's list of each of the call's tensors, which exclude buckets and starts."""
    found = [0, 1, 2]
    for name, what in call.bias:
        if name == "":
            found.append(what)
        else:
            found += [x for field, kind, x in what if kind == "tensor" and field in _OPERANDS]
    return found + [x for x in (call.mask, call.sink) if x is not None]


_OPERANDS = ("values", "table", "slopes", "u", "w")


def _setup(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor, Tensor]) -> None:
    tensors, ctx.call = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, do: Tensor | None, dlse: Tensor | None, _: None) -> tuple[list[Tensor | None], None]:
    *tensors, o, lse, o_low = ctx.saved_tensors
    needs = described(ctx.call).needs
    if do is None and dlse is None:
        return [None] * len(tensors), None
    grads = torch.ops.tilewise.context_parallel_backward(do, dlse, tensors, o, lse, o_low, ctx.call)
    return [grad if need else None for grad, need in zip(grads, needs, strict=True)], None


operator_of_lists("context_parallel", _forward, _forward_fake, setup=_setup, backward=_differentiate)
operator_of_lists("context_parallel_backward", _backward, _backward_fake)


# --- gradients without an autograd graph ---


def _gradients(
    method: str, call: ShardedCall, tensors: list[Tensor], outputs: Outputs, cotangents: Outputs
) -> Grads:  # fmt: skip
    """Return the gradients of the call's tensors; those of replicated tensors are summed over ranks."""
    needs = [x.requires_grad for x in tensors]
    grads = _METHODS[method](call, tensors, outputs, cotangents, needs)
    for n, (slot, grad) in enumerate(zip(call.slots, grads, strict=True)):
        if slot.replicated and grad is not None:
            total = wide(grad).clone(memory_format=torch.contiguous_format)
            dist.all_reduce(total, group=call.ranks.group)
            grads[n] = total
    return grads


def _ring(call: ShardedCall, tensors: list[Tensor], outputs: Outputs, cotangents: Outputs, needs: list[bool]) -> Grads:
    return ring.backward(call, tensors, outputs, cotangents, needs, part_gradients)


def _all_gather(
    call: ShardedCall, tensors: list[Tensor], outputs: Outputs, cotangents: Outputs, needs: list[bool]
) -> Grads:
    method = Gathered(groups_of(call, tensors))
    return method.backward(call, tensors, outputs, cotangents, needs, part_gradients)


def _all_to_all(
    call: ShardedCall, tensors: list[Tensor], outputs: Outputs, cotangents: Outputs, needs: list[bool]
) -> Grads:
    local = [of_heads(call, x, slot) for x, slot in zip(tensors, call.slots, strict=True)]
    everything = Chunk(0, 0, call.sizes.M), Chunk(0, 0, call.sizes.N)
    rows = [
        Outputs(*(None if x is None else to_heads(x, call.ranks, 1, 2) for x in y))  # type: ignore[arg-type]
        for y in (outputs, cotangents)
    ]
    first = call.ranks.rank * (call.sizes.H // call.ranks.size)
    grads = part_gradients(call, local, everything, rows[0], rows[1], needs, sink=True, first_head=first)
    found: Grads = []
    for x, slot, grad in zip(tensors, call.slots, grads, strict=True):
        split = slot.rows if slot.rows is not None else slot.keys
        if grad is None or (split is None and slot.heads is None):
            found.append(grad)
        elif split is None:
            found.append(_of_my_heads(call, x, slot.heads, grad))
        elif slot.heads is None:
            found.append(scattered(grad, call.ranks, split))
        else:
            found.append(to_rows(grad, call.ranks, slot.heads, split))
    return found


def _of_my_heads(call: ShardedCall, x: Tensor, heads: int | None, grad: Tensor) -> Tensor:
    assert heads is not None
    whole = wide(grad).new_zeros(x.shape)
    whole.narrow(heads, call.ranks.rank * grad.shape[heads], grad.shape[heads]).copy_(grad)
    return whole


_METHODS: dict[str, Callable[[ShardedCall, list[Tensor], Outputs, Outputs, list[bool]], Grads]] = {
    "all_gather": _all_gather, "ring": _ring, "all_to_all": _all_to_all,
}  # fmt: skip
