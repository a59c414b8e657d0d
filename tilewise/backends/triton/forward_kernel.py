"""Forward: FlashAttention-2, Algorithm 1, one program a tile of queries."""

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.backends.triton.score import in_band, key_tiles, softcap
from tilewise.backends.triton.tensors import Reads, load_rows, load_scores, program_tile, store_rows

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _attend(acc, m_i, l_i, q_tile, x, terms, sizes, b, h, m0, tile, PARTIAL: tl.constexpr, CAREFUL: tl.constexpr, c):
    """One tile of keys and values: scores, online softmax, output.

    PARTIAL: the tile reaches past the band or the keys. CAREFUL: a value that is not finite counts only where visible.
    """
    n0 = tl.cast(tile, tl.int32) * c.BLOCK_N
    rows = tl.arange(0, c.BLOCK_M)[:, None]
    cols = tl.arange(0, c.BLOCK_N)[None, :]
    hk = h // sizes.group
    TAIL: tl.constexpr = PARTIAL or c.RAGGED_M

    # S = Q Kᵀ, then the softcap, then the bias
    k_tile = load_rows(x.k, b, hk, n0, c.BLOCK_N, sizes.keys, "head", c.TMA, PARTIAL, sizes, c)
    s = tl.dot(q_tile, k_tile.T, input_precision=c.PRECISION)
    if c.BIAS:
        added = load_scores(x.bias, c.BIAS_HOW, b, h, m0, n0, rows, cols, TAIL, sizes, c).to(tl.float32)
    if terms.HAS_CAP:
        s = softcap(s * terms.scale, terms.cap)
        if c.BIAS:
            s += added
    elif c.BIAS:
        s = s * terms.scale + added  # one fused multiply-add: the scale rides on the bias

    # masks act after the product
    HIDES: tl.constexpr = PARTIAL or c.MASK or (CAREFUL and c.BIAS)
    if HIDES:
        visible = (n0 + cols < sizes.keys) & (rows >= 0)
        if PARTIAL:
            visible &= in_band(m0 + rows, n0 + cols, terms)
        if c.MASK:
            visible &= load_scores(x.mask, c.MASK_HOW, b, h, m0, n0, rows, cols, TAIL, sizes, c) != 0
        if CAREFUL and c.BIAS:
            visible &= added != -float("inf")
        s = tl.where(visible, s, -float("inf"))

    # online softmax
    m_new = tl.maximum(m_i, tl.max(s, 1))
    base = m_new
    if HIDES or c.BIAS:  # a row that has seen nothing yet has m_new = -inf
        base = tl.where(m_new == -float("inf"), 0.0, m_new)
    # Subtracted before it is scaled: where the maximum stays, alpha must be 1 and not 1 + rounding, thousands of times.
    alpha = tl.exp2((m_i - base) * terms.exponent)
    top = base * terms.exponent
    p = tl.exp2(s * terms.exponent - top[:, None])
    l_i = l_i * alpha + tl.sum(p, 1)
    acc = acc * alpha[:, None]

    # O += P V
    v_tile = load_rows(x.v, b, hk, n0, c.BLOCK_N, sizes.keys, "value", c.TMA, PARTIAL, sizes, c)
    if CAREFUL:
        finite = tl.abs(v_tile) < float("inf")
        # visible · not finite overflows the accumulator to infinity, hidden · not finite adds 0
        marked = tl.where(finite, 0.0, 1e38).to(c.MARK)
        acc = tl.dot(tl.where(visible, 1e38, 0.0).to(c.MARK), marked, acc)
        v_tile = tl.where(finite, v_tile, 0.0).to(v_tile.dtype)
    acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision=c.PRECISION)
    return acc, m_new, l_i


@triton.jit
def _start(c):
    """(acc, m_i, l_i) before the first key."""
    acc = tl.zeros([c.BLOCK_M, c.BLOCK_DV], tl.float32)
    return acc, tl.full([c.BLOCK_M], -float("inf"), tl.float32), tl.zeros([c.BLOCK_M], tl.float32)


@triton.jit
def forward_kernel(q, k, v, bias, mask, o, lse, terms, sizes, c):
    """O and the LSE of one tile of queries; walks the key tiles that the band leaves."""
    x = Reads(q, k, v, None, None, None, bias, mask)
    tiles = tl.cdiv(sizes.queries, c.BLOCK_M)
    tile, h, b = program_tile(tiles, sizes.heads, sizes.batch, c.ORDER)
    if terms.HAS_HI:
        tile = tiles - 1 - tile  # the last queries see most keys: the longest programs start first
    m0 = tile * c.BLOCK_M
    q_tile = load_rows(q, b, h, m0, c.BLOCK_M, sizes.queries, "head", c.TMA, c.RAGGED_M, sizes, c)
    begin, full_begin, full_end, end = key_tiles(
        m0, tl.minimum(c.BLOCK_M, sizes.queries - m0), sizes.keys, terms.lo, terms.hi, c.BLOCK_N
    )

    acc, m_i, l_i = _start(c)
    for n in tl.range(full_begin, full_end):
        acc, m_i, l_i = _attend(acc, m_i, l_i, q_tile, x, terms, sizes, b, h, m0, n, False, False, c)
    left = full_begin - begin
    for i in tl.range(0, left + end - full_end):  # the partial tiles on both sides of the full ones
        n = tl.where(i < left, begin + i, full_end + i - left)
        acc, m_i, l_i = _attend(acc, m_i, l_i, q_tile, x, terms, sizes, b, h, m0, n, True, False, c)

    if c.HIDES:
        # 0 · NaN: a hidden value that is not finite has spoilt the product. Then, and only then, walk again.
        spoilt = tl.max((tl.abs(acc) < float("inf")).to(tl.int32) ^ 1)  # in one step: sm_100 has no code for two
        if spoilt != 0:
            acc, m_i, l_i = _start(c)
            for n in tl.range(begin, end, num_stages=1):
                acc, m_i, l_i = _attend(acc, m_i, l_i, q_tile, x, terms, sizes, b, h, m0, n, True, True, c)
            acc = tl.where(tl.abs(acc) < float("inf"), acc, float("nan"))

    # a row that saw nothing: acc = 0, l = 0, m = -inf
    acc = acc / tl.where(l_i == 0, 1.0, l_i)[:, None]
    m = m0 + tl.arange(0, c.BLOCK_M)
    row = (tl.cast(b, tl.int64) * sizes.heads + h) * sizes.queries + m
    tl.store(lse + row, (m_i * terms.exponent + tl.log2(l_i)) * LN2, mask=m < sizes.queries)
    store_rows(o, acc, b, h, m, sizes.queries, sizes.value_dim, c.BLOCK_DV)
