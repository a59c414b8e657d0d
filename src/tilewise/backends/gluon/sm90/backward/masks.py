"""What hides scores in the backward's tiles: a band, the end of the keys, and a bool mask, whose bits come from global
memory to the registers that they hide."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tilewise.backends.gluon.compat import tma_load
from tilewise.backends.gluon.score import in_band
from tilewise.backends.gluon.sm90.backward.scheduler import tile_of_mask


@gluon.jit
def load_bits(x, kind, full, slot, work_tile, h, m, others, sizes, c):
    """Load the bits of the mask for a tile that something cuts, and say what its barrier has to wait for: these and so
    many bytes of ``others``."""
    tile = tile_of_mask(work_tile.b, h, work_tile.n0, sizes, c)
    if c.MASK_ROWS:
        tile = tile * sizes.row_tiles + m
    mbarrier.expect(full, others, pred=kind == 0)
    mbarrier.expect(full, others + x.bits.block_type.nbytes, pred=kind != 0)
    tma_load(x.bits, [(tile * (2 * c.BLOCK_N)).to(gl.int32)], full, slot, pred=kind != 0)


@gluon.jit
def in_words(x):
    """Of every sixteen keys and eight queries one key and the eighth after it, and two neighbouring queries, in each of
    32 threads."""
    return x.reshape([x.shape[0] // 16, 2, 8, x.shape[1] // 8, 4, 2])


@gluon.jit
def visible(p, bits, slot, kind, work_tile, m0, terms, sizes, c):
    """P without what the band, the mask or the end of the keys hides, where one of them cuts the tile.

    ``bits``: in each slot one word for each thread, see `mask_kernels`; 0 past the end of the keys.
    """
    if c.MASK or terms.HAS_LO or terms.HAS_HI or c.RAGGED:  # noqa: SIM102  (decided when it is compiled)
        if kind != 0:
            S: gl.constexpr = p.type.layout
            rows = gl.arange(0, p.shape[1], gl.SliceLayout(0, S))[None, :]
            cols = gl.arange(0, c.BLOCK_N, gl.SliceLayout(1, S))[:, None]
            if terms.HAS_LO or terms.HAS_HI:
                # What of an index differs between the elements of a thread is a constant of each comparison.
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
def drop_what_is_not_finite(tile, c):
    """Zero the elements of K or V that are not finite.

    That hides nothing: such an element, if it was seen, has made the LSE or delta of the query NaN. If it was not, it
    must not turn dS = 0 into NaN.
    """
    THREADS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // c.BLOCK_D, c.BLOCK_D // 8], [c.WARPS, 1], [1, 0])
    value = tile.load(THREADS)
    TYPE: gl.constexpr = "bf16x2" if value.dtype == gl.bfloat16 else "f16x2"
    tile.store(
        gl.inline_asm_elementwise(  # a word of two at a time: one by one it takes twice as many instructions
            "{ .reg .b32 m; abs." + TYPE + " m, $1; set.lt.u32." + TYPE + " m, m, $2; and.b32 $0, $1, m; }", "=r,r,r",
            [value, gl.full_like(value, float("inf"))], dtype=value.dtype, is_pure=True, pack=2,
        )
    )  # fmt: skip
