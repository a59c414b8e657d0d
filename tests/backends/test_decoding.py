"""How few queries are planned: who computes them, in how many splits, what explain says; no kernel runs here."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tilewise import explain
from tilewise.backends import triton
from tilewise.backends.gluon import sm90 as hopper
from tilewise.backends.triton.config import MOST_SPLITS, best_splits, forward_config, splits
from tilewise.planner import make_plan
from tilewise.spec.problem import Problem
from tilewise.spec.score import Band, Score

pytest.importorskip("triton")

DECODE = Problem(
    device="cuda", capability=(9, 0), dtype=torch.bfloat16, batch=16, heads=32, kv_heads=8, queries=1, keys=32768,
    head_dim=128, value_dim=128, score=Score(0.1, None, Band()),
)  # fmt: skip
CAPABILITIES = [None, (8, 0), (8, 6), (9, 0), (10, 0), (12, 0), (13, 0)]


def count(problem):
    return splits(problem, forward_config(problem, bias_tma=True, tma=True))


@pytest.mark.parametrize("multiprocessors", [84, 132])
def test_no_number_of_splits_is_better(multiprocessors):
    """Of all that there may be."""
    for units in (*range(1, 40), 66, 84, 131, 132, 133, 500, 1056, 1057, 5000):
        for tiles in (*range(40), 63, 64, 65, 127, 255, 256, 257, 512, 4099):

            def time(splits, units=units, tiles=tiles):
                programs = units * splits
                waves = 1 if programs <= multiprocessors else 2 * -(-programs // (2 * multiprocessors))
                return waves * (-(-tiles // splits) + 3)

            most = max(min(tiles, 8 * multiprocessors // units, MOST_SPLITS), 1)
            assert best_splits(units, tiles, multiprocessors) == min(range(1, most + 1), key=time), (units, tiles)


@pytest.mark.parametrize(("queries", "keys"), [(1, 16), (1, 32768), (16, 256), (64, 1024)])
def test_few_queries_are_not_for_hopper(queries, keys):
    few = replace(DECODE, queries=queries, keys=keys)
    assert few.few_queries
    plan = make_plan(few)
    assert plan.backend == "triton"
    assert dict(plan.declined)["hopper"] == hopper.prefers(few)
    assert hopper.prefers(few).endswith(f"too slow for {queries}")
    assert make_plan(few, "hopper").backend == "hopper"  # asked for by name: slow, and no error
    assert replace(few, value_dim=8).few_queries
    for many in (replace(few, queries=65, keys=16 * 65), replace(few, keys=16 * queries - 1)):
        assert not many.few_queries
        assert make_plan(many).backend == "hopper"


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_splits_fill_the_gpu(capability):
    decode = replace(DECODE, capability=capability)
    assert count(replace(decode, keys=64 * decode.keys, batch=1, heads=4, kv_heads=1)) > 64
    assert count(replace(decode, batch=512)) == 1
    for batch in range(1, 40):
        parts = count(replace(decode, batch=batch))
        assert 8 * batch * parts >= 80
        assert parts == 1 or 8 * batch * parts <= 8 * 170


@pytest.mark.parametrize("change", [{"keys": 16}, {"keys": 64}, {"score": Score(1.0, None, Band(31990, 31995))}])
def test_no_more_splits_than_tiles(change):
    """Of all keys, or of those that a window leaves."""
    assert count(replace(DECODE, batch=1, heads=1, kv_heads=1, **change)) == 1


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_the_workspace_is_bounded(capability):
    """Partial results have no more tiles than eight for each multiprocessor, however long the keys are."""
    for batch in (1, 2, 7, 16, 100):
        for group, queries in ((1, 1), (8, 1), (1, 64), (8, 64), (4, 5)):
            for keys in (1024, 32768, 2**24):
                problem = replace(
                    DECODE, capability=capability, batch=batch, heads=4 * group, kv_heads=4, queries=queries, keys=keys
                )
                parts = count(problem)
                assert 1 <= parts <= MOST_SPLITS
                assert parts * batch * 4 <= 8 * 170 or parts == 1


def test_explain_tells_the_splits():
    q = torch.empty(2, 32, 1, 128, dtype=torch.bfloat16, device="meta")
    k = torch.empty(2, 8, 32768, 128, dtype=torch.bfloat16, device="meta")
    text = str(explain(q, k, k, device="sm_90"))
    words = "16 queries of the 4 heads that share keys x 64 keys, 4 warps, 4 pipeline stages; the keys in 8 splits"
    assert f"backend triton: {words}, merged by their LSE" in text
    assert "  not hopper: has tiles of 128 queries and does not split the keys: too slow for 1" in text
    assert "split" not in triton.tiles(replace(DECODE, queries=4096))
    text = str(explain(k, k, k, device="sm_80"))
    assert "split" not in text.splitlines()[[line.startswith("backend") for line in text.splitlines()].index(True)]
