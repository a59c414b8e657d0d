"""Calls without the dispatcher, which takes tens of microseconds of host time to reach a Python kernel."""

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
_STRIDED = torch.strided
_NO_COMPLEX = torch.bfloat16  # no complex dtype, so no negative bit: saves is_neg(), which takes longer


def is_eager(tensors: Sequence[Tensor | None]) -> bool:
    """True if no compiler, tracer, transform or forward AD is active, and the tensors are dense: the dispatcher is not
    needed.

    The dispatcher also handles tensors that outlived their transform, or with the negative bit (``z.conj().imag``). The
    first tensor must not be None; the others are on its device in a valid call.
    """
    if is_compiling():
        return False
    for x in tensors:
        if x is not None and (
            type(x) not in PLAIN or _is_wrapped(x) or x.layout is not _STRIDED
            or (x.dtype is not _NO_COMPLEX and x.is_neg())
        ):  # fmt: skip
            return False
    first = tensors[0]
    looks_on = is_in_torch_dispatch_mode() or _is_tracing() or _is_transformed() or forward_ad._current_level >= 0
    return not (looks_on or (first is not None and first.is_meta))


def is_differentiated(tensors: Iterable[Tensor | None]) -> bool:
    """True if a gradient may be required, or tensors may have tangents, which autograd.Function rejects."""
    if is_grad_enabled():
        for x in tensors:
            if x is not None and x.requires_grad:
                return True
    return forward_ad._current_level >= 0  # `in_forward_mode`


def in_forward_mode() -> bool:
    """True if tensors may have tangents of forward AD."""
    return forward_ad._current_level >= 0


def apply_of(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return ``function.apply`` without its functorch steps. `is_eager` leaves those calls to the dispatcher."""
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]


def is_batched(*tensors: Tensor | None) -> bool:
    """True if a tensor is batched, as cotangents are under ``torch.autograd.grad(is_grads_batched=True)``."""
    for x in tensors:  # noqa: SIM110 (any() takes twice the time)
        if x is not None and (_is_wrapped(x) or _is_legacy_batched(x)):
            return True
    return False


def is_eager_backward(*cotangents: Tensor | None) -> bool:
    """True if a backward is eager: not differentiated, not batched, no mode, no compiled autograd."""
    if is_compiling() or is_grad_enabled() or is_in_torch_dispatch_mode():
        return False
    for x in cotangents:  # noqa: SIM110
        if x is not None and (_is_wrapped(x) or _is_legacy_batched(x)):
            return False
    return True
