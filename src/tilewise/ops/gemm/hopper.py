"""Launch of the Hopper kernel for a Product and its tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tilewise.backends.gluon.tensors import DTYPES
from tilewise.backends.launch.launcher import Launch, Strided, bound, constants
from tilewise.ops.gemm.config import HopperConfig, c_first, c_spread, contiguous_axis, hopper_config
from tilewise.ops.gemm.hopper_kernel import HopperGemmConstants, HopperGemmSizes, TileSpread, matmul_kernel
from tilewise.ops.gemm.problem import Product


def prepare(
    product: Product,
    a: Tensor,
    b: Tensor,
    c: Tensor | None,
    y: Tensor,
    alpha: float,
    beta: float,
    config: HopperConfig | None = None,
) -> Launch:
    """Return the launch of the kernel for tensors of this layout."""
    p, k = product, config or hopper_config(product)
    spread_of_c, first = c_spread(p), c_first(p, alpha, beta)
    one, two = p.batch
    a_by_rows = contiguous_axis(p.a_strides, (p.rows, p.inner)) == "rows"
    b_by_rows = contiguous_axis(p.b_strides, (p.inner, p.cols)) == "rows"
    layout_of_c: Any = Strided(None, one.c, two.c, *(p.c_strides or (0, 0)))
    if c is not None and p.c_strides is not None and spread_of_c == "matrix":
        layout_of_c = _descriptor(c, "c", p, (p.rows, p.cols), (k.rows, k.block_n), p.c_strides)
    kept0, kept1 = p.kept
    m_tiles, n_tiles = -(-p.rows // (2 * k.rows)), -(-p.cols // k.block_n)
    tiles = m_tiles * n_tiles * kept0 * kept1
    compiled = constants(HopperGemmConstants(
        ROWS=k.rows, BLOCK_N=k.block_n, BLOCK_K=k.block_k, STAGES=k.stages, STORE_COLS=k.store_cols,
        STORE_BUFFERS=k.store_buffers, TURNS=k.turns, GROUP_M=k.group_m,
        COMPUTING_REGISTERS=k.registers[0], LOADING_REGISTERS=k.registers[1], A_BY_ROWS=a_by_rows, B_BY_ROWS=b_by_rows,
        C=spread_of_c, C_FIRST=first,
    ))  # fmt: skip
    return Launch(
        matmul_kernel,
        min(tiles, _multiprocessors(a.device)),
        (
            _descriptor(a, "a", p, (p.rows, p.inner), (k.rows, k.block_k), p.a_strides, a_by_rows),
            _descriptor(b, "b", p, (p.inner, p.cols), (k.block_k, k.block_n), p.b_strides, b_by_rows),
            layout_of_c,
            _descriptor(y, "y", p, (p.rows, p.cols), (k.rows, k.store_cols), (p.cols, 1)),
        ),
        (
            alpha,
            beta / alpha if first else beta,
            HopperGemmSizes(p.rows, p.cols, m_tiles, n_tiles, tiles, -(-p.inner // k.block_k), kept1, *p.summed),
            TileSpread(*(int(stride > 0) for stride in (one.a, two.a, one.b, two.b, one.c, two.c))),
            compiled,
        ),
        num_warps=4,
    )


def _descriptor(
    x: Tensor, name: str, product: Product, matrix: tuple[int, int], box: tuple[int, int],
    strides: tuple[int, int], by_rows: bool = True,
) -> TensorDescriptor:  # fmt: skip
    """Return the TMA descriptor of a batch of matrices. TMA reads 0 outside of the tensor and writes nothing there."""
    if not by_rows:
        matrix, box, strides = matrix[::-1], box[::-1], strides[::-1]
    batch = [(axis.size, getattr(axis, name)) for axis in product.batch]
    shape = [n if stride else 1 for n, stride in batch] + list(matrix)  # one matrix for the whole axis: size 1
    sixteen = 16 // x.element_size()
    unused = -(-matrix[1] // sixteen) * sixteen  # stride along an axis of size 1: any allowed one
    steps = [s if n > 1 else unused for n, s in zip(shape, [*(s for _, s in batch), strides[0]], strict=False)]
    block = [1, 1, *box]
    layout = gl.NVMMASharedLayout.get_default_for(block, DTYPES[x.dtype])
    return bound(TensorDescriptor(x, shape, [*steps, 1], block, layout), None)


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132
