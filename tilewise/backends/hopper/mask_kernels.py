"""What a bool mask leaves of each tile of scores, found out once before the forward.

`summary_kernel` reads the mask and writes an eighth of its size: its bits, in the order in which the forward's threads
want them, and of each tile whether it is hidden, mixed or visible. `visits_kernel` lists for each tile of queries the
tiles of keys that it visits: hidden ones are left out, and only mixed ones read their bits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton import knobs

from tilewise.score import tiles

# The host's own function, compiled; Triton's interpreter, in which these kernels are tested, runs it as it is.
key_tiles = tiles.key_tiles if knobs.runtime.interpret else triton.jit(tiles.key_tiles)


class Masking(NamedTuple):
    """What the kernels know when they are compiled; every field is a tl.constexpr."""

    BLOCK_N: Any  # keys of a tile
    WARPGROUPS: Any  # of 64 queries each, in a tile of queries
    ROWS: Any  # the mask differs between queries
    KEY_TILES: Any  # the next power of two


@triton.jit
def summary_kernel(mask, bits, states, heads, rows, keys, c):
    """Bits and state of one tile of 64 rows of the mask.

    mask: `Strided`, of ``heads`` heads and ``rows`` rows. bits: (batch·heads, rows, key tiles, 4) int32; bit 2·j + i of
    word w is column 8·j + 2·w + i of the tile, which is what thread w of four holds in a row of wgmma's result.
    states: (batch·heads, tiles of 64 rows, key tiles) int8: 0 hidden, 1 mixed, 2 visible, inside the tensor.
    """
    key_count = tl.cdiv(keys, c.BLOCK_N)
    row_count = tl.cdiv(rows, 64)
    pid = tl.program_id(0)
    n, m, bh = pid % key_count, pid // key_count % row_count, pid // key_count // row_count
    r = m * 64 + tl.arange(0, 64)
    col = tl.arange(0, c.BLOCK_N)
    inside = (r < rows)[:, None] & (col < keys - n * c.BLOCK_N)[None, :]
    at = mask.pointer + tl.cast(bh // heads, tl.int64) * mask.stride0 + tl.cast(bh % heads, tl.int64) * mask.stride1
    at += r.to(tl.int64)[:, None] * mask.stride2 + (n * c.BLOCK_N + col).to(tl.int64)[None, :] * mask.stride3
    seen = (tl.load(at, mask=inside, other=0) != 0).to(tl.int32)
    words = tl.reshape(seen << (2 * (col // 8) + col % 2)[None, :], [64, c.BLOCK_N // 8, 4, 2])
    words = tl.sum(tl.sum(words, 3), 1)
    at = bits + ((tl.cast(bh, tl.int64) * rows + r) * key_count + n)[:, None] * 4 + tl.arange(0, 4)[None, :]
    tl.store(at, words, mask=(r < rows)[:, None])
    some = tl.max(tl.max(seen, 1), 0)
    all_ = tl.min(tl.min(tl.where(inside, seen, 1), 1), 0)
    tl.store(states + (tl.cast(bh, tl.int64) * row_count + m) * key_count + n, (some + some * all_).to(tl.int8))


@triton.jit
def visits_kernel(states, visits, queries, keys, lo, hi, c):
    """The tiles of keys that one tile of queries visits, from the last to the first.

    visits: (batch·heads, tiles of queries, 1 + key tiles) int32: how many, then of each its number · 4, + 1 if the band
    or the end of the keys cuts it, + 2 if the mask does. There is at least one, which may be hidden.
    """
    key_count = tl.cdiv(keys, c.BLOCK_N)
    row_count = tl.cdiv(queries, 64)
    count = tl.cdiv(row_count, c.WARPGROUPS)
    pid = tl.program_id(0)
    m, bh = pid % count, pid // count
    row0 = m * 64 * c.WARPGROUPS
    rows = tl.minimum(64 * c.WARPGROUPS, queries - row0)
    begin, full_begin, full_end, end = key_tiles(row0, rows, keys, lo, hi, c.BLOCK_N)
    n = tl.arange(0, c.KEY_TILES)
    inside = (n >= begin) & (n < end)
    some = tl.zeros([c.KEY_TILES], tl.int32)
    cut = tl.zeros([c.KEY_TILES], tl.int32)
    for w in tl.static_range(c.WARPGROUPS):
        if c.ROWS:
            row = bh.to(tl.int64) * row_count + tl.minimum(m * c.WARPGROUPS + w, row_count - 1)
        else:
            row = bh.to(tl.int64)
        state = tl.load(states + row * key_count + n, mask=inside, other=0).to(tl.int32)
        some = tl.maximum(some, state)
        cut = tl.maximum(cut, 2 - state)
    visited = (inside & (some > 0)).to(tl.int32)
    total = tl.sum(visited, 0)
    place = total - tl.cumsum(visited, 0)
    flags = ((n < full_begin) | (n >= full_end)).to(tl.int32) + 2 * (cut > 0).to(tl.int32)
    at = visits + tl.cast(pid, tl.int64) * (key_count + 1)
    tl.store(at, tl.maximum(total, 1))
    tl.store(at + 1 + place, 4 * n + flags, mask=visited != 0)
    if total == 0:
        tl.store(at + 1, 4 * tl.minimum(begin, key_count - 1) + 3)
