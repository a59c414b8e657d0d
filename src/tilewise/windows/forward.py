"""O = softmax(scale · Q Kᵀ + bias) V for blocks of queries, each with one window of keys.

A window is one tile: no online softmax, and no copy of keys. Scores are not in base 2, and their maximum is subtracted
before they are scaled for exp2: a row whose keys all have a bias of -1e9, or the lowest finite number, is the mean of
its visible values.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tilewise.backends.kernels.products import product

LOG2E = tl.constexpr(1.4426950408889634)
LARGE = tl.constexpr(1e38)


class WindowSizes(NamedTuple):
    """Sizes that differ between calls of one compiled kernel."""

    batch: int
    heads: int
    length: int  # queries, and keys
    blocks: int
    last: int  # last begin of a shifted window
    bias_batch: int  # matrices of the bias; without one, of scores
    bias_heads: int
    share: int  # (batch element, head) pairs per program that read one matrix
    shares: int  # programs per bias matrix and block
    mask_batch: int  # strides of the mask
    mask_key: int
    query_programs: int = 0  # of a backward
    tiles: int = 0  # of keys


class WindowConstants(NamedTuple):
    """Compile-time constants of a kernel; every field is a tl.constexpr."""

    Q_BLOCK: Any
    K_BLOCK: Any
    BLOCK_Q: Any  # Q_BLOCK and K_BLOCK up to the next power of 2
    BLOCK_K: Any
    BEFORE: Any
    SHIFT: Any
    HEAD_DIM: Any
    VALUE_DIM: Any
    BLOCK_D: Any
    BLOCK_DV: Any
    BIAS: Any
    MASK: Any
    PRECISION: Any
    MARK: Any  # dtype of the marks of values that are not finite
    WIDE: Any  # offsets inside a matrix need 64 bits
    ALONE: Any = False  # a program computes one batch element and head
    STATS: Any = False  # the forward saves the row statistics
    # of a backward
    QUERIES: Any = False  # dQ or dBias is written
    KEYS: Any = False  # dK or dV is written
    DQ: Any = False
    DK: Any = False
    DV: Any = False
    DBIAS: Any = False
    BLOCK_N: Any = 0  # keys of a tile
    OFFSET: Any = 0  # keys by which the first tile begins before the first key, see `Tiles`
    BLOCK_M: Any = 0  # queries per iteration


@triton.jit
def _wide(index, c):
    return index.to(tl.int64) if c.WIDE else index


@triton.jit
def load_rows(x, b, h, rows, there, DIM: tl.constexpr, BLOCK: tl.constexpr, c):
    """Load the tile [rows, BLOCK] of a `Strided`; 0 where ``there`` [rows] is False, and past DIM."""
    d = tl.arange(0, BLOCK)
    at = x.pointer + tl.cast(b, tl.int64) * x.stride0 + tl.cast(h, tl.int64) * x.stride1
    at = at + _wide(rows, c)[:, None] * x.stride2 + _wide(d, c)[None, :] * x.stride3
    inside = there[:, None] if DIM == BLOCK else there[:, None] & (d < DIM)[None, :]
    return tl.load(at, mask=inside, other=0.0)


@triton.jit
def store_rows(x, tile, b, h, rows, there, DIM: tl.constexpr, BLOCK: tl.constexpr, c):
    d = tl.arange(0, BLOCK)
    at = x.pointer + tl.cast(b, tl.int64) * x.stride0 + tl.cast(h, tl.int64) * x.stride1
    at = at + _wide(rows, c)[:, None] * x.stride2 + _wide(d, c)[None, :] * x.stride3
    inside = there[:, None] if DIM == BLOCK else there[:, None] & (d < DIM)[None, :]
    tl.store(at, tile.to(x.pointer.dtype.element_ty), mask=inside)


@triton.jit
def window_begin(block, sizes, c):
    begin = block * c.Q_BLOCK - c.BEFORE
    if c.SHIFT:
        begin = tl.minimum(tl.maximum(begin, 0), sizes.last)
    return begin


@triton.jit
def visible_keys(mask, b, keys, there, sizes, c):
    """Return ``there`` restricted to the visible keys of the mask."""
    if c.MASK:
        at = mask + tl.cast(b, tl.int64) * sizes.mask_batch + keys.to(tl.int64) * sizes.mask_key
        there = there & (tl.load(at, mask=there, other=0) != 0)
    return there


@triton.jit
def program_of(pid, sizes):
    """Return batch element and head of the bias matrix, block, and the range [first, end) of its heads to compute."""
    mh = pid % sizes.bias_heads
    rest = pid // sizes.bias_heads
    block = rest % sizes.blocks
    rest = rest // sizes.blocks
    mb, share = rest % sizes.bias_batch, rest // sizes.bias_batch
    count = (sizes.batch // sizes.bias_batch) * (sizes.heads // sizes.bias_heads)
    first = share * sizes.share
    return mb, mh, block, first, tl.minimum(first + sizes.share, count)


@triton.jit
def member(n, mb, mh, sizes):
    """Return ``(batch element, head)`` of the n-th reader of a bias matrix."""
    heads = sizes.heads // sizes.bias_heads
    return mb + n // heads, mh + n % heads


@triton.jit
def bias_place(bias, mb, mh, rows, places, c):
    """Return addresses of rows, counted over all blocks, at places of their windows; broadcasts."""
    at = bias.pointer + tl.cast(mb, tl.int64) * bias.stride0 + tl.cast(mh, tl.int64) * bias.stride1
    return at + (_wide(rows, c) * bias.stride2 + _wide(places, c) * bias.stride3)


@triton.jit
def load_bias(bias, mb, mh, block, i, j, c):
    """Load the bias tile of a block and its window, including padding queries and keys."""
    at = bias_place(bias, mb, mh, (block * c.Q_BLOCK + i)[:, None], j[None, :], c)
    return tl.load(at, mask=(i < c.Q_BLOCK)[:, None] & (j < c.K_BLOCK)[None, :], other=0.0)


@triton.jit
def scores(products, added, seen, scale, c):
    """Return scaled products plus bias; -inf where ``seen`` is False or the bias is -inf, even for NaN products."""
    s = products * scale
    if c.BIAS:
        added = added.to(tl.float32)
        seen &= added != -float("inf")
        s += added
    return tl.where(seen, s, -float("inf"))


@triton.jit
def stats_place(stats, b, h, rows, sizes):
    """Return the addresses of the rows' maximum and of 1 / sum."""
    at = stats + (tl.cast(b, tl.int64) * sizes.heads + h) * sizes.length + rows
    return at, at + tl.cast(sizes.batch, tl.int64) * sizes.heads * sizes.length


@triton.jit
def product_apart(a, b, acc, sizes, c):
    """Return acc + A B in a region of its own, for a tile A computed by another product.

    Triton 3.6: connected products in one region all get the layout of the last one's shape; four warps would compute 32
    rows twice.
    """
    if sizes.heads > 0:
        acc = product(a, b, acc, c.PRECISION, False)
    return acc


@triton.jit
def _of_member(n, q, k, v, mask, o, stats, added, mb, mh, block, scale, sizes, c):
    """Compute the n-th head that shares the bias matrix."""
    i, j = tl.arange(0, c.BLOCK_Q), tl.arange(0, c.BLOCK_K)
    rows, keys = block * c.Q_BLOCK + i, window_begin(block, sizes, c) + j
    row_there = (i < c.Q_BLOCK) & (rows < sizes.length)
    b, h = member(n, mb, mh, sizes)
    there = (j < c.K_BLOCK) & (keys >= 0) & (keys < sizes.length)
    there = visible_keys(mask, b, keys, there, sizes, c)
    q_tile = load_rows(q, b, h, rows, row_there, c.HEAD_DIM, c.BLOCK_D, c)
    k_tile = load_rows(k, b, h, keys, there, c.HEAD_DIM, c.BLOCK_D, c)
    v_tile = load_rows(v, b, h, keys, there, c.VALUE_DIM, c.BLOCK_DV, c)
    s = scores(product(q_tile, k_tile.T, None, c.PRECISION, False), added, there[None, :], scale, c)
    top = tl.max(s, 1)
    top = tl.where(top == -float("inf"), 0.0, top)
    p = tl.exp2((s - top[:, None]) * LOG2E)
    total = tl.sum(p, 1)
    once = tl.where(total == 0, 0.0, 1 / tl.where(total == 0, 1.0, total))
    p = p.to(v_tile.dtype)
    acc = product_apart(p, v_tile, tl.zeros([c.BLOCK_Q, c.BLOCK_DV], tl.float32), sizes, c)
    if c.BIAS:
        # NaN fix-up: a value hidden by the bias that is not finite makes 0 · NaN. Recompute only then.
        spoilt = tl.max((tl.abs(acc) < float("inf")).to(tl.int32) ^ 1)
        if spoilt != 0:
            finite = tl.abs(v_tile.to(tl.float32)) < float("inf")
            # visible · not finite overflows to infinity, hidden · not finite is 0
            seen = tl.where(s > -float("inf"), LARGE, 0.0).to(c.MARK)
            acc = tl.zeros([c.BLOCK_Q, c.BLOCK_DV], tl.float32)
            if sizes.heads > 0:
                acc = tl.dot(seen, tl.where(finite, 0.0, LARGE).to(c.MARK), acc)
            acc = product_apart(p, tl.where(finite, v_tile, 0.0).to(v_tile.dtype), acc, sizes, c)
            acc = tl.where(tl.abs(acc) < float("inf"), acc, float("nan"))
    store_rows(o, acc * once[:, None], b, h, rows, row_there, c.VALUE_DIM, c.BLOCK_DV, c)
    if c.STATS:
        at_top, at_once = stats_place(stats, b, h, rows, sizes)
        tl.store(at_top, top, mask=row_there)
        tl.store(at_once, once, mask=row_there)


@triton.jit
def forward_kernel(q, k, v, bias, mask, o, stats, scale, sizes, c):
    """Each program computes a block for all, or a share of, the batch elements and heads of one bias matrix."""
    mb, mh, block, first, end = program_of(tl.program_id(0), sizes)
    added = 0.0
    if c.BIAS:
        added = load_bias(bias, mb, mh, block, tl.arange(0, c.BLOCK_Q), tl.arange(0, c.BLOCK_K), c)
    if c.ALONE:
        _of_member(first, q, k, v, mask, o, stats, added, mb, mh, block, scale, sizes, c)
    else:
        for n in tl.range(first, end):
            _of_member(n, q, k, v, mask, o, stats, added, mb, mh, block, scale, sizes, c)
