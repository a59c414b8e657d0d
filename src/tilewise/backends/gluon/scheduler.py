"""Tile scheduler: the query tiles of a forward program, in order, and the key tiles each visits, for all warp roles."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tilewise.backends.gluon.pipeline import release, slot_of, use_of, wait_full
from tilewise.backends.gluon.score import key_tiles, mask_of
from tilewise.backends.gluon.varlen import SeqInfo, listed_tile_and_head


class ForwardSizes(NamedTuple):
    batch: int
    heads: int
    group: int  # query heads that share a key/value head
    queries: int
    keys: int
    row_tiles: int  # query tiles per head
    tiles: int  # query tiles of all heads and batch elements
    at_once: int  # heads whose tiles run together, see `work_tile_at`
    last: int  # the first head of the last such group


class QueryTile(NamedTuple):
    """Work tile of one program: a query tile and the key tiles that it visits."""

    seq: Any
    b: Any  # batch element; 0 for a packed batch
    h: Any
    row0: Any
    count: Any  # number of key tiles
    last: Any
    full_begin: Any
    full_end: Any
    tile_list: Any  # with a mask, the entries that tile_list_kernel lists


class Entry(NamedTuple):
    """One key tile of a work tile."""

    n: Any
    cut: Any  # the window or the end of the keys cuts it
    partial: Any  # the mask cuts it


@gluon.jit
def next_tile_index(tile_index, t, pipelines, c):
    """Return the tile after this program's ``t``-th; with DYNAMIC the one that the loading warp has fetched. In the
    backward with DYNAMIC, return the ``t``-th itself: its first tile is fetched, too."""
    if c.DYNAMIC:
        slot = slot_of(pipelines.tile_indices, t)
        wait_full(pipelines.tile_indices, slot, use_of(pipelines.tile_indices, t))
        ONE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        tile_index = gl.max(pipelines.tile_indices.slots.index(slot).load(ONE), axis=0)
        release(pipelines.tile_indices, slot)  # filled by an ordinary store: no fence
    else:
        tile_index += gl.num_programs(0)
    return tile_index


@gluon.jit
def hand_out_tile_index(pipelines, t, tile_index):
    """Pass the index of the tile after this program's ``t``-th to the other roles; called by a role of one warp."""
    slot = slot_of(pipelines.tile_indices, t)
    mbarrier.wait(pipelines.tile_indices.empty.index(slot), (use_of(pipelines.tile_indices, t) & 1) ^ 1)
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    pipelines.tile_indices.slots.index(slot).store(gl.full([1], tile_index, gl.int32, ONE))
    mbarrier.arrive(pipelines.tile_indices.full.index(slot), count=1)


@gluon.jit
def head_at(n, sizes, c):
    """Return batch element and query head of the ``n``-th head of all. With UNDERFLOWS the last heads run first, those
    of all batch elements, grouped by key/value head: with ALiBi's usual slopes they visit most tiles, so that short
    ones remain at the end."""
    if c.UNDERFLOWS:
        n = sizes.heads * sizes.batch - 1 - n
        h = n // (sizes.group * sizes.batch) * sizes.group + n % sizes.group
        b = n // sizes.group % sizes.batch
    else:
        h = n % sizes.heads
        b = n // sizes.heads
    return b, h


@gluon.jit
def keys_within_reach(begin, end, row0, rows, head, reaches, c):
    """Clip an interval of key tiles to those that have a pair within a head's reach, see `common.underflow`. A head's
    reach includes a distance at which every query sees a key, so that at least one tile remains."""
    if c.FAR_LO:
        begin = gl.maximum(begin, gl.maximum(row0 + gl.load(reaches + 2 * head), 0) // c.BLOCK_N)
    if c.FAR_HI:
        last = gl.maximum(row0 + rows - 1 + gl.load(reaches + 2 * head + 1), 0)
        end = gl.minimum(end, last // c.BLOCK_N + 1)
    return begin, end


@gluon.jit
def work_tile_at(t, x, terms, sizes, c):
    """Return the ``t``-th query tile. The axis that varies fastest decides which tiles share the L2 cache."""
    BLOCK_M: gl.constexpr = 64 * c.WARPGROUPS
    count = sizes.row_tiles
    if c.PACKED:
        b = 0
        seq, m, h, _ = listed_tile_and_head(x.tile_list, t, sizes.heads, BLOCK_M, False)
    elif c.ORDER == "tiles":  # tiles of one head, which share its keys and values
        m = t % count
        b, h = head_at(t // count, sizes, c)
    elif c.ORDER == "longest":  # longest first among `at_once` heads; the last group may have fewer
        first = gl.minimum(t // (sizes.at_once * count) * sizes.at_once, sizes.last)
        width = gl.where(first == sizes.last, sizes.heads * sizes.batch - first, sizes.at_once)
        t -= first * count
        m = t // width
        if terms.HAS_HI or not terms.HAS_LO:  # later queries see more keys
            m = count - 1 - m
        b, h = head_at(first + t % width, sizes, c)
    elif c.ORDER == "batch":  # batch elements that read the same bias tile
        b = t % sizes.batch
        m = t // sizes.batch % count
        h = t // sizes.batch // count
    else:  # heads that read the same bias tile
        h = t % sizes.heads
        m = t // sizes.heads % count
        b = t // sizes.heads // count
    row0 = m * BLOCK_M
    # A fully masked query tile visits one tile of masked keys, so that no role needs a special case.
    if c.MASK:
        tile_list = x.tile_list + (mask_of(b, h, sizes.heads, c) * count + m) * (gl.cdiv(sizes.keys, c.BLOCK_N) + 1)
        seq = SeqInfo(0, 0, sizes.queries, sizes.keys, 0)
        return QueryTile(seq, b, h, row0, gl.load(tile_list), 0, 0, 0, tile_list + 1)
    else:
        if not c.PACKED:
            seq = SeqInfo(0, 0, sizes.queries, sizes.keys, 0)
        lo, hi = terms.lo + seq.diagonal, terms.hi + seq.diagonal
        rows = gl.minimum(BLOCK_M, seq.queries - row0)
        begin, full_begin, full_end, end = key_tiles(row0, rows, seq.keys, lo, hi, c.BLOCK_N)
        if c.UNDERFLOWS:
            begin, end = keys_within_reach(begin, end, row0, rows, b * sizes.heads + h, x.tile_list, c)
        end = gl.maximum(end, begin + 1)
        return QueryTile(seq, b, h, row0, end - begin, end - 1, full_begin, full_end, 0)


@gluon.jit
def work_tile_count(x, sizes, c):
    """Return the number of work tiles; for a packed batch `gluon.varlen.tiles_kernel` has counted them."""
    if c.PACKED:
        return gl.load(x.tile_list) * sizes.heads
    elif c.DOCUMENTS:
        return gl.load(x.tile_count_semaphore + 1)
    else:
        return sizes.tiles


@gluon.jit
def entry_at(i, tile, c):
    """Return the ``i``-th key tile, from the last to the first."""
    if c.MASK:
        listed = gl.load(tile.tile_list + i)
        return Entry(listed >> 2, (listed & 1) != 0, (listed & 2) != 0)
    else:
        n = tile.last - i
        return Entry(n, (n >= tile.full_end) | (n < tile.full_begin), False)


@gluon.jit
def first_entry(tile, terms, c, WARPGROUP: gl.constexpr):
    """Return a warpgroup's first entry; SKIPS_HIDDEN: skip tiles of which none of its queries sees a key. Its last
    entry is never skipped, as a window without a lower limit always includes the first keys."""
    first = 0
    if c.SKIPS_HIDDEN and WARPGROUP + 1 < c.WARPGROUPS:
        hi = terms.hi + tile.seq.diagonal
        last = gl.maximum(tile.row0 + 64 * (WARPGROUP + 1) - 1 + hi, 0) // c.BLOCK_N
        first = gl.maximum(tile.last - last, 0)
    return first


@gluon.jit
def first_full(tile, first):
    """Return the first entry after a warpgroup's first that neither a window without lower limit nor the keys' end
    cuts."""
    return gl.maximum(tile.last + 1 - tile.full_end, first + 1)
