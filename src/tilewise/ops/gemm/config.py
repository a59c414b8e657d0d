"""Tile sizes of the kernels, with the reasons for the numbers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tilewise.ops.gemm.problem import Product
from tilewise.spec.tma import fits_tma

MULTIPROCESSORS = 132  # of an H100 or H200; a grid should have at least as many tiles


@dataclass(frozen=True)
class TritonGemmConfig:
    """Tile of Y, depth of a step, warps per program, and stages of the load pipeline."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def triton_config(product: Product, precision: str) -> TritonGemmConfig:
    """Return the largest tile with enough tiles to fill a GPU; small tiles for few rows or columns."""
    if product.dtype == torch.float32:
        # ieee: no tensor cores, registers hold the operands
        return TritonGemmConfig(64, 64, 32, 4, 2) if precision == "ieee" else TritonGemmConfig(128, 64, 32, 4, 3)
    batch = product.kept[0] * product.kept[1]
    for block_m, block_n, warps in ((128, 128, 8), (128, 64, 4)):
        tiles = -(-product.rows // block_m) * -(-product.cols // block_n) * batch
        if tiles >= MULTIPROCESSORS and product.rows > block_m // 2 and product.cols > block_n // 2:
            return TritonGemmConfig(block_m, block_n, 32, warps, 4)
    return TritonGemmConfig(32, 64, 64, 4, 3) if product.rows <= 32 else TritonGemmConfig(64, 64, 64, 4, 3)


def c_spread(product: Product) -> str:
    """Return the axes of Y that C is full along: "matrix", "row", "column", "one"; "none" without C."""
    if product.c_strides is None:
        return "none"
    row, col = product.c_strides
    full_rows, full_cols = row != 0 and product.rows > 1, col != 0 and product.cols > 1
    return {(True, True): "matrix", (False, True): "row", (True, False): "column", (False, False): "one"}[
        full_rows, full_cols
    ]


@dataclass(frozen=True)
class HopperConfig:
    """Parameters of the Hopper kernel: two warpgroups compute, one warp loads.

    Attributes:
        rows: rows of Y per warpgroup; a tile has twice as many.
        block_n: columns of a tile.
        block_k: depth of a step: 64 elements of 16 bits are the 128 bytes of a swizzled row of shared memory.
        stages: stages of the pipeline of A and B.
        store_cols: columns of Y per TMA store.
        store_buffers: buffers of ``store_cols`` columns per warpgroup.
        turns: if True, warpgroups store in turns, so that one multiplies while the other stores.
        group_m: tile rows of a group of tiles that run at the same time.
        registers: registers per thread of a computing and of a loading warp; 64 K in all.
    """

    rows: int = 64
    block_n: int = 256
    block_k: int = 64
    stages: int = 4
    store_cols: int = 64
    store_buffers: int = 2
    turns: bool = True
    group_m: int = 8
    registers: tuple[int, int] = (240, 24)

    def __post_init__(self) -> None:
        if self.stages < 2:  # a stage is released after the next step has started
            raise ValueError(f"stages: must be 2 or more, got {self.stages}")
        if self.block_n // self.store_cols % self.store_buffers:  # otherwise consecutive tiles would share a buffer
            raise ValueError(
                f"store_buffers: must divide the {self.block_n // self.store_cols} stores of a tile, "
                f"got {self.store_buffers}"
            )


def hopper_config(product: Product) -> HopperConfig:
    """Return 128 x 256 tiles, which read the least of A and B. Buffers of a full C take the place of a stage."""
    if c_spread(product) != "matrix":
        return HopperConfig()
    if product.c_dtype == torch.float32:
        return HopperConfig(block_n=128)
    return HopperConfig(stages=3, store_buffers=1, turns=False, group_m=16)


def c_first(product: Product, alpha: float, beta: float) -> bool:
    """True if the accumulator can start from C · beta / alpha, which must not overflow unless beta · C does."""
    return abs(beta) <= abs(alpha) or (product.c_dtype == torch.float16 and abs(beta) <= 2.0**100 * abs(alpha))


def contiguous_axis(strides: tuple[int, int], sizes: tuple[int, int]) -> str | None:
    """Return "rows" or "columns", whichever are contiguous, if TMA can read the 16-bit matrix, else None."""
    for name, order in (("rows", 1), ("columns", -1)):
        if fits_tma(sizes[::order], strides[::order], 2, aligned=True):
            return name
    return None


def declines_tma(product: Product) -> str | None:
    """Return why TMA cannot describe an operand, or None."""
    p = product
    names = []
    for name, strides, sizes, along, aligned in (
        ("a", p.a_strides, (p.rows, p.inner), [axis.a for axis in p.batch], p.aligned[0]),
        ("b", p.b_strides, (p.inner, p.cols), [axis.b for axis in p.batch], p.aligned[1]),
    ):
        batch = _stepped(p, along)
        if contiguous_axis(strides, sizes) is None or not fits_tma((*batch[0], 1), (*batch[1], 1), 2, aligned):
            names.append(name)
    if p.c_strides is not None and p.c_dtype is not None and c_spread(p) == "matrix":
        batch = _stepped(p, [axis.c for axis in p.batch])
        shape, steps = (*batch[0], p.rows, p.cols), (*batch[1], *p.c_strides)
        if not fits_tma(shape, steps, p.c_dtype.itemsize, p.aligned[2]):
            names.append("c")
    if names:
        return (
            f"reads by TMA, which cannot describe {', '.join(names)}: rows or columns (of c: rows) must be contiguous, "
            "the address and every other stride a multiple of 16 bytes"
        )
    return None


def _stepped(product: Product, strides: list[int]) -> tuple[list[int], list[int]]:
    """Return sizes and strides of the batch axes that an operand does not broadcast."""
    found = [(axis.size, stride) for axis, stride in zip(product.batch, strides, strict=True) if stride]
    return [size for size, _ in found], [stride for _, stride in found]
