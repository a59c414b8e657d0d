"""Tile masks in kernels: their arguments, and the visible pairs of a kernel's tile.

Mask tiles and kernel tiles differ in size. `tile_summary_kernel` computes the exact state of each kernel tile before a
forward or backward, so the tile lists equal those of a bool mask.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewise.backends.launch.launcher import POINTER, Record
from tilewise.spec.block_mask import FULL, PARTIAL, TileTensors
from tilewise.spec.problem import Problem

FULL_TILE, PARTIAL_TILE = tl.constexpr(FULL), tl.constexpr(PARTIAL)


class TileHow(NamedTuple):
    """Access to a tile mask, in place of a `Broadcast`; every field is a tl.constexpr."""

    BATCH: Any  # as in `Broadcast`
    GROUP: Any
    ROWS: Any
    COLS: Any
    LAYOUT: Any  # "bits" or "intervals"
    TILE_M: Any  # queries of a mask tile
    TILE_N: Any  # keys of a mask tile
    MET_M: Any  # mask tiles that one kernel tile overlaps along the queries, at most
    MET_N: Any  # and along the keys
    SPAN_M: Any  # MET_M rounded up to a power of two
    SPAN_N: Any


def tile_how(problem: Problem, block_m: int, block_n: int, one_row: bool = False) -> TileHow | None:
    """Return how kernels with this tile size read a tile mask; None for a bool mask or no mask.

    one_row: a kernel tile overlaps one row of mask tiles only, whatever its size.
    """
    mask, of = problem.mask, problem.tile_mask
    if mask is None or of is None:
        return None
    met = 1 if one_row else _met(block_m, of.block_m), _met(block_n, of.block_n)
    spans = (triton.next_power_of_2(n) for n in met)
    group = problem.broadcast_group(mask).heads
    return TileHow(mask.batch > 1, group, mask.rows > 1, mask.cols > 1, of.kind, of.block_m, of.block_n, *met, *spans)


def _met(block: int, tile: int) -> int:
    """Return the most mask tiles along an axis that a kernel tile, aligned to its size, overlaps."""
    if tile % block == 0:
        return 1
    return block // tile if block % tile == 0 else block // tile + 2


def tile_layout() -> Record:
    """Return the layout of `flat_mask` for a tile mask."""
    return Record(TileTensors, (POINTER,) * len(TileTensors._fields))


def flat_mask(mask: Tensor | None, tiles: TileTensors | None) -> tuple[Tensor | None, ...]:
    """Return the mask's tensors for a `Launch`.

    Tile numbers are clamped, so that none indexes past the bits. Bits are bytes, to take less of a pipeline's stages.
    """
    if tiles is None:
        return (mask,)
    assert tiles.tiles is not None
    assert tiles.bits is not None
    most = PARTIAL if tiles.begins is not None else FULL + tiles.bits.shape[0]
    return tiles.tiles.clamp(0, most), tiles.bits.view(torch.uint8), *tiles[2:]


@triton.jit
def pairs(x, how, matrix, m, n, m0, n0, queries, keys):
    """Return which pairs (m, n) are visible. All are inside the tensor and in the kernel tile at (m0, n0)."""
    if how.LAYOUT == "intervals":
        place = matrix * keys + n
        visible = (m >= tl.load(x.begins + place)) & (m < tl.load(x.ends + place))
    else:
        m_tiles, n_tiles = tl.cdiv(queries, how.TILE_M), tl.cdiv(keys, how.TILE_N)
        first_m, first_n = m0 // how.TILE_M, n0 // how.TILE_N
        # One number per mask tile: one per pair would fill the pipeline.
        number = tl.load(x.tiles + (matrix * m_tiles + first_m) * n_tiles + first_n)
        for i in tl.static_range(how.MET_M):
            for j in tl.static_range(how.MET_N):
                if i + j > 0:
                    row = matrix * m_tiles + tl.minimum(first_m + i, m_tiles - 1)
                    found = tl.load(x.tiles + row * n_tiles + tl.minimum(first_n + j, n_tiles - 1))
                    this = (m // how.TILE_M == first_m + i) & (n // how.TILE_N == first_n + j)
                    number = tl.where(this, found, number)
        BYTES: tl.constexpr = how.TILE_N // 8
        partial = (number >= PARTIAL_TILE) & (m >= 0) & (n >= 0)
        at = x.bits + (number - PARTIAL_TILE).to(tl.int64) * (how.TILE_M * BYTES)
        byte = tl.load(at + (m % how.TILE_M * BYTES + n % how.TILE_N // 8), mask=partial, other=0)
        visible = (number == FULL_TILE) | (((byte.to(tl.int32) >> (n % 8)) & 1) != 0)
    return visible
