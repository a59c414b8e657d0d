"""Packed batches in the Triton kernels: a program finds its sequence, then computes a dense call.

Pointers are moved to the sequence's first row, and sizes become the sequence's; window and Toeplitz bias, which are
aligned to the ends, are shifted. The host does not synchronize to read lengths: it launches ``total // BLOCK + B``
programs per head, the most that can be needed. The first tile of sequence b has the number ``cu[b] // BLOCK + b``. Row
statistics are padded to full tiles in this order.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewise.backends import Outputs, sink_gradient
from tilewise.backends.launch.launcher import POINTER, Record, Strided
from tilewise.backends.triton.tensors import ProblemSizes, Starts, store_rows
from tilewise.spec.problem import Problem
from tilewise.spec.rounding import with_low_bits
from tilewise.spec.seqlens import Lengths

NO_LENGTHS = (None,)
READ = tl.constexpr(128)  # offsets loaded at a time


def lengths_layout(lengths: Lengths | None) -> Any:
    """Return the layout of `flat_lengths`; `POINTER` (compiled without lengths) for a dense call."""
    return POINTER if lengths is None else Record(Lengths, (POINTER,) * len(lengths))


def flat_lengths(lengths: Lengths | None) -> tuple:
    """Return the tensors of ``lengths`` for a `Launch`."""
    return NO_LENGTHS if lengths is None else tuple([None if x is None else x.contiguous() for x in lengths])


def tile_count(problem: Problem, total: int, block: int) -> int:
    """Return the number of tiles for a packed batch's queries or keys; some have no rows."""
    return total // block + problem.batch


@triton.jit
def rows_from(x, first):
    """Return a `Strided` whose rows begin at row ``first``."""
    return Strided(x.pointer + tl.cast(first, tl.int64) * x.stride2, x.stride0, x.stride1, x.stride2, x.stride3)


@triton.jit
def _offset(at, total):
    """Load an offset, clamped to 0 .. ``total``, so that wrong offsets access no other memory."""
    return tl.minimum(tl.maximum(tl.load(at), 0), total).to(tl.int32)


@triton.jit
def _sequence_of(cu, tile, total, sizes, BLOCK: tl.constexpr):
    """Return (sequence, tile in it) of one of `tile_count` tiles; the sequence may not have this tile."""
    count = tile * 0
    for n0 in range(0, sizes.batch, READ):
        n = n0 + tl.arange(0, READ)
        begin = tl.load(cu + n, mask=n < sizes.batch, other=0)
        begin = tl.minimum(tl.maximum(begin, 0), total).to(tl.int32)
        count += tl.sum(((begin // BLOCK + n <= tile) & (n < sizes.batch)).to(tl.int32), 0)
    b = tl.maximum(count - 1, 0)
    return b, tile - (_offset(cu + b, total) // BLOCK + b)


@triton.jit
def sequence_of(lengths, b, sizes, c):
    """Return the `Starts` of a sequence, and its numbers of queries and keys."""
    q0, k0 = _offset(lengths.cu_q + b, sizes.total_queries), _offset(lengths.cu_k + b, sizes.total_keys)
    queries = tl.maximum(_offset(lengths.cu_q + b + 1, sizes.total_queries) - q0, 0)
    keys = tl.maximum(_offset(lengths.cu_k + b + 1, sizes.total_keys) - k0, 0)
    if lengths.used_k is not None:
        keys = _offset(lengths.used_k + b, keys)
    pair = tl.cast(q0, tl.int64) * 0
    if lengths.pairs is not None:  # a sequence whose matrix exceeds the ragged bias has no keys
        pair = tl.load(lengths.pairs + b).to(tl.int64)
        inside = (pair >= 0) & (pair <= sizes.pairs) & (pair + tl.cast(keys, tl.int64) * queries <= sizes.pairs)
        keys = tl.where(inside, keys, 0)
    rows = queries
    # A padded bias has no more rows and columns than the longest sequence.
    queries, keys = tl.minimum(queries, sizes.queries), tl.minimum(keys, sizes.keys)
    skew = sizes.queries - queries if c.FROM_START else sizes.keys - keys
    start = Starts(q0, k0, pair, (q0 // c.BLOCK_M + b) * c.BLOCK_M, keys - queries, skew, rows)
    return start, queries, keys


@triton.jit
def _sizes_of(queries, keys, exists, sizes):
    """Return the sizes of a sequence's dense call; 0 queries and keys if the tile does not exist."""
    # Triton 3.6: an early return loses constants of the arguments, hence sizes of 0.
    return ProblemSizes(
        1, sizes.heads, sizes.group, tl.where(exists, queries, 0), tl.where(exists, keys, 0), sizes.head_dim,
        sizes.value_dim, sizes.padded_queries, 1, sizes.total_queries, sizes.total_keys, sizes.pairs,
    )  # fmt: skip


@triton.jit
def own_sizes(lengths, b, sizes, c):
    """Return the `Starts` of a sequence, and the sizes of its dense call."""
    start, queries, keys = sequence_of(lengths, b, sizes, c)
    return start, _sizes_of(queries, keys, queries >= 0, sizes)


@triton.jit
def query_tile(lengths, tile, sizes, c):
    """Return (sequence, tile of queries, `Starts`, sizes); tiles before all sequences have no rows."""
    b, tile = _sequence_of(lengths.cu_q, tile, sizes.total_queries, sizes, c.BLOCK_M)
    start, queries, keys = sequence_of(lengths, b, sizes, c)
    own = _sizes_of(queries, keys, (tile >= 0) & (tile * c.BLOCK_M < queries), sizes)
    rows = tl.where(tile >= 0, start.rows, 0)
    start = Starts(start.query, start.key, start.pair, start.padded, start.diagonal, start.skew, rows)
    return b, tl.maximum(tile, 0), start, own


@triton.jit
def key_tile(lengths, tile, sizes, c):
    """Return (sequence, tile of keys, `Starts`, sizes), like `query_tile`."""
    b, tile = _sequence_of(lengths.cu_k, tile, sizes.total_keys, sizes, c.BLOCK_N)
    start, queries, keys = sequence_of(lengths, b, sizes, c)
    own = _sizes_of(queries, keys, (tile >= 0) & (tile * c.BLOCK_N < keys), sizes)
    return b, tl.maximum(tile, 0), start, own


@triton.jit
def ends_of_all(lengths, sizes):
    """Return the first query of the first sequence, and the end of the last one."""
    first = _offset(lengths.cu_q, sizes.total_queries)
    return first, _offset(lengths.cu_q + sizes.batch, sizes.total_queries)


@triton.jit
def zero_unowned(o, lse, ends, place, h, tile, start, queries, column, sizes, c):
    """Set o = 0 and LSE = -inf in rows that `forward_kernel` does not compute.

    These are the rows before the first and after the last sequence, and a sequence's rows past the caller's
    max_seqlen_q. ends: `ends_of_all`. place: the program's tile among all; tile: in its sequence of ``queries`` rows;
    column: its tile of columns.
    """
    first, last = ends
    row = place * c.BLOCK_M
    if (row < first) | ((row + c.BLOCK_M > last) & (row < sizes.total_queries)):
        rows = row + tl.arange(0, c.BLOCK_M)
        _zero_rows(o, lse, h, rows, ((rows < first) | (rows >= last)) & (rows < sizes.total_queries), column, sizes, c)
    row = tile * c.BLOCK_M
    if (row < start.rows) & (row + c.BLOCK_M > queries):
        rows = row + tl.arange(0, c.BLOCK_M)
        _zero_rows(o, lse, h, start.query + rows, (rows >= queries) & (rows < start.rows), column, sizes, c)


@triton.jit
def _zero_rows(o, lse, h, rows, inside, column, sizes, c):
    zeros = tl.zeros([c.BLOCK_M, c.BLOCK_DV], tl.float32)
    store_rows(o, zeros, 0, h, rows, tl.where(inside, sizes.total_queries, 0), sizes.value_dim, c.BLOCK_DV, column)
    nothing = tl.full([c.BLOCK_M], -float("inf"), tl.float32)
    tl.store(lse + tl.cast(h, tl.int64) * sizes.total_queries + rows, nothing, mask=inside)


def packed_sink_gradient(sink: Tensor, outputs: Outputs, cotangents: Outputs) -> Tensor:
    """Return dSink of a packed batch; rows of no sequence (LSE = -inf, arbitrary o) add nothing."""
    lse, (do, dlse, *_) = outputs.lse, cotangents
    assert lse is not None
    minus_delta = (do.float() * with_low_bits(outputs.o, outputs.o_low)).sum(-1).neg_()
    minus_delta = minus_delta if dlse is None else minus_delta.add_(dlse)
    nothing = lse == -torch.inf
    return sink_gradient(sink, lse.masked_fill(nothing, torch.inf), minus_delta.masked_fill_(nothing, 0.0))
