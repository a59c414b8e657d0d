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
    """The layout of a tensor that is read by TMA, in boxes of (rows, cols) of its last two axes; the hardware reads 0
    outside the tensor and writes nothing there. A tensor that is absent is a plain None in the kernel."""
    if x is None:
        return POINTER
    return boxes(x, [1, 1, rows, cols], row_strides(x.shape, x.stride(), x.element_size()))


ENDLESS = 0x7FFF0000  # of a descriptor of `ragged`: more than any coordinate


def ragged(x: Tensor | None, rows: int, cols: int) -> Any:
    """The layout of a packed tensor (1, H, T, D) that is read and written by TMA, in boxes of (rows, cols) that end
    where a sequence does: the hardware reads 0 past its end and writes nothing there. None as for `descriptor`.

    The axis of rows has 2^30 of them, of which a sequence takes the last, so that its end is the tensor's. Two axes in
    front put them in their place, both in steps of a row: one goes to the sequence's end, and one goes 2^30 rows back,
    by 2^30 steps of 2^34 elements less a row, because addresses are counted modulo 2^64. `gluon.varlen.box_of` has the
    coordinates. (Triton's tools.ragged_tma does the same.)
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
    """The same for boxes of any shape."""
    return boxed(TensorDescriptor, x, strides, box, _shared(tuple(box), x.dtype))


def vector(x: Tensor, length: int) -> TensorDescriptor:
    """The layout of a contiguous tensor of one dimension that is read by TMA, ``length`` elements at a time."""
    return boxed(TensorDescriptor, x, (1,), (length,), _shared((length,), x.dtype))


@cache
def _shared(box: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(list(box), DTYPES[dtype])
