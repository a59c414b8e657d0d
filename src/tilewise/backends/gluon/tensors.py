"""TMA descriptors of tensors, with the shared-memory layouts of Gluon."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tilewise.backends.gluon import RAGGED_ROWS
from tilewise.backends.launch.launcher import POINTER, boxed, row_strides

DTYPES = {
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.float32: gl.float32,
    torch.int32: gl.int32,
    torch.int16: gl.int16,
}


def descriptor(x: Tensor | None, rows: int, cols: int) -> Any:
    """Return the TMA layout of a tensor, in boxes of (rows, cols) of its last two axes; of None, a plain None argument.
    The hardware reads 0 outside the tensor and writes nothing there."""
    if x is None:
        return POINTER
    return boxes(x, [1, 1, rows, cols], row_strides(x.shape, x.stride(), x.element_size()))


ENDLESS = 0x7FFF0000  # size of both leading axes of `ragged`: more than any coordinate


def ragged(x: Tensor | None, rows: int, cols: int) -> Any:
    """Return the TMA layout of a packed tensor (1, H, T, D), in boxes of (rows, cols) that end where a sequence does.

    The hardware reads 0 past the end of a sequence and writes nothing there. None as for `descriptor`.

    The row axis has 2^30 rows, of which a sequence takes the last, so that its end is the tensor's. Two leading axes
    restore the address, both in steps of a row: one moves to the sequence's end, the other 2^30 rows back, by 2^30
    steps of 2^34 elements less a row, because addresses are modulo 2^64. `gluon.varlen.box_of` returns the coordinates.
    (Triton's tools.ragged_tma does the same.)
    """
    if x is None:
        return POINTER
    _, H, T, D = x.shape
    row = x.stride(2) if T > 1 else (D * x.element_size() + 15) // 16 * 16 // x.element_size()
    head = x.stride(1) if H > 1 else row
    box = [1, 1, 1, rows, cols]
    shape, strides = [ENDLESS, ENDLESS, H, RAGGED_ROWS, D], [2**34 - row, row, head, row, 1]
    return boxed(TensorDescriptor, x, strides, box, _shared(tuple(box), x.dtype), shape=shape)


def boxes(x: Tensor, box: list[int], strides: Sequence[int]) -> TensorDescriptor:
    """Return the TMA layout of a tensor in boxes of any shape."""
    return boxed(TensorDescriptor, x, strides, box, _shared(tuple(box), x.dtype))


def vector(x: Tensor, length: int) -> TensorDescriptor:
    """Return the TMA layout of a contiguous one-dimensional tensor, read in boxes of ``length`` elements."""
    return boxed(TensorDescriptor, x, (1,), (length,), _shared((length,), x.dtype))


@cache
def _shared(box: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(list(box), DTYPES[dtype])
