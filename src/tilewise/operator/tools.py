"""What PyTorch's tools ask of an operator beside its numbers: FLOPs, a row in a profile, placements of DTensors, names
in the graphs of torch.fx and ONNX.

They are told when they are in use; none of them is imported for it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._profiler import _RecordFunctionFast


def announce(*names: str) -> None:
    """Before the operators ``names`` are called by the dispatcher, where a tool may look on."""
    if "torch.utils.flop_counter" in sys.modules and not torch.compiler.is_compiling():
        from tilewise.operator import flops

        flops.tell(names)
    if "torch.distributed.tensor" in sys.modules and "attention" in names:
        import tilewise.operator.sharding  # noqa: F401


def exports_onnx() -> bool:
    """ONNX knows none of the operators: `tilewise.operator.onnx` has them in PyTorch's own."""
    return (torch.compiler.is_compiling() or torch._C._is_tracing()) and torch.onnx.is_in_onnx_export()


def is_symbolic(*arguments: object) -> bool:
    """One of them is a name in the graph that torch.fx.symbolic_trace records."""
    return any(isinstance(x, torch.fx.Proxy) for x in arguments)


def symbolic(function: Callable, *arguments: Any, **named: Any) -> Any:
    """A call of ``function`` in the graph that torch.fx records."""
    return torch.overrides.handle_torch_function(function, (*arguments, *named.values()), *arguments, **named)


def recorded(name: str, tensors: Sequence[Tensor | None], function: Callable, *arguments: Any) -> Any:
    """``function(*arguments)``, of which a profile tells as of the operator ``name`` on ``tensors``."""
    with _RecordFunctionFast(name, list(tensors)):
        return function(*arguments)
