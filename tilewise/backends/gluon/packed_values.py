"""Values by distance of a packed batch, a row a query, as TMA reads tiles of them: a copy, and their gradient back.

Distances count from each sequence's last query and key, so that the tile of keys ``col0 ..`` begins in the `sheared`
view at ``col0 + first query - (keys - queries) - lo``. That is no multiple of 16 bytes for most sequences, and TMA
wants one: so the values are copied, with as many columns in front of a sequence's rows as are missing, 7 at most.
Before the first row stand `FRONT` elements, because TMA takes no negative columns.

Boxes of the view end where the sequence does, as those of `tensors.ragged` do. A gradient is added through the same
view, in a copy like that of the values: zeros come first, where tiles do not store it, and at the end it is copied.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewise.backends.gluon.packed import listed_tile
from tilewise.backends.gluon.values import WIDEST, Sheared
from tilewise.backends.launcher import POINTER, Launch, strided
from tilewise.problem import Problem

FRONT = tl.constexpr(WIDEST)  # elements before the first row
STEP = tl.constexpr(8)  # elements of 16 bytes, or of 32


@triton.jit
def first_column(seq, lo):
    """Where the keys of a sequence begin in the view: a multiple of STEP. ``lo``: the least distance with an entry."""
    return FRONT + ((seq.first_query - seq.diagonal - lo + (STEP - 1)) & -STEP)


@triton.jit
def first_entry_of(seq, lo):
    """The columns in front of the first entry of a sequence's rows."""
    return first_column(seq, lo) - FRONT - (seq.first_query - seq.diagonal - lo)


@triton.jit
def move_kernel(values, laid, tile_list, tiles, lo, entries, row, head, REVERSE: tl.constexpr, BACK: tl.constexpr,
                BLOCK: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):  # fmt: skip
    """The values of one tile of the list to where they are laid out, or BACK; those of keys that there are. values:
    `Strided`; row, head: the strides of the copy. tiles: at most as many are listed."""
    n, h = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    if n < tl.load(tile_list):
        seq, tile = listed_tile(tile_list, n)
        end = tl.minimum((tile + 1) * BLOCK, seq.queries)
        at = values.pointer + tl.cast(h, tl.int64) * values.stride1
        to = laid + tl.cast(h, tl.int64) * head + FRONT + first_entry_of(seq, lo)
        for row0 in tl.range(tile * BLOCK, end, ROWS, num_stages=1):
            rows = row0 + tl.arange(0, ROWS)
            place = (seq.first_query + rows).to(tl.int64)[:, None]
            for col0 in tl.range(0, entries, COLS, num_stages=1):
                cols = col0 + tl.arange(0, COLS)
                inside = (rows < end)[:, None] & (cols < entries)[None, :]
                key = (rows + seq.diagonal + lo)[:, None] + cols[None, :]
                there = inside & (key >= 0) & (key < seq.keys)  # the rest no tile reads, or its scores are hidden
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
def zero_tile(at, stride, m0, queries, keys, diagonal, entries, lo, inner_lo, inner_hi, BLOCK_M: tl.constexpr,
              BLOCK_N: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):  # fmt: skip
    """Zero what `range_tiles.let_out` adds to, or nobody comes to, of the rows of a tile of queries from ``m0`` on of
    the gradient at ``at``. lo, inner_lo, inner_hi: see `score.Terms`."""
    # the tiles of keys that are stored: from `first` to before `last`, in keys
    position = m0 + diagonal
    first = tl.cdiv(tl.maximum(position + BLOCK_M - 1 + inner_lo, 0), BLOCK_N) * BLOCK_N
    last = tl.minimum(tl.maximum(position + inner_hi + 1, 0) // BLOCK_N, tl.cdiv(keys, BLOCK_N)) * BLOCK_N
    last = tl.maximum(last, first)
    for row0 in tl.range(m0, tl.minimum(m0 + BLOCK_M, queries), ROWS, num_stages=1):
        rows = row0 + tl.arange(0, ROWS)
        begin, end = first - lo - diagonal - rows, last - lo - diagonal - rows  # of each row, in entries
        at_rows = at + rows.to(tl.int64)[:, None] * stride
        for col0 in tl.range(0, entries, COLS, num_stages=1):
            least, most = first - lo - diagonal - row0, last - lo - diagonal - (row0 + ROWS - 1)
            if (col0 < least) | (col0 + COLS > most):  # else all of it is stored
                cols = col0 + tl.arange(0, COLS)
                rest = (cols[None, :] < begin[:, None]) | (cols[None, :] >= end[:, None])
                inside = (rows < queries)[:, None] & (cols < entries)[None, :]
                zeros = tl.zeros([ROWS, COLS], at.dtype.element_ty)
                tl.store(at_rows + cols[None, :], zeros, mask=rest & inside)


@triton.jit
def packed_zero_kernel(laid, tile_list, tiles, entries, lo, inner_lo, inner_hi, row, head, BLOCK_M: tl.constexpr,
                       BLOCK_N: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):  # fmt: skip
    """`zero_tile` of one tile of the list, in a copy."""
    n, h = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    if n < tl.load(tile_list):
        seq, tile = listed_tile(tile_list, n)
        at = laid + tl.cast(h, tl.int64) * head + FRONT + first_entry_of(seq, lo)
        at += tl.cast(seq.first_query, tl.int64) * row
        zero_tile(at, row, tile * BLOCK_M, seq.queries, seq.keys, seq.diagonal, entries, lo, inner_lo, inner_hi,
                  BLOCK_M, BLOCK_N, ROWS, COLS)  # fmt: skip


class PackedValues:
    """The values of a layout, (1, H|Hkv|1, T, R), and their gradient, for TMA to read and add to; see `values.Sheared`.

    block_m: queries of a tile of the list that calls are given.
    like: the view of a copy, for a descriptor. It has no memory.
    """

    def __init__(self, problem: Problem, values: Tensor, block_m: int):
        distances = problem.score.query
        assert distances is not None
        assert problem.totals is not None
        _, self.heads, T, R = values.shape
        step = STEP.value
        self.row = -(-(R + step - 2) // step) * step + 1  # entries and 7 columns in front, and so no two rows overlap
        self.head = -(-(FRONT.value + T * self.row + 2 * step) // step) * step
        self.dtype, self.distances = values.dtype, distances
        # to the end of the last row: a box that reaches farther is cut off
        width = FRONT.value + T + R + step
        self.like = torch.empty_strided(
            (1, self.heads, T, width), (self.heads * self.head, self.head, self.row - 1, 1), dtype=values.dtype,
            device="meta",
        )  # fmt: skip
        self.block_m, self.tiles = block_m, problem.totals[0] // block_m + problem.batch
        self.copy = self._move(values, back=False)

    def _move(self, values: Tensor, back: bool) -> Launch:
        numbers = (self.tiles, self.distances.lo, self.distances.count, self.row, self.head, self.distances.reverse)
        return Launch(
            move_kernel, self.tiles * self.heads, (strided(values), POINTER, POINTER),
            (*numbers, back, self.block_m, 16, min(256, triton.next_power_of_2(self.distances.count))), num_warps=4,
        )  # fmt: skip

    def prepare_gradient(self, values: Tensor, terms: Any, block_n: int) -> Tensor:
        """Before `empty_gradient` and `gradient`; what the gradient is like, on the meta device."""
        like = values.new_empty(values.transpose(1, 2).shape, device="meta").transpose(1, 2)
        self.copy_back = self._move(like, back=True)
        self.zeros = Launch(
            packed_zero_kernel, self.tiles * self.heads, (POINTER, POINTER),
            (self.tiles, self.distances.count, terms.first, terms.inner_lo, terms.inner_hi, self.row, self.head,
             self.block_m, block_n, 16, 128), num_warps=4,
        )  # fmt: skip
        return like

    def laid_out(self, values: Tensor, tile_list: Tensor) -> Tensor:
        """A copy of the values that keys of the sequences have; nothing else of it is initialised."""
        laid = values.new_empty(self.heads * self.head)
        self.copy(values, laid, tile_list)
        return laid

    def empty_gradient(self, values: Tensor, tile_list: Tensor) -> Tensor:
        """Where the gradient comes together."""
        laid = values.new_empty(self.heads * self.head)
        self.zeros(laid, tile_list)
        return laid

    def gradient(self, laid: Tensor, tile_list: Tensor, found: Tensor) -> None:
        """From `empty_gradient`, filled, to ``found``, as `prepare_gradient` said it would be: rows of sequences."""
        self.copy_back(found, laid, tile_list)


def laid_out(values: Sheared | PackedValues | None, of: Tensor, tile_list: Tensor | None) -> Tensor:
    """The values of a call where TMA reads them; ``tile_list``: of a packed batch."""
    if isinstance(values, PackedValues):
        assert tile_list is not None
        return values.laid_out(of, tile_list)
    assert values is not None
    return values.laid_out(of)
