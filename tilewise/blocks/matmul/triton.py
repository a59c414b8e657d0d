"""From a Product and its tensors to the launch of the Triton kernel."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewise.blocks.matmul.config import TritonConfig, c_spread, device_of, triton_config
from tilewise.blocks.matmul.problem import Product
from tilewise.blocks.matmul.triton_kernel import Compiled, Matrix, Sizes, matmul_kernel

INTERPRET = bool(triton.knobs.runtime.interpret)


class Prepared(NamedTuple):
    """All of a call but its tensors and factors."""

    programs: int
    strides: dict[str, tuple[int, int, int, int]]
    sizes: Sizes
    compiled: Compiled
    options: dict[str, int]


_prepared: dict[tuple, Prepared] = {}
_kernels: dict[tuple, Any] = {}  # the second launch of a kernel need not search for it, some 50 µs of host time


def matmul(product: Product, a: Tensor, b: Tensor, c: Tensor | None, y: Tensor, alpha: float, beta: float) -> None:
    precision = _precision(product.dtype)
    key = (product, a.device.index, precision)
    ready = _prepared.get(key)
    if ready is None:
        if len(_prepared) >= 4096:
            _prepared.clear()
            _kernels.clear()
        ready = _prepared[key] = _prepare(product, triton_config(product, precision), precision)
    tensors = {"a": a, "b": b, "c": c, "y": y}
    args = (*(Matrix(x, *ready.strides[name]) for name, x in tensors.items()), alpha, beta, ready.sizes, ready.compiled)
    with device_of(a):
        kernel = _kernels.get(key)
        if kernel is not None:
            kernel[ready.programs, 1, 1](*args)
        else:
            kernel = matmul_kernel[(ready.programs,)](*args, **ready.options)
            if not INTERPRET:
                _kernels[key] = kernel


def _precision(dtype: torch.dtype) -> str:
    """float32 products follow torch's own setting for matrix products; 16-bit ones have no choice."""
    return "tf32" if dtype != torch.float32 or torch.backends.cuda.matmul.allow_tf32 else "ieee"


def _prepare(product: Product, config: TritonConfig, precision: str) -> Prepared:
    p = product
    first, second = p.batch
    strides = {
        "a": (first.a, second.a, *p.a_strides),
        "b": (first.b, second.b, *p.b_strides),
        "c": (first.c, second.c, *(p.c_strides or (0, 0))),
        "y": (first.y, second.y, p.cols, 1),
    }
    values = Compiled(
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        GROUP_M=8,
        SUMMED=max(p.summed) > 1,
        EVEN_K=p.inner % config.block_k == 0,
        WIDE=any(256 * max(s[2:]) >= 2**31 for s in strides.values()),
        C=c_spread(p),
        PRECISION=precision,
    )
    kept0, kept1 = p.kept
    tiles = triton.cdiv(p.rows, config.block_m) * triton.cdiv(p.cols, config.block_n)
    return Prepared(
        programs=tiles * kept0 * kept1,
        strides=strides,
        sizes=Sizes(p.rows, p.cols, p.inner, kept1, *p.summed),
        compiled=Compiled(*(tl.constexpr(x) for x in values)),
        options={"num_warps": config.num_warps, "num_stages": config.num_stages},
    )
