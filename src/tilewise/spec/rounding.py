"""The bits of a float32 that rounding to 16 bits takes: with them the rounded number is the float32 again.

Dropout divides O by the share that is kept, so that O is rounded where without dropout it would be exact, and
rowsum(dO∘O) no longer cancels dP: docs/maths.md, "Dropout". So a forward with dropout leaves these bits beside a 16-bit
O, and its backward takes O with them. `tilewise.backends.kernels.rounding` has the twins in Triton.
"""

from __future__ import annotations

import torch
from torch import Tensor

LEAST_STEP, GREATEST_STEP = -(2**15), 2**15 - 1
LOW_BYTES = 2


def keeps_low_bits(dtype: torch.dtype, dropout: int) -> bool:
    """Of a call in this dtype, with this threshold of dropout, or its probability."""
    return dropout > 0 and dtype.itemsize == 2


def low_bits(exact: Tensor, rounded: Tensor) -> Tensor:
    """How far float32 numbers are from what they were rounded to, in steps of a float32, int16.

    Of bfloat16 half a step is 2^15 of a float32's, of float16 2^12. More than fits is cut: of a tie by one, and where a
    float16 is subnormal or not finite.
    """
    steps = exact.float().view(torch.int32) - rounded.float().view(torch.int32)
    return steps.clamp_(LEAST_STEP, GREATEST_STEP).to(torch.int16)


def with_low_bits(rounded: Tensor, low: Tensor | None) -> Tensor:
    """The float32 numbers again, or those of ``rounded`` where there is nothing to add; what is not finite stays so."""
    if low is None:
        return rounded
    wide = rounded.float()
    return torch.where(wide.isfinite(), (wide.view(torch.int32) + low).view(torch.float32), wide)
