"""Assignment of a packed batch's tokens to ranks, as index arithmetic.

Contiguous: rank r has the r-th part of all tokens; sequences may begin and end anywhere. "document": most sequences
are on one rank, and the longest on all ranks with a head and a tail each, see `load_balance`. A shard holds first the
rank's own sequences, end to end, then its parts or heads of others, then their tails.

The rank's own sequences use its keys in place, without communication. The other queries see keys of all sequences of
which the rank has tokens, `SeenKeys`; only those of other ranks are sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, wraps
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

F = TypeVar("F", bound=Callable[..., Any])
GROUP_FLOPS = 5e11  # about 1 ms of a Hopper GPU; launches of short sequences have short tails


def kept(make: F) -> F:
    """Cache what a method of `Documents` returns. With a device as last argument it is cached for each stream, as only
    that stream is ordered after the copy. During the capture of a CUDA graph, return another stream's if there is one:
    the graph would copy from freed host memory."""

    @wraps(make)
    def cached(self: Documents, *where: Any) -> Any:
        device = where[-1] if where and isinstance(where[-1], torch.device) else None
        stream = None if device is None else stream_of(device)
        streams = self._kept.setdefault((make.__name__, *where), {})
        if stream not in streams:
            if streams and device is not None and device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                return next(iter(streams.values()))
            streams[stream] = make(self, *where)
        return streams[stream]

    return cast(F, cached)


class Spans(NamedTuple):
    """Positions ``begin .. end - 1`` of each sequence, int64 (B,), on the CPU."""

    begin: Tensor
    end: Tensor

    @property
    def lengths(self) -> Tensor:
        return self.end - self.begin


@dataclass(frozen=True, eq=False)
class SeenKeys:
    """The keys that a rank's queries from row ``first`` on see, and the indices (int64, on the device) that gather
    them: `layout.AllKeys` of a packed batch. `going` writes what stays on this rank to the shard's gradient."""

    size: int  # ranks
    first: int
    count: int  # of these keys
    own: Tensor | None  # of each row from first on, its index in these keys; None: the rows are these keys, in order
    mine: int  # rows of sent that other ranks need; the rest is padding, so that all ranks send equally many
    sent: Tensor  # rows of this shard
    at: Tensor  # indices in the rows that all ranks send, end to end, of those that are among these keys
    place: Tensor  # their indices in these keys

    def leaving(self, shard: Tensor, axis: int) -> Tensor | None:
        # Rows outermost are reordered in one pass.
        return shard.movedim(axis, 0).index_select(0, self.sent) if len(self.sent) else None

    def together(self, shard: Tensor, stacked: Tensor | None, axis: int) -> Tensor:
        found = shard = shard.movedim(axis, 0)[self.first :]
        if self.own is not None:
            found = shard.new_empty((self.count, *shard.shape[1:])).index_copy_(0, self.own, shard)
            if stacked is not None:
                found.index_copy_(0, self.place, stacked.index_select(0, self.at))
        return found.movedim(0, axis)

    def added(self, total: Tensor | None, grad: Tensor, key: Chunk, axis: int) -> Tensor:
        return grad if total is None else total.add_(grad)

    def going(self, total: Tensor, grad: Tensor | None, axis: int) -> Tensor | None:
        total = total.movedim(axis, 0)
        grad = total[:0] if grad is None else grad.movedim(axis, 0)
        total[self.first :].copy_(grad if self.own is None else grad.index_select(0, self.own))
        if not len(self.sent):
            return None
        found = grad.new_zeros((self.size * len(self.sent), *grad.shape[1:]))
        found.index_copy_(0, self.at, grad.index_select(0, self.place))
        return found.unflatten(0, (self.size, -1))

    def arrive(self, total: Tensor, grad: Tensor, axis: int) -> None:
        total = total.movedim(axis, 0)
        total.index_copy_(0, self.sent[: self.mine], grad[: self.mine].to(total.dtype))


@dataclass(frozen=True, eq=False)
class Documents:
    """A packed batch over ``size`` ranks; offsets are its `cu_seqlens`. `documents_of` caches them."""

    size: int
    balanced: bool
    offsets: tuple[int, ...]
    _kept: dict[Any, Any] = field(default_factory=dict)

    @cached_property
    def cu(self) -> Tensor:
        return torch.tensor(self.offsets, dtype=torch.int64, device="cpu")

    @cached_property
    def lengths(self) -> Tensor:
        return self.cu.diff()

    @property
    def pieces(self) -> str:
        """Return the name of the split, which ranks compare."""
        return "document" if self.balanced else "contiguous"

    @property
    def group_flops(self) -> float:
        """Return `operands.GROUP_FLOPS` of a packed batch: more if there is less to send, which groups hide."""
        return GROUP_FLOPS / self.sent_share if self.sent_share else math.inf

    @kept
    def pairs(self, rank: int, causal: bool) -> int:
        """Return the number of visible pairs of that rank's queries, for one head."""
        seen = [(x.begin + 1 + x.end) if causal else 2 * self.lengths for x in self.spans(rank)]
        return sum(int((n * x.lengths // 2).sum()) for n, x in zip(seen, self.spans(rank), strict=True))

    def spans(self, rank: int) -> tuple[Spans, ...]:
        if not self.balanced:
            rows = self.offsets[-1] // self.size
            at = rank * rows - self.cu[:-1]
            return (Spans(*(x.clamp(min=0).minimum(self.lengths) for x in (at, at + rows))),)
        ends, (head, tail) = self._assigned.cumsum(0), (rank, 2 * self.size - 1 - rank)
        return tuple(Spans(ends[n] - self._assigned[n], ends[n]) for n in (head, tail))

    @cached_property
    def _assigned(self) -> Tensor:
        return assign(self.lengths.tolist(), self.size)

    @kept
    def rows(self, rank: int) -> Tensor:
        """Return the index among all tokens of each row of that rank's shard, int64, on the CPU."""
        found = []
        for x in (Spans(torch.zeros_like(self.lengths), self.lengths_alone(rank)), *self._shared_spans(rank)):
            first = self.cu[:-1] + x.begin - (x.lengths.cumsum(0) - x.lengths)
            found.append(torch.arange(int(x.lengths.sum()), device="cpu") + first.repeat_interleave(x.lengths))
        return torch.cat(found)

    @kept
    def order(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the indices among all tokens of all ranks' rows, rank by rank, and the inverse; int32."""
        order = torch.cat([self.rows(rank) for rank in range(self.size)])
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=order.device)
        return _sent(order, device), _sent(back, device)

    @kept
    def parts(self, rank: int, causal: bool, device: torch.device) -> tuple[Chunk, ...]:
        """Return the non-empty local calls of a rank: its own sequences, and spans of others with its `SeenKeys`. Under
        a causal mask a span has the keys of its sequence up to its own last query, so that this sees the last key, as
        in the whole sequence."""
        found: list[Chunk] = []
        alone, seen = self.lengths_alone(rank), self.seen_lengths(rank)
        local = int(alone.sum())
        if local:
            cu, longest = _sent(_offsets(alone), device), int(alone.max())
            rows = self.offsets[-1] // self.size
            found.append(Chunk(0, 0, rows, Lengths(cu, cu), (longest, longest), is_local=True))
        for span in self._shared_spans(rank):
            lengths, rows = span.lengths, int(span.lengths.sum())
            if rows:
                used = span.end.minimum(seen) if causal else seen
                on_device = Lengths(*(_sent(x, device) for x in (_offsets(lengths), _offsets(seen), used)))
                most = int(lengths.max()), int(torch.where(lengths > 0, used, 0).max())
                found.append(Chunk(local, 0, rows, on_device, most))
                local += rows
        return tuple(found)

    @kept
    def whole(self, device: torch.device) -> Chunk:
        """Return one call of all sequences."""
        cu, longest = _sent(self.cu, device), int(self.lengths.max())
        return Chunk(0, 0, self.offsets[-1], Lengths(cu, cu), (longest, longest))

    # --- keys ---

    @cached_property
    def _holders(self) -> Tensor:
        """Return a bool tensor (size, B): True if the rank has tokens of the sequence."""
        counts = [torch.stack([x.lengths for x in self.spans(rank)]).sum(0) for rank in range(self.size)]
        return torch.stack(counts) > 0

    @cached_property
    def _alone(self) -> Tensor:
        """Return a bool tensor (B,): True for sequences on one rank, which are contiguous in its shard."""
        return self._holders.sum(0) == 1 if self.balanced else torch.zeros_like(self.lengths, dtype=torch.bool)

    def lengths_alone(self, rank: int) -> Tensor:
        """Return the length (B,) of each sequence that is on that rank alone, else 0."""
        return torch.where(self._alone & self._holders[rank], self.lengths, 0)

    def _shared_spans(self, rank: int) -> list[Spans]:
        """Return `spans`, empty for sequences on one rank."""
        return [Spans(x.begin, torch.where(self._alone, x.begin, x.end)) for x in self.spans(rank)]

    def seen_lengths(self, rank: int) -> Tensor:
        """Return the number of keys (B,) of each sequence in `SeenKeys`: all or 0."""
        return torch.where(~self._alone & self._holders[rank], self.lengths, 0)

    @cached_property
    def sent_rows(self) -> tuple[Tensor, ...]:
        """Return for each rank the rows of its shard that others need: those of sequences on several ranks."""
        shared = (self._holders.sum(0) > 1).repeat_interleave(self.lengths)
        return tuple(shared[self.rows(rank)].nonzero()[:, 0] for rank in range(self.size))

    @property
    def sent_share(self) -> float:
        """Return the share of its keys that the rank with the most sends."""
        return max(len(x) for x in self.sent_rows) / max(self.offsets[-1] // self.size, 1)

    @kept
    def seen(self, rank: int, device: torch.device) -> SeenKeys:
        lengths, sent = self.seen_lengths(rank), self.sent_rows
        first, count, most = int(self.lengths_alone(rank).sum()), int(lengths.sum()), max(map(len, sent))
        # A token's index among these keys minus its index in the batch; valid for tokens of these sequences.
        shift = (lengths.cumsum(0) - lengths - self.cu[:-1]).repeat_interleave(self.lengths)
        is_seen = self._holders[rank].repeat_interleave(self.lengths)
        at, places = [], []
        for n, local in enumerate(sent):
            tokens = self.rows(n)[local]
            here = is_seen[tokens].nonzero()[:, 0]
            at.append(n * most + here)
            places.append((shift[tokens] + tokens)[here])
        rows, mine = self.rows(rank)[first:], sent[rank]
        own = shift[rows] + rows
        is_all = torch.equal(own, torch.arange(count, device=own.device))
        padded = torch.cat([mine, mine.new_zeros(most - len(mine))])
        moved = [_moved(x, device) for x in (padded, torch.cat(at), torch.cat(places))]
        return SeenKeys(self.size, first, count, None if is_all else _moved(own, device), len(mine), *moved)

    # --- shards ---

    def shards_of(self, x: Tensor, dim: int) -> Tensor:
        if self.balanced:
            x = x.index_select(dim, self.order(x.device)[0])
        return x.unflatten(dim, (self.size, -1)).movedim(dim, 0)

    def whole_of(self, shards: Tensor, dim: int) -> Tensor:
        x = shards.movedim(0, dim).flatten(dim, dim + 1)
        return x.index_select(dim, self.order(x.device)[1]) if self.balanced else x


def _offsets(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


_read: Any = WeakTensorKeyDictionary()  # tensors on a GPU: their version, and what they held
BALANCERS = (None, "document")


def _sent(x: Tensor, device: torch.device) -> Tensor:
    """Return ``x`` as int32 on the device."""
    return _moved(x.to(torch.int32), device)


def _moved(x: Tensor, device: torch.device) -> Tensor:
    """Return ``x`` on the device, copied from pinned memory without host synchronization."""
    return x if device.type == "cpu" else x.pin_memory().to(device, non_blocking=True)


@lru_cache(maxsize=8)  # all layers of a step share one, which holds two ints for each token
def documents_of(size: int, balanced: bool, offsets: tuple[int, ...]) -> Documents:
    return Documents(size, balanced, offsets)


def read_offsets(name: str, offsets: Tensor | Sequence[int]) -> tuple[int, ...]:
    """Return `cu_seqlens` as checked ints. The first read of a tensor on a GPU synchronizes the host."""
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
    """Return `Ranks` that split a packed batch, from a mesh or from its ``ranks``.

    Raises:
        ValueError, TypeError: an invalid argument; the message names it, its value and what is allowed.
    """
    if load_balancer not in BALANCERS:
        raise ValueError(f"load_balancer: of a packed batch must be None or 'document', got {load_balancer!r}")
    ranks = Ranks.of(mesh, None) if ranks is None else ranks
    if offsets[-1] % ranks.size:
        raise ValueError(
            f"cu_seqlens: {offsets[-1]} tokens do not divide by {ranks.size} ranks; pad the batch by a sequence"
        )
    return replace(ranks, split=documents_of(ranks.size, load_balancer is not None, offsets))
