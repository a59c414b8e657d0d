"""Dtypes under `torch.autocast`, which by itself casts the arguments of PyTorch's own operators only."""

from __future__ import annotations

import torch
from torch import Tensor

autocast_somewhere = torch._C._is_any_autocast_enabled  # True if on for any device; the cheapest check


def autocast_on(x: Tensor) -> bool:
    """True if autocast is on for x's device; False for devices without a backend here."""
    device = x.device.type
    return device in ("cpu", "cuda") and torch.is_autocast_enabled(device)


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return ``tensors`` in autocast's dtype if autocast is on for the device of the first one. As for PyTorch's
    operators, nothing is cast if a tensor is float64 or not floating-point, so that errors name the caller's dtypes."""
    if not autocast_on(tensors[0]):
        return tensors
    dtype = torch.get_autocast_dtype(tensors[0].device.type)
    if not all(x.is_floating_point() and x.dtype != torch.float64 for x in tensors):
        return tensors
    return tuple(x.to(dtype) for x in tensors)
