"""How a tensor lies in memory, as far as the bulk copies of a GPU (TMA) ask."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def fits_tma(shape: Sequence[int], strides: Sequence[int], itemsize: int, aligned: bool) -> bool:
    """Whether a TMA descriptor can hold such a tensor; strides in elements, ``aligned``: to 16 bytes.

    It needs contiguous rows, every other stride a positive multiple of 16 bytes below 2⁴⁰, and coordinates of 32 bits.
    Nobody steps along an axis of size 1, so that its stride is free. An axis along which a kernel always reads at 0
    is left out by whoever asks: a batch that shares a matrix.
    """
    *outer, last = zip(shape, strides, strict=True)
    lines = [stride * itemsize for size, stride in outer if size > 1]
    return (
        aligned
        and (last[1] == 1 or last[0] == 1)
        and all(0 < line < 2**40 and line % 16 == 0 for line in lines)
        and max(shape) < 2**31
    )


def tensor_fits_tma(x: Tensor, aligned: bool) -> bool:
    """`fits_tma` of a tensor with all its axes. Its address is not asked for here: a traced one has none."""
    return fits_tma(x.shape, x.stride(), x.element_size(), aligned)
