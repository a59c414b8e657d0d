"""Register and shared-memory layouts for wgmma."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma


@gluon.constexpr_function
def accumulator(rows, columns, warps=4):
    """Return the layout of a result [rows, columns]; a warpgroup has 64 rows, or half of the columns of 64 rows."""
    if 16 * warps <= rows:
        return gl.NVMMADistributedLayout([3, 0], [warps, 1], [16, columns, 16])
    return gl.NVMMADistributedLayout([3, 0], [4, 2], [16, columns // 2, 16])


@gluon.constexpr_function
def tile_layout(rows, columns, dtype):
    """Return the shared-memory layout of a tile that wgmma reads."""
    return gl.NVMMASharedLayout.get_default_for([1, 1, rows, columns], dtype)


@gluon.constexpr_function
def largest_part(columns):
    """Return the largest power of two that is not above ``columns``."""
    return 1 << (columns.bit_length() - 1)


@gluon.jit
def columns_of(tile, COLS: gl.constexpr):
    """Return the first COLS columns of a tile as a tuple of tiles of powers of two: of 96 columns 64 and 32."""
    FIRST: gl.constexpr = largest_part(COLS)
    if tile.shape[1] == COLS:
        return (tile,)
    elif COLS == FIRST:
        return (tile.slice(0, FIRST, 1),)
    else:
        return (tile.slice(0, FIRST, 1),) + columns_of(tile.slice(FIRST, FIRST, 1), COLS - FIRST)  # noqa: RUF005


@gluon.jit
def times_transposed(first, second, start, STARTS: gl.constexpr):
    """Issue the product of ``first`` and ``second`` transposed, added to ``start`` with STARTS.

    first, second: tuples of tiles of equal columns, see `columns_of`; those of ``first`` may be in registers."""
    s = start
    for i in gl.static_range(len(first)):
        s = warpgroup_mma(first[i], second[i].permute((1, 0)), s, use_acc=STARTS or i > 0, is_async=True)
    return s
