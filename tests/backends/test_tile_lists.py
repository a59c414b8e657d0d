"""When lists of visible tiles are kept, and when they are made anew."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from tilewise import TileMask
from tilewise.backends.kernels.tile_lists import TileListCache

PROBLEM = SimpleNamespace(
    batch=1, heads=2, kv_heads=1, queries=128, keys=128, head_dim=64, value_dim=64, dtype=torch.bfloat16
)


class Maker:
    """Counts what it makes: a list of so many bytes."""

    def __init__(self, size=64):
        self.size, self.made = size, 0

    def __call__(self, flat):
        self.made += 1
        return flat[0], torch.empty(self.size, dtype=torch.uint8), None


def a_mask(kind="bits"):
    if kind == "bits":
        return TileMask.from_mask_mod(lambda b, h, q, k: (q + k) % 3 != 0, 128, 128, block=64).tensors
    return TileMask.documents(torch.arange(128)[None] // 50, block=64).tensors


@pytest.fixture
def kept():
    maker = Maker()
    return SimpleNamespace(maker=maker, lists=TileListCache(maker, PROBLEM))


@pytest.mark.parametrize("kind", ["bits", "intervals"])
def test_kept_from_the_second_call_on(kept, kind):
    tiles = a_mask(kind)
    found = [kept.lists(None, tiles) for _ in range(4)]
    assert kept.maker.made == 2
    assert found[1] is found[2] is found[3]
    assert found[0] is not found[1]
    other = a_mask(kind)
    kept.lists(None, other)
    assert kept.maker.made == 3
    assert kept.lists(None, tiles) is found[1]


def test_two_masks_in_turns(kept):
    one, other = a_mask(), a_mask()
    for _ in range(5):
        kept.lists(None, one)
        kept.lists(None, other)
    assert kept.maker.made == 4


@pytest.mark.parametrize(("kind", "name"), [("bits", "tiles"), ("bits", "bits"), ("intervals", "ends")])
def test_a_changed_mask_is_read_again(kept, kind, name):
    tiles = a_mask(kind)
    for _ in range(3):
        kept.lists(None, tiles)
    getattr(tiles, name).mul_(1)
    kept.lists(None, tiles)
    assert kept.maker.made == 3
    replaced = tiles._replace(**{name: getattr(tiles, name).clone()})
    kept.lists(None, replaced)
    assert kept.maker.made == 4


def test_forgotten_with_the_mask(kept):
    for kind in ("bits", "intervals"):
        tiles = a_mask(kind)
        for _ in range(3):
            kept.lists(None, tiles)
        assert len(kept.lists._uses) == 1
        del tiles
        gc.collect()
        assert not kept.lists._uses


def test_what_may_not_be_kept(kept):
    with torch.inference_mode():
        tiles = a_mask()
    for _ in range(3):
        kept.lists(None, tiles)
        kept.lists(torch.ones(1, 1, 128, 128, dtype=torch.bool), None)
    assert kept.maker.made == 6


def test_no_larger_than_the_tensors_of_the_call():
    most = 1 * (128 * 2 + 128) * 128 * 2
    tiles = a_mask()
    listed = tiles.tiles.nbytes
    for size, made in ((most - listed, 2), (most - listed + 1, 4)):
        maker = Maker(size)
        lists = TileListCache(maker, PROBLEM)
        for _ in range(4):
            lists(None, tiles)
        assert maker.made == made
