"""Reasons why a call of PyTorch's scaled_dot_product_attention is left to PyTorch."""

from __future__ import annotations

import math
import sys
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from tilewise.backends import declines_gpu
from tilewise.frontend.jagged import are_jagged
from tilewise.operator.eager import in_forward_mode
from tilewise.spec.checks import DTYPES
from tilewise.spec.tensors import PLAIN, has_function, is_causal_bias, is_dtensor

_DEVICES = ("cpu", "cuda", "meta")


def why_not(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: Any = 0.0, is_causal: Any = False, *,
    scale: Any = None, enable_gqa: Any = False,
) -> str | None:  # fmt: skip
    """Return why `tilewise.scaled_dot_product_attention` does not take a call that PyTorch's function may take; None if
    it does. A call that neither takes is an error of one of them."""
    tensors = {"query": query, "key": key, "value": value}
    jagged = are_jagged(query, key, value)
    for name, x in (*tensors.items(), ("attn_mask", attn_mask)):
        if x is None and name == "attn_mask":
            continue
        if not isinstance(x, Tensor):
            return f"{name} is no tensor"
        if x.layout is not torch.strided or x.is_nested:
            if not (jagged and x.is_nested):
                return f"{name} is nested or not strided, and not all are jagged"
            if x.lengths() is not None:  # type: ignore[attr-defined]
                return f"{name} is jagged with holes"
        elif not (_is_dense(x) or (name == "attn_mask" and is_causal_bias(x))):
            return f"{name} is of the class {type(x).__name__}"
    reason = _of_device(query, attn_mask)
    if reason is not None:
        return reason
    if query.dtype not in DTYPES:
        return f"query is {query.dtype}"
    if query.shape[-1] == 0 or value.shape[-1] == 0:
        return "a head dimension is 0"
    if jagged and is_causal and query.shape[-2] != key.shape[-2]:
        return "is_causal of jagged tensors with other lengths of key than of query"
    if isinstance(dropout_p, Tensor):
        return "dropout_p is a tensor"
    if isinstance(scale, bool) or (isinstance(scale, Real) and not math.isfinite(scale)):
        return "scale is a bool, infinite or NaN"
    if in_forward_mode():
        return "forward-mode derivatives"
    return None


def _of_device(query: Tensor, attn_mask: Tensor | None) -> str | None:
    kind = query.device.type
    if kind not in _DEVICES:
        return f"query is on {kind}"
    if kind == "cuda":
        if torch.float64 in (query.dtype, None if attn_mask is None else attn_mask.dtype):
            return "float64 on a GPU"
        return declines_gpu(_capability(query.device.index))
    return None


def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


# As torch.compiler.assume_constant_result does, which imports torch._dynamo: it runs once, when a call is compiled.
_capability._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _is_dense(x: Tensor) -> bool:
    """True if the memory of ``x`` holds its numbers, also for a compiler that traces with fake ones."""
    kind = type(x)
    if kind in PLAIN:
        return True
    if is_dtensor(x) or has_function(kind):
        return False
    return kind.__torch_dispatch__ is Tensor.__torch_dispatch__ or kind in _traced()


def _traced() -> list[type]:
    names = (("torch._subclasses.fake_tensor", "FakeTensor"),
             ("torch._subclasses.functional_tensor", "FunctionalTensor"))  # fmt: skip
    return [getattr(sys.modules[module], name) for module, name in names if module in sys.modules]
