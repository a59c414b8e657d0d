"""PyTorch's tools that handle operators: FLOP counters, profiles, DTensor, torch.fx and ONNX.

Operators register with a tool only when it is in use; no tool is imported for it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._profiler import _RecordFunctionFast


def announce(*names: str) -> None:
    """Register the operators ``names`` with active tools; called before a call by the dispatcher."""
    if "torch.utils.flop_counter" in sys.modules and not torch.compiler.is_compiling():
        from tilewise.operator import flops

        flops.tell(names)
    if "torch.distributed.tensor" in sys.modules and "attention" in names:
        import tilewise.operator.sharding  # noqa: F401


def exports_onnx() -> bool:
    """True during an export to ONNX, which uses `tilewise.operator.onnx` in place of the operators."""
    return (torch.compiler.is_compiling() or torch._C._is_tracing()) and torch.onnx.is_in_onnx_export()


def is_symbolic(*arguments: object) -> bool:
    """True if an argument is a Proxy of torch.fx.symbolic_trace."""
    return any(isinstance(x, torch.fx.Proxy) for x in arguments)


def symbolic(function: Callable, *arguments: Any, **named: Any) -> Any:
    """Return a call of ``function`` as a node of the graph that torch.fx records."""
    return torch.overrides.handle_torch_function(function, (*arguments, *named.values()), *arguments, **named)


def recorded(name: str, tensors: Sequence[Tensor | None], function: Callable, *arguments: Any) -> Any:
    """Return ``function(*arguments)``, recorded in a profile as the operator ``name`` on ``tensors``."""
    with _RecordFunctionFast(name, list(tensors)):
        return function(*arguments)
