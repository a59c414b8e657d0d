"""Tiles that a program visits: an interval given by the window or, with a mask, a list.

Twins of `tilewise.spec.visibility`. `summary_kernel` reads the mask once and stores the state of each tile;
`list_kernel` stores for each tile of queries, or of keys, the tiles that it visits. Empty tiles are never read, and
full ones, if they have their own loop, are computed without the mask.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tilewise.backends.kernels.score import INTERPRET, key_tiles, query_tiles
from tilewise.backends.triton.tensors import matrix_of
from tilewise.spec import visibility

# Compiled host functions; the interpreter runs them directly.
visited = visibility.visited if INTERPRET else triton.jit(visibility.visited)
is_cut = visibility.is_cut if INTERPRET else triton.jit(visibility.is_cut)
is_full = visibility.is_full if INTERPRET else triton.jit(visibility.is_full)

# A list has the number of visited tiles, of full ones, of full or partial ones; the tiles; one word that is read ahead
# but not used.
HEAD = tl.constexpr(3)
AROUND = tl.constexpr(4)


class Masking(NamedTuple):
    """Compile-time parameters of the kernels that read the mask; every field is a tl.constexpr."""

    BLOCK_M: Any
    BLOCK_N: Any
    ROWS: Any  # the mask is full along the queries, else one row for all
    COLS: Any
    BY_KEYS: Any  # a tile of keys visits tiles of queries
    TILES: Any  # most tiles that may be visited, rounded up to a power of two
    EVEN: Any  # an own tile that reaches past its end visits no full tiles: the backward's loads check both ends


class Walk(NamedTuple):
    """Tiles that a program visits: positions ``begin .. end - 1``.

    In an interval a position is a tile's number, as in `tiles.key_tiles`; in a list it is an index.
    """

    begin: Any
    whole_begin: Any  # whole_begin .. whole_end - 1: tiles that window and ends do not cut
    whole_end: Any
    end: Any
    full: Any  # the first ``full`` positions of a list are full tiles
    tiles: Any  # pointer to the tiles of a list
    first: Any  # first tile of a list


@triton.jit
def listed_walk(lists, tile, b, h, BY_KEYS: tl.constexpr, FULL: tl.constexpr, APART: tl.constexpr, sizes, c):
    """Return the `Walk` that `list_kernel` has stored for a tile of queries, or BY_KEYS of keys.

    FULL: full tiles have their own loop; else they share that of the partial ones. APART: partial tiles have their own
    loop, because tiles cut by a window are slower; else they share that of the cut ones.
    """
    m_tiles, n_tiles = tl.cdiv(sizes.queries, c.BLOCK_M), tl.cdiv(sizes.keys, c.BLOCK_N)
    count, others = (n_tiles, m_tiles) if BY_KEYS else (m_tiles, n_tiles)
    mb, mh = matrix_of(c.MASK_HOW, b, h, sizes.batch)
    matrix = tl.cast(mb, tl.int64) * (sizes.heads // c.MASK_HOW.GROUP) + mh
    at = lists + (matrix * count + tile) * (others + AROUND)
    full, whole = 0, 0
    if FULL:
        full = tl.load(at + 1)
        whole = full
    if APART:
        whole = tl.load(at + 2)
    return Walk(0, 0, whole, tl.load(at), full, at + HEAD, tl.load(at + HEAD))


@triton.jit
def full_count(walk):
    """Return how many tiles of a list are full; they are its first ones."""
    return tl.load(walk.tiles - HEAD + 1)


@triton.jit
def cut_count(walk):
    """Return how many tiles are cut: those before and after the others."""
    left = walk.whole_begin - walk.begin
    return left + walk.end - walk.whole_end


@triton.jit
def cut_place(walk, i):
    """Return the position of the ``i``-th cut tile."""
    left = walk.whole_begin - walk.begin
    return tl.where(i < left, walk.begin + i, walk.whole_end + i - left)


@triton.jit
def tile_at(walk, place, listed, LISTS: tl.constexpr):
    """Return the number of the tile at a position, and the list's next number.

    ``listed`` is the number that the previous step loaded for this position, or `Walk.first`. Without this read-ahead
    each step would wait for the number before it can load keys and values, or give it a pipeline stage of theirs.
    """
    if LISTS:
        return listed, tl.load(walk.tiles + place + 1)
    else:
        return place, listed


@triton.jit
def state_of(states, b, h, m, n, sizes, c):
    """Load the mask's state of one tile."""
    m_count = tl.cdiv(sizes.queries, c.BLOCK_M) if c.MASK_HOW.ROWS else 1
    n_count = tl.cdiv(sizes.keys, c.BLOCK_N) if c.MASK_HOW.COLS else 1
    mb, mh = matrix_of(c.MASK_HOW, b, h, sizes.batch)
    matrix = tl.cast(mb, tl.int64) * (sizes.heads // c.MASK_HOW.GROUP) + mh
    row = matrix * m_count
    if c.MASK_HOW.ROWS:
        row += m
    at = states + row * n_count
    if c.MASK_HOW.COLS:
        at += n
    return tl.load(at).to(tl.int32)


@triton.jit
def summary_kernel(mask, states, heads, queries, keys, c):
    """Store the state of one tile: HIDDEN (empty), MIXED (partial) or WHOLE (full).

    mask: `Strided` with ``heads`` heads. states: int8 (batch·heads, tiles of queries, tiles of keys) of the mask, of
    size 1 along queries or keys where the mask broadcasts.
    """
    shown_rows = queries if c.ROWS else 1
    shown_cols = keys if c.COLS else 1
    m_count, n_count = tl.cdiv(shown_rows, c.BLOCK_M), tl.cdiv(shown_cols, c.BLOCK_N)
    pid = tl.program_id(0)
    n, m, matrix = pid % n_count, pid // n_count % m_count, pid // n_count // m_count
    row = m * c.BLOCK_M + tl.arange(0, c.BLOCK_M)
    col = n * c.BLOCK_N + tl.arange(0, c.BLOCK_N)
    at = mask.pointer + tl.cast(matrix // heads, tl.int64) * mask.stride0
    at += tl.cast(matrix % heads, tl.int64) * mask.stride1
    at = at + row.to(tl.int64)[:, None] * mask.stride2 + col.to(tl.int64)[None, :] * mask.stride3
    inside = (row < shown_rows)[:, None] & (col < shown_cols)[None, :]
    seen = (tl.load(at, mask=inside, other=0) != 0).to(tl.int32)
    some = tl.max(tl.max(seen, 1), 0)
    every = tl.min(tl.min(tl.where(inside, seen, 1), 1), 0)
    tl.store(states + pid, (some + some * every).to(tl.int8))


@triton.jit
def list_kernel(states, lists, queries, keys, lo, hi, c):
    """Store the list of one tile of queries, or BY_KEYS of keys, in the order of `visibility.kinds`.

    lists: int32 (batch·heads of the mask, tiles, AROUND + most tiles visited), in the format described at HEAD.
    """
    m_tiles, n_tiles = tl.cdiv(queries, c.BLOCK_M), tl.cdiv(keys, c.BLOCK_N)
    m_count = m_tiles if c.ROWS else 1
    n_count = n_tiles if c.COLS else 1
    count, others = (n_tiles, m_tiles) if c.BY_KEYS else (m_tiles, n_tiles)
    pid = tl.program_id(0)
    tile, matrix = pid % count, tl.cast(pid // count, tl.int64)
    n = tl.arange(0, c.TILES)
    if c.BY_KEYS:
        first, BLOCK = tile * c.BLOCK_N, c.BLOCK_N
        size = tl.minimum(c.BLOCK_N, keys - first)
        begin, full_begin, full_end, end = query_tiles(first, size, queries, lo, hi, c.BLOCK_M)
        row = n if c.ROWS else n * 0
        col = tile if c.COLS else tile * 0
    else:
        first, BLOCK = tile * c.BLOCK_M, c.BLOCK_M
        size = tl.minimum(c.BLOCK_M, queries - first)
        begin, full_begin, full_end, end = key_tiles(first, size, keys, lo, hi, c.BLOCK_N)
        row = tile if c.ROWS else tile * 0
        col = n if c.COLS else n * 0
    if c.EVEN and size < BLOCK:
        full_begin = begin
        full_end = begin
    at = states + matrix * m_count * n_count + row * n_count + col
    state = tl.load(at, mask=(n >= begin) & (n < end), other=0).to(tl.int32)
    visits = visited(n, begin, end, state)
    cut = (visits & is_cut(n, full_begin, full_end)).to(tl.int32)
    full = (visits & is_full(n, full_begin, full_end, state)).to(tl.int32)
    mixed = visits.to(tl.int32) - full - cut
    fulls = tl.sum(full, 0)
    whole = fulls + tl.sum(mixed, 0)
    place = tl.where(mixed != 0, fulls + tl.cumsum(mixed, 0), whole + tl.cumsum(cut, 0))
    place = tl.where(full != 0, tl.cumsum(full, 0), place) - 1
    at_list = lists + tl.cast(pid, tl.int64) * (others + AROUND)
    tl.store(at_list, whole + tl.sum(cut, 0))
    tl.store(at_list + 1, fulls)
    tl.store(at_list + 2, whole)
    tl.store(at_list + HEAD + place, n, mask=visits)
