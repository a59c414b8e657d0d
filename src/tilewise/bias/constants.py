"""Small tensors of a term that no call changes, made once: some twenty kernels of 2 µs each would make them anew.

A tensor serves the stream alone on which it was made: there whatever reads it runs after what has written it, and
before what gets its memory once it is forgotten.
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
    """``make()``, or what it gave for the same key on a device of the same name, on the same stream.

    Not where a compiler, a tracer or a transform looks on, whose tensors have no memory; nor while a CUDA graph is
    captured, which would go on reading what is kept no more, or own what others read.
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
        with torch.inference_mode(False):  # what is made in that mode no later call could save for its backward
            found = _kept[key] = make()
    return found
