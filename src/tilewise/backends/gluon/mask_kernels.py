"""Kernels that summarise a mask tile by tile, once before the forward and once before the backward.

`summary_kernel` reads a bool mask and writes a bit-packed copy of an eighth of its size, in the order in which threads
read it, and for each tile whether it is empty, partial or full. `tile_summary_kernel` does this for a block mask, but
writes bits only where a tile is visited. `tile_list_kernel` lists the key tiles that each query tile visits: empty
tiles are left out, and only partial ones read their bits. With `MaskConstants.BY_KEYS`, for the backward, key tiles
visit query tiles.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tilewise.backends.kernels.block_mask import FULL_TILE, pairs
from tilewise.backends.kernels.score import key_tiles, query_tiles


class MaskConstants(NamedTuple):
    """Compile-time constants of the mask kernels; every field is a tl.constexpr."""

    BLOCK_N: Any  # keys per tile
    WARPGROUPS: Any  # warpgroups per query tile, 64 queries each
    ROWS: Any  # the mask differs between queries
    TILES: Any  # tiles that may be visited, rounded up to a power of two
    BY_KEYS: Any  # a key tile visits tiles of 64 queries
    SPARSE: Any  # only visited tiles have their bits written
    DQ_ORDER: Any  # entries have an order for dQ, see `tile_list_kernel`
    BANDED: Any  # a causal or local window hides pairs as well
    AT_ONCE: Any  # tiles per program of `tile_summary_kernel`
    LONGEST_FIRST: Any  # work tiles run in the order of `longest_first_kernel`


@triton.jit
def summary_kernel(mask, bits, states, heads, rows, keys, c):
    """Write the bits and the state of one tile of 64 rows of the mask.

    mask: `Strided`, with ``heads`` heads and ``rows`` rows. bits: (batch·heads, rows, key tiles, 4) int32; bit 2·j + i
    of word w is column 8·j + 2·w + i of the tile: thread w of four has these columns in a row of wgmma's result.
    states: (batch·heads, tiles of 64 rows, key tiles) int8: 0 empty, 1 partial, 2 full, within the tensor.

    BY_KEYS: the scores are transposed, and a thread of wgmma's result has two keys, k and k + 8 of sixteen, so that one
    word holds both. bits: (batch·heads, key tiles, tiles of 64 rows, BLOCK_N / 16, 8, 4); bit 16·h + 2·j + i of word
    (s, k, w) is key 16·s + 8·h + k in row 8·j + 2·w + i. states: (batch·heads, key tiles, tiles of 64 rows). A mask of
    one row gets a tile of 64 equal rows.
    """
    key_count = tl.cdiv(keys, c.BLOCK_N)
    row_count = tl.cdiv(rows, 64)
    pid = tl.program_id(0)
    n, m, bh = pid % key_count, pid // key_count % row_count, pid // key_count // row_count
    r = m * 64 + tl.arange(0, 64)
    col = tl.arange(0, c.BLOCK_N)
    shown = rows
    if c.BY_KEYS and not c.ROWS:
        shown = 64
    inside = (r < shown)[:, None] & (col < keys - n * c.BLOCK_N)[None, :]
    at = mask.pointer + tl.cast(bh // heads, tl.int64) * mask.stride0 + tl.cast(bh % heads, tl.int64) * mask.stride1
    at += r.to(tl.int64)[:, None] * mask.stride2 + (n * c.BLOCK_N + col).to(tl.int64)[None, :] * mask.stride3
    seen = (tl.load(at, mask=inside, other=0) != 0).to(tl.int32)
    _store_bits(bits, seen, bh, m, n, rows, keys, c)
    some = tl.max(tl.max(seen, 1), 0)
    all_ = tl.min(tl.min(tl.where(inside, seen, 1), 1), 0)
    _store_state(states, some, all_, True, bh, m, n, row_count, key_count, c)


@triton.jit
def tile_summary_kernel(x, bits, states, rows, keys, how, c):
    """Like `summary_kernel`, but for AT_ONCE adjacent tiles of a block mask; most need no look at their pairs.

    x: the tensors of the block mask, a record. how: `TileHow` for tiles of 64 by BLOCK_N.

    A query tile visits a key tile if any of its 64-row tiles there is not empty, and then reads the bits of all of
    them: these bits are written. Where all are full the forward reads no bits, and none are written; the backward still
    reads the bits of a tile that the window or the end of the tensor cuts.
    """
    key_count = tl.cdiv(keys, c.BLOCK_N)
    row_count = tl.cdiv(rows, 64)
    groups = tl.cdiv(key_count, c.AT_ONCE)
    pid = tl.program_id(0)
    first, m, bh = pid % groups * c.AT_ONCE, pid // groups % row_count, pid // groups // row_count
    matrix = bh.to(tl.int64)
    i = tl.arange(0, c.AT_ONCE)
    n = first + i
    tile_n = (n * c.BLOCK_N // how.TILE_N)[:, None] + tl.arange(0, how.SPAN_N)[None, :]
    met = tile_n * how.TILE_N < tl.minimum((n + 1) * c.BLOCK_N, keys)[:, None]
    visited = tl.zeros([c.AT_ONCE], tl.int32)
    full = tl.full([c.AT_ONCE], 1, tl.int32)
    for w in tl.static_range(c.WARPGROUPS):
        row = tl.minimum(m // c.WARPGROUPS * c.WARPGROUPS + w, row_count - 1) * 64 // how.TILE_M
        at = x.tiles + (matrix * tl.cdiv(rows, how.TILE_M) + row) * tl.cdiv(keys, how.TILE_N)
        number = tl.load(at + tile_n, mask=met, other=0)
        visited = tl.maximum(visited, tl.max(number, 1))
        full = tl.minimum(full, tl.min((~met | (number == FULL_TILE)).to(tl.int32), 1))
    wanted = (visited > 0) & (full == 0)
    if c.BY_KEYS:
        cut = c.BANDED | (m * 64 + 64 > rows) | ((n + 1) * c.BLOCK_N > keys)
        wanted = (visited > 0) & ((full == 0) | cut)
    _store_state(states, full, full, (n < key_count) & ~wanted, bh, m, n, row_count, key_count, c)
    for j in tl.range(0, tl.minimum(c.AT_ONCE, key_count - first), num_stages=1, disable_licm=True):
        if tl.sum(tl.where(i == j, wanted.to(tl.int32), 0), 0) != 0:
            this = first + j
            if how.LAYOUT == "intervals":
                some, all_ = _store_interval_bits(x, bits, matrix, bh, m, this, rows, keys, c)
            else:
                r, col = m * 64 + tl.arange(0, 64)[:, None], this * c.BLOCK_N + tl.arange(0, c.BLOCK_N)[None, :]
                inside = (r < rows) & (col < keys)
                r, col = tl.minimum(r, rows - 1), tl.minimum(col, keys - 1)
                seen = inside & pairs(x, how, matrix, r, col, m * 64, this * c.BLOCK_N, rows, keys)
                seen = seen.to(tl.int32)
                _store_bits(bits, seen, bh, m, this, rows, keys, c)
                some = tl.max(tl.max(seen, 1), 0)
                all_ = tl.min(tl.min(tl.where(inside, seen, 1), 1), 0)
            _store_state(states, some, all_, True, bh, m, this, row_count, key_count, c)


@triton.jit
def _store_interval_bits(x, bits, matrix, bh, m, n, rows, keys, c):
    """Like `_store_bits`, but from intervals of queries; return (any pair visible, all pairs visible) of the tile.
    Words are computed where they are stored, without an array of pairs. BY_KEYS: the interval of a key is a run of bits
    in a word; how many of the word's rows are below either end gives the run."""
    key_count, row_count = tl.cdiv(keys, c.BLOCK_N), tl.cdiv(rows, 64)
    row0, key0 = m * 64, n * c.BLOCK_N
    shown = tl.minimum(rows - row0, 64)
    col = tl.arange(0, c.BLOCK_N)
    begin, end = _interval(x, matrix, key0 + col, row0, keys)
    inside = key0 + col < keys
    some = tl.max((inside & (tl.maximum(begin, 0) < tl.minimum(end, shown))).to(tl.int32), 0)
    all_ = tl.min((~inside | ((begin <= 0) & (end >= shown))).to(tl.int32), 0)
    if c.BY_KEYS:
        i = tl.arange(0, 2 * c.BLOCK_N)
        key, two = key0 + i // 32 * 16 + i // 4 % 8, i % 4 * 2
        begin, end = _interval(x, matrix, key, row0, keys)
        word = _run(begin, end, two, shown)
        begin, end = _interval(x, matrix, key + 8, row0, keys)
        word |= _run(begin, end, two, shown) << 16
        tile = (tl.cast(bh, tl.int64) * key_count + n) * row_count + m
        tl.store(bits + tile * (2 * c.BLOCK_N) + i, word)
    else:
        r, w = tl.arange(0, 64), tl.arange(0, 4)
        word = tl.zeros([64, 4], tl.int32)
        for j in tl.range(0, c.BLOCK_N // 8, num_stages=1, loop_unroll_factor=4):
            for i in tl.static_range(2):
                four_begin, four_end = _interval(x, matrix, key0 + 8 * j + 2 * w + i, row0, keys)
                seen = (r[:, None] >= four_begin[None, :]) & (r[:, None] < four_end[None, :])
                word |= seen.to(tl.int32) << (2 * j + i)
        at = bits + ((tl.cast(bh, tl.int64) * rows + row0 + r) * key_count + n)[:, None] * 4 + w[None, :]
        tl.store(at, word, mask=(r < shown)[:, None])
    return some, all_


@triton.jit
def _interval(x, matrix, key, row0, keys):
    """Return the first row of the tile at ``row0`` that sees each key, and the row after the last such."""
    begin = tl.load(x.begins + matrix * keys + key, mask=key < keys, other=0)
    end = tl.load(x.ends + matrix * keys + key, mask=key < keys, other=0)
    return begin - row0, end - row0


@triton.jit
def _run(begin, end, two, shown):
    """Return sixteen bits: bit 2 * j + i is set if row 8 * j + two + i is from ``begin`` on and before ``end`` and
    ``shown``."""
    first = tl.minimum(tl.maximum(begin, 0), shown)
    last = tl.maximum(tl.minimum(end, shown), first)
    before = first // 8 * 2 + tl.minimum(tl.maximum(first % 8 - two, 0), 2)
    until = last // 8 * 2 + tl.minimum(tl.maximum(last % 8 - two, 0), 2)
    return (1 << until) - (1 << before)


@triton.jit
def _store_bits(bits, seen, bh, m, n, rows, keys, c):
    """Store the bits of one tile; seen: int32 (64, BLOCK_N), 0 outside the mask."""
    key_count, row_count = tl.cdiv(keys, c.BLOCK_N), tl.cdiv(rows, 64)
    col = tl.arange(0, c.BLOCK_N)
    if c.BY_KEYS:
        tile = (tl.cast(bh, tl.int64) * key_count + n) * row_count + m
        i = tl.arange(0, 64)
        bit = (2 * (i // 8) + i % 2)[:, None] + (16 * (col // 8 % 2))[None, :]
        words = tl.reshape(seen << bit, [8, 4, 2, c.BLOCK_N // 16, 2, 8])
        words = tl.sum(tl.sum(tl.sum(words, 4), 2), 0)
        words = tl.reshape(tl.permute(words, (1, 2, 0)), [2 * c.BLOCK_N])
        tl.store(bits + tile * (2 * c.BLOCK_N) + tl.arange(0, 2 * c.BLOCK_N), words)
    else:
        r = m * 64 + tl.arange(0, 64)
        words = tl.reshape(seen << (2 * (col // 8) + col % 2)[None, :], [64, c.BLOCK_N // 8, 4, 2])
        words = tl.sum(tl.sum(words, 3), 1)
        at = bits + ((tl.cast(bh, tl.int64) * rows + r) * key_count + n)[:, None] * 4 + tl.arange(0, 4)[None, :]
        tl.store(at, words, mask=(r < rows)[:, None])


@triton.jit
def _store_state(states, some, all_, these, bh, m, n, row_count, key_count, c):
    if c.BY_KEYS:
        tile = (tl.cast(bh, tl.int64) * key_count + n) * row_count + m
    else:
        tile = (tl.cast(bh, tl.int64) * row_count + m) * key_count + n
    tl.store(states + tile, (some + some * all_).to(tl.int8), mask=these)


@triton.jit
def tile_list_kernel(states, bits, tile_list, queries, keys, lo, hi, c):
    """List the key tiles that one query tile visits, from the last to the first; BY_KEYS: query tiles of a key tile.

    tile_list: (batch·heads, query tiles, 1 + key tiles) int32: the count, then for each entry the tile's number · 4, +
    1 if the window or the end of the keys cuts it, + 2 if the mask does. There is at least one entry, possibly an empty
    tile: with SPARSE its bits, not written before, are cleared here.

    BY_KEYS: (batch·heads, key tiles, 1 + query tiles), possibly without entries. DQ_ORDER appends, for each entry, how
    many earlier key tiles visit the same query tile. LONGEST_FIRST appends one number, which `longest_first_kernel`
    writes.
    """
    key_count = tl.cdiv(keys, c.BLOCK_N)
    row_count = tl.cdiv(queries, 64)
    count = key_count if c.BY_KEYS else tl.cdiv(row_count, c.WARPGROUPS)
    others = row_count if c.BY_KEYS else key_count
    pid = tl.program_id(0)
    m, bh = pid % count, pid // count
    n = tl.arange(0, c.TILES)
    some = tl.zeros([c.TILES], tl.int32)
    kind = tl.zeros([c.TILES], tl.int32)
    if c.BY_KEYS:
        begin, full_begin, full_end, end = _queries_of(m, queries, keys, lo, hi, c)
        inside = (n >= begin) & (n < end)
        some = _states_of(states, bh.to(tl.int64) * key_count + m, n, inside, row_count, c)
        kind = 2 - some
    else:
        row0 = m * 64 * c.WARPGROUPS
        rows = tl.minimum(64 * c.WARPGROUPS, queries - row0)
        begin, full_begin, full_end, end = key_tiles(row0, rows, keys, lo, hi, c.BLOCK_N)
        inside = (n >= begin) & (n < end)
        for w in tl.static_range(c.WARPGROUPS):
            if c.ROWS:
                row = bh.to(tl.int64) * row_count + tl.minimum(m * c.WARPGROUPS + w, row_count - 1)
            else:
                row = bh.to(tl.int64)
            state = tl.load(states + row * key_count + n, mask=inside, other=0).to(tl.int32)
            some = tl.maximum(some, state)
            kind = tl.maximum(kind, 2 - state)
    listed_tiles = (inside & (some > 0)).to(tl.int32)
    total = tl.sum(listed_tiles, 0)
    place = total - tl.cumsum(listed_tiles, 0)
    flags = ((n < full_begin) | (n >= full_end)).to(tl.int32) + 2 * (kind > 0).to(tl.int32)
    at = tile_list + tl.cast(pid, tl.int64) * ((2 * others if c.DQ_ORDER else others) + 1 + c.LONGEST_FIRST)
    tl.store(at + 1 + place, 4 * n + flags, mask=listed_tiles != 0)
    if c.BY_KEYS:
        tl.store(at, total)
    else:
        tl.store(at, tl.maximum(total, 1))
        if total == 0:
            hidden = tl.minimum(begin, key_count - 1)
            tl.store(at + 1, 4 * hidden + 3)
            if c.SPARSE:
                for w in tl.static_range(c.WARPGROUPS):
                    r = (m * c.WARPGROUPS + w) * 64 + tl.arange(0, 64)
                    word = 4 * ((bh.to(tl.int64) * queries + r) * key_count + hidden)
                    four = word[:, None] + tl.arange(0, 4)[None, :]
                    tl.store(bits + four, tl.zeros([64, 4], tl.int32), mask=(r < queries)[:, None])
    if c.DQ_ORDER:
        order = tl.zeros([c.TILES], tl.int32)
        for back in range(m):
            before = m - 1 - back
            begin, _, _, end = _queries_of(before, queries, keys, lo, hi, c)
            inside = (n >= begin) & (n < end)
            some = _states_of(states, bh.to(tl.int64) * key_count + before, n, inside, row_count, c)
            order += (some > 0).to(tl.int32)
        tl.store(at + 1 + others + place, order, mask=listed_tiles != 0)


@triton.jit
def key_summary_kernel(mask, bits, tile_list, heads, keys, programs, c):
    """Do the work of `summary_kernel` and `tile_list_kernel` for a mask that all queries share, without a window. Each
    of the ``programs`` query tiles of a matrix reads all keys; the first writes the bits."""
    key_count = tl.cdiv(keys, c.BLOCK_N)
    pid = tl.program_id(0)
    m, bh = pid % programs, pid // programs
    n = tl.arange(0, c.TILES)
    key = tl.arange(0, c.TILES * c.BLOCK_N)
    at = mask.pointer + tl.cast(bh // heads, tl.int64) * mask.stride0 + tl.cast(bh % heads, tl.int64) * mask.stride1
    seen = (tl.load(at + key.to(tl.int64) * mask.stride3, mask=key < keys, other=0) != 0).to(tl.int32)
    if m == 0:
        words = tl.reshape(seen << (2 * (key % c.BLOCK_N // 8) + key % 2), [c.TILES, c.BLOCK_N // 8, 4, 2])
        word = bits + (tl.cast(bh, tl.int64) * key_count + n)[:, None] * 4 + tl.arange(0, 4)[None, :]
        tl.store(word, tl.sum(tl.sum(words, 3), 1), mask=(n < key_count)[:, None])
    count = tl.sum(tl.reshape(seen, [c.TILES, c.BLOCK_N]), 1)
    listed = (count > 0).to(tl.int32)
    total = tl.sum(listed, 0)
    cut = ((n + 1) * c.BLOCK_N > keys).to(tl.int32)
    hidden = (count < tl.minimum(keys - n * c.BLOCK_N, c.BLOCK_N)).to(tl.int32)
    entries = tile_list + tl.cast(pid, tl.int64) * (1 + key_count)
    tl.store(entries + 1 + total - tl.cumsum(listed, 0), 4 * n + 2 * hidden + cut, mask=listed != 0)
    tl.store(entries, tl.maximum(total, 1))
    if total == 0:  # list one tile, as `tile_list_kernel` does
        tl.store(entries + 1, 3)


@triton.jit
def longest_first_kernel(tile_list, count, width, BLOCK: tl.constexpr):
    """Write the order of the ``count`` work tiles of a matrix, longest first, ties by index.

    The number after the i-th list is the index of the i-th longest tile. width: numbers of a list, including this one.

    If the tiles visit most of what is between their first and their last entry, neighbours visit the same tiles and
    stay in step: their order is kept, and the number after the i-th list is -1 - i.
    """
    blocks = tl.cdiv(count, BLOCK)
    pid = tl.program_id(0)
    lists = tile_list + tl.cast(pid // blocks, tl.int64) * count * width
    i = pid % blocks * BLOCK + tl.arange(0, BLOCK)
    length = tl.load(lists + i * width, mask=i < count, other=-1)
    place = tl.zeros([BLOCK], tl.int32)
    visited, between = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    for first in range(0, count, BLOCK):
        j = first + tl.arange(0, BLOCK)
        at = lists + j * width
        other = tl.load(at, mask=j < count, other=-1)
        before = (other[None, :] > length[:, None]) | ((other[None, :] == length[:, None]) & (j[None, :] < i[:, None]))
        place += tl.sum((before & (j < count)[None, :]).to(tl.int32), 1)
        some = other > 0
        ends = tl.load(at + 1, mask=some, other=0) // 4 - tl.load(at + other, mask=some, other=0) // 4
        visited += tl.where(some, other, 0)
        between += tl.where(some, ends + 1, 0)
    if 2 * tl.sum(visited, 0) > tl.sum(between, 0):
        tl.store(lists + i * width + (width - 1), -1 - i, mask=i < count)
    else:
        tl.store(lists + place * width + (width - 1), i, mask=i < count)


@triton.jit
def _queries_of(n, queries, keys, lo, hi, c):
    """Return `query_tiles` of a key tile; no tile is full where the keys end within the key tile."""
    cols = tl.minimum(c.BLOCK_N, keys - n * c.BLOCK_N)
    begin, full_begin, full_end, end = query_tiles(n * c.BLOCK_N, cols, queries, lo, hi, 64)
    if cols < c.BLOCK_N:
        full_begin = end
    return begin, full_begin, full_end, end


@triton.jit
def _states_of(states, row, m, inside, row_count, c):
    """Load the states of query tiles ``m`` of one key tile; 0 where ``inside`` is false."""
    at = states + (row * row_count + m if c.ROWS else row + 0 * m)
    return tl.load(at, mask=inside, other=0).to(tl.int32)
