"""Forward and backward of sequences of up to 64 queries and keys: a program computes whole sequences, one per step.

The sequences of a program share a matrix of bias and mask, which it loads once. The softmax has all scores of a row at
once, and the backward all rows and keys: dQ, dK and dV are stored as they are computed, and dBias is summed over the
sequences in registers. Nothing is summed by atomics, so every result has the same bits in each run.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tilewise.backends.kernels.score import score_tile, score_tile_gradient
from tilewise.backends.triton.score import visible_tile
from tilewise.backends.triton.tensors import QueryRows, Reads, dot, load_operand, load_rows, store_rows
from tilewise.spec.score import COARSE_LSE

LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)
COARSE = tl.constexpr(COARSE_LSE)


class OneTileConstants(NamedTuple):
    """Compile-time parameters of the kernels; every field is a tl.constexpr."""

    BLOCK_M: Any
    BLOCK_N: Any
    BLOCK_D: Any  # head dimension, padded to a power of two
    BLOCK_DV: Any  # value dimension, padded
    EVEN_D: Any  # BLOCK_D is the head dimension
    EVEN_DV: Any
    WIDE: Any  # offsets inside one tile need 64 bits
    BIAS: Any
    MASK: Any
    BIAS_HOW: Any  # `Broadcast`
    MASK_HOW: Any  # `Broadcast`
    MASKS_VARY: Any  # see `config.Sharing`
    HIDES: Any  # some pair may be hidden, so hidden values that are not finite must be excluded
    STAGES: Any  # of the loop over sequences
    PRECISION: Any  # of float32 products
    MARK: Any  # dtype that marks values that are not finite
    WANT_Q: Any = False
    WANT_K: Any = False
    WANT_V: Any = False
    WANT_BIAS: Any = False
    PACKED: Any = False


class OneTileSizes(NamedTuple):
    batch: int
    heads: int
    queries: int
    keys: int
    head_dim: int
    value_dim: int
    # Of `config.Sharing`.
    matrix_batch: int
    matrix_heads: int
    programs: int


class OneTileGradients(NamedTuple):
    """Destinations of the gradients, each a `Strided`."""

    dq: Any
    dk: Any
    dv: Any
    dbias: Any  # (programs, 1, M, N), of the bias's dtype or float32


@triton.jit
def own_sequences(sizes):
    """Return the program's matrix (batch, head), its first sequence, and the end of the sequences of the matrix."""
    matrices = sizes.matrix_batch * sizes.matrix_heads
    matrix, first = tl.program_id(0) % matrices, tl.program_id(0) // matrices
    count = sizes.batch // sizes.matrix_batch * (sizes.heads // sizes.matrix_heads)
    return matrix // sizes.matrix_heads, matrix % sizes.matrix_heads, first, count


@triton.jit
def sequence_at(i, matrix_b, matrix_h, sizes):
    """Return batch element and head of the i-th sequence of a matrix."""
    heads = sizes.heads // sizes.matrix_heads
    return matrix_b + i // heads * sizes.matrix_batch, matrix_h + i % heads * sizes.matrix_heads


@triton.jit
def load_matrix(bias, mask, b, h, terms, sizes, c):
    """Return what is added to the scores of a matrix in float32: the bias, or -inf where a pair is hidden."""
    at = QueryRows(b, h, h, h, 0, tl.arange(0, c.BLOCK_M)[:, None])
    cols = tl.arange(0, c.BLOCK_N)[None, :]
    added = tl.zeros([c.BLOCK_M, c.BLOCK_N], tl.float32)
    if c.BIAS:
        added += load_operand(bias, c.BIAS_HOW, 0, at, 0, cols, True, sizes, c).to(tl.float32)
    x = Reads(None, None, None, None, None, None, bias, mask)
    MASKED: tl.constexpr = c.MASK and not c.MASKS_VARY
    visible = visible_tile(x, at, 0, cols, terms, sizes, MASKED, True, True, c)
    return tl.where(visible, added, -float("inf"))


@triton.jit
def with_mask(added, mask, b, h, sizes, c):
    """Return ``added`` with -inf where the mask of this sequence hides a pair, if masks vary."""
    if c.MASKS_VARY:
        at = QueryRows(b, h, h, h, 0, tl.arange(0, c.BLOCK_M)[:, None])
        cols = tl.arange(0, c.BLOCK_N)[None, :]
        seen = load_operand(mask, c.MASK_HOW, 0, at, 0, cols, True, sizes, c) != 0
        added = tl.where(seen, added, -float("inf"))
    return added


@triton.jit
def product_with_v(p, visible, v_tile, c):
    """Return P V. A hidden value that is not finite adds 0, a visible one makes the element NaN."""
    acc = dot(p.to(v_tile.dtype), v_tile, None, c)
    if c.HIDES:  # 0 · NaN = NaN: a hidden value may have reached acc; only then compute again
        spoilt = tl.max((tl.abs(acc) < float("inf")).to(tl.int32) ^ 1)
        if spoilt != 0:
            finite = tl.abs(v_tile) < float("inf")
            marked = tl.where(finite, 0.0, 1e38).to(c.MARK)
            acc = tl.dot(tl.where(visible, 1e38, 0.0).to(c.MARK), marked)
            acc = dot(p.to(v_tile.dtype), tl.where(finite, v_tile, 0.0).to(v_tile.dtype), acc, c)
            acc = tl.where(tl.abs(acc) < float("inf"), acc, float("nan"))
    return acc


@triton.jit
def one_tile_forward_kernel(q, k, v, bias, mask, o, lse, terms, sizes, c):
    """Compute O and the LSE of the program's sequences.

    terms: the scores include the scale, so exponent is log2(e). lse: pointer to (B, H, M), float32 or float64.
    """
    matrix_b, matrix_h, first, count = own_sequences(sizes)
    matrix = load_matrix(bias, mask, matrix_b, matrix_h, terms, sizes, c)
    m = tl.arange(0, c.BLOCK_M)
    for i in tl.range(first, count, sizes.programs, num_stages=c.STAGES):
        b, h = sequence_at(i, matrix_b, matrix_h, sizes)
        q_tile = load_rows(q, b, h, 0, c.BLOCK_M, sizes.queries, "head", False, True, sizes, c)
        k_tile = load_rows(k, b, h, 0, c.BLOCK_N, sizes.keys, "head", False, True, sizes, c)
        v_tile = load_rows(v, b, h, 0, c.BLOCK_N, sizes.keys, "value", False, True, sizes, c)
        added = with_mask(matrix, mask, b, h, sizes, c)
        visible = added != -float("inf")
        s, _slope = score_tile(dot(q_tile, k_tile.T, None, c), added, terms, True)
        s = tl.where(visible, s, -float("inf"))
        top = tl.max(s, 1)
        base = tl.where(top == -float("inf"), 0.0, top)
        p = tl.exp2((s - base[:, None]) * terms.exponent)  # no rounding of large scores: the difference is exact
        total = tl.sum(p, 1)
        acc = product_with_v(p, visible, v_tile, c)
        acc = acc / tl.where(total == 0, 1.0, total)[:, None]
        store_rows(o, acc, b, h, m, sizes.queries, sizes.value_dim, c.BLOCK_DV)
        value = (base.to(tl.float64) * terms.exponent + tl.log2(total)) * LN2
        row = (tl.cast(b, tl.int64) * sizes.heads + h) * sizes.queries + m
        tl.store(lse + row, value, mask=m < sizes.queries)


@triton.jit
def load_finite(x, b, h, DIM: tl.constexpr, sizes, c):
    """Load k or v, with rows that are not finite as 0 if some pair may be hidden.

    No error is lost: a visible row that is not finite has made the LSE or O of its queries NaN.
    """
    tile = load_rows(x, b, h, 0, c.BLOCK_N, sizes.keys, DIM, False, True, sizes, c)
    if c.HIDES:
        finite = tl.min((tl.abs(tile) < float("inf")).to(tl.int32), 1)
        tile = tl.where((finite != 0)[:, None], tile, 0.0).to(tile.dtype)
    return tile


@triton.jit
def load_lse(lse, dlse, b, h, terms, sizes, c):
    """Return the LSE in float32, what its rounding adds to base-2 exponents, and dLSE (0 if None) of all rows.

    The LSE is +inf, so that probabilities are 0, in rows that are fully masked, past the end, or whose LSE a float32
    number cannot tell from its neighbours.
    """
    m = tl.arange(0, c.BLOCK_M)
    row = (tl.cast(b, tl.int64) * sizes.heads + h) * sizes.queries + m
    natural = tl.load(lse + row, mask=m < sizes.queries, other=-float("inf"))
    left_out = tl.abs(natural) > COARSE  # False for NaN, which must reach the gradients
    rounded = natural.to(tl.float32)
    low = tl.where(left_out, 0.0, (rounded.to(tl.float64) * terms.exponent - natural * LOG2E).to(tl.float32))
    dl = tl.zeros([c.BLOCK_M], tl.float32)
    if dlse is not None:
        at = dlse.pointer + tl.cast(b, tl.int64) * dlse.stride0 + tl.cast(h, tl.int64) * dlse.stride1
        dl = tl.load(at + m.to(tl.int64) * dlse.stride2, mask=m < sizes.queries, other=0.0).to(tl.float32)
    return tl.where(left_out, float("inf"), rounded), low, tl.where(left_out, 0.0, dl), left_out


@triton.jit
def one_tile_backward_kernel(q, k, v, do, o, lse, dlse, bias, mask, grads, terms, sizes, c):
    """Compute dQ, dK and dV of the program's sequences, and the sum of their dBias.

    dlse: a `Strided`, or None. grads: `OneTileGradients`.
    """
    matrix_b, matrix_h, first, count = own_sequences(sizes)
    matrix = load_matrix(bias, mask, matrix_b, matrix_h, terms, sizes, c)
    m, n = tl.arange(0, c.BLOCK_M), tl.arange(0, c.BLOCK_N)
    dbias_sum = tl.zeros([c.BLOCK_M, c.BLOCK_N], tl.float32)
    for i in tl.range(first, count, sizes.programs, num_stages=c.STAGES):
        b, h = sequence_at(i, matrix_b, matrix_h, sizes)
        q_tile = load_rows(q, b, h, 0, c.BLOCK_M, sizes.queries, "head", False, True, sizes, c)
        k_tile = load_finite(k, b, h, "head", sizes, c)
        v_tile = load_finite(v, b, h, "value", sizes, c)
        do_tile = load_rows(do, b, h, 0, c.BLOCK_M, sizes.queries, "value", False, True, sizes, c)
        o_tile = load_rows(o, b, h, 0, c.BLOCK_M, sizes.queries, "value", False, True, sizes, c)
        lse_row, low, dl, left_out = load_lse(lse, dlse, b, h, terms, sizes, c)
        delta = tl.where(left_out, 0.0, tl.sum(o_tile.to(tl.float32) * do_tile.to(tl.float32), 1)) - dl

        # P = exp(S - LSE)
        added = with_mask(matrix, mask, b, h, sizes, c)
        visible = added != -float("inf")
        s, slope = score_tile(dot(q_tile, k_tile.T, None, c), added, terms, True)
        p = tl.exp2((s - lse_row[:, None]) * terms.exponent + low[:, None])
        p = tl.where(visible, p, 0.0)

        # dS = P ∘ (dP - delta)
        dp = dot(do_tile, v_tile.T, None, c)
        ds, db = score_tile_gradient(p, dp, delta[:, None], slope, terms)
        ds = ds.to(q_tile.dtype)
        if c.WANT_BIAS:
            dbias_sum += db
        if c.WANT_V:
            dv_tile = dot(tl.trans(p.to(do_tile.dtype)), do_tile, None, c)
            store_rows(grads.dv, dv_tile, b, h, n, sizes.keys, sizes.value_dim, c.BLOCK_DV)
        if c.WANT_Q:
            dq_tile = dot(ds, k_tile, None, c) * terms.scale
            store_rows(grads.dq, dq_tile, b, h, m, sizes.queries, sizes.head_dim, c.BLOCK_D)
        if c.WANT_K:
            dk_tile = dot(tl.trans(ds), q_tile, None, c) * terms.scale
            store_rows(grads.dk, dk_tile, b, h, n, sizes.keys, sizes.head_dim, c.BLOCK_D)
    if c.WANT_BIAS:
        store_rows(grads.dbias, dbias_sum, tl.program_id(0), 0, m, sizes.queries, sizes.keys, c.BLOCK_N)
