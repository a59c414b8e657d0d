"""A kernel in which `kernels.rounding` meets nothing else."""

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.backends.kernels.rounding import low_bits, with_low_bits


@triton.jit
def low_bits_kernel(exact, rounded, low, found, count, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    inside = at < count
    x, y = tl.load(exact + at, mask=inside, other=0.0), tl.load(rounded + at, mask=inside, other=0.0)
    bits = low_bits(x, y)
    tl.store(low + at, bits, mask=inside)
    tl.store(found + at, with_low_bits(y.to(tl.float32), bits), mask=inside)
