"""Mask of keys for all queries, as one more step of K·Qᵀ of 16 dimensions, of which only the first is used.

It is 1 in every query, and 0 or -inf in a key. So masking costs a step of the tensor cores, which small heads leave
idle, and no instruction per score. A masked key that is not finite still makes the score NaN: the NaN fix-up recomputes
its rows.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise.backends.gluon.score import mask_of

WIDTH = gl.constexpr(16)  # dimensions of a wgmma step


@gluon.constexpr_function
def _layout(rows, dtype):
    return gl.NVMMASharedLayout.get_default_for([rows, WIDTH.value], dtype)


@gluon.jit
def new_step_tiles(DTYPE: gl.constexpr, count, rows):
    """Allocate ``count`` tiles [rows, WIDTH] in shared memory."""
    return gl.allocate_shared_memory(DTYPE, [count, rows, WIDTH], _layout(rows, DTYPE))


@gluon.jit
def store_step(tile, first):
    """Store ``first``, one number per row, in a tile's first dimension and 0 in the others; a fence must follow."""
    L: gl.constexpr = first.type.layout.parent
    dims = gl.arange(0, WIDTH, gl.SliceLayout(0, L))
    tile.store(gl.where((dims == 0)[None, :], first[:, None], 0.0).to(tile.dtype))


@gluon.jit
def store_ones(tile):
    """Store the factor of a `store_step` of keys; called by four warps."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0])
    store_step(tile, gl.full([tile.shape[0]], 1.0, gl.float32, gl.SliceLayout(1, L)))


@gluon.jit
def hidden_keys_of_element(x, work_tile, sizes, c):
    """Return 0 for visible keys of a backward work tile and -inf for others; called by a role of four warps. Reads the
    bits that `mask_kernels.summary_kernel` has written BY_KEYS; all bits of a key are equal."""
    L: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0]))
    keys = gl.arange(0, c.BLOCK_N, L)
    nth = mask_of(work_tile.b, work_tile.hk * sizes.group, sizes.kv_heads * sizes.group, c) * sizes.key_tiles
    at = x.bits + (nth + work_tile.n0 // c.BLOCK_N) * (2 * c.BLOCK_N) + keys // 16 * 32 + keys % 8 * 4
    there = (keys >= 0) & (work_tile.b < x.k.shape[0])
    seen = (gl.load(at, mask=there, other=0) >> (keys // 8 % 2 * 16)) & 1
    return gl.where(seen != 0, 0.0, -float("inf"))


@gluon.jit
def hide_keys(x, shared, work_tile, sizes, c):
    """Store the masking step of a batch element's keys, if a mask hides some; the backward's fence before reading K
    follows."""
    if c.HIDES_KEYS:
        store_step(shared.hiding[0], hidden_keys_of_element(x, work_tile, sizes, c))


@gluon.jit
def without_nan(bias):
    """Replace NaN by -inf in the bias: a masked key may have NaN. A query that sees a NaN has it in its LSE and all its
    P."""
    gl.static_assert(bias.dtype == gl.bfloat16 or bias.dtype == gl.float16)
    PAIR: gl.constexpr = "bf16x2" if bias.dtype == gl.bfloat16 else "f16x2"
    LEAST: gl.constexpr = "0xff80ff80" if bias.dtype == gl.bfloat16 else "0xfc00fc00"
    return gl.inline_asm_elementwise(
        f"{{ .reg .b32 x; mov.b32 x, {LEAST}; max.{PAIR} $0, $1, x; }}", "=r,r", [bias], dtype=bias.dtype, is_pure=True,
        pack=2,
    )  # fmt: skip


@gluon.jit
def hidden_keys(x, tile, n, sizes, c):
    """Return 0 for visible keys of the ``n``-th tile and -inf for others; called by a role of one warp of the forward.
    Reads the bits that `mask_kernels.summary_kernel` has written, or without a mask the end of the keys."""
    L: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([1, 8], [16, 2], [1, 1], [1, 0]))
    cols = gl.arange(0, c.BLOCK_N, L)
    if c.MASK:  # its bits are 0 past the last key
        at = x.bits + 4 * (mask_of(tile.b, tile.h, sizes.heads, c) * gl.cdiv(sizes.keys, c.BLOCK_N) + n)
        seen = (gl.load(at + cols % 8 // 2) >> (cols // 8 * 2 + cols % 2)) & 1
        return gl.where(seen != 0, 0.0, -float("inf"))
    else:
        return gl.where(n * c.BLOCK_N + cols < sizes.keys, 0.0, -float("inf"))
