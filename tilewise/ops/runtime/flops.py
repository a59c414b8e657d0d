"""FLOPs of the operators for `torch.utils.flop_counter`, counted as PyTorch counts those of its own attention: every
score, hidden or not, and products alone. `tilewise.explain` counts the scores that the band leaves visible.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch.utils import flop_counter
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

Shape = Sequence[int]


def _attention(q: Shape, k: Shape, v: Shape, *others: Any, **more: Any) -> int:
    """S over the head dimension, O over the value dimension."""
    return 2 * prod(q[:3]) * v[2] * (q[3] + v[3])


def _attention_backward(do: Shape | None, dlse: Shape | None, q: Shape, k: Shape, v: Shape, *others, **more) -> int:
    """S, dQ and dK over the head dimension, dP and dV over the value dimension, whoever needs them."""
    return 2 * prod(q[:3]) * v[2] * (3 * q[3] + 2 * v[3])


def _matmul(a: Shape, b: Shape, *others: Any, **more: Any) -> int:
    return 2 * prod(torch.broadcast_shapes(a[:-2], b[:-2])) * a[-2] * a[-1] * b[-1]


_FORMULAS: dict[str, Any] = {"attention": _attention, "attention_backward": _attention_backward, "matmul": _matmul}


def tell(names: Sequence[str]) -> None:
    """Register the formulas of those of the operators ``names`` that have one, with counters at work too."""
    registries = [flop_counter.flop_registry]
    for mode in _get_current_dispatch_mode_stack():
        counter = getattr(mode, "counter", None)
        if isinstance(counter, flop_counter.FlopCounterMode):  # it has a copy, perhaps from before
            registries.append(counter.flop_registry)
    for name in _FORMULAS.keys() & names:
        operator = getattr(torch.ops.tilewise, name)
        if operator not in flop_counter.flop_registry:
            flop_counter.register_flop_formula(operator)(_FORMULAS[name])
        for registry in registries:
            registry.setdefault(operator, flop_counter.flop_registry[operator])
