"""A mask by tiles in the Triton kernels: the lists of tiles that they visit, and the pairs of a tile that is mixed.

Its tiles are of another size than a kernel's. `tile_summary_kernel` says of each tile of a kernel what is left of it,
exactly, so that the lists are those of the bool mask that it stands for; a kernel then reads the pairs of mixed tiles
alone, from their bits or from the intervals of its keys.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewise.backends.launcher import POINTER, Record
from tilewise.backends.triton.config import Config
from tilewise.backends.triton.tensors import matrix_of
from tilewise.problem import Problem
from tilewise.score.tile_tensors import FULL, PARTIAL, TileTensors

_FULL, _PARTIAL = tl.constexpr(FULL), tl.constexpr(PARTIAL)


class TileHow(NamedTuple):
    """How a mask by tiles is read, in the place of a `Broadcast`; every field is a tl.constexpr."""

    BATCH: Any  # as in `Broadcast`
    GROUP: Any
    ROWS: Any
    COLS: Any
    LIES: Any  # "bits" or "intervals"
    TILE_M: Any  # queries and keys of a tile of the mask
    TILE_N: Any
    MET_M: Any  # so many of these a tile of the kernel meets at most
    MET_N: Any
    SPAN_M: Any  # the same, the next power of two
    SPAN_N: Any


def tile_how(problem: Problem, config: Config) -> TileHow | None:
    mask, of = problem.mask, problem.tile_mask
    if mask is None or of is None:
        return None
    # Rows of a packed tile are few queries of several heads, which one tile of the mask holds.
    met = 1 if config.pack_gqa else _met(config.block_m, of.block_m), _met(config.block_n, of.block_n)
    spans = (triton.next_power_of_2(n) for n in met)
    group = problem.broadcast_group(mask).heads
    return TileHow(mask.batch > 1, group, mask.rows > 1, mask.cols > 1, of.kind, of.block_m, of.block_n, *met, *spans)


def _met(block: int, tile: int) -> int:
    """Tiles of the mask that a tile of the kernel meets at most; it begins at a multiple of its own size."""
    if tile % block == 0:
        return 1
    return block // tile if block % tile == 0 else block // tile + 2


def tile_layout() -> Record:
    """The layout of `flat_mask` of a mask by tiles."""
    return Record(TileTensors, (POINTER,) * len(TileTensors._fields))


def flat_mask(mask: Tensor | None, tiles: TileTensors | None) -> tuple[Tensor | None, ...]:
    """A mask for a `Launch`. Of one by tiles no number leads past its bits, whatever it is; and these are bytes, for a
    pipeline has a stage of shared memory for each."""
    if tiles is None:
        return (mask,)
    assert tiles.tiles is not None
    assert tiles.bits is not None
    most = PARTIAL if tiles.begins is not None else FULL + tiles.bits.shape[0]
    return tiles.tiles.clamp(0, most), tiles.bits.view(torch.uint8), *tiles[2:]


@triton.jit
def _pairs(x, how, matrix, m, n, m0, n0, queries, keys):
    """Which of the pairs (m, n) are seen, all of them within the tensor and in the tile of a kernel at (m0, n0)."""
    if how.LIES == "intervals":
        place = matrix * keys + n
        visible = (m >= tl.load(x.begins + place)) & (m < tl.load(x.ends + place))
    else:
        m_tiles, n_tiles = tl.cdiv(queries, how.TILE_M), tl.cdiv(keys, how.TILE_N)
        first_m, first_n = m0 // how.TILE_M, n0 // how.TILE_N
        # One number for each tile, and not one for each pair, which would fill the pipeline.
        number = tl.load(x.tiles + (matrix * m_tiles + first_m) * n_tiles + first_n)
        for i in tl.static_range(how.MET_M):
            for j in tl.static_range(how.MET_N):
                if i + j > 0:
                    row = matrix * m_tiles + tl.minimum(first_m + i, m_tiles - 1)
                    found = tl.load(x.tiles + row * n_tiles + tl.minimum(first_n + j, n_tiles - 1))
                    this = (m // how.TILE_M == first_m + i) & (n // how.TILE_N == first_n + j)
                    number = tl.where(this, found, number)
        BYTES: tl.constexpr = how.TILE_N // 8
        partial = (number >= _PARTIAL) & (m >= 0) & (n >= 0)
        at = x.bits + (number - _PARTIAL).to(tl.int64) * (how.TILE_M * BYTES)
        byte = tl.load(at + (m % how.TILE_M * BYTES + n % how.TILE_N // 8), mask=partial, other=0)
        visible = (number == _FULL) | (((byte.to(tl.int32) >> (n % 8)) & 1) != 0)
    return visible


@triton.jit
def listed_pairs(x, how, at, n0, cols, sizes):
    """Of a tile of scores the visible pairs; what lies past an end is as its last query or key. at: `QueryRows`."""
    head = at.first_head if how.GROUP > 1 else at.head
    mb, mh = matrix_of(how, at.b, head)
    matrix = tl.cast(mb, tl.int64) * (sizes.heads // how.GROUP) + mh
    m = tl.minimum(at.m0 + at.rows, sizes.queries - 1)
    n = tl.minimum(n0 + cols, sizes.keys - 1)
    return _pairs(x, how, matrix, m, n, at.m0, n0, sizes.queries, sizes.keys)


@triton.jit
def tile_summary_kernel(x, states, queries, keys, how, c):
    """What is left of one tile of a kernel, as `visibility.summary_kernel` says it of a bool mask. c: `Masking`.

    Pairs are looked at only where the tiles of the mask do not say it by themselves.
    """
    m_count, n_count = tl.cdiv(queries, c.BLOCK_M), tl.cdiv(keys, c.BLOCK_N)
    pid = tl.program_id(0)
    n0, m0 = pid % n_count * c.BLOCK_N, pid // n_count % m_count * c.BLOCK_M
    matrix = tl.cast(pid // n_count // m_count, tl.int64)
    m_end, n_end = tl.minimum(m0 + c.BLOCK_M, queries), tl.minimum(n0 + c.BLOCK_N, keys)
    tile_m = m0 // how.TILE_M + tl.arange(0, how.SPAN_M)
    tile_n = n0 // how.TILE_N + tl.arange(0, how.SPAN_N)
    met = (tile_m * how.TILE_M < m_end)[:, None] & (tile_n * how.TILE_N < n_end)[None, :]
    row = matrix * tl.cdiv(queries, how.TILE_M) + tile_m
    numbers = tl.load(x.tiles + row[:, None] * tl.cdiv(keys, how.TILE_N) + tile_n[None, :], mask=met, other=0)
    most = tl.max(tl.max(numbers, 1), 0)
    least = tl.min(tl.min(tl.where(met, numbers, most), 1), 0)
    some = (most > 0).to(tl.int32)
    every = (least == most).to(tl.int32)
    if (most >= _PARTIAL) | (least != most):
        r, s = m0 + tl.arange(0, c.BLOCK_M)[:, None], n0 + tl.arange(0, c.BLOCK_N)[None, :]
        m, n = tl.minimum(r, queries - 1), tl.minimum(s, keys - 1)
        inside = (r < queries) & (s < keys)
        seen = inside & _pairs(x, how, matrix, m, n, m0, n0, queries, keys)
        some = tl.max(tl.max(seen.to(tl.int32), 1), 0)
        every = tl.min(tl.min(tl.where(inside, seen.to(tl.int32), 1), 1), 0)
    tl.store(states + pid, (some + some * every).to(tl.int8))
