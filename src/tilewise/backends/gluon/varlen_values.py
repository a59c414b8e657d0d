"""Values per query by relative position of a packed batch: a copy that TMA reads, and the gradient copied back.

Distances count from each sequence's last query and key, so that the tile of keys ``col0 ..`` begins in the `skewed`
view at ``col0 + first query - (keys - queries) - lo``. For most sequences that is no multiple of 16 bytes, as TMA
requires: the values are copied, with the missing columns, 7 at most, before a sequence's rows. `FRONT` elements precede
the first row, because TMA supports no negative columns.

Boxes of the view end where the sequence does, as those of `tensors.ragged`. The gradient is accumulated through this
view, in a copy of this layout: tiles that do not store it are zeroed first, and at the end it is copied back.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewise.backends import address
from tilewise.backends.gluon.values import WIDEST, Skewed, step_of
from tilewise.backends.gluon.varlen import listed_tile
from tilewise.backends.launch.launcher import POINTER, Launch, strided
from tilewise.spec.problem import Problem

FRONT = tl.constexpr(WIDEST)  # elements before the first row
STEP = tl.constexpr(8)  # elements of 16 bytes (16-bit dtypes), or of 32
PART = 32  # queries per program that copies values: one warp, which computes the row arithmetic once for its words


@triton.jit
def first_column(seq, lo):
    """Return the column of the view where a sequence's keys begin, a multiple of STEP; ``lo``: least distance with
    entry."""
    return FRONT + ((seq.first_query - seq.diagonal - lo + (STEP - 1)) & -STEP)


@triton.jit
def first_entry_of(seq, lo):
    """Return the columns before the first entry of a sequence's rows."""
    return first_column(seq, lo) - FRONT - (seq.first_query - seq.diagonal - lo)


@triton.jit
def move_pairs(at, to, shift, rows, seq, end, lo, entries, stride, row, BACK: tl.constexpr, COLS: tl.constexpr):
    """Copy some rows of 16-bit values to the copy, or BACK, in words of two.

    at, to: entry 0 of the sequence's query 0 in values and copy. shift: offset of ``to`` in its word, in elements. A
    row of values begins with a word; in the copy every other row does not, and a word of it spans two words. Rows have
    unused columns on both sides, so that a word may reach into them.
    """
    WORD: tl.constexpr = tl.pointer_type(tl.uint32)
    place = rows.to(tl.int64)
    odd = (shift + rows) & 1  # `row` is odd
    first = -(rows + seq.diagonal + lo)  # the first entry that has a key
    last = tl.where(rows < end, tl.minimum(first + seq.keys, entries), 0)
    if not BACK:  # the first entry of an odd row is stored alone; words of such rows are counted from the next
        single = (odd == 1) & (first <= 0) & (last > 0)
        tl.store(to + place * row, tl.load(at + place * stride, mask=single), mask=single)
    values = (at + place * stride).to(WORD)[:, None]
    laid = (to + place * row - odd).to(WORD)[:, None]
    odd, first, last, inside = odd[:, None], first[:, None], last[:, None], (rows < end)[:, None]
    # whole words, from 0 to `count` - 1; the difference between the words of a thread is a constant
    word, count = tl.arange(0, COLS)[None, :], entries // 2
    for _ in tl.range(0, count, COLS, num_stages=1):
        if BACK:
            found = _two_of(laid + (word + odd), odd, (word >= first >> 1) & (word < (last + 1) >> 1))
            low = tl.where((word >= (first + 1) >> 1) & (word < (last + 1) >> 1), 0xFFFF, 0)
            high = tl.where((word >= first >> 1) & (word < last >> 1), 0xFFFF, 0)
            found &= low.to(tl.uint32) | (high.to(tl.uint32) << 16)
            tl.store(values + (word + odd) - odd, found, mask=inside & (word < count))
        else:
            there = (word >= (first - odd) >> 1) & (word < (last - odd + 1) >> 1)  # no tile reads the rest, or masks it
            found = _two_of(values + (word + odd), odd, there & (word < count - odd), there)
            tl.store(laid + (word + odd), found, mask=there)
        values, laid, first, last, count = values + COLS, laid + COLS, first - 2 * COLS, last - 2 * COLS, count - COLS


@triton.jit
def _two_of(at, odd, mask, first_mask=None):
    """Return the word at ``at``; where ``odd`` is 1, the upper half of the word before and the lower half of this one.

    Triton: this form of the address keeps it from vectorizing beyond a word; with four neighbours per thread the mask
    would allow no vector load, and 32 threads would touch four cache lines.
    """
    word = tl.load(at - odd, mask=mask if first_mask is None else first_mask, other=0).to(tl.uint64)
    following = tl.load(at, mask=mask, other=0).to(tl.uint64)
    return ((word | (following << 32)) >> (16 * odd).to(tl.uint64)).to(tl.uint32)


@triton.jit
def move_kernel(values, laid, tile_list, tiles, lo, entries, row, head, REVERSE: tl.constexpr, BACK: tl.constexpr,
                PAIRS: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr, ROWS: tl.constexpr,
                COLS: tl.constexpr):  # fmt: skip
    """Copy the values of PART queries of one listed tile to the copy, or BACK; only entries that have a key.

    values: `Strided`. row, head: strides of the copy. tiles: upper bound of the listed tiles. PAIRS: use `move_pairs`.
    """
    PARTS: tl.constexpr = BLOCK // PART
    n, h = tl.program_id(0) // PARTS % tiles, tl.program_id(0) // PARTS // tiles
    if n < tl.load(tile_list):
        seq, tile = listed_tile(tile_list, n)
        begin = tile * BLOCK + tl.program_id(0) % PARTS * PART
        end = tl.minimum(begin + PART, seq.queries)
        at = values.pointer + tl.cast(h, tl.int64) * values.stride1
        at += tl.cast(seq.first_query, tl.int64) * values.stride2
        shift = first_entry_of(seq, lo)
        to = laid + tl.cast(h, tl.int64) * head + FRONT + shift + tl.cast(seq.first_query, tl.int64) * row
        for row0 in tl.range(begin, end, ROWS, num_stages=1):
            rows = row0 + tl.arange(0, ROWS)
            if PAIRS:
                move_pairs(at, to, shift + seq.first_query, rows, seq, end, lo, entries, values.stride2, row, BACK,
                           COLS // 2)  # fmt: skip
            else:
                place = rows.to(tl.int64)[:, None]
                for col0 in tl.range(0, entries, COLS, num_stages=1):
                    cols = col0 + tl.arange(0, COLS)
                    inside = (rows < end)[:, None] & (cols < entries)[None, :]
                    key = (rows + seq.diagonal + lo)[:, None] + cols[None, :]
                    there = inside & (key >= 0) & (key < seq.keys)  # no tile reads the rest, or masks its scores
                    entry = cols
                    if REVERSE:
                        entry = entries - 1 - cols
                    at_values = at + place * values.stride2 + entry.to(tl.int64)[None, :] * values.stride3
                    at_laid = to + place * row + cols[None, :]
                    if BACK:
                        tl.store(at_values, tl.load(at_laid, mask=there, other=0.0), mask=inside)
                    else:
                        tl.store(at_laid, tl.load(at_values, mask=there), mask=there)


@triton.jit
def zero_tile(at, origin, stride, m0, queries, keys, diagonal, entries, lo, inner_lo, inner_hi, STEP: tl.constexpr,
              BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):  # fmt: skip
    """Zero the gradient entries that `backward.relative.let_out` adds to or never writes, in the rows of a query tile.

    m0: the tile's first row. origin: offset from ``at`` of query 0's entry 0, int64. lo, inner_lo, inner_hi: see
    `GluonScoreArgs`.

    In the skewed view the stored key tiles form a rectangle. So in memory the rest between the tiles of one row and the
    next is one run, of equal length for all rows, from one multiple of STEP (16 bytes) to another, and is zeroed as
    such. The first run begins with the tile's rows, or up to STEP - 1 unused columns before them; the last ends with
    them.
    """
    # stored key tiles, as keys `first` .. `last` - 1
    position = m0 + diagonal
    first = tl.cdiv(tl.maximum(position + BLOCK_M - 1 + inner_lo, 0), BLOCK_N) * BLOCK_N
    last = tl.minimum(tl.maximum(position + inner_hi + 1, 0) // BLOCK_N, tl.cdiv(keys, BLOCK_N)) * BLOCK_N
    n = tl.minimum(queries - m0, BLOCK_M)
    m0, rows_below = tl.cast(m0, tl.int64), tl.cast(n - 1, tl.int64)
    begin = (origin + m0 * stride) & -STEP
    end = origin + (m0 + rows_below) * stride + entries
    stored = origin + m0 * (stride - 1) + first - lo - diagonal  # of the first row
    if last <= first:
        stored, last = begin, first
    length = last - first
    rest = stride - 1 - length
    width = tl.maximum(rest, tl.maximum(stored - begin, end - (stored + length + rows_below * (stride - 1))))
    for row0 in tl.range(0, n + 1, ROWS, num_stages=1):
        rows = row0 + tl.arange(0, ROWS)
        run = stored + rows.to(tl.int64) * (stride - 1)  # ends where the row's stored tiles begin
        ends = tl.where(rows < n, run, end // STEP * STEP)
        run = tl.multiple_of(tl.where(rows == 0, begin, run - rest), STEP)
        count = tl.where(rows <= n, ends - run, 0)
        for col0 in tl.range(0, tl.cast(width, tl.int32), COLS, num_stages=1):
            cols = col0 + tl.arange(0, COLS)
            inside = (cols // STEP * STEP)[None, :] < count[:, None]
            tl.store(at + run[:, None] + cols[None, :], tl.zeros([ROWS, COLS], at.dtype.element_ty), mask=inside)
    tail = end // STEP * STEP + tl.arange(0, STEP)
    tl.store(at + tail, tl.zeros([STEP], at.dtype.element_ty), mask=(tail >= begin) & (tail < end))


@triton.jit
def packed_zero_kernel(laid, tile_list, tiles, entries, lo, inner_lo, inner_hi, row, head, STEP: tl.constexpr,
                       BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr,
                       COLS: tl.constexpr):  # fmt: skip
    """Run `zero_tile` for one listed tile, in a copy."""
    n, h = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    if n < tl.load(tile_list):
        seq, tile = listed_tile(tile_list, n)
        origin = tl.cast(h, tl.int64) * head + tl.cast(seq.first_query, tl.int64) * row
        origin += FRONT + first_entry_of(seq, lo)
        zero_tile(laid, origin, row, tile * BLOCK_M, seq.queries, seq.keys, seq.diagonal, entries, lo, inner_lo,
                  inner_hi, STEP, BLOCK_M, BLOCK_N, ROWS, COLS)  # fmt: skip


def in_pairs(values: Tensor, reverse: bool) -> bool:
    """True if `move_pairs` can read and write values (1, H, T, R), whose rows must be whole words of two."""
    strides = values.stride(1) if values.shape[1] > 1 else 0, values.stride(2) if values.shape[2] > 1 else 0
    even = all(n % 2 == 0 for n in (*strides, values.shape[3]))
    return even and not reverse and values.dtype.itemsize == 2 and values.stride(3) == 1 and address(values) % 4 == 0


class PackedValues:
    """Values of one layout, (1, H|Hkv|1, T, R), and their gradient, as TMA reads and adds to them; see `values.Skewed`.

    block_m: queries of a listed tile.
    like: the view of a copy, for a descriptor, on the meta device.
    """

    def __init__(self, problem: Problem, values: Tensor, block_m: int):
        distances = problem.score.query
        assert distances is not None
        assert problem.totals is not None
        _, self.heads, T, R = values.shape
        step = STEP.value
        self.row = -(-(R + step - 2) // step) * step + 1  # 7 columns in front, then the entries; rows do not overlap
        self.head = -(-(FRONT.value + T * self.row + 2 * step) // step) * step
        self.dtype, self.distances = values.dtype, distances
        # to the end of the last row: a longer box is cut off
        width = FRONT.value + T + R + step
        self.like = torch.empty_strided(
            (1, self.heads, T, width), (self.heads * self.head, self.head, self.row - 1, 1), dtype=values.dtype,
            device="meta",
        )  # fmt: skip
        self.block_m, self.tiles = block_m, problem.totals[0] // block_m + problem.batch
        self.copy = self._move(values, back=False)

    def _move(self, values: Tensor, back: bool) -> Launch:
        reverse, count = self.distances.reverse, self.distances.count
        cols = min(256, triton.next_power_of_2(count))
        return Launch(
            move_kernel, self.tiles * (self.block_m // PART) * self.heads, (strided(values), POINTER, POINTER),
            (self.tiles, self.distances.lo, count, self.row, self.head, reverse, back, in_pairs(values, reverse),
             self.block_m, PART, 4, cols), num_warps=1,
        )  # fmt: skip

    def prepare_gradient(self, values: Tensor, terms: Any, block_n: int) -> Tensor:
        """Prepare `empty_gradient` and `gradient`; return a meta tensor like the gradient."""
        like = values.new_empty(values.transpose(1, 2).shape, device="meta").transpose(1, 2)
        self.copy_back = self._move(like, back=True)
        self.zeros = Launch(
            packed_zero_kernel, self.tiles * self.heads, (POINTER, POINTER),
            (self.tiles, self.distances.count, terms.first, terms.inner_lo, terms.inner_hi, self.row, self.head,
             step_of(self.dtype), self.block_m, block_n, 16, 128), num_warps=4,
        )  # fmt: skip
        return like

    def laid_out(self, values: Tensor, tile_list: Tensor) -> Tensor:
        """Return a copy of the values whose keys exist; the rest is uninitialised."""
        laid = values.new_empty(self.heads * self.head)
        self.copy(values, laid, tile_list)
        return laid

    def empty_gradient(self, values: Tensor, tile_list: Tensor) -> Tensor:
        """Return a tensor to accumulate the gradient."""
        laid = values.new_empty(self.heads * self.head)
        self.zeros(laid, tile_list)
        return laid

    def gradient(self, laid: Tensor, tile_list: Tensor, found: Tensor) -> None:
        """Copy a filled `empty_gradient` to ``found``, which has the layout that `prepare_gradient` returned."""
        self.copy_back(found, laid, tile_list)


def laid_out(values: Skewed | PackedValues | None, of: Tensor, tile_list: Tensor | None) -> Tensor:
    """Return the values of a call in the layout that TMA reads; ``tile_list``: of a packed batch."""
    if isinstance(values, PackedValues):
        assert tile_list is not None
        return values.laid_out(of, tile_list)
    assert values is not None
    return values.laid_out(of)
