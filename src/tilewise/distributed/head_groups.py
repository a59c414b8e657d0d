"""The all_gather method in groups of heads: one group is gathered while the one before is computed.

In a packed batch only keys of sequences on several ranks are gathered, `documents.SeenKeys`; a rank's own sequences
are computed first, with its keys in place.

Heads are independent, so groups need no merge, and results equal those of all heads at once. Beside the keys in use
a rank holds those of all ranks for two more groups, and likewise gradients. The backward gathers again instead of
keeping what the forward gathered.

Gradients of keys and values are sent to their ranks in 16 bits, as kernels write them, and summed there in float32,
in rank order.

On a GPU collectives run in a stream of the process group. A group's collectives are issued before the kernels of the
group before, which would otherwise occupy all SMs. Source: docs/notebook/distributed.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tilewise.backends import Outputs, empty_output, lse_dtype
from tilewise.bias import LowRankBias
from tilewise.distributed.autograd import all_gather, all_to_all, as_bytes, part_gradients, scattered
from tilewise.distributed.layout import Chunk, Flags, Grads, Tensors
from tilewise.distributed.operands import ContextParallelCall
from tilewise.distributed.plan import Cost, Method, Saved, bytes_of, hides, moving_bytes, wide_bytes

MOST_GROUPS = 16
AHEAD = 2  # groups
LATE = 2**24  # bytes that a rank sends: about 0.1 ms with NVLink on Hopper, less than the host takes


def groups_of(call: ContextParallelCall, tensors: Tensors) -> int:
    """Return the number of groups, equal on all ranks: a divisor of the key/value heads. It is 1 if a matrix that heads
    share requires grad, as summing its gradient over groups would take a second matrix."""
    shared = [x for x, slot in zip(tensors, call.slots, strict=True) if slot.columns is not None and slot.heads is None]
    if any(x.requires_grad for x in shared):
        return 1
    heads, flops, least = call.sizes.Hkv, sum(call.flops(tensors)) // call.ranks.size, call.group_flops
    fit = [n for n in range(1, min(heads, MOST_GROUPS) + 1) if heads % n == 0 and flops >= n * least]
    return max(fit, default=1)


class Group(NamedTuple):
    """Group ``n`` of ``of`` equal groups of heads."""

    n: int
    of: int

    def part(self, x: Tensor, heads: int | None) -> Tensor:
        """Return a view of the group's heads of a tensor."""
        if heads is None or self.of == 1:
            return x
        size = x.shape[heads] // self.of
        return x.narrow(heads, self.n * size, size)


class _Coming(NamedTuple):
    """A tensor that is being gathered with the keys; buffers are kept until the collective is complete."""

    part: Tensor  # this rank's
    work: Any = None  # None: there is nothing to send
    sent: Tensor | None = None
    stacked: Tensor | None = None  # received


class _Keys:
    """The gathered tensors that move with the keys, group by group, with collectives issued `AHEAD` groups early."""

    def __init__(self, call: ContextParallelCall, tensors: Tensors, groups: int) -> None:
        self.call, self.tensors, self.groups = call, tensors, groups
        self.by_heads = [n for n in call.moving if call.slots[n].heads is not None]
        # Key biases and masks without heads: small, and equal for all groups.
        found = {n: self._sent(n, tensors[n], async_op=False) for n in call.moving if n not in self.by_heads}
        self.shared = {n: self._whole(n, coming) for n, coming in found.items()}
        self.coming: list[list[_Coming]] = []
        # With little to send, the rank's own sequences start first.
        moving = sum(bytes_of(tensors[n]) for n in self.by_heads)
        self.late = call.documents is not None and groups == 1 and call.ranks.split.sent_share * moving <= LATE
        for n in range(0 if self.late else min(AHEAD, groups)):
            self._issue(Group(n, groups))

    def _sent(self, n: int, part: Tensor, async_op: bool) -> _Coming:
        sent = self.call.seen.leaving(part, self.call.moving[n])
        if sent is None:
            return _Coming(part)
        sent = as_bytes(sent.contiguous())
        stacked = sent.new_empty((self.call.ranks.size * sent.shape[0], *sent.shape[1:]))
        work = all_gather(stacked, sent, group=self.call.ranks.group, async_op=async_op)
        return _Coming(part, work, sent, stacked)

    def _whole(self, n: int, coming: _Coming) -> Tensor:
        stacked = None if coming.stacked is None else coming.stacked.view(coming.part.dtype)
        return self.call.seen.together(coming.part, stacked, self.call.moving[n])

    def _issue(self, group: Group) -> None:
        parts = [(n, group.part(self.tensors[n], self.call.slots[n].heads)) for n in self.by_heads]
        self.coming.append([self._sent(n, part, async_op=True) for n, part in parts])

    def __iter__(self) -> Iterator[tuple[Group, Iterator[tuple[list[Chunk], list[Tensor]]]]]:
        """Yield each group with its `_parts`, which must be consumed before the next group."""
        for n in range(self.groups):
            group = Group(n, self.groups)
            yield group, self._parts(group)

    def _parts(self, group: Group) -> Iterator[tuple[list[Chunk], list[Tensor]]]:
        """Yield chunks of queries, and the call's tensors with the group's heads and the keys for these chunks."""
        call = self.call
        found = [group.part(x, slot.heads) for x, slot in zip(self.tensors, call.slots, strict=True)]
        here = [query for query in call.row_chunks if query.is_local]
        rest = [query for query in call.row_chunks if not query.is_local]
        if here:
            yield here, list(found)
        if self.late:
            self._issue(group)
        for at, coming in zip(self.by_heads, self.coming.pop(0), strict=True):
            if coming.work is not None:
                coming.work.wait()
            if rest:
                found[at] = self._whole(at, coming)
        del coming
        if group.n + AHEAD < self.groups:
            self._issue(Group(group.n + AHEAD, self.groups))
        if rest:
            yield rest, [self.shared.get(at, x) for at, x in enumerate(found)]


class _Gradients:
    """Gradients of tensors that move with the keys, sent to the keys' ranks group by group."""

    def __init__(self, call: ContextParallelCall, moving: Sequence[int], totals: Grads) -> None:
        self.call, self.moving, self.totals = call, moving, totals
        self.going: list[tuple[Group, list[tuple[int, Any, Tensor, Tensor]]]] = []
        self.filling: dict[int, Tensor] = {}

    def add(self, n: int, grad: Tensor, key: Chunk) -> None:
        """Add a gradient of the keys ``key`` to that of tensor ``n``."""
        self.filling[n] = self.call.seen.added(self.filling.get(n), grad, key, self.call.moving[n])

    def send(self, group: Group) -> None:
        works = []
        for n in self.moving:
            sent = self.call.seen.going(self._total(group, n), self.filling.get(n), self.call.moving[n])
            if sent is None:
                continue
            received = torch.empty_like(sent)
            work = dist.all_to_all_single(
                received.flatten(0, 1), sent.flatten(0, 1), group=self.call.ranks.group, async_op=True
            )  # fmt: skip
            works.append((n, work, sent, received))
        self.filling = {}
        self.going.append((group, works))

    def _total(self, group: Group, n: int) -> Tensor:
        """Return the group's part of a gradient of the shard."""
        whole = self.totals[n]
        assert whole is not None
        return group.part(whole, self.call.slots[n].heads)

    def receive(self, most: int) -> None:
        """Receive gradients of earlier groups until at most so many groups are under way."""
        while len(self.going) > most:
            group, works = self.going.pop(0)
            for n, work, _, received in works:
                work.wait()
                grad = torch.sum(received, 0, dtype=lse_dtype(received.dtype))
                self.call.seen.arrive(self._total(group, n), grad, self.call.moving[n])


@dataclass(frozen=True)
class Gathered(Method):
    """The all_gather method in ``groups`` groups of heads."""

    groups: int

    def forward(self, call: ContextParallelCall, tensors: Tensors, asked: Flags) -> tuple[Outputs, Saved]:
        q, v = tensors[0], tensors[2]
        whole: Outputs | None = None
        for group, parts in _Keys(call, tensors, self.groups):
            for queries, found in parts:
                for query in queries:
                    key = call.seen_keys(query)
                    part = call.outputs(found, query, key, first_head=_first_head(call, group))
                    if whole is None and self.groups == 1 and query.length == q.shape[2]:
                        whole = part
                        continue
                    whole = _empty_outputs(call, q, v) if whole is None else whole
                    for to, x in zip(whole, part, strict=True):
                        if to is not None and x is not None:
                            group.part(to, 1).narrow(2, query.local, query.length).copy_(x)
                del found
        assert whole is not None
        return whole, Saved(tensors, whole)

    def backward(self, call: ContextParallelCall, saved: Saved, cotangents: Outputs, needs: Flags) -> Grads:
        (tensors, outputs), groups = saved, self.groups
        # A first call of all rows returns the tensors to which other calls add their gradients of q, k and v.
        first = call.row_chunks[0]
        taken = [groups == 1 and first.is_local and n < 3 for n in range(len(tensors))]
        totals = [_total(call, n, x, groups) if needs[n] and not taken[n] else None for n, x in enumerate(tensors)]
        keys = _Keys(call, tensors, groups)
        leaving = _Gradients(call, [n for n in keys.by_heads if needs[n]], totals)
        for group, parts in keys:
            leaving.receive(AHEAD - 1)
            for queries, found in parts:
                # Chunks that see the most keys first: the others add to their gradients.
                for query in sorted(queries, key=lambda query: -call.seen_keys(query).length):
                    at = query, call.seen_keys(query)
                    rows = _rows(outputs, group, query), _rows(cotangents, group, query)
                    grads = part_gradients(call, found, *rows, at, needs, first_head=_first_head(call, group))
                    for n, grad in enumerate(grads):
                        if grad is None:
                            continue
                        if taken[n] and query == first:
                            totals[n] = grad
                        elif n in leaving.moving and not query.is_local:
                            leaving.add(n, grad, at[1])
                        else:
                            to = _place(call, n, totals[n], group, at)
                            to.copy_(grad) if _is_once(call, n, groups) else to.add_(grad)
                    del grads
                del found
            leaving.send(group)
        leaving.receive(0)
        for n in keys.shared:
            total = totals[n]
            if total is not None:
                totals[n] = _home(call, total, call.moving[n])
        return [None if total is None else total.to(x.dtype) for x, total in zip(tensors, totals, strict=True)]

    def cost(self, call: ContextParallelCall, tensors: Tensors) -> Cost:
        """Return the cost in groups. With one, nothing is hidden and one buffer of keys is held. Else two groups of
        keys are held beside the one in use, and of gradients the sent and received buffers of two groups."""
        reason = None if call.documents is None else _declines_packed(call)
        if reason is not None:
            return Cost("all_gather", 0, 0, 0, declines=reason)
        size, (keys, _), groups = call.ranks.size, moving_bytes(call, tensors), self.groups
        moving = [(tensors[n], call.slots[n]) for n in call.moving]
        # Gradients with heads are sent in their dtype; the others are summed over ranks in float32.
        grads = sum((bytes_of if slot.heads is not None else wide_bytes)(x) for x, slot in moving if x.requires_grad)
        grads = int(call.ranks.split.sent_share * grads)
        held = size * keys if groups == 1 else size * 3 * keys // groups
        going = size * grads * min(2 * groups, 4) // groups
        others = size - 1
        hidden = groups if groups > 1 and hides(call, tensors, keys) else 1
        return Cost("all_gather", others * keys, others * (keys + grads), held + going, groups=hidden)


def _declines_packed(call: ContextParallelCall) -> str | None:
    """Return why packed batches of this kind cannot be gathered; None if they can."""
    if call.options.dropout_p:
        return "dropout counts positions from the start of each sequence, of which a rank has only parts"
    causal = call.options.causal
    if not causal and call.options.window is not None:
        return "a window of a packed batch is to end with the query: causal=True"
    for term in (piece.term for piece in call.pieces):
        if term is not None and not isinstance(term, LowRankBias):
            at: Any = term
            if not causal or getattr(at, "query_start", None) is not None or at.key_start != 0:
                name = type(term).__name__
                return f"{name} of a packed batch counts from the last query and key: causal=True, and no start"
    return None


def _empty_outputs(call: ContextParallelCall, q: Tensor, v: Tensor) -> Outputs:
    o = empty_output(q, v.shape[3])
    o_low = torch.empty_like(o, dtype=torch.int16) if call.keeps_low_bits(q.dtype) else None
    return Outputs(o, q.new_empty(q.shape[:3], dtype=lse_dtype(q.dtype)), o_low)


def _first_head(call: ContextParallelCall, group: Group) -> int:
    return group.n * (call.sizes.H // group.of)


def _place(call: ContextParallelCall, n: int, total: Tensor | None, group: Group, at: tuple[Chunk, Chunk]) -> Tensor:
    """Return the view for these queries and keys of the gradient of tensor ``n``; see `_total`."""
    assert total is not None
    slot, (query, key) = call.slots[n], at
    total = group.part(total, slot.heads)
    if call.documents is None or slot.keys is None:
        return call.cut_one(n, total, query, key)
    return total.narrow(slot.keys, 0 if query.is_local else call.keys, key.length)


def _home(call: ContextParallelCall, total: Tensor, axis: int) -> Tensor:
    """Return this rank's rows of a gradient without heads, summed over ranks in float32."""
    if call.documents is None:
        return scattered(total, call.ranks, axis)
    found, grad = total.split([call.keys, call.seen.count], axis)
    sent = call.seen.going(found, grad, axis)
    if sent is not None:
        call.seen.arrive(found, all_to_all(sent, call.ranks).sum(0), axis)
    return found


def _is_once(call: ContextParallelCall, n: int, groups: int) -> bool:
    """True if each element of the gradient is written once on this rank: that of rows, or that of keys whose gradients
    are sent group by group."""
    slot = call.slots[n]
    return slot.split is not None and (slot.heads is not None or (slot.rows is not None and groups == 1))


def _total(call: ContextParallelCall, n: int, x: Tensor, groups: int) -> Tensor:
    """Return the buffer for the gradient of tensor ``n``. For keys without heads of a packed batch: the rows of the
    shard, for local sequences, then `SeenKeys`."""
    slot = call.slots[n]
    if _is_once(call, n, groups):
        return torch.zeros_like(x) if slot.columns is not None else torch.empty_like(x)
    shape = list(x.shape)
    if slot.keys is not None:
        shape[slot.keys] = call.seen.count if call.documents is None else call.keys + call.seen.count
    return x.new_zeros(shape, dtype=lse_dtype(x.dtype))


def _rows(x: Outputs, group: Group, query: Chunk) -> Outputs:
    o, lse, o_low = (None if y is None else group.part(y, 1).narrow(2, query.local, query.length) for y in x[:3])
    assert o is not None
    if not o.is_cuda:  # PyTorch's fused CPU kernel reads a dense o
        o = o.contiguous()
    return Outputs(o, None if lse is None else lse.contiguous(), o_low)
