"""The walk of a program over tiles of keys or queries: an interval that the band leaves, or, with a mask, a list.

Twins of `tilewise.score.visibility`. `summary_kernel` reads the mask once and says of each tile what is left of it;
`list_kernel` writes for each tile of queries, or of keys, the tiles that it visits. A tile that the mask hides is then
never read, and one that it leaves whole is computed without the mask.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tilewise.backends.score import INTERPRET, key_tiles, query_tiles
from tilewise.backends.triton.tensors import matrix_of
from tilewise.score import visibility

# The host's own functions, compiled; the interpreter runs them as they are.
visited = visibility.visited if INTERPRET else triton.jit(visibility.visited)
is_full = visibility.is_full if INTERPRET else triton.jit(visibility.is_full)
entry = visibility.entry if INTERPRET else triton.jit(visibility.entry)


class Masking(NamedTuple):
    """What the kernels that read the mask know when they are compiled; every field is a tl.constexpr."""

    BLOCK_M: Any
    BLOCK_N: Any
    ROWS: Any  # the mask is full along the queries, or one row for all
    COLS: Any
    BY_KEYS: Any  # a tile of keys visits tiles of queries
    TILES: Any  # that may be visited, the next power of two
    EVEN: Any  # no tile is full beside one that reaches past its end: the backward's loads then look at both ends


class Walk(NamedTuple):
    """What a program visits: places ``begin .. end - 1``, of full tiles in ``full_begin .. full_end - 1``.

    Of an interval a place is the number of its tile, as in `tiles.key_tiles`; of a list it is that of an entry.
    """

    begin: Any
    full_begin: Any
    full_end: Any
    end: Any
    entries: Any  # of a list, the first


@triton.jit
def listed_walk(lists, tile, b, h, BY_KEYS: tl.constexpr, sizes, c):
    """What `list_kernel` has written for a tile of queries, or BY_KEYS of keys."""
    m_tiles, n_tiles = tl.cdiv(sizes.queries, c.BLOCK_M), tl.cdiv(sizes.keys, c.BLOCK_N)
    count, others = (n_tiles, m_tiles) if BY_KEYS else (m_tiles, n_tiles)
    mb, mh = matrix_of(c.MASK_HOW, b, h)
    matrix = tl.cast(mb, tl.int64) * (sizes.heads // c.MASK_HOW.GROUP) + mh
    at = lists + (matrix * count + tile) * (others + 2)
    full = 0
    if not (BY_KEYS and c.WANT_Q):  # with dQ among its products a loop of their own spills: no tile counts as full
        full = tl.load(at + 1)
    return Walk(0, 0, full, tl.load(at), at + 2)


@triton.jit
def other_count(walk):
    """How many tiles are not full; they lie on both sides of the full ones."""
    left = walk.full_begin - walk.begin
    return left + walk.end - walk.full_end


@triton.jit
def other_place(walk, i):
    """The place of the ``i``-th tile that is not full."""
    left = walk.full_begin - walk.begin
    return tl.where(i < left, walk.begin + i, walk.full_end + i - left)


@triton.jit
def tile_at(walk, place, LISTS: tl.constexpr):
    """The number of the tile at a place, and whether the mask has to be read: of an interval, always."""
    if LISTS:
        found = tl.load(walk.entries + place)
        return found >> 2, (found >> 1) & 1
    else:
        return place, 1


@triton.jit
def state_of(states, b, h, m, n, sizes, c):
    """What the mask leaves of one tile."""
    m_count = tl.cdiv(sizes.queries, c.BLOCK_M) if c.MASK_HOW.ROWS else 1
    n_count = tl.cdiv(sizes.keys, c.BLOCK_N) if c.MASK_HOW.COLS else 1
    mb, mh = matrix_of(c.MASK_HOW, b, h)
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
    """What the mask leaves of one tile: HIDDEN, MIXED or WHOLE, of its elements inside the tensor.

    mask: `Strided`, of ``heads`` heads. states: int8 (batch·heads, tiles of queries, tiles of keys) of the mask; along
    an axis on which it broadcasts there is one.
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
    """The walk of one tile of queries over tiles of keys, or BY_KEYS the other way round, as `visibility.entries`.

    lists: int32 (batch·heads of the mask, tiles, 2 + tiles that may be visited): how many are visited, how many of
    these are full, then an entry of each.
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
    full = (visits & is_full(n, full_begin, full_end, state)).to(tl.int32)
    other = visits.to(tl.int32) - full
    fulls = tl.sum(full, 0)
    place = tl.where(full != 0, tl.cumsum(full, 0), fulls + tl.cumsum(other, 0)) - 1
    at_list = lists + tl.cast(pid, tl.int64) * (others + 2)
    tl.store(at_list, fulls + tl.sum(other, 0))
    tl.store(at_list + 1, fulls)
    tl.store(at_list + 2 + place, entry(n, full_begin, full_end, state), mask=visits)
