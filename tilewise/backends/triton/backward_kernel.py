"""Backward: FlashAttention-2, Algorithm 2, one program a tile of keys, with the bias gradient in the same pass.

Score tiles are transposed, rows are keys: Pᵀ and dSᵀ then feed dV = Pᵀ dO and dK = dSᵀ Q straight from registers. dQ is
summed over the key tiles by float32 reduce-adds, or, where equal inputs must give equal bits, by a kernel of its own.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.backends.triton.score import in_band, key_tiles, query_tiles, softcap, softcap_derivative, softmax_derivative
from tilewise.backends.triton.tensors import load_rows, load_scores, matrix_of, program_tile

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def prepare_kernel(o, do, lse, dlse, delta, lse2, dq, sizes, HAS_DLSE: tl.constexpr, ZERO_DQ: tl.constexpr, padded_queries, c):
    """delta = rowsum(dO∘O) − dLSE and the LSE in base 2, for `padded_queries` rows a head; zeroes the sum of dQ.

    A row that saw nothing and a row past the end get an LSE of +inf, so that their probabilities are exp2(-inf) = 0.
    """
    tile, h, b = program_tile(tl.cdiv(padded_queries, c.BLOCK_M), sizes.heads, sizes.batch, "tiles")
    m0 = tile * c.BLOCK_M
    m = m0 + tl.arange(0, c.BLOCK_M)
    r = tl.arange(0, c.BLOCK_M)
    d = tl.arange(0, c.BLOCK_DV)
    head = tl.cast(b, tl.int64) * sizes.heads + h
    x = load_rows(o, b, h, m0, r, sizes.queries, d, sizes.value_dim, False, True, c.EVEN_DV, c.WIDE).to(tl.float32)
    dx = load_rows(do, b, h, m0, r, sizes.queries, d, sizes.value_dim, False, True, c.EVEN_DV, c.WIDE).to(tl.float32)
    row = tl.sum(x * dx, 1)
    inside = m < sizes.queries
    if HAS_DLSE:
        row -= tl.load(dlse.pointer + tl.cast(b, tl.int64) * dlse.stride0 + tl.cast(h, tl.int64) * dlse.stride1
                       + m.to(tl.int64) * dlse.stride2, mask=inside, other=0.0)  # fmt: skip
    natural = tl.load(lse + head * sizes.queries + m, mask=inside, other=-float("inf"))
    at = head * padded_queries + m
    tl.store(delta + at, row)
    tl.store(lse2 + at, tl.where(natural == -float("inf"), float("inf"), natural * LOG2E))
    if ZERO_DQ:
        dk = tl.arange(0, c.BLOCK_D)
        at = (head * sizes.head_dim + dk)[:, None] * padded_queries + m[None, :]
        tl.store(dq + at, tl.zeros([c.BLOCK_D, c.BLOCK_M], tl.float32), mask=(dk < sizes.head_dim)[:, None])


@triton.jit
def _tile_gradients(k, v, q, do, lse2, delta, bias, mask, bias_how, mask_how, terms, sizes, b, h, m0, n0, PARTIAL: tl.constexpr, c):  # fmt: skip
    """One transposed tile: Pᵀ, and dSᵀ with respect to the product Q Kᵀ·scale and to the biased score.

    PARTIAL: the tile reaches past the band, the keys or the queries.
    """
    rows = tl.arange(0, c.BLOCK_M)[None, :]
    cols = tl.arange(0, c.BLOCK_N)[:, None]
    if c.BIAS:
        added = load_scores(bias, bias_how, b, h, m0, n0, rows, cols, sizes.queries, sizes.keys, PARTIAL, c.WIDE).to(tl.float32)
    if c.BIAS and not terms.HAS_CAP:
        start = tl.broadcast_to(added * terms.bias_unit, [c.BLOCK_N, c.BLOCK_M])
        s = tl.dot(k, q.T, start, input_precision=c.PRECISION)
    else:
        s = tl.dot(k, q.T, input_precision=c.PRECISION)
    if terms.HAS_CAP:
        s = softcap(s * terms.scale, terms.cap)
        slope = softcap_derivative(s, terms.cap)
        if c.BIAS:
            s += added
    p = tl.exp2(s * terms.exponent - lse2[None, :])
    if PARTIAL or c.MASK:
        visible = (n0 + cols < sizes.keys) & (rows >= 0)
        if PARTIAL:
            visible &= in_band(m0 + rows, n0 + cols, terms)
        if c.MASK:
            visible &= load_scores(mask, mask_how, b, h, m0, n0, rows, cols, sizes.queries, sizes.keys, PARTIAL, c.WIDE) != 0
        p = tl.where(visible, p, 0.0)
    dp = tl.dot(v, do.T, input_precision=c.PRECISION)
    db = softmax_derivative(p, dp, delta[None, :])
    ds = db
    if terms.HAS_CAP:
        ds = db * slope
    return p, ds, db


@triton.jit
def _load_keys(x, x_rows, b, hk, n0, sizes, cols, col_end, EVEN: tl.constexpr, c):
    """The tile of k or v that a program keeps, with rows that are not finite as 0 where something may be hidden.

    That hides nothing: such a row, if it was seen, has made the LSE or delta of the query NaN. If it was not, it must
    not turn dS = 0 into NaN. The second load is there because wgmma takes loaded tiles from shared memory, but keeps a
    computed one in registers, 64 of them a thread.
    """
    n = tl.arange(0, c.BLOCK_N)
    if c.HIDES:
        tile = load_rows(x_rows, b, hk, n0, n, sizes.keys, cols, col_end, False, True, EVEN, c.WIDE)
        finite = tl.min((tl.abs(tile) < float("inf")).to(tl.int32), 1)
        end = tl.where(finite != 0, sizes.keys, 0)  # a row that is not finite lies past its own end
        return load_rows(x_rows, b, hk, n0, n, end, cols, col_end, False, True, EVEN, c.WIDE)
    else:
        return load_rows(x, b, hk, n0, n, sizes.keys, cols, col_end, c.TMA, True, EVEN, c.WIDE)


@triton.jit
def _load_stats(x, b, h, m0, rows, padded_queries, sizes, c):
    """LSE or delta of a tile of queries. By TMA too: as pointers their addresses alone would take 64 registers."""
    if c.TMA:
        return x.load([b * sizes.heads + h, m0]).reshape([c.BLOCK_M])
    else:
        return tl.load(x + (tl.cast(b, tl.int64) * sizes.heads + h) * padded_queries + m0 + rows)


@triton.jit
def _add_rows(dq, value, b, h, m0, padded_queries, sizes, c):
    """Reduce-add a float32 tile of dQᵀ."""
    head = tl.cast(b, tl.int64) * sizes.heads + h
    if c.TMA:
        dq.atomic_add([b * sizes.heads + h, 0, m0], value.reshape([1, c.BLOCK_D, c.BLOCK_M]))
    else:
        m = m0 + tl.arange(0, c.BLOCK_M)
        d = tl.arange(0, c.BLOCK_D)
        at = (head * sizes.head_dim + d)[:, None] * padded_queries + m[None, :]
        tl.atomic_add(dq + at, value, mask=(d < sizes.head_dim)[:, None], sem="relaxed")


@triton.jit
def _give_bias(dbias, how, db, b, h, m0, n0, sizes, c):
    """The bias gradient of one transposed tile leaves: stored, or reduced where the bias is shared by several tiles."""
    mb, mh = matrix_of(how, b, h)
    if c.DBIAS_TMA:
        if c.DBIAS == "store":
            dbias.store([mb, mh, m0, n0], tl.trans(db).to(dbias.dtype).reshape([1, 1, c.BLOCK_M, c.BLOCK_N]))
        else:
            dbias.atomic_add([mb, mh, m0, n0], tl.trans(db).reshape([1, 1, c.BLOCK_M, c.BLOCK_N]))
    else:
        m = m0 + tl.arange(0, c.BLOCK_M)
        n = n0 + tl.arange(0, c.BLOCK_N)
        base = dbias.pointer + tl.cast(mb, tl.int64) * dbias.stride0 + tl.cast(mh, tl.int64) * dbias.stride1
        if c.DBIAS == "rows":
            tl.atomic_add(base + m, tl.sum(db, 0), mask=m < sizes.queries, sem="relaxed")
        else:
            at = base + m.to(tl.int64)[None, :] * dbias.stride2 + n.to(tl.int64)[:, None] * dbias.stride3
            inside = (m < sizes.queries)[None, :] & (n < sizes.keys)[:, None]
            if c.DBIAS == "store":
                tl.store(at, db.to(dbias.pointer.dtype.element_ty), mask=inside)
            else:
                tl.atomic_add(at, db, mask=inside, sem="relaxed")


@triton.jit
def _visit(dk, dv, dcol, k, v, q, do, lse2, delta, bias, mask, dq, dbias, bias_how, mask_how, terms, sizes,
           padded_queries, b, h, tile, n0, PARTIAL: tl.constexpr, c):  # fmt: skip
    """One tile of queries, seen from the keys: every gradient that it takes part in."""
    m0 = tl.cast(tile, tl.int32) * c.BLOCK_M
    r = tl.arange(0, c.BLOCK_M)
    l = _load_stats(lse2, b, h, m0, r, padded_queries, sizes, c)
    delta_row = _load_stats(delta, b, h, m0, r, padded_queries, sizes, c)
    q_tile = load_rows(q, b, h, m0, r, sizes.queries, tl.arange(0, c.BLOCK_D), sizes.head_dim, c.TMA, PARTIAL, c.EVEN_D, c.WIDE)
    do_tile = load_rows(do, b, h, m0, r, sizes.queries, tl.arange(0, c.BLOCK_DV), sizes.value_dim, c.TMA, PARTIAL, c.EVEN_DV, c.WIDE)
    p, ds, db = _tile_gradients(k, v, q_tile, do_tile, l, delta_row, bias, mask,
                                bias_how, mask_how, terms, sizes, b, h, m0, n0, PARTIAL, c)  # fmt: skip
    if c.WANT_V:
        dv = tl.dot(p.to(do_tile.dtype), do_tile, dv, input_precision=c.PRECISION)
    ds = ds.to(q_tile.dtype)
    if c.WANT_K:
        dk = tl.dot(ds, q_tile, dk, input_precision=c.PRECISION)
    if c.WANT_Q:
        _add_rows(dq, tl.dot(k.T, ds, input_precision=c.PRECISION), b, h, m0, padded_queries, sizes, c)
    if c.DBIAS == "cols":
        dcol += tl.sum(db, 1)
    elif c.DBIAS != "none":
        _give_bias(dbias, bias_how, db, b, h, m0, n0, sizes, c)
    return dk, dv, dcol


@triton.jit
def backward_kernel(q, k, v, k_rows, v_rows, do, lse2, delta, bias, mask, dq, dk, dv, dbias, bias_how, mask_how, terms, sizes, padded_queries, c):
    """dK and dV of one tile of keys, its share of dQ, and dBias; walks the query heads of the group."""
    tiles = tl.cdiv(sizes.keys, c.BLOCK_N)
    tile, hk, b = program_tile(tiles, sizes.heads // sizes.group, sizes.batch, c.ORDER)
    n0 = tile * c.BLOCK_N
    cols = tl.arange(0, c.BLOCK_N)
    d, e = tl.arange(0, c.BLOCK_D), tl.arange(0, c.BLOCK_DV)
    k_tile = _load_keys(k, k_rows, b, hk, n0, sizes, d, sizes.head_dim, c.EVEN_D, c)
    v_tile = _load_keys(v, v_rows, b, hk, n0, sizes, e, sizes.value_dim, c.EVEN_DV, c)
    begin, full_begin, full_end, end = query_tiles(
        n0, tl.minimum(c.BLOCK_N, sizes.keys - n0), sizes.queries, terms.lo, terms.hi, c.BLOCK_M
    )
    if n0 + c.BLOCK_N > sizes.keys:  # keys past the end: every tile is partial
        full_begin = begin
        full_end = begin

    dk_sum = tl.zeros([c.BLOCK_N, c.BLOCK_D], tl.float32)
    dv_sum = tl.zeros([c.BLOCK_N, c.BLOCK_DV], tl.float32)
    for g in range(0, sizes.group):
        h = hk * sizes.group + g
        dcol = tl.zeros([c.BLOCK_N], tl.float32)
        for i in tl.range(full_begin, full_end):
            dk_sum, dv_sum, dcol = _visit(dk_sum, dv_sum, dcol, k_tile, v_tile, q, do, lse2, delta, bias, mask, dq, dbias,
                                          bias_how, mask_how, terms, sizes, padded_queries, b, h, i, n0, False, c)  # fmt: skip
        left = full_begin - begin
        for i in tl.range(0, left + end - full_end):  # the partial tiles on both sides of the full ones
            t = tl.where(i < left, begin + i, full_end + i - left)
            dk_sum, dv_sum, dcol = _visit(dk_sum, dv_sum, dcol, k_tile, v_tile, q, do, lse2, delta, bias, mask, dq, dbias,
                                          bias_how, mask_how, terms, sizes, padded_queries, b, h, t, n0, True, c)  # fmt: skip
        if c.DBIAS == "cols":
            mb, mh = matrix_of(bias_how, b, h)
            base = dbias.pointer + tl.cast(mb, tl.int64) * dbias.stride0 + tl.cast(mh, tl.int64) * dbias.stride1
            if bias_how.COLS:
                tl.atomic_add(base + n0 + cols, dcol, mask=n0 + cols < sizes.keys, sem="relaxed")
            else:
                tl.atomic_add(base, tl.sum(dcol, 0), sem="relaxed")

    n = n0 + cols
    if c.WANT_K:
        _store_rows(dk, dk_sum * terms.scale, b, hk, n, sizes.keys, d, sizes.head_dim)
    if c.WANT_V:
        _store_rows(dv, dv_sum, b, hk, n, sizes.keys, e, sizes.value_dim)


@triton.jit
def _store_rows(x, value, b, h, rows, row_end, cols, col_end):
    at = x.pointer + tl.cast(b, tl.int64) * x.stride0 + tl.cast(h, tl.int64) * x.stride1
    at = at + rows.to(tl.int64)[:, None] * x.stride2 + cols.to(tl.int64)[None, :] * x.stride3
    tl.store(at, value.to(x.pointer.dtype.element_ty), mask=(rows < row_end)[:, None] & (cols < col_end)[None, :])


@triton.jit
def finish_kernel(dq_sum, dq, terms, sizes, padded_queries, c):
    """dQ = scale · (sum of dQᵀ)ᵀ in dQ's dtype."""
    tile, h, b = program_tile(tl.cdiv(sizes.queries, c.BLOCK_M), sizes.heads, sizes.batch, "tiles")
    m = tile * c.BLOCK_M + tl.arange(0, c.BLOCK_M)
    d = tl.arange(0, c.BLOCK_D)
    head = tl.cast(b, tl.int64) * sizes.heads + h
    at = (head * sizes.head_dim + d)[:, None] * padded_queries + m[None, :]
    value = tl.load(dq_sum + at, mask=(d < sizes.head_dim)[:, None], other=0.0)
    _store_rows(dq, tl.trans(value) * terms.scale, b, h, m, sizes.queries, d, sizes.head_dim)
