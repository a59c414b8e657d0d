"""The all_to_all method: rows are traded for heads, so that one local call has all rows of this rank's heads.

On a mesh of two axes it is composed with another method: rows are traded along the second axis, and keys move along
the first. Rank r of R = A B, counted along the second axis first, has the r-th part of the sequence, or the r-th head
and tail. After the trade the B ranks of a mesh row have, each for its own heads, the row's one of A parts, or head and
tail: a call on one axis with fewer heads. So a ring has A steps, and the number of heads limits B alone.

Source: DeepSpeed-Ulysses (arXiv 2309.14509); two axes: unified sequence parallelism (arXiv 2405.07719).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from tilewise.backends import Outputs
from tilewise.distributed.autograd import gathered, heads_of_rows, part_gradients, rows_of_heads, scattered, summed
from tilewise.distributed.layout import Flags, Grads, Ranks, Tensors
from tilewise.distributed.operands import ContextParallelCall, Slot
from tilewise.distributed.plan import Cost, Method, Saved, bytes_of, wide_bytes
from tilewise.operator.autograd import public_lse


class Alone(Method):
    """One local call of all rows of this rank's heads."""

    def forward(self, call: ContextParallelCall, tensors: Tensors, asked: Flags) -> tuple[Outputs, Saved]:
        found = call.outputs(tensors, *call.everything, first_head=_first_head(call), saved_lse=True)
        assert found.lse is not None
        return found._replace(lse=public_lse(found.lse, found.o)), Saved(tensors, found)

    def backward(self, call: ContextParallelCall, saved: Saved, cotangents: Outputs, needs: Flags) -> Grads:
        first = _first_head(call)
        return part_gradients(call, *saved, cotangents, call.everything, needs, first_head=first)

    def cost(self, call: ContextParallelCall, tensors: Tensors) -> Cost:
        return Cost("all_to_all", 0, 0, 0)


@dataclass(frozen=True)
class AllToAll(Method):
    """Trade rows for heads, and run ``inner`` on the call with this rank's heads."""

    inner: Method

    def forward(self, call: ContextParallelCall, tensors: Tensors, asked: Flags) -> tuple[Outputs, Saved]:
        outputs, saved = self.inner.forward(traded_call(call), _traded(call, tensors), asked)
        found = [x if yes else None for x, yes in zip(outputs[:3], asked, strict=True)]
        return Outputs(*(None if x is None else rows_of_heads(x, call.ranks.inside, 1, 2) for x in found)), saved  # type: ignore[arg-type]

    def backward(self, call: ContextParallelCall, saved: Saved, cotangents: Outputs, needs: Flags) -> Grads:
        grads = self.inner.backward(traded_call(call), saved, _of_my_heads(call, cotangents), needs)
        if call.ranks.axes:
            grads = summed(call, grads, call.ranks.axes[0])
        pairs = zip(grads, call.slots, strict=True)
        return [None if grad is None else _gradient(call.ranks.inside, grad, slot) for grad, slot in pairs]

    def saved(self, call: ContextParallelCall, tensors: Tensors, outputs: Outputs) -> Saved:
        return self.inner.saved(traded_call(call), _traded(call, tensors), _of_my_heads(call, outputs))

    def cost(self, call: ContextParallelCall, tensors: Tensors) -> Cost:
        size, (q, _, v) = call.ranks.inside.size, tensors[:3]
        where = f"the {size} of its second axis" if call.ranks.axes else f"{size} ranks"
        for name, heads in (("query heads", call.sizes.H), ("key/value heads", call.sizes.Hkv)):
            if heads % size:
                return Cost("all_to_all", 0, 0, 0, declines=f"the {heads} {name} do not divide by {where}")
        inner = self.inner.cost(traded_call(call), tensors)
        o = q.numel() // q.shape[3] * v.shape[3] * q.element_size()
        forward, backward, held = o * (size - 1) // size, o * (size - 1) // size, 0
        for x, slot in zip(tensors, call.slots, strict=True):
            if slot.heads is not None and slot.split is not None:
                sent = bytes_of(x) * (size - 1) // size
                forward, backward = forward + sent, backward + (sent if x.requires_grad else 0)
                held += bytes_of(x)
            elif slot.split is not None:
                sent = (size - 1) * bytes_of(x)
                forward, backward, held = forward + sent, backward + (size - 1) * wide_bytes(x), held + sent
        more = {"forward_bytes": forward, "backward_bytes": backward, "held_bytes": held}
        return replace(inner, **{name: getattr(inner, name) + x for name, x in more.items()})


def traded_call(call: ContextParallelCall) -> ContextParallelCall:
    """Return the call after the trade: on a mesh of two axes that along the first."""
    if not call.ranks.axes:
        return call
    across, inside = call.ranks.axes
    sizes = call.sizes._replace(H=call.sizes.H // inside.size, Hkv=call.sizes.Hkv // inside.size)
    return replace(call, ranks=across, sizes=sizes)


def _first_head(call: ContextParallelCall) -> int:
    return call.ranks.rank * (call.sizes.H // call.ranks.size)


def _traded(call: ContextParallelCall, tensors: Tensors) -> list[Tensor]:
    """Return the tensors with all rows of this rank's heads."""
    ranks, found = call.ranks.inside, []
    for x, slot in zip(tensors, call.slots, strict=True):
        if slot.heads is None:
            found.append(x if slot.split is None else gathered(x, ranks, slot.split))
        elif slot.split is not None:
            found.append(heads_of_rows(x, ranks, slot.heads, slot.split))
        else:
            count = x.shape[slot.heads] // ranks.size
            found.append(x.narrow(slot.heads, ranks.rank * count, count))
    return found


def _gradient(ranks: Ranks, grad: Tensor, slot: Slot) -> Tensor:
    """Return the gradient of a tensor from that of the traded one."""
    if slot.heads is None:
        return grad if slot.split is None else scattered(grad, ranks, slot.split)
    if slot.split is not None:
        return rows_of_heads(grad, ranks, slot.heads, slot.split)
    shape, count = list(grad.shape), grad.shape[slot.heads]
    shape[slot.heads] *= ranks.size
    whole = grad.new_zeros(shape)
    whole.narrow(slot.heads, ranks.rank * count, count).copy_(grad)
    return whole


def _of_my_heads(call: ContextParallelCall, rows: Outputs) -> Outputs:
    return Outputs(*(None if x is None else heads_of_rows(x, call.ranks.inside, 1, 2) for x in rows))  # type: ignore[arg-type]
