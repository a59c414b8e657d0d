"""Dispatch of a product to its backend; products that are 0 or empty are handled here."""

from __future__ import annotations

import importlib
import math

import torch
from torch import Tensor

from tilewise.backends import address, device_of, float32_precision
from tilewise.cache import calls
from tilewise.ops.gemm import cpu
from tilewise.ops.gemm.plan import choose
from tilewise.ops.gemm.problem import broadcast, describe, output_shape


def run(
    a: Tensor, b: Tensor, c: Tensor | None, alpha: float, beta: float, summed: tuple[int, ...], backend: str
) -> Tensor:
    """Return ``alpha * (a @ b summed over the batch axes in summed) + beta * c``."""
    if beta == 0.0:
        c = None
    if alpha == 0.0 or 0 in a.shape or 0 in b.shape:
        return _without_product(a, b, c, beta, summed)
    if a.is_cpu and backend.split()[0] in ("auto", "cpu"):
        return cpu.matmul(a, b, c, alpha, beta, summed)
    key = _key(a, b, c, alpha, beta, summed, backend)
    known = calls.get(key)
    if known is None:
        known = calls.put(key, _prepare(a, b, c, alpha, beta, summed, backend))
    shape, launch = known
    if launch is None:
        flat = _two_batch_axes(a, b, c, summed)
        return run(*flat, alpha, beta, (-3,) if summed else (), backend).view(shape)
    y = a.new_empty(shape)
    with device_of(a):
        launch(a, b, c, y)
    return y


def ran_before(a: Tensor, b: Tensor, c: Tensor | None, alpha: float, beta: float, backend: str) -> bool:
    """True if a call like this one has passed all checks and has a prepared launch."""
    if a is None or b is None or beta == 0.0 or not (a.layout is b.layout is torch.strided):
        return False
    if c is not None and c.layout is not torch.strided:
        return False
    return calls.get(_key(a, b, c, alpha, beta, (), backend)) is not None


def _key(
    a: Tensor, b: Tensor, c: Tensor | None, alpha: float, beta: float, summed: tuple[int, ...], backend: str
) -> tuple:
    """Return all that a Product and its launch read of a call."""
    # one expression: a function call costs as much as reading a tensor
    return (
        "matmul", a.shape, a.stride(), a.dtype, a.device, address(a) % 16 == 0,
        b.shape, b.stride(), b.dtype, b.device, address(b) % 16 == 0,
        None if c is None else (c.shape, c.stride(), c.dtype, c.device, address(c) % 16 == 0),
        alpha, beta, summed, backend, float32_precision(a.dtype),
    )  # fmt: skip


def _prepare(
    a: Tensor, b: Tensor, c: Tensor | None, alpha: float, beta: float, summed: tuple[int, ...], backend: str
) -> tuple:
    """Return the shape of the result, and its launch; None if the kernels cannot read the operands in place."""
    shape = output_shape(a, b, summed)
    product = describe(a, b, c, summed)
    if product is None:
        return shape, None
    module = importlib.import_module(f"tilewise.ops.gemm.{choose(product, backend).backend}")
    return shape, module.prepare(product, a, b, c, a.new_empty(shape, device="meta"), alpha, beta)


def _two_batch_axes(
    a: Tensor, b: Tensor, c: Tensor | None, summed: tuple[int, ...]
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return a, b and c of shapes (kept, summed, rows, columns), copied if a view is not possible."""
    batch, shape = broadcast(a, b), output_shape(a, b, summed)
    depth = len(batch) + 2
    reduced = [axis + depth for axis in summed]
    order = [*(i for i in range(depth - 2) if i not in reduced), *reduced, depth - 2, depth - 1]
    kept = math.prod(n for i, n in enumerate(batch) if i not in reduced)

    def flat(x: Tensor) -> Tensor:
        return x.permute(order).reshape(kept, -1, *x.shape[-2:])

    a, b = (flat(x.expand(*batch, *x.shape[-2:])) for x in (a, b))
    return a, b, None if c is None else flat(c.expand(shape))


def _without_product(a: Tensor, b: Tensor, c: Tensor | None, beta: float, summed: tuple[int, ...]) -> Tensor:
    shape = output_shape(a, b, summed)
    if c is None:
        return a.new_zeros(shape)
    wide = torch.float32 if a.dtype.itemsize == 2 else a.dtype
    return a.new_empty(shape).copy_(c.to(wide) * beta)
