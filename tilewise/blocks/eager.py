"""Whether a call may leave the dispatcher out, whose way to a kernel in Python costs tens of microseconds."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import is_in_torch_dispatch_mode


def is_eager(*tensors: Tensor | None) -> bool:
    """No compiler, no tracer and no transform looks on, and the tensors are plain: nobody would miss the dispatcher."""
    return (
        not torch.compiler.is_compiling()
        and all(x is None or (type(x) in (Tensor, Parameter) and not x.is_meta) for x in tensors)
        and not is_in_torch_dispatch_mode()
        and not torch._C._are_functorch_transforms_active()
    )
