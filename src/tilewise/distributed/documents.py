"""How the tokens of a packed batch are split over ranks, and which of them a rank has of each sequence: arithmetic.

Contiguous: rank r has the r-th part of all tokens, where sequences may begin and end anywhere. "document": sequences
are one rank's, and the longest are on all ranks, a head and a tail each, see `load_balance`. A rank has first its own
sequences, one after the other, then its parts of others or their heads, and then their tails.

What is a rank's alone is computed with its keys where they lie, and waits for nobody. The other queries see keys of the
sequences of which the rank has tokens: `SeenKeys` are these, of which only what lies elsewhere is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.weak import WeakTensorKeyDictionary

from tilewise.distributed.layout import Chunk, LoadBalancer, Ranks
from tilewise.distributed.load_balance import assign
from tilewise.spec.seqlens import Lengths
from tilewise.spec.tensors import stream_of

T = TypeVar("T")


class Spans(NamedTuple):
    """Of each sequence the places ``begin .. end - 1``, int64 (B,), on the CPU."""

    begin: Tensor
    end: Tensor

    @property
    def lengths(self) -> Tensor:
        return self.end - self.begin


class Part(NamedTuple):
    """Rows of a shard that one local call computes: ``chunk`` of the shard, and what these are of each sequence.

    is_local: the sequences that are the rank's alone, with its own keys as they lie; of all its rows, of which the last
    ones belong to no sequence of this call.
    """

    chunk: Chunk
    lengths: Lengths  # of the local call
    longest: tuple[int, int]
    is_local: bool = False


@dataclass(frozen=True, eq=False)
class SeenKeys:
    """The keys that a rank's queries from ``first`` on see, ``count`` of them, and how they come together: what follows
    are places, int64, on the device. Methods take tensors whose first axis is that of keys, or of the rows of a shard.

    own: of this rank's rows from ``first`` on among these keys; None: they are these keys, in order. sent: of the rows
    that others need in this rank's shard, ``mine`` and then some of which nobody takes notice, so that every rank sends
    as many. at, place: of what all ranks send, end to end, those which are among these keys, and where.
    """

    size: int
    first: int
    count: int
    own: Tensor | None
    mine: int
    sent: Tensor
    at: Tensor
    place: Tensor

    @property
    def travels(self) -> bool:
        return len(self.sent) > 0

    def leaving(self, shard: Tensor) -> Tensor:
        """What this rank sends."""
        return shard.index_select(0, self.sent)

    def together(self, shard: Tensor, stacked: Tensor | None) -> Tensor:
        """These keys, of this rank's and what all have sent."""
        shard = shard[self.first :]
        if self.own is None:
            return shard
        found = shard.new_empty((self.count, *shard.shape[1:])).index_copy_(0, self.own, shard)
        return found if stacked is None else found.index_copy_(0, self.place, stacked.index_select(0, self.at))

    def stay(self, total: Tensor, grad: Tensor) -> None:
        """Of gradients of these keys those of this rank's rows, by its queries alone, into that of its shard."""
        total[self.first :].copy_(grad if self.own is None else grad.index_select(0, self.own))

    def going(self, grad: Tensor) -> Tensor:
        """Of gradients of these keys what goes to each rank, (size, rows, ..)."""
        found = grad.new_zeros((self.size * len(self.sent), *grad.shape[1:]))
        found.index_copy_(0, self.at, grad.index_select(0, self.place))
        return found.unflatten(0, (self.size, -1))

    def arrive(self, total: Tensor, grad: Tensor) -> None:
        """The sums over ranks of what `going` sent here, into the gradient of this rank's rows."""
        total.index_copy_(0, self.sent[: self.mine], grad[: self.mine].to(total.dtype))


@dataclass(frozen=True, eq=False)
class Documents:
    """A packed batch over ``size`` ranks; offsets: `cu_seqlens`. `documents_of` keeps one for each batch."""

    size: int
    balanced: bool
    offsets: tuple[int, ...]
    _kept: dict[Any, Any] = field(default_factory=dict)

    @cached_property
    def cu(self) -> Tensor:
        return torch.tensor(self.offsets, dtype=torch.int64, device="cpu")

    @property
    def pieces(self) -> str:
        """What ranks compare."""
        return "document" if self.balanced else "contiguous"

    @property
    def longest(self) -> int:
        return int(self.cu.diff().max())

    def pairs(self, rank: int, causal: bool) -> int:
        """Visible ones, of that rank's queries."""
        key = "pairs", rank, causal
        if key not in self._kept:
            seen = [(x.begin + 1 + x.end) if causal else 2 * self.cu.diff() for x in self.spans(rank)]
            self._kept[key] = sum(int((n * x.lengths // 2).sum()) for n, x in zip(seen, self.spans(rank), strict=True))
        found: int = self._kept[key]
        return found

    def spans(self, rank: int) -> tuple[Spans, ...]:
        lengths = self.cu.diff()
        if not self.balanced:
            rows = self.offsets[-1] // self.size
            at = rank * rows - self.cu[:-1]
            return (Spans(at.clamp(min=0).minimum(lengths), (at + rows).clamp(min=0).minimum(lengths)),)
        ends, (head, tail) = self._assigned.cumsum(0), (rank, 2 * self.size - 1 - rank)
        return tuple(Spans(ends[n] - self._assigned[n], ends[n]) for n in (head, tail))

    @cached_property
    def _assigned(self) -> Tensor:
        return assign(self.cu.diff().tolist(), self.size)

    def rows(self, rank: int) -> Tensor:
        """Of that rank's shard, the places of its rows among all tokens, int64, on the CPU."""
        key = "rows", rank
        if key not in self._kept:
            found = []
            alone = Spans(torch.zeros_like(self.cu[:-1]), self.lengths_alone(rank))
            for begin, lengths in [(x.begin, x.lengths) for x in (alone, *self._shared_spans(rank))]:
                first = self.cu[:-1] + begin - (lengths.cumsum(0) - lengths)
                found.append(torch.arange(int(lengths.sum()), device="cpu") + first.repeat_interleave(lengths))
            self._kept[key] = torch.cat(found)
        kept: Tensor = self._kept[key]
        return kept

    def order(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The places of all ranks' rows, one rank after the other, and back."""

        def make() -> tuple[Tensor, Tensor]:
            order = torch.cat([self.rows(rank) for rank in range(self.size)])
            back = torch.empty_like(order)
            back[order] = torch.arange(len(order), device=order.device)
            return _sent(order, device), _sent(back, device)

        return self._of_stream("order", device, make)

    def parts(self, rank: int, causal: bool, device: torch.device) -> tuple[Part, ...]:
        """The local calls of a rank, those that have rows: of the sequences that are its alone, and of spans of others
        with its `SeenKeys`, each with the keys of a sequence up to its own last query under a causal mask, so that the
        last query sees the last key as in the whole. A part's ``chunk.start`` is its number."""
        return self._of_stream((rank, causal), device, lambda: self._parts(rank, causal, device))

    def _parts(self, rank: int, causal: bool, device: torch.device) -> tuple[Part, ...]:
        found: list[Part] = []
        alone, seen = self.lengths_alone(rank), self.seen_lengths(rank)
        local = int(alone.sum())
        if local:
            cu, longest = _sent(_offsets(alone), device), int(alone.max())
            rows = self.offsets[-1] // self.size
            found.append(Part(Chunk(0, 0, rows), Lengths(cu, cu), (longest, longest), is_local=True))
        cu_k = _offsets(seen)
        for span in self._shared_spans(rank):
            lengths = span.lengths
            rows = int(lengths.sum())
            if not rows:
                continue
            used = span.end.minimum(seen) if causal else seen
            on_device = Lengths(*(_sent(x, device) for x in (_offsets(lengths), cu_k, used)))
            most = int(lengths.max()), int(torch.where(lengths > 0, used, 0).max())
            found.append(Part(Chunk(local, len(found), rows), on_device, most))
            local += rows
        return tuple(found)

    def _of_stream(self, key: Any, device: torch.device, make: Callable[[], T]) -> T:
        """What ``make`` gives, kept for each stream, which alone is sure to find it written. While a CUDA graph is
        captured it is that of a stream that has one: the graph would read what it copies from where it is no more."""
        streams = self._kept.setdefault((key, device), {})
        stream = stream_of(device)
        if stream not in streams:
            if streams and device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                return cast(T, next(iter(streams.values())))
            streams[stream] = make()
        return cast(T, streams[stream])

    # --- keys ---

    @cached_property
    def _holders(self) -> Tensor:
        """(size, B), bool: whether a rank has tokens of a sequence."""
        counts = [torch.stack([x.lengths for x in self.spans(rank)]).sum(0) for rank in range(self.size)]
        return torch.stack(counts) > 0

    @cached_property
    def _alone(self) -> Tensor:
        """(B,), bool: sequences of one rank, whose rows follow each other in its shard."""
        if self.balanced:
            return self._holders.sum(0) == 1
        return torch.zeros(len(self.offsets) - 1, dtype=torch.bool, device="cpu")

    def lengths_alone(self, rank: int) -> Tensor:
        """Of each sequence its tokens if they are that rank's alone, else 0."""
        return torch.where(self._alone & self._holders[rank], self.cu.diff(), 0)

    def _shared_spans(self, rank: int) -> list[Spans]:
        """`spans` of the other sequences."""
        return [Spans(x.begin, torch.where(self._alone, x.begin, x.end)) for x in self.spans(rank)]

    def seen_lengths(self, rank: int) -> Tensor:
        """Of each sequence the keys that `SeenKeys` have: all or none."""
        return torch.where(~self._alone & self._holders[rank], self.cu.diff(), 0)

    @cached_property
    def sent_rows(self) -> tuple[Tensor, ...]:
        """Of each rank's shard the rows that others need, those of sequences of several ranks."""
        shared = (self._holders.sum(0) > 1).repeat_interleave(self.cu.diff())
        return tuple(shared[self.rows(rank)].nonzero()[:, 0] for rank in range(self.size))

    @property
    def sent_share(self) -> float:
        """Of a rank's keys, of the rank that sends most."""
        return max(len(x) for x in self.sent_rows) / max(self.offsets[-1] // self.size, 1)

    def seen(self, rank: int, device: torch.device) -> SeenKeys:
        return self._of_stream(("seen", rank), device, lambda: self._seen(rank, device))

    def _seen(self, rank: int, device: torch.device) -> SeenKeys:
        lengths = self.seen_lengths(rank)
        # From a token's place among all to that among these keys, of tokens of these sequences.
        shift = (lengths.cumsum(0) - lengths - self.cu[:-1]).repeat_interleave(self.cu.diff())
        rows, sent = self.rows(rank), self.sent_rows
        most = max(len(x) for x in sent)
        is_seen = self._holders[rank].repeat_interleave(self.cu.diff())
        at, places = [], []
        for n, local in enumerate(sent):
            tokens = self.rows(n)[local]
            here = is_seen[tokens].nonzero()[:, 0]
            at.append(n * most + here)
            places.append((shift[tokens] + tokens)[here])
        first, count = int(self.lengths_alone(rank).sum()), int(lengths.sum())
        rows = rows[first:]
        own = shift[rows] + rows
        mine = sent[rank]
        padded = torch.cat([mine, mine.new_zeros(most - len(mine))])
        return SeenKeys(
            self.size,
            first,
            count,
            None if torch.equal(own, torch.arange(count, device=own.device)) else _moved(own, device),
            len(mine),
            *(_moved(x, device) for x in (padded, torch.cat(at), torch.cat(places))),
        )

    def whole(self, device: torch.device) -> Part:
        """All sequences in one call."""

        def make() -> Part:
            cu = _sent(self.cu, device)
            return Part(Chunk(0, 0, self.offsets[-1]), Lengths(cu, cu), (self.longest, self.longest))

        return self._of_stream("whole", device, make)

    # --- what `layout` asks of a split ---

    def shards_of(self, x: Tensor, dim: int) -> Tensor:
        if self.balanced:
            x = x.index_select(dim, self.order(x.device)[0])
        return x.unflatten(dim, (self.size, -1)).movedim(dim, 0)

    def whole_of(self, shards: Tensor, dim: int) -> Tensor:
        x = shards.movedim(0, dim).flatten(dim, dim + 1)
        return x.index_select(dim, self.order(x.device)[1]) if self.balanced else x


def _offsets(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


_read: Any = WeakTensorKeyDictionary()  # of tensors on a GPU, what they held and when they were last written
BALANCERS = (None, "document")


def _sent(x: Tensor, device: torch.device) -> Tensor:
    """In int32 on the device."""
    return _moved(x.to(torch.int32), device)


def _moved(x: Tensor, device: torch.device) -> Tensor:
    """On the device; from memory that is pinned, so that the host does not wait."""
    return x if device.type == "cpu" else x.pin_memory().to(device, non_blocking=True)


@lru_cache(maxsize=8)  # all layers of a step have one; it holds two numbers for each token
def documents_of(size: int, balanced: bool, offsets: tuple[int, ...]) -> Documents:
    return Documents(size, balanced, offsets)


def read_offsets(name: str, offsets: Tensor | Sequence[int]) -> tuple[int, ...]:
    """Of `cu_seqlens`: checked. On a GPU the host waits, the first time that it sees the tensor."""
    if isinstance(offsets, Tensor):
        if offsets.dim() != 1 or offsets.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"{name}: expected int32 or int64 of shape (B + 1,), got {offsets.dtype} of shape "
                f"{tuple(offsets.shape)}"
            )
        if not offsets.is_cpu:
            known = _read.get(offsets)
            if known is not None and known[0] == offsets._version:
                return known[1]
            found = read_offsets(name, offsets.cpu())
            _read[offsets] = offsets._version, found
            return found
        offsets = offsets.tolist()
    found = tuple(offsets)
    if len(found) < 2 or found[0] != 0:
        raise ValueError(f"{name}: begins with 0 and has an end for each sequence, got {list(found[:4])}")
    for n, (begin, end) in enumerate(pairwise(found)):
        if end < begin:
            raise ValueError(f"{name}: must not descend, got {begin} before {end} at {n}")
    return found


def packed_ranks(
    mesh: DeviceMesh, load_balancer: LoadBalancer, offsets: tuple[int, ...], ranks: Ranks | None = None
) -> Ranks:
    """`Ranks` that split a packed batch, of a mesh or made of its ``ranks``.

    Raises:
        ValueError, TypeError: naming the argument, what came and what is allowed.
    """
    if load_balancer not in BALANCERS:
        raise ValueError(f"load_balancer: of a packed batch must be None or 'document', got {load_balancer!r}")
    ranks = Ranks.of(mesh, None) if ranks is None else ranks
    if offsets[-1] % ranks.size:
        raise ValueError(
            f"cu_seqlens: {offsets[-1]} tokens do not divide by {ranks.size} ranks; pad the batch by a sequence"
        )
    return replace(ranks, split=documents_of(ranks.size, load_balancer is not None, offsets))
