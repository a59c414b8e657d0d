"""Register and shared-memory layouts for wgmma."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


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
