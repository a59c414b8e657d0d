"""TMA descriptors of tensors, with the shared-memory layouts of Gluon."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tilewise.backends.launcher import POINTER, boxed

DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32, torch.int32: gl.int32}


def descriptor(x: Tensor | None, rows: int, cols: int) -> Any:
    """The layout of a tensor that is read by TMA, in boxes of (rows, cols) of its last two axes; the hardware reads 0
    outside the tensor and writes nothing there. A tensor that is absent is a plain None in the kernel."""
    if x is None:
        return POINTER
    size = x.element_size()
    row = (x.shape[3] * size + 15) // 16 * 16 // size
    strides = [row if n == 1 else s for n, s in zip(x.shape, x.stride(), strict=True)]
    return boxes(x, [1, 1, rows, cols], [*strides[:3], 1])


def boxes(x: Tensor, box: list[int], strides: Sequence[int]) -> TensorDescriptor:
    """The same for boxes of any shape."""
    return boxed(TensorDescriptor, x, strides, box, _shared(tuple(box), x.dtype))


def vector(x: Tensor, length: int) -> TensorDescriptor:
    """The layout of a contiguous tensor of one dimension that is read by TMA, ``length`` elements at a time."""
    return boxed(TensorDescriptor, x, (1,), (length,), _shared((length,), x.dtype))


@cache
def _shared(box: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(list(box), DTYPES[dtype])
