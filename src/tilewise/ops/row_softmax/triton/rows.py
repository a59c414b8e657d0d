"""Rows of a tensor of any strides, and the statistics of a row that several programs share.

A row lies along the softmax's axis. The other axes, as few of them as the strides allow, are the tuple ``sizes``; a
tile is ROWS neighbours along the last of them, of one index of all others.

A tensor arrives as a tuple: the pointer, the stride along a row, and that of each axis in ``sizes``, 0 along an axis
that the tensor broadcasts. It is flat because Triton 3.6 loses a stride of 1 in a tuple inside a tuple.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class SoftmaxConstants(NamedTuple):
    """What a kernel knows when it is compiled; every field is a tl.constexpr."""

    AXES: Any  # of ``sizes``
    ROWS: Any  # of a tile
    BLOCK: Any  # columns of a tile
    PARTS: Any  # programs that share a row, a power of two
    BIAS: Any
    MASK: Any
    WIDE: Any  # an offset along a row needs 64 bits
    PACK: Any  # 16-bit numbers stay so while their row's statistics are computed, see `again`
    # of a backward
    DX: Any = None
    DBIAS: Any = None  # every element of the bias belongs to one score: its gradient is dS
    DELTA: Any = None  # the row statistic is kept, for the gradient of a bias that broadcasts


@triton.jit
def place(block, sizes, c):
    """(outer, rows): the index of the axes but the last, in one number, and the rows [ROWS] of tile ``block``."""
    tiles = tl.cdiv(sizes[c.AXES - 1], c.ROWS)
    return block // tiles, block % tiles * c.ROWS + tl.arange(0, c.ROWS)


@triton.jit
def row_start(x, outer, rows, sizes, c):
    """Addresses [ROWS] of the first elements of rows."""
    at = x[0] + rows.to(tl.int64) * x[c.AXES + 1]
    for n in tl.static_range(1, c.AXES):
        at += (outer % sizes[c.AXES - 1 - n]).to(tl.int64) * x[c.AXES + 1 - n]
        outer = outer // sizes[c.AXES - 1 - n]
    return at


@triton.jit
def elements(x, start, cols, c):
    """Addresses [ROWS, columns] of ``cols`` of the rows that begin at ``start``."""
    if c.WIDE:
        cols = cols.to(tl.int64)
    return start[:, None] + cols[None, :] * x[1]


@triton.jit
def row_numbers(outer, rows, sizes, c):
    """The rows counted through: where a row's statistics are."""
    return outer.to(tl.int64) * sizes[c.AXES - 1] + rows


@triton.jit
def again(tile, c):
    """The same tile; the compiler does not know. Else it would keep what it has converted to float32 before, in twice
    the registers, for as long as the row's statistics take."""
    if c.PACK:
        tile = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [tile], dtype=tile.dtype, is_pure=False, pack=2)
    return tile


@triton.jit
def _word(a, b):
    """Two float32 in one int64, which is read and written as one."""
    high = a.to(tl.int32, bitcast=True).to(tl.int64) << 32
    return high | (b.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def publish(slots, numbers, valid, part, a, b, WAITED: tl.constexpr, c):
    """Two statistics of each row's share that this program has seen; both are never 0 at once."""
    at = slots + numbers * c.PARTS + part
    if WAITED:
        tl.atomic_xchg(at, _word(a, b), mask=valid, sem="relaxed")
    else:
        tl.store(at, _word(a, b), mask=valid)


@triton.jit
def gather(slots, numbers, valid, WAITED: tl.constexpr, c):
    """The statistics of all shares, each [ROWS, PARTS]. WAITED: of programs that run at the same time, with zeros
    where they have not come so far."""
    at = slots + numbers[:, None] * c.PARTS + tl.arange(0, c.PARTS)[None, :]
    words = tl.load(at, mask=valid[:, None], other=1, volatile=WAITED)
    if WAITED:
        while tl.max((words == 0).to(tl.int32)) > 0:
            words = tl.load(at, mask=valid[:, None], other=1, volatile=True)
    a = (words >> 32).to(tl.int32).to(tl.float32, bitcast=True)
    return a, words.to(tl.int32).to(tl.float32, bitcast=True)
