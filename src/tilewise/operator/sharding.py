"""Placements of DTensors for attention, per mesh axis: split along batch or heads, or replicated.

DTensor redistributes inputs with other placements first. A bias, mask or sink is split if it has that axis, and
replicated if it broadcasts; its gradient is then a sum over the devices, `Partial`, in its own dtype.

Importing this module registers the placements.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from math import prod
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

import tilewise.operator.autograd  # noqa: F401  (defines the operators)
from tilewise.backends.protocol import INPUT_NAMES, OPERANDS, Needs
from tilewise.spec.score import ScoreNumbers

BATCH, HEADS = 0, 1

# DTensor's view of a tensor: its global shape and its mesh; None for an absent tensor.
Spec = Any
Choice = tuple[list[Placement | None], list[Placement | None]]  # of the outputs, of the arguments


OTHERS = INPUT_NAMES[3:]  # besides q, k and v


class ShardLayout(NamedTuple):
    """Placements along one axis of a mesh: of tensors with query heads, of k and v, and of each of `OTHERS`."""

    q: Placement
    kv: Placement
    operands: tuple[Placement | None, ...]

    @property
    def inputs(self) -> list[Placement | None]:
        return [self.q, self.kv, self.kv, *self.operands]

    @property
    def differentiated(self) -> list[Placement | None]:
        named = dict(zip(OTHERS, self.operands, strict=True))
        return [self.q, self.kv, self.kv, *(named[name] for name in Needs._fields[3:])]


def _layouts(q: Spec, k: Spec, operands: Sequence[Spec | None]) -> Iterator[ShardLayout]:
    named = dict(zip(OTHERS, operands, strict=True))
    if named["cu_q"] is not None:
        raise NotImplementedError("cu_seqlens_q: packed batches take no DTensors; call it on local tensors")
    if named["tiles"] is not None:
        raise NotImplementedError("mask: a TileMask takes no DTensors beside it; call it on local tensors")
    if named["seed"] is not None:
        raise NotImplementedError("seed: dropout takes no DTensors: each device would count its heads from 0")

    def operand(name: str, x: Spec | None, dim: int) -> Placement | None:
        if x is None:
            return None
        has_axis = "BH"[dim] in OPERANDS[name].sizes(dim)
        return Shard(dim) if has_axis and x.shape[dim] > 1 else Replicate()

    def split(dim: int) -> tuple[Placement | None, ...]:
        return tuple(operand(name, x, dim) for name, x in zip(OTHERS, operands, strict=True))

    whole = Replicate()
    yield ShardLayout(whole, whole, tuple(None if x is None else whole for x in operands))
    yield ShardLayout(Shard(BATCH), Shard(BATCH), split(BATCH))
    heads, kv_heads = q.shape[HEADS], k.shape[HEADS]
    if kv_heads == 1 < heads:  # the key/value head is replicated
        yield ShardLayout(Shard(HEADS), whole, split(HEADS))
    elif kv_heads == heads or groups_stay_together(kv_heads, tuple(q.mesh.shape)):
        yield ShardLayout(Shard(HEADS), Shard(HEADS), split(HEADS))


def groups_stay_together(kv_heads: int, mesh: tuple[int, ...]) -> bool:
    """True if each query head is on the device of its key/value head, over any axes that heads are split along. Heads
    are split over at most as many devices as there are key/value heads."""
    counts = {prod(axes) for n in range(1, len(mesh) + 1) for axes in combinations(mesh, n)}
    return all(kv_heads % count == 0 for count in counts if count <= kv_heads)


def _gradient(placement: Placement | None, split: bool) -> Placement:
    return Partial() if split and placement == Replicate() else placement or Replicate()


@register_sharding(torch.ops.tilewise.attention.default)
def _forward(q: Spec, k: Spec, v: Spec, *others: Any) -> list[Choice]:
    operands, terms = others[: len(OTHERS)], others[len(OTHERS) :]
    whole = Replicate()  # low bits of o: empty without dropout, which does not support DTensors
    choices: list[Choice] = []
    for at in _layouts(q, k, operands):
        statistics = at.q if terms[ScoreNumbers._fields.index("statistics")] else whole  # or an empty tensor
        choices.append(([at.q, at.q, whole, statistics], [*at.inputs, *(None,) * len(terms)]))
    return choices


@register_sharding(torch.ops.tilewise.attention_backward.default)
def _backward(do: Spec | None, dlse: Spec | None, q: Spec, k: Spec, v: Spec, *others: Any) -> list[Choice]:
    """Return the choices of the backward; others: other inputs, o, lse, low bits of o, terms, and needs."""
    operands, terms_and_needs = others[: len(OTHERS)], others[len(OTHERS) + 3 :]
    saved = None if others[len(OTHERS) + 2] is None else Replicate()  # low bits of o, empty
    *_, needs = terms_and_needs
    choices: list[Choice] = []
    for at in _layouts(q, k, operands):
        cotangents = [None if x is None else at.q for x in (do, dlse)]
        arguments = [*cotangents, *at.inputs, at.q, at.q, saved, *(None,) * len(terms_and_needs)]
        split = at.q != Replicate()
        # A gradient that is not required is empty and replicated.
        gradients: list[Placement | None] = [
            _gradient(placement, split) if need else Replicate()
            for placement, need in zip(at.differentiated, needs, strict=True)
        ]
        choices.append((gradients, arguments))
    return choices
