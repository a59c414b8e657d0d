"""Masks of intervals that a call makes anew: their tiles by one kernel on a GPU."""

from __future__ import annotations

from torch import Tensor

from tilewise.backends import has_triton
from tilewise.ops.runtime.eager import is_eager
from tilewise.score.tile_tensors import TileTensors
from tilewise.tile_mask import Block, TileMask, checked_block, no_bits


def mask_of_intervals(begins: Tensor, ends: Tensor, queries: int, *, block: Block = 128) -> TileMask:
    """`TileMask.from_intervals` of tensors that fit, with the same tensors in it."""
    if not (begins.is_cuda and begins.numel() and is_eager((begins, ends)) and has_triton()):
        return TileMask.from_intervals(begins, ends, queries, block=block)
    from tilewise.backends import kept_keys

    size = checked_block(block)
    first = begins.clamp(0, queries).int().unsqueeze(2).contiguous()
    last = ends.clamp(0, queries).int().unsqueeze(2).maximum(first).contiguous()
    tiles = kept_keys.tiles_of_intervals(first, last, queries, size)
    return TileMask(queries, begins.shape[2], TileTensors(tiles, no_bits(size, tiles.device), first, last))
