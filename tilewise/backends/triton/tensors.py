"""How a kernel reads and writes tensors: by TMA descriptor where the tensor allows it, by pointers elsewhere.

A tensor arrives in a kernel as one argument, a `Strided` or a tensor descriptor, with a switch that says which.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor


class Strided(NamedTuple):
    """A four-dimensional tensor for pointer arithmetic, in elements; a broadcast axis has stride 0."""

    pointer: Any
    stride0: int
    stride1: int
    stride2: int
    stride3: int


class Broadcast(NamedTuple):
    """How a bias or mask spreads: which row and column axes are full, how batch and head are found."""

    BATCH: tl.constexpr  # one matrix a batch element, or one for all
    GROUP: tl.constexpr  # query heads that share a matrix
    ROWS: tl.constexpr
    COLS: tl.constexpr
    TMA: tl.constexpr


def strided(x: Tensor) -> Strided:
    return Strided(x, *(0 if n == 1 else s for n, s in zip(x.shape, x.stride(), strict=True)))


def broadcast(x: Tensor, heads: int, tma: bool) -> Broadcast:
    b, h, m, n = x.shape
    c = tl.constexpr
    return Broadcast(c(b > 1), c(heads // h), c(m > 1), c(n > 1), c(tma))


def fits_tma(x: Tensor) -> bool:
    """What a TMA descriptor can hold: contiguous rows, every other stride a positive multiple of 16 bytes."""
    size = x.element_size()
    strides = [s for n, s in zip(x.shape[:-1], x.stride()[:-1], strict=True) if n > 1]
    return (
        x.data_ptr() % 16 == 0
        and x.stride(-1) == 1
        and x.dtype is not torch.float64
        and all(s > 0 and s * size % 16 == 0 for s in strides)
        and max(x.shape) < 2**31
    )


def descriptor(x: Tensor, rows: int, cols: int) -> TensorDescriptor:
    """Boxes of (rows, cols) of the last two axes; the hardware reads 0 outside the tensor and writes nothing there."""
    row = (x.shape[3] * x.element_size() + 15) // 16 * 16 // x.element_size()
    strides = [row if n == 1 else s for n, s in zip(x.shape, x.stride(), strict=True)]
    return TensorDescriptor(x, list(x.shape), [*strides[:3], 1], [1, 1, rows, cols])


def wide(*tensors: Tensor | None) -> bool:
    """Whether an offset inside one tile can pass 2³¹ elements, so that it needs 64 bits."""
    return any(256 * max(x.stride()) >= 2**31 for x in tensors if x is not None and x.numel())


@triton.jit
def load_rows(x, b, h, row0, rows, row_end, cols, col_end, TMA: tl.constexpr, TAIL: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr):  # fmt: skip
    """The tile of q, k, v or do that starts at ``row0``: [len(rows), len(cols)], 0 outside the tensor.

    ``rows`` and ``cols`` count from 0. TAIL: rows may pass ``row_end``. EVEN: cols cannot pass ``col_end``.
    """
    if TMA:
        tile = x.load([b, h, row0, 0]).reshape([rows.shape[0], cols.shape[0]])
    else:
        start = x.pointer + tl.cast(b, tl.int64) * x.stride0 + tl.cast(h, tl.int64) * x.stride1 + tl.cast(row0, tl.int64) * x.stride2
        r, c = rows[:, None], cols[None, :]
        if WIDE:
            r, c = r.to(tl.int64), c.to(tl.int64)
        at = start + r * x.stride2 + c * x.stride3
        if TAIL and not EVEN:
            tile = tl.load(at, mask=(row0 + rows < row_end)[:, None] & (cols < col_end)[None, :], other=0.0)
        elif TAIL:
            tile = tl.load(at, mask=(row0 + rows < row_end)[:, None], other=0.0)
        elif EVEN:
            tile = tl.load(at)
        else:
            tile = tl.load(at, mask=(cols < col_end)[None, :], other=0.0)
    return tile


@triton.jit
def matrix_of(how, b, h):
    """Batch and head index of the bias or mask matrix that (b, h) uses."""
    mb = b if how.BATCH else b * 0
    return mb, h // how.GROUP


@triton.jit
def load_scores(x, how, b, h, m0, n0, rows, cols, M, N, TAIL: tl.constexpr, WIDE: tl.constexpr):
    """The tile of a bias or mask at (m0, n0), of a shape that broadcasts to [rows, cols]; 0 outside the tensor.

    ``rows`` and ``cols`` count from 0 and are two-dimensional, [BM, 1] and [1, BN] or, for a transposed tile, [1, BM]
    and [BN, 1].
    """
    mb, mh = matrix_of(how, b, h)
    if how.TMA:
        BM: tl.constexpr = rows.numel
        BN: tl.constexpr = cols.numel
        tile = x.load([mb, mh, m0, n0]).reshape([BM, BN])
        if rows.shape[0] == 1:
            tile = tl.trans(tile)
    else:
        at = x.pointer + tl.cast(mb, tl.int64) * x.stride0 + tl.cast(mh, tl.int64) * x.stride1
        inside = (rows >= 0) & (cols >= 0)
        r, c = rows, cols
        if WIDE:
            r, c = r.to(tl.int64), c.to(tl.int64)
        if how.ROWS and how.COLS:
            at = at + tl.cast(m0, tl.int64) * x.stride2 + tl.cast(n0, tl.int64) * x.stride3 + r * x.stride2 + c * x.stride3
            inside = (m0 + rows < M) & (n0 + cols < N)
        elif how.ROWS:
            at = at + tl.cast(m0, tl.int64) * x.stride2 + r * x.stride2
            inside = m0 + rows < M
        elif how.COLS:
            at = at + tl.cast(n0, tl.int64) * x.stride3 + c * x.stride3
            inside = n0 + cols < N
        else:
            at = at + rows * 0
            inside = rows >= 0
        if TAIL:
            tile = tl.load(at, mask=inside, other=0)
        else:
            tile = tl.load(at)
    return tile


@triton.jit
def program_tile(tiles, heads, batch, ORDER: tl.constexpr):
    """(tile, head, batch) of this program. What varies fastest decides which programs run together and share the L2:
    the tiles of one head (its keys and values), or the batch elements that read one bias tile."""
    pid = tl.program_id(0)
    if ORDER == "tiles":
        tile = pid % tiles
        pid = pid // tiles
        return tile, pid % heads, pid // heads
    elif ORDER == "batch":
        b = pid % batch
        pid = pid // batch
        return pid % tiles, pid // tiles, b
    else:  # heads
        h = pid % heads
        pid = pid // heads
        return pid % tiles, h, pid // tiles
