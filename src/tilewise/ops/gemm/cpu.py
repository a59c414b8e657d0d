"""Product on the CPU: PyTorch's addmm and baddbmm, in float32 for 16-bit inputs."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tilewise.ops.gemm.problem import broadcast, output_shape


def matmul(a: Tensor, b: Tensor, c: Tensor | None, alpha: float, beta: float, summed: tuple[int, ...]) -> Tensor:
    """Return ``alpha * (a @ b summed over the axes in summed) + beta * c``. alpha is not 0, and no tensor is empty."""
    shape, dtype = output_shape(a, b, summed), a.dtype
    working = torch.float32 if dtype.itemsize == 2 else dtype
    a, b = a.to(working), b.to(working)
    c = None if c is None else c.to(working)
    M, N = shape[-2:]
    if summed:  # Σ_r A[r] B[r] is one product of longer rows and columns
        batch = broadcast(a, b)
        axes = [axis + len(shape) for axis in summed]
        count = math.prod(batch[axis] for axis in axes)
        a = a.expand(*batch, -1, -1).movedim(axes, list(range(-1 - len(axes), -1)))
        b = b.expand(*batch, -1, -1).movedim(axes, list(range(-2 - len(axes), -2)))
        kept = tuple(a.shape[: len(batch) - len(axes)])
        a, b = a.reshape(*kept, M, count * a.shape[-1]), b.reshape(*kept, count * b.shape[-2], N)
        c = None if c is None else c.expand(shape).reshape(*kept, M, N)
    with torch.autocast("cpu", enabled=False):  # autocast would round float32 operands
        y = _product(a, b, c, alpha, beta)
    return y.reshape(shape).to(dtype)


def _product(a: Tensor, b: Tensor, c: Tensor | None, alpha: float, beta: float) -> Tensor:
    kept, M, N = broadcast(a, b), a.shape[-2], b.shape[-1]
    if all(n == 1 for n in b.shape[:-2]):  # the whole batch shares one b
        a, b = a.expand(*kept, -1, -1).reshape(-1, a.shape[-1]), b.reshape(b.shape[-2:])
        start = a.new_zeros(()) if c is None else c.expand(*kept, M, N).reshape(-1, N)
        return torch.addmm(start, a, b, beta=0.0 if c is None else beta, alpha=alpha)
    a, b = (x.expand(*kept, -1, -1).flatten(0, -3) for x in (a, b))
    start = a.new_zeros(()) if c is None else c.expand(*kept, M, N).flatten(0, -3)
    return torch.baddbmm(start, a, b, beta=0.0 if c is None else beta, alpha=alpha)
