"""Checks of tensor types, conversion of plain integers, and PyTorch's CausalBias."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Sequence
from functools import partial
from numbers import Integral
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

# Types that need no further check.
PLAIN = frozenset((Tensor, Parameter, type(None)))
_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64)
_NO_FUNCTION = torch._C._disabled_torch_function_impl
_EMPTY_CELL = CellType()  # cell of a variable that is not assigned yet
_DEFAULT_FUNCTION = Tensor.__torch_function__.__func__  # type: ignore[attr-defined]


def check_tensor(name: str, x: object, *, may_be_causal: bool = False) -> None:
    """Raise unless ``x`` is a dense tensor: not sparse, not nested, and of no class with a ``__torch_function__``.

    Such a class may give its memory another meaning (that of a CausalBias is uninitialized). Subclasses without one
    pass, and those with only a ``__torch_dispatch__`` (FakeTensor, DTensor) are handled by the operator.
    ``may_be_causal`` also accepts a CausalBias.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(x).__name__}")
    if x.layout is not torch.strided or x.is_nested:
        kind = "a nested tensor" if x.is_nested else f"layout {x.layout}"
        raise TypeError(f"{name}: expected a dense tensor (layout torch.strided), got {kind}")
    if type(x) not in PLAIN and has_function(type(x)) and not (may_be_causal and is_causal_bias(x)):
        hint = "" if is_causal_bias(x) else "; if its memory holds its numbers, pass x.as_subclass(torch.Tensor)"
        raise TypeError(
            f"{name}: expected a plain torch.Tensor, got {type(x).__name__}, whose __torch_function__ may give it "
            f"another meaning than its memory's{hint}"
        )


def has_function(kind: type[Tensor]) -> bool:
    function = kind.__torch_function__
    return function is not _NO_FUNCTION and getattr(function, "__func__", None) is not _DEFAULT_FUNCTION


def plain_int(x: Any) -> Any:
    """Return an int for a numpy integer or 0-d integer tensor (synchronizes with a GPU); anything else unchanged."""
    if type(x) is int:
        return x
    if isinstance(x, Tensor):
        return x.item() if x.dim() == 0 and x.dtype in _INTEGERS else x
    return int(x) if isinstance(x, Integral) and not isinstance(x, (bool, torch.SymInt)) else x


def plain_ints(pair: Any) -> Any:
    """Return `plain_int` of both elements of a pair, or of a tensor or array of two numbers."""
    if isinstance(pair, Tensor) or type(pair).__module__ == "numpy":
        pair = pair.tolist()
    return tuple(plain_int(x) for x in pair) if isinstance(pair, (tuple, list)) else pair


def is_causal_bias(x: object) -> bool:
    """True if ``x`` is a `torch.nn.attention.bias.CausalBias`, without importing this slow module."""
    if type(x) in PLAIN:
        return False
    module = sys.modules.get("torch.nn.attention.bias")
    return module is not None and isinstance(x, module.CausalBias)


def is_dtensor(x: object) -> bool:
    """True if ``x`` is a DTensor, without importing its module."""
    if type(x) in PLAIN:
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(x, module.DTensor)


def causal_limit(name: str, bias: Tensor, queries: int, keys: int) -> int:
    """Return the largest ``j - i`` that the CausalBias leaves visible."""
    from torch.nn.attention.bias import CausalVariant

    M, N = bias.seq_len_q, bias.seq_len_kv  # type: ignore[attr-defined]
    if (queries, keys) != (M, N):
        raise ValueError(f"{name}: the CausalBias is for {M} queries and {N} keys, the call has {queries} and {keys}")
    return 0 if bias.variant == CausalVariant.UPPER_LEFT else keys - queries  # type: ignore[attr-defined]


def tensors_read_by(function: Any) -> list[Tensor]:
    """Return the tensors that a function reads besides its arguments.

    Searches its closure, defaults and globals, attributes of objects there, and nested functions, partials and
    containers.
    """
    found: list[Tensor] = []
    seen: set[int] = set()
    left = [function]
    while left:
        x = left.pop()
        if id(x) in seen:
            continue
        seen.add(id(x))
        if isinstance(x, Tensor):
            found.append(x)
        elif isinstance(x, (tuple, list)):
            left += x
        elif isinstance(x, dict):
            left += x.values()
        elif isinstance(x, partial):
            left += (x.func, *x.args, *x.keywords.values())
        elif isinstance(x, MethodType):
            left += (x.__func__, x.__self__)
        elif isinstance(x, FunctionType):
            left += [cell.cell_contents for cell in x.__closure__ or () if cell != _EMPTY_CELL]
            left += [*(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values()]
            named = (x.__globals__.get(name) for name in x.__code__.co_names)
            left += [y for y in named if isinstance(y, Tensor)]
        elif hasattr(x, "__dict__") and not isinstance(x, (type, ModuleType)):
            left += [y for y in vars(x).values() if isinstance(y, Tensor)]
            if isinstance(x, torch.nn.Module):
                left += [x._buffers, x._parameters]
    return found


class Versions:
    """Version counters of tensors, held by weak references, to detect in-place changes."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._known = [(weakref.ref(x), x._version) for x in tensors]

    def hold(self, tensors: Sequence[Tensor]) -> bool:
        """True if these are the tensors given before, unchanged."""
        pairs = zip(self._known, tensors, strict=False)
        return len(self._known) == len(tensors) and all(x() is y and n == y._version for (x, n), y in pairs)


def stream_of(device: torch.device) -> int | None:
    """Return this thread's current CUDA stream; None on a CPU."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None
