"""Mask-tile states on a GPU, computed from the interval of queries that sees each key."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewise.backends import device_of
from tilewise.backends.launch.launcher import POINTER, Launch
from tilewise.cache import prepared_once
from tilewise.spec.block_mask import EMPTY, FULL, PARTIAL

EMPTY_TILE, PARTIAL_TILE, FULL_TILE = tl.constexpr(EMPTY), tl.constexpr(PARTIAL), tl.constexpr(FULL)


@prepared_once
def _tiles(device: torch.device, matrices: int, keys: int, queries: int, block: tuple[int, int]) -> Launch:
    (block_m, block_n), block_r = block, 32
    numbers = (queries, keys, block_m, block_n, triton.next_power_of_2(block_n), block_r)
    return Launch(
        interval_tiles_kernel, matrices * triton.cdiv(keys, block_n), (POINTER,) * 3, numbers, num_warps=1
    )  # fmt: skip


def tiles_of_intervals(begins: Tensor, ends: Tensor, queries: int, block: tuple[int, int]) -> Tensor:
    """Like `tilewise.spec.block_mask.tiles_of_intervals`, but for int32, contiguous tensors on a GPU."""
    b, h, _, keys = begins.shape
    with device_of(begins):
        tiles = begins.new_empty(b, h, triton.cdiv(queries, block[0]), triton.cdiv(keys, block[1]))
        _tiles(begins.device, b * h, keys, queries, block)(begins, ends, tiles)
    return tiles


@triton.jit
def interval_tiles_kernel(
    begins, ends, tiles, queries, keys, block_m, block_n, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr
):
    """Compute the states for one tile of keys of a matrix, BLOCK_R tiles of queries at a time.

    begins, ends: int32 (matrices, keys), between 0 and ``queries``.
    """
    rows, cols = tl.cdiv(queries, block_m), tl.cdiv(keys, block_n)
    pid = tl.program_id(0)
    col, matrix = pid % cols, tl.cast(pid // cols, tl.int64)
    i = tl.arange(0, BLOCK_N)
    key = col * block_n + i
    inside = (i < block_n) & (key < keys)
    begin = tl.load(begins + matrix * keys + key, mask=inside, other=0)
    end = tl.load(ends + matrix * keys + key, mask=inside, other=0)
    at = tiles + matrix * rows * cols + col
    _store_tiles(at, begin, end, inside, queries, rows, cols, block_m, BLOCK_R)


@triton.jit
def _store_tiles(at, begin, end, inside, queries, rows, cols, block_m, BLOCK_R: tl.constexpr):
    """Store the states of all tiles of queries for a tile of keys with these intervals."""
    first = begin // block_m
    last = tl.where(end > begin, (end + block_m - 1) // block_m, first)
    whole_end = tl.where(inside & (end < queries), end // block_m, rows)
    full_from, full_to = tl.max((begin + block_m - 1) // block_m, 0), tl.min(whole_end, 0)
    i = tl.arange(0, BLOCK_R)
    for start in range(0, rows, BLOCK_R):
        # Set a bit for each tile that a key's interval overlaps.
        met = _below(last - start, BLOCK_R) - _below(first - start, BLOCK_R)
        some = tl.where((tl.reduce(met, 0, _either) >> i) & 1 != 0, PARTIAL_TILE, EMPTY_TILE)
        m = start + i
        found = tl.where((m >= full_from) & (m < full_to), FULL_TILE, some)
        tl.store(at + m.to(tl.int64) * cols, found, mask=m < rows)


@triton.jit
def _below(n, BITS: tl.constexpr):
    """Return an int64 with its lowest ``n`` bits set, at most BITS < 64."""
    one = tl.full(n.shape, 1, tl.int64)
    return (one << tl.minimum(tl.maximum(n, 0), BITS).to(tl.int64)) - 1


@triton.jit
def _either(a, b):
    return a | b
