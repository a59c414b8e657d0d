"""Calls that the kernels of windows support, and tile sizes."""

from __future__ import annotations

import os
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.backends import has_triton
from tilewise.windows import Geometry

# Largest block and window, the sides of one tile. With 64 rows Triton would use wgmma, whose layout makes 8 warps
# compute products twice.
MOST_QUERIES, MOST_KEYS = 32, 256
MOST_BYTES = 32768  # of a window's keys, which are in shared memory as a whole, and of its values
PROGRAMS = 4096  # of a forward; larger calls compute several heads that share a bias per program; 8 per slot of an H200


class Tiles(NamedTuple):
    """Tile sizes: block_q, block_k of a block and its window; block_n, block_m of a backward's keys, queries.

    A backward's key tiles begin ``offset`` before a multiple of block_n, to align "clip" windows with tiles.
    """

    block_q: int
    block_k: int
    block_d: int
    block_dv: int
    block_n: int
    offset: int
    block_m: int
    forward_warps: int
    backward_warps: int
    forward_registers: int | None = None  # limit per thread, for higher occupancy
    backward_registers: int | None = None


def power_of_two(n: int, least: int = 16) -> int:
    """Return the next power of two, at least ``least``, the minimum of tl.dot."""
    return max(1 << max(n - 1, 0).bit_length(), least)


def tiles_of(geometry: Geometry, head_dim: int, value_dim: int, dtype: torch.dtype) -> Tiles:
    q_block, k_block, _ = geometry
    block_q, block_k = power_of_two(q_block), power_of_two(k_block)
    rows = -(-k_block // q_block) * q_block
    # 32 elements of a tile per thread in the forward, 16 in the backward, which has four such tiles.
    small = block_q * block_k <= 4096 and max(head_dim, value_dim) <= 32 and dtype != torch.float32
    return Tiles(
        block_q, block_k, power_of_two(head_dim), power_of_two(value_dim), block_q, geometry.before % block_q,
        min(power_of_two(rows), 128), 4 if small else 8, 8, 128 if small else None, 128 if small else None,
    )  # fmt: skip


def fits(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, geometry: Geometry) -> bool:
    """True if the kernels support a call, checked except for dtypes, on CUDA or in Triton's interpreter.

    `tilewise.attention` computes other calls, with larger windows or dimensions, or raises.
    """
    if geometry.q_block > MOST_QUERIES or geometry.k_block > MOST_KEYS:
        return False
    if not q.shape[3] > 0 or not v.shape[3] > 0 or q.shape[3] != k.shape[3]:
        return False
    wide = power_of_two(max(q.shape[3], v.shape[3])) * power_of_two(geometry.k_block) * q.element_size()
    dtypes = (torch.float16, torch.bfloat16, torch.float32)
    if wide > MOST_BYTES or q.dtype not in dtypes or not q.dtype == k.dtype == v.dtype:
        return False
    if bias is not None and bias.dtype not in dtypes:
        return False
    there = torch.compiler.is_compiling() or has_triton()  # Dynamo cannot trace the cached has_triton
    return q.numel() > 0 and there and _runs_kernels(q.device)


def rows_merge(bias: Tensor) -> bool:
    """True if the rows of all blocks have one stride, so that kernels index them as one axis."""
    return bias.shape[2] == 1 or bias.shape[3] == 1 or bias.stride(2) == bias.shape[3] * bias.stride(3)


def _runs_kernels(device: torch.device) -> bool:
    return device.type == "cuda" or (device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1")
