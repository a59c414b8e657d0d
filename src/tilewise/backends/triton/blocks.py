"""Rows of more than 256 columns in the Triton kernels, read in blocks of columns.

A product over the columns, Q Kᵀ or dO Vᵀ, is a loop over their blocks. A program computes one tile of columns of a
result, O, dQ, dK or dV; each program of a tile of rows computes the scores again.

With up to 256 columns a tile of rows is one tensor, and the functions here are one load or one product.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tilewise.backends.launch.launcher import Strided
from tilewise.backends.triton.tensors import dot, group_rows, load_group_rows, load_rows, store_rows


class Blocks(NamedTuple):
    """A tile of rows of q, k, v or do, of which `load_block` reads one block of columns."""

    x: Any  # `Strided` or tensor descriptor
    b: Any
    h: Any
    row0: Any
    rows: Any  # 0, 1, ... of the tile
    row_end: Any  # one number, or one per row; rows from there on are 0


@triton.jit
def read_rows(x, b, h, row0, BLOCK: tl.constexpr, row_end, DIM: tl.constexpr, TMA: tl.constexpr, TAIL: tl.constexpr,
              sizes, c):  # fmt: skip
    """Return a tile of rows as a tensor, see `load_rows`, or as `Blocks`."""
    if c.BY_BLOCKS:
        return Blocks(x, b, h, row0, tl.arange(0, BLOCK), row_end)
    else:
        return load_rows(x, b, h, row0, BLOCK, row_end, DIM, TMA, TAIL, sizes, c)


@triton.jit
def read_group_rows(x, at, row_end, sizes, c):
    """Return a tile of queries with PACK_GQA as a tensor, see `load_group_rows`, or as `Blocks`."""
    if c.BY_BLOCKS:
        rows, first = tl.arange(0, c.BLOCK_M), at.b * 0
        end = tl.where(tl.reshape(at.rows, [c.BLOCK_M]) < row_end, c.BLOCK_M, 0)
        return loaded_blocks(
            Blocks(Strided(group_rows(x, at), 0, 0, 0, x.stride3), first, first, first, rows, end), sizes, c
        )
    else:
        return load_group_rows(x, at, row_end, sizes, c)


@triton.jit
def load_block(rows, i, DIM: tl.constexpr, sizes, c):
    """Load block ``i`` of the columns of `Blocks`; 0 outside the tensor."""
    TMA: tl.constexpr = isinstance(rows.x, tl.tensor_descriptor)
    ROWS: tl.constexpr = rows.rows.shape[0]
    return load_rows(rows.x, rows.b, rows.h, rows.row0, ROWS, rows.row_end, DIM, TMA, True, sizes, c, i)


@triton.jit
def read_queries(x, b, h, m0, sizes, c):
    """Return a tile of queries like `read_rows`, see `loaded_blocks`."""
    return loaded_blocks(
        read_rows(x, b, h, m0, c.BLOCK_M, sizes.queries, "head", c.TMA, c.RAGGED_M, sizes, c), sizes, c
    )


@triton.jit
def loaded_blocks(rows, sizes, c):
    """Load all blocks of queries with QUERIES_STAY, as a tuple; else return ``rows`` as they are."""
    if c.QUERIES_STAY:
        found = ()
        for i in tl.static_range(c.D_BLOCKS):
            found = found + (load_block(rows, i, "head", sizes, c),)  # type: ignore[assignment]  # noqa: RUF005
        return found
    else:
        return rows


@triton.jit
def clean(tile, CLEAN: tl.constexpr):
    """Replace elements that are not finite by 0 if CLEAN, for the reason given in `backward._load_keys`."""
    if CLEAN:
        tile = tl.where(tl.abs(tile) < float("inf"), tile, 0.0).to(tile.dtype)
    return tile


@triton.jit
def dot_rows(a, b, acc, DIM: tl.constexpr, CLEAN: tl.constexpr, sizes, c):
    """Return acc + A Bᵀ of two tiles of rows. acc may be None. CLEAN: see `clean`, of blocks of ``a``."""
    if c.QUERIES_STAY and DIM == "head":
        for i in tl.static_range(c.D_BLOCKS):
            acc = dot(a[i], load_block(b, i, DIM, sizes, c).T, acc, c)
        return acc
    elif c.BY_BLOCKS:
        if acc is None:
            acc = tl.zeros([a.rows.shape[0], b.rows.shape[0]], tl.float32)
        for i in tl.range(0, c.D_BLOCKS if DIM == "head" else c.DV_BLOCKS):
            block = load_block(b, i, DIM, sizes, c)
            acc = dot(clean(load_block(a, i, DIM, sizes, c), CLEAN), block.T, acc, c)
        return acc
    else:
        return dot(a, b.T, acc, c)


@triton.jit
def zero_sums(ROWS: tl.constexpr, DIM: tl.constexpr, c):
    """Return zeros for a program's columns of dQ, dK or dV: a tensor, or a tuple of one for each block."""
    COLS: tl.constexpr = c.BLOCK_D if DIM == "head" else c.BLOCK_DV
    if c.BY_BLOCKS:
        found = ()
        for _ in tl.static_range(c.D_TILE if DIM == "head" else c.DV_TILE):
            found = found + (tl.zeros([ROWS, COLS], tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
        return found
    else:
        return tl.zeros([ROWS, COLS], tl.float32)


@triton.jit
def add_product(sums, a, rows, tile, DIM: tl.constexpr, CLEAN: tl.constexpr, sizes, c):
    """Return ``sums`` + A B, where B has the program's tile of columns of ``rows``. sums: as `zero_sums` returns."""
    if c.BY_BLOCKS:
        COUNT: tl.constexpr = c.D_TILE if DIM == "head" else c.DV_TILE
        found = ()
        for i in tl.static_range(COUNT):
            block = clean(load_block(rows, tile * COUNT + i, DIM, sizes, c), CLEAN)
            found = found + (dot(a, block, sums[i], c),)  # type: ignore[assignment]  # noqa: RUF005
        return found
    else:
        return dot(a, rows, sums, c)


@triton.jit
def store_sums(x, sums, factor, b, h, rows, row_end, tile, DIM: tl.constexpr, sizes, c):
    """Store ``sums`` times a factor, which may be None. sums, tile: see `add_product`."""
    COLS: tl.constexpr = c.BLOCK_D if DIM == "head" else c.BLOCK_DV
    end = sizes.head_dim if DIM == "head" else sizes.value_dim
    COUNT: tl.constexpr = c.D_TILE if DIM == "head" else c.DV_TILE
    for i in tl.static_range(COUNT):
        value = sums[i] if c.BY_BLOCKS else sums
        if factor is not None:
            value *= factor
        store_rows(x, value, b, h, rows, row_end, end, COLS, tile * COUNT + i)
