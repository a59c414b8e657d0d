"""Documents end to end, a mask by tiles that is a packed batch: its forward takes whichever visits less.

Tiles of the mask lie across the ends of documents, so that long documents take more of them than a packed batch, whose
tiles begin where documents do, and many of them are mixed. Of short ones a packed batch has a tile for each, and the
mask one for several. How long they are nobody on the host knows. So both kernels are launched, and lists that the
device makes say which of them has something to do.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.backends.gluon.masks import MaskSummary
from tilewise.backends.gluon.packed import ENTRY, LIST_HEAD, SEMAPHORE
from tilewise.backends.kept_lists import Flat
from tilewise.problem import Problem
from tilewise.score.lengths import Lengths, Packed
from tilewise.score.tile_tensors import TileTensors

COUNT = 1  # of the mask's work tiles, among `DocumentLists.counts`
# What a mixed tile of scores costs more, and what a work tile costs beside its tiles, of the time of a tile of scores.
MIXED, ENDS = 0.4, 1.5


class DocumentLists(NamedTuple):
    """bits, tile_list: of the mask, as `masks.KnownMask`. packed_list: of the packed batch, see `packed`.

    counts: numbers to copy before each call, of which the first, and number `SEMAPHORE`, are counters of the two
    kernels' tiles that start at 0; number COUNT says how many tiles the mask's kernel has: all, or none.
    """

    bits: Tensor
    tile_list: Tensor
    packed_list: Tensor
    counts: Tensor


def as_packed(problem: Problem) -> Problem | None:
    """The packed batch that a problem with a mask of documents is, of as many sequences as there are tokens at most;
    None where its forward is not one, or its scores lie elsewhere than in a packed batch's."""
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
    """Makes `DocumentLists` of what `flat_mask` gives, without waiting for the device.

    summary: of the mask. block_m, packed_block_m: queries of a tile of each kernel; tiles: of all heads, of the mask's.
    """

    def __init__(self, problem: Problem, summary: MaskSummary, block_m: int, packed_block_m: int, tiles: int) -> None:
        self.summary, self.block_m, self.packed_block_m, self.tiles = summary, block_m, packed_block_m, tiles
        self.most = problem.queries // packed_block_m + problem.queries  # tiles of documents of one token
        self.causal = problem.score.band.hi is not None

    def __call__(self, mask: Flat) -> DocumentLists:
        known = self.summary(mask)
        assert known.bits is not None
        assert known.tile_list is not None
        *_, ends, offsets = mask
        assert ends is not None
        assert offsets is not None
        found, packed_cost = packed_list(offsets.view(-1), ends.view(-1), self.packed_block_m, self.most, self.causal)
        count, entries = known.tile_list[..., :1], known.tile_list[..., 1:]
        listed = torch.arange(entries.shape[-1], device=ends.device) < count
        mixed = (listed & ((entries & 2) != 0)).sum()
        mask_cost = (count.sum() + MIXED * mixed + ENDS * count.numel()) * self.block_m
        packed = packed_cost <= mask_cost
        found[0] *= packed
        counts = torch.zeros(2 * SEMAPHORE, dtype=torch.int32, device=offsets.device)
        counts[COUNT] = torch.where(packed, 0, self.tiles)
        return DocumentLists(known.bits, known.tile_list, found, counts)


def packed_list(offsets: Tensor, ends: Tensor, block: int, most: int, causal: bool) -> tuple[Tensor, Tensor]:
    """The list of tiles of queries that `packed.tiles_kernel` makes, of documents by `TileTensors.offsets` and their
    tokens' ends, and what it costs: tiles of ``block`` queries and 128 keys, times the queries. Whatever stands there,
    all of it lies within the tokens."""
    total = ends.shape[0]
    offsets = offsets.clamp(0, total)
    first = offsets[:-1]
    queries = (offsets[1:] - first).clamp(min=0)
    keys = torch.minimum((ends[first.clamp(max=total - 1)] - first).clamp(min=0), queries)  # of padding none
    order = keys.argsort(descending=True, stable=True)
    first, queries, keys = first[order], queries[order], keys[order]
    tiles = (queries + block - 1) // block
    last = tiles.cumsum(0)
    place = torch.arange(most, device=offsets.device)
    number = torch.searchsorted(last, place, right=True).clamp(max=total - 1)
    nth = last[number] - 1 - place  # the last queries come first
    columns = (nth, first[number], first[number], queries[number], keys[number], number, nth, nth)
    entries = torch.stack([x.to(torch.int32) for x in columns], 1)
    head = torch.zeros(LIST_HEAD.value, dtype=torch.int32, device=offsets.device)
    head[0] = last[-1].clamp(max=most)
    seen = ((keys + 127) // 128).clamp(min=1)
    cost = (tiles * (seen * (0.5 if causal else 1.0) + 0.5 * causal + ENDS)).sum() * block
    assert entries.shape[1] == ENTRY.value
    return torch.cat([head, entries.view(-1)]), cost
