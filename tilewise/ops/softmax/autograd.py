"""The operators ``tilewise::softmax`` and ``tilewise::softmax_backward``, and how they meet autograd.

As in `tilewise.autograd`, an eager call on plain tensors leaves the dispatcher out.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import profiler
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from tilewise.ops.runtime import exports_onnx, plain, recorded
from tilewise.ops.runtime.eager import is_eager, refuse_tangents
from tilewise.ops.softmax import BiasLike, Needs, cpu

Gradients = tuple[Tensor | None, Tensor | None]  # of x and of bias

_library = torch.library.Library("tilewise", "FRAGMENT")
_library.define("softmax(Tensor x, float scale, Tensor? bias, Tensor? mask, int dim) -> Tensor")
_library.define(
    "softmax_backward(Tensor dp, Tensor p, float scale, SymInt[]? bias_shape, ScalarType? bias_dtype, int dim, "
    "bool[] needs) -> (Tensor, Tensor)"
)


def _forward(x: Tensor, scale: float, bias: Tensor | None, mask: Tensor | None, dim: int) -> Tensor:
    if x.numel() == 0:
        return torch.empty_like(x)
    if x.is_cuda:
        from tilewise.ops.softmax.triton import launch

        return launch.forward(x, scale, bias, mask, dim)
    return cpu.forward(x, scale, bias, mask, dim)


def _forward_fake(x, scale, bias, mask, dim):
    return torch.empty_like(x)


def _gradients(dp: Tensor, p: Tensor, scale: float, bias: BiasLike | None, dim: int, needs: Needs) -> Gradients:
    if p.numel() == 0:
        dx = torch.empty_like(p) if needs.x else None
        dbias = p.new_zeros(bias.shape, dtype=bias.dtype) if needs.bias and bias is not None else None
        return dx, dbias
    if p.is_cuda:
        from tilewise.ops.softmax.triton import launch

        return launch.backward(dp, p, scale, bias, dim, needs)
    return cpu.backward(dp, p, scale, bias, dim, needs)


def _backward(dp, p, scale, bias_shape, bias_dtype, dim, wanted):
    bias = None if bias_shape is None else BiasLike(tuple(bias_shape), bias_dtype)
    # An operator returns tensors only: an empty one stands for a gradient that nobody needs.
    return tuple(p.new_empty(0) if g is None else g for g in _gradients(dp, p, scale, bias, dim, Needs(*wanted)))


def _backward_fake(dp, p, scale, bias_shape, bias_dtype, dim, wanted):
    x, bias = wanted
    return (
        torch.empty_like(p) if x else p.new_empty(0),
        p.new_empty(bias_shape, dtype=bias_dtype) if bias else p.new_empty(0),
    )


for _name, _real, _fake in (("softmax", _forward, _forward_fake), ("softmax_backward", _backward, _backward_fake)):
    _library.impl(_name, _real, "CompositeExplicitAutograd")
    torch.library.register_fake(f"tilewise::{_name}", _fake, lib=_library)


def _setup_context(ctx, inputs, output):
    _, ctx.scale, bias, _, ctx.dim = inputs
    ctx.bias = _like(bias)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output)


def _like(bias: Tensor | None) -> BiasLike | None:
    return None if bias is None else BiasLike(tuple(bias.shape), bias.dtype)


def _autograd_backward(ctx, dp):
    if dp is None:
        return (None,) * 5
    needs = Needs(ctx.needs_input_grad[0], ctx.needs_input_grad[2])
    (p,) = ctx.saved_tensors
    dx, dbias = _by_operator(dp, p, ctx.scale, ctx.bias, ctx.dim, needs)
    return dx, None, dbias, None, None


def _by_operator(dp: Tensor, p: Tensor, scale: float, bias: BiasLike | None, dim: int, needs: Needs) -> Gradients:
    like = (None, None) if bias is None else (list(bias.shape), bias.dtype)
    # resolve_neg: a kernel would not see the sign of a gradient whose memory holds its negative
    dx, dbias = torch.ops.tilewise.softmax_backward(dp.resolve_neg(), p, scale, *like, dim, list(needs))
    return dx if needs.x else None, dbias if needs.bias else None


def _no_second_derivative(ctx, *grads):
    raise NotImplementedError("tilewise.softmax has no second derivative: its backward cannot be differentiated")


torch.library.register_autograd("tilewise::softmax", _autograd_backward, setup_context=_setup_context, lib=_library)
torch.library.register_autograd("tilewise::softmax_backward", _no_second_derivative, lib=_library)


class _EagerSoftmax(torch.autograd.Function):
    """``x, bias, call -> P``, where call is (scale, mask, dim)."""

    @staticmethod
    def forward(ctx, x, bias, call):
        scale, mask, dim = call
        if profiler._is_profiler_enabled:
            p = recorded("tilewise::softmax", (x, bias, mask), _forward, x, scale, bias, mask, dim)
        else:
            p = _forward(x, scale, bias, mask, dim)
        ctx.scale, ctx.bias, ctx.dim = scale, _like(bias), dim
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(p)
        return p

    @staticmethod
    def backward(ctx, dp):
        if dp is None:
            return None, None, None
        (p,) = ctx.saved_tensors
        x_needs, bias_needs, _ = ctx.needs_input_grad
        arguments = dp.resolve_neg(), p, ctx.scale, ctx.bias, ctx.dim, Needs(x_needs, bias_needs)
        if torch.is_grad_enabled() or is_in_torch_dispatch_mode():
            # Watched, or to be differentiated, of which the operator says that it cannot.
            dx, dbias = _by_operator(*arguments)
        elif profiler._is_profiler_enabled:
            dx, dbias = recorded("tilewise::softmax_backward", (dp, p), _gradients, *arguments)
        else:
            dx, dbias = _gradients(*arguments)
        return dx, dbias, None


# _EagerSoftmax.apply without its steps for functorch, which `is_eager` leaves to the dispatcher.
_apply = super(torch.autograd.Function, _EagerSoftmax).apply


def softmax_op(x: Tensor, scale: float, bias: Tensor | None, mask: Tensor | None, dim: int) -> Tensor:
    """P of a call that is checked; differentiable in x and bias."""
    p: Tensor
    if is_eager(x, bias, mask):
        p = _apply(x, bias, (scale, mask, dim))
    else:
        refuse_tangents("tilewise.softmax", x, bias)
        arguments = (x, scale, bias, mask, dim)
        p = plain.softmax(*arguments) if exports_onnx() else torch.ops.tilewise.softmax(*arguments)
    return p
