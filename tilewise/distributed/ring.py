"""Ring attention: keys and values go from rank to rank, and each rank adds what its queries see of them.

In step t rank r has the keys of rank r - t. While it computes with them it sends them on to rank r + 1. In the backward
their gradients go the same way, one step behind, and from the last step straight home. A step in which a rank's queries
see nothing computes nothing; those in which no rank's do are left out.

Source: Ring Attention (arXiv 2310.01889); the LSE merge and the backward by parts are FlashAttention-2's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from tilewise.backends import Outputs, sink_gradient
from tilewise.bias.terms import wide
from tilewise.distributed.collectives import as_bytes
from tilewise.distributed.layout import Chunk, Ranks, ring_steps, sees
from tilewise.distributed.operands import ShardedCall
from tilewise.merge import combine

# Of a step's messages: gloo tells by it which is which, where gradients and keys are under way together.
_KEYS, _GRADIENTS = 0, 1000
PartGradients = Callable[..., list[Tensor | None]]


class Passing:
    """Tensors on their way ``hop`` ranks further, and those of the rank ``hop`` back on theirs to this one."""

    def __init__(self, ranks: Ranks, tensors: Sequence[Tensor], hop: int, tag: int) -> None:
        self.sent = [x.contiguous() for x in tensors]  # kept until they are through
        self.received = [torch.empty_like(x) for x in self.sent]
        peers = [dist.get_global_rank(ranks.group, (ranks.rank + n) % ranks.size) for n in (hop, -hop)]
        operations = []
        for n, (sent, received) in enumerate(zip(self.sent, self.received, strict=True)):
            if sent.numel():
                operations.append(dist.P2POp(dist.isend, as_bytes(sent), peers[0], ranks.group, tag + n))
                operations.append(dist.P2POp(dist.irecv, as_bytes(received), peers[1], ranks.group, tag + n))
        self.works = dist.batch_isend_irecv(operations) if operations else []

    def wait(self) -> list[Tensor]:
        """What came; on a GPU the stream waits and the host does not."""
        for work in self.works:
            work.wait()
        return self.received


def _parts(call: ShardedCall, step: int) -> list[tuple[int, Chunk, Chunk]]:
    """What this rank computes in a step: which of its chunks of queries, the chunk, and one of keys that it sees."""
    source = (call.ranks.rank - step) % call.ranks.size
    queries = enumerate(call.ranks.chunks(call.queries))
    keys = call.ranks.split.chunks(source, call.keys)
    return [(n, query, key) for n, query in queries for key in keys if sees(call.band, query, key)]


def _steps(call: ShardedCall) -> int:
    return ring_steps(call.band, call.ranks.split, call.queries, call.keys)


def forward(call: ShardedCall, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    tensors, steps = list(tensors), _steps(call)
    moving = call.moving
    chunks = call.ranks.chunks(call.queries)
    found: list[tuple[Tensor, Tensor] | None] = [None] * len(chunks)
    for step in range(steps):
        coming = None
        if step + 1 < steps:
            coming = Passing(call.ranks, [tensors[n] for n in moving], 1, _KEYS)
        for n, query, key in _parts(call, step):
            o, lse = call.attend(call.cut(tensors, query, key), query, key, sink=False)
            before = found[n]
            found[n] = (wide(o), lse) if before is None else combine([before[0], o], [before[1], lse])
        if coming is not None:
            for n, x in zip(moving, coming.wait(), strict=True):
                tensors[n] = x
    q, v = tensors[0], tensors[2]
    parts = []
    for chunk, seen in zip(chunks, found, strict=True):
        if seen is None:
            zeros = wide(q.new_zeros(*q.shape[:2], chunk.length, v.shape[3]))
            seen = zeros, zeros.new_full(zeros.shape[:3], -torch.inf)
        if call.sink is not None:
            sink = call.cut_rows(call.sink, tensors[call.sink], chunk)
            seen = combine([seen[0]], [seen[1]], sink)
        parts.append((seen[0].to(q.dtype), seen[1]))
    if len(parts) == 1:
        return parts[0]
    return torch.cat([o for o, _ in parts], 2), torch.cat([lse for _, lse in parts], 2)


def backward(
    call: ShardedCall, tensors: Sequence[Tensor], outputs: Outputs, cotangents: Outputs, needs: Sequence[bool],
    part_gradients: PartGradients,
) -> list[Tensor | None]:  # fmt: skip
    """The gradients of ``tensors``; ``outputs`` are those of whole rows, the sink included."""
    given, tensors, steps = tensors, list(tensors), _steps(call)
    moving = call.moving
    asked = [needs[n] if n != call.sink else False for n in range(len(tensors))]
    rows = [
        (_rows(outputs, chunk, len(call.ranks.chunks(call.queries))), _rows(cotangents, chunk, call.ranks.split.pieces))
        for chunk in call.ranks.chunks(call.queries)
    ]
    totals = [call.accumulator(n, x) if asked[n] else None for n, x in enumerate(tensors)]
    leaving = [n for n in moving if asked[n]]
    behind: Passing | None = None
    for step in range(steps):
        coming = Passing(call.ranks, [tensors[n] for n in moving], 1, _KEYS) if step + 1 < steps else None
        for n in leaving:
            totals[n] = call.accumulator(n, tensors[n])
        for n, query, key in _parts(call, step):
            at = query, key
            grads = part_gradients(call, call.cut(tensors, *at), at, *rows[n], asked)
            for m, grad in enumerate(grads):
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
            hop = 1 if step + 1 < steps else 1 - steps  # home from the last step
            behind = Passing(call.ranks, gone, hop, _GRADIENTS)  # type: ignore[arg-type]
        if coming is not None:
            for n, x in zip(moving, coming.wait(), strict=True):
                tensors[n] = x
    if behind is not None:
        for n, x in zip(leaving, behind.wait(), strict=True):
            totals[n] = x
    if call.sink is not None and needs[call.sink]:
        totals[call.sink] = _sink_gradient(given[call.sink], outputs, cotangents)
    return [None if total is None else total.to(x.dtype) for x, total in zip(given, totals, strict=True)]


def _rows(x: Outputs, chunk: Chunk, pieces: int) -> Outputs:
    """As a kernel gets them from a forward: dense."""
    if pieces == 1:
        return x
    o, lse = (None if y is None else y.narrow(2, chunk.local, chunk.length).contiguous() for y in x)
    assert o is not None
    return Outputs(o, lse)


def _sink_gradient(sink: Tensor, outputs: Outputs, cotangents: Outputs) -> Tensor:
    assert outputs.lse is not None
    minus_delta = -(wide(outputs.o) * wide(cotangents.o)).sum(-1)
    if cotangents.lse is not None:
        minus_delta += cotangents.lse
    rows = sink[None, :, None] if sink.dim() == 1 else sink
    return sink_gradient(rows, outputs.lse, minus_delta).view(sink.shape)
