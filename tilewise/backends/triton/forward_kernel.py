"""Forward: FlashAttention-2, Algorithm 1, one program a tile of queries, scores started from the bias."""

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.backends.triton.score import in_band, key_tiles, softcap
from tilewise.backends.triton.tensors import load_rows, load_scores, program_tile

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _attend(acc, m_i, l_i, q, k, v, bias, mask, bias_how, mask_how, terms, sizes, b, h, m0, tile,
            PARTIAL: tl.constexpr, CAREFUL: tl.constexpr, c):  # fmt: skip
    """One tile of keys and values: scores, online softmax, output.

    PARTIAL: the tile reaches past the band or the keys. CAREFUL: a value that is not finite counts only where visible.
    """
    n0 = tl.cast(tile, tl.int32) * c.BLOCK_N
    rows = tl.arange(0, c.BLOCK_M)[:, None]
    cols = tl.arange(0, c.BLOCK_N)[None, :]
    n = tl.arange(0, c.BLOCK_N)
    hk = h // sizes.group

    # S = Q Kᵀ + B / scale: the product accumulates onto the bias
    kt = load_rows(k, b, hk, n0, n, sizes.keys, tl.arange(0, c.BLOCK_D), sizes.head_dim, c.TMA, PARTIAL, c.EVEN_D, c.WIDE)
    if c.BIAS:
        added = load_scores(bias, bias_how, b, h, m0, n0, rows, cols, sizes.queries, sizes.keys, PARTIAL or c.RAGGED_M, c.WIDE)
        added = added.to(tl.float32)
    if c.BIAS and not terms.HAS_CAP:
        start = tl.broadcast_to(added * terms.bias_unit, [c.BLOCK_M, c.BLOCK_N])
        s = tl.dot(q, kt.T, start, input_precision=c.PRECISION)
    else:
        s = tl.dot(q, kt.T, input_precision=c.PRECISION)
    if terms.HAS_CAP:
        s = softcap(s * terms.scale, terms.cap)
        if c.BIAS:
            s += added

    # masks act after the product
    HIDES: tl.constexpr = PARTIAL or c.MASK or (CAREFUL and c.BIAS)
    if HIDES:
        visible = (n0 + cols < sizes.keys) & (rows >= 0)
        if PARTIAL:
            visible &= in_band(m0 + rows, n0 + cols, terms)
        if c.MASK:
            visible &= load_scores(mask, mask_how, b, h, m0, n0, rows, cols, sizes.queries, sizes.keys, PARTIAL or c.RAGGED_M, c.WIDE) != 0
        if CAREFUL and c.BIAS:
            visible &= added != -float("inf")
        s = tl.where(visible, s, -float("inf"))

    # online softmax
    m_new = tl.maximum(m_i, tl.max(s, 1))
    if HIDES or c.BIAS:  # a row that has seen nothing yet has m_new = -inf
        top = tl.where(m_new == -float("inf"), 0.0, m_new) * terms.exponent
    else:
        top = m_new * terms.exponent
    alpha = tl.exp2(m_i * terms.exponent - top)
    p = tl.exp2(s * terms.exponent - top[:, None])
    l_i = l_i * alpha + tl.sum(p, 1)
    acc = acc * alpha[:, None]

    # O += P V
    vt = load_rows(v, b, hk, n0, n, sizes.keys, tl.arange(0, c.BLOCK_DV), sizes.value_dim, c.TMA, PARTIAL, c.EVEN_DV, c.WIDE)
    if CAREFUL:
        finite = tl.abs(vt) < float("inf")
        # visible · not finite overflows the accumulator to infinity, hidden · not finite adds 0
        big = tl.where(finite, 0.0, 1e38).to(c.MARK)
        acc = tl.dot(tl.where(visible, 1e38, 0.0).to(c.MARK), big, acc)
        vt = tl.where(finite, vt, 0.0).to(vt.dtype)
    acc = tl.dot(p.to(vt.dtype), vt, acc, input_precision=c.PRECISION)
    return acc, m_new, l_i


@triton.jit
def forward_kernel(q, k, v, bias, mask, o, lse, bias_how, mask_how, terms, sizes, c):
    tiles = tl.cdiv(sizes.queries, c.BLOCK_M)
    tile, h, b = program_tile(tiles, sizes.heads, sizes.batch, c.ORDER)
    if terms.HAS_HI:
        tile = tiles - 1 - tile  # the last queries see most keys: the longest programs start first
    m0 = tile * c.BLOCK_M
    rows = tl.arange(0, c.BLOCK_M)
    q_tile = load_rows(q, b, h, m0, rows, sizes.queries, tl.arange(0, c.BLOCK_D), sizes.head_dim, c.TMA, c.RAGGED_M, c.EVEN_D, c.WIDE)
    begin, full_begin, full_end, end = key_tiles(
        m0, tl.minimum(c.BLOCK_M, sizes.queries - m0), sizes.keys, terms.lo, terms.hi, c.BLOCK_N
    )

    m_i = tl.full([c.BLOCK_M], -float("inf"), tl.float32)
    l_i = tl.zeros([c.BLOCK_M], tl.float32)
    acc = tl.zeros([c.BLOCK_M, c.BLOCK_DV], tl.float32)
    for n in tl.range(full_begin, full_end):
        acc, m_i, l_i = _attend(acc, m_i, l_i, q_tile, k, v, bias, mask, bias_how, mask_how, terms, sizes, b, h, m0,
                                n, False, False, c)  # fmt: skip
    left = full_begin - begin
    for i in tl.range(0, left + end - full_end):  # the partial tiles on both sides of the full ones
        n = tl.where(i < left, begin + i, full_end + i - left)
        acc, m_i, l_i = _attend(acc, m_i, l_i, q_tile, k, v, bias, mask, bias_how, mask_how, terms, sizes, b, h, m0,
                                n, True, False, c)  # fmt: skip

    if c.HIDES:
        # 0 · NaN: a hidden value that is not finite has spoilt the product. Then, and only then, walk again.
        spoilt = tl.max(tl.max((tl.abs(acc) < float("inf")).to(tl.int32) ^ 1, 1), 0)
        if spoilt != 0:
            m_i = tl.full([c.BLOCK_M], -float("inf"), tl.float32)
            l_i = tl.zeros([c.BLOCK_M], tl.float32)
            acc = tl.zeros([c.BLOCK_M, c.BLOCK_DV], tl.float32)
            for n in tl.range(begin, end, num_stages=1):
                acc, m_i, l_i = _attend(acc, m_i, l_i, q_tile, k, v, bias, mask, bias_how, mask_how, terms, sizes, b,
                                        h, m0, n, True, True, c)  # fmt: skip
            acc = tl.where(tl.abs(acc) < float("inf"), acc, float("nan"))

    # a row that saw nothing: acc = 0, l = 0, m = -inf
    acc = acc / tl.where(l_i == 0, 1.0, l_i)[:, None]
    m = m0 + rows
    at = tl.cast(b, tl.int64) * sizes.heads * sizes.queries + tl.cast(h, tl.int64) * sizes.queries
    tl.store(lse + at + m, (m_i * terms.exponent + tl.log2(l_i)) * LN2, mask=m < sizes.queries)
    d = tl.arange(0, c.BLOCK_DV)
    at = o.pointer + tl.cast(b, tl.int64) * o.stride0 + tl.cast(h, tl.int64) * o.stride1 + m.to(tl.int64)[:, None] * o.stride2 + d[None, :]
    inside = (m < sizes.queries)[:, None] & (d < sizes.value_dim)[None, :]
    tl.store(at, acc.to(o.pointer.dtype.element_ty), mask=inside)
