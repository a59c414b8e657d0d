"""Kept keys that are gathered: calls with a dynamic mask held to the oracle with the bool mask, by the error rule."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from helpers import Case, hold, run, tensors
from torch import Tensor

from tilewise import TileMask, attention, dynamic_mask, explain, gather

USUAL = Case(B=2, H=4, Hkv=2, M=300, N=300, D=16)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Small calls are gathered, in small chunks; and each is counted."""
    monkeypatch.setattr(gather, "WORTH", {"cpu": 0.0, "cuda": 0.0})
    monkeypatch.setattr(gather, "LEAST_CHUNK", 64)


@pytest.fixture
def ways(monkeypatch) -> list[object]:
    """What was decided for each call."""
    found, decide = [], gather.gather_of

    def told(*arguments):
        found.append(decide(*arguments))
        return found[-1]

    monkeypatch.setattr(gather, "gather_of", told)
    return found


def masked(case: Case, keep: int, shape: tuple[int, int], causal: bool, planted: float | None = None):
    """The TileMask of a case, and its inputs with the bool mask and the spoilt ones with the TileMask."""
    scores = torch.randint(0, 40, (*shape, 1, case.N), generator=torch.Generator().manual_seed(keep)).float()
    found = dynamic_mask(scores, keep=keep, causal=causal, queries=case.M)
    inputs = tensors(replace(case, mask=None))._replace(mask=found.dense())
    spoilt = inputs._replace(mask=found)
    if planted is not None:
        dense = found.dense().expand(-1, -1, case.M, -1)
        if case.causal:
            dense = dense & torch.ones(case.M, case.N, dtype=torch.bool).tril(case.N - case.M)
        seen = dense.any(2)
        hidden = ~seen.expand(case.B, case.kv_heads, case.N)
        assert hidden.any()
        k, v = inputs.k.clone(), inputs.v.clone()
        k[hidden] = v[hidden] = planted
        spoilt = spoilt._replace(k=k, v=v)
    return inputs, spoilt


def check(case: Case, keep: int, shape=(2, 2), causal: bool = True, planted: float | None = None) -> None:
    inputs, spoilt = masked(case, keep, shape, causal, planted)
    hold(case, run(case, "cpu", inputs=spoilt), inputs=inputs)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 2), (2, 2)], ids=str)
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"causal": True, "bias": "11mn"[:2] + "1n", "layout": "heads_last"},
        {"bias": "bh1n", "sink": "h", "softcap": 9.0},
        {"bias": "1k1n", "sink": "bhm", "window": (90, 20), "dtype": torch.bfloat16},
        {"M": 257, "causal": True, "deterministic": True},
        {"M": 400, "N": 300, "sink": "b11", "bias": "b11n", "D": 8, "Dv": 24},
    ],
    ids=str,
)
def test_against_the_bool_mask(ways, causal, shape, more):
    case = replace(USUAL, **more)
    check(case, 30, shape, causal)
    way = ways[0]
    assert isinstance(way, gather.Gather), way
    assert way.chunks == (1 if not causal else -(-case.M // 64))
