"""Masking of scores in forward tiles: a bool mask, bit-packed in global memory, a window, and the end of the keys."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise.backends.gluon.score import in_band, mask_of
from tilewise.backends.gluon.sm90.common.softmax import by_thread
from tilewise.backends.gluon.sm90.common.wgmma import accumulator


@gluon.jit
def mask_words(x, entry, tile, sizes, c, WARPGROUP: gl.constexpr):
    """Load the mask bits of a tile that the mask cuts, one word per row for each thread; 0 for other tiles."""
    if c.MASK:
        L: gl.constexpr = by_thread(gl.zeros([64, c.BLOCK_N], gl.float32, accumulator(64, c.BLOCK_N))).type.layout
        WORDS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, L))
        key_count = gl.cdiv(sizes.keys, c.BLOCK_N)
        row0 = tile.row0 + 64 * WARPGROUP
        rows = gl.arange(0, 64, gl.SliceLayout(1, WORDS))[:, None]
        words = gl.arange(0, 4, gl.SliceLayout(0, WORDS))[None, :]
        if c.MASK_ROWS:
            row = (mask_of(tile.b, tile.h, sizes.heads, c) * sizes.queries + row0).to(gl.int64)
            at = x.bits + 4 * (row * key_count + entry.n)
            at += rows * (4 * key_count) + words
        else:
            at = x.bits + 4 * (mask_of(tile.b, tile.h, sizes.heads, c) * key_count + entry.n) + (0 * rows + words)
        return gl.load(at, mask=(rows < sizes.queries - row0) & entry.partial, other=0)
    else:
        return 0


@gluon.jit
def masked(s, words, c):
    """Return scores with -inf where the mask bit is 0; for the order of the bits see mask_kernels."""
    parts = by_thread(s)
    L: gl.constexpr = parts.type.layout
    eights = gl.arange(0, c.BLOCK_N // 8, gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, L))))
    pair = gl.arange(0, 2, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, L))))
    bit = 2 * eights[None, :][:, :, None][:, :, :, None] + pair[None, :][:, None, :][:, :, None, :]
    seen = (words[:, None, :][:, :, :, None] >> bit) & 1
    parts = gl.where(seen != 0, parts, -float("inf"))
    return gl.convert_layout(parts.reshape(s.shape), s.type.layout, assert_trivial=True)


@gluon.jit
def banded(s, row0, keys, terms, c):
    """Return scores with -inf outside the window; ``row0`` and ``keys`` are relative to the tile's first key. ``row0``
    also includes the offset of a sequence's window. Shape [64, BLOCK_N / 8, 8]: a thread has two neighbours of every
    eight columns, so that the index of the eight is a constant of each instruction. Indices of all columns would stay
    in registers for the whole kernel."""
    parts = s.reshape([64, c.BLOCK_N // 8, 8])
    L: gl.constexpr = parts.type.layout
    rows = gl.arange(0, 64, gl.SliceLayout(1, gl.SliceLayout(2, L)))[:, None][:, :, None]
    eights = gl.arange(0, c.BLOCK_N // 8, gl.SliceLayout(0, gl.SliceLayout(2, L)))[None, :][:, :, None]
    within = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, :][:, None, :]
    seen = in_band(rows + row0 - within, 8 * eights, keys - within, terms)
    return gl.convert_layout(gl.where(seen, parts, -float("inf")).reshape(s.shape), s.type.layout, assert_trivial=True)
