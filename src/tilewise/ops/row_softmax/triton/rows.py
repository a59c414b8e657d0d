"""Rows of a tensor of any strides, and the statistics of a row that several programs share.

A row runs along the softmax's axis. The tuple ``sizes`` has the other axes, merged as far as the strides allow; a tile
is ROWS neighbours along the last of them, at one index of the others.

A tensor is passed as a tuple: pointer, stride along a row, and a stride per axis in ``sizes``, 0 along broadcast axes.
Triton 3.6: a nested tuple loses a stride of 1, so the tuple is flat.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class SoftmaxConstants(NamedTuple):
    """Compile-time constants of a kernel; every field is a tl.constexpr."""

    AXES: Any  # length of ``sizes``
    ROWS: Any  # rows of a tile
    BLOCK: Any  # columns of a tile
    PARTS: Any  # programs that share a row, a power of two
    BIAS: Any
    MASK: Any
    WIDE: Any  # an offset along a row needs 64 bits
    PACK: Any  # 16-bit elements stay 16 bits wide while their row's statistics are computed, see `again`
    # fields of a backward
    DX: Any = None
    DBIAS: Any = None  # every element of the bias belongs to one score: its gradient is dS
    DELTA: Any = None  # the row statistic is stored, for the gradient of a bias that broadcasts


@triton.jit
def place(block, sizes, c):
    """Return (outer, rows [ROWS]) of tile ``block``; outer is the index over all axes but the last, as one number."""
    tiles = tl.cdiv(sizes[c.AXES - 1], c.ROWS)
    return block // tiles, block % tiles * c.ROWS + tl.arange(0, c.ROWS)


@triton.jit
def row_start(x, outer, rows, sizes, c):
    """Return the addresses [ROWS] of the first elements of rows."""
    at = x[0] + rows.to(tl.int64) * x[c.AXES + 1]
    for n in tl.static_range(1, c.AXES):
        at += (outer % sizes[c.AXES - 1 - n]).to(tl.int64) * x[c.AXES + 1 - n]
        outer = outer // sizes[c.AXES - 1 - n]
    return at


@triton.jit
def elements(x, start, cols, c):
    """Return the addresses [ROWS, columns] of ``cols`` of the rows that begin at ``start``."""
    if c.WIDE:
        cols = cols.to(tl.int64)
    return start[:, None] + cols[None, :] * x[1]


@triton.jit
def row_numbers(outer, rows, sizes, c):
    """Return the numbers of the rows, which index their statistics."""
    return outer.to(tl.int64) * sizes[c.AXES - 1] + rows


@triton.jit
def again(tile, c):
    """Return ``tile`` so that the compiler does not recognize it. Otherwise it keeps the float32 conversion, in twice
    the registers, until the row's statistics are known."""
    if c.PACK:
        tile = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [tile], dtype=tile.dtype, is_pure=False, pack=2)
    return tile


@triton.jit
def _word(a, b):
    """Return two float32 in one int64, for a single read or write."""
    high = a.to(tl.int32, bitcast=True).to(tl.int64) << 32
    return high | (b.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def publish(slots, numbers, valid, part, a, b, WAITED: tl.constexpr, c):
    """Store two statistics of this program's part of each row; they must not both be 0."""
    at = slots + numbers * c.PARTS + part
    if WAITED:
        tl.atomic_xchg(at, _word(a, b), mask=valid, sem="relaxed")
    else:
        tl.store(at, _word(a, b), mask=valid)


@triton.jit
def gather(slots, numbers, valid, WAITED: tl.constexpr, c):
    """Return the statistics of all parts, each [ROWS, PARTS]. WAITED: wait for concurrent programs until none is 0."""
    at = slots + numbers[:, None] * c.PARTS + tl.arange(0, c.PARTS)[None, :]
    words = tl.load(at, mask=valid[:, None], other=1, volatile=WAITED)
    if WAITED:
        while tl.max((words == 0).to(tl.int32)) > 0:
            words = tl.load(at, mask=valid[:, None], other=1, volatile=True)
    a = (words >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    return a, words.to(tl.int32).to(tl.float32, bitcast=True)
