"""What the Hopper backward hides of a tile: the kernels' own functions, run as Python on integers and tensors."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from kernel_stubs import as_python, band_terms, gluon, numbers, problem, replace

from tilewise.spec import tiles
from tilewise.spec.score import Band

pytest.importorskip("triton")

from tilewise.backends.gluon import score
from tilewise.backends.gluon.sm90.backward import launch as backward_launch
from tilewise.backends.gluon.sm90.backward import masks as mask_tiles
from tilewise.backends.gluon.sm90.backward import scheduler as backward_scheduler
from tilewise.backends.gluon.sm90.backward.sizes import leaves_queries_out
from tilewise.backends.gluon.sm90.common import config
from tilewise.backends.gluon.varlen import SeqInfo


class Tile:
    """A tile of ones, with what the kernel reads of a tensor."""

    def __init__(self, keys, queries):
        self.ones, self.shape = torch.ones(keys, queries), (keys, queries)
        self.type = SimpleNamespace(layout=None)


def where(condition, x, y):
    if isinstance(condition, torch.Tensor):
        return torch.where(condition, getattr(x, "ones", x), y)
    return x if condition else y


def minimum(x, y):
    return min(x, y) if isinstance(x, int) else x.clamp(max=y)


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    """The functions of the kernels as Python functions."""
    replace(monkeypatch, backward_scheduler, score, mask_tiles, gl=gluon(minimum=minimum, where=where))
    monkeypatch.setattr(backward_scheduler, "query_tiles", tiles.query_tiles)
    as_python(monkeypatch, backward_scheduler, "head_and_tile heads_at_once groups_per_broadcast key_tile")
    as_python(monkeypatch, score, "in_band", mask_tiles)


BANDS = [
    Band(), Band(None, 3), Band(None, 193), Band(None, 194), Band(-200, 70), Band(-50, None), Band(300, 400),
    Band(-64, 0),
]  # fmt: skip


@pytest.mark.parametrize("band", BANDS, ids=str)
@pytest.mark.parametrize(("queries", "keys"), [(239, 432), (432, 239), (256, 256), (70, 129)])
@pytest.mark.parametrize(("dim", "deterministic"), [(32, False), (64, False), (64, True), (128, False), (256, False)])
def test_a_visited_tile_keeps_what_is_visible(dim, deterministic, queries, keys, band):
    """And no other tile has anything that is. Rows past the end may keep all: their LSE is +inf."""
    p = problem(1, 1, 1, queries, keys, dim, band, deterministic=deterministic)
    chosen = config.backward_config(p)
    c = numbers(backward_launch._compiled(p, chosen, config.backward_width(p), False))
    sizes, _ = backward_launch._sizes(p, chosen, torch.device("meta"))
    terms = band_terms(band)
    row, col = torch.arange(queries)[None, :], torch.arange(keys)[:, None]
    seen = (col <= row + terms.hi) & (col >= row + terms.lo)
    found = torch.zeros(sizes.key_tiles * c.BLOCK_N, sizes.row_tiles * c.BLOCK_M)
    for program in range(sizes.key_tiles):
        mine = backward_scheduler.work_tile_of.fn(program, 0, terms, sizes, c)
        for i in range(mine.end - mine.begin):
            m, kind = backward_scheduler.entry_at.fn(i, None, mine, c)
            for m0 in range(m * c.BLOCK_M, (m + 1) * c.BLOCK_M, c.SUBTILE_M):
                p_tile = mask_tiles.visible.fn(Tile(c.BLOCK_N, c.SUBTILE_M), None, 0, kind, mine, m0, terms, sizes, c)
                found[mine.n0 : mine.n0 + c.BLOCK_N, m0 : m0 + c.SUBTILE_M] += getattr(p_tile, "ones", p_tile)
    assert torch.equal(found[:keys, :queries], seen.float())
    assert not found[keys:, :queries].any()


@pytest.mark.parametrize("band", [*BANDS[1:], Band(None, 0), Band(None, 1)], ids=str)
@pytest.mark.parametrize(("queries", "keys"), [(239, 432), (432, 239), (3, 400), (400, 3), (256, 256)])
def test_a_packed_tile_counts_from_the_ends_of_its_sequence(queries, keys, band):
    """Tiles of queries that see a tile of keys are visited, and full ones see all of it; keys past the end are hidden
    from all that visit them."""
    seq = SeqInfo(1000, 2000, queries, keys, keys - queries)
    terms = band_terms(band)
    p = SimpleNamespace(totals=(2000, 3000), score=SimpleNamespace(band=band))
    hides_end = backward_launch._hides_end(p, None)
    c = SimpleNamespace(BLOCK_M=64, BLOCK_N=128, RAGGED=True, HIDES_END=hides_end, MASK=False)
    row, col = torch.arange(queries)[:, None] + keys - queries, torch.arange(keys)
    seen = (col - row <= terms.hi) & (col - row >= terms.lo)
    for n0 in range(0, keys, c.BLOCK_N):
        tile = backward_scheduler.key_tile(0, 0, n0, seq, 7, terms, c)
        for m in range(-(-queries // c.BLOCK_M)):
            pairs = seen[m * c.BLOCK_M : (m + 1) * c.BLOCK_M, n0 : n0 + c.BLOCK_N]
            assert not pairs.any() or tile.begin <= m < tile.end
            full = tile.full_begin <= m < tile.full_end
            assert not full or (pairs.all() and pairs.shape[1] == c.BLOCK_N)
            assert full or not pairs.all() or pairs.shape != (c.BLOCK_M, c.BLOCK_N)
            if tile.begin <= m < tile.end:
                args = None, 0, 0 if full else 1, tile, m * c.BLOCK_M, terms, None, c
                found = mask_tiles.visible.fn(Tile(c.BLOCK_N, c.BLOCK_M), *args)
                found = getattr(found, "ones", found)[:, : pairs.shape[0]]
                assert torch.equal(found[: pairs.shape[1]].T, pairs.float())
                assert not found[pairs.shape[1] :].any()


def test_where_a_query_sees_no_key():
    """All small lengths and bands; a band that leaves all out has zeros anyway."""
    limits = [None, *range(-6, 7)]
    for queries, keys in itertools.product(range(1, 5), repeat=2):
        row, col = torch.arange(queries)[:, None], torch.arange(keys)[None, :]
        for lo, hi in itertools.product(limits, repeat=2):
            if lo is not None and hi is not None and lo > hi:
                continue
            seen = (col - row >= (-9 if lo is None else lo)) & (col - row <= (9 if hi is None else hi))
            assert leaves_queries_out(queries, keys, lo, hi) == (not seen.any(1).all()), (queries, keys, lo, hi)
