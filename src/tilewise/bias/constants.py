"""Cache for small constant tensors of terms, which take some twenty kernels of 2 µs each to compute.

Tensors are cached per stream. On its stream a tensor is written before it is read, and its memory is reused only after
all reads.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from tilewise.spec.tensors import stream_of

LIMIT = 64
_kept: dict[tuple, Tensor] = {}


def constant(key: tuple, device: torch.device, make: Callable[[], Tensor]) -> Tensor:
    """Return ``make()``, or its earlier result for an equal key, device and stream.

    Not cached under a compiler, tracer or transform, whose tensors have no memory, nor during CUDA graph capture, where
    a graph would read evicted memory or own memory that others read.
    """
    if device.type == "meta" or torch.compiler.is_compiling() or is_in_torch_dispatch_mode():
        return make()
    if torch._C._is_tracing() or torch._C._are_functorch_transforms_active():
        return make()
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return make()
    key = (*key, device, stream_of(device))
    found = _kept.get(key)
    if found is None:
        if len(_kept) >= LIMIT:
            _kept.clear()
        with torch.inference_mode(False):  # inference tensors cannot be saved for backward
            found = _kept[key] = make()
    return found
