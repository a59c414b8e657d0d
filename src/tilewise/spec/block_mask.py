"""A mask by tiles, as tensors: of each tile whether it is hidden, full or partial, and what a partial one shows.

What a tile is stands in one number, so that a list that is wrong can hide or show a pair and reach no memory: numbers
are clamped to the tiles that have bits. A partial tile shows its bits, or what the keys' intervals of queries show:

    tiles       0 hidden    1 full    2 + p partial, with the bits of place p, which several tiles may share
    intervals   key j is seen by the queries begins[j] .. ends[j] - 1

Intervals take the place of bits where every key is seen by neighbouring queries, as in documents end to end: they are
as long as the keys, and nobody has to know how many tiles are partial, which would be read from the device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.spec.visibility import HIDDEN, MIXED, WHOLE

EMPTY, FULL, PARTIAL = 0, 1, 2  # PARTIAL and above
WORD = 32  # bits


class TileTensors(NamedTuple):
    """All int32 and contiguous, on the device of q; all None is no mask by tiles.

    tiles: (B|1, H|Hkv|1, tiles of queries, tiles of keys). bits: (places, block_m, block_n / 32), bit c % 32 of word
    c // 32 is key c of the tile; without a place, with intervals, its shape alone is read, which says how large tiles
    are. begins, ends: (B|1, H|Hkv|1, 1, N), both or neither, of as many batch elements and heads as tiles. offsets:
    where these are documents end to end, (B|1, N + 1), the first token of each and from the last one's end on N.
    """

    tiles: Tensor | None = None
    bits: Tensor | None = None
    begins: Tensor | None = None
    ends: Tensor | None = None
    offsets: Tensor | None = None

    @property
    def block(self) -> tuple[int, int]:
        """Queries and keys of a tile."""
        assert self.bits is not None
        return self.bits.shape[1], self.bits.shape[2] * WORD

    def within(self, x: Tensor, rows: slice, cols: slice) -> Tensor:
        """Of ``x``, (..., tiles of queries, tiles of keys), those that have some of these queries and keys."""
        m, n = self.block
        return x[..., rows.start // m : -(-rows.stop // m), cols.start // n : -(-cols.stop // n)]

    def state(self, tiles: Tensor) -> int:
        """What is left of some `within` together: HIDDEN, WHOLE, or else MIXED. Reads them."""
        least, most = tiles.aminmax()
        if most <= EMPTY:
            return HIDDEN
        return WHOLE if least == most == FULL else MIXED

    def states(self, tiles: Tensor) -> list[list[int]]:
        """`state` of each tile, over all matrices of (..., tiles of queries, tiles of keys) together."""
        matrices = tiles.flatten(0, -3)
        least, most = matrices.amin(0), matrices.amax(0)
        whole = torch.where((least == FULL) & (most == FULL), WHOLE, MIXED)
        found: list[list[int]] = torch.where(most <= EMPTY, HIDDEN, whole).tolist()
        return found

    def visible(self, tiles: Tensor, begins: Tensor | None, ends: Tensor | None, rows: slice, cols: slice) -> Tensor:
        """Which of these pairs are seen, bool (..., rows, cols). tiles: `within`; begins, ends: of the same heads."""
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
        """`visible` of some queries and all keys, bool (B|1, H|Hkv|1, rows, N)."""
        assert self.tiles is not None
        cols = slice(0, keys)
        return self.visible(self.within(self.tiles, rows, cols), self.begins, self.ends, rows, cols)


NO_TILES = TileTensors()


def pack(visible: Tensor) -> Tensor:
    """Bool (..., block_n) as words (..., block_n / 32)."""
    weights = torch.arange(WORD, device=visible.device)
    weights = torch.where(weights == WORD - 1, -(1 << (WORD - 1)), 1 << weights.clamp(max=WORD - 2)).to(torch.int32)
    return (visible.unflatten(-1, (-1, WORD)).to(torch.int32) * weights).sum(-1, dtype=torch.int32)


def tiles_of_intervals(begins: Tensor, ends: Tensor, queries: int, block: tuple[int, int]) -> Tensor:
    """`TileTensors.tiles` of intervals that lie within the queries, in time and memory of the keys and the tiles.

    A tile is visited if an interval of one of its keys meets its queries, which is counted where each begins and ends;
    and full if all of them hold its queries, which is so from the last begin on to the first end.
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
    """Return the bits of a mask whose tiles have none; their shape says how large tiles are."""
    return torch.zeros(0, block[0], block[1] // WORD, dtype=torch.int32, device=device)


def document_offsets(begins: Tensor) -> Tensor:
    """Return `TileTensors.offsets` of documents, of which each token has the first one."""
    batch, total = begins.shape
    first = begins == torch.arange(total, device=begins.device)
    offsets = begins.new_full((batch, total + 1), total, dtype=torch.int32)
    # Every token writes, and equal numbers in one place: it is the same which is last.
    return offsets.scatter_(1, first.cumsum(1) - 1, begins.to(torch.int32))


def listed(which: Tensor) -> tuple[Tensor, Tensor]:
    """Of a bool (..., columns) how many are True, and where, in the first places."""
    counts = which.sum(-1, dtype=torch.int32)
    order = (~which).to(torch.uint8).argsort(dim=-1, stable=True).to(torch.int32)
    inside = torch.arange(which.shape[-1], device=which.device) < counts.unsqueeze(-1)
    return counts, torch.where(inside, order, 0)
