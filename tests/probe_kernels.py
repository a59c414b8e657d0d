"""Kernels that show what functions of Triton kernels compute, where Triton finds what they call."""

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.backends.gluon.varlen import listed_tile_and_head, sum_of_head
from tilewise.backends.kernels.rounding import low_bits, with_low_bits


@triton.jit
def tiles_of_heads_kernel(tile_list, out, heads, BLOCK: tl.constexpr, BY_KEYS: tl.constexpr):
    t = tl.program_id(0)
    seq, tile, head, _ = listed_tile_and_head(tile_list, t, heads, BLOCK, BY_KEYS)
    tl.store(out + 4 * t, seq.first_query)
    tl.store(out + 4 * t + 1, seq.first_key)
    tl.store(out + 4 * t + 2, tile)
    tl.store(out + 4 * t + 3, head)


@triton.jit
def sums_of_heads_kernel(tile_list, out, kv_heads, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    t = tl.program_id(0)
    of = sum_of_head(tile_list, t, tl.num_programs(0), kv_heads, BLOCK_M, BLOCK_N)
    tl.store(out + 6 * t, of.first)
    tl.store(out + 6 * t + 1, of.hk)
    tl.store(out + 6 * t + 2, of.place)
    tl.store(out + 6 * t + 3, of.tiles)
    tl.store(out + 6 * t + 4, of.part)
    tl.store(out + 6 * t + 5, of.parts)


@triton.jit
def low_bits_kernel(exact, rounded, low, found, count, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    inside = at < count
    x, y = tl.load(exact + at, mask=inside, other=0.0), tl.load(rounded + at, mask=inside, other=0.0)
    bits = low_bits(x, y)
    tl.store(low + at, bits, mask=inside)
    tl.store(found + at, with_low_bits(y.to(tl.float32), bits), mask=inside)
