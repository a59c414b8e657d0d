"""Whether a call may leave the dispatcher out, whose way to a kernel costs tens of microseconds; what it may not do."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._C import _functorch
from torch.nn import Parameter
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

_wrapped = _functorch.is_functorch_wrapped_tensor  # by a transform, which it may have outlived


def _is_plain(x: Tensor) -> bool:
    """Its memory holds its numbers, and not their negatives either (``z.conj().imag``)."""
    return type(x) in (Tensor, Parameter) and not (x.is_meta or _wrapped(x) or x.is_neg())


def is_eager(*tensors: Tensor | None) -> bool:
    """No compiler, no tracer and no transform looks on, and the tensors are plain: nobody would miss the dispatcher."""
    return (
        not torch.compiler.is_compiling()
        and all(x is None or _is_plain(x) for x in tensors)
        and not is_in_torch_dispatch_mode()
        and not torch._C._is_tracing()
        and not torch._C._are_functorch_transforms_active()
    )


def refuse_tangents(name: str, *tensors: Tensor | None) -> None:
    """NotImplementedError for what torch.func.jvp follows: the dispatcher would lose its tangents, silently.

    It follows what was computed inside of it, too, with tangents or without.
    """
    if torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active():
        return
    stack = _functorch.get_interpreter_stack() or []
    forward = {transform.level() for transform in stack if transform.key() == _functorch.TransformType.Jvp}
    for x in tensors:
        while x is not None and _wrapped(x):
            if _functorch.maybe_get_level(x) in forward:
                raise NotImplementedError(f"{name} has no forward-mode derivative, which torch.func.jvp asks for")
            x = _functorch.get_unwrapped(x)
