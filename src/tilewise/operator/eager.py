"""Calls that leave the dispatcher out, whose way to a Python kernel costs tens of microseconds of host time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, is_grad_enabled
from torch._C._functorch import is_functorch_wrapped_tensor as _is_wrapped
from torch._C._functorch import is_legacy_batchedtensor as _is_legacy_batched
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from tilewise.spec.tensors import PLAIN

_is_tracing = torch._C._is_tracing
_is_transformed = torch._C._are_functorch_transforms_active
_NO_COMPLEX = torch.bfloat16  # has no complex numbers, so that no memory holds its negatives; asking takes longer


def is_eager(tensors: Sequence[Tensor | None]) -> bool:
    """No compiler, no tracer and no transform looks on: nobody would miss the dispatcher. It also knows what to do with
    a tensor that outlived its transform, or whose memory holds its negative (``z.conj().imag``).

    The first tensor is there, and the others are on its device, or the call is none.
    """
    if is_compiling():
        return False
    for x in tensors:
        if x is not None and (
            type(x) not in PLAIN or _is_wrapped(x) or (x.dtype is not _NO_COMPLEX and x.is_neg())
        ):  # fmt: skip
            return False
    first = tensors[0]
    looks_on = is_in_torch_dispatch_mode() or _is_tracing() or _is_transformed()
    return not (looks_on or (first is not None and first.is_meta))


def is_differentiated(tensors: Iterable[Tensor | None]) -> bool:
    """Whether somebody may ask for a gradient, or has tangents on the way, which autograd.Function refuses."""
    if is_grad_enabled():
        for x in tensors:
            if x is not None and x.requires_grad:
                return True
    return in_forward_mode()


def in_forward_mode() -> bool:
    """Whether tensors may have tangents of forward AD."""
    return forward_ad._current_level >= 0


def apply_of(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``function.apply`` without its steps for functorch, which `is_eager` leaves to the dispatcher."""
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]


def is_batched(*tensors: Tensor | None) -> bool:
    """One of them stands for a batch, as cotangents do under ``torch.autograd.grad(is_grads_batched=True)``."""
    for x in tensors:  # noqa: SIM110 (any() takes twice the time)
        if x is not None and (_is_wrapped(x) or _is_legacy_batched(x)):
            return True
    return False


def is_eager_backward(*cotangents: Tensor | None) -> bool:
    """The backward of an eager call is one too: not itself to be differentiated, not batched, no mode looks on, and no
    compiled autograd, which traces backwards into a graph."""
    if is_compiling() or is_grad_enabled() or is_in_torch_dispatch_mode():
        return False
    for x in cotangents:  # noqa: SIM110
        if x is not None and (_is_wrapped(x) or _is_legacy_batched(x)):
            return False
    return True
