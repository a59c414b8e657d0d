"""Triton kernel of the product for every GPU and any strides. One program computes a tile of Y."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tilewise.backends.kernels.products import product


class TritonGemmSizes(NamedTuple):
    rows: int  # M
    cols: int  # N
    inner: int  # K
    kept1: int  # size of the second batch axis of Y
    summed0: int  # sizes of the batch axes that are summed
    summed1: int


class TritonGemmConstants(NamedTuple):
    """Compile-time constants of the kernel; every field is a tl.constexpr."""

    BLOCK_M: Any
    BLOCK_N: Any
    BLOCK_K: Any
    GROUP_M: Any  # rows of tiles that share the L2 cache
    SUMMED: Any  # some batch axis is summed
    EVEN_K: Any  # BLOCK_K divides K
    WIDE: Any  # offsets inside one tile need 64 bits
    C: Any  # c has rows, columns, both or neither: "matrix", "row", "column", "one"; "none" for no c
    PRECISION: Any  # of float32 products


@triton.jit
def tile_at(t, m_tiles, n_tiles, GROUP_M: tl.constexpr):
    """Return (tile row, tile column, batch) of tile t. Groups of GROUP_M tile rows share A and B."""
    g = t // (m_tiles * n_tiles)
    t = t % (m_tiles * n_tiles)
    first = t // (GROUP_M * n_tiles) * GROUP_M
    height = tl.minimum(m_tiles - first, GROUP_M)
    t = t - first * n_tiles
    return first + t % height, t // height, g


@triton.jit
def _offsets(x, stride, k):
    return (x.to(tl.int64) if k.WIDE else x) * stride


@triton.jit
def _accumulate(acc, a_at, b_at, a_step, b_step, sizes, k):
    """Return acc + A B of one pair of matrices."""
    inner = tl.arange(0, k.BLOCK_K)
    for k0 in tl.range(0, sizes.inner, k.BLOCK_K):
        if k.EVEN_K:
            a_tile, b_tile = tl.load(a_at), tl.load(b_at)
        else:
            inside = inner < sizes.inner - k0
            a_tile = tl.load(a_at, mask=inside[None, :], other=0.0)
            b_tile = tl.load(b_at, mask=inside[:, None], other=0.0)
        acc = product(a_tile, b_tile, acc, k.PRECISION, True)
        a_at += a_step
        b_at += b_step
    return acc


@triton.jit(do_not_specialize=["sizes"])  # one kernel for all sizes
def matmul_kernel(a, b, c, y, alpha, beta, sizes, k):
    """Compute one tile of Y = alpha · Σ A B + beta · C. a, b, c, y: `Strided`."""
    m, n, g = tile_at(tl.program_id(0), tl.cdiv(sizes.rows, k.BLOCK_M), tl.cdiv(sizes.cols, k.BLOCK_N), k.GROUP_M)
    g0, g1 = (g // sizes.kept1).to(tl.int64), (g % sizes.kept1).to(tl.int64)
    rows, cols, inner = tl.arange(0, k.BLOCK_M), tl.arange(0, k.BLOCK_N), tl.arange(0, k.BLOCK_K)
    m0, n0 = m * k.BLOCK_M, n * k.BLOCK_N
    row_inside, col_inside = rows < sizes.rows - m0, cols < sizes.cols - n0
    # Rows and columns past the end read the tile's first one; their results are not stored.
    a_rows = tl.max_contiguous(tl.multiple_of(tl.where(row_inside, rows, 0), k.BLOCK_M), k.BLOCK_M)
    b_cols = tl.max_contiguous(tl.multiple_of(tl.where(col_inside, cols, 0), k.BLOCK_N), k.BLOCK_N)
    a_at = a.pointer + g0 * a.stride0 + g1 * a.stride1 + m0.to(tl.int64) * a.stride2
    b_at = b.pointer + g0 * b.stride0 + g1 * b.stride1 + n0.to(tl.int64) * b.stride3
    a_step, b_step = (
        _offsets(tl.full([], k.BLOCK_K, tl.int32), a.stride3, k),
        _offsets(tl.full([], k.BLOCK_K, tl.int32), b.stride2, k),
    )
    a_tile = a_at + (_offsets(a_rows, a.stride2, k)[:, None] + _offsets(inner, a.stride3, k)[None, :])
    b_tile = b_at + (_offsets(inner, b.stride2, k)[:, None] + _offsets(b_cols, b.stride3, k)[None, :])

    acc = tl.zeros([k.BLOCK_M, k.BLOCK_N], tl.float32)
    if k.SUMMED:
        for r in tl.range(0, sizes.summed0 * sizes.summed1):
            r0, r1 = (r // sizes.summed1).to(tl.int64), (r % sizes.summed1).to(tl.int64)
            a_matrix = a_tile + (r0 * a.stride0 + r1 * a.stride1)
            b_matrix = b_tile + (r0 * b.stride0 + r1 * b.stride1)
            acc = _accumulate(acc, a_matrix, b_matrix, a_step, b_step, sizes, k)
    else:
        acc = _accumulate(acc, a_tile, b_tile, a_step, b_step, sizes, k)

    # Triton would wait for C before the first product, so C is added in the epilogue.
    acc = acc * alpha
    if k.C != "none":
        at = c.pointer + g0 * c.stride0 + g1 * c.stride1
        if k.C == "matrix":
            at += m0.to(tl.int64) * c.stride2 + n0.to(tl.int64) * c.stride3
            at = at + (_offsets(rows, c.stride2, k)[:, None] + _offsets(cols, c.stride3, k)[None, :])
            added = tl.load(at, mask=row_inside[:, None] & col_inside[None, :], other=0.0)
        elif k.C == "row":
            at = at + n0.to(tl.int64) * c.stride3 + _offsets(cols, c.stride3, k)
            added = tl.load(at, mask=col_inside, other=0.0)[None, :]
        elif k.C == "column":
            at = at + m0.to(tl.int64) * c.stride2 + _offsets(rows, c.stride2, k)
            added = tl.load(at, mask=row_inside, other=0.0)[:, None]
        else:
            added = tl.load(at)
        acc += added.to(tl.float32) * beta

    at = y.pointer + g0 * y.stride0 + g1 * y.stride1 + m0.to(tl.int64) * y.stride2 + n0
    at = at + (_offsets(rows, y.stride2, k)[:, None] + cols[None, :])
    tl.store(at, acc.to(y.pointer.dtype.element_ty), mask=row_inside[:, None] & col_inside[None, :])
