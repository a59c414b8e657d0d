"""Low bits that rounding a float32 to 16 bits drops; they restore the float32.

Dropout divides O by the kept share, so that O is rounded where it would be exact without dropout, and rowsum(dO∘O) no
longer cancels dP (docs/maths.md, "Dropout"). So a forward with dropout also saves these bits of a 16-bit O for the
backward. `tilewise.backends.kernels.rounding` has the twins in Triton.
"""

from __future__ import annotations

import torch
from torch import Tensor

LEAST_STEP, GREATEST_STEP = -(2**15), 2**15 - 1
LOW_BYTES = 2


def keeps_low_bits(dtype: torch.dtype, dropout: int) -> bool:
    """True if the forward saves the low bits: a 16-bit dtype and dropout (threshold or probability) above 0."""
    return dropout > 0 and dtype.itemsize == 2


def low_bits(exact: Tensor, rounded: Tensor) -> Tensor:
    """Return how far float32 numbers are from their rounded values, in steps of a float32, int16.

    Half a step of bfloat16 is 2^15 steps of float32, of float16 2^12. The result is clamped, by one step for a tie, and
    where a float16 is subnormal or not finite.
    """
    steps = exact.float().view(torch.int32) - rounded.float().view(torch.int32)
    return steps.clamp_(LEAST_STEP, GREATEST_STEP).to(torch.int16)


def with_low_bits(rounded: Tensor, low: Tensor | None) -> Tensor:
    """Return the float32 numbers; ``rounded`` itself without low bits, and where it is not finite."""
    if low is None:
        return rounded
    wide = rounded.float()
    return torch.where(wide.isfinite(), (wide.view(torch.int32) + low).view(torch.float32), wide)
