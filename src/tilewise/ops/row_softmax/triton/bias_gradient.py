"""Gradient of a bias that broadcasts: dS, recomputed from P, dP and delta, summed in float32.

``sizes`` has first the row axes that the bias has, which are kept, then those that are summed. A program computes one
place of the bias from a share of the rows that read it. The shares of each place are added afterwards, so that equal
inputs give equal bits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tilewise.ops.row_softmax.triton.backward import score_gradient


class BiasGradientConstants(NamedTuple):
    """Compile-time constants of the kernel; every field is a tl.constexpr."""

    KEPT: Any  # number of kept axes
    AXES: Any  # number of all axes
    ROWS: Any  # rows of a tile: neighbours along the last kept, or last summed, axis
    KEPT_ROWS: Any  # the rows of a tile are along a kept axis
    BLOCK: Any  # columns of a tile
    SPLITS: Any  # programs that share a place
    COLS: Any  # the bias has the axis of the softmax
    WIDE: Any  # an offset along a row needs 64 bits


@triton.jit
def _offset(x, index, sizes, FIRST: tl.constexpr, END: tl.constexpr):
    """Return the offset of an index over the axes FIRST to END, given as one number."""
    at = tl.cast(index * 0, tl.int64)
    for n in tl.static_range(END - FIRST):
        at += (index % sizes[END - 1 - n]).to(tl.int64) * x[END + 1 - n]
        index = index // sizes[END - 1 - n]
    return at


@triton.jit
def _tile_offset(x, tile, sizes, FIRST: tl.constexpr, END: tl.constexpr, c):
    """Return (offsets [ROWS], valid [ROWS]) of a tile along the last of the axes FIRST to END."""
    tiles = tl.cdiv(sizes[END - 1], c.ROWS)
    rows = tile % tiles * c.ROWS + tl.arange(0, c.ROWS)
    at = _offset(x, tile // tiles, sizes, FIRST, END - 1) + rows.to(tl.int64) * x[END + 1]
    return at, rows < sizes[END - 1]


@triton.jit
def _offsets(x, place, step, sizes, c):
    """Return (offsets [ROWS], valid [ROWS]) of the rows that a program reads in one step."""
    if c.KEPT_ROWS:
        at, valid = _tile_offset(x, place, sizes, 0, c.KEPT, c)
        at += _offset(x, step, sizes, c.KEPT, c.AXES)
    else:
        at, valid = _tile_offset(x, step, sizes, c.KEPT, c.AXES, c)
        at += _offset(x, place, sizes, 0, c.KEPT)
    return at, valid


@triton.jit
def bias_gradient_kernel(dp, p, delta, dbias, sizes, length, steps, places, size, c):
    """Compute the sums of one split for one tile of the bias. ``steps``: steps of all splits. ``size``: elements of the
    bias; ``dbias`` has a copy of it per split, and per tile of columns if the bias has no columns."""
    pid = tl.program_id(0)
    place = pid % places
    split = pid // places % c.SPLITS
    tile = pid // places // c.SPLITS
    cols = tile * c.BLOCK + tl.arange(0, c.BLOCK)
    col_at = cols.to(tl.int64) if c.WIDE else cols
    acc = tl.zeros([c.ROWS, c.BLOCK], tl.float32)
    for step in tl.range(split, steps, c.SPLITS):
        p_at, valid = _offsets(p, place, step, sizes, c)
        dp_at, _ = _offsets(dp, place, step, sizes, c)
        delta_at, _ = _offsets(delta, place, step, sizes, c)
        inside = valid[:, None] & (cols < length)[None, :]
        p_tile = tl.load(p[0] + p_at[:, None] + col_at[None, :] * p[1], mask=inside, other=0.0)
        dp_tile = tl.load(dp[0] + dp_at[:, None] + col_at[None, :] * dp[1], mask=inside, other=0.0)
        acc += score_gradient(p_tile, dp_tile, tl.load(delta[0] + delta_at, mask=valid, other=0.0))
    if c.KEPT_ROWS:
        at, valid = _tile_offset(dbias, place, sizes, 0, c.KEPT, c)
        if c.COLS:
            at = dbias[0] + tl.cast(split, tl.int64) * size + at
            tl.store(at[:, None] + col_at[None, :] * dbias[1], acc, mask=valid[:, None] & (cols < length)[None, :])
        else:
            copy = tile * c.SPLITS + split
            tl.store(dbias[0] + tl.cast(copy, tl.int64) * size + at, tl.sum(acc, 1), mask=valid)
    else:
        at = dbias[0] + _offset(dbias, place, sizes, 0, c.KEPT)
        if c.COLS:
            at += tl.cast(split, tl.int64) * size
            tl.store(at + col_at * dbias[1], tl.sum(acc, 0), mask=cols < length)
        else:
            at += tl.cast(tile * c.SPLITS + split, tl.int64) * size
            tl.store(at, tl.sum(tl.sum(acc, 1), 0))
