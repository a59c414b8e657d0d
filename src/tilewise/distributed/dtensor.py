"""Context parallelism of DTensors whose sequence is split along one axis of their mesh.

Along the other axes each device computes its own part, as in `tilewise.operator.sharding`. The shape of a bias, mask
or sink determines its placements, to which it is redistributed; a gradient has its tensor's placements.
"""

from __future__ import annotations

from dataclasses import fields, replace
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from tilewise.bias.terms import Term
from tilewise.distributed.api import attend_shards
from tilewise.distributed.layout import LoadBalancer, Ranks
from tilewise.distributed.operands import Arguments
from tilewise.spec.tensors import is_causal_bias

BATCH, HEADS, ROWS = 0, 1, 2
_ALLOWED = (Replicate(), Shard(BATCH), Shard(HEADS))


class _Axes(NamedTuple):
    """The axes along which a call splits a tensor; None: the tensor does not have it, or broadcasts along it."""

    batch: int | None = None
    heads: int | None = None
    split: int | None = None  # this rank's queries or keys


# Axes of sinks and of the fields of bias terms; `_axes_of` drops axes of size 1.
_FIELDS = {
    "values": _Axes(0, 1, 2), "u": _Axes(0, 1, 2), "w": _Axes(0, 1, 2), "table": _Axes(None, 1), "buckets": _Axes(),
    "query_start": _Axes(0), "key_start": _Axes(0), "slopes": _Axes(0, 1), "sink": _Axes(0, 1, 2),
}  # fmt: skip


class _Place(NamedTuple):
    """The placements of a call: its mesh, those of q, and the mesh axis that splits the sequence."""

    mesh: DeviceMesh
    at: tuple[Placement, ...]
    axis: int

    def placements(self, axes: _Axes) -> tuple[Placement, ...]:
        """Return the placements of a tensor with these axes."""

        def along(place: Placement) -> Placement:
            dim = {Shard(BATCH): axes.batch, Shard(HEADS): axes.heads, Shard(ROWS): axes.split}.get(place)  # type: ignore[call-overload]
            return Replicate() if dim is None else Shard(dim)

        return tuple(along(place) for place in self.at)

    def local(self, name: str, x: Any, axes: _Axes) -> Tensor:
        """Return this device's part of ``x``. Where ``x`` is replicated and q is split along batch or heads, its
        gradient is Partial. Along the sequence `context_parallel_attention` sums it."""
        if not isinstance(x, DTensor):
            raise TypeError(f"{name}: must be a DTensor as q is, got {type(x).__name__}")
        if x.device_mesh != self.mesh:
            raise ValueError(f"{name}: must be on q's mesh {self.mesh}, got {x.device_mesh}")
        placements = self.placements(axes)
        grads = [
            Partial() if placement == Replicate() and place in (Shard(BATCH), Shard(HEADS)) else placement
            for placement, place in zip(placements, self.at, strict=True)
        ]
        there = x if tuple(x.placements) == placements else x.redistribute(placements=placements)
        found: Tensor = there.to_local(grad_placements=grads)
        return found


def attention_of_sequences(
    given: Arguments, load_balancer: LoadBalancer = None
) -> tuple[Tensor, Tensor] | None:  # fmt: skip
    """Return ``(o, lse)`` of DTensors q, k and v that one mesh axis splits evenly along the sequence, else None.
    DTensor redistributes other calls to placements that the operator supports."""
    q, k, v = given.qkv
    place = _place_of(q, k, v)
    if place is None or is_causal_bias(given.bias):
        return None
    shared = k.shape[HEADS] == 1 < q.shape[HEADS]  # MQA: every device has the one key/value head
    kv = _Axes(0, None if shared else 1, 2)
    locals_ = place.local("q", q, _Axes(0, 1, 2)), place.local("k", k, kv), place.local("v", v, kv)
    sizes = q.shape[2], k.shape[2]
    bias: Any = given.bias
    mask, sink = given.mask, given.sink
    one = not isinstance(bias, (tuple, list))
    pieces = [_local_piece(place, part, sizes) for part in (() if bias is None else (bias,) if one else bias)]
    found = given._replace(
        qkv=locals_, bias=None if bias is None else pieces[0] if one else tuple(pieces),
        mask=None if mask is None else _local_operand(place, "mask", mask, sizes),
        sink=None if sink is None else place.local("sink", sink, _axes_of("sink", sink)),
    )  # fmt: skip
    ranks = Ranks.of_group(place.mesh.get_group(place.axis), place.mesh.device_type, load_balancer)
    o, lse = attend_shards(ranks, load_balancer, found)
    B, H, M, _ = q.shape
    return _whole(o, place, (B, H, M, v.shape[3])), _whole(lse, place, (B, H, M))


def _whole(x: Tensor, place: _Place, shape: tuple[int, ...]) -> Tensor:
    size, strides = torch.Size(shape), torch.empty(shape, device="meta").stride()
    return DTensor.from_local(x.contiguous(), place.mesh, place.at, run_check=False, shape=size, stride=strides)


def _place_of(q: Any, k: Any, v: Any) -> _Place | None:
    if not all(isinstance(x, DTensor) and x.dim() == 4 for x in (q, k, v)):
        return None
    mesh, at = q.device_mesh, tuple(q.placements)
    axes = [n for n, place in enumerate(at) if place == Shard(ROWS)]
    if len(axes) != 1 or any(x.device_mesh != mesh or x.placements[axes[0]] != Shard(ROWS) for x in (k, v)):
        return None
    if any(place not in (*_ALLOWED, Shard(ROWS)) for place in at):
        return None
    size = mesh.size(axes[0])
    split = prod([mesh.size(n) for n, place in enumerate(at) if place == Shard(HEADS)])
    heads, kv_heads = q.shape[HEADS], k.shape[HEADS]
    together = heads % split == 0 and (kv_heads % split == 0 or kv_heads == 1)
    if not together or q.shape[ROWS] % size or k.shape[ROWS] % size or v.shape[ROWS] != k.shape[ROWS]:
        return None
    return _Place(mesh, at, axes[0])


def _local_piece(place: _Place, part: Any, sizes: tuple[int, int]) -> Any:
    if not isinstance(part, Term):
        return _local_operand(place, "bias", part, sizes)
    tensors = {x.name: getattr(part, x.name) for x in fields(part) if isinstance(getattr(part, x.name), Tensor)}  # type: ignore[arg-type]
    local = {name: place.local(f"{type(part).__name__}.{name}", x, _axes_of(name, x)) for name, x in tensors.items()}
    return replace(part, **local)  # type: ignore[type-var]


def _axes_of(name: str, x: Tensor) -> _Axes:
    by_heads = x.dim() == 1 and name in ("slopes", "sink")
    return _full(x, _Axes(None, 0) if by_heads else _FIELDS[name]) if x.dim() > 0 else _Axes()


def _full(x: Tensor, axes: _Axes) -> _Axes:
    """Return ``axes`` without those along which ``x`` broadcasts."""
    return _Axes(*(None if axis is None or x.shape[axis] == 1 else axis for axis in axes))


def _local_operand(place: _Place, name: str, x: Any, sizes: tuple[int, int]) -> Tensor:
    """Return this device's part of a bias or mask, split by rows if it has those of queries, else by keys."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a DTensor, got {type(x).__name__}")
    batch, heads, rows, keys = (x.dim() - back if x.dim() >= back else None for back in (4, 3, 2, 1))
    if rows is not None and x.shape[rows] not in (1, sizes[0]):
        raise ValueError(f"{name}: shape {tuple(x.shape)} does not broadcast to (.., {sizes[0]}, {sizes[1]})")
    split = rows if rows is not None and x.shape[rows] != 1 else keys
    return place.local(name, x, _full(x, _Axes(batch, heads, split)))
