"""Zeros in the gradient of values by distance, where the backward adds to it or does not come at all.

The dS of a tile of scores whose pairs are all visible and all have an entry is stored: these are most of the entries,
and of the bytes that zeros would take. The rest is zeroed before: what tiles that something cuts add to, and entries
that no visible pair has.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from tilewise.backends.launcher import Launch, strided


@triton.jit
def zero_kernel(dvalues, heads, queries, keys, entries, lo, inner_lo, inner_hi, BLOCK_M: tl.constexpr,
                BLOCK_N: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):  # fmt: skip
    """One tile of queries of a head. dvalues: a `Strided`; lo, inner_lo, inner_hi: see `score.Terms`."""
    count = tl.cdiv(queries, BLOCK_M)
    m0 = tl.program_id(0) % count * BLOCK_M
    bh = tl.program_id(0) // count
    # the tiles of keys that are stored, `range_tiles.let_out`: from `first` to before `last`, in keys
    first = tl.cdiv(tl.maximum(m0 + BLOCK_M - 1 + inner_lo, 0), BLOCK_N) * BLOCK_N
    last = tl.minimum(tl.maximum(m0 + inner_hi + 1, 0) // BLOCK_N, tl.cdiv(keys, BLOCK_N)) * BLOCK_N
    last = tl.maximum(last, first)
    at = dvalues.pointer + tl.cast(bh // heads, tl.int64) * dvalues.stride0
    at += tl.cast(bh % heads, tl.int64) * dvalues.stride1
    for row0 in tl.range(m0, tl.minimum(m0 + BLOCK_M, queries), ROWS, num_stages=1):
        rows = row0 + tl.arange(0, ROWS)
        begin, end = first - lo - rows, last - lo - rows  # of each row, in entries
        at_rows = at + rows.to(tl.int64)[:, None] * dvalues.stride2
        for col0 in tl.range(0, entries, COLS, num_stages=1):
            if (col0 < first - lo - row0) | (col0 + COLS > last - lo - (row0 + ROWS - 1)):  # else all of it is stored
                cols = col0 + tl.arange(0, COLS)
                rest = (cols[None, :] < begin[:, None]) | (cols[None, :] >= end[:, None])
                inside = (rows < queries)[:, None] & (cols < entries)[None, :]
                zeros = tl.zeros([ROWS, COLS], dvalues.pointer.dtype.element_ty)
                tl.store(at_rows + cols[None, :], zeros, mask=rest & inside)


def zeros_launch(like: Tensor, keys: int, terms: Any, block_m: int, block_n: int) -> Launch:
    """What zeroes the gradient of values (B, H, M, R) that lies as ``like``."""
    B, H, M, R = like.shape
    numbers = (H, M, keys, R, terms.first, terms.inner_lo, terms.inner_hi, block_m, block_n, 16, 128)
    return Launch(zero_kernel, B * H * -(-M // block_m), (strided(like),), numbers, num_warps=4)
