"""Preprocessing for the backward of a packed batch, in one launch."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from tilewise.backends.triton.backward import mark_finite, row_statistics
from tilewise.backends.triton.tensors import ProblemSizes, store_rows
from tilewise.backends.triton.varlen import READ, query_tile, rows_from, sequence_of

CHUNK = tl.constexpr(4096)  # elements of a ragged dBias per program


def programs(sizes: ProblemSizes, block_m: int, block_n: int, dq: Any, gaps: bool) -> int:
    """Return the programs of `packed_preprocess_kernel`. dq: may be None; gaps: dBias is given."""
    assert sizes.total_queries is not None
    assert sizes.total_keys is not None
    assert sizes.pairs is not None
    count = sizes.padded_queries // block_m * sizes.heads
    count += triton.cdiv(sizes.total_keys, block_n) * sizes.heads // sizes.group
    if dq is not None:
        count += triton.cdiv(sizes.total_queries, block_m) * sizes.heads
    return count + (triton.cdiv(sizes.pairs, CHUNK.value) if gaps else 0)


@triton.jit
def packed_preprocess_kernel(o, o_low, do, lse, dlse, delta, lse2, dq_accum, mended, lengths, own, dq, dbias, sizes,
                             c):  # fmt: skip
    """Compute `row_statistics` and `mark_finite`; zero dq, dk, dv and the gaps of a ragged dbias.

    Each program does one of these tasks for one tile or chunk. own: `OwnKeys`. dq, dbias: `Strided`, or None.
    """
    pid, k, v, finite, dk, dv = tl.program_id(0), own.k, own.v, own.finite, own.dk, own.dv
    kv_heads = sizes.heads // sizes.group
    row_tiles, key_tiles = sizes.padded_queries // c.BLOCK_M, tl.cdiv(sizes.total_keys, c.BLOCK_N)
    query_tiles = tl.cdiv(sizes.total_queries, c.BLOCK_M)
    first_keys = row_tiles * sizes.heads
    first_queries = first_keys + key_tiles * kv_heads
    first_chunk = first_queries
    if dq is not None:
        first_chunk += query_tiles * sizes.heads
    if pid < first_keys:
        _statistics_of_tile(
            o, o_low, do, lse, dlse, delta, lse2, dq_accum, mended, lengths, pid % row_tiles, pid // row_tiles, sizes,
            c,
        )  # fmt: skip
    elif pid < first_queries:
        tile, hk = (pid - first_keys) % key_tiles, (pid - first_keys) // key_tiles
        if c.HIDES:
            mark_finite(k, v, finite, tile, hk, 0, 1, sizes.total_keys, sizes, c)
        n = tile * c.BLOCK_N + tl.arange(0, c.BLOCK_N)
        if c.WANT_K:
            zeros = tl.zeros([c.BLOCK_N, c.BLOCK_D], tl.float32)
            for i in tl.static_range(c.D_BLOCKS):
                store_rows(dk, zeros, 0, hk, n, sizes.total_keys, sizes.head_dim, c.BLOCK_D, i)
        if c.WANT_V:
            zeros = tl.zeros([c.BLOCK_N, c.BLOCK_DV], tl.float32)
            for i in tl.static_range(c.DV_BLOCKS):
                store_rows(dv, zeros, 0, hk, n, sizes.total_keys, sizes.value_dim, c.BLOCK_DV, i)
    elif pid < first_chunk:
        if dq is not None:
            tile, h = (pid - first_queries) % query_tiles, (pid - first_queries) // query_tiles
            m = tile * c.BLOCK_M + tl.arange(0, c.BLOCK_M)
            zeros = tl.zeros([c.BLOCK_M, c.BLOCK_D], tl.float32)
            for i in tl.static_range(c.D_BLOCKS):
                store_rows(dq, zeros, 0, h, m, sizes.total_queries, sizes.head_dim, c.BLOCK_D, i)
    elif dbias is not None:
        _zero_gaps(dbias, lengths, pid - first_chunk, sizes, c)


@triton.jit
def _statistics_of_tile(o, o_low, do, lse, dlse, delta, lse2, dq_accum, mended, lengths, place, h, sizes,
                        c):  # fmt: skip
    b, tile, start, sizes = query_tile(lengths, place, sizes, c)
    o, do, lse = rows_from(o, start.query), rows_from(do, start.query), lse + start.query
    if o_low is not None:
        o_low = rows_from(o_low, start.query)
    if mended is not None:
        mended = rows_from(mended, start.query)
    if dlse is not None:
        dlse = rows_from(dlse, start.query)
    if c.WANT_Q:
        dq_accum += start.padded
    delta, lse2 = delta + start.padded, lse2 + start.padded
    row_statistics(o, o_low, do, lse, dlse, delta, lse2, dq_accum, mended, tile, h, b, sizes, c)


@triton.jit
def _zero_gaps(x, lengths, chunk, sizes, c):
    """Zero a chunk of a ragged dBias, (1, H, 1, pairs), unless its disjoint matrices fill the chunk."""
    first = chunk.to(tl.int64) * CHUNK
    last = tl.minimum(first + CHUNK, sizes.pairs)
    filled = first * 0
    for n0 in range(0, sizes.batch, READ):
        n = n0 + tl.arange(0, READ)
        start, queries, keys = sequence_of(lengths, tl.minimum(n, sizes.batch - 1), sizes, c)
        begin, end = start.pair, start.pair + tl.cast(keys, tl.int64) * queries
        shared = tl.maximum(tl.minimum(end, last) - tl.maximum(begin, first), 0)
        filled += tl.sum(tl.where(n < sizes.batch, shared, 0), 0)
    if filled < last - first:
        at = first + tl.arange(0, CHUNK)
        for h in range(0, sizes.heads):
            zeros = tl.zeros([CHUNK], x.pointer.dtype.element_ty)
            tl.store(x.pointer + tl.cast(h, tl.int64) * x.stride1 + at * x.stride3, zeros, mask=at < last)
