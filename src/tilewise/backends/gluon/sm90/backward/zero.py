"""Zeros in the gradient of values by distance, where the backward adds to it or does not come at all.

The dS of a tile of scores whose pairs are all visible and all have an entry is stored: these are most of the entries,
and of the bytes that zeros would take. The rest is zeroed before: what tiles that something cuts add to, and entries
that no visible pair has.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from tilewise.backends.gluon.values import Skewed, step_of
from tilewise.backends.gluon.varlen_values import zero_tile
from tilewise.backends.launch.launcher import Launch, strided


@triton.jit
def zero_kernel(dvalues, front, heads, queries, keys, entries, lo, inner_lo, inner_hi, STEP: tl.constexpr,
                BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr):  # fmt: skip
    """One tile of queries of a head. dvalues: a `Strided`, of rows with ``front`` columns before their entries; lo,
    inner_lo, inner_hi: see `GluonScoreArgs`."""
    count = tl.cdiv(queries, BLOCK_M)
    m0 = tl.program_id(0) % count * BLOCK_M
    bh = tl.program_id(0) // count
    origin = tl.cast(bh // heads, tl.int64) * dvalues.stride0 + tl.cast(bh % heads, tl.int64) * dvalues.stride1 + front
    zero_tile(dvalues.pointer, origin, dvalues.stride2, m0, queries, keys, 0, entries, lo, inner_lo, inner_hi, STEP,
              BLOCK_M, BLOCK_N, ROWS, COLS)  # fmt: skip


def zeros_launch(values: Skewed, keys: int, terms: Any, block_m: int, block_n: int) -> Launch:
    """What zeroes the gradient of these, as `values.Skewed.empty_gradient` has made it."""
    B, H, M, R = values.gradient_plain.shape
    numbers = (values.gradient_front, H, M, keys, R, terms.first, terms.inner_lo, terms.inner_hi)
    step = step_of(values.gradient_plain.dtype)
    return Launch(
        zero_kernel, B * H * -(-M // block_m), (strided(values.gradient_laid),),
        (*numbers, step, block_m, block_n, 16, 128), num_warps=4,
    )  # fmt: skip
