"""Masks of the named cases: which pairs are visible, as a function of indices, and the same by tiles.

blocks 25, blocks 5   whole tiles of 128 x 128 at random, so many in a hundred, and those of the diagonal
documents             the lengths of `packed`'s lognormal batch, end to end; of another size, in proportion
kept 2048             of each head the 2,048 keys with the best scores, which are a random order; with causal of those
                      that a query sees. The mask is made in each forward, as a model makes it; other numbers likewise
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from tilewise import TileMask, dynamic_mask
from tilewise.spec.operands import TileOperand
from tilewise_tools.bench import packed

NAMES = ("blocks 25", "blocks 5", "documents")
TILE = 128


def keep(name: str) -> int | None:
    """How many keys a query keeps; None of the other masks."""
    return int(name.removeprefix("kept ")) if name.startswith("kept ") else None


def operand(name: str) -> TileOperand:
    """For a `Problem`."""
    return TileOperand(TILE, TILE, "bits" if name.startswith("blocks") else "intervals", name == "documents")


@lru_cache
def scores(heads: int, keys: int) -> Tensor:
    """Of `dynamic_mask`, float32 (1, heads, 1, keys), no two of a head equal."""
    generator = torch.Generator().manual_seed(keys)
    orders = [torch.randperm(keys, generator=generator, device="cpu") for _ in range(heads)]
    return torch.stack(orders).float()[None, :, None]


def kept(name: str, own: Tensor, distance: Tensor, causal: bool) -> Tensor:
    """Bool of ``own`` scores (heads, 1, keys) and of how far keys lie behind a query (rows, keys): what it keeps."""
    count = keep(name)
    assert count is not None
    seen = own.masked_fill(distance > 0, -torch.inf) if causal else own.expand(-1, distance.shape[0], -1)
    least = seen.topk(min(count, own.shape[-1]), dim=-1, sorted=True).values[..., -1:]
    return (seen >= least) & (seen > -torch.inf)


def new_mask(name: str, own: Tensor, queries: int, causal: bool) -> TileMask:
    count = keep(name)
    assert count is not None
    return dynamic_mask(own, keep=count, causal=causal, queries=queries, block=TILE)


@lru_cache
def _tiles(name: str, queries: int, keys: int) -> Tensor:
    """Bool (tiles of queries, tiles of keys)."""
    share = int(name.removeprefix("blocks ")) / 100
    size = -(-queries // TILE), -(-keys // TILE)
    generator = torch.Generator().manual_seed(queries + keys)
    drawn = torch.rand(size, generator=generator, device="cpu") < share
    return drawn | torch.eye(*size, dtype=torch.bool, device="cpu")


@lru_cache
def _lengths(keys: int) -> tuple[int, ...]:
    lengths = packed.lengths_of("lognormal")
    ends = [round(end * keys / sum(lengths)) for end in torch.tensor(lengths, device="cpu").cumsum(0).tolist()]
    return tuple(b - a for a, b in zip([0, *ends[:-1]], ends, strict=True) if b > a)


def _ids(keys: int) -> Tensor:
    return torch.repeat_interleave(torch.tensor(_lengths(keys), device="cpu"))


def seen(name: str, queries: int, keys: int, device: torch.device) -> Callable[[Tensor, Tensor], Tensor]:
    """Bool of indices of queries and of keys, which broadcast; causal is not in it."""
    if name == "documents":
        ids = _ids(keys).to(device)
        return lambda i, j: ids[i] == ids[j]
    tiles = _tiles(name, queries, keys).to(device)
    return lambda i, j: tiles[i // TILE, j // TILE]


def tile_mask(name: str, queries: int, keys: int, device: torch.device) -> TileMask:
    if name == "documents":
        return TileMask.documents(_ids(keys).to(device), block=TILE)
    tiles = _tiles(name, queries, keys).to(device)
    return TileMask.from_tiles(tiles[None, None], queries, keys, block=TILE)


def copied(mask: TileMask) -> TileMask:
    """The same as another, of which nothing is kept from earlier calls."""
    tensors = mask.tensors
    assert tensors.tiles is not None
    return TileMask(mask.queries, mask.keys, tensors._replace(tiles=tensors.tiles.clone()))


@lru_cache
def pairs(name: str, queries: int, keys: int, causal: bool) -> int:
    """How many a head has; of blocks without causal alone."""
    if name == "documents":
        return sum(n * (n + 1) // 2 if causal else n * n for n in _lengths(keys))
    count = keep(name)
    if count is not None:
        seen = (min(max(i + 1 + keys - queries, 0), keys) if causal else keys for i in range(queries))
        return sum(min(n, count) for n in seen)
    if causal:
        raise ValueError(f"causal: {name} is measured without")
    rows, cols = (torch.full((-(-n // TILE),), TILE, device="cpu") for n in (queries, keys))
    rows[-1] -= -queries % TILE
    cols[-1] -= -keys % TILE
    return int((_tiles(name, queries, keys) * rows[:, None] * cols).sum())
