"""Keys that are hidden from all queries, as one more step of K·Qᵀ: of 16 dimensions of which all but the first are 0.

The first is 1 of every query, and 0 or -inf of a key. So what is hidden costs a tensor core's step, which small heads
leave idle, and no instruction for each score. A key that is not finite makes the score NaN though it is hidden: its
rows are the repair kernel's.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise.backends.gluon.score import mask_of

WIDTH = gl.constexpr(16)  # dimensions of a step of wgmma


@gluon.constexpr_function
def _layout(rows, dtype):
    return gl.NVMMASharedLayout.get_default_for([rows, WIDTH.value], dtype)


@gluon.jit
def new_step_tiles(DTYPE: gl.constexpr, count, rows):
    """Tiles [rows, WIDTH] in shared memory, ``count`` of them."""
    return gl.allocate_shared_memory(DTYPE, [count, rows, WIDTH], _layout(rows, DTYPE))


@gluon.jit
def store_step(tile, first):
    """A tile with ``first``, of rows, in the first dimension and 0 in the others; a fence is to follow."""
    L: gl.constexpr = first.type.layout.parent
    dims = gl.arange(0, WIDTH, gl.SliceLayout(0, L))
    tile.store(gl.where((dims == 0)[None, :], first[:, None], 0.0).to(tile.dtype))


@gluon.jit
def store_ones(tile):
    """What is multiplied by a `store_step` of keys, by four warps."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0])
    store_step(tile, gl.full([tile.shape[0]], 1.0, gl.float32, gl.SliceLayout(1, L)))


@gluon.jit
def hidden_keys_of_element(x, work_tile, sizes, c):
    """In the backward's elements, in a role of four warps: 0 for keys of a work tile that are visible, -inf for others;
    of the bits that `mask_kernels.summary_kernel` has written BY_KEYS, of which those of a key are alike."""
    L: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0]))
    keys = gl.arange(0, c.BLOCK_N, L)
    nth = mask_of(work_tile.b, work_tile.hk * sizes.group, sizes.kv_heads * sizes.group, c) * sizes.key_tiles
    at = x.bits + (nth + work_tile.n0 // c.BLOCK_N) * (2 * c.BLOCK_N) + keys // 16 * 32 + keys % 8 * 4
    there = (keys >= 0) & (work_tile.b < x.k.shape[0])
    seen = (gl.load(at, mask=there, other=0) >> (keys // 8 % 2 * 16)) & 1
    return gl.where(seen != 0, 0.0, -float("inf"))


@gluon.jit
def hide_keys(x, shared, work_tile, sizes, c):
    """In the backward, before the fence behind which K is read: the step of an element's keys, where a mask hides
    some."""
    if c.HIDES_KEYS:
        store_step(shared.hiding[0], hidden_keys_of_element(x, work_tile, sizes, c))


@gluon.jit
def without_nan(bias):
    """The bias with -inf for NaN, which a hidden key may have beside it. A query that sees a NaN has one for its LSE,
    and so for all of its P."""
    gl.static_assert(bias.dtype == gl.bfloat16 or bias.dtype == gl.float16)
    PAIR: gl.constexpr = "bf16x2" if bias.dtype == gl.bfloat16 else "f16x2"
    LEAST: gl.constexpr = "0xff80ff80" if bias.dtype == gl.bfloat16 else "0xfc00fc00"
    return gl.inline_asm_elementwise(
        f"{{ .reg .b32 x; mov.b32 x, {LEAST}; max.{PAIR} $0, $1, x; }}", "=r,r", [bias], dtype=bias.dtype, is_pure=True,
        pack=2,
    )  # fmt: skip


@gluon.jit
def hidden_keys(x, tile, n, sizes, c):
    """In the forward, in a role of one warp: 0 for the keys of the ``n``-th tile that are visible, -inf for others; of
    the bits that `mask_kernels.summary_kernel` has written, or of the end of the keys."""
    L: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([1, 8], [16, 2], [1, 1], [1, 0]))
    cols = gl.arange(0, c.BLOCK_N, L)
    if c.MASK:  # whose bits are 0 past the last key
        at = x.bits + 4 * (mask_of(tile.b, tile.h, sizes.heads, c) * gl.cdiv(sizes.keys, c.BLOCK_N) + n)
        seen = (gl.load(at + cols % 8 // 2) >> (cols // 8 * 2 + cols % 2)) & 1
        return gl.where(seen != 0, 0.0, -float("inf"))
    else:
        return gl.where(n * c.BLOCK_N + cols < sizes.keys, 0.0, -float("inf"))
