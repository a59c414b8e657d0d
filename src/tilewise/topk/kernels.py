"""Triton kernels of dynamic masks: selected keys of intervals and chunks, gathered rows, their gradients.

On a GPU the PyTorch operators of `tilewise.topk.gather` and `tilewise.topk.selection` would take a few hundred
launches, or move several times the bytes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewise.backends import device_of
from tilewise.backends.kernels.interval_tiles import _store_tiles
from tilewise.backends.launch.launcher import POINTER, Launch, Strided, strided
from tilewise.cache import prepared_once
from tilewise.spec.block_mask import WORD, TileTensors

TILE = 128  # tile size of the mask of gathered keys
_BLOCK = 1024
# Key of a cached launch beside its numbers: device and dtypes, since a launch reuses its compiled kernel.
Kind = tuple[torch.device, *tuple[torch.dtype, ...]]


# --- gathered rows, and their gradients ---


@prepared_once
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
    """Gather rows of x (B, H, N, D), (B · chunks, H, cols, D); rows N and above are 0.

    keys: (B|1, H'|1, chunks, cols), where H' divides H.
    """
    B, H, _, D = x.shape
    chunks, cols = keys.shape[2:]
    with device_of(x):
        keys = keys.contiguous()
        found = x.new_empty(B * chunks, H, cols, D)
        kind = x.device, x.dtype, keys.dtype
        _take_rows(kind, tuple(x.shape), chunks, cols, (keys.shape[0], keys.shape[1]), strided(x))(x, keys, found)
    return found


@triton.jit
def take_rows_kernel(
    x, keys, found, heads, count, dim, chunks, cols, of_batch, group, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Each program gathers a block of rows of one head and chunk."""
    blocks = tl.cdiv(cols, BLOCK_R)
    pid = tl.program_id(0)
    r, row = pid % blocks * BLOCK_R + tl.arange(0, BLOCK_R), pid // blocks
    h, c, b = row % heads, row // heads % chunks, row // heads // chunks
    d = tl.arange(0, BLOCK_D)
    inside = (r < cols)[:, None] & (d < dim)[None, :]
    at_keys = keys + tl.cast(b, tl.int64) * of_batch + tl.cast(h // group * chunks + c, tl.int64) * cols
    key = tl.load(at_keys + r, mask=r < cols, other=count)
    at = x.pointer + tl.cast(b, tl.int64) * x.stride0 + tl.cast(h, tl.int64) * x.stride1
    at = at + key.to(tl.int64)[:, None] * x.stride2 + d.to(tl.int64)[None, :] * x.stride3
    value = tl.load(at, mask=inside & (key < count)[:, None], other=0.0)
    tl.store(found + (tl.cast(row, tl.int64) * cols + r[:, None]) * dim + d[None, :], value, mask=inside)


@prepared_once
def _sum_rows(
    kind: Kind, shape: tuple[int, ...], chunks: int, keys_shape: tuple[int, int], grad: Strided, total: Strided
) -> Launch:
    B, H, N, D = shape
    batch, heads = keys_shape
    block_d = triton.next_power_of_2(D)
    block_n = max(4096 // block_d, 1)
    programs = B * H * triton.cdiv(N, block_n)
    of = heads * chunks * N if batch > 1 else 0
    return Launch(
        sum_rows_kernel, programs, (grad, POINTER, total), (H, N, D, chunks, of, H // heads, block_n, block_d),
        num_warps=4,
    )  # fmt: skip


@prepared_once
def _places(kind: Kind, count: int, cols: int, rows: int) -> Launch:
    blocks = triton.cdiv(cols, _BLOCK)
    return Launch(places_kernel, rows * blocks, (POINTER,) * 2, (count, cols, _BLOCK), num_warps=4)


def places_of(keys: Tensor, count: int) -> Tensor:
    """Return the place of each of ``count`` keys in each chunk, (B|1, H'|1, chunks, count) int32, else -1.

    keys: (B|1, H'|1, chunks, cols), distinct in each chunk; ``count`` and above are ignored.
    """
    cols = keys.shape[3]
    with device_of(keys):
        places = torch.full((*keys.shape[:3], count), -1, dtype=torch.int32, device=keys.device)
        _places((keys.device, keys.dtype), count, cols, keys.numel() // cols)(keys.contiguous(), places)
    return places


@triton.jit
def places_kernel(keys, places, count, cols, BLOCK: tl.constexpr):
    """Each program handles a block of the keys of one chunk."""
    blocks = tl.cdiv(cols, BLOCK)
    pid = tl.program_id(0)
    place, row = pid % blocks * BLOCK + tl.arange(0, BLOCK), tl.cast(pid // blocks, tl.int64)
    key = tl.load(keys + row * cols + place, mask=place < cols, other=count)
    tl.store(places + row * count + key, place, mask=key < count)


def sum_rows(
    grad: Tensor, places: Tensor, shape: tuple[int, int, int, int], dtype: torch.dtype, by_heads: bool
) -> Tensor:
    """Return the gradient (B, H, N, D) of gathered rows with gradient (B · chunks, H, cols, D).

    Summed in float32, in the order of the chunks. places: from `places_of`, where H' divides H. by_heads: the result's
    memory order is (B, N, H, D).
    """
    B, H, N, D = shape
    chunks = places.shape[2]
    with device_of(grad):
        total = grad.new_empty((B, N, H, D) if by_heads else shape, dtype=dtype)
        total = total.transpose(1, 2) if by_heads else total
        kind = grad.device, grad.dtype, dtype
        heads = places.shape[0], places.shape[1]
        sums = _sum_rows(kind, tuple(shape), chunks, heads, strided(grad), strided(total))
        sums(grad, places, total)
    return total


@triton.jit
def sum_rows_kernel(
    grad, places, total, heads, keys, dim, chunks, of_batch, group, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Each program sums a block of keys of one head."""
    blocks = tl.cdiv(keys, BLOCK_N)
    pid = tl.program_id(0)
    n, h, b = pid % blocks * BLOCK_N + tl.arange(0, BLOCK_N), pid // blocks % heads, pid // blocks // heads
    d = tl.arange(0, BLOCK_D)
    inside = n < keys
    at_places = places + tl.cast(b, tl.int64) * of_batch + tl.cast(h // group * chunks, tl.int64) * keys
    at_head = grad.pointer + tl.cast(h, tl.int64) * grad.stride1 + d.to(tl.int64)[None, :] * grad.stride3
    found = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    # Load the places of four chunks, then their rows: a load of rows waits for the load of its addresses.
    for c in range(0, chunks, 4):
        at = at_places + tl.cast(h * 0 + c, tl.int64) * keys + n
        place0 = tl.load(at, mask=inside, other=-1)
        place1 = tl.load(at + keys, mask=inside & (c + 1 < chunks), other=-1)
        place2 = tl.load(at + 2 * keys, mask=inside & (c + 2 < chunks), other=-1)
        place3 = tl.load(at + 3 * keys, mask=inside & (c + 3 < chunks), other=-1)
        row0 = _rows_at(grad, at_head, b * chunks + c, place0, d < dim)
        row1 = _rows_at(grad, at_head, b * chunks + c + 1, place1, d < dim)
        row2 = _rows_at(grad, at_head, b * chunks + c + 2, place2, d < dim)
        row3 = _rows_at(grad, at_head, b * chunks + c + 3, place3, d < dim)
        found = found + row0.to(tl.float32) + row1.to(tl.float32) + row2.to(tl.float32) + row3.to(tl.float32)
    to = total.pointer + tl.cast(b, tl.int64) * total.stride0 + tl.cast(h, tl.int64) * total.stride1
    to = to + n.to(tl.int64)[:, None] * total.stride2 + d.to(tl.int64)[None, :] * total.stride3
    tl.store(to, found.to(total.pointer.dtype.element_ty), mask=inside[:, None] & (d < dim)[None, :])


@triton.jit
def _rows_at(grad, at_head, chunk, place, cols):
    """Load gathered rows of a chunk at places, 0 for -1."""
    at = at_head + tl.cast(chunk, tl.int64) * grad.stride0 + place.to(tl.int64)[:, None] * grad.stride2
    return tl.load(at, mask=(place >= 0)[:, None] & cols[None, :], other=0.0)


# --- when keys are dropped ---


@prepared_once
def _levels(device: torch.device, rows: int, n: int, wanted: int) -> tuple[Launch, list[tuple[Launch, Launch]]]:
    """Return the first launch, and for each level its counting and its moving launch."""
    half = 1 << max((n - 1).bit_length() - 1, 0)
    programs = rows * triton.cdiv(n, _BLOCK)
    start = Launch(smallest_start_kernel, programs, (POINTER,) * 6, (n, half, wanted, _BLOCK), num_warps=4)
    levels = []
    while half > 0:
        levels.append((
            Launch(smallest_counts_kernel, programs, (POINTER,) * 2, (n, half, _BLOCK, 4 * _BLOCK), num_warps=4),
            Launch(smallest_level_kernel, programs, (POINTER,) * 8, (n, half, half // 2, _BLOCK), num_warps=4),
        ))  # fmt: skip
        half //= 2
    return start, levels


def running_smallest(order: Tensor, w: int) -> Tensor:
    """Return `tilewise.topk.selection.running_smallest` of a tensor on a GPU, int32."""
    with device_of(order):
        found = _smallest(order.contiguous(), w)
        return torch.where(torch.arange(order.shape[-1], device=order.device) < w, order.shape[-1], found)


def _smallest(order: Tensor, w: int) -> Tensor:
    """Return `running_smallest` of a contiguous tensor, with undefined values at the first ``w`` places."""
    n, rows = order.shape[-1], order.numel() // order.shape[-1]
    device, size = order.device, order.numel()
    # One allocation; each part is aligned to 16 bytes.
    parts = torch.empty(8, -(-size // 4) * 4, dtype=torch.int32, device=device)
    numbers, counts, ends, left, found, after, zeros_after, zeros = parts.unbind()
    start, levels = _levels(device, rows, n, min(w, n + 1) - 1)
    start(order, numbers, ends, left, found, zeros)
    for count, move in levels:
        count(zeros, counts)
        move(numbers, counts, ends, left, found, after, zeros_after, zeros)
        numbers, after, zeros, zeros_after = after, numbers, zeros_after, zeros
    return found[:size].view(order.shape)


@triton.jit
def smallest_start_kernel(order, numbers, ends, left, found, zeros, n, half, wanted, BLOCK: tl.constexpr):
    """Initialize the arrays of `smallest_level_kernel`; each program a block of ``order``, int64."""
    blocks = tl.cdiv(n, BLOCK)
    pid = tl.program_id(0)
    i = pid % blocks * BLOCK + tl.arange(0, BLOCK)
    at = tl.cast(pid // blocks, tl.int64) * n + i
    inside = i < n
    x = tl.load(order + at, mask=inside, other=0).to(tl.int32)
    tl.store(numbers + at, x, mask=inside)
    tl.store(zeros + at, (x < half).to(tl.int32), mask=inside)
    tl.store(ends + at, i, mask=inside)
    tl.store(left + at, tl.zeros([BLOCK], tl.int32) + wanted, mask=inside)
    tl.store(found + at, tl.zeros([BLOCK], tl.int32), mask=inside)


@triton.jit
def smallest_counts_kernel(zeros, counts, n, half, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """Sum ``zeros`` of `smallest_level_kernel` along rows into ``counts``; each program a block.

    Exactly half of the numbers in earlier nodes are lower, so that only the block's own node is summed, WIDE numbers at
    a time. torch.cumsum has one program per row, as few as there are heads.
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
    """Process one level of a wavelet tree: numbers and lookups move to the lower or upper half of their node.

    Numbers are a permutation of 0 to n - 1. A node has the 2·half numbers (fewer at the end) from its first place on;
    of the numbers before it exactly half are lower.

    All arrays are int32 (rows, n).
    numbers: in the order of this level; zeros, counts: 1 if a number is lower, and the number of those so far.
    ends, left, found: of each lookup, end of its range, smaller numbers to skip, and first place of its node; updated.
    after, zeros_after: ``numbers`` and ``zeros`` of the next level.
    """
    blocks = tl.cdiv(n, BLOCK)
    pid = tl.program_id(0)
    i = pid % blocks * BLOCK + tl.arange(0, BLOCK)
    row = tl.cast(pid // blocks, tl.int64) * n
    inside = i < n
    end = tl.load(ends + row + i, mask=inside, other=0)
    wanted = tl.load(left + row + i, mask=inside, other=0)
    begin = tl.load(found + row + i, mask=inside, other=0)
    # Lookups without an answer may be out of range.
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


# --- intervals of queries ---


@prepared_once
def _intervals(device: torch.device, rows: int, n: int, queries: int, keep: int, causal: bool) -> Launch:
    blocks = triton.cdiv(n, _BLOCK)
    numbers = (n, queries, keep, causal, _BLOCK)
    return Launch(selected_intervals_kernel, rows * blocks, (POINTER,) * 4, numbers, num_warps=4)


def selected_intervals(order: Tensor, keep: int, causal: bool, queries: int) -> tuple[Tensor, Tensor]:
    """Return from and up to which query each key is selected, int32 (B, H, 1, N).

    order: int64 (B, H, N), keys, best first.
    """
    b, h, n = order.shape
    with device_of(order):
        order = order.contiguous()
        gone = _smallest(order, keep) if causal else None
        begins, ends = (torch.empty(b, h, 1, n, dtype=torch.int32, device=order.device) for _ in range(2))
        _intervals(order.device, b * h, n, queries, min(keep, n), causal)(order, gone, begins, ends)
    return begins, ends


@triton.jit
def selected_intervals_kernel(
    order, gone, begins, ends, n, queries, keep, CAUSAL: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Each program handles a block of places in the order.

    gone: with CAUSAL, the key at which the key at a place is dropped, from place ``keep`` on.
    """
    blocks = tl.cdiv(n, BLOCK)
    pid = tl.program_id(0)
    i = pid % blocks * BLOCK + tl.arange(0, BLOCK)
    row = tl.cast(pid // blocks, tl.int64) * n
    inside = i < n
    key = tl.load(order + row + i, mask=inside, other=0).to(tl.int32)
    if CAUSAL:
        begin = tl.minimum(tl.maximum(key - (n - queries), 0), queries)
        last = tl.load(gone + row + i, mask=inside & (i >= keep), other=n)
        end = tl.where(last < n, tl.minimum(tl.maximum(last - (n - queries), begin), queries), queries)
    else:
        begin = tl.zeros([BLOCK], tl.int32)
        end = tl.where(i < keep, queries, 0)
    tl.store(begins + row + key, begin, mask=inside)
    tl.store(ends + row + key, end, mask=inside)


# --- the keys of chunks of queries ---


@prepared_once
def _chosen(
    device: torch.device, matrices: int, n: int, chunks: int, rows: int, cols: int, limits: tuple[int, int],
    ranked: bool,
) -> Launch:  # fmt: skip
    block = min(triton.next_power_of_2(n), 4 * _BLOCK)  # a program loops over blocks
    numbers = (n, chunks, rows, cols, *limits, ranked, block)
    return Launch(chosen_keys_kernel, matrices * chunks, (POINTER,) * 4, numbers, num_warps=16)


@prepared_once
def _ordered(
    device: torch.device, batch: int, own: int, heads: int, n: int, chunks: int, rows: int, cols: int,
    limits: tuple[int, int],
) -> Launch:  # fmt: skip
    programs = batch * chunks * heads * triton.cdiv(cols, TILE)
    numbers = (n, own, heads, chunks, rows, cols, *limits, TILE, 32)
    return Launch(ordered_keys_kernel, programs, (POINTER,) * 8, numbers, num_warps=1)


def keys_of_chunks(
    begins: Tensor, ends: Tensor, limits: tuple[int, int], gather: tuple[int, int, int, bool], batch: int
) -> tuple[Tensor, TileTensors | None]:
    """Return `tilewise.topk.gather.of_chunks` of a GPU: int32 keys, (B|1, H|1, chunks, cols), and their mask.

    begins, ends: int32 (B|1, H|1, 1, N), contiguous. limits: from `tilewise.spec.tiles.limits`. gather: a
    `tilewise.topk.gather.Gather`.
    """
    (b, h, _, n), (chunks, rows, cols, masked) = begins.shape, gather
    device = begins.device
    with device_of(begins):
        keys = begins.new_empty(b, h, chunks, cols)
        few = torch.int16 if 2 * rows + 1 < 2**15 else torch.int32  # a radix sort takes time per bit
        ranks = torch.empty_like(keys, dtype=few) if masked else None
        _chosen(device, b * h, n, chunks, rows, cols, limits, masked)(begins, ends, keys, ranks)
        if ranks is None:
            return keys, None
        order = ranks.sort(dim=-1, stable=True).indices
        ordered = torch.empty_like(keys)
        seen_from, seen_to = (begins.new_empty(batch * chunks, h, 1, cols) for _ in range(2))
        tiles = begins.new_empty(batch * chunks, h, triton.cdiv(rows, TILE), triton.cdiv(cols, TILE))
        put = _ordered(device, batch, b, h, n, chunks, rows, cols, limits)
        put(order, keys, begins, ends, ordered, seen_from, seen_to, tiles)
    return ordered, TileTensors(tiles, begins.new_empty(0, TILE, TILE // WORD), seen_from, seen_to)


@triton.jit
def _seen(begins, ends, row, key, these, first, rows, lo, hi):
    """Return from and up to which query of a chunk a key is visible, equal if it is not; 0 outside ``these``."""
    begin = tl.maximum(tl.load(begins + row + key, mask=these, other=0), key - hi)
    end = tl.minimum(tl.load(ends + row + key, mask=these, other=0), key - lo + 1)
    seen_from = tl.minimum(tl.maximum(begin - first, 0), rows)
    seen_to = tl.maximum(tl.minimum(end - first, rows), seen_from)
    return tl.where(these, seen_from, 0), tl.where(these, seen_to, 0)


@triton.jit
def chosen_keys_kernel(
    begins, ends, keys, ranks, count, chunks, rows, cols, lo, hi, RANKED: tl.constexpr, BLOCK: tl.constexpr
):
    """Each program lists the keys of one chunk and matrix, ascending and padded with ``count``.

    RANKED: also their ranks, ordered as by `tilewise.topk.gather._in_order`, padding last.
    """
    pid = tl.program_id(0)
    first, row, at = pid % chunks * rows, tl.cast(pid // chunks, tl.int64) * count, tl.cast(pid, tl.int64) * cols
    done = 0
    for start in range(0, count, BLOCK):
        key = start + tl.arange(0, BLOCK)
        seen_from, seen_to = _seen(begins, ends, row, key, key < count, first, rows, lo, hi)
        chosen = seen_to > seen_from
        place = done + tl.cumsum(chosen.to(tl.int32), 0) - 1
        # At most cols keys, even if the mask was changed.
        here = chosen & (place < cols)
        tl.store(keys + at + place, key, mask=here)
        if RANKED:
            rank = tl.where(seen_from == 0, rows - seen_to, rows + seen_from)
            tl.store(ranks + at + place, rank, mask=here)
        done += tl.sum(chosen.to(tl.int32), 0)
    for start in range(0, cols, BLOCK):
        place = start + tl.arange(0, BLOCK)
        none = (place >= done) & (place < cols)
        tl.store(keys + at + place, tl.zeros([BLOCK], tl.int32) + count, mask=none)
        if RANKED:
            tl.store(ranks + at + place, tl.zeros([BLOCK], tl.int32) + (2 * rows + 1), mask=none)


@triton.jit
def ordered_keys_kernel(
    order, keys, begins, ends, ordered, seen_from, seen_to, tiles, count, own, heads, chunks, rows, cols, lo, hi,
    TILE: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Each program orders a tile of keys of one chunk and head and writes its intervals and mask tiles.

    order: int64, for ``own`` batch elements, 1 if it is broadcast. Chunks are batch elements.
    """
    row_tiles, col_tiles = tl.cdiv(rows, TILE), tl.cdiv(cols, TILE)
    pid = tl.program_id(0)
    col, matrix = pid % col_tiles, pid // col_tiles
    h, c, b = matrix % heads, matrix // heads % chunks, matrix // heads // chunks
    of = tl.where(own > 1, b, 0) * heads + h
    place = col * TILE + tl.arange(0, TILE)
    inside = place < cols
    at = tl.cast(of * chunks + c, tl.int64) * cols
    from_place = tl.load(order + at + place, mask=inside, other=0)
    key = tl.load(keys + at + from_place, mask=inside, other=count)
    tl.store(ordered + at + place, key, mask=inside & (b < own))
    begin, end = _seen(begins, ends, tl.cast(of, tl.int64) * count, key, key < count, c * rows, rows, lo, hi)
    to = tl.cast(matrix, tl.int64) * cols + place
    tl.store(seen_from + to, begin, mask=inside)
    tl.store(seen_to + to, end, mask=inside)
    to_tiles = tiles + tl.cast(matrix, tl.int64) * row_tiles * col_tiles + col
    _store_tiles(to_tiles, begin, end, inside, rows, row_tiles, col_tiles, TILE, BLOCK_R)
