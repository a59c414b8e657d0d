"""What `torch.autocast` asks of a call, which knows PyTorch's own operators and no others."""

from __future__ import annotations

import torch
from torch import Tensor

autocast_somewhere = torch._C._is_any_autocast_enabled  # on some device: the quickest question of all


def autocast_on(x: Tensor) -> bool:
    """For the device of ``x``; others than these have no backend here, and some no autocast to ask for."""
    device = x.device.type
    return device in ("cpu", "cuda") and torch.is_autocast_enabled(device)


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """``tensors`` in autocast's dtype where autocast is on for the first one's device.

    As for PyTorch's operators float64 stays, and so does what is no floating-point tensor. If that leaves different
    dtypes nothing is cast, so that an error names those that came.
    """
    if not autocast_on(tensors[0]):
        return tensors
    dtype = torch.get_autocast_dtype(tensors[0].device.type)
    if not all(x.is_floating_point() and x.dtype != torch.float64 for x in tensors):
        return tensors
    return tuple(x.to(dtype) for x in tensors)
