"""Lists of visible tiles that are made once for a mask by tiles that comes again, in every layer and every step."""

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
    """Of one mask: its tensors, their versions and the stream when it came last, and what was made of it the second
    time."""

    tensors: tuple[weakref.ref[Tensor] | None, ...]
    state: tuple[int | None, ...]
    made: tuple[Flat, Lists] | None = None


class TileListCache(Generic[Lists]):
    """``make``, the maker of lists of one prepared call, which remembers.

    From the second call on that has the same mask by tiles, its lists are kept until one of its tensors dies. Not from
    the first, for a mask that a model computes anew comes once, and its lists would live as long as what autograd
    saves. Nor where they take more than the call's own q, k, v and o; nor in a CUDA graph that is being captured, which
    may outlive them.

    A mask is the same if its tensors are, unchanged as PyTorch counts changes, on the same stream.
    """

    def __init__(self, make: Callable[[Flat], Lists], problem: Problem) -> None:
        self._make = make
        self._uses: dict[int, _Use[Lists]] = {}
        p = problem
        elements = p.batch * (p.queries * p.heads + p.keys * p.kv_heads) * (p.head_dim + p.value_dim)
        self._most_bytes = elements * p.dtype.itemsize

    def __call__(self, mask: Tensor | None, tiles: TileTensors | None) -> tuple[Flat, Lists]:
        """``(flat_mask(mask, tiles), make of that)``."""
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
            if use is not None and any(ref is x for x in use.tensors):  # not one of a later mask at that address
                uses.pop(key, None)  # another tensor of it may die in another thread

        uses[key] = _Use(tuple(None if x is None else weakref.ref(x, forget) for x in tiles), state)


def flat_and_lists(
    kept: TileListCache[Lists] | None, mask: Tensor | None, tiles: TileTensors | None, none: Lists
) -> tuple[Flat, Lists]:
    """The same of ``kept``; where no lists are made of the mask, or there is none, ``none`` in their place."""
    return (flat_mask(mask, tiles), none) if kept is None else kept(mask, tiles)


def _may_be_cached(tiles: TileTensors) -> bool:
    """Its changes are counted, and nothing is being captured."""
    if any(x is not None and x.is_inference() for x in tiles):
        return False
    assert tiles.tiles is not None
    return not (tiles.tiles.is_cuda and torch.cuda.is_current_stream_capturing())


def _state(tiles: TileTensors) -> tuple[int | None, ...]:
    """The tensors' versions, and the stream."""
    assert tiles.tiles is not None
    stream = torch.cuda.current_stream(tiles.tiles.device).cuda_stream if tiles.tiles.is_cuda else None
    return (*(None if x is None else x._version for x in tiles), stream)


def _dead(ref: weakref.ref[Tensor] | None, x: Tensor | None) -> bool:
    """Whether ``x`` is not what was there."""
    return (None if ref is None else ref()) is not x
