"""All gradients by one launch, without atomics; each program handles a block of queries or a tile of keys.

P = exp(S - top) · once with the forward's statistics, dS = P ∘ (dP - delta), dP = dO Vᵀ. A program of a block has whole
rows, delta = rowsum(P ∘ dP), and writes dQ = scale · dS K and dBias, the sum of dS over the heads that share the
matrix. A program of keys loops over all queries that see them: dV = Pᵀ dO and dK = scale · dSᵀ Q, delta = rowsum(O ∘
dO). Every output element is written by exactly one program.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.backends.kernels.products import product
from tilewise.windows.forward import (
    LARGE,
    LOG2E,
    bias_place,
    load_bias,
    load_rows,
    member,
    product_apart,
    program_of,
    scores,
    stats_place,
    store_rows,
    visible_keys,
    window_begin,
)


@triton.jit
def _finite(x):
    """Return the tile with 0 for elements that are not finite, which would make 0 · NaN at hidden pairs."""
    return tl.where(tl.abs(x.to(tl.float32)) < float("inf"), x, 0.0).to(x.dtype)


@triton.jit
def _row_statistics(stats, b, h, rows, there, sizes):
    at_top, at_once = stats_place(stats, b, h, rows, sizes)
    return tl.load(at_top, mask=there, other=0.0), tl.load(at_once, mask=there, other=0.0)


@triton.jit
def _of_member(n, q, k, v, mask, stats, do, dq, added, mb, mh, rows, keys, row_there, inside, scale, sizes, c):
    """Return dS of the n-th head that shares the bias matrix, and write its dQ."""
    b, h = member(n, mb, mh, sizes)
    there = visible_keys(mask, b, keys, inside, sizes, c)
    q_tile = load_rows(q, b, h, rows, row_there, c.HEAD_DIM, c.BLOCK_D, c)
    k_tile = load_rows(k, b, h, keys, there, c.HEAD_DIM, c.BLOCK_D, c)
    do_tile = load_rows(do, b, h, rows, row_there, c.VALUE_DIM, c.BLOCK_DV, c)
    v_tile = load_rows(v, b, h, keys, there, c.VALUE_DIM, c.BLOCK_DV, c)
    top, once = _row_statistics(stats, b, h, rows, row_there, sizes)
    seen = row_there[:, None] & there[None, :]
    s = scores(product(q_tile, k_tile.T, None, c.PRECISION, False), added, seen, scale, c)
    hidden = s == -float("inf")
    p = tl.exp2((s - top[:, None]) * LOG2E) * once[:, None]
    dp = tl.where(hidden, 0.0, product(do_tile, v_tile.T, None, c.PRECISION, False))
    delta = tl.sum(p * dp, 1)
    ds = tl.where(hidden, 0.0, p * (dp - delta[:, None]))
    if c.DQ:
        k_tile = _finite(k_tile)
        found = product_apart(ds.to(k_tile.dtype), k_tile, tl.zeros([c.BLOCK_Q, c.BLOCK_D], tl.float32), sizes, c)
        store_rows(dq, found * scale, b, h, rows, row_there, c.HEAD_DIM, c.BLOCK_D, c)
    return ds


@triton.jit
def _of_queries(pid, q, k, v, bias, mask, stats, do, dq, dbias, scale, sizes, c):
    mb, mh, block, first, end = program_of(pid, sizes)
    i, j = tl.arange(0, c.BLOCK_Q), tl.arange(0, c.BLOCK_K)
    rows, keys = block * c.Q_BLOCK + i, window_begin(block, sizes, c) + j
    row_there = (i < c.Q_BLOCK) & (rows < sizes.length)
    inside = (j < c.K_BLOCK) & (keys >= 0) & (keys < sizes.length)
    added = 0.0
    if c.BIAS:
        added = load_bias(bias, mb, mh, block, i, j, c)
    if c.ALONE:
        summed = _of_member(
            first, q, k, v, mask, stats, do, dq, added, mb, mh, rows, keys, row_there, inside, scale, sizes, c
        )
    else:
        summed = tl.zeros([c.BLOCK_Q, c.BLOCK_K], tl.float32)
        for n in tl.range(first, end):
            summed += _of_member(
                n, q, k, v, mask, stats, do, dq, added, mb, mh, rows, keys, row_there, inside, scale, sizes, c
            )
    if c.DBIAS:
        at = bias_place(dbias, mb, mh, rows[:, None], j[None, :], c)
        tl.store(
            at, summed.to(dbias.pointer.dtype.element_ty), mask=(i < c.Q_BLOCK)[:, None] & (j < c.K_BLOCK)[None, :]
        )


@triton.jit
def _blocks_that_see(key, sizes, c):
    """Return [first, end) of the blocks whose windows have one of BLOCK_N keys from ``key`` on."""
    past = key + c.BEFORE - c.K_BLOCK  # begin of the last block whose window ends before key
    first = tl.where(past < 0, 0, past // c.Q_BLOCK + 1)
    end = tl.minimum((key + c.BLOCK_N + c.BEFORE + c.Q_BLOCK - 1) // c.Q_BLOCK, sizes.blocks)
    if c.SHIFT:
        first = tl.where(key < c.K_BLOCK, 0, first)
        end = tl.where(key + c.BLOCK_N > sizes.last, sizes.blocks, end)
    return first, end


@triton.jit
def _of_keys(pid, q, k, v, bias, mask, o, stats, do, dk, dv, scale, sizes, c):
    h = pid % sizes.heads
    b = pid // sizes.heads % sizes.batch
    key = pid // sizes.heads // sizes.batch * c.BLOCK_N - c.OFFSET
    mb = tl.where(sizes.bias_batch > 1, b, 0)
    mh = tl.where(sizes.bias_heads > 1, h, 0)
    keys = key + tl.arange(0, c.BLOCK_N)
    inside = (keys >= 0) & (keys < sizes.length)
    there = visible_keys(mask, b, keys, inside, sizes, c)
    k_tile = load_rows(k, b, h, keys, there, c.HEAD_DIM, c.BLOCK_D, c)
    v_tile = load_rows(v, b, h, keys, there, c.VALUE_DIM, c.BLOCK_DV, c)
    dk_acc = tl.zeros([c.BLOCK_N, c.BLOCK_D], tl.float32)
    dv_acc = tl.zeros([c.BLOCK_N, c.BLOCK_DV], tl.float32)
    first, end = _blocks_that_see(key, sizes, c)
    last_row = tl.minimum(end * c.Q_BLOCK, sizes.length)
    for m0 in tl.range(first * c.Q_BLOCK, last_row, c.BLOCK_M):
        rows = m0 + tl.arange(0, c.BLOCK_M)
        row_there = rows < last_row
        places = keys[:, None] - window_begin(rows // c.Q_BLOCK, sizes, c)[None, :]
        within = row_there[None, :] & (places >= 0) & (places < c.K_BLOCK)
        seen = within & there[:, None]
        added = 0.0
        if c.BIAS:
            added = tl.load(bias_place(bias, mb, mh, rows[None, :], places, c), mask=within, other=0.0)
        q_tile = load_rows(q, b, h, rows, row_there, c.HEAD_DIM, c.BLOCK_D, c)
        do_tile = load_rows(do, b, h, rows, row_there, c.VALUE_DIM, c.BLOCK_DV, c)
        o_tile = load_rows(o, b, h, rows, row_there, c.VALUE_DIM, c.BLOCK_DV, c)
        top, once = _row_statistics(stats, b, h, rows, row_there, sizes)
        s = scores(product(k_tile, q_tile.T, None, c.PRECISION, False), added, seen, scale, c)
        p = tl.exp2((s - top[None, :]) * LOG2E) * once[None, :]
        if c.DV:
            finite = tl.abs(do_tile.to(tl.float32)) < float("inf")
            if tl.max(finite.to(tl.int32) ^ 1) != 0:  # affects visible keys only
                marked = tl.where(finite, 0.0, LARGE).to(c.MARK)
                dv_acc = tl.dot(tl.where(s > -float("inf"), LARGE, 0.0).to(c.MARK), marked, dv_acc)
            dv_acc = product_apart(p.to(do_tile.dtype), _finite(do_tile), dv_acc, sizes, c)
        if c.DK:
            delta = tl.sum(o_tile.to(tl.float32) * do_tile.to(tl.float32), 1)
            dp = product(v_tile, do_tile.T, None, c.PRECISION, False)
            ds = tl.where(s == -float("inf"), 0.0, p * (dp - delta[None, :]))
            dk_acc = product_apart(ds.to(q_tile.dtype), _finite(q_tile), dk_acc, sizes, c)
    if c.DK:
        store_rows(dk, dk_acc * scale, b, h, keys, inside, c.HEAD_DIM, c.BLOCK_D, c)
    if c.DV:
        dv_acc = tl.where(tl.abs(dv_acc) < float("inf"), dv_acc, float("nan"))
        store_rows(dv, dv_acc, b, h, keys, inside, c.VALUE_DIM, c.BLOCK_DV, c)


@triton.jit
def backward_kernel(q, k, v, bias, mask, o, stats, do, dq, dk, dv, dbias, scale, sizes, c):
    """Run the programs of blocks, which may loop over several batch elements, before those of keys."""
    pid = tl.program_id(0)
    if c.QUERIES and c.KEYS:
        if pid < sizes.query_programs:
            _of_queries(pid, q, k, v, bias, mask, stats, do, dq, dbias, scale, sizes, c)
        else:
            pid -= sizes.query_programs
            _of_keys(pid, q, k, v, bias, mask, o, stats, do, dk, dv, scale, sizes, c)
    elif c.QUERIES:
        _of_queries(pid, q, k, v, bias, mask, stats, do, dq, dbias, scale, sizes, c)
    else:
        _of_keys(pid, q, k, v, bias, mask, o, stats, do, dk, dv, scale, sizes, c)
