"""Zeroing of the gradient of relative position values where the backward does not store it.

dS of a tile is stored if all pairs are visible and have an entry, which covers most entries. The rest is zeroed before:
entries that other tiles add to, and entries without a visible pair.
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
    """Zero one query tile of a head; lo, inner_lo, inner_hi: see `GluonScoreArgs`.

    dvalues: a `Strided`, whose rows have ``front`` columns before their entries."""
    count = tl.cdiv(queries, BLOCK_M)
    m0 = tl.program_id(0) % count * BLOCK_M
    bh = tl.program_id(0) // count
    origin = tl.cast(bh // heads, tl.int64) * dvalues.stride0 + tl.cast(bh % heads, tl.int64) * dvalues.stride1 + front
    zero_tile(dvalues.pointer, origin, dvalues.stride2, m0, queries, keys, 0, entries, lo, inner_lo, inner_hi, STEP,
              BLOCK_M, BLOCK_N, ROWS, COLS)  # fmt: skip


def zeros_launch(values: Skewed, keys: int, terms: Any, block_m: int, block_n: int) -> Launch:
    """Return the launch that zeroes what `values.Skewed.empty_gradient` has made."""
    B, H, M, R = values.gradient_plain.shape
    numbers = (values.gradient_front, H, M, keys, R, terms.first, terms.inner_lo, terms.inner_hi)
    step = step_of(values.gradient_plain.dtype)
    return Launch(
        zero_kernel, B * H * -(-M // block_m), (strided(values.gradient_laid),),
        (*numbers, step, block_m, block_n, 16, 128), num_warps=4,
    )  # fmt: skip
