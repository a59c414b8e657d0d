"""Packed batches in Gluon kernels: a work tile list made on the device, and TMA boxes that end where sequences do.

The host does not read the lengths. One kernel lists the query tiles of all sequences, those with most keys first: each
of its programs takes some sequences and counts the tiles before them, so that nothing is sorted. A forward program
takes the next tile of the list and reads its sequence's data beside it. The backward also has a list of key tiles,
those with most queries first.

The list, int32: a head of `LIST_HEAD` numbers, of which the first is the number of tiles and number `SEMAPHORE` a
counter that starts at 0, then `ENTRY` numbers per tile.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon

from tilewise.backends.gluon import RAGGED_ROWS
from tilewise.backends.launch.launcher import POINTER, Launch, Record, Within, strided
from tilewise.spec.problem import Problem
from tilewise.spec.seqlens import Lengths

LIST_HEAD = tl.constexpr(8)
SEMAPHORE = 4  # index of the counter
AT_SEMAPHORE = Within(SEMAPHORE, 4 * SEMAPHORE)
ENTRY = tl.constexpr(8)  # tile in its sequence, first query, first key, queries, keys, sequence; two unused
SEQUENCES = tl.constexpr(128)  # sequences per program of `tiles_kernel`
RAGGED_AXIS = tl.constexpr(RAGGED_ROWS)  # rows of the axis that `box_of` counts from its end


class SeqInfo(NamedTuple):
    """Sequence of a work tile, read once per tile; the whole batch element in a dense call."""

    first_query: Any  # first row in q, and in tensors packed like q
    first_key: Any
    queries: Any
    keys: Any
    diagonal: Any  # packed batch: keys - queries, as window limits count from the last query and key; 0 in a dense call


@triton.jit
def listed_tile(tile_list, n):
    """Return (`SeqInfo`, query tile) of the ``n``-th work tile."""
    at = tile_list + LIST_HEAD + n * ENTRY
    queries, keys = tl.load(at + 3), tl.load(at + 4)
    return SeqInfo(tl.load(at + 1), tl.load(at + 2), queries, keys, keys - queries), tl.load(at)


@triton.jit
def listed_tile_and_head(tile_list, t, heads, BLOCK: tl.constexpr, BY_KEYS: tl.constexpr):
    """Return (`SeqInfo`, tile, head, an entry of the sequence) of the ``t``-th tile among those of all heads. The tiles
    of one head of a sequence, which share keys or queries, precede those of the next head. All heads of earlier
    sequences come first: the entry t // heads is of this sequence."""
    n = t // heads
    seq, tile = listed_tile(tile_list, n)
    tiles = tl.cdiv(seq.keys if BY_KEYS else seq.queries, BLOCK)
    nth = tile if BY_KEYS else tiles - 1 - tile
    t -= (n - nth) * heads  # relative to the sequence's first tile
    nth = t % tiles
    return seq, nth if BY_KEYS else tiles - 1 - nth, t // tiles, n


@triton.jit
def first_tile_of(tile_list, n, seq, BLOCK_M: tl.constexpr):
    """Return the storage index of the first query tile of the ``n``-th work tile's sequence. Row statistics and dQ sums
    are stored by this index, which leaves enough space for earlier sequences of any length."""
    return seq.first_query // BLOCK_M + tl.load(tile_list + LIST_HEAD + n * ENTRY + 5)


class SumOfHead(NamedTuple):
    """dQ sum of one key/value head of a sequence, which the head's work tiles zero part by part."""

    first: Any  # the head's first work tile
    hk: Any
    place: Any  # storage index of its first query tile, see `first_tile_of`
    tiles: Any  # query tiles
    part: Any  # the part of this work tile
    parts: Any  # number of parts: the head's listed work tiles


@triton.jit
def sum_of_head(tile_list, t, count, kv_heads, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the `SumOfHead` of the ``t``-th of ``count`` work tiles of keys."""
    seq, tile, hk, n = listed_tile_and_head(tile_list, t, kv_heads, BLOCK_N, True)
    parts = tl.minimum(tl.cdiv(seq.keys, BLOCK_N), count - (t - tile))
    place = first_tile_of(tile_list, n, seq, BLOCK_M)
    return SumOfHead(t - tile, hk, place, tl.cdiv(seq.queries, BLOCK_M), tile, parts)


@gluon.jit
def box_of(first, count, b, h, row, c, col=0):
    """Return the TMA coordinates of the tile at (``row``, ``col``); packed: within the ``count`` rows from ``first``
    on."""
    if c.PACKED:
        return [RAGGED_AXIS, first + count, h, RAGGED_AXIS - count + row, col]
    else:
        return [b, h, row, col]


@triton.jit
def _offset(at, n, most, batch):
    """Load offsets, clamped to 0 .. ``most``, so that any contents stay in bounds."""
    found = tl.load(at + n, mask=(n >= 0) & (n < batch), other=0)
    return tl.minimum(tl.maximum(found, 0), most).to(tl.int32)


@triton.jit
def _sequences(lengths, n, batch, sizes):
    """Return first query, first key, queries and keys of the sequences ``n``; 0 where there is none."""
    q0, k0 = (
        _offset(lengths.cu_q, n, sizes.total_queries, batch),
        _offset(lengths.cu_k, n, sizes.total_keys, batch),
    )
    queries = _offset(lengths.cu_q, n + 1, sizes.total_queries, batch + 1) - q0
    keys = _offset(lengths.cu_k, n + 1, sizes.total_keys, batch + 1) - k0
    if lengths.used_k is not None:
        keys = tl.minimum(keys, _offset(lengths.used_k, n, sizes.total_keys, batch))
    there = (n >= 0) & (n < batch)
    queries = tl.where(there, tl.minimum(tl.maximum(queries, 0), sizes.queries), 0)
    keys = tl.where(there, tl.minimum(tl.maximum(keys, 0), sizes.keys), 0)
    return q0, k0, queries, keys


class ListSizes(NamedTuple):
    batch: int
    most: int  # the most tiles of the list
    queries: int  # queries of the longest sequence
    keys: int
    total_queries: int
    total_keys: int
    heads: int
    kv_heads: int
    x_dim: int  # head dimension of x, which is zeroed
    y_dim: int


@triton.jit
def tiles_kernel(lengths, tile_list, x, y, lse, sizes, SEQUENCES: tl.constexpr, BLOCK: tl.constexpr,
                 BY_KEYS: tl.constexpr):  # fmt: skip
    """List the tiles of `SEQUENCES` sequences per program; zero rows without a sequence, and set their LSE to -inf.

    Tiles are of queries, or BY_KEYS of keys.
    lengths: `Lengths` of pointers. x, y: `Strided` tensors of queries, or of keys; y may be None. lse: (1, H, T),
    float32, or None.
    """
    _list_tiles(tl.program_id(0), tl.num_programs(0), lengths, tile_list, x, y, lse, sizes, SEQUENCES, BLOCK, BY_KEYS)


@triton.jit
def both_lists_kernel(lengths, row_list, key_list, x, values, k, v, row_sizes, key_sizes, SEQUENCES: tl.constexpr,
                      BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):  # fmt: skip
    """Run `tiles_kernel` for queries (tensors x, values), and in as many more programs for keys (k, v)."""
    pid, programs = tl.program_id(0), tl.num_programs(0) // 2
    if pid < programs:
        _list_tiles(pid, programs, lengths, row_list, x, values, None, row_sizes, SEQUENCES, BLOCK_M, False)
    else:
        _list_tiles(pid - programs, programs, lengths, key_list, k, v, None, key_sizes, SEQUENCES, BLOCK_N, True)


@triton.jit
def _list_tiles(pid, programs, lengths, tile_list, x, y, lse, sizes, SEQUENCES: tl.constexpr, BLOCK: tl.constexpr,
                BY_KEYS: tl.constexpr):  # fmt: skip
    """Run program ``pid`` of ``programs`` of `tiles_kernel`."""
    n = pid * SEQUENCES + tl.arange(0, SEQUENCES)
    q0, k0, queries, keys = _sequences(lengths, n, sizes.batch, sizes)
    mine, length = (keys, queries) if BY_KEYS else (queries, keys)
    tiles = (mine + BLOCK - 1) // BLOCK
    place, count = n * 0, pid * 0
    for first in range(0, sizes.batch, SEQUENCES):
        other = first + tl.arange(0, SEQUENCES)
        _, _, their_queries, their_keys = _sequences(lengths, other, sizes.batch, sizes)
        theirs, their_length = (their_keys, their_queries) if BY_KEYS else (their_queries, their_keys)
        their_tiles = (theirs + BLOCK - 1) // BLOCK
        before = (their_length[None, :] > length[:, None]) | (
            (their_length[None, :] == length[:, None]) & (other[None, :] < n[:, None])
        )
        place += tl.sum(tl.where(before, their_tiles[None, :], 0), 1)
        count += tl.sum(their_tiles, 0)
    if pid == 0:
        count = tl.minimum(count, sizes.most)
        tl.store(tile_list + tl.arange(0, LIST_HEAD), tl.where(tl.arange(0, LIST_HEAD) == 0, count, 0))
    at = tile_list + LIST_HEAD + place * ENTRY
    for i in range(0, tl.max(tiles, 0)):  # the last queries see most keys: they come first, and so do the first keys
        # Overlapping sequences, from descending offsets, may have more tiles than fit the list.
        inside, to = (i < tiles) & (place + i < sizes.most), at + i * ENTRY
        tl.store(to, (n * 0 + i) if BY_KEYS else tiles - 1 - i, mask=inside)
        tl.store(to + 1, q0, mask=inside)
        tl.store(to + 2, k0, mask=inside)
        tl.store(to + 3, queries, mask=inside)
        tl.store(to + 4, keys, mask=inside)
        tl.store(to + 5, n, mask=inside)
    if not (BY_KEYS and lengths.used_k is not None):
        _zero_between(pid, programs, lengths, x, y, lse, sizes, SEQUENCES, BY_KEYS)


@triton.jit
def _rows_of(lengths, n, sizes, BY_KEYS: tl.constexpr):
    """Return where the rows of the sequences ``n`` begin, and where those that kernels write end."""
    q0, k0, queries, keys = _sequences(lengths, n, sizes.batch, sizes)
    if BY_KEYS:
        return k0, k0 + keys
    else:
        return q0, q0 + queries


@triton.jit
def _zero_between(pid, programs, lengths, x, y, lse, sizes, SEQUENCES: tl.constexpr, BY_KEYS: tl.constexpr):
    """Zero the rows of x and y without a sequence, and set their LSE to -inf. Gaps between sequences occur only if
    offsets or longest lengths are wrong; all programs share the rows after the last."""
    total, heads = (sizes.total_keys, sizes.kv_heads) if BY_KEYS else (sizes.total_queries, sizes.heads)
    n = pid * SEQUENCES + tl.arange(0, SEQUENCES)
    begins, _ = _rows_of(lengths, n, sizes, BY_KEYS)
    _, ends = _rows_of(lengths, n - 1, sizes, BY_KEYS)
    gap = tl.where(n < sizes.batch, begins - ends, 0)
    for i in range(0, tl.max(gap, 0)):
        _zero(x, y, lse, ends + i, i < gap, total, heads, sizes)
    _, end = _rows_of(lengths, sizes.batch - 1 + tl.arange(0, 1), sizes, BY_KEYS)
    for first in range(tl.sum(end, 0) + pid * SEQUENCES, total, programs * SEQUENCES):
        rows = first + tl.arange(0, SEQUENCES)
        _zero(x, y, lse, rows, rows < total, total, heads, sizes)


@triton.jit
def _zero(x, y, lse, rows, inside, total, heads, sizes):
    for h in range(0, heads):
        _zero_rows(x, h, rows, inside, sizes.x_dim)
        if y is not None:
            _zero_rows(y, h, rows, inside, sizes.y_dim)
        if lse is not None:
            at = lse + tl.cast(h, tl.int64) * total + rows
            tl.store(at, tl.full([rows.shape[0]], -float("inf"), tl.float32), mask=inside)


@triton.jit
def _zero_rows(x, h, rows, inside, dim):
    at = x.pointer + tl.cast(h, tl.int64) * x.stride1 + rows.to(tl.int64)[:, None] * x.stride2
    for d0 in range(0, dim, 16):
        cols = d0 + tl.arange(0, 16)
        zeros = tl.zeros([rows.shape[0], 16], x.pointer.dtype.element_ty)
        tl.store(at + cols[None, :], zeros, mask=inside[:, None] & (cols < dim)[None, :])


class TileList:
    """Launch that makes the list, for one problem and one layout of its tensors.

    x, y: tensors of queries, or by_keys of keys, whose rows without a sequence are zeroed; their LSE becomes -inf. With
    `Lengths.used_k` and by_keys the caller must zero them: most rows may be unused.
    """

    def __init__(self, problem: Problem, block: int, x: Tensor, y: Tensor | None = None, by_keys: bool = False):
        self.shape, sizes = _list_sizes(problem, block, x, y, by_keys)
        self.make = Launch(
            tiles_kernel, _list_programs(problem), (_POINTERS, POINTER, strided(x), _strided_if(y), POINTER),
            (sizes, SEQUENCES.value, block, by_keys), num_warps=8,
        )  # fmt: skip

    def __call__(self, lengths: Lengths, x: Tensor, y: Tensor | None = None, lse: Tensor | None = None) -> Tensor:
        """Return the list."""
        tile_list = x.new_empty(self.shape, dtype=torch.int32)
        self.make(*_contiguous(lengths), tile_list, x, y, lse)
        return tile_list


class BothLists:
    """Launch that makes both lists of a backward, of queries and of keys.

    x, values: tensors of queries; k, v: of keys, as for `TileList`.
    """

    def __init__(
        self, problem: Problem, block_m: int, block_n: int, x: Tensor, values: Tensor | None, k: Tensor, v: Tensor
    ):
        of_rows, of_keys = _list_sizes(problem, block_m, x, values, False), _list_sizes(problem, block_n, k, v, True)
        self.shapes = of_rows[0], of_keys[0]
        self.make = Launch(
            both_lists_kernel, 2 * _list_programs(problem),
            (_POINTERS, POINTER, POINTER, strided(x), _strided_if(values), strided(k), strided(v)),
            (of_rows[1], of_keys[1], SEQUENCES.value, block_m, block_n), num_warps=8,
        )  # fmt: skip

    def __call__(
        self, lengths: Lengths, x: Tensor, values: Tensor | None, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the list of query tiles and the list of key tiles."""
        rows, keys = self.shapes
        row_list, key_list = x.new_empty(rows, dtype=torch.int32), x.new_empty(keys, dtype=torch.int32)
        self.make(*_contiguous(lengths), row_list, key_list, x, values, k, v)
        return row_list, key_list


_POINTERS = Record(Lengths, (POINTER,) * 4)


def _strided_if(x: Tensor | None) -> Any:
    return POINTER if x is None else strided(x)


def _contiguous(lengths: Lengths) -> tuple[Tensor | None, ...]:
    cu_q, cu_k, used_k, _ = lengths  # a ragged bias runs in Triton
    assert cu_q is not None
    assert cu_k is not None
    return cu_q.contiguous(), cu_k.contiguous(), None if used_k is None else used_k.contiguous(), None


def _list_programs(problem: Problem) -> int:
    return -(-problem.batch // SEQUENCES.value) + 31  # 31 more programs help to zero unused rows


def _list_sizes(problem: Problem, block: int, x: Tensor, y: Tensor | None, by_keys: bool) -> tuple[int, ListSizes]:
    """Return the length of a list, and the sizes that its kernel needs."""
    assert problem.totals is not None
    most = problem.totals[by_keys] // block + problem.batch  # tiles per head
    sizes = ListSizes(
        problem.batch, most, problem.queries, problem.keys, *problem.totals, problem.heads, problem.kv_heads,
        x.shape[3], 0 if y is None else y.shape[3],
    )  # fmt: skip
    return LIST_HEAD.value + ENTRY.value * most, sizes
