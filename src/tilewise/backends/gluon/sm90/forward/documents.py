"""A block mask of documents is also a packed batch; the forward runs whichever form costs less.

Tiles of the mask cross the ends of documents. Long documents therefore visit more of them than tiles of a packed batch,
which begin where documents do, and many are partial. Of short documents a packed batch has a tile each, and the mask
one for several. The host does not know the lengths: both kernels are launched, and lists made on the device leave one
of them without work.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewise.backends.gluon.masks import MaskSummary
from tilewise.backends.gluon.varlen import ENTRY, LIST_HEAD, SEMAPHORE
from tilewise.backends.kernels.tile_lists import Flat
from tilewise.backends.launch.launcher import POINTER, Launch
from tilewise.spec.block_mask import TileTensors
from tilewise.spec.problem import Problem
from tilewise.spec.seqlens import Lengths, Packed

COUNT = tl.constexpr(1)  # index in `DocumentLists.counts` of the number of the mask's work tiles
COUNTS = tl.constexpr(2 * SEMAPHORE)
AT_ONCE = tl.constexpr(128)  # documents per program of `documents_kernel`
# Extra cost of a partial tile, and cost of a work tile besides its tiles, relative to a tile of scores.
MIXED, ENDS = tl.constexpr(0.4), tl.constexpr(1.5)


class DocumentLists(NamedTuple):
    """Work lists of both kernels. bits, tile_list: of the mask, as in `masks.KnownMask`. packed_list: of the packed
    batch, see `gluon.varlen`.

    counts: copied before each call. The first number, and number `SEMAPHORE`, are the tile counters of the two kernels,
    which start at 0; number COUNT is the number of tiles of the mask's kernel: all, or none.
    """

    bits: Tensor
    tile_list: Tensor
    packed_list: Tensor
    counts: Tensor


def as_packed(problem: Problem) -> Problem | None:
    """Return the packed batch equal to a problem with a mask of documents, with as many sequences as tokens, the upper
    bound. None without such a mask, for several batch elements, a window with a lower limit, a bias, or dropout."""
    p = problem
    if p.tile_mask is None or not p.tile_mask.documents or p.batch > 1 or p.score.band.lo is not None:
        return None
    if p.bias is not None or p.parts is not None or p.score.dropout:
        return None
    score = replace(p.score, packed=Packed(p.queries, p.keys))
    return replace(p, score=score, mask=None, tile_mask=None, batch=p.queries, totals=(p.queries, p.keys))


def offsets_of(tiles: TileTensors) -> Lengths:
    assert tiles.offsets is not None
    return Lengths(tiles.offsets, tiles.offsets)


class DocumentSummary:
    """Computes `DocumentLists` from a `flat_mask`, without host synchronization.

    summary: of the mask. block_m, packed_block_m: queries per tile of each kernel. tiles: of all heads, of the mask's
    kernel.
    """

    def __init__(self, problem: Problem, summary: MaskSummary, block_m: int, packed_block_m: int, tiles: int) -> None:
        self.summary, total = summary, problem.queries
        most = total // packed_block_m + total  # tiles, of documents of one token
        self.numbers = LIST_HEAD.value + most * ENTRY.value
        causal = problem.score.band.hi is not None
        self.make = Launch(
            documents_kernel, -(-total // AT_ONCE.value), (POINTER,) * 5,
            (total, most, tiles, -(-total // block_m), packed_block_m, block_m, causal), num_warps=4,
        )  # fmt: skip

    def __call__(self, mask: Flat) -> DocumentLists:
        known = self.summary(mask)
        *_, ends, offsets = mask
        assert known.bits is not None
        assert known.tile_list is not None
        assert offsets is not None
        visited = known.tile_list[..., 0].sum(dtype=torch.int32)
        found, counts = (offsets.new_empty(n) for n in (self.numbers, COUNTS.value))
        self.make(offsets, ends, visited, found, counts)
        return DocumentLists(known.bits, known.tile_list, found, counts)


@triton.jit
def documents_kernel(offsets, ends, visited, packed_list, counts, total, most, tiles, row_tiles, BLOCK: tl.constexpr,
                     MASK_BLOCK: tl.constexpr, CAUSAL: tl.constexpr):  # fmt: skip
    """Write the list of `gluon.varlen.tiles_kernel` for documents, AT_ONCE per program, and `DocumentLists.counts`.

    For any contents of the tensors, all tiles are within the tokens and the list.
    offsets, ends: of `TileTensors`. visited: key tiles that the mask's kernel visits for one head, in ``row_tiles``
    query tiles. most: tiles that fit the list. tiles: of the mask's kernel. BLOCK, MASK_BLOCK: queries per tile of
    both.
    """
    pid = tl.program_id(0)
    if (pid == 0) | (tl.load(offsets + pid * AT_ONCE) < total):
        n = pid * AT_ONCE + tl.arange(0, AT_ONCE)
        first, queries, keys = _documents(offsets, ends, n, total)
        own = (queries + BLOCK - 1) // BLOCK
        place, count, cost = n * 0, pid * 0, pid * 0.0
        begin = pid * 0
        while begin < total:
            other = begin + tl.arange(0, AT_ONCE)
            _, their_queries, their_keys = _documents(offsets, ends, other, total)
            theirs = (their_queries + BLOCK - 1) // BLOCK
            before = (their_keys[None, :] > keys[:, None]) | (
                (their_keys[None, :] == keys[:, None]) & (other[None, :] < n[:, None])
            )
            place += tl.sum(tl.where(before, theirs[None, :], 0), 1)
            count += tl.sum(theirs, 0)
            seen = tl.maximum((their_keys + 127) // 128, 1) * 1.0
            if CAUSAL:
                seen = seen * 0.5 + 0.5
            cost += tl.sum(theirs * (seen + ENDS), 0) * BLOCK
            begin += AT_ONCE
            if tl.load(offsets + tl.minimum(begin, total)) >= total:
                begin = total
        if pid == 0:
            # A query tile has a partial tile at each end of what it sees; with a causal mask the window cuts the other
            # end.
            mask_cost = (tl.load(visited) + (ENDS + MIXED * (1 if CAUSAL else 2)) * row_tiles) * MASK_BLOCK
            listed, masked = tl.minimum(count, most), tiles
            if cost <= mask_cost:
                masked = tiles * 0
            else:
                listed = count * 0
            i, j = tl.arange(0, LIST_HEAD), tl.arange(0, COUNTS)
            tl.store(packed_list + i, tl.where(i == 0, listed, 0))
            tl.store(counts + j, tl.where(j == COUNT, masked, 0))
        at = packed_list + LIST_HEAD + place * ENTRY
        for i in range(0, tl.max(own, 0)):
            inside, to = (i < own) & (place + i < most), at + i * ENTRY
            tl.store(to, own - 1 - i, mask=inside)  # the last queries run first
            tl.store(to + 1, first, mask=inside)
            tl.store(to + 2, first, mask=inside)
            tl.store(to + 3, queries, mask=inside)
            tl.store(to + 4, keys, mask=inside)
            tl.store(to + 5, n, mask=inside)


@triton.jit
def _documents(offsets, ends, n, total):
    """Return first tokens, queries and keys of the documents ``n``; 0 queries if there is none, 0 keys for padding."""
    first = tl.load(offsets + n, mask=n < total, other=0)
    after = tl.load(offsets + n + 1, mask=n < total, other=0)
    first = tl.minimum(tl.maximum(first, 0), total)
    queries = tl.maximum(tl.minimum(tl.maximum(after, 0), total) - first, 0)
    end = tl.load(ends + first, mask=first < total, other=0)
    return first, queries, tl.minimum(tl.maximum(end - first, 0), queries)
