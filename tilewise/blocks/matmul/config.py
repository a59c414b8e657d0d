"""Tile sizes of the kernels, with the reason for the numbers."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewise.blocks.matmul.problem import Product

MULTIPROCESSORS = 132  # of an H100 and an H200; what a grid should at least fill


@dataclass(frozen=True)
class TritonConfig:
    """Tile of Y, depth of a step, warps a program, stages of the load pipeline."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def triton_config(product: Product, precision: str) -> TritonConfig:
    """The largest tile of which there are enough to fill a GPU; small ones for few rows or columns."""
    if product.dtype == torch.float32:
        # ieee: no tensor cores, registers hold the operands
        return TritonConfig(64, 64, 32, 4, 2) if precision == "ieee" else TritonConfig(128, 64, 32, 4, 3)
    batch = product.kept[0] * product.kept[1]
    for block_m, block_n, warps in ((128, 128, 8), (128, 64, 4)):
        tiles = -(-product.rows // block_m) * -(-product.cols // block_n) * batch
        if tiles >= MULTIPROCESSORS and product.rows > block_m // 2 and product.cols > block_n // 2:
            return TritonConfig(block_m, block_n, 32, warps, 4)
    return TritonConfig(32, 64, 64, 4, 3) if product.rows <= 32 else TritonConfig(64, 64, 64, 4, 3)


def c_spread(product: Product) -> str:
    """Which axes of Y the matrix C is full along: "matrix", "row", "column" or "one"; "none" where there is no C."""
    if product.c_strides is None:
        return "none"
    row, col = product.c_strides
    full_rows, full_cols = row != 0 and product.rows > 1, col != 0 and product.cols > 1
    return {(True, True): "matrix", (False, True): "row", (True, False): "column", (False, False): "one"}[
        full_rows, full_cols
    ]


def device_of(x: Tensor) -> AbstractContextManager:
    """Triton launches on the current device: make it the tensor's own, at no cost where it already is."""
    if x.device.type != "cuda" or x.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(x.device)
