"""Launch of the Triton kernel for a Product and its tensors."""

from __future__ import annotations

import triton
from torch import Tensor

from tilewise.backends import float32_precision
from tilewise.backends.launch.launcher import Launch, Strided, constants
from tilewise.ops.gemm.config import c_spread, triton_config
from tilewise.ops.gemm.problem import Product
from tilewise.ops.gemm.triton_kernel import TritonGemmConstants, TritonGemmSizes, matmul_kernel


def prepare(product: Product, a: Tensor, b: Tensor, c: Tensor | None, y: Tensor, alpha: float, beta: float) -> Launch:
    """Return the launch of the kernel for tensors of this layout."""
    p = product
    precision = float32_precision(p.dtype)
    config = triton_config(p, precision)
    first, second = p.batch
    strides = {
        "a": (first.a, second.a, *p.a_strides),
        "b": (first.b, second.b, *p.b_strides),
        "c": (first.c, second.c, *(p.c_strides or (0, 0))),
        "y": (first.y, second.y, p.cols, 1),
    }
    values = TritonGemmConstants(
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
    sizes = TritonGemmSizes(p.rows, p.cols, p.inner, kept1, *p.summed)
    return Launch(
        matmul_kernel,
        tiles * kept0 * kept1,
        [Strided(None, *s) for s in strides.values()],
        (alpha, beta, sizes, constants(values)),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
