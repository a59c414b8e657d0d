"""Row statistics before the backward."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tilewise.backends.gluon.varlen import SeqInfo, first_tile_of, listed_tile, sum_of_head
from tilewise.backends.kernels.rounding import with_low_bits
from tilewise.backends.kernels.score import unrounding
from tilewise.spec.score import COARSE_LSE

LOG2E = tl.constexpr(1.4426950408889634)
COARSE = tl.constexpr(COARSE_LSE)
LEAST = tl.constexpr(2.0**-14)  # change of a probability that counts: an eighth of float16's rounding
ZEROED_AT_ONCE = tl.constexpr(128)  # counters that a program zeroes at once


class Lists(NamedTuple):
    """Work tile lists of a packed batch, see `varlen`: tiles of queries, and of keys."""

    queries: Any
    keys: Any


@triton.jit
def _load_rows(x, b, h, rows, row_end, cols, col_end):
    """Load a tile [rows, cols] of a `Strided` as float32; 0 outside the tensor."""
    at = x.pointer + tl.cast(b, tl.int64) * x.stride0 + tl.cast(h, tl.int64) * x.stride1
    at = at + rows.to(tl.int64)[:, None] * x.stride2 + cols.to(tl.int64)[None, :]
    return tl.load(at, mask=(rows < row_end)[:, None] & (cols < col_end)[None, :], other=0.0).to(tl.float32)


@triton.jit
def packed_preprocess_kernel(o, o_low, do, lse, dlse, bias, stats, dq_accum, counts, mended, lists, value_dim, sizes,
                             counters, weight, BIAS_GROUP: tl.constexpr, HAS_DLSE: tl.constexpr, BLOCK_M: tl.constexpr,
                             BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr):  # fmt: skip
    """Like `preprocess_kernel`, but for a packed batch: one program per query tile and head.

    bias: a `Strided` or None. dq_accum: None where dQ is not accumulated; else this zeroes the sums of the first work
    tiles, and those of sequences without keys.
    """
    _zero_counters(counts, counters)
    if dq_accum is not None:
        _zero_first_sums(dq_accum, lists.keys, sizes, BLOCK_M, BLOCK_D, BLOCK_N)
    n, h = tl.program_id(0) % sizes.row_tiles, tl.program_id(0) // sizes.row_tiles
    if n < tl.load(lists.queries):
        seq, tile = listed_tile(lists.queries, n)
        place = h * sizes.row_tiles + first_tile_of(lists.queries, n, seq, BLOCK_M) + tile
        _statistics((o, o_low, do, mended), lse, dlse, bias, stats, dq_accum, counts, seq.keys == 0, h, place,
                    tile * BLOCK_M, seq, value_dim, sizes, weight,
                    BIAS_GROUP, HAS_DLSE, bias is not None, BLOCK_M, BLOCK_D)  # fmt: skip


@triton.jit
def _zero_first_sums(dq_accum, key_list, sizes, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr):
    """Zero the sums that `backward.dq.zero_ahead` does not: of heads whose first work tile is among the first `zeroed`.
    Each work tile of such a head zeroes one part. No head has more than `zeroed` work tiles."""
    UNIT: tl.constexpr = 1024
    UNITS: tl.constexpr = BLOCK_M * BLOCK_D // UNIT
    count = tl.load(key_list) * sizes.kv_heads
    for t in range(tl.program_id(0), tl.minimum(count, 2 * sizes.zeroed), tl.num_programs(0)):
        of = sum_of_head(key_list, t, count, sizes.kv_heads, BLOCK_M, BLOCK_N)
        if of.first < sizes.zeroed:
            for g in range(sizes.group):
                tile = (of.hk * sizes.group + g) * sizes.row_tiles + of.place
                at = dq_accum + tl.cast(tile, tl.int64) * (UNITS * UNIT) + tl.arange(0, UNIT)
                for unit in range(of.part, of.tiles * UNITS, of.parts):
                    tl.store(at + unit * UNIT, tl.zeros([UNIT], tl.float32))


@triton.jit
def preprocess_kernel(o, o_low, do, lse, dlse, bias, stats, dq_accum, counts, mended, value_dim, sizes, counters,
                      weight, BIAS_GROUP: tl.constexpr, HAS_DLSE: tl.constexpr, HAS_BIAS: tl.constexpr,
                      BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    """Write the LSE in base 2 and −delta = dLSE − rowsum(dO∘O) of each row, and zero the counters.

    Also zeroes the dQ sums of the first heads, which no later kernel zeroes.

    A fully masked row and a row past the end get an LSE of +inf, so that their probabilities are exp2(-inf) = 0. So
    does a row whose LSE is beyond COARSE, as where all keys have the most negative finite bias: probabilities cannot be
    recovered from such an LSE, would be off by any factor and could overflow into the gradients of the keys. A bias
    that is constant along the keys changes the LSE and no probability: it is subtracted from the LSE.
    weight: the dropout weight of kept probabilities, or None. Its logarithm is subtracted from the LSE, so that
    recomputed probabilities include it, and delta is divided by it, because delta times a probability must not include
    it.
    o_low: with dropout, the low bits that rounding o removed, else None.
    mended: where lse is float64, a buffer for the dO that makes up for its rounding, see `unrounding`; else None. Only
    query tiles where the rounding changes probabilities are written; ``counts[-1 - tile]`` is 1 for these, else 0.
    o, o_low, do, mended, dlse, bias: `Strided`. lse: (B, H, M). stats: (B·H·tiles, 2, BLOCK_M). dq_accum: (B·H·tiles,
    BLOCK_M·BLOCK_D). counts: (counters,), int32.
    dlse, stats, dq_accum: float32.
    """
    _zero_counters(counts, counters)
    pid = tl.program_id(0)
    bh = pid // sizes.row_tiles
    row0, seq = pid % sizes.row_tiles * BLOCK_M, SeqInfo(0, 0, sizes.queries, 0, 0)
    zeroes = bh // sizes.group < sizes.zeroed
    _statistics((o, o_low, do, mended), lse, dlse, bias, stats, dq_accum, counts, zeroes, bh, pid, row0, seq,
                value_dim, sizes, weight, BIAS_GROUP, HAS_DLSE, HAS_BIAS, BLOCK_M, BLOCK_D)  # fmt: skip


@triton.jit
def _zero_counters(counts, counters):
    for first in range(tl.program_id(0) * ZEROED_AT_ONCE, counters, tl.num_programs(0) * ZEROED_AT_ONCE):
        counter = first + tl.arange(0, ZEROED_AT_ONCE)
        tl.store(counts + counter, tl.zeros([ZEROED_AT_ONCE], tl.int32), mask=counter < counters)


@triton.jit
def _statistics(outputs, lse, dlse, bias, stats, dq_accum, counts, zeroes, bh, place, row0, seq, value_dim, sizes,
                weight, BIAS_GROUP: tl.constexpr, HAS_DLSE: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr,
                BLOCK_D: tl.constexpr):  # fmt: skip
    """Write the statistics of one tile: the rows from ``row0`` on of a sequence, a `SeqInfo`.

    bh: the head. place: the tile's index among all tiles. outputs: o, o_low, do and mended. zeroes: zero the tile's dQ
    sum.
    """
    o, o_low, do, mended = outputs
    heads = sizes.kv_heads * sizes.group
    b, h = bh // heads, bh % heads
    within = row0 + tl.arange(0, BLOCK_M)
    inside = within < seq.queries
    rows, end = seq.first_query + within, seq.first_query + seq.queries
    cols = tl.arange(0, BLOCK_D)
    at_row = tl.cast(bh, tl.int64) * sizes.queries + rows
    o_tile = _load_rows(o, b, h, rows, end, cols, value_dim)
    if o_low is not None:
        o_tile = with_low_bits(o_tile, _load_rows(o_low, b, h, rows, end, cols, value_dim).to(tl.int32))
    do_tile = _load_rows(do, b, h, rows, end, cols, value_dim)
    natural = tl.load(lse + at_row, mask=inside, other=-float("inf"))
    if dq_accum is not None:  # noqa: SIM102  (the outer condition is compile-time)
        if zeroes:
            zero_at = dq_accum + tl.cast(place, tl.int64) * (BLOCK_M * BLOCK_D) + tl.arange(0, BLOCK_M * BLOCK_D)
            tl.store(zero_at, tl.zeros([BLOCK_M * BLOCK_D], tl.float32))
    base2 = natural * LOG2E
    if HAS_BIAS:
        at = bias.pointer + tl.cast(b, tl.int64) * bias.stride0 + tl.cast(h // BIAS_GROUP, tl.int64) * bias.stride1
        constant = tl.load(at + rows.to(tl.int64) * bias.stride2, mask=inside, other=0.0).to(tl.float32)
        base2 = (natural - constant) * LOG2E
    if weight is not None:
        base2 -= tl.log2(weight)
    left_out = tl.abs(natural) > COARSE  # false for NaN, which must propagate
    if mended is not None:
        factor = tl.where(left_out, 1.0, unrounding(base2))
        coarse = tl.max(tl.abs(factor - 1.0), 0) > LEAST
        factor = tl.where(coarse, factor, 1.0)
        rounded = (do_tile * factor[:, None]).to(do.pointer.dtype.element_ty)
        at = mended.pointer + tl.cast(b, tl.int64) * mended.stride0 + tl.cast(h, tl.int64) * mended.stride1
        at = at + rows.to(tl.int64)[:, None] * mended.stride2 + cols.to(tl.int64)[None, :]
        tl.store(at, rounded, mask=(coarse & inside)[:, None] & (cols < value_dim)[None, :])
        tl.store(counts - 1 - place, coarse.to(tl.int32))
        do_tile = rounded.to(tl.float32)
    delta = tl.sum(o_tile * do_tile, 1)
    if HAS_DLSE:
        at = dlse.pointer + tl.cast(b, tl.int64) * dlse.stride0 + tl.cast(h, tl.int64) * dlse.stride1
        more = tl.load(at + rows.to(tl.int64) * dlse.stride2, mask=inside, other=0.0)
        if mended is not None:
            more *= factor
        delta -= more
    if weight is not None:
        delta /= weight
    at_stats = stats + tl.cast(place, tl.int64) * (2 * BLOCK_M) + tl.arange(0, BLOCK_M)
    tl.store(at_stats, tl.where(left_out, float("inf"), base2.to(tl.float32)))
    tl.store(at_stats + BLOCK_M, tl.where(left_out, 0.0, -delta))  # else 0 · a non-finite cotangent would be NaN
