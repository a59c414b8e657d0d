"""How tensors reach the kernels: as TMA descriptors, made once for each layout, or as pointers with strides."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}


class Strided(NamedTuple):
    """A four-dimensional tensor for pointer arithmetic, in elements; a broadcast axis has stride 0."""

    pointer: Any
    stride0: int
    stride1: int
    stride2: int
    stride3: int


NOTHING = Strided(None, 0, 0, 0, 0)


def strided(x: Tensor) -> Strided:
    return Strided(x, *(0 if n == 1 else s for n, s in zip(x.shape, x.stride(), strict=True)))


def descriptor(x: Tensor, rows: int, cols: int) -> TensorDescriptor:
    """Boxes of (rows, cols) of the last two axes; the hardware reads 0 outside the tensor and writes nothing there."""
    size = x.element_size()
    row = (x.shape[3] * size + 15) // 16 * 16 // size
    strides = [row if n == 1 else s for n, s in zip(x.shape, x.stride(), strict=True)]
    box = [1, 1, rows, cols]
    layout = gl.NVMMASharedLayout.get_default_for(box, DTYPES[x.dtype])
    return TensorDescriptor(x, list(x.shape), [*strides[:3], 1], box, layout)


def unbound(source: Any) -> Any:
    """A `Strided` or descriptor without its tensor: a layout to `bound` other tensors to. None stays None."""
    if isinstance(source, Strided):
        return source._replace(pointer=None)
    return None if source is None else bound(source, None)


def bound(source: Any, x: Tensor | None) -> Any:
    """The kernel argument of ``x`` in the layout ``source``; None where there is no layout."""
    if isinstance(source, Strided):
        return Strided(x, *source[1:])
    if source is None:
        return None
    copy = object.__new__(TensorDescriptor)  # without the checks that the layout has passed already
    copy.__dict__.update(source.__dict__)
    copy.base = x
    return copy
