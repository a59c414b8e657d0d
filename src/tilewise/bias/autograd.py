"""The vector of T5's table or of ALiBi's slopes in eager calls: one node of autograd's graph.

Of the operations that a compiler or a transform sees, which `Rule.composed` are, autograd would
keep eight nodes, and run some twenty operations backwards. The vector is linear in the table and in the slopes: its
gradient needs none of their numbers. On a GPU with Triton either is one kernel: `tilewise.backends.kernels.vectors`.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.compiler import is_compiling

from tilewise.backends import has_triton
from tilewise.operator.eager import apply_of, in_forward_mode, is_differentiated, is_eager, is_eager_backward


class Rule(Protocol):
    """How a vector follows from ``x``, which is not a part of it."""

    def composed(self, x: Tensor, first: int, width: int) -> Tensor:
        """(B|1, H|1, 1, width), float32 or float64: what the distances from ``first`` on have; by operations that
        autograd differentiates."""

    def vector(self, x: Tensor, first: int, width: int) -> Tensor:
        """The same by a kernel."""

    def gradient(self, gradient: Tensor, first: int, x: Tensor) -> Tensor:
        """Of x, in its dtype, from the vector's; on the CPU, or by a kernel."""


def is_node(x: Tensor) -> bool:
    """Whether nobody looks on for whom the operations are to be seen one by one, and this module has what it takes."""
    return is_eager((x,)) and not in_forward_mode() and (x.is_cpu or _has_kernels(x))


def _has_kernels(x: Tensor) -> bool:
    return x.is_cuda and x.dtype != torch.float64 and has_triton()


def vector_of(rule: Rule, x: Tensor, first: int, width: int) -> Tensor:
    """A rule's vector of one distance or more, where `is_node`."""
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
        ctx.like = x.detach()  # for its layout alone; who changes the numbers in between is not refused
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
