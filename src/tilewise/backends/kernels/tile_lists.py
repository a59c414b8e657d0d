"""Cache of visible-tile lists for a tile mask that is used again, in other layers and steps."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from tilewise.backends.kernels.block_mask import flat_mask
from tilewise.spec.block_mask import TileTensors
from tilewise.spec.problem import Problem

Lists = TypeVar("Lists", bound=tuple[Tensor | None, ...])
Flat = tuple[Tensor | None, ...]


@dataclass
class _Use(Generic[Lists]):
    """Cache entry of one mask."""

    tensors: tuple[weakref.ref[Tensor] | None, ...]
    state: tuple[int | None, ...]  # `_state` at the last use
    made: tuple[Flat, Lists] | None = None  # from the second use on


class TileListCache(Generic[Lists]):
    """Cache of ``make``, which computes the lists of a mask for one prepared call.

    The second call with an equal tile mask caches its lists until one of the mask's tensors is freed. The first does
    not: a mask that the model recomputes is used once, and its lists would live as long as the tensors that autograd
    saves. Lists larger than the call's q, k, v and o are not cached, nor is anything during CUDA graph capture, since
    the graph may outlive the cache entry.

    Masks are equal if they have the same tensors, with the same version counters, on the same stream.
    """

    def __init__(self, make: Callable[[Flat], Lists], problem: Problem) -> None:
        self._make = make
        self._uses: dict[int, _Use[Lists]] = {}
        p = problem
        elements = p.batch * (p.queries * p.heads + p.keys * p.kv_heads) * (p.head_dim + p.value_dim)
        self._most_bytes = elements * p.dtype.itemsize

    def __call__(self, mask: Tensor | None, tiles: TileTensors | None) -> tuple[Flat, Lists]:
        """Return ``flat_mask(mask, tiles)`` and its lists."""
        if tiles is None or not _may_be_cached(tiles):
            return self._made(mask, tiles)
        state = _state(tiles)
        use = self._uses.get(id(tiles.tiles))
        if use is None or use.state != state or any(_dead(ref, x) for ref, x in zip(use.tensors, tiles, strict=True)):
            self._remember(tiles, state)
            return self._made(mask, tiles)
        if use.made is None:
            flat, lists = self._made(mask, tiles)
            if sum(x.nbytes for x in lists if x is not None) > self._most_bytes:
                return flat, lists
            use.made = flat, lists
        return use.made

    def _made(self, mask: Tensor | None, tiles: TileTensors | None) -> tuple[Flat, Lists]:
        flat = flat_mask(mask, tiles)
        return flat, self._make(flat)

    def _remember(self, tiles: TileTensors, state: tuple[int | None, ...]) -> None:
        key, uses = id(tiles.tiles), self._uses

        def forget(ref: weakref.ref[Tensor]) -> None:
            use = uses.get(key)
            if use is not None and any(ref is x for x in use.tensors):  # keep the entry of a later mask with this id
                uses.pop(key, None)  # another thread may have removed it, for another tensor of the mask

        uses[key] = _Use(tuple(None if x is None else weakref.ref(x, forget) for x in tiles), state)


def flat_and_lists(
    kept: TileListCache[Lists] | None, mask: Tensor | None, tiles: TileTensors | None, none: Lists
) -> tuple[Flat, Lists]:
    """Return the flat mask and its lists from ``kept``; ``none`` as lists if ``kept`` is None."""
    return (flat_mask(mask, tiles), none) if kept is None else kept(mask, tiles)


def _may_be_cached(tiles: TileTensors) -> bool:
    """True if the mask has version counters (no inference tensors) and no CUDA graph is being captured."""
    if any(x is not None and x.is_inference() for x in tiles):
        return False
    assert tiles.tiles is not None
    return not (tiles.tiles.is_cuda and torch.cuda.is_current_stream_capturing())


def _state(tiles: TileTensors) -> tuple[int | None, ...]:
    """Return the version counters of the tensors, and the stream."""
    assert tiles.tiles is not None
    stream = torch.cuda.current_stream(tiles.tiles.device).cuda_stream if tiles.tiles.is_cuda else None
    return (*(None if x is None else x._version for x in tiles), stream)


def _dead(ref: weakref.ref[Tensor] | None, x: Tensor | None) -> bool:
    """True if ``ref`` no longer refers to ``x``."""
    return (None if ref is None else ref()) is not x
