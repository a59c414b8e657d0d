"""The operators ``tilewise::softmax`` and ``tilewise::softmax_backward``, and how they meet autograd.

As in `tilewise.autograd`, an eager call on plain tensors leaves the dispatcher out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.blocks.eager import is_eager, refuse_tangents
from tilewise.blocks.softmax import BiasLike, Needs

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
        from tilewise.blocks.softmax.triton import launch

        return launch.forward(x, scale, bias, mask, dim)
    from tilewise.blocks.softmax import cpu

    return cpu.forward(x, scale, bias, mask, dim)


def _forward_fake(x, scale, bias, mask, dim):
    return torch.empty_like(x)


def _backward(dp, p, scale, bias_shape, bias_dtype, dim, wanted):
    needs = Needs(*wanted)
    bias = None if bias_shape is None else BiasLike(tuple(bias_shape), bias_dtype)
    if p.numel() == 0:
        dx = torch.empty_like(p) if needs.x else None
        dbias = p.new_zeros(bias.shape, dtype=bias.dtype) if needs.bias and bias is not None else None
    elif p.is_cuda:
        from tilewise.blocks.softmax.triton import launch

        dx, dbias = launch.backward(dp, p, scale, bias, dim, needs)
    else:
        from tilewise.blocks.softmax import cpu

        dx, dbias = cpu.backward(dp, p, scale, bias, dim, needs)
    # An operator returns tensors only: an empty one stands for a gradient that nobody needs.
    return tuple(p.new_empty(0) if g is None else g for g in (dx, dbias))


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
    ctx.bias_shape, ctx.bias_dtype = (None, None) if bias is None else (list(bias.shape), bias.dtype)
    ctx.eager = False
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output)


def _autograd_backward(ctx, dp):
    if dp is None:
        return (None,) * 5
    needs = [ctx.needs_input_grad[0], ctx.needs_input_grad[2]]
    # An eager call's backward is eager too, unless it is to be differentiated: then the operator says that it cannot.
    backward = _backward if ctx.eager and not torch.is_grad_enabled() else torch.ops.tilewise.softmax_backward
    (p,) = ctx.saved_tensors
    # resolve_neg: a kernel would not see the sign of a gradient whose memory holds its negative
    dx, dbias = backward(dp.resolve_neg(), p, ctx.scale, ctx.bias_shape, ctx.bias_dtype, ctx.dim, needs)
    return dx if needs[0] else None, None, dbias if needs[1] else None, None, None


def _no_second_derivative(ctx, *grads):
    raise NotImplementedError("tilewise.softmax has no second derivative: its backward cannot be differentiated")


torch.library.register_autograd("tilewise::softmax", _autograd_backward, setup_context=_setup_context, lib=_library)
torch.library.register_autograd("tilewise::softmax_backward", _no_second_derivative, lib=_library)


class _EagerSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *args):
        output = _forward(*args)
        _setup_context(ctx, args, output)
        ctx.eager = True
        return output

    @staticmethod
    def backward(ctx, dp):
        return _autograd_backward(ctx, dp)


def softmax_op(x: Tensor, scale: float, bias: Tensor | None, mask: Tensor | None, dim: int) -> Tensor:
    """P of a call that is checked; differentiable in x and bias."""
    args: tuple = (x, scale, bias, mask, dim)
    p: Tensor
    if is_eager(x, bias, mask):
        p = _EagerSoftmax.apply(*args)
    else:
        refuse_tangents("tilewise.softmax", x, bias)
        p = torch.ops.tilewise.softmax(*args)
    return p
