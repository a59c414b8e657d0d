"""Which calls the kernels take, and their tiles."""

from __future__ import annotations

import os
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.backends import has_triton
from tilewise.windows import Geometry

# Of a block and its window, each a side of one tile. Of 64 rows Hopper's own products are laid out, by which 8 warps
# compute them twice.
MOST_QUERIES, MOST_KEYS = 32, 256
MOST_BYTES = 32768  # of a window's keys, which lie in shared memory as a whole, and of its values
PROGRAMS = 4096  # of a forward, before each has more than one of those that share a bias; eight a place of an H200


class Tiles(NamedTuple):
    """block_q, block_k: of a block and its window. block_n: of the keys of a backward's tile, which begins ``offset``
    before a multiple, so that windows of "clip" begin and end where tiles do; block_m: of the queries that see it."""

    block_q: int
    block_k: int
    block_d: int
    block_dv: int
    block_n: int
    offset: int
    block_m: int
    forward_warps: int
    backward_warps: int
    forward_registers: int | None = None  # at most so many for a thread, so that more programs fit
    backward_registers: int | None = None


def power_of_two(n: int, least: int = 16) -> int:
    """The next one, and what a product of tiles takes at least."""
    return max(1 << max(n - 1, 0).bit_length(), least)


def tiles_of(geometry: Geometry, head_dim: int, value_dim: int, dtype: torch.dtype) -> Tiles:
    q_block, k_block, _ = geometry
    block_q, block_k = power_of_two(q_block), power_of_two(k_block)
    rows = -(-k_block // q_block) * q_block
    # 32 of a tile's elements for a thread in the forward, and 16 in the backward, which has four such tiles.
    small = block_q * block_k <= 4096 and max(head_dim, value_dim) <= 32 and dtype != torch.float32
    return Tiles(
        block_q, block_k, power_of_two(head_dim), power_of_two(value_dim), block_q, geometry.before % block_q,
        min(power_of_two(rows), 128), 4 if small else 8, 8, 128 if small else None, 128 if small else None,
    )  # fmt: skip


def fits(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, geometry: Geometry) -> bool:
    """Whether the kernels compute a call, which is checked but for dtypes: of CUDA tensors, or in Triton's interpreter.

    Others are those of `tilewise.attention` in larger windows and dimensions, and what is an error there.
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
    there = torch.compiler.is_compiling() or has_triton()  # a compiler cannot look through what is kept of that
    return q.numel() > 0 and there and _runs_kernels(q.device)


def rows_merge(bias: Tensor) -> bool:
    """Whether rows of all blocks lie evenly, so that kernels count them through."""
    return bias.shape[2] == 1 or bias.shape[3] == 1 or bias.stride(2) == bias.shape[3] * bias.stride(3)


def _runs_kernels(device: torch.device) -> bool:
    return device.type == "cuda" or (device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1")
