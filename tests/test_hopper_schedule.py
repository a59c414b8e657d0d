"""Which tile of queries follows which in the Hopper forward: the kernel's own function, run as Python on integers."""

from __future__ import annotations

import importlib.util
import itertools
from types import SimpleNamespace

import pytest
import torch

from tilewise.problem import Operand, Problem
from tilewise.score import tiles
from tilewise.score.terms import Band, Score

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from tilewise.backends.hopper import launch, schedule
from tilewise.backends.hopper.config import forward_config

CAUSAL, LEFT, WINDOW = Band(None, 0), Band(-100, None), Band(-100, 30)


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    """The function of the kernel as a Python function."""
    gl = SimpleNamespace(minimum=min, maximum=max, where=lambda c, x, y: x if c else y, constexpr=lambda x: x)
    monkeypatch.setattr(schedule, "gl", gl)
    monkeypatch.setattr(schedule, "key_tiles", tiles.key_tiles)


def walk(B, H, Hkv, M, N, band, bias=None, programs=132):
    """The tiles in their order, and how many heads run together."""
    shape = {"b": B, "h": H, "k": Hkv, "m": M, "n": N, "1": 1}
    problem = Problem(
        device="cuda", capability=(9, 0), dtype=torch.bfloat16, batch=B, heads=H, kv_heads=Hkv, queries=M, keys=N,
        head_dim=128, value_dim=128, score=Score(0.1, None, band), bias_grad=False, deterministic=False,
        bias=None if bias is None else Operand(torch.bfloat16, *(shape[axis] for axis in bias)),
    )  # fmt: skip
    config = forward_config(problem)
    sizes = launch._sizes(problem, config, programs)
    c = launch._compiled(problem, config, True)
    c = SimpleNamespace(**{name: value.value for name, value in c._asdict().items()})
    lo, hi = tiles.limits(band)
    terms = SimpleNamespace(lo=lo, hi=hi, HAS_LO=band.lo is not None, HAS_HI=band.hi is not None)
    return [schedule.tile_at.fn(t, None, terms, sizes, c) for t in range(sizes.tiles)], sizes.at_once


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
