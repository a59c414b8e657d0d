"""The walk of a program over tiles of keys or queries: an interval that the band leaves, or, with a mask, a list.

Twins of `tilewise.spec.visibility`. `summary_kernel` reads the mask once and says of each tile what is left of it;
`list_kernel` writes for each tile of queries, or of keys, the tiles that it visits. A tile that the mask hides is then
never read, and full ones, where they have a loop of their own, are computed without the mask.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tilewise.backends.kernels.score import INTERPRET, key_tiles, query_tiles
from tilewise.backends.triton.tensors import matrix_of
from tilewise.spec import visibility

# The host's own functions, compiled; the interpreter runs them as they are.
visited = visibility.visited if INTERPRET else triton.jit(visibility.visited)
is_cut = visibility.is_cut if INTERPRET else triton.jit(visibility.is_cut)
is_full = visibility.is_full if INTERPRET else triton.jit(visibility.is_full)

# A list: how many tiles are visited, how many of these are full, how many full or mixed; then the tiles; then one word
# that is read ahead and used for nothing.
HEAD = tl.constexpr(3)
AROUND = tl.constexpr(4)


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
    """What a program visits: places ``begin .. end - 1``, of them ``whole_begin .. whole_end - 1`` of tiles that are
    not cut.

    Of an interval a place is the number of its tile, as in `tiles.key_tiles`; of a list its order in that, and the
    first ``full`` are those of full tiles.
    """

    begin: Any
    whole_begin: Any
    whole_end: Any
    end: Any
    full: Any
    tiles: Any  # of a list: where they are
    first: Any  # the first of them


@triton.jit
def listed_walk(lists, tile, b, h, BY_KEYS: tl.constexpr, FULL: tl.constexpr, APART: tl.constexpr, sizes, c):
    """What `list_kernel` has written for a tile of queries, or BY_KEYS of keys.

    FULL: full tiles have a loop of their own; else they go with the mixed ones. APART: so have mixed tiles, because a
    band makes those that it cuts dearer; else the two go together.
    """
    m_tiles, n_tiles = tl.cdiv(sizes.queries, c.BLOCK_M), tl.cdiv(sizes.keys, c.BLOCK_N)
    count, others = (n_tiles, m_tiles) if BY_KEYS else (m_tiles, n_tiles)
    mb, mh = matrix_of(c.MASK_HOW, b, h)
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
    """How many tiles of a list are full: those in its first places, whatever loops it is walked in."""
    return tl.load(walk.tiles - HEAD + 1)


@triton.jit
def cut_count(walk):
    """How many tiles are cut; they lie on both sides of those that are not."""
    left = walk.whole_begin - walk.begin
    return left + walk.end - walk.whole_end


@triton.jit
def cut_place(walk, i):
    """The place of the ``i``-th tile that is cut."""
    left = walk.whole_begin - walk.begin
    return tl.where(i < left, walk.begin + i, walk.whole_end + i - left)


@triton.jit
def tile_at(walk, place, listed, LISTS: tl.constexpr):
    """The number of the tile at a place, and what the list has in the next.

    ``listed`` is what the step before has found for this place, or `Walk.first`. Read in the step that needs it, a
    number would have to come before its keys and values can be asked for: every step waits for it, or a stage of the
    pipeline goes to it that keys and values then lack.
    """
    if LISTS:
        return listed, tl.load(walk.tiles + place + 1)
    else:
        return place, listed


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
    """The walk of one tile of queries over tiles of keys, or BY_KEYS the other way round, as `visibility.kinds`.

    lists: int32 (batch·heads of the mask, tiles, AROUND + tiles that may be visited), each as at HEAD.
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
