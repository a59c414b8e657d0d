"""Packed batches in kernels in Gluon: a list of work tiles made on the device, and boxes that end where sequences do.

Nobody waits for lengths. One kernel lists the tiles of queries of all sequences, those with most keys first: each
program of it takes some sequences and counts what stands before them, so that nothing is sorted. A program of the
forward takes the next tile of the list, and reads beside it all that it must know of its sequence.

The list, int32: a head of `HEAD` numbers, of which the first is the number of tiles and number `SEMAPHORE` a counter
that starts at 0, and then `ENTRY` numbers for each tile.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon

from tilewise.backends.launcher import POINTER, Launch, Record, strided
from tilewise.problem import Problem
from tilewise.score.lengths import Lengths

HEAD = tl.constexpr(8)
SEMAPHORE = 4  # 16 bytes from the begin
ENTRY = tl.constexpr(8)  # tile of its sequence, first query, first key, queries, keys, and some without a use
SEQUENCES = tl.constexpr(128)  # of a program of `tiles_kernel`
LONGEST = 2**30  # rows that a box of `tensors.ragged` can count


class SeqInfo(NamedTuple):
    """The sequence of a work tile, read once for each; of a dense call all there is."""

    first_query: Any  # row of q, and of what lies packed as q does
    first_key: Any
    queries: Any
    keys: Any
    diagonal: Any  # of a packed batch, by how much the band is moved: its limits count from the last query and key


@triton.jit
def listed_tile(tile_list, n):
    """(`SeqInfo`, tile of its queries) of the ``n``-th work tile."""
    at = tile_list + HEAD + n * ENTRY
    queries, keys = tl.load(at + 3), tl.load(at + 4)
    return SeqInfo(tl.load(at + 1), tl.load(at + 2), queries, keys, keys - queries), tl.load(at)


@triton.jit
def sizes_of(seq, sizes):
    """The sizes of a dense call of one sequence."""
    return ForwardSizes(1, sizes.heads, sizes.group, seq.queries, seq.keys, 0, 0, 0, 0)


@gluon.jit
def box_of(first, count, b, h, row, c):
    """Where TMA finds the tile from row ``row`` on: of a packed batch, of the ``count`` rows from ``first`` on."""
    if c.PACKED:
        return [1 << 30, first + count, h, (1 << 30) - count + row, 0]
    else:
        return [b, h, row, 0]


@triton.jit
def _offset(at, n, most, batch):
    """Offsets between 0 and ``most``, whatever stands there: nothing outside is read or written."""
    found = tl.load(at + n, mask=(n >= 0) & (n < batch), other=0)
    return tl.minimum(tl.maximum(found, 0), most).to(tl.int32)


@triton.jit
def _sequences(lengths, n, batch, sizes):
    """First query, first key, queries and keys of the sequences ``n``; 0 where there is none."""
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


class ForwardSizes(NamedTuple):
    batch: int
    heads: int
    group: int  # query heads that share a key/value head
    queries: int
    keys: int
    row_tiles: int  # tiles of queries of one head
    tiles: int  # of all heads and batch elements
    at_once: int  # heads whose tiles run together, see work_tile_at
    last: int  # the first head of the last of them


class ListSizes(NamedTuple):
    batch: int
    queries: int  # of the longest sequence
    keys: int
    total_queries: int
    total_keys: int
    heads: int
    dim: int  # of o


@triton.jit
def tiles_kernel(lengths, tile_list, o, lse, sizes, SEQUENCES: tl.constexpr, BLOCK_M: tl.constexpr):
    """List the tiles of `SEQUENCES` sequences a program; and zero O and the LSE of rows that no sequence has.

    lengths: `Lengths` of pointers. o: `Strided`. lse: (1, H, T), float32.
    """
    pid = tl.program_id(0)
    n = pid * SEQUENCES + tl.arange(0, SEQUENCES)
    q0, k0, queries, keys = _sequences(lengths, n, sizes.batch, sizes)
    tiles = (queries + BLOCK_M - 1) // BLOCK_M
    place, count = n * 0, pid * 0
    for first in range(0, sizes.batch, SEQUENCES):
        other = first + tl.arange(0, SEQUENCES)
        _, _, their_queries, their_keys = _sequences(lengths, other, sizes.batch, sizes)
        their_tiles = (their_queries + BLOCK_M - 1) // BLOCK_M
        before = (their_keys[None, :] > keys[:, None]) | (
            (their_keys[None, :] == keys[:, None]) & (other[None, :] < n[:, None])
        )
        place += tl.sum(tl.where(before, their_tiles[None, :], 0), 1)
        count += tl.sum(their_tiles, 0)
    if pid == 0:
        tl.store(tile_list + tl.arange(0, HEAD), tl.where(tl.arange(0, HEAD) == 0, count, 0))
    at = tile_list + HEAD + place * ENTRY
    for i in range(0, tl.max(tiles, 0)):  # the last queries see most keys: they come first
        inside, to = i < tiles, at + i * ENTRY
        tl.store(to, tiles - 1 - i, mask=inside)
        tl.store(to + 1, q0, mask=inside)
        tl.store(to + 2, k0, mask=inside)
        tl.store(to + 3, queries, mask=inside)
        tl.store(to + 4, keys, mask=inside)

    # Between the rows of sequence n - 1 and those of n, the last one's to the end, which all programs zero together.
    g = pid * SEQUENCES + tl.arange(0, SEQUENCES)
    before_q0, _, before_queries, _ = _sequences(lengths, g - 1, sizes.batch, sizes)
    ends = before_q0 + before_queries
    gap = tl.where(g < sizes.batch, _offset(lengths.cu_q, g, sizes.total_queries, sizes.batch) - ends, 0)
    for i in range(0, tl.max(gap, 0)):
        _zero(o, lse, ends + i, i < gap, sizes)
    last = sizes.batch - 1 + tl.arange(0, 1)
    last_q0, _, last_queries, _ = _sequences(lengths, last, sizes.batch, sizes)
    end = tl.sum(last_q0 + last_queries, 0)
    for first in range(end + pid * SEQUENCES, sizes.total_queries, tl.num_programs(0) * SEQUENCES):
        rows = first + tl.arange(0, SEQUENCES)
        _zero(o, lse, rows, rows < sizes.total_queries, sizes)


@triton.jit
def _zero(o, lse, rows, inside, sizes):
    for h in range(0, sizes.heads):
        at = o.pointer + tl.cast(h, tl.int64) * o.stride1 + rows.to(tl.int64)[:, None] * o.stride2
        for d0 in range(0, sizes.dim, 16):
            cols = d0 + tl.arange(0, 16)
            zeros = tl.zeros([rows.shape[0], 16], o.pointer.dtype.element_ty)
            tl.store(at + cols[None, :], zeros, mask=inside[:, None] & (cols < sizes.dim)[None, :])
        at_lse = lse + tl.cast(h, tl.int64) * sizes.total_queries + rows
        tl.store(at_lse, tl.zeros([rows.shape[0]], tl.float32), mask=inside)


class TileList:
    """Makes the list for one problem and one layout of its tensors."""

    def __init__(self, problem: Problem, lengths: Lengths, o: Tensor, block_m: int):
        assert problem.totals is not None
        self.most = problem.totals[0] // block_m + problem.batch  # tiles of one head
        self.shape = HEAD.value + ENTRY.value * self.most
        sizes = ListSizes(
            problem.batch, problem.queries, problem.keys, *problem.totals, problem.heads, problem.value_dim
        )
        programs = -(-problem.batch // SEQUENCES.value) + 31  # more than sequences ask for zero rows
        self.make = Launch(
            tiles_kernel, programs, (Record(Lengths, (POINTER,) * 4), POINTER, strided(o), POINTER),
            (sizes, SEQUENCES.value, block_m), num_warps=4,
        )  # fmt: skip

    def __call__(self, lengths: Lengths, o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """The list, and the semaphore in it."""
        tile_list = torch.empty(self.shape, dtype=torch.int32, device=o.device)
        self.make(*[None if x is None else x.contiguous() for x in lengths], tile_list, o, lse)
        return tile_list, tile_list[SEMAPHORE:]
