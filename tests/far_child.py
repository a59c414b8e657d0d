"""Calls whose tensors have elements 2³¹ apart, in the interpreter's process; only what is written takes memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

STEP = 2**30  # an int32, of which the double is none
Compared = list[tuple[Tensor, Tensor]]


def far(x: Tensor, axis: int, step: int = STEP) -> Tensor:
    """The same numbers, with neighbours along an axis ``step`` elements apart."""
    strides = list(x.movedim(axis, -1)[..., 0].contiguous().stride())
    strides.insert(axis, step)
    size = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, strides, strict=True))
    return torch.empty(size, dtype=x.dtype).as_strided(x.shape, strides).copy_(x)


def compared(call: Callable[..., Tensor], inputs: Sequence[Tensor], at: int, *place: int) -> Compared:
    """Results and gradients of a call with input ``at`` far along an axis, and with it as it is."""
    moved = [far(x, *place) if n == at else x for n, x in enumerate(inputs)]
    return list(zip(_results(call, moved), _results(call, inputs), strict=True))


def _results(call: Callable[..., Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    o = call(*leaves)
    return [o.detach(), *torch.autograd.grad(o.float().square().sum(), leaves)]


def _normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).half()


def attention(at: int) -> Compared:
    """q, k, v or a bias, along the head dimension or the keys."""
    import tilewise

    D = 3 if at < 3 else 8
    inputs = _normal(1, 2, 9, D), _normal(1, 2, 3, D), _normal(1, 2, 3, D) + 1, _normal(1, 2, 9, 3)
    return compared(lambda q, k, v, b: tilewise.attention(q, k, v, bias=b, backend="triton"), inputs, at, 3)


def values() -> Compared:
    """Of a bias by distance so many entries that the last are far, though neighbours are not."""
    import tilewise
    from tilewise.bias import RelativeBias

    def call(q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
        return tilewise.attention(q, k, v, bias=RelativeBias(x, lo=-1090, outside="clamp"), backend="triton")

    return compared(call, [*(_normal(1, 1, 9, 8) for _ in range(3)), _normal(1, 1, 9, 1100)], 3, 3, 2**21)


def windows(at: int) -> Compared:
    """q, k, v along the head dimension."""
    from tilewise.integrations.evoformer import window_pair_attention

    def call(*tensors: Tensor) -> Tensor:
        found: Any = window_pair_attention(*tensors, None, 4, 8, backend="triton")
        return found

    return compared(call, [*(_normal(1, 1, 8, 3) for _ in range(3)), _normal(1, 1, 2, 4, 8)], at, 3)


def taken(axis: int) -> Compared:
    """Rows by an index."""
    from tilewise.topk.kernels import take_rows

    x, keys = torch.arange(9, dtype=torch.int8).view(1, 1, 3, 3), torch.tensor([2, 0], dtype=torch.int32)
    expected = x.index_select(2, keys)
    return [(take_rows(far(x, axis), keys.view(1, 1, 1, 2)), expected)]


def summed() -> Compared:
    """Gradients of rows by an index, along the head dimension."""
    from tilewise.topk.kernels import places_of, sum_rows

    grad, keys = torch.arange(6.0).view(1, 1, 2, 3).half(), torch.tensor([[[[2, 0]]]], dtype=torch.int32)
    expected = torch.zeros(1, 1, 3, 3).index_copy(2, keys.flatten().long(), grad.float())
    return [(sum_rows(far(grad, 3), places_of(keys, 3), (1, 1, 3, 3), torch.float32, False), expected)]
