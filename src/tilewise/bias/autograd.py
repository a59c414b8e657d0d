"""Vectors of T5's table and ALiBi's slopes in eager calls, as one node of autograd's graph.

Autograd would keep eight nodes for the operations of `Rule.composed`, and run some twenty operations backward. The
vector is linear in the table or slopes, so that its gradient does not need their values. With Triton on a GPU forward
and backward are one kernel each: `tilewise.backends.kernels.vectors`.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.compiler import is_compiling

from tilewise.backends import has_triton
from tilewise.operator.eager import apply_of, is_differentiated, is_eager, is_eager_backward


class Rule(Protocol):
    """Linear map from ``x`` (a table or slopes) to a Toeplitz vector; ``x`` is not part of the rule."""

    def composed(self, x: Tensor, first: int, width: int) -> Tensor:
        """Return (B|1, H|1, 1, width), float32 or float64, for distances from ``first`` on; differentiable."""

    def vector(self, x: Tensor, first: int, width: int) -> Tensor:
        """Return the vector of `composed`, computed by a kernel."""

    def gradient(self, gradient: Tensor, first: int, x: Tensor) -> Tensor:
        """Return the gradient of x, in its dtype, from that of the vector; on the CPU, or by a kernel."""


def is_node(x: Tensor) -> bool:
    """True if the call is eager, without forward AD, and a CPU or kernel implementation exists."""
    return is_eager((x,)) and (x.is_cpu or _has_kernels(x))


def _has_kernels(x: Tensor) -> bool:
    return x.is_cuda and x.dtype != torch.float64 and has_triton()


def vector_of(rule: Rule, x: Tensor, first: int, width: int) -> Tensor:
    """Return the vector of a rule for one distance or more; requires `is_node`."""
    if is_differentiated((x,)):
        return _apply(x, rule, first, width)
    return _made(rule, x, first, width)


def _made(rule: Rule, x: Tensor, first: int, width: int) -> Tensor:
    return rule.composed(x, first, width) if x.is_cpu else rule.vector(x, first, width)


class _Vector(torch.autograd.Function):
    """``x, rule, first, width -> vector``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rule: Rule, first: int, width: int) -> Tensor:
        ctx.rule, ctx.first, ctx.width = rule, first, width
        ctx.like = x.detach()  # only its layout is used, so in-place changes are allowed
        return _made(rule, x, first, width)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rule, first, like = ctx.rule, ctx.first, ctx.like
        if is_eager_backward(gradient):
            return rule.gradient(gradient, first, like), None, None, None
        if is_compiling():  # compiled autograd, which traces no torch.autograd.grad
            _, gradient_of = torch.func.vjp(lambda x: rule.composed(x, first, ctx.width), like)
            return gradient_of(gradient)[0], None, None, None
        with torch.enable_grad():
            x = like.detach().requires_grad_()
            vector = rule.composed(x, first, ctx.width)
            (found,) = torch.autograd.grad(vector, x, gradient, create_graph=True)
        return found, None, None, None


_apply = apply_of(_Vector)
