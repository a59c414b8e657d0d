"""Jit twins, name by name, of `tilewise.spec.rounding`, which says what they are for; for Triton and for Gluon."""

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.spec import rounding as host

# Names that no other module of kernels has: Triton orders equal names by where modules lie in memory, so that a key
# of a kernel, and with it what the cache on disk has of it, would differ between processes.
LEAST_STEP, GREATEST_STEP = tl.constexpr(host.LEAST_STEP), tl.constexpr(host.GREATEST_STEP)


@triton.jit
def low_bits(exact, rounded):
    """int16, of float32 and what it was rounded to."""
    steps = exact.to(tl.int32, bitcast=True) - rounded.to(tl.float32).to(tl.int32, bitcast=True)
    return tl.minimum(tl.maximum(steps, LEAST_STEP), GREATEST_STEP).to(tl.int16)


@triton.jit
def with_low_bits(rounded, low):
    """float32, of 16 bits as float32 and an int16."""
    exact = (rounded.to(tl.int32, bitcast=True) + low.to(tl.int32)).to(tl.float32, bitcast=True)
    return tl.where(tl.abs(rounded) < float("inf"), exact, rounded)
