"""Backward: FlashAttention-2, Algorithm 2, one program per tile of keys; also the bias gradient.

Score tiles are transposed (rows are keys), so that Pᵀ and dSᵀ feed dV = Pᵀ dO and dK = dSᵀ Q from registers. dQ is
summed over the key tiles by float32 atomics, or with deterministic=True in `ordered`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tilewise.backends.kernels.dropout import kept, stream
from tilewise.backends.kernels.rounding import with_low_bits
from tilewise.backends.kernels.score import query_tiles, score_tile_gradient, unrounding
from tilewise.backends.triton.blocks import add_product, dot_rows, load_block, read_rows, store_sums, zero_sums
from tilewise.backends.triton.relative import (
    far_count,
    far_place,
    give_parts,
    limits_of,
    near_tiles,
    origins,
)
from tilewise.backends.triton.score import score_products, visible_tile
from tilewise.backends.triton.tensors import (
    QueryRows,
    Reads,
    column_tile,
    dot,
    dq_accum_at,
    flat_place,
    head_at,
    load_rows,
    lse_length,
    matrix_of,
    operand_place,
    prefetch_bias,
    program_tile,
    row_at,
    store_rows,
)
from tilewise.backends.triton.varlen import key_tile, query_tile, rows_from
from tilewise.backends.triton.visibility import Walk, cut_count, cut_place, full_count, listed_walk, tile_at
from tilewise.spec.score import COARSE_LSE

LOG2E = tl.constexpr(1.4426950408889634)
COARSE = tl.constexpr(COARSE_LSE)


@triton.jit
def preprocess_kernel(o, o_low, do, lse, dlse, delta, lse2, dq_accum, mended, sizes, c):
    """Compute `row_statistics` of a tile of queries per program."""
    tile, h, b = program_tile(sizes.padded_queries // c.BLOCK_M, sizes.heads, sizes.batch, "tiles")
    row_statistics(o, o_low, do, lse, dlse, delta, lse2, dq_accum, mended, tile, h, b, sizes, c)


@triton.jit
def row_statistics(o, o_low, do, lse, dlse, delta, lse2, dq_accum, mended, tile, h, b, sizes, c):  # fmt: skip
    """Store delta = rowsum(dO∘O) − dLSE and the base-2 LSE, padded_queries per head; zero dq_accum.

    Fully masked rows and rows past the end get an LSE of +inf, so that their probabilities are exp2(-inf) = 0. So do
    rows with abs(LSE) > COARSE: its rounding changes the probabilities by any factor, up to an overflow into dK and dV.
    o_low: rounding error of a 16-bit o, or None. mended: where to store a dO that makes up for the rounding of lse2,
    see `unrounding`; None if lse is float32.
    """
    m0 = tile * c.BLOCK_M
    m = m0 + tl.arange(0, c.BLOCK_M)
    inside = m < sizes.queries
    head = head_at(b, h, sizes, c)
    for i in tl.static_range(c.DV_BLOCKS):
        o_tile = load_rows(o, b, h, m0, c.BLOCK_M, sizes.queries, "value", False, True, sizes, c, i).to(tl.float32)
        do_tile = load_rows(do, b, h, m0, c.BLOCK_M, sizes.queries, "value", False, True, sizes, c, i).to(tl.float32)
        if o_low is not None:
            low = load_rows(o_low, b, h, m0, c.BLOCK_M, sizes.queries, "value", False, True, sizes, c, i)
            o_tile = with_low_bits(o_tile, low)
        if i == 0:
            natural = tl.load(lse + row_at(head, m, lse_length(sizes, c)), mask=inside, other=-float("inf"))
            left_out = tl.abs(natural) > COARSE  # False for NaN, which must reach the gradients
        if mended is not None:
            if i == 0:
                factor = tl.where(left_out, 1.0, unrounding(natural * LOG2E))
            do_tile = (do_tile * factor[:, None]).to(do.pointer.dtype.element_ty)
            store_rows(mended, do_tile, b, h, m, sizes.queries, sizes.value_dim, c.BLOCK_DV, i)
            do_tile = do_tile.to(tl.float32)
        if i == 0:
            row = tl.sum(o_tile * do_tile, 1)
        else:
            row += tl.sum(o_tile * do_tile, 1)
    if dlse is not None:
        at = dlse.pointer + tl.cast(b, tl.int64) * dlse.stride0 + tl.cast(h, tl.int64) * dlse.stride1
        more = tl.load(at + m.to(tl.int64) * dlse.stride2, mask=inside, other=0.0)
        if mended is not None:
            more *= factor
        row -= more
    at_row = row_at(head, m, sizes.padded_queries)
    tl.store(delta + at_row, tl.where(left_out, 0.0, row))  # 0 · NaN = NaN, if the cotangent is not finite
    tl.store(lse2 + at_row, tl.where(left_out, float("inf"), (natural * LOG2E).to(tl.float32)))
    if c.WANT_Q:
        for i in tl.static_range(c.D_BLOCKS):
            at, within = dq_accum_at(dq_accum, head, m, sizes, c, i)
            tl.store(at, tl.zeros([c.BLOCK_D, c.BLOCK_M], tl.float32), mask=within)


@triton.jit
def finite_kernel(k, v, finite, sizes, c):
    """Compute `mark_finite` of a tile of keys per program, once for the whole backward."""
    kv_heads = sizes.heads // sizes.group
    tile, hk, b = program_tile(tl.cdiv(sizes.keys, c.BLOCK_N), kv_heads, sizes.batch, "tiles")
    mark_finite(k, v, finite, tile, hk, b, sizes.batch, sizes.keys, sizes, c)


@triton.jit
def mark_finite(k, v, finite, tile, hk, b, batch, keys, sizes, c):
    """Store which rows of k and v are finite, (2, B, Hkv, N) bytes."""
    kv_heads = sizes.heads // sizes.group
    n0 = tile * c.BLOCK_N
    n = n0 + tl.arange(0, c.BLOCK_N)
    at = finite + (tl.cast(b, tl.int64) * kv_heads + hk) * keys + n
    for i in tl.static_range(c.D_BLOCKS):
        k_tile = load_rows(k, b, hk, n0, c.BLOCK_N, keys, "head", False, True, sizes, c, i)
        good = tl.min((tl.abs(k_tile) < float("inf")).to(tl.int8), 1)
        if i == 0:  # noqa: SIM108  (a compile-time condition)
            every = good
        else:
            every = tl.minimum(every, good)
    tl.store(at, every, mask=n < keys)
    at += tl.cast(batch, tl.int64) * kv_heads * keys
    for i in tl.static_range(c.DV_BLOCKS):
        v_tile = load_rows(v, b, hk, n0, c.BLOCK_N, keys, "value", False, True, sizes, c, i)
        good = tl.min((tl.abs(v_tile) < float("inf")).to(tl.int8), 1)
        if i == 0:  # noqa: SIM108  (a compile-time condition)
            every = good
        else:
            every = tl.minimum(every, good)
    tl.store(at, every, mask=n < keys)


class OwnKeys(NamedTuple):
    """Keys, values and gradients of a program's own tile of keys, by pointers."""

    k: Any
    v: Any
    finite: Any  # see `mark_finite`
    dk: Any
    dv: Any


@triton.jit
def _load_keys(x, x_rows, finite, b, hk, n0, DIM: tl.constexpr, sizes, c):
    """Load the program's tile of k or v, with rows that are not finite as 0 if some pair may be hidden.

    No error is lost: a visible row that is not finite has made the LSE or delta of its queries NaN, and a hidden one
    must not turn dS = 0 into NaN. The load itself masks these rows, because wgmma reads loaded tiles from shared
    memory, while a computed tile takes 64 registers per thread.
    """
    if c.HIDES:
        n = n0 + tl.arange(0, c.BLOCK_N)
        which = tl.cast(DIM == "value", tl.int64)
        kv_heads, first = sizes.heads // sizes.group, b
        keys = sizes.keys
        if c.PACKED:
            first, keys = b * 0, sizes.total_keys
        row = (which * sizes.batch + first) * kv_heads + hk
        good = tl.load(finite + row * keys + n, mask=n < sizes.keys, other=0)
        end = tl.where(good != 0, sizes.keys, 0)  # row_end = 0 masks a row that is not finite
        tile = read_rows(x_rows, b, hk, n0, c.BLOCK_N, end, DIM, False, True, sizes, c)
    else:
        tile = read_rows(x, b, hk, n0, c.BLOCK_N, sizes.keys, DIM, c.TMA, True, sizes, c)
    return tile


@triton.jit
def load_stats(x, b, h, m0, sizes, c):
    """Load LSE or delta of a tile of queries; by TMA, since pointers would take 64 registers."""
    head = head_at(b, h, sizes, c)
    if c.TMA:
        stats = x.load([head.to(tl.int32), m0]).reshape([c.BLOCK_M])
    else:
        stats = tl.load(x + row_at(head, 0, sizes.padded_queries) + m0 + tl.arange(0, c.BLOCK_M))
    return stats


@triton.jit
def tile_gradients(
    k_tile, v_tile, q_tile, do_tile, lse2, delta, x, words, terms, sizes, b, h, m0, n0, mixed,
    MASKED: tl.constexpr, PARTIAL: tl.constexpr, NEAR: tl.constexpr, c, CLEAN: tl.constexpr = False,
):  # fmt: skip
    """Return Pᵀ of one tile, and dSᵀ with respect to scale·Q Kᵀ and to the biased score.

    Dropped elements of Pᵀ are 0; dV is multiplied by dropout's weight at the end. words: the `Stream` of dropout, or
    None. MASKED: the mask may hide pairs; a tile mask's bits, whose loads are not pipelined, are read only if
    ``mixed``. PARTIAL: the tile reaches past the window, the keys or the queries. NEAR: see `score_products`. CLEAN:
    see `blocks.dot_rows`, of keys and values.
    """
    BITS: tl.constexpr = MASKED and c.MASK_HOW.LAYOUT == "bits"
    SHOWN: tl.constexpr = MASKED and not BITS
    at = QueryRows(b, None, h, h, m0, tl.arange(0, c.BLOCK_M)[None, :])
    cols = tl.arange(0, c.BLOCK_N)[:, None]
    s, slope, _added, _products = score_products(k_tile, q_tile, x, at, n0, cols, PARTIAL, NEAR, terms, sizes, c, CLEAN)
    p = tl.exp2(s * terms.exponent - lse2[None, :])
    if SHOWN or PARTIAL:
        p = tl.where(visible_tile(x, at, n0, cols, terms, sizes, SHOWN, PARTIAL, PARTIAL, c), p, 0.0)
    if BITS:  # noqa: SIM102  (BITS is a compile-time condition, mixed a run-time one)
        if mixed:
            p = tl.where(visible_tile(x, at, n0, cols, terms, sizes, True, False, False, c), p, 0.0)
    dp = dot_rows(v_tile, do_tile, None, "value", CLEAN, sizes, c)
    if words is not None:
        keep = kept(words, m0, at.rows, n0, cols, terms)
        dp = tl.where(keep, dp * terms.weight - delta[None, :], -delta[None, :])  # dP - D in one multiply-add
        ds, db = score_tile_gradient(p, dp, 0.0, slope, terms)
        p = tl.where(keep, p, 0.0)
    else:
        ds, db = score_tile_gradient(p, dp, delta[None, :], slope, terms)
    return p, ds, db


@triton.jit
def _add_queries(dq_accum, value, b, h, m0, sizes, c, block=0):
    """Add a float32 tile of dQᵀ atomically. block: of dimensions."""
    head = head_at(b, h, sizes, c)
    if c.DQ_TMA:
        dq_accum.atomic_add([head.to(tl.int32), block * c.BLOCK_D, m0], value.reshape([1, c.BLOCK_D, c.BLOCK_M]))
    else:
        at, within = dq_accum_at(dq_accum, head, m0 + tl.arange(0, c.BLOCK_M), sizes, c, block)
        tl.atomic_add(at, value, mask=within, sem="relaxed")


@triton.jit
def _give_bias(dbias, how, start, db, b, h, m0, n0, sizes, c):
    """Store one transposed tile's bias gradient, or add it atomically if several tiles share it."""
    if c.DBIAS_TMA:
        mb, mh = matrix_of(how, b, h, sizes.batch)
        value = tl.trans(db).to(dbias.dtype).reshape([1, 1, c.BLOCK_M, c.BLOCK_N])
        if c.DBIAS == "store":
            dbias.store([mb, mh, m0, n0], value)
        else:
            dbias.atomic_add([mb, mh, m0, n0], value)
    else:
        m = m0 + tl.arange(0, c.BLOCK_M)
        n = n0 + tl.arange(0, c.BLOCK_N)
        base, stride2, stride3 = operand_place(dbias, how, start, b, h, sizes)
        if how.FLAT and c.DBIAS == "store":
            at, inside = flat_place(base, stride2, m0, n0, c.BLOCK_M, c.BLOCK_N, sizes, c)
            value = tl.trans(db.to(dbias.pointer.dtype.element_ty))
            value = value.reshape([c.BLOCK_M // 4, 4, c.BLOCK_N // 32, 32]).permute(0, 2, 1, 3)
            value = value.reshape([c.BLOCK_M * c.BLOCK_N])
            tl.store(at, value, mask=inside)
        elif c.DBIAS == "rows":
            tl.atomic_add(base + m.to(tl.int64) * stride2, tl.sum(db, 0), mask=m < sizes.queries, sem="relaxed")
        else:
            at = base + m.to(tl.int64)[None, :] * stride2 + n.to(tl.int64)[:, None] * stride3
            inside = (m < sizes.queries)[None, :] & (n < sizes.keys)[:, None]
            if c.DBIAS == "store":
                tl.store(at, db.to(dbias.pointer.dtype.element_ty), mask=inside)
            else:
                tl.atomic_add(at, db, mask=inside, sem="relaxed")


@triton.jit
def _attend_backward(dk, dv, dcol, k_tile, v_tile, x, words, dq_accum, dbias, terms, sizes, b, h, visit, n0,
                     MASKED: tl.constexpr, PARTIAL: tl.constexpr, NEAR: tl.constexpr, c):  # fmt: skip
    """Add one tile of queries to all gradients. visit: its number, and ``mixed`` of `tile_gradients`."""
    tile, mixed = visit
    m0 = tl.cast(tile, tl.int32) * c.BLOCK_M
    if c.FETCH:
        prefetch_bias(x.bias, c.BIAS_HOW, x.start, b, h, m0 + c.BLOCK_M, n0, sizes, c)
    q_tile = read_rows(x.q, b, h, m0, c.BLOCK_M, sizes.queries, "head", c.TMA, PARTIAL, sizes, c)
    do_tile = read_rows(x.do, b, h, m0, c.BLOCK_M, sizes.queries, "value", c.TMA, PARTIAL, sizes, c)
    lse2 = load_stats(x.lse2, b, h, m0, sizes, c)
    delta = load_stats(x.delta, b, h, m0, sizes, c)
    p, ds, db = tile_gradients(
        k_tile, v_tile, q_tile, do_tile, lse2, delta, x, words, terms, sizes, b, h, m0, n0, mixed, MASKED, PARTIAL,
        NEAR, c,
    )  # fmt: skip
    DTYPE: tl.constexpr = x.do.dtype if c.TMA else x.do.pointer.dtype.element_ty
    if c.WANT_V:
        dv = add_product(dv, p.to(DTYPE), do_tile, x.column, "value", False, sizes, c)
    ds = ds.to(DTYPE)
    if c.WANT_K:
        dk = add_product(dk, ds, q_tile, x.column, "head", False, sizes, c)
    if c.WANT_Q and c.BY_BLOCKS:
        for i in tl.static_range(c.D_TILE):
            block = x.column * c.D_TILE + i
            k_block = load_block(k_tile, block, "head", sizes, c)
            _add_queries(dq_accum, dot(k_block.T, ds, None, c), b, h, m0, sizes, c, block)
    elif c.WANT_Q:
        _add_queries(dq_accum, dot(k_tile.T, ds, None, c), b, h, m0, sizes, c)
    if c.DBIAS == "cols":
        dcol += tl.sum(db, 1)
    if c.COLUMN_TILES == 1:  # noqa: SIM114  (a compile-time condition, the other a run-time one)
        _give_scores(dbias, x, db, b, h, m0, n0, PARTIAL, NEAR, terms, sizes, c)
    elif x.column == 0:
        _give_scores(dbias, x, db, b, h, m0, n0, PARTIAL, NEAR, terms, sizes, c)
    return dk, dv, dcol


@triton.jit
def _give_scores(dbias, x, db, b, h, m0, n0, PARTIAL: tl.constexpr, NEAR: tl.constexpr, terms, sizes, c):
    """Add one transposed tile's gradient of the biased scores to dBias and to the components' gradients."""
    if c.DBIAS != "cols" and c.DBIAS != "none":
        _give_bias(dbias, c.BIAS_HOW, x.start, db, b, h, m0, n0, sizes, c)
    if c.DPARTS:
        at = QueryRows(b, None, h, h, m0, tl.arange(0, c.BLOCK_M)[None, :])
        give_parts(x, db, at, n0, tl.arange(0, c.BLOCK_N)[:, None], PARTIAL, NEAR, terms, sizes, c)


@triton.jit
def backward_kernel(q, k, v, do, lse2, delta, bias, mask, seed, parts, lists, lengths, own, dq_accum, dbias, terms,
                    sizes, c):  # fmt: skip
    """Compute dK and dV of one tile of keys, and its share of dQ, dBias and components' gradients.

    Loops over the query heads of the group. Of more than 256 columns a program computes one tile, and the program of
    the first one also dBias and components' gradients. parts: a `PartTensors`, or None. lengths: of a packed batch,
    `Lengths` of pointers, or None. own: `OwnKeys`.
    """
    FULL: tl.constexpr = c.LISTS and not c.WANT_Q  # with the dQ product a third loop spills
    # Without a window only the ends cut tiles: partial and cut tiles then share one loop.
    APART: tl.constexpr = terms.HAS_LO or terms.HAS_HI or not c.LISTS
    LARGE: tl.constexpr = c.BIAS and c.BLOCK_D > 128  # here unmasked loads spill more
    CUT: tl.constexpr = APART or c.RAGGED_M or c.RAGGED_N or LARGE
    # ptxas: loop-invariant values hoisted out of the loop spill 200 to 670 bytes on sm_90; with disable_licm at most
    # 32, in a tenth fewer instructions. At 64 dimensions registers suffice and disable_licm takes more instructions.
    IN_STEPS: tl.constexpr = c.TMA and (c.BLOCK_D > 64 or c.BY_BLOCKS)
    tiles = tl.cdiv(sizes.keys, c.BLOCK_N)
    own_k, own_v, finite, dk, dv, start = own.k, own.v, own.finite, own.dk, own.dv, 0
    if c.PACKED:
        tiles = sizes.total_keys // c.BLOCK_N + sizes.batch
        tile, hk, b = program_tile(tiles, sizes.heads // sizes.group, 1, c.ORDER, c.COLUMN_TILES)
        b, tile, start, sizes = key_tile(lengths, tile, sizes, c)
        q, do = rows_from(q, start.query), rows_from(do, start.query)
        lse2, delta = lse2 + start.padded, delta + start.padded
        k, v, own_k, own_v = (
            rows_from(k, start.key), rows_from(v, start.key), rows_from(own_k, start.key), rows_from(own_v, start.key)
        )  # fmt: skip
        if c.HIDES:
            finite += start.key
        if c.WANT_Q:
            dq_accum += start.padded
        if c.WANT_K:
            dk = rows_from(dk, start.key)
        if c.WANT_V:
            dv = rows_from(dv, start.key)
    else:
        tile, hk, b = program_tile(tiles, sizes.heads // sizes.group, sizes.batch, c.ORDER, c.COLUMN_TILES)
    column = column_tile(c)
    n0 = tile * c.BLOCK_N
    query_origin, key_origin = origins(parts, terms, b, c)
    x = Reads(q, k, v, do, lse2, delta, bias, mask, parts, query_origin, key_origin, start, column)
    k_tile = _load_keys(k, own_k, finite, b, hk, n0, "head", sizes, c)
    v_tile = _load_keys(v, own_v, finite, b, hk, n0, "value", sizes, c)
    count = tl.minimum(c.BLOCK_N, sizes.keys - n0)
    lo, hi = limits_of(x, terms, c)
    begin, full_begin, full_end, end = query_tiles(n0, count, sizes.queries, lo, hi, c.BLOCK_M)
    if n0 + c.BLOCK_N > sizes.keys:  # keys past the end: every tile is cut
        full_begin = begin
        full_end = begin

    near_begin, near_end = full_begin, full_end
    if c.FAR:
        near_begin, near_end = near_tiles(x, n0, count, full_begin, full_end, True, terms, sizes, c)

    dk_sum = zero_sums(c.BLOCK_N, "head", c)
    dv_sum = zero_sums(c.BLOCK_N, "value", c)
    for g in range(0, sizes.group):
        h = hk * sizes.group + g
        words = None
        if seed is not None:
            words = stream(seed, b, h, terms)
        dcol = tl.zeros([c.BLOCK_N], tl.float32)
        if c.LISTS:
            walk = listed_walk(lists, tile, b, h, True, FULL, APART, sizes, c)
        else:
            walk = Walk(begin, full_begin, full_end, end, full_begin, 0, 0)
        listed, fulls = walk.first, 0
        if c.LISTS:
            fulls = full_count(walk)
        if FULL:
            for i in tl.range(0, walk.full, disable_licm=IN_STEPS):
                t, listed = tile_at(walk, i, listed, c.LISTS)
                dk_sum, dv_sum, dcol = _attend_backward(
                    dk_sum, dv_sum, dcol, k_tile, v_tile, x, words, dq_accum, dbias, terms, sizes, b, h, (t, False),
                    n0, False, False, True, c,
                )  # fmt: skip
        whole_begin, whole_end = walk.full, walk.whole_end
        if c.FAR:
            whole_begin, whole_end = near_begin, near_end
            for i in tl.range(0, far_count(full_begin, near_begin, near_end, full_end), disable_licm=IN_STEPS):
                t = far_place(i, full_begin, near_begin, near_end)
                dk_sum, dv_sum, dcol = _attend_backward(
                    dk_sum, dv_sum, dcol, k_tile, v_tile, x, words, dq_accum, dbias, terms, sizes, b, h, (t, True),
                    n0, c.MASK, False, False, c,
                )  # fmt: skip
        if APART:
            for i in tl.range(whole_begin, whole_end, disable_licm=IN_STEPS):
                t, listed = tile_at(walk, i, listed, c.LISTS)
                dk_sum, dv_sum, dcol = _attend_backward(
                    dk_sum, dv_sum, dcol, k_tile, v_tile, x, words, dq_accum, dbias, terms, sizes, b, h,
                    (t, i >= fulls), n0, c.MASK, False, True, c,
                )  # fmt: skip
        for i in tl.range(0, cut_count(walk), disable_licm=IN_STEPS):
            place = cut_place(walk, i)
            mixed = place >= fulls
            if APART:
                mixed = True
            t, listed = tile_at(walk, place, listed, c.LISTS)
            dk_sum, dv_sum, dcol = _attend_backward(
                dk_sum, dv_sum, dcol, k_tile, v_tile, x, words, dq_accum, dbias, terms, sizes, b, h, (t, mixed), n0,
                c.MASK, CUT, True, c,
            )  # fmt: skip
        if c.DBIAS == "cols":
            base, _stride2, stride3 = operand_place(dbias, c.BIAS_HOW, start, b, h, sizes)
            if c.BIAS_HOW.COLS:
                n = n0 + tl.arange(0, c.BLOCK_N)
                inside = n < sizes.keys
                if c.COLUMN_TILES > 1:
                    inside &= column == 0
                tl.atomic_add(base + n.to(tl.int64) * stride3, dcol, mask=inside, sem="relaxed")
            elif c.COLUMN_TILES > 1:
                tl.atomic_add(base, tl.sum(dcol, 0), mask=column == 0, sem="relaxed")
            else:
                tl.atomic_add(base, tl.sum(dcol, 0), sem="relaxed")

    n = n0 + tl.arange(0, c.BLOCK_N)
    if c.WANT_K:
        store_sums(dk, dk_sum, terms.scale, b, hk, n, sizes.keys, column, "head", sizes, c)
    if c.WANT_V and seed is not None:
        store_sums(dv, dv_sum, terms.weight, b, hk, n, sizes.keys, column, "value", sizes, c)
    elif c.WANT_V:
        store_sums(dv, dv_sum, None, b, hk, n, sizes.keys, column, "value", sizes, c)


@triton.jit
def postprocess_kernel(dq_accum, dq, lengths, terms, sizes, c):
    """Store dQ = scale · (sum of dQᵀ)ᵀ in dQ's dtype."""
    tile, h, b = program_tile(sizes.padded_queries // c.BLOCK_M, sizes.heads, 1 if c.PACKED else sizes.batch, "tiles")
    if c.PACKED:
        b, tile, start, sizes = query_tile(lengths, tile, sizes, c)
        dq_accum, dq = dq_accum + start.padded, rows_from(dq, start.query)
    m = tile * c.BLOCK_M + tl.arange(0, c.BLOCK_M)
    for i in tl.static_range(c.D_BLOCKS):
        at, within = dq_accum_at(dq_accum, head_at(b, h, sizes, c), m, sizes, c, i)
        value = tl.load(at, mask=within, other=0.0)
        store_rows(dq, tl.trans(value) * terms.scale, b, h, m, sizes.queries, sizes.head_dim, c.BLOCK_D, i)
