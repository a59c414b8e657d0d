"""FLOPs of the operators for `torch.utils.flop_counter`, counted as for PyTorch's own attention.

Matrix products only, over all scores, masked or not; `tilewise.explain` counts the scores within the causal limit and
window. Packed batches count the scores of each sequence; if the lengths have no values, all sequences count as the
longest, as in PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch._subclasses.fake_tensor import is_fake
from torch.utils import flop_counter
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

Shape = Sequence[int]


def _products(name: str, scores: Callable[[dict[str, Any]], int], head_dims: int, value_dims: int) -> Any:
    """Return the FLOP formula of an operator with this many products over the head and value dimensions. Forward: S;
    and O. Backward: S, dQ and dK; and dP and dV."""

    def formula(*arguments: Any, out_val: Any = None) -> int:
        named = _named(name, arguments)
        return 2 * scores(named) * (head_dims * named["q"].shape[3] + value_dims * named["v"].shape[3])

    return formula


def _windows(named: dict[str, Any]) -> int:
    """Return the number of scores of blocks and their windows; partial blocks count as full."""
    B, H, N, _ = named["q"].shape
    return B * H * -(-N // named["q_block"]) * named["q_block"] * named["k_block"]


def _named(name: str, arguments: Sequence[Any]) -> dict[str, Any]:
    schema = getattr(torch.ops.tilewise, name).default._schema
    return {x.name: value for x, value in zip(schema.arguments, arguments, strict=False)}


def _scores(named: dict[str, Any]) -> int:
    """Return the number of scores over all batch elements and heads."""
    q, keys, cu_q, cu_k, used = named["q"], named["v"].shape[2], named["cu_q"], named["cu_k"], named["used_k"]
    if cu_q is None:
        return prod(q.shape[:3]) * keys
    if cu_q.is_meta or is_fake(cu_q):
        return q.shape[1] * (cu_q.shape[0] - 1) * named["max_q"] * named["max_k"]
    return q.shape[1] * int((cu_q.diff() * (cu_k.diff() if used is None else used)).sum())


def _matmul(a: Shape, b: Shape, *others: Any, **more: Any) -> int:
    return 2 * prod(torch.broadcast_shapes(a[:-2], b[:-2])) * a[-2] * a[-1] * b[-1]


_FORMULAS: dict[str, Any] = {
    "attention": _products("attention", _scores, 1, 1),
    "attention_backward": _products("attention_backward", _scores, 3, 2),
    "attention_tangents": _products("attention_tangents", _scores, 3, 3),
    "attention_second": _products("attention_second", _scores, 10, 6),
    "matmul": _matmul,
    "window_attention": _products("window_attention", _windows, 1, 1),
    "window_attention_backward": _products("window_attention_backward", _windows, 3, 2),
}


def tell(names: Sequence[str]) -> None:
    """Register the FLOP formulas of the operators ``names``, also with active counters."""
    registries = [flop_counter.flop_registry]
    for mode in _get_current_dispatch_mode_stack():
        counter = getattr(mode, "counter", None)
        if isinstance(counter, flop_counter.FlopCounterMode):  # it has a copy of the registry
            registries.append(counter.flop_registry)
    for name in _FORMULAS.keys() & names:
        operator = getattr(torch.ops.tilewise, name)
        if operator not in flop_counter.flop_registry:
            flop_counter.register_flop_formula(operator, get_raw=name != "matmul")(_FORMULAS[name])
        for registry in registries:
            registry.setdefault(operator, flop_counter.flop_registry[operator])
