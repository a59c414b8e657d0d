"""Patterns by name, each as a TileMask and, written down a second time, as a bool mask; and calls held to the rule."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from helpers import Case, hold, run, tensors
from torch import Tensor

from tilewise import TileMask

WINDOW = (90, 20)


def pattern(name: str, case: Case, block: int | tuple[int, int] = 64) -> tuple[TileMask, Tensor]:
    """The mask of a case, (B|1, H|Hkv|1, M, N)."""
    M, N = case.M, case.N
    i, j = torch.arange(M)[:, None], torch.arange(N)
    distance = j - i - (N - M)
    generator = torch.Generator().manual_seed(M * N)
    if name in ("documents", "long documents"):
        ids = (torch.rand(case.B, N, generator=generator) < (0.02 if name == "documents" else 0.002)).cumsum(1)
        ids[:, -3:] = -1
        same = (ids[:, :, None] == ids[:, None]) & (ids >= 0)[:, None]
        return TileMask.documents(ids, block=block), same[:, None]
    if name == "prefix":
        lengths = torch.arange(case.B) * 70 + 3
        return TileMask.prefix_lm(lengths, N, block=block), ((j < lengths[:, None, None]) | (j <= i))[:, None]
    if name == "tree":
        drawn = [_drawn_trees(N, generator) for _ in range(case.B)]
        trees, seen = [row for row, _ in drawn], torch.stack([seen for _, seen in drawn])
        return TileMask.tree(trees, size=N, block=block), seen[:, None]
    if name == "window":
        seen = (distance >= -WINDOW[0]) & (distance <= WINDOW[1]) | (j < 5)
        return TileMask.sliding_window(M, N, WINDOW, global_tokens=5, block=block), seen[None, None]
    if name == "dilated":
        seen = (distance % 3 == 0) & (distance.abs() <= 60)
        return TileMask.dilated(M, N, 20, 3, block=block if isinstance(block, int) else 64), seen[None, None]
    if name == "strided":
        seen = (distance % 50 == 0) | (distance.abs() < 50)
        return TileMask.strided(M, N, 50, block=block if isinstance(block, int) else 64), seen[None, None]
    heads = {"mod": 1, "blocks": case.kv_heads}.get(name, case.H)
    if name == "mod":

        def seen_by(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
            return (q * 7 + kv * 3 + b) % 11 < 4 + 8 * (q // 64 == kv // 64)

        found = TileMask.from_mask_mod(seen_by, M, N, batch=case.B, block=block)
        return found, seen_by(torch.arange(case.B).view(-1, 1, 1, 1), None, i, j)
    # Whole blocks at random, of each batch element and key/value head, or with a mask of each head inside.
    m, n = (block, block) if isinstance(block, int) else block
    tiles = torch.rand(case.B, heads, -(-M // m), -(-N // n), generator=generator) < 0.5
    dense = tiles.repeat_interleave(m, 2)[:, :, :M].repeat_interleave(n, 3)[..., :N]
    if name == "blocks":
        return TileMask.from_tiles(tiles, M, N, block=block), dense
    assert name == "bits"
    inside = torch.rand(case.B, heads, M, N, generator=generator) < 0.7
    inside[:, :, [0, M // 2]] = False
    inside[..., [N // 3, N - 1]] = False
    return TileMask.from_tiles(tiles, M, N, block=block, mask=inside), dense & inside


def _drawn_trees(total: int, generator: torch.Generator) -> tuple[list, Tensor]:
    """A row of prefix trees, up to three tokens of padding at its end, and the mask by the path of each token."""
    seen = torch.zeros(total, total, dtype=torch.bool)
    row: list = []
    branches, paths = [row], [[]]  # of the segments from the root to the last one
    at = 0
    while at < max(total - 3, 1):
        length = min(int(torch.randint(0, 60, (), generator=generator)), total - at)
        depth = int(torch.randint(0, len(paths), (), generator=generator))
        del branches[depth + 1 :], paths[depth + 1 :]
        path = list(paths[-1])
        for token in range(at, at + length):
            path.append(token)
            seen[token, path] = True
        own: list = []
        branches[-1].append((length, own))
        branches.append(own)
        paths.append(path)
        at += length
    return row, seen


PATTERNS = ("documents", "prefix", "tree", "window", "dilated", "strided", "mod", "blocks", "bits")


def check(case: Case, name: str, backend: str, block: int | tuple[int, int] = 64, device: str = "cpu") -> None:
    """A backend with the TileMask against the reference with the bool mask, by the error rule; a case in which
    ``planted`` stands has NaN in the keys and values that nobody sees."""
    found, dense = pattern(name, case, block)
    found, dense = found.to(device), dense.to(device)
    inputs = tensors(replace(case, planted=None, mask=None), device)._replace(mask=dense)
    spoilt = inputs
    if case.planted is not None:
        heads = dense if dense.shape[1] in (1, case.kv_heads) else dense.unflatten(1, (case.kv_heads, -1)).any(2)
        hidden = ~heads.any(2).expand(case.B, case.kv_heads, case.N)
        assert hidden.any()
        k, v = inputs.k.clone(), inputs.v.clone()
        k[hidden] = v[hidden] = case.planted
        spoilt = inputs._replace(k=k, v=v)
    hold(case, run(case, backend, device, spoilt._replace(mask=found)), device, inputs)


def check_wrong(case: Case, backend: str, device: str = "cpu") -> None:
    """Numbers of tiles that are none reach no memory: what is past the bits, and what is negative."""
    found, _ = pattern("bits", case)
    tiles = found.tensors.tiles.clone()
    tiles.view(-1)[::3] = 2**31 - 1
    tiles.view(-1)[1::3] = -(2**31)
    wrong = TileMask(case.M, case.N, found.tensors._replace(tiles=tiles)).to(device)
    inputs = tensors(case, device)._replace(mask=wrong)
    results = run(case, backend, device, inputs)
    assert all(x is None or x.isfinite().all() for x in (results.o, *results[2:]))
    assert not (results.lse == math.inf).any()
    assert not results.lse.isnan().any()


def check_kept(case: Case, backend: str, device: str = "cpu") -> None:
    """Lists that are kept give the same bits, and those of a mask that has changed are not kept."""
    from tilewise.backends.kernels.tile_lists import TileListCache

    made = []
    make = TileListCache._made

    def counted(self, mask, tiles):
        made.append(self)
        return make(self, mask, tiles)

    def results(mask: TileMask) -> list[Tensor]:
        return [x for x in run(case, backend, device, inputs._replace(mask=mask)) if x is not None]

    inputs = tensors(case, device)
    mask = pattern("bits", case)[0].to(device)
    TileListCache._made = counted
    try:
        first, *others = (results(mask) for _ in range(4))
        assert len(made) == 4, "twice for the forward, twice for the backward"
        assert all(torch.equal(x, y) for other in others for x, y in zip(first, other, strict=True))
        mask.tensors.tiles.copy_(mask.tensors.tiles.flip(-1))
        turned = results(mask)
        assert len(made) == 6
    finally:
        TileListCache._made = make
    again = results(TileMask(case.M, case.N, mask.tensors._replace(tiles=mask.tensors.tiles.clone())))
    assert all(torch.equal(x, y) for x, y in zip(turned, again, strict=True))
    assert not torch.equal(turned[0], first[0])


def gradients_of(case: Case, mask: object, backend: str) -> list[Tensor]:
    return [x for x in run(case, backend, inputs=tensors(case)._replace(mask=mask)) if x is not None]
