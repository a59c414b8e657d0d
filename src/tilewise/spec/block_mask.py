"""Tensors of a tile mask: which tiles are empty, full or partial, and the pairs of partial tiles.

Kernels clamp the number of a tile to the stored bit tiles: a wrong one may hide or show pairs, but never causes an
access out of bounds. A partial tile is masked by its bits, or by an interval of queries for each key:

    tiles       0 empty    1 full    2 + p partial, with the bits at index p, which several tiles may share
    intervals   key j is visible to the queries begins[j] .. ends[j] - 1

Intervals replace the bits where each key is visible to consecutive queries, as in packed documents. They take 2 N
numbers, and the number of partial tiles is not read from the device.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import torch
from torch import Tensor

from tilewise.spec.table import Axes, Maybe
from tilewise.spec.visibility import HIDDEN, MIXED, WHOLE

EMPTY, FULL, PARTIAL = 0, 1, 2  # PARTIAL and above
WORD = 32  # bits


class TileTensors(NamedTuple):
    """The tensors of a tile mask, int32, contiguous and on the device of q; all None without one.

    tiles: one number for each tile, see above.
    bits: bit c % 32 of word c // 32 is key c of the tile. With intervals there are 0
    places, and only the shape is read: it is the tile size.
    begins, ends: both or neither.
    offsets: for packed documents only, the first token of each, padded with N.
    """

    tiles: Annotated[Maybe, Axes("B|1 H|Hkv|1 query_tiles key_tiles")] = None
    bits: Annotated[Maybe, Axes("places block_m block_n/32")] = None
    begins: Annotated[Maybe, Axes("B|1 H|Hkv|1 1 N")] = None
    ends: Annotated[Maybe, Axes("B|1 H|Hkv|1 1 N")] = None
    offsets: Annotated[Maybe, Axes("B|1 N+1")] = None

    @property
    def block(self) -> tuple[int, int]:
        """Return (queries, keys) of a tile."""
        assert self.bits is not None
        return self.bits.shape[1], self.bits.shape[2] * WORD

    def within(self, x: Tensor, rows: slice, cols: slice) -> Tensor:
        """Return the part of ``x``, (..., query tiles, key tiles), that covers these queries and keys."""
        m, n = self.block
        return x[..., rows.start // m : -(-rows.stop // m), cols.start // n : -(-cols.stop // n)]

    def state(self, tiles: Tensor) -> int:
        """Return the common state of tiles from `within`: HIDDEN, WHOLE, or else MIXED. Synchronizes the host."""
        least, most = tiles.aminmax()
        if most <= EMPTY:
            return HIDDEN
        return WHOLE if least == most == FULL else MIXED

    def states(self, tiles: Tensor) -> list[list[int]]:
        """Return the `state` of each tile, combined over all matrices of (..., query tiles, key tiles)."""
        matrices = tiles.flatten(0, -3)
        least, most = matrices.amin(0), matrices.amax(0)
        whole = torch.where((least == FULL) & (most == FULL), WHOLE, MIXED)
        found: list[list[int]] = torch.where(most <= EMPTY, HIDDEN, whole).tolist()
        return found

    def visible(self, tiles: Tensor, begins: Tensor | None, ends: Tensor | None, rows: slice, cols: slice) -> Tensor:
        """Return which pairs are visible, bool (..., rows, cols).

        tiles: from `within`; begins, ends: of the same heads.
        """
        device = tiles.device
        row, col = (torch.arange(x.start, x.stop, device=device) for x in (rows, cols))
        if begins is not None and ends is not None:
            return (row[:, None] >= begins[..., cols]) & (row[:, None] < ends[..., cols])
        assert self.bits is not None
        (block_m, block_n), places = self.block, self.bits.shape[0]
        r, c = row // block_m - rows.start // block_m, col // block_n - cols.start // block_n
        tiles = tiles[..., r, :][..., c]
        if places == 0:
            return tiles == FULL
        words = self.bits[
            (tiles - PARTIAL).clamp(0, places - 1), (row % block_m)[:, None], (col % block_n // WORD)[None, :]
        ]
        return (tiles == FULL) | ((tiles >= PARTIAL) & ((words >> (col % WORD)) & 1 != 0))

    def rows_visible(self, rows: slice, keys: int) -> Tensor:
        """Return `visible` for some queries and all keys, bool (B|1, H|Hkv|1, rows, N)."""
        assert self.tiles is not None
        cols = slice(0, keys)
        return self.visible(self.within(self.tiles, rows, cols), self.begins, self.ends, rows, cols)


NO_TILES = TileTensors()


def pack(visible: Tensor) -> Tensor:
    """Pack bool (..., block_n) into int32 words (..., block_n / 32)."""
    weights = torch.arange(WORD, device=visible.device)
    weights = torch.where(weights == WORD - 1, -(1 << (WORD - 1)), 1 << weights.clamp(max=WORD - 2)).to(torch.int32)
    return (visible.unflatten(-1, (-1, WORD)).to(torch.int32) * weights).sum(-1, dtype=torch.int32)


def tiles_of_intervals(begins: Tensor, ends: Tensor, queries: int, block: tuple[int, int]) -> Tensor:
    """Return `TileTensors.tiles` for intervals of queries, in O(keys + tiles) time and memory.

    A tile is visited if the interval of one of its keys meets its queries, counted by +1 where an interval begins and
    -1 where it ends. It is full if the intervals of all of its keys contain its queries.
    """
    block_m, block_n = block
    b, h, _, keys = begins.shape
    rows, cols = -(-queries // block_m), -(-keys // block_n)
    more = cols * block_n - keys

    def by_tiles(x: Tensor, value: int) -> Tensor:
        return torch.nn.functional.pad(x[:, :, 0].long(), (0, more), value=value).view(b * h, cols, block_n)

    first, last = by_tiles(begins // block_m, 0), by_tiles(-(-ends // block_m), 0)
    last = torch.where(by_tiles(ends - begins, 0) > 0, last, first)
    count = torch.zeros(b * h * cols * (rows + 1), dtype=torch.int32, device=begins.device)
    start = torch.arange(b * h * cols, device=begins.device).view(b * h, cols, 1) * (rows + 1)
    one = torch.ones_like(first, dtype=torch.int32).flatten()
    count.index_add_(0, (start + first).flatten(), one).index_add_(0, (start + last).flatten(), -one)
    some = count.view(b * h, cols, rows + 1).cumsum(-1)[..., :rows] > 0
    whole_ends = torch.where(ends >= queries, rows, ends // block_m)
    m = torch.arange(rows, device=begins.device)
    full = m >= by_tiles(-(-begins // block_m), 0).amax(-1, keepdim=True)
    full &= m < by_tiles(whole_ends, rows).amin(-1, keepdim=True)
    found = torch.where(full, FULL, torch.where(some, PARTIAL, EMPTY)).to(torch.int32)
    return found.mT.reshape(b, h, rows, cols).contiguous()


def no_bits(block: tuple[int, int], device: torch.device) -> Tensor:
    """Return the empty bits of a mask with intervals; their shape is the tile size."""
    return torch.zeros(0, block[0], block[1] // WORD, dtype=torch.int32, device=device)


def document_offsets(begins: Tensor) -> Tensor:
    """Return `TileTensors.offsets`, (B|1, N + 1), from the first token of each token's document, (B|1, N)."""
    batch, total = begins.shape
    first = begins == torch.arange(total, device=begins.device)
    offsets = begins.new_full((batch, total + 1), total, dtype=torch.int32)
    # All tokens of a document write the same number, so the order of the writes does not matter.
    return offsets.scatter_(1, first.cumsum(1) - 1, begins.to(torch.int32))


def listed(which: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many columns of a bool (..., columns) are True, and their indices first, padded with 0."""
    counts = which.sum(-1, dtype=torch.int32)
    order = (~which).to(torch.uint8).argsort(dim=-1, stable=True).to(torch.int32)
    inside = torch.arange(which.shape[-1], device=which.device) < counts.unsqueeze(-1)
    return counts, torch.where(inside, order, 0)
