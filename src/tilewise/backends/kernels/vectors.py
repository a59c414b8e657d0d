"""Toeplitz bias vectors from T5's table or ALiBi's slopes, and the gradients of table and slopes.

Each is one kernel: with PyTorch operators it takes five to twenty launches, as much host time as a whole call at 2,048
tokens. Sums are in float32 and in a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewise.backends import device_of
from tilewise.backends.launch.launcher import POINTER, Launch, Strided, strided
from tilewise.cache import prepared_once

_VECTOR_BLOCK = 1024
_SUM_BLOCK = 4096
# Key of a cached launch besides its numbers: a launch reuses the kernel that it compiled.
Kind = tuple[torch.device, torch.dtype, torch.dtype]


def _vector(heads: tuple[int, int], width: int, x: Tensor) -> Tensor:
    b, h = heads
    return x.new_empty_strided((b, h, 1, width), (h * width, width, width, 1), dtype=torch.float32)


def _matrix(x: Tensor) -> Strided:
    """Return `strided` of a matrix as the last two axes."""
    (rows, cols), (first, second) = x.shape, x.stride()
    return Strided(None, 0, 0, 0 if rows == 1 else first, 0 if cols == 1 else second)


# --- T5's table ---


@prepared_once
def _table_vector(kind: Kind, table: Strided, heads: int, count: int, least: int, first: int, width: int) -> Launch:
    programs = heads * triton.cdiv(width, _VECTOR_BLOCK)
    numbers = (least, count, first, width, _VECTOR_BLOCK)
    return Launch(table_vector_kernel, programs, (table, POINTER, POINTER), numbers, num_warps=4)


def table_vector(table: Tensor, rows: Tensor, least: int, first: int, width: int) -> Tensor:
    """Return (1, H, 1, width) float32: entries of the table (buckets, H) for distances first, ...

    rows: (count,) int64, the table's row for each distance from ``least`` on; distances beyond take the nearest end's.
    """
    with device_of(table):
        heads = table.shape[1]
        vector = _vector((1, heads), width, table)
        kind = table.device, table.dtype, vector.dtype
        launch = _table_vector(kind, _matrix(table), heads, rows.shape[0], least, first, width)
        launch(table, rows, vector)
    return vector


@triton.jit(do_not_specialize=["first", "width"])
def table_vector_kernel(table, rows, vector, least, count, first, width, BLOCK: tl.constexpr):
    """Compute a block of distances of one head per program."""
    blocks = tl.cdiv(width, BLOCK)
    h = tl.program_id(0) // blocks
    place = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(rows + tl.minimum(tl.maximum(first + place - least, 0), count - 1))
    value = tl.load(table.pointer + row * table.stride2 + tl.cast(h, tl.int64) * table.stride3)
    tl.store(vector + tl.cast(h, tl.int64) * width + place, value.to(tl.float32), mask=place < width)


@prepared_once
def _table_gradient(
    kind: Kind, gradient: Strided, table: Strided, sizes: tuple[int, int], first: int, width: int
) -> Launch:
    buckets, heads = sizes
    numbers = (first, width, buckets, _SUM_BLOCK)
    return Launch(table_gradient_kernel, buckets * heads, (gradient, POINTER, table), numbers, num_warps=8)


def table_gradient(gradient: Tensor, bounds: Tensor, first: int, table: Tensor) -> Tensor:
    """Return the gradient of a table (buckets, H) from that of its `table_vector`, (1, H, 1, width).

    bounds: (buckets, 2) int32, contiguous; bucket b has all distances from bounds[b, 0] up to bounds[b, 1] - 1.
    """
    with device_of(table):
        found = torch.empty_like(table)
        kind = table.device, gradient.dtype, table.dtype
        layouts = strided(gradient), _matrix(found)
        launch = _table_gradient(kind, *layouts, (table.shape[0], table.shape[1]), first, gradient.shape[3])
        launch(gradient, bounds, found)
    return found


@triton.jit(do_not_specialize=["first", "width"])
def table_gradient_kernel(gradient, bounds, table, first, width, buckets, BLOCK: tl.constexpr):
    """Sum one bucket of one head per program."""
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


@prepared_once
def _slopes_vector(kind: Kind, slopes: Strided, shape: tuple[int, int], first: int, width: int, signed: bool) -> Launch:
    programs = shape[0] * shape[1] * triton.cdiv(width, _VECTOR_BLOCK)
    numbers = (shape[1], first, width, signed, _VECTOR_BLOCK)
    return Launch(slopes_vector_kernel, programs, (slopes, POINTER), numbers, num_warps=4)


def slopes_vector(slopes: Tensor, first: int, width: int, signed: bool) -> Tensor:
    """Return (b, h, 1, width) float32: slopes (b, h) times d (signed) or -abs(d), d = first, ..."""
    with device_of(slopes):
        shape = slopes.shape[0], slopes.shape[1]
        vector = _vector(shape, width, slopes)
        kind = slopes.device, slopes.dtype, vector.dtype
        _slopes_vector(kind, _matrix(slopes), shape, first, width, signed)(slopes, vector)
    return vector


@triton.jit(do_not_specialize=["first", "width"])
def slopes_vector_kernel(slopes, vector, heads, first, width, SIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """Compute a block of distances of one head per program."""
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


@prepared_once
def _slopes_gradient(
    kind: Kind, gradient: Strided, slopes: Strided, shape: tuple[int, int], first: int, width: int, signed: bool
) -> Launch:
    numbers = (shape[1], first, width, signed, _SUM_BLOCK)
    return Launch(slopes_gradient_kernel, shape[0] * shape[1], (gradient, slopes), numbers, num_warps=8)


def slopes_gradient(gradient: Tensor, first: int, slopes: Tensor, signed: bool) -> Tensor:
    """Return the gradient of slopes (b, h) from the gradient (b, h, 1, width) of their `slopes_vector`."""
    with device_of(slopes):
        found = torch.empty_like(slopes)
        kind = slopes.device, gradient.dtype, slopes.dtype
        layouts = strided(gradient), _matrix(found)
        shape = slopes.shape[0], slopes.shape[1]
        _slopes_gradient(kind, *layouts, shape, first, gradient.shape[3], signed)(gradient, found)
    return found


@triton.jit(do_not_specialize=["first", "width"])
def slopes_gradient_kernel(gradient, slopes, heads, first, width, SIGNED: tl.constexpr, BLOCK: tl.constexpr):
    """Sum one head per program."""
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
