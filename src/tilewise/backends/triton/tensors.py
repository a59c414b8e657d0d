"""How a kernel reads and writes tensors: by TMA descriptor where the tensor allows it, by pointers elsewhere.

A tensor arrives in a kernel as one argument, a `Strided` or a tensor descriptor, with a switch that says which.
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
    """How a bias or mask spreads over batch, heads, rows and columns; every field is a tl.constexpr."""

    BATCH: Any  # a matrix for each batch element, or one for all
    GROUP: Any  # query heads that share a matrix
    ROWS: Any  # full along the queries, or one row for all
    COLS: Any
    TMA: Any
    LAYOUT: Any = "padded"  # in a packed batch: or "packed", along its axis, or "pairs", a matrix a sequence
    FLAT: Any = False  # neighbours in a row are neighbours in a warp, see `flat_place`


class Starts(NamedTuple):
    """Where a sequence of a packed batch begins, see `packed`."""

    query: Any  # its first row of q and o, and of what lies as they do
    key: Any
    pair: Any  # of a ragged bias, its first element
    padded: Any  # its first row of the backward's row statistics
    diagonal: Any  # keys - queries
    skew: Any  # of a Toeplitz bias, the entry of its least distance
    rows: Any = 0  # its queries, also those past the longest sequence's as the caller gave it


class Reads(NamedTuple):
    """What the tile bodies read: built inside a kernel, because descriptors can only be arguments of their own."""

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


class QueryRows(NamedTuple):
    """The queries of a tile, built inside a kernel. With PACK_GQA a tile holds the query heads of one key/value head.

    rows: [BLOCK_M, 1], or [1, BLOCK_M] for a transposed tile.
    """

    b: Any
    kv_head: Any
    head: Any  # query head, or with PACK_GQA one for each row, [BLOCK_M, 1]
    first_head: Any  # of the tile
    m0: Any  # query of row r: m0 + rows[r]
    rows: Any


class ProblemSizes(NamedTuple):
    batch: int
    heads: int
    group: int
    queries: int
    keys: int
    head_dim: int
    value_dim: int
    padded_queries: int  # queries, rounded up to whole tiles: the length of the backward's row statistics
    splits: int = 1  # programs that share the keys of one tile of queries
    # Of a packed batch all of them; queries and keys are the longest sequence's, or of a program its own one's.
    total_queries: int | None = None
    total_keys: int | None = None
    pairs: int | None = None  # of a ragged bias, those of all matrices


def broadcast(x: TensorSpec, group: BroadcastGroup, tma: bool, layout: str = "padded") -> Broadcast:
    return Broadcast(x.batch > 1, group.heads, x.rows > 1, x.cols > 1, tma, layout)


def descriptor(x: Tensor, rows: int, cols: int) -> TensorDescriptor:
    """The layout of a tensor that is read by TMA, in boxes of (rows, cols) of its last two axes; the hardware reads 0
    outside the tensor and writes nothing there."""
    strides = row_strides(x.shape, x.stride(), x.element_size())
    return boxed(TensorDescriptor, x, strides, (1, 1, rows, cols))


def wide(*tensors: Tensor | None) -> bool:
    """Whether an offset inside one tile can pass 2³¹ elements, so that it needs 64 bits."""
    return any(256 * max(x.stride()) >= 2**31 for x in tensors if x is not None and x.numel())


def comes_by_elements(problem: Problem, bias: Tensor | None) -> bool:
    """Whether a bias's tiles come by loads of two bytes, in no pipeline, for its rows begin anywhere.

    On Hopper, where it was measured; elsewhere tiles of any bias come by pointers.
    """
    hopper = problem.capability is not None and problem.capability[0] == 9
    return hopper and problem.bias_itemsize == 2 and begins_anywhere(problem, bias)


def begins_anywhere(problem: Problem, bias: Tensor | None) -> bool:
    """Whether a bias has rows of neighbours in memory that need not begin at multiples of 16 bytes."""
    if bias is None:
        return False
    packed = problem.score.packed
    if packed is not None and "ragged" in packed.forms:
        return True
    return bias.stride(3) == 1 and not tensor_fits_tma(bias, bias.data_ptr() % 16 == 0)


@triton.jit
def program_tile(tiles, heads, batch, ORDER: tl.constexpr):
    """(tile, head, batch) of this program: what varies fastest decides which run together, `Problem.raster_order`."""
    pid = tl.program_id(0)
    if ORDER == "tiles":
        tile = pid % tiles
        pid = pid // tiles
        return tile, pid % heads, pid // heads
    elif ORDER == "longest":
        # Programs differ in length: the longest of eight heads first, then the next, so that the last to run are short.
        # Eight heads' keys and values still fit the L2.
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
def head_at(b, h, sizes, c):
    """The place of a query head among those of all batch elements; sequences of a packed batch have the same heads."""
    return tl.cast(b * 0 if c.PACKED else b, tl.int64) * sizes.heads + h


@triton.jit
def lse_length(sizes, c):
    """Numbers of the LSE that each head has."""
    return sizes.total_queries if c.PACKED else sizes.queries


@triton.jit
def row_at(head, m, length):
    """The place of query ``m`` of a head, see `head_at`, in numbers of which each head has ``length``: the LSE, or,
    with `ProblemSizes.padded_queries`, the backward's row statistics."""
    return head * length + m


@triton.jit
def dq_accum_at(dq_accum, head, m, sizes, c):
    """Where queries ``m`` of a head are in the sum of dQᵀ, (B, H, D, padded queries), and which dimensions there are:
    [BLOCK_D, M] and [BLOCK_D, 1]."""
    d = tl.arange(0, c.BLOCK_D)
    at = dq_accum + (head * sizes.head_dim + d)[:, None] * sizes.padded_queries + m[None, :]
    return at, (d < sizes.head_dim)[:, None]


@triton.jit
def load_rows(x, b, h, row0, BLOCK: tl.constexpr, row_end, DIM: tl.constexpr, TMA: tl.constexpr, TAIL: tl.constexpr,
              sizes, c):  # fmt: skip
    """The tile [BLOCK, padded dim] of q, k, v, o or do that starts at ``row0``; 0 outside the tensor.

    DIM: "head" or "value", which of the two dimensions the columns are. TAIL: rows may pass ``row_end``, a number or
    one for each row.
    """
    COLS: tl.constexpr = c.BLOCK_D if DIM == "head" else c.BLOCK_DV
    EVEN: tl.constexpr = c.EVEN_D if DIM == "head" else c.EVEN_DV
    if TMA:
        tile = x.load([b, h, row0, 0]).reshape([BLOCK, COLS])
    else:
        rows, cols = tl.arange(0, BLOCK), tl.arange(0, COLS)
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
def load_group_rows(x, at, row_end, sizes, c):
    """The tile [BLOCK_M, padded head dim] of q, each row of its own head; 0 outside the tensor."""
    cols = tl.arange(0, c.BLOCK_D)[None, :]
    row = x.pointer + tl.cast(at.b, tl.int64) * x.stride0 + tl.cast(at.head, tl.int64) * x.stride1
    row += tl.cast(at.m0 + at.rows, tl.int64) * x.stride2
    inside = (at.m0 + at.rows < row_end) & (cols < sizes.head_dim)
    return tl.load(row + cols.to(tl.int64) * x.stride3, mask=inside, other=0.0)


@triton.jit
def store_rows(x, value, b, h, rows, row_end, col_end, COLS: tl.constexpr):
    """Store [rows, COLS] into a `Strided`, in its dtype; what lies past the ends is dropped. h: as `QueryRows.head`."""
    cols = tl.arange(0, COLS)
    at = x.pointer + tl.cast(b, tl.int64) * x.stride0 + tl.cast(h, tl.int64) * x.stride1
    at = at + rows.to(tl.int64)[:, None] * x.stride2 + cols.to(tl.int64)[None, :] * x.stride3
    inside = (rows < row_end)[:, None] & (cols < col_end)[None, :]
    tl.store(at, value.to(x.pointer.dtype.element_ty), mask=inside)


@triton.jit
def load_sink(x, b, h, m, sizes):
    """The sink of queries ``m``, in float32. x: `Strided`, whose last axis is of size 1; h: as `QueryRows.head`, or of
    each query."""
    at = x.pointer + tl.cast(b, tl.int64) * x.stride0 + tl.cast(h, tl.int64) * x.stride1
    return tl.load(at + m.to(tl.int64) * x.stride2, mask=m < sizes.queries, other=0.0).to(tl.float32)


@triton.jit
def operand_place(x, how, start, b, h, sizes):
    """Where the matrix that (b, h) uses of a bias or mask begins, and its strides along queries and keys."""
    mb, mh = matrix_of(how, b, h)
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
    """Where the numbers of a tile [M, N] are, row after row in one dimension, and which there are.

    Rows begin anywhere, so that each number is a load of its own. Of a tile in two dimensions Triton gives a thread 8
    neighbours, as it does of q, k and v of the same shape: a warp's load is then of 4 rows, 8 places of each. In one
    dimension a warp takes 32 neighbours of a row, which are in one line of the cache or two.
    """
    i = tl.arange(0, M * N)
    row, col = i // 32 % 4 + i // (4 * N) * 4, i % 32 + i // 128 % (N // 32) * 32
    at = place + tl.cast(m0, tl.int64) * stride2 + n0
    r = row.to(tl.int64) if c.WIDE else row
    return at + r * stride2 + col, (m0 + row < sizes.queries) & (n0 + col < sizes.keys)


@triton.jit
def matrix_of(how, b, h):
    """Batch and head index of the bias or mask matrix that (b, h) uses."""
    mb = b if how.BATCH else b * 0
    return mb, h // how.GROUP


@triton.jit
def load_operand(x, how, start, at, n0, cols, TAIL: tl.constexpr, sizes, c):
    """The tile of a bias or mask, of a shape that broadcasts to that of the scores; 0 outside the tensor.

    start: `Starts` of a packed batch. at: `QueryRows`. cols count from 0, [1, BLOCK_N] or, for a transposed tile,
    [BLOCK_N, 1]. TAIL: the tile may reach past the tensor. Heads of a tile that share a matrix read it once.
    """
    m0, rows = at.m0, at.rows
    head = at.first_head if how.GROUP > 1 else at.head
    if how.TMA:
        mb, mh = matrix_of(how, at.b, head)
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
        if TAIL:  # noqa: SIM108  (one branch is compiled, not both)
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
    """acc + A B; ``acc`` may be None. Nothing rounded is kept: a program meets some of its tiles in every step, and
    their copies in registers cost thousands of bytes of spills."""
    return product(a, b, acc, c.PRECISION, False)


@triton.jit
def prefetch_bias(x, how, start, b, h, m0, n0, sizes, c):
    """Asks for a tile of a bias, to be in the L2 when it is read; what lies outside is the last row or column again.

    One element for each 128 bytes of a row of 64 numbers of two bytes, or for each half of a longer one.
    """
    place, stride2, stride3 = operand_place(x, how, start, b, h, sizes)
    i = tl.arange(0, 2 * c.BLOCK_M)
    m = tl.minimum(m0 + i // 2, sizes.queries - 1)
    n = tl.minimum(n0 + i % 2 * (c.BLOCK_N // 2), sizes.keys - 1)
    at = place + m.to(tl.int64) * stride2 + n.to(tl.int64) * stride3
    asm: tl.constexpr = "prefetch.global.L2 [$1]; mov.u32 $0, 0;"  # a result that nobody reads: Triton wants one
    tl.inline_asm_elementwise(asm, "=r,l", [at.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1)
