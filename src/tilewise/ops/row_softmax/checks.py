"""Checks of the arguments of `tilewise.softmax`."""

from __future__ import annotations

import math
from numbers import Integral, Real

import torch
from torch import Tensor

from tilewise.ops.row_softmax import statistics_dtype
from tilewise.spec.tensors import check_tensor

LONGEST_ON_GPU = (1 << 30) - 1  # elements of a row: indices along it have 32 bits
# Dtypes with the least and the largest scale. With a smaller scale, a difference of two x that overflows might not mean
# a probability of 0.
SCALES = {
    dtype: (1000 * torch.finfo(statistics_dtype(dtype)).tiny, torch.finfo(statistics_dtype(dtype)).max)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64)
}


def check_arguments(x: Tensor, scale: float, bias: Tensor | None, mask: Tensor | None, dim: int) -> None:
    """Raise a ValueError or TypeError that names the argument, the value received and what is allowed."""
    check_tensor("x", x)
    if bias is not None:
        check_tensor("bias", bias)
    if mask is not None:
        check_tensor("mask", mask)
    axes = x.dim()
    if axes == 0:
        raise ValueError("x: expected at least 1 dimension, got shape ()")
    limits = SCALES.get(x.dtype)
    if limits is None:
        raise TypeError(f"x: dtype must be float16, bfloat16, float32 or float64, got {x.dtype}")
    # float and int come first: other kinds of numbers take longer to recognize.
    if type(scale) is not float and (
        isinstance(scale, bool) or not isinstance(scale, (Real, torch.SymFloat, torch.SymInt))
    ):
        raise TypeError(f"scale: expected a float, got {type(scale).__name__}")
    if not 0 < scale < math.inf:
        raise ValueError(f"scale: must be positive and finite, got {scale}")
    if not limits[0] <= scale <= limits[1]:
        raise ValueError(f"scale: must be between {limits[0]:.1e} and {limits[1]:.1e}, got {scale}")
    if type(dim) is not int and (isinstance(dim, bool) or not isinstance(dim, Integral)):
        raise TypeError(f"dim: expected an int, got {type(dim).__name__}")
    if not -axes <= dim < axes:
        raise ValueError(f"dim: must be between {-axes} and {axes - 1} for x of shape {_shape(x)}, got {dim}")
    if bias is not None and bias.dtype not in SCALES:
        raise TypeError(
            f"bias: dtype must be float16, bfloat16, float32 or float64, got {bias.dtype}"
            + ("; a bool mask is passed as mask=" if bias.dtype == torch.bool else "")
        )
    if mask is not None and mask.dtype != torch.bool:
        raise TypeError(
            f"mask: dtype must be bool (True = visible), got {mask.dtype}; an additive mask is passed as bias="
        )
    if bias is not None:
        _check_operand("bias", bias, x)
    if mask is not None:
        _check_operand("mask", mask, x)
    if x.is_cuda:
        _check_gpu(x, bias, dim)


def _check_gpu(x: Tensor, bias: Tensor | None, dim: int) -> None:
    if torch.float64 in (x.dtype, None if bias is None else bias.dtype):
        raise ValueError(f"x, bias: float64 runs on the CPU only, the tensors are on {x.device}")
    if x.shape[dim] > LONGEST_ON_GPU:
        raise ValueError(f"x: a row on a GPU has at most {LONGEST_ON_GPU} elements, got {x.shape[dim]}")


def _check_operand(name: str, operand: Tensor, x: Tensor) -> None:
    if operand.device != x.device:
        raise ValueError(f"{name}: must be on x's device {x.device}, got {operand.device}")
    extra = x.dim() - operand.dim()
    if extra < 0 or any(n not in (1, size) for n, size in zip(operand.shape, x.shape[extra:], strict=True)):
        raise ValueError(f"{name}: shape {_shape(operand)} does not broadcast to x's {_shape(x)}")


def _shape(x: Tensor) -> tuple[int, ...]:
    return tuple(x.shape)
