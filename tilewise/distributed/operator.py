"""``tilewise::context_parallel``, which a compiler sees as one operator with a derivative, as it sees attention.

Eager calls are autograd's own graph of collectives and local calls. An operator has no graph: its backward gets q, k, v
and the rest with o and lse, and computes dS = P ∘ (dP − D) of what this rank's queries and keys, or heads, meet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tilewise.backends import Outputs, lse_dtype
from tilewise.bias.terms import wide
from tilewise.distributed import ring
from tilewise.distributed.api import prepare
from tilewise.distributed.autograd import _scattered, gather, part_gradients, to_heads, to_rows
from tilewise.distributed.compiled import Description, described, given_by, ranks_of
from tilewise.distributed.layout import Chunk
from tilewise.distributed.methods import _of_heads, attend
from tilewise.distributed.operands import ShardedCall

Grads = list[Tensor | None]
Prepared = tuple[str, ShardedCall, list[Tensor]]


def _prepared(tensors: Sequence[Tensor], call: Description) -> Prepared:
    """The method, agreed on by all ranks, and what it computes."""
    leaves = [x.detach().requires_grad_(need) for x, need in zip(tensors, call.needs, strict=True)]
    qkv, given, options = given_by(call, leaves)
    how: Any = {"method": call.method, "validate": call.validate, "return_lse": call.return_lse}
    with torch.enable_grad():  # else views of what requires grad would not
        method, sharded, found = prepare(ranks_of(call), qkv, given, options, {}, **how)
    return method, sharded, [x.detach().requires_grad_(x.requires_grad) for x in found]


@contextmanager
def _autograd_again() -> Iterator[None]:
    """An operator runs below autograd, which then records nothing whatever the grad mode says; but what a bias term's
    tensors are made into is differentiated by it, within a backward."""
    with torch._C._PreserveDispatchKeyGuard():
        torch._C._dispatch_tls_set_dispatch_key_excluded(torch._C.DispatchKey.AutogradFunctionality, False)
        yield


@torch.library.custom_op("tilewise::context_parallel", mutates_args=())
def _forward(tensors: Sequence[Tensor], call: str) -> tuple[Tensor, Tensor]:
    what = described(call)
    with _autograd_again(), torch.no_grad():
        o, lse = attend(*_prepared(tensors, what), what.return_lse or any(what.needs))
    return o.contiguous(), lse.contiguous()


@_forward.register_fake
def _(tensors: Sequence[Tensor], call: str) -> tuple[Tensor, Tensor]:
    what = described(call)
    q, v = tensors[0], tensors[2]
    o = q.new_empty((*q.shape[:3], v.shape[3]))
    shape = tuple(q.shape[:3]) if what.return_lse or any(what.needs) else (0,)
    return o, q.new_empty(shape, dtype=lse_dtype(q.dtype))


@torch.library.custom_op("tilewise::context_parallel_backward", mutates_args=())
def _backward(
    do: Tensor | None, dlse: Tensor | None, tensors: Sequence[Tensor], o: Tensor, lse: Tensor, call: str
) -> list[Tensor]:
    what = described(call)
    do = torch.zeros_like(o) if do is None else do.resolve_neg()
    cotangents = Outputs(do, None if dlse is None else dlse.resolve_neg())
    with _autograd_again(), torch.no_grad():
        method, sharded, inputs = _prepared(tensors, what)
        grads = _gradients(method, sharded, inputs, Outputs(o, lse), cotangents)
    # The tensors of the call may come in another order than it was given them.
    places = _places(what)
    found: list[Tensor] = [x.new_empty(0) for x in tensors]
    for n, grad in enumerate(grads):
        if grad is not None:
            found[places[n]] = grad.reshape(tensors[places[n]].shape).to(tensors[places[n]].dtype).contiguous()
    return found


@_backward.register_fake
def _(
    do: Tensor | None, dlse: Tensor | None, tensors: Sequence[Tensor], o: Tensor, lse: Tensor, call: str
) -> list[Tensor]:
    needs = described(call).needs
    return [x.new_empty(x.shape if need else (0,)) for x, need in zip(tensors, needs, strict=True)]


def _places(call: Description) -> list[int]:
    """Which of the operator's tensors each of the call's is: buckets and starts are no operands of their own."""
    found = [0, 1, 2]
    for name, what in call.bias:
        if name == "":
            found.append(what)
        else:
            found += [x for field, kind, x in what if kind == "tensor" and field in _OPERANDS]
    return found + [x for x in (call.mask, call.sink) if x is not None]


_OPERANDS = ("values", "table", "slopes", "u", "w")


def _setup(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    tensors, ctx.call = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[list[Tensor | None], None]:
    *tensors, o, lse = ctx.saved_tensors
    needs = described(ctx.call).needs
    if do is None and dlse is None:
        return [None] * len(tensors), None
    grads = torch.ops.tilewise.context_parallel_backward(do, dlse, tensors, o, lse, ctx.call)
    return [grad if need else None for grad, need in zip(grads, needs, strict=True)], None


_forward.register_autograd(_differentiate, setup_context=_setup)


# --- gradients, without a graph ---


def _gradients(
    method: str, call: ShardedCall, tensors: list[Tensor], outputs: Outputs, cotangents: Outputs
) -> Grads:  # fmt: skip
    """Of the call's tensors; those of what is the same on every rank are summed over ranks."""
    needs = [x.requires_grad for x in tensors]
    grads = _METHODS[method](call, tensors, outputs, cotangents, needs)
    if call.sink is not None and needs[call.sink]:
        grads[call.sink] = ring._sink_gradient(tensors[call.sink], outputs, cotangents)
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
    asked = [need and n != call.sink for n, need in enumerate(needs)]
    keys = Chunk(0, 0, call.sizes.N)
    pairs = zip(tensors, call.slots, strict=True)
    whole = [x if slot.keys is None else gather(x, call.ranks, slot.keys) for x, slot in pairs]
    totals = [call.accumulator(n, x) if need else None for n, (x, need) in enumerate(zip(whole, asked, strict=True))]
    for query in call.ranks.chunks(call.queries):
        rows = [ring._rows(x, query, call.ranks.split.pieces) for x in (outputs, cotangents)]
        grads = part_gradients(call, call.cut(whole, query, keys), (query, keys), *rows, asked)
        for n, grad in enumerate(grads):
            total = totals[n]
            if grad is not None and total is not None:
                call.cut_one(n, total, query, keys).add_(grad)
    return [
        total if total is None or slot.keys is None else _scattered(total, call.ranks, slot.keys)
        for total, slot in zip(totals, call.slots, strict=True)
    ]


def _all_to_all(
    call: ShardedCall, tensors: list[Tensor], outputs: Outputs, cotangents: Outputs, needs: list[bool]
) -> Grads:
    asked = [need and n != call.sink for n, need in enumerate(needs)]
    local = [_of_heads(call, x, slot) for x, slot in zip(tensors, call.slots, strict=True)]
    everything = Chunk(0, 0, call.sizes.M), Chunk(0, 0, call.sizes.N)
    rows = [
        Outputs(*(None if x is None else to_heads(x, call.ranks, 1, 2) for x in both)) for both in (outputs, cotangents)
    ]
    grads = part_gradients(call, local, everything, *rows, asked)
    found: Grads = []
    for n, (x, slot, grad) in enumerate(zip(tensors, call.slots, grads, strict=True)):
        split = slot.rows if slot.rows is not None else slot.keys
        if grad is None or not asked[n]:
            found.append(None)
        elif split is None:
            found.append(grad if slot.heads is None else _of_my_heads(call, x, slot.heads, grad))
        else:
            found.append(
                _scattered(grad, call.ranks, split) if slot.heads is None
                else to_rows(grad, call.ranks, slot.heads, split)
            )  # fmt: skip
    return found


def _of_my_heads(call: ShardedCall, x: Tensor, heads: int, grad: Tensor) -> Tensor:
    whole = wide(grad).new_zeros(x.shape)
    whole.narrow(heads, call.ranks.rank * grad.shape[heads], grad.shape[heads]).copy_(grad)
    return whole


_METHODS: dict[str, Callable[[ShardedCall, list[Tensor], Outputs, Outputs, list[bool]], Grads]] = {
    "all_gather": _all_gather, "ring": _ring, "all_to_all": _all_to_all,
}  # fmt: skip
