"""Masking in the backward's tiles: windows, the end of the keys, and bit-packed masks."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tilewise.backends.gluon.compat import tma_load
from tilewise.backends.gluon.score import in_band
from tilewise.backends.gluon.sm90.backward.scheduler import tile_of_mask


@gluon.jit
def load_bits(x, kind, full, slot, work_tile, h, m, others, sizes, c):
    """Load the bit-packed mask of a partial tile; its barrier expects these and ``others`` bytes."""
    tile = tile_of_mask(work_tile.b, h, work_tile.n0, sizes, c)
    if c.MASK_ROWS:
        tile = tile * sizes.row_tiles + m
    mbarrier.expect(full, others, pred=kind == 0)
    mbarrier.expect(full, others + x.bits.block_type.nbytes, pred=kind != 0)
    tma_load(x.bits, [(tile * (2 * c.BLOCK_N)).to(gl.int32)], full, slot, pred=kind != 0)


@gluon.jit
def in_words(x):
    """Reshape [keys, queries]: axes 1 and 5 (keys k and k + 8, adjacent queries) are within a thread."""
    return x.reshape([x.shape[0] // 16, 2, 8, x.shape[1] // 8, 4, 2])


@gluon.jit
def visible(p, bits, slot, kind, work_tile, m0, terms, sizes, c):
    """Return P with 0 where the window, the mask or the end of the keys hides a pair of a partial tile.

    bits: in each slot one word for each thread, see `mask_kernels`; 0 past the end of the keys."""
    if c.MASK or terms.HAS_LO or terms.HAS_HI or c.RAGGED:  # noqa: SIM102  (compile-time)
        if kind != 0:
            S: gl.constexpr = p.type.layout
            rows = gl.arange(0, p.shape[1], gl.SliceLayout(0, S))[None, :]
            cols = gl.arange(0, c.BLOCK_N, gl.SliceLayout(1, S))[:, None]
            if terms.HAS_LO or terms.HAS_HI:
                # The part of an index that differs within a thread is a constant of each comparison.
                row, col = rows // 8 * 8 + rows % 2, cols // 8 % 2 * 8
                at = (m0 + work_tile.seq.diagonal - work_tile.n0) + (rows - row) - (cols - col)
                p = gl.where(in_band(at, col - row, 1 << 30, terms), p, 0.0)
            if c.MASK:
                bit = in_words(2 * (rows // 8) + rows % 2 + 16 * (cols // 8 % 2))
                L: gl.constexpr = bit.type.layout
                words = (
                    bits.index(slot).load(gl.BlockedLayout([1], [32], [c.WARPS], [0])).reshape([c.BLOCK_N // 16, 8, 4])
                )
                words = gl.convert_layout(
                    words, gl.SliceLayout(1, gl.SliceLayout(3, gl.SliceLayout(5, L))), assert_trivial=True
                )
                seen = (words.expand_dims(1).expand_dims(3).expand_dims(5) >> bit) & 1
                p = gl.convert_layout(gl.where(seen != 0, in_words(p), 0.0).reshape(p.shape), S, assert_trivial=True)
            elif c.HIDES_END:
                p = gl.where(cols < work_tile.seq.keys - work_tile.n0, p, 0.0)
    return p


@gluon.jit
def drop_what_is_not_finite(tile, COLS: gl.constexpr, c):
    """Zero the elements of K or V that are not finite.

    This hides no error: if a query saw such an element, its LSE or delta is NaN. If none did, it must not turn dS = 0
    into NaN.
    """
    THREADS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // COLS, COLS // 8], [c.WARPS, 1], [1, 0])
    value = tile.load(THREADS)
    TYPE: gl.constexpr = "bf16x2" if value.dtype == gl.bfloat16 else "f16x2"
    tile.store(
        gl.inline_asm_elementwise(  # two elements a word: half of the instructions
            "{ .reg .b32 m; abs." + TYPE + " m, $1; set.lt.u32." + TYPE + " m, m, $2; and.b32 $0, $1, m; }", "=r,r,r",
            [value, gl.full_like(value, float("inf"))], dtype=value.dtype, is_pure=True, pack=2,
        )
    )  # fmt: skip
