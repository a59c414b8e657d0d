"""Forward: FlashAttention-2, Algorithm 1, one program per tile of queries.

For few queries a tile has all query heads of one key/value head (pack_gqa), and several programs split the keys of a
tile; `merge_kernel` combines their results.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tilewise.backends.kernels.dropout import kept, stream
from tilewise.backends.kernels.rounding import low_bits
from tilewise.backends.kernels.score import key_tiles, product, score_tile, split_tiles, with_sink
from tilewise.backends.kernels.statistics import LN2, entropy_of, store_statistics
from tilewise.backends.triton import config
from tilewise.backends.triton.blocks import load_block, read_group_rows, read_queries, read_rows
from tilewise.backends.triton.relative import far_count, far_place, limits_of, near_tiles, origins
from tilewise.backends.triton.score import score_products, visible_tile
from tilewise.backends.triton.tensors import (
    QueryRows,
    Reads,
    column_tile,
    dot,
    head_at,
    load_sink,
    lse_length,
    prefetch_bias,
    program_tile,
    row_at,
    store_rows,
)
from tilewise.backends.triton.varlen import ends_of_all, query_tile, rows_from, zero_unowned
from tilewise.backends.triton.visibility import Walk, cut_count, cut_place, listed_walk, tile_at

LOG2E = tl.constexpr(1.4426950408889634)
FAR = tl.constexpr(2.0**27)
LOWEST = tl.constexpr(-3.4028234663852886e38)  # of the finite float32
MOST_SPLITS = tl.constexpr(config.MOST_SPLITS)


class RowState(NamedTuple):
    """State of a tile of queries between key tiles; 0 for statistics that are not computed."""

    acc: Any
    m: Any  # running maximum of each row
    l: Any  # noqa: E741  (running sum of each row)
    unbiased: Any  # running maximum of the scores without the bias
    excess: Any  # running sum of p log2(p), p relative to m, for the entropy


@triton.jit
def _attend(state, q_tile, x, words, at, terms, sizes, tile, MASKED: tl.constexpr, PARTIAL: tl.constexpr,
            CAREFUL: tl.constexpr, NEAR: tl.constexpr, c):  # fmt: skip
    """Add one tile of keys and values to a `RowState`: scores, online softmax, output.

    words: the `Stream` of dropout, or None. MASKED: the mask may hide some of the tile. PARTIAL: it reaches past the
    window or the keys. CAREFUL: exclude hidden values that are not finite; needs PARTIAL. NEAR: see `score_products`.
    """
    acc, m_i, l_i = state.acc, state.m, state.l
    n0 = tl.cast(tile, tl.int32) * c.BLOCK_N
    cols = tl.arange(0, c.BLOCK_N)[None, :]
    TAIL: tl.constexpr = PARTIAL or c.RAGGED_M
    if c.FETCH:
        prefetch_bias(x.bias, c.BIAS_HOW, x.start, at.b, at.head, at.m0, n0 + c.BLOCK_N, sizes, c)

    # Triton 3.6 to 3.9: if the mask is loaded by pointers after the product, Triton computes the softmax both in the
    # load's and in the product's layout: twice the exponentials, hundreds of shuffles, 1,100 bytes of spills.
    HIDES: tl.constexpr = MASKED or PARTIAL
    HOW: tl.constexpr = c.MASK_HOW
    EARLY: tl.constexpr = MASKED and (HOW.LAYOUT == "bits" or (HOW.LAYOUT != "intervals" and not HOW.TMA))
    if EARLY:
        visible = visible_tile(x, at, n0, cols, terms, sizes, MASKED, PARTIAL, TAIL, c)

    # S = Q Kᵀ
    k_tile = read_rows(x.k, at.b, at.kv_head, n0, c.BLOCK_N, sizes.keys, "head", c.TMA, PARTIAL, sizes, c)
    s, _slope, added, products = score_products(q_tile, k_tile, x, at, n0, cols, TAIL, NEAR, terms, sizes, c)

    # masks act after the product
    if HIDES:
        if not EARLY:
            visible = visible_tile(x, at, n0, cols, terms, sizes, MASKED, PARTIAL, TAIL, c)
        if CAREFUL and c.BIAS:
            visible &= added != -float("inf")
        s = tl.where(visible, s, -float("inf"))

    unbiased = state.unbiased
    if c.STATISTICS.UNBIASED:
        plain, _slope = score_tile(products, added, terms, False)
        unbiased = tl.maximum(unbiased, tl.max(tl.where(s == -float("inf"), -float("inf"), plain), 1))

    p, m_new, alpha, power, fall = online_softmax(s, m_i, terms, HIDES, c)
    excess = state.excess
    if c.STATISTICS.ENTROPY:
        fall = tl.maximum(fall, -256.0)  # 2^-256 is 0 in float32, where a power of -inf would give 0 · inf
        if HIDES or c.BIAS:
            power = tl.maximum(power, -256.0)
        excess = alpha * (excess + l_i * fall) + tl.sum(p * power, 1)
    l_i = l_i * alpha + tl.sum(p, 1)
    acc = acc * alpha[:, None]
    if words is not None:
        # LLVM: it moves the select of a constant 0 behind the rounding of p, one more instruction per element; so zero
        # is not a constant. Round here: else the kept flags stay in registers while the program waits for V.
        zero = terms.weight * 0.0
        DTYPE: tl.constexpr = x.v.dtype if c.TMA else x.v.pointer.dtype.element_ty
        p = tl.where(kept(words, at.m0, at.rows, n0, cols, terms), p, zero).to(DTYPE)

    # O += P V
    v_tile = read_rows(x.v, at.b, at.kv_head, n0, c.BLOCK_N, sizes.keys, "value", c.TMA, PARTIAL, sizes, c)
    if c.BY_BLOCKS:
        v_tile = load_block(v_tile, x.column, "value", sizes, c)
    if CAREFUL:  # noqa: SIM108  (a compile-time condition)
        acc = add_finite(acc, p, v_tile, visible, MASKED, terms, c)
    else:
        acc = dot(p.to(v_tile.dtype), v_tile, acc, c)
    return RowState(acc, m_new, l_i, unbiased, excess)


@triton.jit
def online_softmax(s, m_i, terms, HIDES: tl.constexpr, c):
    """Return P of a tile of scores relative to new row maxima, these, and alpha, the factor of earlier sums; and the
    base-2 logarithms of P and alpha.

    m_i: the maxima before. HIDES: some score may be -inf.
    """
    m_new = tl.maximum(m_i, tl.max(s, 1))
    base, exponent = m_new, terms.exponent
    if c.BIAS:
        far = FAR * (LOG2E / terms.exponent) if c.BIAS_FIRST else FAR  # in the units of the scores
        # If all keys of a row have a bias of -1e9 or less, rounding of base · exponent changes p by any power of 2, up
        # to an overflow. Such numbers are at least 16 apart, so exp(s - base) is 1 or nearly 0: an exponent of 1, which
        # is exact, gives the same.
        exponent = tl.where(tl.abs(base) > far, 1.0, exponent)
    elif HIDES:  # a row without a visible key so far has m_new = -inf
        base = tl.where(m_new == -float("inf"), 0.0, m_new)
    # alpha from rounded products, as p subtracts them: exactly 1 while the maximum stays, and of one size with p
    top = product(base, exponent)
    fall = product(m_i, exponent) - top
    alpha = tl.exp2(fall)
    power = s * (exponent[:, None] if c.BIAS else exponent) - top[:, None]
    return tl.exp2(power), m_new, alpha, power, fall


@triton.jit
def add_finite(acc, p, v_tile, visible, MASKED: tl.constexpr, terms, c):
    """Return acc + P V with hidden values that are not finite as 0."""
    finite = tl.abs(v_tile) < float("inf")
    # a visible value that is not finite overflows the accumulator to infinity, a hidden one adds 0
    marked = tl.where(finite, 0.0, 1e38).to(c.MARK)
    weight = 1e38
    if c.BIAS and MASKED:  # Triton 3.7 to 3.9 may fail on a select of two constants here
        weight += terms.exponent * 0.0
    acc = tl.dot(tl.where(visible, weight, 0.0).to(c.MARK), marked, acc)
    v_tile = tl.where(finite, v_tile, 0.0).to(v_tile.dtype)
    return dot(p.to(v_tile.dtype), v_tile, acc, c)


@triton.jit
def start_sums(c):
    """Return the initial (acc, m_i, l_i); with a bias m_i is finite, so no tile tests for -inf."""
    acc = tl.zeros([c.BLOCK_M, c.BLOCK_DV], tl.float32)
    m_i = tl.full([c.BLOCK_M], LOWEST if c.BIAS else -float("inf"), tl.float32)
    return acc, m_i, tl.zeros([c.BLOCK_M], tl.float32)


@triton.jit
def _start(c):
    """Return the initial `RowState`."""
    acc, m_i, l_i = start_sums(c)
    unbiased, excess = 0, 0
    if c.STATISTICS.UNBIASED:
        unbiased = tl.full([c.BLOCK_M], -float("inf"), tl.float32)
    if c.STATISTICS.ENTROPY:
        excess = tl.zeros([c.BLOCK_M], tl.float32)
    return RowState(acc, m_i, l_i, unbiased, excess)


@triton.jit
def _has_lse(m, column, sizes, c):
    """Return whether the program stores the LSE of queries ``m``: that of the first tile of columns does."""
    inside = m < sizes.queries
    if c.COLUMN_TILES > 1:
        inside &= column == 0
    return inside


@triton.jit
def _lse_of(m_i, l_i, top, terms, DTYPE: tl.constexpr):
    """Return the LSE of rows. top: with a sink what `with_sink` returns, else None."""
    if top is not None:
        value = (top + tl.log2(l_i)) * LN2
    else:
        value = m_i * (terms.exponent * LN2) + tl.log2(l_i) * LN2
        if tl.float64 == DTYPE:  # from the rounded number that `_attend` has subtracted, if it is finite
            rounded = m_i * terms.exponent
            value = tl.where(tl.abs(rounded) < float("inf"), (rounded.to(tl.float64) + tl.log2(l_i)) * LN2, value)
    return value


@triton.jit
def _store_statistics(statistics, row, inside, state, lse2, logit, terms, c):
    """Store the statistics of rows. lse2: base-2 LSE, which includes the sink ``logit``, if it is not None."""
    SCALED: tl.constexpr = terms.HAS_CAP or (c.BIAS and not c.BIAS_FIRST)  # m is a score, not a product
    most = tl.where(state.l > 0, state.m if SCALED else state.m * terms.scale, -float("inf"))
    unbiased = state.unbiased if terms.HAS_CAP else state.unbiased * terms.scale
    entropy = entropy_of(state.m * terms.exponent, state.l, state.excess, lse2, logit)
    store_statistics(statistics, row, inside, most, unbiased, entropy, c.STATISTICS)


@triton.jit
def forward_kernel(q, k, v, bias, mask, sink, seed, parts, lists, lengths, o, o_low, rows, terms, sizes, c):
    """Compute O and the LSE of one tile of queries over its visible key tiles, or a split of them.

    Of more than 256 columns of O a program computes one tile, and the program of the first one stores the LSE.
    Split s of batch element b is stored as batch element s·B + b of o and lse. sink: a `Strided`; None without a sink,
    or if `merge_kernel` adds it. seed: pointer to two numbers, or None. parts: bias components, `Parts` of `Strided`s
    and pointers, or None. lengths: of a packed batch, `Lengths` of pointers, or None. o_low: buffer for the rounding
    error of o, or None. rows: `RowResults`.
    """
    # Without a window only the ends cut tiles: partial and cut tiles then share one loop.
    APART: tl.constexpr = terms.HAS_LO or terms.HAS_HI or not c.LISTS
    CUT: tl.constexpr = APART or c.RAGGED_N
    tiles, heads, column = tl.cdiv(sizes.queries, c.BLOCK_M), sizes.heads, column_tile(c)
    lse, statistics = rows.lse, rows.statistics
    if c.PACK_GQA:
        tiles, heads = tl.cdiv(sizes.queries * sizes.group, c.BLOCK_M), sizes.heads // sizes.group
    start = 0
    if c.SPLIT:
        tile, h, b = program_tile(tiles * sizes.splits, heads, sizes.batch, c.ORDER, c.COLUMN_TILES)
        split, tile = tile % sizes.splits, tile // sizes.splits
    elif c.PACKED:
        place, h, b = program_tile(sizes.total_queries // c.BLOCK_M + sizes.batch, heads, 1, c.ORDER, c.COLUMN_TILES)
        whole = o, lse, sizes
        b, tile, start, sizes = query_tile(lengths, place, sizes, c)
        given_tile = tile
        tiles = tl.maximum(tl.cdiv(sizes.queries, c.BLOCK_M), tile + 1)
        q, o, lse = rows_from(q, start.query), rows_from(o, start.query), lse + start.query
        k, v = rows_from(k, start.key), rows_from(v, start.key)
        if o_low is not None:
            o_low = rows_from(o_low, start.query)
        if sink is not None:
            sink = rows_from(sink, start.query)
        if statistics is not None:
            statistics += start.query * (c.STATISTICS.MAXIMUM + c.STATISTICS.UNBIASED + c.STATISTICS.ENTROPY)
    else:
        tile, h, b = program_tile(tiles, heads, sizes.batch, c.ORDER, c.COLUMN_TILES)
    if terms.HAS_HI:
        tile = tiles - 1 - tile  # the last queries see most keys: longest first (LPT)
    m0 = tile * c.BLOCK_M
    if c.LISTS:  # load it before the queries, for which the program waits
        walk = listed_walk(lists, tile, b, h, False, True, APART, sizes, c)
    if c.PACK_GQA:  # row r is query r // group
        r = m0 + tl.arange(0, c.BLOCK_M)
        m, head = r // sizes.group, h * sizes.group + r % sizes.group
        at = QueryRows(b, h, head[:, None], h * sizes.group, m0 * 0, m[:, None])
        q_tile = read_group_rows(q, at, sizes.queries, sizes, c)
        first = m0 // sizes.group
        count = tl.minimum((m0 + c.BLOCK_M - 1) // sizes.group + 1, sizes.queries) - first
    else:
        m, head = m0 + tl.arange(0, c.BLOCK_M), h
        at = QueryRows(b, h // sizes.group, h, h, m0, tl.arange(0, c.BLOCK_M)[:, None])
        q_tile = read_queries(q, b, h, m0, sizes, c)
        first, count = m0, tl.minimum(c.BLOCK_M, sizes.queries - m0)
    words = None
    if seed is not None:
        words = stream(seed, b, at.head, terms)
    query_origin, key_origin = origins(parts, terms, b, c)
    x = Reads(q, k, v, None, None, None, bias, mask, parts, query_origin, key_origin, start, column)
    if not c.LISTS:
        lo, hi = limits_of(x, terms, c)
        begin, full_begin, full_end, end = key_tiles(first, count, sizes.keys, lo, hi, c.BLOCK_N)
        if c.SPLIT:
            begin, full_begin, full_end, end = split_tiles(begin, full_begin, full_end, end, split, sizes.splits)
        walk = Walk(begin, full_begin, full_end, end, full_begin, 0, 0)

    # Here the program waits for q in any case. With bias components registers are full: `TritonForward` zeroes instead.
    if c.PACKED and not c.HAS_PARTS:
        all_o, all_lse, all_sizes = whole
        ends = ends_of_all(lengths, all_sizes)
        zero_unowned(all_o, all_lse, ends, place, h, given_tile, start, sizes.queries, column, all_sizes, c)

    state = _start(c)
    listed = walk.first
    if c.LISTS:
        for i in tl.range(0, walk.full):
            n, listed = tile_at(walk, i, listed, c.LISTS)
            state = _attend(state, q_tile, x, words, at, terms, sizes, n, False, False, False, True, c)
    whole_begin, whole_end = walk.full, walk.whole_end
    if c.FAR:
        whole_begin, whole_end = near_tiles(x, first, count, full_begin, full_end, False, terms, sizes, c)
        for i in tl.range(0, far_count(full_begin, whole_begin, whole_end, full_end)):
            n = far_place(i, full_begin, whole_begin, whole_end)
            state = _attend(state, q_tile, x, words, at, terms, sizes, n, c.MASK, False, False, False, c)
    if APART:
        for i in tl.range(whole_begin, whole_end, num_stages=c.STAGES_MASKED):
            n, listed = tile_at(walk, i, listed, c.LISTS)
            state = _attend(state, q_tile, x, words, at, terms, sizes, n, c.MASK, False, False, True, c)
    for i in tl.range(0, cut_count(walk), num_stages=c.STAGES_MASKED):
        n, listed = tile_at(walk, cut_place(walk, i), listed, c.LISTS)
        state = _attend(state, q_tile, x, words, at, terms, sizes, n, c.MASK, CUT, False, True, c)

    if c.HIDES:
        # NaN fix-up: 0 · NaN = NaN, a hidden value that is not finite may have reached acc. Only then compute again.
        # One reduction: sm_100 has no code for two.
        spoilt = tl.max((tl.abs(state.acc) < float("inf")).to(tl.int32) ^ 1)
        if spoilt != 0:
            state = _start(c)
            # Triton: LICM hoists a mask's loop-invariant values, which then spill; disable_licm keeps them in the loop.
            for i in tl.range(walk.begin, walk.end, num_stages=c.STAGES_AGAIN, disable_licm=c.MASK):
                n = i
                if c.LISTS:  # not read one step ahead: there is no pipeline, and that takes a register
                    n = tl.load(walk.tiles + i)
                state = _attend(state, q_tile, x, words, at, terms, sizes, n, c.MASK, True, True, True, c)
            acc = tl.where(tl.abs(state.acc) < float("inf"), state.acc, float("nan"))
            state = RowState(acc, state.m, state.l, state.unbiased, state.excess)

    acc, m_i, l_i, top, logit = state.acc, state.m, state.l, None, None
    if sink is not None:
        logit = load_sink(sink, b, head, m, sizes)
        top, l_i, alpha = with_sink(m_i, l_i, logit, terms.exponent)
        acc *= alpha[:, None]

    # fully masked row: acc = 0, l = 0, log2(l) = -inf
    acc = acc / tl.where(l_i == 0, 1.0, l_i)[:, None]
    if seed is not None:
        acc *= terms.weight
    if c.SPLIT:
        b += split * sizes.batch
    row = row_at(head_at(b, head, sizes, c), m, lse_length(sizes, c))
    value = _lse_of(m_i, l_i, top, terms, lse.dtype.element_ty)
    tl.store(lse + row, value, mask=_has_lse(m, column, sizes, c))
    if statistics is not None:
        lse2 = value if sink is None else top + tl.log2(l_i)
        _store_statistics(statistics, row, _has_lse(m, column, sizes, c), state, lse2, logit, terms, c)
    _store_o(o, o_low, acc, b, at.head, m, column, sizes, c)


@triton.jit
def _store_o(o, o_low, acc, b, head, m, column, sizes, c):
    """Store rows of O and, unless ``o_low`` is None, their rounding error."""
    store_rows(o, acc, b, head, m, sizes.queries, sizes.value_dim, c.BLOCK_DV, column)
    if o_low is not None:
        low = low_bits(acc, acc.to(o.pointer.dtype.element_ty))
        store_rows(o_low, low, b, head, m, sizes.queries, sizes.value_dim, c.BLOCK_DV, column)


@triton.jit
def merge_kernel(parts, part_rows, o, o_low, rows, sink, sizes, c):
    """Merge O, or a tile of its columns, and the LSE of one query from all splits, in a fixed order:

        LSE = log sum_s e^LSE_s,  O = sum_s e^(LSE_s - LSE) O_s

    parts: (splits, B, H, M, Dv) float32, part_rows: `RowResults` of (splits, B, H, M), and rows of all. A fully masked
    query has O = 0, LSE = -inf. sink: a `Strided` or None, added to the LSE like a split without output. o_low: as in
    `forward_kernel`.
    """
    query, column = tl.cast(tl.program_id(0), tl.int64), column_tile(c)
    if c.COLUMN_TILES > 1:
        query = query // c.COLUMN_TILES
    queries = tl.cast(sizes.batch, tl.int64) * sizes.heads * sizes.queries
    every = tl.arange(0, MOST_SPLITS)
    part_lse, lse = part_rows.lse, rows.lse
    found = tl.load(part_lse + every * queries + query, mask=every < sizes.splits, other=-float("inf"))
    top = tl.max(found, 0)
    if sink is not None:
        head = query // sizes.queries
        more = load_sink(sink, head // sizes.heads, head % sizes.heads, query % sizes.queries, sizes)
        top = tl.maximum(top, more)
    base = tl.where(top == -float("inf"), 0.0, top)
    total = tl.sum(tl.exp((found - base).to(tl.float32)), 0)  # NaN if any is
    if sink is not None:
        total += tl.exp((more - base).to(tl.float32))

    cols = tl.arange(0, c.BLOCK_DV) + column * c.BLOCK_DV
    acc = tl.zeros([c.BLOCK_DV], tl.float32)
    for s0 in tl.range(0, sizes.splits, 16):
        s = s0 + tl.arange(0, 16)
        own = tl.load(part_lse + s * queries + query, mask=s < sizes.splits, other=-float("inf"))
        weight = tl.exp((own - base).to(tl.float32))
        inside = (s < sizes.splits)[:, None] & (cols < sizes.value_dim)[None, :]
        part = tl.load(parts + (s * queries + query)[:, None] * sizes.value_dim + cols[None, :], mask=inside, other=0.0)
        acc += tl.sum(weight[:, None] * part, 0)
    acc = acc / tl.where(total == 0, 1.0, total)

    tl.store(lse + query, base + tl.log2(total) * LN2)
    if rows.statistics is not None:
        value = base + tl.log2(total) * LN2
        HOW: tl.constexpr = c.STATISTICS
        COUNT: tl.constexpr = HOW.MAXIMUM + HOW.UNBIASED + HOW.ENTROPY
        at, inside = part_rows.statistics + (every * queries + query) * COUNT, every < sizes.splits
        most, unbiased, entropy = 0.0, 0.0, 0.0
        if HOW.MAXIMUM:
            most = tl.max(tl.load(at, mask=inside, other=-float("inf")), 0)
        if HOW.UNBIASED:
            unbiased = tl.max(tl.load(at + HOW.MAXIMUM, mask=inside, other=-float("inf")), 0)
        if HOW.ENTROPY:  # a part whose LSE is x below the whole has the share e^-x, and adds e^-x (H + x)
            own = tl.load(at + (HOW.MAXIMUM + HOW.UNBIASED), mask=inside, other=0.0)
            below = tl.minimum((value - found).to(tl.float32), 200.0)  # e^-200 is 0
            entropy = tl.sum(tl.exp(-below) * (own + below), 0)
            if sink is not None:
                below = tl.minimum((value - more).to(tl.float32), 200.0)
                entropy += tl.exp(-below) * below
            entropy = tl.where(total > 0, entropy, 0.0)
        store_statistics(rows.statistics, query, column == 0, most, unbiased, entropy, HOW)
    m, h, b = query % sizes.queries, query // sizes.queries % sizes.heads, query // sizes.queries // sizes.heads
    _store_o(o, o_low, acc[None, :], b, h, m + tl.arange(0, 1), column, sizes, c)
