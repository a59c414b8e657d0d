"""What of test_bias_vectors.py runs in the interpreter's process or in a compiler's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewise.bias.toeplitz import AlibiRule, T5Rule


def by_kernels(rule: T5Rule | AlibiRule, x: Tensor, first: int, width: int, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """A rule's vector, and x's gradient from the vector's."""
    from tilewise.backends.kernels import vectors

    if isinstance(rule, T5Rule):
        vector, bounds = rule.vector(x, first, width), rule.bounds(x.device)
        return vector, vectors.table_gradient(gradient, bounds, first, x)
    signed, two = rule.form == "signed", x if x.dim() == 2 else x[None]
    return rule.vector(x, first, width), vectors.slopes_gradient(gradient, first, two, signed).view(x.shape)


def compile_vectors(heads: int, dtype: torch.dtype) -> list[Any]:
    """The four kernels at 4,096 queries and keys."""
    import aot_child

    def meta(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    from tilewise.backends.kernels import vectors

    aot_child._launched.clear()
    padded = meta(1, heads, 1, 8703, dtype=torch.float32)[..., 256:-256]
    vectors.table_vector(meta(32, heads), meta(191, dtype=torch.int64), -95, -4095, 8191)
    vectors.table_gradient(padded, meta(32, 2, dtype=torch.int32), -4095, meta(32, heads))
    vectors.slopes_vector(meta(1, heads), -4095, 8191, False)
    vectors.slopes_gradient(padded, -4095, meta(1, heads), False)
    return [aot_child._report(launched, 227 * 1024) for launched in aot_child._launched]
