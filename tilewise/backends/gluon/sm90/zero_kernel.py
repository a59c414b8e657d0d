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

from tilewise.backends.gluon.packed_values import zero_tile
from tilewise.backends.launcher import Launch, strided


@triton.jit
def zero_kernel(dvalues, heads, queries, keys, entries, lo, inner_lo, inner_hi, BLOCK_M: tl.constexpr,
                BLOCK_N: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):  # fmt: skip
    """One tile of queries of a head. dvalues: a `Strided`; lo, inner_lo, inner_hi: see `score.Terms`."""
    count = tl.cdiv(queries, BLOCK_M)
    m0 = tl.program_id(0) % count * BLOCK_M
    bh = tl.program_id(0) // count
    at = dvalues.pointer + tl.cast(bh // heads, tl.int64) * dvalues.stride0
    at += tl.cast(bh % heads, tl.int64) * dvalues.stride1
    zero_tile(at, dvalues.stride2, m0, queries, keys, 0, entries, lo, inner_lo, inner_hi, BLOCK_M, BLOCK_N, ROWS, COLS)


def zeros_launch(like: Tensor, keys: int, terms: Any, block_m: int, block_n: int) -> Launch:
    """What zeroes the gradient of values (B, H, M, R) that lies as ``like``."""
    B, H, M, R = like.shape
    numbers = (H, M, keys, R, terms.first, terms.inner_lo, terms.inner_hi, block_m, block_n, 16, 128)
    return Launch(zero_kernel, B * H * -(-M // block_m), (strided(like),), numbers, num_warps=4)
