"""From tensors to the backend that computes their product; what needs no product is done here."""

from __future__ import annotations

import importlib
import math

import torch
from torch import Tensor

from tilewise.blocks.matmul import cpu
from tilewise.blocks.matmul.plan import Choice, choose
from tilewise.blocks.matmul.problem import Product, broadcast, describe, output_shape

_plans: dict[tuple, tuple[Product, Choice] | None] = {}


def run(
    a: Tensor, b: Tensor, c: Tensor | None, alpha: float, beta: float, summed: tuple[int, ...], backend: str
) -> Tensor:
    """``alpha * (a @ b summed over the batch axes in summed) + beta * c``."""
    if beta == 0.0:
        c = None
    if alpha == 0.0 or 0 in a.shape or 0 in b.shape:
        return _without_product(a, b, c, beta, summed)
    if a.device.type == "cpu" and backend in ("auto", "cpu"):
        return cpu.matmul(a, b, c, alpha, beta, summed)
    key = (_signature(a), _signature(b), None if c is None else _signature(c), summed, backend)
    if key not in _plans:
        if len(_plans) >= 4096:
            _plans.clear()
        product = describe(a, b, c, summed)
        _plans[key] = None if product is None else (product, choose(product, backend))
    plan = _plans[key]
    if plan is None:  # too many batch axes for a kernel: copies that have one
        flat = _two_batch_axes(a, b, c, summed)
        return run(*flat, alpha, beta, (-3,) if summed else (), backend).view(output_shape(a, b, summed))
    product, choice = plan
    module = importlib.import_module(f"tilewise.blocks.matmul.{choice.backend}")
    y = a.new_empty(output_shape(a, b, summed))
    module.matmul(product, a, b, c, y, alpha, beta)
    return y


def _signature(x: Tensor) -> tuple:
    """All that a Product reads of a tensor."""
    return x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16


def _two_batch_axes(
    a: Tensor, b: Tensor, c: Tensor | None, summed: tuple[int, ...]
) -> tuple[Tensor, Tensor, Tensor | None]:
    """a, b and c of shapes (kept, summed, rows, columns); copied where their memory does not allow a view."""
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
