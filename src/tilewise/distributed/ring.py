"""Ring attention: keys and values go from rank to rank, and each rank adds what its queries see of them.

In step t rank r has the keys of rank r - t, and sends them to rank r + 1 while it computes with them. In the backward
their gradients go the same way, one step behind, and after the last step directly to the keys' rank. A rank whose
queries see nothing in a step computes nothing; steps in which no rank's queries see anything are omitted.

Source: Ring Attention (arXiv 2310.01889); the LSE merge and the backward by parts are FlashAttention-2's.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from tilewise.backends import Outputs, sink_gradient
from tilewise.bias.terms import wide
from tilewise.distributed.autograd import as_bytes, part_gradients
from tilewise.distributed.layout import Chunk, Flags, Grads, Ranks, Tensors, ring_steps, sees
from tilewise.distributed.operands import ContextParallelCall
from tilewise.distributed.plan import Cost, Method, Saved, hides, moving_bytes
from tilewise.merge import combine
from tilewise.spec.rounding import low_bits, with_low_bits

# Tags of messages: gloo needs them to tell keys from gradients under way at the same time.
_KEYS, _GRADIENTS = 0, 1000


class Passing:
    """Tensors that are being sent ``hop`` ranks further, and those being received from ``hop`` ranks back."""

    def __init__(self, ranks: Ranks, tensors: Tensors, hop: int, tag: int) -> None:
        self.sent = [x.contiguous() for x in tensors]  # kept until sent
        self.received = [torch.empty_like(x) for x in self.sent]
        peers = [dist.get_global_rank(ranks.group, (ranks.rank + n) % ranks.size) for n in (hop, -hop)]
        operations = []
        for n, (sent, received) in enumerate(zip(self.sent, self.received, strict=True)):
            if sent.numel():
                operations.append(dist.P2POp(dist.isend, as_bytes(sent), peers[0], ranks.group, tag + n))
                operations.append(dist.P2POp(dist.irecv, as_bytes(received), peers[1], ranks.group, tag + n))
        self.works = dist.batch_isend_irecv(operations) if operations else []

    def wait(self) -> list[Tensor]:
        """Return the received tensors; on a GPU the stream waits, not the host."""
        for work in self.works:
            work.wait()
        return self.received


def _parts(call: ContextParallelCall, step: int) -> list[tuple[Chunk, Chunk]]:
    """Return this rank's pairs of chunks in a step: some of its queries, and keys of another's shard that they see.

    With a head and a tail, a causal mask, and nothing else that depends on positions, a step is one call: chunks of a
    shard that are fully visible, or in the order of the whole sequence, become one, as only the distance from the first
    query to the first key matters."""
    source, split = (call.ranks.rank - step) % call.ranks.size, call.ranks.split
    queries, keys = call.ranks.chunks(call.queries), split.chunks(source, call.keys)
    if split.pieces == 2 and call.queries == call.keys and call.causal_alone:
        (head, tail), (key_head, _) = queries, keys
        all_queries, all_keys = head._replace(length=call.queries), key_head._replace(length=call.keys)
        if source == call.ranks.rank:
            return [(all_queries, all_keys)]
        return [(all_queries, key_head) if source < call.ranks.rank else (tail, all_keys)]
    return [(query, key) for query in queries for key in keys if sees(call.band, query, key)]


def _steps(call: ContextParallelCall) -> int:
    return ring_steps(call.band, call.ranks.split, call.queries, call.keys)


def _stages(call: ContextParallelCall, given: Tensors) -> Iterator[tuple[list[Tensor], list[tuple[Chunk, Chunk]]]]:
    """Yield for each step the tensors, with the keys that this rank has then, and `_parts`."""
    tensors, steps = list(given), _steps(call)
    for step in range(steps):
        coming = Passing(call.ranks, [tensors[n] for n in call.moving], 1, _KEYS) if step + 1 < steps else None
        yield tensors, _parts(call, step)
        if coming is not None:
            for n, x in zip(call.moving, coming.wait(), strict=True):
                tensors[n] = x


class Ring(Method):
    """The ring method."""

    def forward(self, call: ContextParallelCall, tensors: Tensors, asked: Flags) -> tuple[Outputs, Saved]:
        q, v = tensors[0], tensors[2]
        o = wide(q.new_zeros(*q.shape[:3], v.shape[3]))
        lse = o.new_full(o.shape[:3], -torch.inf)
        for found, parts in _stages(call, tensors):
            for query, key in parts:
                part, part_lse, part_low, _ = call.outputs(found, query, key, sink=False)
                assert part_lse is not None
                rows, rows_lse = (x.narrow(2, query.local, query.length) for x in (o, lse))
                _add_part(rows, rows_lse, with_low_bits(part, part_low), part_lse)
        if call.sink is not None:
            o, lse = combine([o], [lse], tensors[call.sink])
        rounded = o.to(q.dtype)
        outputs = Outputs(rounded, lse, low_bits(o, rounded) if call.keeps_low_bits(q.dtype) else None)
        return outputs, Saved(tensors, outputs)

    def backward(self, call: ContextParallelCall, saved: Saved, cotangents: Outputs, needs: Flags) -> Grads:
        (given, outputs), steps = saved, _steps(call)
        asked = [need and n != call.sink for n, need in enumerate(needs)]
        totals = [call.accumulator(n, x) if asked[n] else None for n, x in enumerate(given)]
        leaving = [n for n in call.moving if asked[n]]
        behind: Passing | None = None
        for step, (tensors, parts) in enumerate(_stages(call, given)):
            for n in leaving:
                totals[n] = call.accumulator(n, tensors[n])
            for at in parts:
                rows = _rows(outputs, at[0]), _rows(cotangents, at[0])
                for m, grad in enumerate(part_gradients(call, tensors, *rows, at, asked, sink=False)):
                    total = totals[m]
                    if grad is not None and total is not None:
                        call.cut_one(m, total, *at).add_(grad)
            if behind is not None:
                for n, x in zip(leaving, behind.wait(), strict=True):
                    mine = totals[n]
                    assert mine is not None
                    totals[n] = x.add_(mine)
            if leaving and steps > 1:
                gone = [totals[n] for n in leaving]
                hop = 1 if step + 1 < steps else 1 - steps  # after the last step directly to the keys' rank
                behind = Passing(call.ranks, gone, hop, _GRADIENTS)  # type: ignore[arg-type]
        if behind is not None:
            for n, x in zip(leaving, behind.wait(), strict=True):
                totals[n] = x
        if call.sink is not None and needs[call.sink]:
            totals[call.sink] = _sink_gradient(given[call.sink], outputs, cotangents)
        return [None if total is None else total.to(x.dtype) for x, total in zip(given, totals, strict=True)]

    def cost(self, call: ContextParallelCall, tensors: Tensors) -> Cost:
        if call.documents is not None:
            return Cost("ring", 0, 0, 0, declines="it takes no packed batches")
        hops = _steps(call) - 1
        keys, grads = moving_bytes(call, tensors)
        if not hops:
            return Cost("ring", 0, 0, 0, hidden=True)
        sent, hidden = (hops * keys, hops * (keys + grads) + grads), hides(call, tensors, keys)
        return Cost("ring", *sent, keys + 2 * grads, hidden, last_bytes=grads)


def _add_part(o: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Merge a part into ``o`` and ``lse`` in place, as `tilewise.merge.combine` would, in few passes. A part holds no
    NaN where its LSE is -inf."""
    most = torch.maximum(lse, part_lse)
    most = most.masked_fill_(most == -torch.inf, 0.0)
    weight, part_weight = torch.exp(lse - most), torch.exp(part_lse - most)
    total = weight + part_weight
    seen = total != 0
    lse.copy_(torch.where(seen, total.log() + most, -torch.inf))
    total.masked_fill_(~seen, 1.0)
    o.mul_((weight / total)[..., None]).add_(part.to(o.dtype).mul_((part_weight / total)[..., None]))


def _rows(x: Outputs, chunk: Chunk) -> Outputs:
    """Return a chunk's rows, contiguous like the outputs of a forward."""
    o, *more = (None if y is None else y.narrow(2, chunk.local, chunk.length).contiguous() for y in x)
    assert o is not None
    return Outputs(o, *more)


def _sink_gradient(sink: Tensor, outputs: Outputs, cotangents: Outputs) -> Tensor:
    assert outputs.lse is not None
    o = with_low_bits(outputs.o, outputs.o_low)
    minus_delta = -(wide(o) * wide(cotangents.o)).sum(-1)
    if cotangents.lse is not None:
        minus_delta += cotangents.lse
    rows = sink[None, :, None] if sink.dim() == 1 else sink
    return sink_gradient(rows, outputs.lse, minus_delta).view(sink.shape)
