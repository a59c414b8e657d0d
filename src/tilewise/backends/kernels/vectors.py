"""The vector of a Toeplitz bias from T5's table or ALiBi's slopes, and its gradient summed up into them.

One kernel each: PyTorch's own operators are five to twenty launches, and as much of the host's time as a whole call has
at 2,048 tokens. A sum is in float32 and in one order.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewise.backends import device_of
from tilewise.backends.launch.launcher import POINTER, Launch, Strided, strided

_VECTOR_BLOCK = 1024
_SUM_BLOCK = 4096
# What a launch is kept by beside its numbers, for it takes the kernel that it had before.
Kind = tuple[torch.device, torch.dtype, torch.dtype]


def _vector(heads: tuple[int, int], width: int, x: Tensor) -> Tensor:
    return torch.empty((*heads, 1, width), dtype=torch.float32, device=x.device)


# --- T5's table ---


@lru_cache(256)
def _table_vector(kind: Kind, table: Strided, heads: int, count: int, least: int, first: int, width: int) -> Launch:
    programs = heads * triton.cdiv(width, _VECTOR_BLOCK)
    numbers = (least, count, first, width, _VECTOR_BLOCK)
    return Launch(table_vector_kernel, programs, (table, POINTER, POINTER), numbers, num_warps=4)


def table_vector(table: Tensor, rows: Tensor, least: int, first: int, width: int) -> Tensor:
    """(1, H, 1, width) float32: of the distances from ``first`` on what the table (buckets, H) has in their row.

    rows: (count,) int64, the rows of the distances from ``least`` on; what lies beyond has the nearest end's.
    """
    with device_of(table):
        heads = table.shape[1]
        vector = _vector((1, heads), width, table)
        kind = table.device, table.dtype, vector.dtype
        launch = _table_vector(kind, strided(table[None, None]), heads, rows.shape[0], least, first, width)
        launch(table, rows, vector)
    return vector


@triton.jit(do_not_specialize=["first", "width"])
def table_vector_kernel(table, rows, vector, least, count, first, width, BLOCK: tl.constexpr):
    """One program a block of distances of one head."""
    blocks = tl.cdiv(width, BLOCK)
    h = tl.program_id(0) // blocks
    place = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows + tl.minimum(tl.maximum(first + place - least, 0), count - 1))
    value = tl.load(table.pointer + row * table.stride2 + tl.cast(h, tl.int64) * table.stride3)
    tl.store(vector + tl.cast(h, tl.int64) * width + place, value.to(tl.float32), mask=place < width)


@lru_cache(256)
def _table_gradient(
    kind: Kind, gradient: Strided, table: Strided, sizes: tuple[int, int], first: int, width: int
) -> Launch:
    buckets, heads = sizes
    numbers = (first, width, buckets, _SUM_BLOCK)
    return Launch(table_gradient_kernel, buckets * heads, (gradient, POINTER, table), numbers, num_warps=8)


def table_gradient(gradient: Tensor, bounds: Tensor, first: int, table: Tensor) -> Tensor:
    """Of a table from the gradient (1, H, 1, width) of its `table_vector`.

    bounds: (buckets, 2) int32, contiguous, the first distance of each bucket and the one after its last; in between all
    are of the bucket.
    """
    with device_of(table):
        found = torch.empty_like(table)
        kind = table.device, gradient.dtype, table.dtype
        layouts = strided(gradient), strided(found[None, None])
        launch = _table_gradient(kind, *layouts, (table.shape[0], table.shape[1]), first, gradient.shape[3])
        launch(gradient, bounds, found)
    return found


@triton.jit(do_not_specialize=["first", "width"])
def table_gradient_kernel(gradient, bounds, table, first, width, buckets, BLOCK: tl.constexpr):
    """One program a bucket of one head."""
    h = tl.cast(tl.program_id(0) // buckets, tl.int64)
    b = tl.program_id(0) % buckets
    begin = tl.minimum(tl.maximum(tl.load(bounds + 2 * b) - first, 0), width)
    end = tl.minimum(tl.maximum(tl.load(bounds + 2 * b + 1) - first, 0), width)
    at = gradient.pointer + h * gradient.stride1
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(begin, end, BLOCK):
        place = start + tl.arange(0, BLOCK)
        total += tl.load(at + place * gradient.stride3, mask=place < end, other=0.0)
    to = table.pointer + tl.cast(b, tl.int64) * table.stride2 + h * table.stride3
    tl.store(to, tl.sum(total, 0).to(table.pointer.dtype.element_ty))


# --- ALiBi's slopes ---


@lru_cache(256)
def _slopes_vector(kind: Kind, slopes: Strided, shape: tuple[int, int], first: int, width: int, signed: bool) -> Launch:
    programs = shape[0] * shape[1] * triton.cdiv(width, _VECTOR_BLOCK)
    numbers = (shape[1], first, width, signed, _VECTOR_BLOCK)
    return Launch(slopes_vector_kernel, programs, (slopes, POINTER), numbers, num_warps=4)


def slopes_vector(slopes: Tensor, first: int, width: int, signed: bool) -> Tensor:
    """(b, h, 1, width) float32: slopes (b, h) times each distance from ``first`` on, or minus its absolute value."""
    with device_of(slopes):
        shape = slopes.shape[0], slopes.shape[1]
        vector = _vector(shape, width, slopes)
        kind = slopes.device, slopes.dtype, vector.dtype
        _slopes_vector(kind, strided(slopes[None, None]), shape, first, width, signed)(slopes, vector)
    return vector


@triton.jit(do_not_specialize=["first", "width"])
def slopes_vector_kernel(slopes, vector, heads, first, width, SIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """One program a block of distances of one head."""
    blocks = tl.cdiv(width, BLOCK)
    row = tl.cast(tl.program_id(0) // blocks, tl.int64)
    place = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    slope = tl.load(slopes.pointer + row // heads * slopes.stride2 + row % heads * slopes.stride3).to(tl.float32)
    tl.store(vector + row * width + place, slope * _of_distance(first + place, SIGNED), mask=place < width)


@triton.jit
def _of_distance(distance, SIGNED: tl.constexpr):
    if SIGNED:
        return distance.to(tl.float32)
    else:
        return -tl.abs(distance).to(tl.float32)


@lru_cache(256)
def _slopes_gradient(
    kind: Kind, gradient: Strided, slopes: Strided, shape: tuple[int, int], first: int, width: int, signed: bool
) -> Launch:
    numbers = (shape[1], first, width, signed, _SUM_BLOCK)
    return Launch(slopes_gradient_kernel, shape[0] * shape[1], (gradient, slopes), numbers, num_warps=8)


def slopes_gradient(gradient: Tensor, first: int, slopes: Tensor, signed: bool) -> Tensor:
    """Of slopes (b, h) from the gradient (b, h, 1, width) of their `slopes_vector`."""
    with device_of(slopes):
        found = torch.empty_like(slopes)
        kind = slopes.device, gradient.dtype, slopes.dtype
        layouts = strided(gradient), strided(found[None, None])
        shape = slopes.shape[0], slopes.shape[1]
        _slopes_gradient(kind, *layouts, shape, first, gradient.shape[3], signed)(gradient, found)
    return found


@triton.jit(do_not_specialize=["first", "width"])
def slopes_gradient_kernel(gradient, slopes, heads, first, width, SIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """One program a head."""
    row = tl.cast(tl.program_id(0), tl.int64)
    b, h = row // heads, row % heads
    at = gradient.pointer + b * gradient.stride0 + h * gradient.stride1
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        place = start + tl.arange(0, BLOCK)
        value = tl.load(at + place * gradient.stride3, mask=place < width, other=0.0)
        total += value * _of_distance(first + place, SIGNED)
    to = slopes.pointer + b * slopes.stride2 + h * slopes.stride3
    tl.store(to, tl.sum(total, 0).to(slopes.pointer.dtype.element_ty))
