"""The operator ``tilewise::matmul`` and its autograd: the gradients of a product are products.

The operator also sums over batch axes (``summed``), as the gradient of a broadcast operand requires: dA = Σ_r dY[r]
B[r]ᵀ is one product, accumulated in float32. Its own gradient requires nothing more, so derivatives of any order are
this operator. An eager call uses an autograd.Function instead of the dispatcher, which takes tens of microseconds of
host time to reach a Python kernel.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import profiler

from tilewise.operator import onnx as plain
from tilewise.operator.custom_op import Operator
from tilewise.operator.eager import apply_of, is_batched, is_differentiated, is_eager
from tilewise.operator.tools import announce, recorded
from tilewise.ops.gemm.problem import BACKENDS, broadcast, output_shape
from tilewise.ops.gemm.run import run


class _MatmulCall(NamedTuple):
    a: Tensor
    b: Tensor
    c: Tensor | None
    alpha: float
    beta: float
    summed: list[int]
    backend: str


def _real(call: _MatmulCall) -> Tensor:
    return run(call.a, call.b, call.c, call.alpha, call.beta, tuple(call.summed), call.backend)


def _fake(call: _MatmulCall) -> Tensor:
    return call.a.new_empty(output_shape(call.a, call.b, tuple(call.summed)))


def _setup(ctx: Any, call: tuple, output: Tensor) -> None:
    a, b, c, ctx.alpha, ctx.beta, _, ctx.backend = call
    ctx.c = None if c is None else (tuple(c.shape), c.dtype)
    # an operand is saved only for the gradient of the other
    ctx.a_shape, ctx.b_shape = tuple(a.shape), tuple(b.shape)
    needs_a, needs_b = ctx.needs_input_grad[:2]
    ctx.save_for_backward(a if needs_b else None, b if needs_a else None)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    """Return dA = alpha · dY Bᵀ, dB = alpha · Aᵀ dY and dC = beta · dY, each summed over broadcast axes."""
    a, b = ctx.saved_tensors
    da = db = dc = None
    if ctx.needs_input_grad[0]:
        da = _product_for(ctx, dy, b.mT, ctx.a_shape)
    if ctx.needs_input_grad[1]:
        db = _product_for(ctx, a.mT, dy, ctx.b_shape)
    if ctx.c is not None and ctx.needs_input_grad[2]:
        dc = _sum_to(dy, ctx.beta, *ctx.c)
    return da, db, dc


def _product_for(ctx, x: Tensor, y: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return alpha · x @ y, the gradient of an operand of ``shape``, summed over its broadcast axes."""
    batch = broadcast(x, y)
    missing = len(batch) + 2 - len(shape)
    own = (1,) * missing + shape[:-2]
    summed = [i - len(batch) - 2 for i, (n, m) in enumerate(zip(batch, own, strict=True)) if n != 1 and m == 1]
    # use the forward's backend if it can read dY's layout
    backend = f"{ctx.backend} or auto" if ctx.backend in BACKENDS else ctx.backend
    d = matmul_op(x, y, None, ctx.alpha, 0.0, backend, summed)
    # axes that the forward summed are expanded in the gradient
    return d.reshape(d.shape[missing:]).expand(shape)


def _sum_to(dy: Tensor, beta: float, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return beta · dY in c's dtype, summed in float32 over the axes that c broadcasts."""
    if beta == 0.0:  # C was not read: NaN in dY does not matter
        return dy.new_zeros(shape, dtype=dtype)
    missing = dy.dim() - len(shape)
    axes = [*range(missing), *(i + missing for i, n in enumerate(shape) if n == 1 and dy.shape[i + missing] != 1)]
    wide = torch.float32 if dy.dtype.itemsize == 2 else dy.dtype
    if axes:
        dy = dy.sum(axes, keepdim=True, dtype=wide)
    if beta != 1.0:  # a tensor with an axis takes part in type promotion: widened and multiplied in one pass
        dy = dy * (beta if dy.dtype in (dtype, wide) else dy.new_full((1,), beta, dtype=wide))
    dy = dy.to(dtype)
    # For equal shapes return dY itself, as PyTorch's addmm does, not a view: autograd treats a view as unshared memory,
    # and c.grad would alias the incoming gradient.
    return dy if dy.shape == shape else dy.reshape(shape)


def _plain(call: _MatmulCall) -> Tensor:
    return plain.matmul(call.a, call.b, call.c, call.alpha, call.beta)


MATMUL = Operator("matmul", (_MatmulCall,), 1, _real, _fake, setup=_setup, backward=_backward, plain=_plain)
announce("matmul")


class _EagerMatmul(torch.autograd.Function):
    """Autograd function with the arguments and the result of the operator."""

    @staticmethod
    def forward(ctx, *call):
        output = _eager(*call)
        _setup(ctx, call, output)
        return output

    @staticmethod
    def backward(ctx, dy):
        return *_backward(ctx, dy), None, None, None, None

    jvp = staticmethod(MATMUL.refuse_tangents)


_apply = apply_of(_EagerMatmul)


def _eager(a, b, c, alpha, beta, summed, backend):
    if profiler._is_profiler_enabled:
        return recorded("tilewise::matmul", (a, b, c), run, a, b, c, alpha, beta, tuple(summed), backend)
    return run(a, b, c, alpha, beta, tuple(summed), backend)


def matmul_op(
    a: Tensor, b: Tensor, c: Tensor | None, alpha: float, beta: float, backend: str, summed: list[int] | None = None
) -> Tensor:
    """Call the operator with checked arguments; ``summed``: batch axes, counted from the end of the result."""
    if is_eager((a, b, c)) and not is_batched(a, b):
        return eager_matmul(a, b, c, alpha, beta, summed or [], backend)
    if summed:
        return MATMUL(a, b, c, alpha, beta, summed, backend)
    return MATMUL.traced_call(a, b, c, alpha, beta, [], backend)


def eager_matmul(
    a: Tensor, b: Tensor, c: Tensor | None, alpha: float, beta: float, summed: list[int], backend: str
) -> Tensor:
    """Return `matmul_op` of operands that pass `is_eager`."""
    if is_differentiated((a, b, c)):
        return _apply(a, b, c, alpha, beta, summed, backend)
    return _eager(a, b, c, alpha, beta, summed, backend)
