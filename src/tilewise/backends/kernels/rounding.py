"""Jit twins, name by name, of `tilewise.spec.rounding`, for Triton and Gluon kernels."""

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.spec import rounding as host

# Triton: it orders equal global names by the address of their modules, so a kernel's key in the cache on disk would
# differ between processes. No other module of kernels has these names.
LEAST_STEP, GREATEST_STEP = tl.constexpr(host.LEAST_STEP), tl.constexpr(host.GREATEST_STEP)


@triton.jit
def low_bits(exact, rounded):
    """Return the rounding error of float32 numbers as int16, in float32 steps."""
    steps = exact.to(tl.int32, bitcast=True) - rounded.to(tl.float32).to(tl.int32, bitcast=True)
    return tl.minimum(tl.maximum(steps, LEAST_STEP), GREATEST_STEP).to(tl.int16)


@triton.jit
def with_low_bits(rounded, low):
    """Return the float32 numbers of ``rounded`` (16-bit numbers as float32) and ``low`` (int16)."""
    exact = (rounded.to(tl.int32, bitcast=True) + low.to(tl.int32)).to(tl.float32, bitcast=True)
    return tl.where(tl.abs(rounded) < float("inf"), exact, rounded)
