"""Forward-mode derivative (JVP) of attention: FlashAttention-2's forward with the sums of the tangents.

Beside the online softmax a program adds up, for each query and over the keys, with dots for tangents,

    shift = Σ p ṡ,   w = p ṡ in the dtype of v,   weight = Σ w,   acc = Σ (w v + p v̇)

and L̇ = shift / Σ p, Ȯ = (acc - weight · O) / Σ p. O comes from the forward. ``weight`` is a sum of rounded numbers, so
that Ȯ is one of w (v - O): where a query sees one key, that is 0. docs/maths.md has the formulas.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tilewise.backends.kernels.score import key_tiles, with_sink
from tilewise.backends.triton.forward import add_finite, online_softmax, start_sums
from tilewise.backends.triton.relative import limits_of
from tilewise.backends.triton.score import score_products, visible_tile
from tilewise.backends.triton.tensors import (
    QueryRows,
    Reads,
    dot,
    head_at,
    load_operand,
    load_rows,
    load_sink,
    program_tile,
    row_at,
    store_rows,
)
from tilewise.backends.triton.visibility import Walk, cut_count, cut_place, listed_walk, tile_at


class GivenTangents(NamedTuple):
    """Operands that have a tangent, the others' is zero; every field is a tl.constexpr."""

    Q: Any
    K: Any
    V: Any
    BIAS: Any
    SINK: Any
    SCORES: Any  # q, k or bias, so that scores have one
    HAS_SINK: Any  # there is a sink
    BIAS_HOW: Any  # `Broadcast` of the bias's tangent


class TangentRows(NamedTuple):
    """Tensors with a row for each query, by pointers."""

    o: Any  # of the forward
    o_tangent: Any
    lse_tangent: Any
    sink: Any  # None without a sink
    sink_tangent: Any


class TangentReads(NamedTuple):
    """Operands and tangents that a tile of keys is computed from."""

    reads: Any
    q: Any  # tile of queries
    q_tangent: Any
    k: Any
    v: Any
    bias: Any


class TangentSums(NamedTuple):
    """Sums over the keys for a tile of queries; all but ``acc`` [BLOCK_M]."""

    acc: Any  # [BLOCK_M, BLOCK_DV]
    m: Any  # maximum, as in the forward
    total: Any  # of P
    shift: Any
    weight: Any


@triton.jit
def _score_tangents(y, k_tile, slope, at, n0, cols, PARTIAL: tl.constexpr, TAIL: tl.constexpr, given, terms, sizes, c):
    """Return the tangents of a tile's scores; k_tile: its keys, slope: the softcap's derivative."""
    x = y.reads
    found = tl.zeros([1, 1], tl.float32)
    if given.Q or given.K:
        products = None
        if given.Q:
            products = dot(y.q_tangent, k_tile.T, None, c)
        if given.K:
            k_tangent = load_rows(y.k, at.b, at.kv_head, n0, c.BLOCK_N, sizes.keys, "head", c.TMA, PARTIAL, sizes, c)
            products = dot(y.q, k_tangent.T, products, c)
        found = products * terms.scale
        if terms.HAS_CAP:
            found *= slope
    if given.BIAS:
        found += load_operand(y.bias, given.BIAS_HOW, x.start, at, n0, cols, TAIL, sizes, c).to(tl.float32)
    return found


@triton.jit
def _add_values(acc, p, v, visible, at, n0, MASKED: tl.constexpr, PARTIAL: tl.constexpr, CAREFUL: tl.constexpr,
                terms, sizes, c):  # fmt: skip
    """Return acc + P V for a tile of values or of their tangents; CAREFUL: see `_attend`."""
    tile = load_rows(v, at.b, at.kv_head, n0, c.BLOCK_N, sizes.keys, "value", c.TMA, PARTIAL, sizes, c)
    if CAREFUL:  # noqa: SIM108  (a compile-time condition)
        acc = add_finite(acc, p, tile, visible, MASKED, terms, c)
    else:
        acc = dot(p, tile, acc, c)
    return acc


@triton.jit
def _attend(sums, y, at, given, terms, sizes, tile, MASKED: tl.constexpr, PARTIAL: tl.constexpr,
            CAREFUL: tl.constexpr, c):  # fmt: skip
    """Add one tile of keys to ``sums``. MASKED, PARTIAL, CAREFUL: see `forward._attend`."""
    n0 = tl.cast(tile, tl.int32) * c.BLOCK_N
    cols = tl.arange(0, c.BLOCK_N)[None, :]
    x = y.reads
    TAIL: tl.constexpr = PARTIAL or c.RAGGED_M
    HIDES: tl.constexpr = MASKED or PARTIAL
    DTYPE: tl.constexpr = x.v.dtype if c.TMA else x.v.pointer.dtype.element_ty
    visible = cols >= 0
    if MASKED:  # before the product, as in the forward
        visible = visible_tile(x, at, n0, cols, terms, sizes, MASKED, PARTIAL, TAIL, c)

    k_tile = load_rows(x.k, at.b, at.kv_head, n0, c.BLOCK_N, sizes.keys, "head", c.TMA, PARTIAL, sizes, c)
    s, slope, added, _products = score_products(y.q, k_tile, x, at, n0, cols, TAIL, True, terms, sizes, c)
    if given.SCORES:
        s_tangent = _score_tangents(y, k_tile, slope, at, n0, cols, PARTIAL, TAIL, given, terms, sizes, c)
    if HIDES:
        if not MASKED:
            visible = visible_tile(x, at, n0, cols, terms, sizes, MASKED, PARTIAL, TAIL, c)
        if CAREFUL and c.BIAS:
            visible &= added != -float("inf")
        s = tl.where(visible, s, -float("inf"))
    p, m, alpha, _power, _fall = online_softmax(s, sums.m, terms, HIDES, c)
    acc, total = sums.acc * alpha[:, None], sums.total * alpha + tl.sum(p, 1)
    shift, weight = sums.shift, sums.weight
    if given.SCORES:
        if CAREFUL:
            s_tangent = tl.where(visible, s_tangent, 0.0)
        moved = p * s_tangent
        w = moved.to(DTYPE)
        shift = shift * alpha + tl.sum(moved, 1)
        weight = weight * alpha + tl.sum(w.to(tl.float32), 1)
        acc = _add_values(acc, w, x.v, visible, at, n0, MASKED, PARTIAL, CAREFUL, terms, sizes, c)
    if given.V:
        acc = _add_values(acc, p.to(DTYPE), y.v, visible, at, n0, MASKED, PARTIAL, CAREFUL, terms, sizes, c)
    return TangentSums(acc, m, total, shift, weight)


@triton.jit
def _start(c):
    acc, m, zero = start_sums(c)
    return TangentSums(acc, m, zero, zero, zero)


@triton.jit
def _add_sink(sums, sink, sink_tangent, b, h, m, given, terms, sizes):
    """Return ``sums`` with a sink, a score without a value."""
    _, total, alpha = with_sink(sums.m, sums.total, load_sink(sink, b, h, m, sizes), terms.exponent)
    shift, weight = sums.shift * alpha, sums.weight * alpha
    if given.SINK:
        more = (total - sums.total * alpha) * load_sink(sink_tangent, b, h, m, sizes)
        shift, weight = shift + more, weight + more
    return TangentSums(sums.acc * alpha[:, None], sums.m, total, shift, weight)


@triton.jit
def tangents_kernel(q, k, v, bias, mask, lists, q_tangent, k_tangent, v_tangent, bias_tangent, rows, given, terms,
                    sizes, c):  # fmt: skip
    """Compute the tangents of O and the LSE of one tile of queries over its visible key tiles.

    rows: `TangentRows` of `Strided`s. A tangent that is absent may be None. 0 for fully masked queries.
    """
    # As in `forward.forward_kernel`: without a window partial and cut tiles share one loop.
    APART: tl.constexpr = terms.HAS_LO or terms.HAS_HI or not c.LISTS
    CUT: tl.constexpr = APART or c.RAGGED_N
    o, o_tangent, lse_tangent, sink, sink_tangent = (
        rows.o, rows.o_tangent, rows.lse_tangent, rows.sink, rows.sink_tangent
    )  # fmt: skip
    tiles = tl.cdiv(sizes.queries, c.BLOCK_M)
    tile, h, b = program_tile(tiles, sizes.heads, sizes.batch, c.ORDER)
    if terms.HAS_HI:
        tile = tiles - 1 - tile  # longest first (LPT)
    m0 = tile * c.BLOCK_M
    m = m0 + tl.arange(0, c.BLOCK_M)
    at = QueryRows(b, h // sizes.group, h, h, m0, tl.arange(0, c.BLOCK_M)[:, None])
    x = Reads(q, k, v, None, None, None, bias, mask)
    if c.LISTS:
        walk = listed_walk(lists, tile, b, h, False, True, APART, sizes, c)
    else:
        lo, hi = limits_of(x, terms, c)
        count = tl.minimum(c.BLOCK_M, sizes.queries - m0)
        begin, full_begin, full_end, end = key_tiles(m0, count, sizes.keys, lo, hi, c.BLOCK_N)
        walk = Walk(begin, full_begin, full_end, end, full_begin, 0, 0)
    q_tile = load_rows(q, b, h, m0, c.BLOCK_M, sizes.queries, "head", c.TMA, c.RAGGED_M, sizes, c)
    moved_q = q_tile
    if given.Q:
        moved_q = load_rows(q_tangent, b, h, m0, c.BLOCK_M, sizes.queries, "head", c.TMA, c.RAGGED_M, sizes, c)
    y = TangentReads(x, q_tile, moved_q, k_tangent, v_tangent, bias_tangent)

    sums, listed = _start(c), walk.first
    if c.LISTS:
        for i in tl.range(0, walk.full):
            n, listed = tile_at(walk, i, listed, c.LISTS)
            sums = _attend(sums, y, at, given, terms, sizes, n, False, False, False, c)
    if APART:
        for i in tl.range(walk.full, walk.whole_end, num_stages=c.STAGES_MASKED):
            n, listed = tile_at(walk, i, listed, c.LISTS)
            sums = _attend(sums, y, at, given, terms, sizes, n, c.MASK, False, False, c)
    for i in tl.range(0, cut_count(walk), num_stages=c.STAGES_MASKED):
        n, listed = tile_at(walk, cut_place(walk, i), listed, c.LISTS)
        sums = _attend(sums, y, at, given, terms, sizes, n, c.MASK, CUT, False, c)
    if c.HIDES:  # NaN fix-up, as in the forward
        spoilt = tl.max((tl.abs(sums.acc) < float("inf")).to(tl.int32) ^ 1)
        if spoilt != 0:
            sums = _start(c)
            for i in tl.range(walk.begin, walk.end, num_stages=c.STAGES_AGAIN, disable_licm=c.MASK):
                n = i
                if c.LISTS:
                    n = tl.load(walk.tiles + i)
                sums = _attend(sums, y, at, given, terms, sizes, n, c.MASK, True, True, c)
            acc = tl.where(tl.abs(sums.acc) < float("inf"), sums.acc, float("nan"))
            sums = TangentSums(acc, sums.m, sums.total, sums.shift, sums.weight)

    if given.HAS_SINK:
        sums = _add_sink(sums, sink, sink_tangent, b, h, m, given, terms, sizes)
    total = tl.where(sums.total == 0, 1.0, sums.total)  # 1 for a fully masked row
    row = row_at(head_at(b, h, sizes, c), m, sizes.queries)
    tl.store(lse_tangent + row, (sums.shift / total).to(lse_tangent.dtype.element_ty), mask=m < sizes.queries)
    o_tile = load_rows(o, b, h, m0, c.BLOCK_M, sizes.queries, "value", False, True, sizes, c).to(tl.float32)
    moved = (sums.acc - sums.weight[:, None] * o_tile) / total[:, None]
    store_rows(o_tangent, moved, b, h, m, sizes.queries, sizes.value_dim, c.BLOCK_DV)
