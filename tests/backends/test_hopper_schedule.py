"""Which tile of queries follows which in the Hopper forward: the kernel's own function, run as Python on integers."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from kernel_stubs import as_python, band_terms, gluon, numbers, problem, replace

from tilewise.spec import tiles
from tilewise.spec.score import Band

pytest.importorskip("triton")

from tilewise.backends.gluon import scheduler as tile_scheduler
from tilewise.backends.gluon.sm90.common.config import forward_config
from tilewise.backends.gluon.sm90.forward import launch
from tilewise.backends.gluon.varlen import SeqInfo

CAUSAL, LEFT, WINDOW = Band(None, 0), Band(-100, None), Band(-100, 30)


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    """The function of the kernel as a Python function."""
    replace(monkeypatch, tile_scheduler, gl=gluon(), key_tiles=tiles.key_tiles)
    as_python(monkeypatch, tile_scheduler, "head_at")


def known(B, H, Hkv, M, N, band, bias=None, programs=132, D=128):
    """What the kernel knows: terms, sizes and what is compiled."""
    p = problem(B, H, Hkv, M, N, D, band, bias=bias)
    config = forward_config(p)
    return band_terms(band), launch._sizes(p, config, programs), numbers(launch._compiled(p, config, True))


def walk(*problem):
    """The tiles in their order, and how many heads run together."""
    terms, sizes, c = known(*problem)
    return [tile_scheduler.work_tile_at.fn(t, None, terms, sizes, c) for t in range(sizes.tiles)], sizes.at_once


@pytest.mark.parametrize("band", [Band(), CAUSAL, LEFT, WINDOW], ids=str)
@pytest.mark.parametrize("bias", [None, "1hmn", "b1mn", "bhmn"])
def test_every_tile_comes_once(band, bias):
    for (B, group, Hkv), (M, N), programs in itertools.product(
        [(1, 1, 1), (2, 1, 3), (5, 2, 2), (3, 8, 1), (7, 1, 8)], [(1, 300), (129, 64), (1000, 1023)], [1, 7, 132]
    ):
        order, _ = walk(B, group * Hkv, Hkv, M, N, band, bias, programs)
        assert sorted((t.b, t.h, t.row0) for t in order) == [
            (b, h, row0) for b in range(B) for h in range(group * Hkv) for row0 in range(0, M, 128)
        ]


@pytest.mark.parametrize("band", [CAUSAL, LEFT], ids=str)
@pytest.mark.parametrize(("B", "H", "M"), [(4, 16, 4096), (1, 10, 9000), (3, 33, 1000), (40, 8, 700)])
def test_the_longest_come_first(B, H, M, band):
    """Of the heads that run together; so programs that take whichever tile is left have little left at the end."""
    order, at_once = walk(B, H, H, M, M, band)
    tiles_at_once = at_once * -(-M // 128)
    assert tiles_at_once >= min(2 * 132, len(order))
    groups = max(len(order) // tiles_at_once, 1)
    for n in range(groups):
        counts = [t.count for t in order[n * tiles_at_once : (n + 1) * tiles_at_once if n + 1 < groups else None]]
        assert counts == sorted(counts, reverse=True)


@pytest.mark.parametrize("band", [CAUSAL, Band(None, 63), Band(None, 65), Band(None, 400), Band(None, -70)], ids=str)
@pytest.mark.parametrize(("M", "N"), [(1, 300), (239, 129), (1000, 1023), (5000, 5000)])
@pytest.mark.parametrize(("D", "bias"), [(32, None), (32, "1hmn"), (64, None), (128, None), (256, None)])
def test_what_a_warpgroup_leaves_out_or_does_not_mask(D, bias, M, N, band):
    """Under a band without a lower limit: the visits that it leaves out are hidden from all its queries, and those of
    its last loop are seen by all, in whole."""
    terms, sizes, c = known(1, 1, 1, M, N, band, bias, 132, D)
    assert c.PEELED
    three = D <= 64 and bias is None and M == 5000
    assert three == (c.WARPGROUPS == 3)
    assert bool(c.SKIPS_HIDDEN) is (64 * c.WARPGROUPS > c.BLOCK_N)
    left = 0
    for t in range(sizes.tiles):
        tile = tile_scheduler.work_tile_at.fn(t, None, terms, sizes, c)
        for w in range(c.WARPGROUPS):
            rows = range(tile.row0 + 64 * w, min(tile.row0 + 64 * w + 64, M))
            first = tile_scheduler.first_entry.fn(tile, terms, c, w)
            full = tile_scheduler.first_full.fn(tile, first)
            assert 0 <= first < full <= tile.count
            last_keys = [min(row + terms.hi, N - 1) for row in rows]
            for i in range(tile.count):
                n0 = tile_scheduler.entry_at.fn(i, tile, c).n * c.BLOCK_N
                if i < first:
                    assert all(last < n0 for last in last_keys)
                elif i >= full:
                    assert all(last >= n0 + c.BLOCK_N - 1 for last in last_keys)
            left += first
    assert left > 0 or not c.SKIPS_HIDDEN or M < 5000


@pytest.mark.parametrize("band", [CAUSAL, LEFT, WINDOW, Band(None, -70)], ids=str)
@pytest.mark.parametrize(("M", "N"), [(239, 432), (432, 239), (3, 400), (400, 3), (256, 256)])
def test_a_packed_tile_counts_from_the_ends_of_its_sequence(monkeypatch, M, N, band):
    """The visits of a tile of queries of a sequence hold all keys that it sees."""
    seq = SeqInfo(1000, 2000, M, N, N - M)
    monkeypatch.setattr(tile_scheduler, "listed_tile_and_head", lambda tiles, t, heads, block, by_keys: (seq, t, 1, 5))
    terms = band_terms(band)
    c = SimpleNamespace(WARPGROUPS=2, BLOCK_N=64, PACKED=True, UNDERFLOWS=False, MASK=False)
    sizes = SimpleNamespace(row_tiles=99, heads=4)
    row, col = torch.arange(M)[:, None] + N - M, torch.arange(N)
    seen = (col - row <= terms.hi) & (col - row >= terms.lo)
    for t in range(-(-M // 128)):
        tile = tile_scheduler.work_tile_at.fn(t, SimpleNamespace(tile_list=None), terms, sizes, c)
        assert (tile.seq, tile.h, tile.row0) == (seq, 1, 128 * t)
        for n in range(-(-N // c.BLOCK_N)):
            pairs = seen[128 * t : 128 * t + 128, 64 * n : 64 * n + 64]
            visited = tile.last - tile.count < n <= tile.last
            assert visited or not pairs.any()
            assert visited is bool(pairs.any()) or tile.count == 1
            assert not tile.full_begin <= n < tile.full_end or pairs.all()
