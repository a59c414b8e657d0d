"""Loads and stores in the Triton kernels: by TMA if the tensor allows it, else by pointers.

A tensor is one kernel argument, a `Strided` or a tensor descriptor, and a compile-time switch tells which.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tilewise.backends.kernels.products import product
from tilewise.backends.launch.launcher import boxed, row_strides
from tilewise.spec.operands import BroadcastGroup, TensorSpec
from tilewise.spec.problem import Problem
from tilewise.spec.tma import tensor_fits_tma


class Broadcast(NamedTuple):
    """Broadcasting and memory access of a bias or mask; every field is a tl.constexpr."""

    BATCH: Any  # True: a matrix for each batch element; False: one for all; n: these repeat, see `Problem.mask_period`
    GROUP: Any  # query heads that share a matrix
    ROWS: Any  # full along the queries, else one row for all
    COLS: Any
    TMA: Any
    LAYOUT: Any = "padded"  # in a packed batch: "padded", "packed" along its axis, or "pairs", a matrix per sequence
    FLAT: Any = False  # neighbours in a row are neighbours in a warp, see `flat_place`
    RUNS: Any = False  # n matrices do not repeat: each is that of a run of batch elements, see `Problem.bias_batch`


class Starts(NamedTuple):
    """Offsets of one sequence of a packed batch, see `varlen`."""

    query: Any  # first row in q, o and tensors laid out like them
    key: Any  # first row in k and v
    pair: Any  # first element in a ragged bias
    padded: Any  # first row in the backward's row statistics
    diagonal: Any  # keys - queries
    skew: Any  # entry of the sequence's least distance in a Toeplitz bias
    rows: Any = 0  # queries, not limited to the caller's max_seqlen_q


class Reads(NamedTuple):
    """Operands of the tile functions, built inside kernels: descriptors must be separate arguments."""

    q: Any
    k: Any
    v: Any
    do: Any
    lse2: Any
    delta: Any
    bias: Any
    mask: Any
    parts: Any = None  # `Parts` of `Strided`s and pointers
    query_origin: Any = 0  # see `relative.origin_of`
    key_origin: Any = 0
    start: Any = 0  # `Starts` of a packed batch
    column: Any = 0  # the program's tile of columns, see `blocks`


class QueryRows(NamedTuple):
    """Queries of a tile, with PACK_GQA of all query heads of one key/value head."""

    b: Any
    kv_head: Any
    head: Any  # query head; with PACK_GQA one per row, [BLOCK_M, 1]
    first_head: Any  # of the tile
    m0: Any  # query of row r: m0 + rows[r]
    rows: Any  # [BLOCK_M, 1], transposed [1, BLOCK_M]


class ProblemSizes(NamedTuple):
    batch: int
    heads: int
    group: int
    queries: int
    keys: int
    head_dim: int
    value_dim: int
    padded_queries: int  # queries rounded up to full tiles: length of the backward's row statistics
    splits: int = 1  # programs that share the keys of one tile of queries
    # Sums over a packed batch, whose queries and keys above are the longest sequence's, or a program's own sequence's.
    total_queries: int | None = None
    total_keys: int | None = None
    pairs: int | None = None  # elements of a ragged bias


def broadcast(x: TensorSpec, group: BroadcastGroup, tma: bool, layout: str = "padded") -> Broadcast:
    return Broadcast(x.batch > 1, group.heads, x.rows > 1, x.cols > 1, tma, layout)


def descriptor(x: Tensor, rows: int, cols: int) -> TensorDescriptor:
    """Return a TMA layout with boxes (rows, cols); TMA reads 0 outside the tensor and writes nothing."""
    strides = row_strides(x.shape, x.stride(), x.element_size())
    return boxed(TensorDescriptor, x, strides, (1, 1, rows, cols))


def wide(*tensors: Tensor | None) -> bool:
    """True if an offset inside one tile can exceed 2³¹ elements, so that it needs 64 bits."""
    return any(256 * max(x.stride()) >= 2**31 for x in tensors if x is not None and x.numel())


def comes_by_elements(problem: Problem, bias: Tensor | None) -> bool:
    """True if unaligned rows of a bias are loaded by unpipelined 2-byte loads: on Hopper, as measured."""
    hopper = problem.capability is not None and problem.capability[0] == 9
    return hopper and problem.bias_itemsize == 2 and begins_anywhere(problem, bias)


def begins_anywhere(problem: Problem, bias: Tensor | None) -> bool:
    """True if a bias has contiguous rows that may start at addresses that are not multiples of 16 bytes."""
    if bias is None:
        return False
    packed = problem.score.packed
    if packed is not None and "ragged" in packed.forms:
        return True
    return bias.stride(3) == 1 and not tensor_fits_tma(bias, bias.data_ptr() % 16 == 0)


@triton.jit
def program_tile(tiles, heads, batch, ORDER: tl.constexpr, SHARES: tl.constexpr = 1):
    """Return this program's (tile, head, batch) in the order ``ORDER``, see `Problem.raster_order`.

    SHARES: consecutive programs with the same tile.
    """
    pid = tl.program_id(0)
    if SHARES > 1:
        pid = pid // SHARES
    if ORDER == "tiles":
        tile = pid % tiles
        pid = pid // tiles
        return tile, pid % heads, pid // heads
    elif ORDER == "longest":
        # Longest first (LPT) over groups of eight heads, whose keys and values fit the L2: the last programs are short.
        first = pid // (8 * tiles) * 8
        width = tl.minimum(heads * batch - first, 8)
        pid = pid - first * tiles
        head = first + pid % width
        return pid // width, head % heads, head // heads
    elif ORDER == "batch":
        b = pid % batch
        pid = pid // batch
        return pid % tiles, pid // tiles, b
    else:  # heads
        h = pid % heads
        pid = pid // heads
        return pid % tiles, h, pid // tiles


@triton.jit
def column_tile(c):
    """Return this program's tile of columns, see `blocks`."""
    if c.COLUMN_TILES > 1:
        return tl.program_id(0) % c.COLUMN_TILES
    else:
        return 0


@triton.jit
def head_at(b, h, sizes, c):
    """Return the index of a query head among all batch elements; packed sequences share the heads."""
    return tl.cast(b * 0 if c.PACKED else b, tl.int64) * sizes.heads + h


@triton.jit
def lse_length(sizes, c):
    """Return the number of LSE elements per head."""
    return sizes.total_queries if c.PACKED else sizes.queries


@triton.jit
def row_at(head, m, length):
    """Return the index of query ``m`` of a head (`head_at`) in LSE or statistics, ``length`` per head."""
    return head * length + m


@triton.jit
def dq_accum_at(dq_accum, head, m, sizes, c, block=0):
    """Return pointers [BLOCK_D, M] to queries ``m`` of a head in the sum of dQᵀ, and a mask [BLOCK_D, 1].

    dq_accum: (B, H, D, padded queries). block: of dimensions.
    """
    d = tl.arange(0, c.BLOCK_D) + block * c.BLOCK_D
    at = dq_accum + (head * sizes.head_dim + d)[:, None] * sizes.padded_queries + m[None, :]
    return at, (d < sizes.head_dim)[:, None]


@triton.jit
def load_rows(x, b, h, row0, BLOCK: tl.constexpr, row_end, DIM: tl.constexpr, TMA: tl.constexpr, TAIL: tl.constexpr,
              sizes, c, block=0):  # fmt: skip
    """Load the tile [BLOCK, padded dim] of q, k, v, o or do that starts at ``row0``; 0 outside the tensor.

    DIM: dimension of the columns, "head" or "value". TAIL: rows may pass ``row_end``, one number or one per row.
    block: of columns.
    """
    COLS: tl.constexpr = c.BLOCK_D if DIM == "head" else c.BLOCK_DV
    EVEN: tl.constexpr = c.EVEN_D if DIM == "head" else c.EVEN_DV
    if TMA:
        tile = x.load([b, h, row0, block * COLS]).reshape([BLOCK, COLS])
    else:
        rows, cols = tl.arange(0, BLOCK), tl.arange(0, COLS) + block * COLS
        at = x.pointer + tl.cast(b, tl.int64) * x.stride0 + tl.cast(h, tl.int64) * x.stride1
        at = at + tl.cast(row0, tl.int64) * x.stride2
        if c.WIDE:
            at = at + rows.to(tl.int64)[:, None] * x.stride2 + cols.to(tl.int64)[None, :] * x.stride3
        else:
            at = at + rows[:, None] * x.stride2 + cols[None, :] * x.stride3
        end = sizes.head_dim if DIM == "head" else sizes.value_dim
        if TAIL and not EVEN:
            tile = tl.load(at, mask=(row0 + rows < row_end)[:, None] & (cols < end)[None, :], other=0.0)
        elif TAIL:
            tile = tl.load(at, mask=(row0 + rows < row_end)[:, None], other=0.0)
        elif EVEN:
            tile = tl.load(at)
        else:
            tile = tl.load(at, mask=(cols < end)[None, :], other=0.0)
    return tile


@triton.jit
def group_rows(x, at):
    """Return pointers [BLOCK_M, 1] to the rows of q, each of its own head."""
    row = x.pointer + tl.cast(at.b, tl.int64) * x.stride0 + tl.cast(at.head, tl.int64) * x.stride1
    row += tl.cast(at.m0 + at.rows, tl.int64) * x.stride2
    return row


@triton.jit
def load_group_rows(x, at, row_end, sizes, c):
    """Load the tile [BLOCK_M, padded head dim] of q, each row of its own head; 0 outside the tensor."""
    cols = tl.arange(0, c.BLOCK_D)[None, :]
    row = group_rows(x, at)
    inside = (at.m0 + at.rows < row_end) & (cols < sizes.head_dim)
    return tl.load(row + cols.to(tl.int64) * x.stride3, mask=inside, other=0.0)


@triton.jit
def store_rows(x, value, b, h, rows, row_end, col_end, COLS: tl.constexpr, block=0):
    """Store [rows, COLS] into a `Strided`, in its dtype, except past the ends. h: as `QueryRows.head`.

    block: of columns.
    """
    cols = tl.arange(0, COLS) + block * COLS
    at = x.pointer + tl.cast(b, tl.int64) * x.stride0 + tl.cast(h, tl.int64) * x.stride1
    at = at + rows.to(tl.int64)[:, None] * x.stride2 + cols.to(tl.int64)[None, :] * x.stride3
    inside = (rows < row_end)[:, None] & (cols < col_end)[None, :]
    tl.store(at, value.to(x.pointer.dtype.element_ty), mask=inside)


@triton.jit
def load_sink(x, b, h, m, sizes):
    """Load the sink of queries ``m`` in float32. x: `Strided` (B, H, M, 1); h: one or one per query."""
    at = x.pointer + tl.cast(b, tl.int64) * x.stride0 + tl.cast(h, tl.int64) * x.stride1
    return tl.load(at + m.to(tl.int64) * x.stride2, mask=m < sizes.queries, other=0.0).to(tl.float32)


@triton.jit
def operand_place(x, how, start, b, h, sizes):
    """Return the pointer and the (query, key) strides of the bias or mask matrix that (b, h) uses."""
    mb, mh = matrix_of(how, b, h, sizes.batch)
    place = x.pointer + tl.cast(mb, tl.int64) * x.stride0 + tl.cast(mh, tl.int64) * x.stride1
    stride2, stride3 = x.stride2, x.stride3
    if how.LAYOUT == "pairs":
        place, stride2, stride3 = place + start.pair, sizes.keys, 1
    elif how.LAYOUT == "packed" and how.ROWS:
        place += tl.cast(start.query, tl.int64) * stride2
    elif how.LAYOUT == "packed":
        place += tl.cast(start.key, tl.int64) * stride3
    return place, stride2, stride3


@triton.jit
def flat_place(place, stride2, m0, n0, M: tl.constexpr, N: tl.constexpr, sizes, c):
    """Return pointers to the elements of a tile [M, N] as one dimension, and which of them exist.

    Rows are not aligned, so each element is a separate load. Triton: in two dimensions a thread gets 8 neighbours, as
    for q, k and v of the same shape, and a warp's load reads 8 elements in each of 4 rows. In one dimension a warp
    reads 32 neighbours of a row, from one or two cache lines.
    """
    i = tl.arange(0, M * N)
    row, col = i // 32 % 4 + i // (4 * N) * 4, i % 32 + i // 128 % (N // 32) * 32
    at = place + tl.cast(m0, tl.int64) * stride2 + n0
    r = row.to(tl.int64) if c.WIDE else row
    return at + r * stride2 + col, (m0 + row < sizes.queries) & (n0 + col < sizes.keys)


@triton.jit
def matrix_of(how, b, h, batch):
    """Return the batch and head index of the bias or mask matrix that (b, h) uses; b: of ``batch``."""
    mb = b if how.BATCH else b * 0
    if how.BATCH > 1:
        mb = b // (batch // how.BATCH) if how.RUNS else b % how.BATCH
    return mb, h // how.GROUP


@triton.jit
def load_operand(x, how, start, at, n0, cols, TAIL: tl.constexpr, sizes, c):
    """Load a tile of a bias or mask, which broadcasts to the scores' tile; 0 outside the tensor.

    start: `Starts` of a packed batch. at: `QueryRows`. cols: from 0, [1, BLOCK_N], transposed [BLOCK_N, 1]. TAIL: the
    tile may reach past the tensor. Heads of a tile that share a matrix read it once.
    """
    m0, rows = at.m0, at.rows
    head = at.first_head if how.GROUP > 1 else at.head
    if how.TMA:
        mb, mh = matrix_of(how, at.b, head, sizes.batch)
        BM: tl.constexpr = rows.numel
        BN: tl.constexpr = cols.numel
        tile = x.load([mb, mh, m0, n0]).reshape([BM, BN])
        if rows.shape[0] == 1:
            tile = tl.trans(tile)
    else:
        at, stride2, stride3 = operand_place(x, how, start, at.b, head, sizes)
        r, n = rows, cols
        if how.FLAT:
            at, inside = flat_place(at, stride2, m0, n0, rows.numel, cols.numel, sizes, c)
        elif c.WIDE:
            r, n = r.to(tl.int64), n.to(tl.int64)
        if how.FLAT:
            pass
        elif how.ROWS and how.COLS:
            at = at + tl.cast(m0, tl.int64) * stride2 + tl.cast(n0, tl.int64) * stride3
            at = at + r * stride2 + n * stride3
            inside = (m0 + rows < sizes.queries) & (n0 + cols < sizes.keys)
        elif how.ROWS:
            at = at + tl.cast(m0, tl.int64) * stride2 + r * stride2
            inside = m0 + rows < sizes.queries
        elif how.COLS:
            at = at + tl.cast(n0, tl.int64) * stride3 + n * stride3
            inside = n0 + cols < sizes.keys
        else:
            at = at + rows * 0
            inside = rows >= 0
        if TAIL:  # noqa: SIM108  (a compile-time condition)
            tile = tl.load(at, mask=inside, other=0)
        else:
            tile = tl.load(at)
        if how.FLAT:
            tile = tile.reshape([rows.numel // 4, cols.numel // 32, 4, 32])
            tile = tile.permute(0, 2, 1, 3).reshape([rows.numel, cols.numel])
            if rows.shape[0] == 1:
                tile = tl.trans(tile)
    return tile


@triton.jit
def dot(a, b, acc, c):
    """Return acc + A B (``acc`` may be None); operands kept in registers would spill thousands of bytes."""
    return product(a, b, acc, c.PRECISION, False)


@triton.jit
def prefetch_bias(x, how, start, b, h, m0, n0, sizes, c):
    """Prefetch a tile of a bias into the L2, two elements per row; indices are clamped to the tensor."""
    place, stride2, stride3 = operand_place(x, how, start, b, h, sizes)
    i = tl.arange(0, 2 * c.BLOCK_M)
    m = tl.minimum(m0 + i // 2, sizes.queries - 1)
    n = tl.minimum(n0 + i % 2 * (c.BLOCK_N // 2), sizes.keys - 1)
    at = place + m.to(tl.int64) * stride2 + n.to(tl.int64) * stride3
    asm: tl.constexpr = "prefetch.global.L2 [$1]; mov.u32 $0, 0;"  # Triton requires a result; it is not used
    tl.inline_asm_elementwise(asm, "=r,l", [at.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1)
