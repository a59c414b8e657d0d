"""Jit twins, name by name, of `tilewise.score.low_bits`, which says what they are for; for Triton and for Gluon."""

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.score import low_bits as host

LOWEST, HIGHEST = tl.constexpr(host.LOWEST), tl.constexpr(host.HIGHEST)


@triton.jit
def low_bits(exact, rounded):
    """int16, of float32 and what it was rounded to."""
    steps = exact.to(tl.int32, bitcast=True) - rounded.to(tl.float32).to(tl.int32, bitcast=True)
    return tl.minimum(tl.maximum(steps, LOWEST), HIGHEST).to(tl.int16)


@triton.jit
def with_low_bits(rounded, low):
    """float32, of 16 bits as float32 and an int16."""
    exact = (rounded.to(tl.int32, bitcast=True) + low.to(tl.int32)).to(tl.float32, bitcast=True)
    return tl.where(tl.abs(rounded) < float("inf"), exact, rounded)
