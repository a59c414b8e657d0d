"""NaN fix-up: recompute rows whose product with a masked key or value was not finite.

The forward kernel multiplies masked pairs like any other: finite data add 0, but 0 · NaN is NaN. Rows that may be
affected have a NaN LSE. This kernel scans the LSE, and ends there if it finds none.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tilewise.backends.gluon.scheduler import ForwardSizes
from tilewise.backends.gluon.varlen import SeqInfo, listed_tile
from tilewise.backends.gluon.varlen_values import first_column
from tilewise.backends.kernels.block_mask import pairs
from tilewise.backends.kernels.dropout import kept, stream
from tilewise.backends.kernels.rounding import low_bits
from tilewise.backends.kernels.score import INTERPRET, key_tiles, score_tile, with_sink
from tilewise.backends.kernels.statistics import LN2, entropy_of, store_statistics

LOG2E = tl.constexpr(1.4426950408889634)
# Triton's interpreter, in which this kernel is tested, computes bfloat16 products wrongly.
MARK = tl.constexpr(tl.float32 if INTERPRET else tl.bfloat16)


class NanFixupConstants(NamedTuple):
    """Compile-time constants of the kernel; every field is a tl.constexpr."""

    BLOCK_M: Any
    BLOCK_N: Any
    BLOCK_D: Any
    BLOCK_DV: Any
    SCAN: Any  # query tiles per scan step
    BIAS: Any
    BIAS_BATCH: Any  # see `Problem.bias_batch`
    BIAS_GROUP: Any
    BIAS_COLS: Any  # the bias differs between keys
    RELATIVE: Any  # the bias is by relative position: `spec.relative.skewed` values
    TOEPLITZ: Any  # the bias is a vector of distances
    MASK: Any
    MASK_BATCH: Any  # see `Problem.mask_period`
    MASK_GROUP: Any
    MASK_COLS: Any  # the mask differs between keys
    MASK_TILES: Any  # the mask is a block mask
    MASK_HOW: Any  # its `TileHow`
    LISTED: Any  # packed batch: queries per listed tile, see varlen; else 0
    STATISTICS: Any  # `StatisticsHow`


@triton.jit
def _load(x, b, h, rows, row_end, cols, col_end, row0=0, col0=0):
    """Load a tile [rows, cols] of a `Strided`, relative to row0 and col0; 0 outside the tensor."""
    at = x.pointer + tl.cast(b, tl.int64) * x.stride0 + tl.cast(h, tl.int64) * x.stride1
    at = at + (row0 + rows).to(tl.int64)[:, None] * x.stride2 + (col0 + cols).to(tl.int64)[None, :] * x.stride3
    return tl.load(at, mask=(rows < row_end)[:, None] & (cols < col_end)[None, :], other=0.0)


@triton.jit
def _load_scores(x, b, h, rows, cols, sizes, seq, COLS: tl.constexpr):
    """Load the tile of a bias or mask; [rows, 1] without columns, as Triton fails on a wider tile of one column."""
    if COLS:
        return _load(x, b, h, rows, sizes.queries, cols, sizes.keys, 0, seq.first_key)
    else:
        return _load(x, b, h, rows, sizes.queries, tl.arange(0, 1), 1, seq.first_query)


@triton.jit
def _load_by_distance(x, b, h, rows, cols, sizes, seq, terms, LISTED: tl.constexpr):
    """Load the tile of a bias by relative position; 0 where a pair has no entry."""
    column = terms.column
    if LISTED:
        column = first_column(seq, terms.first)
    columns = cols + column
    entry = cols[None, :] - (rows + seq.diagonal)[:, None] - terms.first
    inside = (rows < sizes.queries)[:, None] & (entry >= 0) & (entry < terms.entries)
    at = x.pointer + tl.cast(b, tl.int64) * x.stride0 + tl.cast(h, tl.int64) * x.stride1
    at = at + (seq.first_query + rows).to(tl.int64)[:, None] * x.stride2 + columns.to(tl.int64)[None, :]
    return tl.load(at, mask=inside, other=0.0)


@triton.jit
def _load_toeplitz(x, b, h, rows, cols, sizes):
    """Load the tile of a Toeplitz bias."""
    entry = cols[None, :] - rows[:, None] + (sizes.queries - 1)
    inside = (rows < sizes.queries)[:, None] & (cols < sizes.keys)[None, :]
    at = x.pointer + tl.cast(b, tl.int64) * x.stride0 + tl.cast(h, tl.int64) * x.stride1
    return tl.load(at + entry.to(tl.int64) * x.stride3, mask=inside, other=0.0)


@triton.jit
def _matrix(b, h, sizes, r):
    """Return the index of a head's block mask, counted over the mask's batch elements and heads."""
    mask = h // r.MASK_GROUP
    if r.MASK_HOW.BATCH:
        mask += b * (sizes.heads // r.MASK_GROUP)
    return mask.to(tl.int64)


@triton.jit
def _nan_fixup(q, k, v, bias, mask, sink, seed, outputs, results, head_dim, value_dim, terms, seq, sizes, lse_rows, r,
            b, h, m0):  # fmt: skip
    """Recompute the rows of one tile whose LSE is NaN.

    outputs: o and o_low. results: `RowResults`. seq: `SeqInfo`, of a packed batch. sizes: of its sequence. lse_rows:
    rows of the LSE.
    """
    o, o_low = outputs
    lse, statistics = results.lse, results.statistics
    lo, hi = terms.lo + seq.diagonal, terms.hi + seq.diagonal
    rows = m0 + tl.arange(0, r.BLOCK_M)
    dims, value_dims = tl.arange(0, r.BLOCK_D), tl.arange(0, r.BLOCK_DV)
    hk = h // sizes.group
    acc = tl.zeros([r.BLOCK_M, r.BLOCK_DV], tl.float32)
    m_i = tl.full([r.BLOCK_M], -float("inf"), tl.float32)
    l_i = tl.zeros([r.BLOCK_M], tl.float32)
    unbiased, excess = m_i, l_i
    exponent = LOG2E
    if not (r.BIAS or terms.HAS_CAP):  # see `score_tile`
        exponent = LOG2E * terms.scale
    if seed is not None:
        words = stream(seed, tl.cast(b, tl.int32), tl.cast(h, tl.int32), terms)
    begin, _, _, end = key_tiles(m0, tl.minimum(r.BLOCK_M, sizes.queries - m0), sizes.keys, lo, hi, r.BLOCK_N)
    for n in tl.range(begin, end, num_stages=1):
        cols = n * r.BLOCK_N + tl.arange(0, r.BLOCK_N)
        q_tile = _load(q, b, h, rows, sizes.queries, dims, head_dim, seq.first_query)
        k_tile = _load(k, b, hk, cols, sizes.keys, dims, head_dim, seq.first_key)
        products = tl.dot(q_tile, k_tile.T)
        added = products
        if r.BIAS:
            if r.TOEPLITZ:
                added = _load_toeplitz(bias, b, h // r.BIAS_GROUP, rows, cols, sizes).to(tl.float32)
            elif r.RELATIVE:
                added = _load_by_distance(bias, b, h // r.BIAS_GROUP, rows, cols, sizes, seq, terms, r.LISTED > 0)
                added = added.to(tl.float32)
            else:
                bias_b = b // (sizes.batch // r.BIAS_BATCH) if r.BIAS_BATCH > 1 else b
                added = _load_scores(bias, bias_b, h // r.BIAS_GROUP, rows, cols, sizes, seq, r.BIAS_COLS)
                added = added.to(tl.float32)
        distance = cols[None, :] - rows[:, None]
        s, _slope = score_tile(products, added, terms, r.BIAS)
        visible = (cols < sizes.keys)[None, :] & (distance >= lo) & (distance <= hi)
        if r.BIAS:
            visible &= added != -float("inf")
        if r.MASK:
            if r.MASK_TILES:
                matrix = _matrix(b, h, sizes, r)
                last_row, last_col = tl.minimum(rows, sizes.queries - 1), tl.minimum(cols, sizes.keys - 1)
                visible &= pairs(mask, r.MASK_HOW, matrix, last_row[:, None], last_col[None, :], m0, n * r.BLOCK_N,
                                 sizes.queries, sizes.keys)  # fmt: skip
            else:
                mask_b = b % r.MASK_BATCH if r.MASK_BATCH > 1 else b
                visible &= _load_scores(mask, mask_b, h // r.MASK_GROUP, rows, cols, sizes, seq, r.MASK_COLS) != 0
        s = tl.where(visible, s, -float("inf"))
        if r.STATISTICS.UNBIASED:
            plain, _slope = score_tile(products, added, terms, False)
            unbiased = tl.maximum(unbiased, tl.max(tl.where(visible, plain, -float("inf")), 1))
        m_new = tl.maximum(m_i, tl.max(s, 1))
        base = tl.where(m_new == -float("inf"), 0.0, m_new)
        alpha = tl.exp2((m_i - base) * exponent)
        p = tl.exp2((s - base[:, None]) * exponent)
        if r.STATISTICS.ENTROPY:  # as in `online_softmax`
            fall, power = tl.maximum((m_i - base) * exponent, -256.0), (s - base[:, None]) * exponent
            excess = alpha * (excess + l_i * fall) + tl.sum(p * tl.maximum(power, -256.0), 1)
        l_i = l_i * alpha + tl.sum(p, 1)
        if seed is not None:
            first, within = tl.cast(m0, tl.int32), tl.arange(0, r.BLOCK_M)[:, None]
            n0 = tl.cast(n * r.BLOCK_N, tl.int32)
            keep = kept(words, first, within, n0, tl.arange(0, r.BLOCK_N)[None, :], terms)
            p = tl.where(keep, p, 0.0)
        v_tile = _load(v, b, hk, cols, sizes.keys, value_dims, value_dim, seq.first_key)
        finite = tl.abs(v_tile.to(tl.float32)) < float("inf")
        # visible · non-finite overflows the sum to infinity, masked · non-finite adds 0
        marked = tl.where(finite, 0.0, 1e38).to(MARK)
        weight = 1e38
        if r.MASK:  # Triton fails for a constant operand with a transposed mask: a weight that depends on p avoids it
            weight += p  # no effect on the result
        acc = tl.dot(tl.where(visible, weight, 0.0).to(MARK), marked, acc * alpha[:, None])
        acc = tl.dot(p.to(v_tile.dtype), tl.where(finite, v_tile, 0.0).to(v_tile.dtype), acc)
        m_i = m_new
    acc = tl.where(tl.abs(acc) < float("inf"), acc, float("nan"))
    of_keys, lse2, logit = l_i, m_i, None
    if sink is not None:
        at = sink.pointer + tl.cast(b, tl.int64) * sink.stride0 + tl.cast(h, tl.int64) * sink.stride1
        at = at + (seq.first_query + rows).to(tl.int64) * sink.stride2
        found = tl.load(at, mask=rows < sizes.queries, other=0.0).to(tl.float32)
        top, l_i, alpha = with_sink(m_i, l_i, found, exponent)
        acc *= alpha[:, None]
        lse2, logit = top + tl.log2(l_i), found
    if seed is not None:
        acc *= terms.weight
    acc = acc / tl.where(l_i == 0, 1.0, l_i)[:, None]
    at_lse = lse + (tl.cast(b, tl.int64) * sizes.heads + h) * lse_rows + (seq.first_query + rows)
    old = tl.load(at_lse, mask=rows < sizes.queries, other=0.0)  # not before the loop, where it spills
    spoilt = old != old
    if sink is not None:
        value = (top + tl.log2(l_i)) * LN2
    elif lse.dtype.element_ty == tl.float64:
        value = (m_i.to(tl.float64) * tl.full([1], exponent, tl.float32) + tl.log2(l_i)) * LN2
    else:
        value = m_i * (exponent * LN2) + tl.log2(l_i) * LN2
    tl.store(at_lse, value, mask=spoilt & (rows < sizes.queries))
    if statistics is not None:
        scale = terms.scale
        if terms.HAS_CAP:
            scale = 1.0
        most = m_i if r.BIAS else m_i * scale
        entropy = entropy_of(m_i * exponent, of_keys, excess, lse2, logit)
        row = (tl.cast(b, tl.int64) * sizes.heads + h) * lse_rows + (seq.first_query + rows)
        store_statistics(
            statistics, row, spoilt & (rows < sizes.queries), most, unbiased * scale, entropy, r.STATISTICS
        )
    at = _rows_at(o, b, h, seq, rows, value_dims)
    inside = (spoilt & (rows < sizes.queries))[:, None] & (value_dims < value_dim)[None, :]
    leaving = acc.to(o.pointer.dtype.element_ty)
    tl.store(at, leaving, mask=inside)
    if o_low is not None:
        tl.store(_rows_at(o_low, b, h, seq, rows, value_dims), low_bits(acc, leaving), mask=inside)


@triton.jit
def _rows_at(x, b, h, seq, rows, cols):
    """Return the addresses of a tile of o."""
    at = x.pointer + tl.cast(b, tl.int64) * x.stride0 + tl.cast(h, tl.int64) * x.stride1
    return at + (seq.first_query + rows).to(tl.int64)[:, None] * x.stride2 + cols.to(tl.int64)[None, :] * x.stride3


@triton.jit
def sizes_of(seq, sizes):
    """Return the sizes of a dense call of one sequence."""
    return ForwardSizes(1, sizes.heads, sizes.group, seq.queries, seq.keys, 0, 0, 0, 0)


@triton.jit
def packed_nan_fixup_kernel(
    q, k, v, bias, mask, sink, seed, tile_list, o, o_low, results, head_dim, value_dim, terms, sizes, r
):  # fmt: skip
    """Like `nan_fixup_kernel`, but for a packed batch. Each step scans part of the LSE regardless of sequences, and
    where it finds NaN the list of tiles. A tile belongs to the step in which it begins; each step also scans the rows
    that follow."""
    looks = tl.cdiv(sizes.queries, r.SCAN * r.BLOCK_M)
    for look in tl.range(tl.program_id(0), looks * sizes.heads, tl.num_programs(0), num_stages=1):
        h, first = look // looks, look % looks * (r.SCAN * r.BLOCK_M)
        row = results.lse + tl.cast(h, tl.int64) * sizes.queries
        rows = first + tl.arange(0, r.SCAN * r.BLOCK_M)
        seen = tl.load(row + rows, mask=rows < sizes.queries, other=0.0)
        after = first + r.SCAN * r.BLOCK_M + tl.arange(0, 256)
        beyond = tl.load(row + after, mask=after < sizes.queries, other=0.0)
        if tl.max((seen != seen).to(tl.int32), 0) + tl.max((beyond != beyond).to(tl.int32), 0) != 0:
            for n in tl.range(0, tl.load(tile_list), num_stages=1):
                seq, tile = listed_tile(tile_list, n)
                begin = seq.first_query + tile * r.LISTED
                if (begin >= first) & (begin < first + r.SCAN * r.BLOCK_M):
                    own = sizes_of(seq, sizes)
                    for part in tl.range(0, r.LISTED // r.BLOCK_M, num_stages=1):
                        m0 = tile * r.LISTED + part * r.BLOCK_M
                        mine = m0 + tl.arange(0, r.BLOCK_M)
                        again = tl.load(row + seq.first_query + mine, mask=mine < seq.queries, other=0.0)
                        if tl.max((again != again).to(tl.int32), 0) != 0:
                            _nan_fixup(
                                q, k, v, bias, mask, sink, seed, (o, o_low), results, head_dim, value_dim, terms, seq,
                                own, sizes.queries, r, 0, h, m0,
                            )  # fmt: skip


@triton.jit
def nan_fixup_kernel(q, k, v, bias, mask, sink, seed, o, o_low, results, head_dim, value_dim, terms, sizes, r):
    """Scan the LSE, many query tiles at a time; recompute rows where it is NaN. results: `RowResults`."""
    lse = results.lse
    count = tl.cdiv(sizes.queries, r.BLOCK_M)
    total = count * sizes.heads * sizes.batch
    for first in tl.range(tl.program_id(0) * r.SCAN, total, tl.num_programs(0) * r.SCAN, num_stages=1):
        found = first + tl.arange(0, r.SCAN)[:, None]
        rows = found % count * r.BLOCK_M + tl.arange(0, r.BLOCK_M)[None, :]
        at = lse + (found // count).to(tl.int64) * sizes.queries + rows
        seen = tl.load(at, mask=(found < total) & (rows < sizes.queries), other=0.0)
        if tl.max((seen != seen).to(tl.int32).reshape([r.SCAN * r.BLOCK_M])) != 0:
            for t in tl.range(first, tl.minimum(first + r.SCAN, total), num_stages=1):
                bh = t // count
                m0 = t % count * r.BLOCK_M
                mine = m0 + tl.arange(0, r.BLOCK_M)
                again = tl.load(
                    lse + tl.cast(bh, tl.int64) * sizes.queries + mine, mask=mine < sizes.queries, other=0.0
                )
                if tl.max((again != again).to(tl.int32)) != 0:
                    _nan_fixup(q, k, v, bias, mask, sink, seed, (o, o_low), results, head_dim, value_dim, terms,
                            SeqInfo(0, 0, 0, 0, 0), sizes, sizes.queries, r, bh // sizes.heads, bh % sizes.heads,
                            m0)  # fmt: skip
