"""Sums of dBias where a mask hides tiles of it: one of float32, or those of `config.dbias_sums`.

Tiles that no program adds to, most of the bytes, are neither zeroed before nor read after: dBias is written once, from
the sum or as 0.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewise.backends.launch.launcher import POINTER, Launch, constants, strided
from tilewise.spec.operands import TensorSpec
from tilewise.spec.problem import Problem


class BroadcastOfSum(NamedTuple):
    """Matrices of a mask that belong to the bias's matrix (b, h); every field is a tl.constexpr.

    BATCHES·HEADS of them, from batch element BATCH·b, or b % BATCH, and head MULTIPLE·h // DIVISOR on."""

    BATCH: Any  # 0, 1, or n of masks that repeat along the batch
    BATCHES: Any
    MULTIPLE: Any
    DIVISOR: Any
    HEADS: Any
    ALL_HEADS: Any  # of the mask
    SPAN: Any  # BATCHES·HEADS, rounded up to a power of two
    ROWS: Any  # the mask differs between queries


class SparseSum:
    """Sums of one problem with a mask: `zero` runs before the backward, `result` after it.

    total: the sums, one after the other. states: (matrices of the mask, key tiles, tiles of 64 queries), of
    `mask_kernels` for the backward.
    """

    def __init__(self, problem: Problem, bias: Tensor, total: Tensor, block_n: int) -> None:
        of, mask = problem.bias, problem.mask
        assert of is not None
        assert mask is not None
        tiles = -(-problem.queries // 64) * -(-problem.keys // block_n)
        self._like = torch.empty_like(bias, device="meta")
        broadcast_size, sums = constants(broadcast_of_sum(of, mask)), total.shape[0] // of.batch

        def launch(casts: bool) -> Launch:
            numbers = (of.batch, of.heads, problem.queries, problem.keys, broadcast_size, sums, block_n, casts)
            layouts = (POINTER, strided(total), strided(self._like))
            return Launch(sparse_sum_kernel, of.batch * of.heads * tiles, layouts, numbers, num_warps=4)

        self._zero, self._cast = launch(False), launch(True)

    def zero(self, states: Tensor, total: Tensor) -> None:
        """Zero the tiles of ``total`` that some program may add to."""
        self._zero(states, total, None)

    def result(self, states: Tensor, total: Tensor) -> Tensor:
        found = torch.empty_like(self._like, device=total.device)
        self._cast(states, total, found)
        return found


def broadcast_of_sum(bias: TensorSpec, mask: TensorSpec) -> BroadcastOfSum:
    """Return how a bias and a mask broadcast: each has all batch elements or one, and H, Hkv or one heads."""
    own_batch = bias.batch > 1 or mask.batch == 1
    most, least = max(bias.heads, mask.heads), min(bias.heads, mask.heads)
    multiple, divisor, heads = 1, 1, mask.heads
    if bias.heads > 1:
        ratio = most // least
        multiple, divisor, heads = (ratio, 1, ratio) if mask.heads >= bias.heads else (1, ratio, 1)
    batches = 1 if own_batch else mask.batch
    span = triton.next_power_of_2(batches * heads)
    batch = 0 if bias.batch == 1 or mask.batch == 1 else 1 if mask.batch == bias.batch else mask.batch
    return BroadcastOfSum(batch, batches, multiple, divisor, heads, mask.heads, span, mask.rows > 1)


@triton.jit
def sparse_sum_kernel(states, total, dbias, batch, heads, queries, keys, s, SUMS: tl.constexpr, BLOCK_N: tl.constexpr,
                      CASTS: tl.constexpr):  # fmt: skip
    """Zero or cast a tile of 64 queries by BLOCK_N keys. total, dbias: `Strided`. s: `BroadcastOfSum`."""
    row_tiles, key_tiles = tl.cdiv(queries, 64), tl.cdiv(keys, BLOCK_N)
    pid = tl.program_id(0)
    n, m, bh = pid % key_tiles, pid // key_tiles % row_tiles, pid // key_tiles // row_tiles
    b, h = bh // heads, bh % heads
    i = tl.arange(0, s.SPAN)
    b_of_mask = b % s.BATCH if s.BATCH > 1 else s.BATCH * b
    matrix = (b_of_mask + i // s.HEADS) * s.ALL_HEADS + s.MULTIPLE * h // s.DIVISOR + i % s.HEADS
    tile = matrix.to(tl.int64) * key_tiles + n
    at = states + (tile * row_tiles + m if s.ROWS else tile)
    found = tl.max(tl.load(at, mask=i < s.BATCHES * s.HEADS, other=0).to(tl.int32), 0)
    row, col = m * 64 + tl.arange(0, 64), n * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (row < queries)[:, None] & (col < keys)[None, :]
    place = tl.cast(b, tl.int64) * total.stride0 + tl.cast(h, tl.int64) * total.stride1
    of_total = total.pointer + place + row.to(tl.int64)[:, None] * total.stride2 + col[None, :] * total.stride3
    if CASTS:
        x = tl.zeros([64, BLOCK_N], tl.float32)
        for which in tl.static_range(SUMS):
            of_sum = of_total + tl.cast(total.stride0, tl.int64) * (which * batch)
            x += tl.load(of_sum, mask=inside & (found != 0), other=0.0)
        place = tl.cast(b, tl.int64) * dbias.stride0 + tl.cast(h, tl.int64) * dbias.stride1
        to = dbias.pointer + place + row.to(tl.int64)[:, None] * dbias.stride2 + col[None, :] * dbias.stride3
        tl.store(to, x.to(dbias.pointer.dtype.element_ty), mask=inside)
    elif found != 0:
        for which in tl.static_range(SUMS):
            of_sum = of_total + tl.cast(total.stride0, tl.int64) * (which * batch)
            tl.store(of_sum, tl.zeros([64, BLOCK_N], total.pointer.dtype.element_ty), mask=inside)
