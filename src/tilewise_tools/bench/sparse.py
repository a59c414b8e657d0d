"""Masks of the named cases, as functions of query and key indices and as tile masks.

blocks 25, blocks 5   25 % or 5 % of the 128 x 128 tiles at random, and the tiles of the diagonal
documents             documents with the lengths of `packed`'s lognormal batch, scaled to the number of keys
tree                  a prompt of a third of the tokens and eight responses of a twelfth; `packed`'s batch "rollouts"
                      has the prompt once for each response
kept N                a dynamic mask: in each head the N visible keys with the largest scores, which are a random
                      permutation. Every forward creates the mask
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

from tilewise import TileMask, dynamic_mask
from tilewise.spec.operands import TileOperand
from tilewise_tools.bench import packed

NAMES = ("blocks 25", "blocks 5", "documents", "tree")
TILE, RESPONSES = 128, 8


def keep(name: str) -> int | None:
    """Return the number of selected keys per query of a dynamic mask; None for other masks."""
    return int(name.removeprefix("kept ")) if name.startswith("kept ") else None


def operand(name: str) -> TileOperand:
    """Return the mask's description in a `Problem`."""
    return TileOperand(TILE, TILE, "bits" if name.startswith("blocks") else "intervals", name == "documents")


@lru_cache
def scores(heads: int, keys: int) -> Tensor:
    """Return scores for `dynamic_mask`, float32 (1, heads, 1, keys), distinct within a head."""
    generator = torch.Generator().manual_seed(keys)
    orders = [torch.randperm(keys, generator=generator, device="cpu") for _ in range(heads)]
    return torch.stack(orders).float()[None, :, None]


def kept(name: str, own: Tensor, distance: Tensor, causal: bool) -> Tensor:
    """Return the selected keys (top-k), bool (heads, rows, keys).

    ``own``: scores (heads, 1, keys). ``distance``: key position minus query position, (rows, keys).
    """
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
    """Return the visible tiles, bool (query tiles, key tiles)."""
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


def tree(keys: int) -> tuple[int, list[int]]:
    """Return the lengths of the prompt and of the responses."""
    prompt = keys // 3
    ends = [prompt + round(n * (keys - prompt) / RESPONSES) for n in range(RESPONSES + 1)]
    return prompt, [end - begin for begin, end in pairwise(ends)]


def seen(name: str, queries: int, keys: int, device: torch.device) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function of query and key indices that is True for visible pairs, without causal."""
    if name == "documents":
        ids = _ids(keys).to(device)
        return lambda i, j: ids[i] == ids[j]
    if name == "tree":
        prompt, responses = tree(keys)
        part = torch.repeat_interleave(torch.tensor([prompt, *responses], device="cpu")).to(device)
        return lambda i, j: (j <= i) & ((part[j] == 0) | (part[i] == part[j]))
    tiles = _tiles(name, queries, keys).to(device)
    return lambda i, j: tiles[i // TILE, j // TILE]


def tile_mask(name: str, queries: int, keys: int, device: torch.device) -> TileMask:
    if name == "documents":
        return TileMask.documents(_ids(keys).to(device), block=TILE)
    if name == "tree":
        return TileMask.tree([tree(keys)], block=TILE, device=device)
    tiles = _tiles(name, queries, keys).to(device)
    return TileMask.from_tiles(tiles[None, None], queries, keys, block=TILE)


def copied(mask: TileMask) -> TileMask:
    """Return a copy of ``mask`` without cached tile lists."""
    tensors = mask.tensors
    assert tensors.tiles is not None
    return TileMask(mask.queries, mask.keys, tensors._replace(tiles=tensors.tiles.clone()))


@lru_cache
def pairs(name: str, queries: int, keys: int, causal: bool) -> int:
    """Return the number of visible pairs per head; blocks and the tree support only causal=False."""
    if name == "documents":
        return sum(n * (n + 1) // 2 if causal else n * n for n in _lengths(keys))
    count = keep(name)
    if count is not None:
        seen = (min(max(i + 1 + keys - queries, 0), keys) if causal else keys for i in range(queries))
        return sum(min(n, count) for n in seen)
    if causal:
        raise ValueError(f"causal: {name} is measured without")
    if name == "tree":
        prompt, responses = tree(keys)
        return prompt * (prompt + 1) // 2 + sum(n * prompt + n * (n + 1) // 2 for n in responses)
    rows, cols = (torch.full((-(-n // TILE),), TILE, device="cpu") for n in (queries, keys))
    rows[-1] -= -queries % TILE
    cols[-1] -= -keys % TILE
    return int((_tiles(name, queries, keys) * rows[:, None] * cols).sum())
