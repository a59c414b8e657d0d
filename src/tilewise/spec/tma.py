"""Requirements of TMA, the bulk copies of a GPU, on the memory layout of a tensor."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def fits_tma(shape: Sequence[int], strides: Sequence[int], itemsize: int, aligned: bool) -> bool:
    """True if a TMA descriptor can describe the tensor; strides in elements, ``aligned``: to 16 bytes.

    It needs contiguous rows, other strides that are positive multiples of 16 bytes below 2⁴⁰, and coordinates of 32
    bits. The stride of an axis of size 1 is free. Callers leave out axes that a kernel reads at index 0 only, such as a
    broadcast batch.
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
    """Return `fits_tma` of a tensor with all its axes; its address is not read, as traced tensors have none."""
    return fits_tma(x.shape, x.stride(), x.element_size(), aligned)
