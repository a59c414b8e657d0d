"""The rows of a sequence on each rank, and the tensors that collectives send: index arithmetic and views.

Contiguous: rank r has the r-th part. "head_tail": the sequence is cut into 2R chunks; rank r has the r-th from the
start, then the r-th from the end, so that under a causal mask all ranks have equally many visible pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tilewise.spec.score import Band
from tilewise.spec.seqlens import Lengths

Tensors = Sequence[Tensor]
Grads = list[Tensor | None]
Flags = Sequence[bool]
LoadBalancer = Literal["head_tail", "document"] | None
BALANCERS = (None, "head_tail")


class Chunk(NamedTuple):
    """Rows of a shard that one local call computes, consecutive in the sequence, or spans of a packed batch."""

    local: int  # first row in the shard
    start: int  # first row in the sequence; of a packed batch 0
    length: int
    lengths: Lengths | None = None  # of each sequence of a packed batch in the local call
    longest: tuple[int, int] = (0, 0)  # most queries and most keys of a sequence
    # The call has all rows of the shard, with its keys in place, but only the rank's own sequences.
    is_local: bool = False


class Split(NamedTuple):
    """A sequence over ``size`` ranks, with ``pieces`` chunks each: 1, or 2 for a head and a tail. `documents.Documents`
    splits a packed batch; both stack shards."""

    size: int
    pieces: int
    sent_share: float = 1.0  # of its keys that a rank sends in an all-gather

    def chunks(self, rank: int, length: int) -> tuple[Chunk, ...]:
        """Return the chunks of that rank's shard, which has ``length`` rows."""
        if self.pieces == 1:
            return (Chunk(0, rank * length, length),)
        half = length // 2
        return Chunk(0, rank * half, half), Chunk(half, (2 * self.size - 1 - rank) * half, half)

    def all_chunks(self, length: int) -> list[tuple[int, Chunk]]:
        """Return (rank, chunk) for each chunk of all ranks' shards."""
        return [(rank, chunk) for rank in range(self.size) for chunk in self.chunks(rank, length)]

    def shards_of(self, x: Tensor, dim: int) -> Tensor:
        """Return all ranks' shards of a whole tensor along ``dim``, stacked along a new first axis."""
        count = self.pieces * self.size
        chunks = x.unflatten(dim, (count, x.shape[dim] // count)).movedim(dim, 0)
        return chunks if self.pieces == 1 else torch.cat([chunks[: self.size], chunks[self.size :].flip(0)], dim + 1)

    def whole_of(self, shards: Tensor, dim: int) -> Tensor:
        """Return the whole tensor of stacked shards: the inverse of `shards_of`."""
        if self.pieces == 2:
            heads, tails = shards.chunk(2, dim + 1)
            shards = torch.cat([heads, tails.flip(0)])
        return shards.movedim(0, dim).flatten(dim, dim + 1)


@dataclass(frozen=True)
class AllKeys:
    """All ``count`` keys of a sequence, in order: those that local calls have after a gathering. See also
    `documents.SeenKeys`; ``axis`` is that of keys, or of a shard's rows."""

    split: Split
    count: int

    def leaving(self, shard: Tensor, axis: int) -> Tensor | None:
        """Return what this rank sends to all; None: nothing is sent."""
        return shard

    def together(self, shard: Tensor, stacked: Tensor | None, axis: int) -> Tensor:
        """Return these keys, from this rank's shard and from what all ranks sent, end to end."""
        assert stacked is not None
        shards, shape = stacked.unflatten(0, (self.split.size, -1)), list(shard.shape)
        shape[axis] = self.count
        whole = stacked.new_empty(shape)
        for rank, chunk in self.split.all_chunks(shard.shape[axis]):
            whole.narrow(axis, chunk.start, chunk.length).copy_(shards[rank].narrow(axis, chunk.local, chunk.length))
        return whole

    def added(self, total: Tensor | None, grad: Tensor, key: Chunk, axis: int) -> Tensor:
        """Return the sum of gradients of these keys, in the buffer that is sent; ``grad`` is that of ``key``."""
        first = total is None
        if total is None:
            shape = list(grad.shape)
            shape[axis] = self.count // self.split.size
            total = grad.new_empty((self.split.size, *shape))
        for rank, chunk in self.split.all_chunks(total.shape[axis + 1]):
            begin = min(max(key.start, chunk.start), chunk.start + chunk.length)
            end = max(min(key.start + key.length, chunk.start + chunk.length), begin)
            to = total[rank].narrow(axis, chunk.local, chunk.length)
            here = to.narrow(axis, begin - chunk.start, end - begin)
            found = grad.narrow(axis, min(max(begin - key.start, 0), key.length), end - begin)
            if not first:
                here.add_(found)
                continue
            here.copy_(found)
            to.narrow(axis, 0, begin - chunk.start).zero_()
            to.narrow(axis, end - chunk.start, chunk.start + chunk.length - end).zero_()
        return total

    def going(self, total: Tensor, grad: Tensor | None, axis: int) -> Tensor | None:
        """Return what each rank gets of ``grad``, from `added`, (ranks, ...). ``total`` is the shard's gradient."""
        return grad

    def arrive(self, total: Tensor, grad: Tensor, axis: int) -> None:
        """Write the sum over ranks of what `going` sent here to the gradient of the shard."""
        total.copy_(grad)


@dataclass(frozen=True)
class Ranks:
    """The process group of a mesh, this rank in it, and how they split a sequence or a packed batch.

    A mesh of two axes has a group along each. Its ranks are counted along the second axis first."""

    group: Any  # a ProcessGroup; None: that of each axis
    rank: int
    split: Any  # a Split, or `documents.Documents`
    device: str  # the mesh's
    axes: tuple[Ranks, ...] = ()  # this process's ranks along each axis, if there are two

    @property
    def size(self) -> int:
        return self.split.size

    @property
    def inside(self) -> Ranks:
        """Return the ranks that trade rows for heads: of a mesh of two axes those along the second."""
        return self.axes[1] if self.axes else self

    @classmethod
    def of(cls, mesh: DeviceMesh, load_balancer: LoadBalancer, most_axes: int = 1) -> Ranks:
        """Return the ranks of a mesh of one axis, or two; raise an error that names the mesh or the load balancer."""
        if not isinstance(mesh, DeviceMesh):
            raise TypeError(f"mesh: expected a torch.distributed DeviceMesh, got {type(mesh).__name__}")
        if not 1 <= mesh.ndim <= most_axes:
            raise ValueError(
                f"mesh: expected one axis, that of the sequence, got {mesh.ndim}; of a mesh with names pass mesh['cp']"
            )
        if mesh.get_coordinate() is None:
            raise ValueError(f"mesh: this process, rank {dist.get_rank()}, is not in it: {mesh}")
        if load_balancer not in BALANCERS:
            is_packed = load_balancer == "document" and mesh.ndim == 1
            packed = "; 'document' is of packed batches, by their cu_seqlens" if is_packed else ""
            raise ValueError(f"load_balancer: must be None or 'head_tail', got {load_balancer!r}{packed}")
        if mesh.ndim == 1:
            return cls.of_group(mesh.get_group(), mesh.device_type, load_balancer)
        across, inside = (cls.of_group(mesh.get_group(n), mesh.device_type, load_balancer) for n in (0, 1))
        split = Split(across.size * inside.size, across.split.pieces)
        return cls(None, across.rank * inside.size + inside.rank, split, mesh.device_type, (across, inside))

    @classmethod
    def of_group(cls, group: Any, device: str, load_balancer: LoadBalancer) -> Ranks:
        """Return the ranks of a ProcessGroup that includes this process."""
        split = Split(dist.get_world_size(group), 1 if load_balancer is None else 2)
        return cls(group, dist.get_rank(group), split, device)

    def chunks(self, length: int) -> tuple[Chunk, ...]:
        return self.split.chunks(self.rank, length)


# --- visibility between chunks ---


def sees(band: Band, query: Chunk, key: Chunk) -> bool:
    """True if any of these queries sees any of these keys."""
    local = band.shifted(query.start - key.start)  # of the whole sequence's window
    least, most = 1 - query.length, key.length - 1
    lo = least if local.lo is None else max(local.lo, least)
    hi = most if local.hi is None else min(local.hi, most)
    return lo <= hi


@lru_cache(maxsize=1024)
def ring_steps(band: Band, split: Split, queries: int, keys: int) -> int:
    """Return the number of ring steps after which no rank's queries see any more keys; 1 or more. In step t rank r has
    the keys of rank r - t. ``queries``, ``keys``: the numbers on each rank."""
    if band.unlimited:
        return split.size
    for step in range(split.size - 1, 0, -1):
        for rank in range(split.size):
            source = (rank - step) % split.size
            if any(sees(band, q, k) for q in split.chunks(rank, queries) for k in split.chunks(source, keys)):
                return step + 1
    return 1
