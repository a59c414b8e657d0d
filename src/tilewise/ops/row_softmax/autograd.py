"""The operators ``tilewise::softmax`` and ``tilewise::softmax_backward``, and their autograd.

As in `tilewise.operator.autograd`, an eager call on plain tensors does not use the dispatcher.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import profiler

from tilewise.operator import onnx as plain
from tilewise.operator.custom_op import Operator
from tilewise.operator.eager import apply_of, is_differentiated, is_eager, is_eager_backward
from tilewise.operator.tools import recorded
from tilewise.ops.row_softmax import BiasLike, SoftmaxNeeds, cpu

Gradients = tuple[Tensor | None, Tensor | None]  # of x and of bias


class _SoftmaxCall(NamedTuple):
    x: Tensor
    scale: float
    bias: Tensor | None
    mask: Tensor | None
    dim: int


class _BackwardCall(NamedTuple):
    dp: Tensor
    p: Tensor
    scale: float
    bias_shape: list[int] | None
    bias_dtype: torch.dtype | None
    dim: int
    needs: list[bool]  # see `SoftmaxNeeds`


def _forward(x: Tensor, scale: float, bias: Tensor | None, mask: Tensor | None, dim: int) -> Tensor:
    if x.numel() == 0:
        return torch.empty_like(x)
    if x.is_cuda:
        from tilewise.ops.row_softmax.triton import launch

        return launch.forward(x, scale, bias, mask, dim)
    return cpu.forward(x, scale, bias, mask, dim)


def _gradients(dp: Tensor, p: Tensor, scale: float, bias: BiasLike | None, dim: int, needs: SoftmaxNeeds) -> Gradients:
    if p.numel() == 0:
        dx = torch.empty_like(p) if needs.x else None
        dbias = p.new_zeros(bias.shape, dtype=bias.dtype) if needs.bias and bias is not None else None
        return dx, dbias
    if p.is_cuda:
        from tilewise.ops.row_softmax.triton import launch

        return launch.backward(dp, p, scale, bias, dim, needs)
    return cpu.backward(dp, p, scale, bias, dim, needs)


def _like(bias: Tensor | None) -> BiasLike | None:
    return None if bias is None else BiasLike(tuple(bias.shape), bias.dtype)


# --- the operators, which the dispatcher calls ---


def _backward(call: _BackwardCall) -> tuple[Tensor, ...]:
    dp, p, scale, shape, dtype, dim, needs = call
    bias = None if shape is None or dtype is None else BiasLike(tuple(shape), dtype)
    # Operators return tensors only: an empty tensor stands for a gradient that is not required.
    return tuple(p.new_empty(0) if g is None else g for g in _gradients(dp, p, scale, bias, dim, SoftmaxNeeds(*needs)))


def _backward_fake(call: _BackwardCall) -> tuple[Tensor, Tensor]:
    p, (x, bias) = call.p, call.needs
    return (
        torch.empty_like(p) if x else p.new_empty(0),
        p.new_empty(call.bias_shape, dtype=call.bias_dtype) if bias else p.new_empty(0),  # type: ignore[arg-type]
    )


def _setup(ctx: Any, call: tuple, output: Tensor) -> None:
    _, ctx.scale, bias, _, ctx.dim = call
    ctx.bias = _like(bias)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output)


def _differentiate(ctx: Any, dp: Tensor | None) -> tuple[Tensor | None, ...]:
    if dp is None:
        return None, None, None
    (p,) = ctx.saved_tensors
    needs = SoftmaxNeeds(ctx.needs_input_grad[0], ctx.needs_input_grad[2])
    dx, dbias = _by_operator(dp.resolve_neg(), p, ctx.scale, ctx.bias, ctx.dim, needs)
    return dx, None, dbias


def _by_operator(
    dp: Tensor, p: Tensor, scale: float, bias: BiasLike | None, dim: int, needs: SoftmaxNeeds
) -> Gradients:
    shape, dtype = (None, None) if bias is None else (list(bias.shape), bias.dtype)
    dx, dbias = SOFTMAX_BACKWARD(dp, p, scale, shape, dtype, dim, list(needs))
    return dx if needs.x else None, dbias if needs.bias else None


SOFTMAX = Operator(
    "softmax", (_SoftmaxCall,), 1, lambda call: _forward(*call), lambda call: torch.empty_like(call.x),
    setup=_setup, backward=_differentiate, plain=lambda call: plain.softmax(*call),
)  # fmt: skip
SOFTMAX_BACKWARD = Operator(
    "softmax_backward", (_BackwardCall,), 2, _backward, _backward_fake, part_of="softmax"
)  # fmt: skip


# --- eager calls ---


class _EagerSoftmax(torch.autograd.Function):
    """Autograd function ``x, bias, call -> P``; call has the operator's arguments."""

    @staticmethod
    def forward(ctx, x, bias, call):
        p = _eager(*call)
        _setup(ctx, call, p)
        return p

    @staticmethod
    def backward(ctx, dp):
        if dp is None:
            return None, None, None
        (p,) = ctx.saved_tensors
        x_needs, bias_needs, _ = ctx.needs_input_grad
        # resolve_neg: a kernel reads memory and would miss a tensor's negative bit
        arguments = dp.resolve_neg(), p, ctx.scale, ctx.bias, ctx.dim, SoftmaxNeeds(x_needs, bias_needs)
        if not is_eager_backward(dp):
            return *_by_operator(*arguments), None
        if profiler._is_profiler_enabled:
            return *recorded("tilewise::softmax_backward", (dp, p), _gradients, *arguments), None
        return *_gradients(*arguments), None

    jvp = staticmethod(SOFTMAX.refuse_tangents)


_apply = apply_of(_EagerSoftmax)


def _eager(x: Tensor, scale: float, bias: Tensor | None, mask: Tensor | None, dim: int) -> Tensor:
    if profiler._is_profiler_enabled:
        return recorded("tilewise::softmax", (x, bias, mask), _forward, x, scale, bias, mask, dim)
    return _forward(x, scale, bias, mask, dim)


def softmax_op(x: Tensor, scale: float, bias: Tensor | None, mask: Tensor | None, dim: int) -> Tensor:
    """Return P of a checked call, differentiable in x and bias."""
    if is_eager((x, bias, mask)):
        if not is_differentiated((x, bias)):
            return _eager(x, scale, bias, mask, dim)
        return _apply(x, bias, (x, scale, bias, mask, dim))
    return SOFTMAX.traced_call(x, scale, bias, mask, dim)
