"""How the tokens of a packed batch are split over ranks, and which of them a rank has of each sequence: arithmetic.

Contiguous: rank r has the r-th part of all tokens, where sequences may begin and end anywhere. "document": each
sequence is cut into 2R chunks and rank r has the r-th of them from its start and the r-th from its end, so that under a
causal mask each rank has as many visible pairs of each sequence as every other. Tokens that are left over, fewer than
2R of a sequence, are dealt out one by one, from rank to rank and through all sequences, so that every rank gets as
many. A rank has its chunks of the sequences' heads first, sequence by sequence, and then those of their tails.

Source of cutting each sequence in two chunks a rank: TransformerEngine's context parallelism with packed batches, which
pads sequences to multiples of 2R.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.weak import WeakTensorKeyDictionary

from tilewise.distributed.layout import Chunk, LoadBalancer, Ranks
from tilewise.score.lengths import Lengths


class Spans(NamedTuple):
    """Of each sequence the places ``begin .. end - 1``, int64 (B,), on the CPU."""

    begin: Tensor
    end: Tensor

    @property
    def lengths(self) -> Tensor:
        return self.end - self.begin


class Part(NamedTuple):
    """Rows of a shard that one local call computes: ``chunk`` of the shard, and what these are of each sequence."""

    chunk: Chunk
    lengths: Lengths  # of the local call
    longest: tuple[int, int]


@dataclass(frozen=True, eq=False)
class Documents:
    """A packed batch over ``size`` ranks; offsets: `cu_seqlens`. `documents_of` keeps one for each batch."""

    size: int
    balanced: bool
    offsets: tuple[int, ...]
    _kept: dict[Any, Any] = field(default_factory=dict)

    @cached_property
    def cu(self) -> Tensor:
        return torch.tensor(self.offsets, dtype=torch.int64)

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
        size = self.size
        chunk, left = lengths // (2 * size), lengths % (2 * size)
        dealt = left.cumsum(0) - left  # to the sequences before
        ranks = torch.arange(size)[:, None]
        mine = (dealt + left - 1 - ranks) // size - (dealt - 1 - ranks) // size  # 0, 1 or 2: head, then tail
        chunks = torch.cat([chunk + (mine >= 1), (chunk + (mine >= 2)).flip(0)])
        ends = chunks.cumsum(0)
        head, tail = rank, 2 * size - 1 - rank
        return Spans(ends[head] - chunks[head], ends[head]), Spans(ends[tail] - chunks[tail], ends[tail])

    def rows(self, rank: int) -> Tensor:
        """Of that rank's shard, the places of its rows among all tokens, int64, on the CPU."""
        found = []
        for span in self.spans(rank):
            lengths = span.lengths
            first = self.cu[:-1] + span.begin - (lengths.cumsum(0) - lengths)
            found.append(torch.arange(int(lengths.sum())) + first.repeat_interleave(lengths))
        return torch.cat(found)

    def order(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The places of all ranks' rows, one rank after the other, and back."""
        found = self._kept.get(device)
        if found is None:
            order = torch.cat([self.rows(rank) for rank in range(self.size)])
            back = torch.empty_like(order)
            back[order] = torch.arange(len(order))
            found = self._kept[device] = _sent(order, device), _sent(back, device)
        return found

    def parts(self, rank: int, causal: bool, device: torch.device) -> tuple[Part, ...]:
        """The local calls of a rank that has the keys of all: each with the keys of a sequence up to its own last query
        under a causal mask, so that the last query sees the last key as in the whole."""
        key = rank, causal, device
        if key not in self._kept:
            found, local = [], 0
            for n, span in enumerate(self.spans(rank)):
                lengths = span.lengths
                used = span.end if causal else self.cu.diff()
                cu_q = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
                rows = int(lengths.sum())
                on_device = Lengths(*(_sent(x, device) for x in (cu_q, self.cu, used)))
                longest = int(lengths.max()), int(torch.where(lengths > 0, used, 0).max())
                found.append(Part(Chunk(local, n, rows), on_device, longest))
                local += rows
            self._kept[key] = tuple(found)
        return self._kept[key]

    def whole(self, device: torch.device) -> Part:
        """All sequences in one call."""
        key = "whole", device
        if key not in self._kept:
            cu = _sent(self.cu, device)
            self._kept[key] = Part(Chunk(0, 0, self.offsets[-1]), Lengths(cu, cu), (self.longest, self.longest))
        return self._kept[key]

    # --- what `layout` asks of a split ---

    def shards_of(self, x: Tensor, dim: int) -> Tensor:
        if self.balanced:
            x = x.index_select(dim, self.order(x.device)[0])
        return x.unflatten(dim, (self.size, -1)).movedim(dim, 0)

    def whole_of(self, shards: Tensor, dim: int) -> Tensor:
        x = shards.movedim(0, dim).flatten(dim, dim + 1)
        return x.index_select(dim, self.order(x.device)[1]) if self.balanced else x


_read: Any = WeakTensorKeyDictionary()  # of tensors on a GPU, what they held and when they were last written
BALANCERS = (None, "document")


def _sent(x: Tensor, device: torch.device) -> Tensor:
    """In int32 on the device; from memory that is pinned, so that the host does not wait."""
    x = x.to(torch.int32)
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


def packed_ranks(mesh: DeviceMesh, load_balancer: LoadBalancer, offsets: tuple[int, ...]) -> Ranks:
    """`Ranks` that split a packed batch.

    Raises:
        ValueError, TypeError: naming the argument, what came and what is allowed.
    """
    if load_balancer not in BALANCERS:
        raise ValueError(f"load_balancer: of a packed batch must be None or 'document', got {load_balancer!r}")
    ranks = Ranks.of(mesh, None)
    if offsets[-1] % ranks.size:
        raise ValueError(
            f"cu_seqlens: {offsets[-1]} tokens do not divide by {ranks.size} ranks; pad the batch by a sequence"
        )
    return replace(ranks, split=documents_of(ranks.size, load_balancer is not None, offsets))
