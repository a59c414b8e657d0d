"""What a dynamic mask needs of a GPU: keys gathered, their gradients added up, which queries keep a key, and which
tiles that leaves.

All are in PyTorch's own operators beside it (`tilewise.gather`, `tilewise.dynamic_mask`); there are a few hundred of
these, or they move several times the bytes.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewise.backends import device_of
from tilewise.backends.launcher import POINTER, Launch, Strided, strided
from tilewise.score.tile_tensors import EMPTY, FULL, PARTIAL

_BLOCK = 1024
# What a launch is kept by beside its numbers: the device, and dtypes, for it takes the kernel that it had before.
Kind = tuple[torch.device, *tuple[torch.dtype, ...]]


# --- gathered rows, and their gradients ---


@lru_cache(256)
def _take_rows(
    kind: Kind, shape: tuple[int, ...], chunks: int, cols: int, keys_shape: tuple[int, int], x: Strided
) -> Launch:
    B, H, N, D = shape
    batch, heads = keys_shape
    block_d = triton.next_power_of_2(D)
    block_r = max(8192 // block_d, 1)
    programs = B * chunks * H * triton.cdiv(cols, block_r)
    of_batch = heads * chunks * cols if batch > 1 else 0
    numbers = (H, N, D, chunks, cols, of_batch, H // heads, block_r, block_d)
    return Launch(take_rows_kernel, programs, (x, POINTER, POINTER), numbers, num_warps=4)


def take_rows(x: Tensor, keys: Tensor) -> Tensor:
    """Of x (B, H, N, D) the rows that ``keys``, as `sum_rows` has them, name: (B · chunks, H, cols, D); 0 for none."""
    B, H, _, D = x.shape
    chunks, cols = keys.shape[2:]
    with device_of(x):
        keys = keys.contiguous()
        found = x.new_empty(B * chunks, H, cols, D)
        kind = x.device, x.dtype
        _take_rows(kind, tuple(x.shape), chunks, cols, (keys.shape[0], keys.shape[1]), strided(x))(x, keys, found)
    return found


@triton.jit
def take_rows_kernel(
    x, keys, found, heads, count, dim, chunks, cols, of_batch, group, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr
):
    """One program a block of rows of one head of a chunk."""
    blocks = tl.cdiv(cols, BLOCK_R)
    pid = tl.program_id(0)
    r, row = pid % blocks * BLOCK_R + tl.arange(0, BLOCK_R), pid // blocks
    h, c, b = row % heads, row // heads % chunks, row // heads // chunks
    d = tl.arange(0, BLOCK_D)
    inside = (r < cols)[:, None] & (d < dim)[None, :]
    at_keys = keys + tl.cast(b, tl.int64) * of_batch + tl.cast(h // group * chunks + c, tl.int64) * cols
    key = tl.load(at_keys + r, mask=r < cols, other=count)
    at = x.pointer + tl.cast(b, tl.int64) * x.stride0 + tl.cast(h, tl.int64) * x.stride1
    at = at + key[:, None] * x.stride2 + d[None, :] * x.stride3
    value = tl.load(at, mask=inside & (key < count)[:, None], other=0.0)
    tl.store(found + (tl.cast(row, tl.int64) * cols + r[:, None]) * dim + d[None, :], value, mask=inside)


@lru_cache(256)
def _sum_rows(
    kind: Kind, shape: tuple[int, ...], chunks: int, keys_shape: tuple[int, int], grad: Strided, total: Strided
) -> Launch:
    B, H, N, D = shape
    batch, heads = keys_shape
    block_d = triton.next_power_of_2(D)
    block_n = max(4096 // block_d, 1)
    programs = B * H * triton.cdiv(N, block_n)
    of = heads * chunks * (N + 1) if batch > 1 else 0
    return Launch(
        sum_rows_kernel, programs, (grad, POINTER, total), (H, N, D, chunks, of, H // heads, block_n, block_d),
        num_warps=4,
    )  # fmt: skip


def sum_rows(
    grad: Tensor, keys: Tensor, shape: tuple[int, int, int, int], dtype: torch.dtype, by_heads: bool
) -> Tensor:
    """Of gathered rows' gradient (B · chunks, H, cols, D) that of the rows, (B, H, N, D), a sum in float32 in the order
    of the chunks.

    keys: (B|1, H'|1, chunks, cols) int64, where H' divides H; N and above: no row. by_heads: rows lie as (B, N, H, D).
    """
    B, H, N, D = shape
    chunks, cols = keys.shape[2:]
    with device_of(grad):
        # Where each key lies in each chunk; what is no key has a place after the last one.
        places = torch.full((*keys.shape[:3], N + 1), -1, dtype=torch.int32, device=keys.device)
        number = torch.arange(cols, dtype=torch.int32, device=keys.device)
        places.scatter_(-1, keys, number.expand(keys.shape))
        total = grad.new_empty((B, N, H, D) if by_heads else shape, dtype=dtype)
        total = total.transpose(1, 2) if by_heads else total
        kind = grad.device, grad.dtype, dtype
        sums = _sum_rows(kind, tuple(shape), chunks, (keys.shape[0], keys.shape[1]), strided(grad), strided(total))
        sums(grad, places, total)
    return total


@triton.jit
def sum_rows_kernel(
    grad, places, total, heads, keys, dim, chunks, of_batch, group, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr
):
    """One program a block of keys of one head."""
    blocks = tl.cdiv(keys, BLOCK_N)
    pid = tl.program_id(0)
    n, h, b = pid % blocks * BLOCK_N + tl.arange(0, BLOCK_N), pid // blocks % heads, pid // blocks // heads
    d = tl.arange(0, BLOCK_D)
    inside = n < keys
    at_places = places + tl.cast(b, tl.int64) * of_batch + tl.cast(h // group * chunks, tl.int64) * (keys + 1)
    at_head = grad.pointer + tl.cast(h, tl.int64) * grad.stride1 + d[None, :] * grad.stride3
    found = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for c in range(chunks):
        place = tl.load(at_places + c * (keys + 1) + n, mask=inside, other=-1)
        at = at_head + tl.cast(b * chunks + c, tl.int64) * grad.stride0 + place.to(tl.int64)[:, None] * grad.stride2
        found += tl.load(at, mask=(place >= 0)[:, None] & (d < dim)[None, :], other=0.0).to(tl.float32)
    to = total.pointer + tl.cast(b, tl.int64) * total.stride0 + tl.cast(h, tl.int64) * total.stride1
    to = to + n.to(tl.int64)[:, None] * total.stride2 + d[None, :] * total.stride3
    tl.store(to, found.to(total.pointer.dtype.element_ty), mask=inside[:, None] & (d < dim)[None, :])


# --- when keys go ---


@lru_cache(256)
def _level(device: torch.device, rows: int, n: int, half: int) -> Launch:
    blocks = triton.cdiv(n, _BLOCK)
    return Launch(smallest_level_kernel, rows * blocks, (POINTER,) * 8, (n, half, half // 2, _BLOCK), num_warps=4)


@lru_cache(256)
def _counts(device: torch.device, rows: int, n: int, half: int) -> Launch:
    blocks = triton.cdiv(n, _BLOCK)
    return Launch(
        smallest_counts_kernel, rows * blocks, (POINTER,) * 2, (n, half, _BLOCK, 4 * _BLOCK), num_warps=4
    )  # fmt: skip


def running_smallest(order: Tensor, w: int) -> Tensor:
    """`tilewise.dynamic_mask.running_smallest` of a tensor on a GPU, int32."""
    n, rows = order.shape[-1], order.numel() // order.shape[-1]
    with device_of(order):
        numbers = order.to(torch.int32).contiguous()
        place = torch.arange(n, dtype=torch.int32, device=order.device)
        ends, left = place.expand(numbers.shape).contiguous(), torch.full_like(numbers, w - 1)
        found = torch.zeros_like(numbers)
        half = 1 << max((n - 1).bit_length() - 1, 0)
        zeros = (numbers < half).to(torch.int32)
        counts, after, zeros_after = (torch.empty_like(numbers) for _ in range(3))
        while half > 0:
            _counts(order.device, rows, n, half)(zeros, counts)
            _level(order.device, rows, n, half)(numbers, counts, ends, left, found, after, zeros_after, zeros)
            numbers, after, zeros, zeros_after = after, numbers, zeros_after, zeros
            half //= 2
        return torch.where(place < w, n, found)


@triton.jit
def smallest_counts_kernel(zeros, counts, n, half, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """How many numbers up to each are lower, zeros and counts of `smallest_level_kernel`: one program a block.

    Of the nodes before a block exactly half are lower, so that only its own node is added up, WIDE at once. cumsum of
    PyTorch has one program for a row, of which there are as many as heads.
    """
    blocks = tl.cdiv(n, BLOCK)
    pid = tl.program_id(0)
    start = pid % blocks * BLOCK
    row = tl.cast(pid // blocks, tl.int64) * n
    node = start // (2 * half) * (2 * half)
    before = tl.zeros([WIDE], tl.int32)
    for at in range(node, start, WIDE):
        j = at + tl.arange(0, WIDE)
        before += tl.load(zeros + row + j, mask=j < start, other=0)
    i = start + tl.arange(0, BLOCK)
    count = tl.cumsum(tl.load(zeros + row + i, mask=i < n, other=0), 0)
    tl.store(counts + row + i, count + node // 2 + tl.sum(before, 0), mask=i < n)


@triton.jit
def smallest_level_kernel(
    numbers, counts, ends, left, found, after, zeros_after, zeros, n, half, next_half, BLOCK: tl.constexpr
):
    """One level of a wavelet tree: each number goes to the lower or the upper half of its node, and each question to
    the half in which its answer lies.

    Numbers are a permutation of 0 to n - 1, and each node has those from its first place on, 2·half or, at the end,
    fewer: of those before it exactly half are lower.

    All int32 (rows, n). numbers: in the order of this level; zeros, counts: whether each is lower, and how many up to
    it are. ends, left, found: of each question where its numbers end, how many smaller are to be left out, and where
    its node begins; they are moved on. after, zeros_after: ``numbers`` and ``zeros`` of the next level.
    """
    blocks = tl.cdiv(n, BLOCK)
    pid = tl.program_id(0)
    i = pid % blocks * BLOCK + tl.arange(0, BLOCK)
    row = tl.cast(pid // blocks, tl.int64) * n
    inside = i < n
    end = tl.load(ends + row + i, mask=inside, other=0)
    wanted = tl.load(left + row + i, mask=inside, other=0)
    begin = tl.load(found + row + i, mask=inside, other=0)
    # Questions without an answer may have left the numbers.
    until = tl.load(counts + row + end - 1, mask=inside & (end > 0) & (end <= n), other=0)
    lower = until - begin // 2
    here = wanted < lower
    tl.store(ends + row + i, tl.where(here, begin + lower, end - lower + half), mask=inside)
    tl.store(left + row + i, tl.where(here, wanted, wanted - lower), mask=inside)
    tl.store(found + row + i, tl.where(here, begin, begin + half), mask=inside)
    x = tl.load(numbers + row + i, mask=inside, other=0)
    zero = tl.load(zeros + row + i, mask=inside, other=0)
    node = x // (2 * half) * (2 * half)
    before = tl.load(counts + row + i, mask=inside, other=0) - zero - node // 2
    to = tl.where(zero != 0, node + before, i + half - before)
    tl.store(after + row + to, x, mask=inside)
    if next_half > 0:
        tl.store(zeros_after + row + to, (x // next_half % 2 == 0).to(tl.int32), mask=inside)


# --- which tiles intervals of queries leave ---


@lru_cache(256)
def _tiles(device: torch.device, matrices: int, keys: int, queries: int, block: tuple[int, int]) -> Launch:
    (block_m, block_n), block_r = block, 32
    numbers = (queries, keys, block_m, block_n, EMPTY, PARTIAL, FULL, triton.next_power_of_2(block_n), block_r)
    return Launch(
        interval_tiles_kernel, matrices * triton.cdiv(keys, block_n), (POINTER,) * 3, numbers, num_warps=4
    )  # fmt: skip


def tiles_of_intervals(begins: Tensor, ends: Tensor, queries: int, block: tuple[int, int]) -> Tensor:
    """`tilewise.score.tile_tensors.tiles_of_intervals` of tensors on a GPU, int32 and contiguous."""
    b, h, _, keys = begins.shape
    with device_of(begins):
        tiles = begins.new_empty(b, h, triton.cdiv(queries, block[0]), triton.cdiv(keys, block[1]))
        _tiles(begins.device, b * h, keys, queries, block)(begins, ends, tiles)
    return tiles


@triton.jit
def interval_tiles_kernel(
    begins, ends, tiles, queries, keys, block_m, block_n, EMPTY: tl.constexpr, PARTIAL: tl.constexpr,
    FULL: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """One program a tile of keys of one matrix, BLOCK_R tiles of queries at once: of each whether it is hidden, full,
    or anything between. begins, ends: int32 (matrices, keys), within the queries."""
    rows, cols = tl.cdiv(queries, block_m), tl.cdiv(keys, block_n)
    pid = tl.program_id(0)
    col, matrix = pid % cols, tl.cast(pid // cols, tl.int64)
    i = tl.arange(0, BLOCK_N)
    key = col * block_n + i
    inside = (i < block_n) & (key < keys)
    begin = tl.load(begins + matrix * keys + key, mask=inside, other=0)
    end = tl.load(ends + matrix * keys + key, mask=inside, other=0)
    first = begin // block_m
    last = tl.where(end > begin, (end + block_m - 1) // block_m, first)
    whole_end = tl.where(inside & (end < queries), end // block_m, rows)
    full_from, full_to = tl.max((begin + block_m - 1) // block_m, 0), tl.min(whole_end, 0)
    for start in range(0, rows, BLOCK_R):
        m = start + tl.arange(0, BLOCK_R)
        meets = (first[None, :] <= m[:, None]) & (m[:, None] < last[None, :])
        some = tl.where(tl.max(meets.to(tl.int32), 1) > 0, PARTIAL, EMPTY)
        found = tl.where((m >= full_from) & (m < full_to), FULL, some)
        tl.store(tiles + (matrix * rows + m) * cols + col, found, mask=m < rows)
