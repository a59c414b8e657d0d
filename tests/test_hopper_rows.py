"""Rows that the hopper backend treats apart, in Triton's interpreter: those that its forward computes again, and what
its backward knows of each."""

from __future__ import annotations

import importlib.util
import math
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

import hopper_child
import interpreter_child
import pytest
import torch
from helpers import Case, hold

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

HALF, FLOAT = torch.float16, torch.float32
USUAL = Case(B=2, H=2, Hkv=1, M=70, N=75, D=24, dtype=HALF, layout="padded", grads="")
GROUPS = replace(USUAL, B=1, H=4, Hkv=2, M=63)


@pytest.fixture(scope="module")
def interpreter():
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, initializer=interpreter_child.start) as pool:
        yield lambda function, *args: pool.submit(function, *args).result()


REPAIRED = [
    replace(GROUPS, causal=True, N=139),
    replace(USUAL, causal=True, M=139),  # the first queries see nothing
    replace(USUAL, window=(40, 20), softcap=2.0, Dv=40),
    replace(USUAL, window=(None, 3), D=136, Dv=8, B=1),
    *(replace(USUAL, bias=bias, mask="1111", B=1) for bias in ("1111", "1hm1")),
    *(replace(GROUPS, bias=bias, bias_dtype=FLOAT) for bias in ("1h1n", "11mn", "1kmn")),
    *(replace(USUAL, mask=mask) for mask in ("bhmn", "b1m1", "11m1", "bh11", "1111")),
    replace(GROUPS, mask="1k1n"),
    replace(USUAL, mask="1hm1", bias="b11n", planted=math.nan, causal=True),
    replace(USUAL, mask="b11n", bias="1hm1", planted=math.inf, layout="heads_last"),
    replace(USUAL, bias="1hmn", bias_hides=True, blind=True, scale=0.7),
    replace(USUAL, mask="111n", M=1, N=1),
]


@pytest.mark.parametrize("case", REPAIRED, ids=str)
def test_rows_are_computed_again(interpreter, case):
    """Those that are NaN in the LSE, and no other."""
    before, after, spoilt, _ = interpreter(hopper_child.repair, case, 0.3)
    assert torch.equal(after.o[~spoilt], before.o[~spoilt])
    assert torch.equal(after.lse[~spoilt], before.lse[~spoilt])
    hold(case, after)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "terms", [{"causal": True}, {"mask": "bhmn"}, {"window": (9, 2), "bias": "1111"}, {"bias": "bhmn", "blind": True}],
    ids=str,
)  # fmt: skip
def test_what_is_visible_is_not_hidden(interpreter, terms, value):
    """A value that is not finite shows in its own column of the rows that see it."""
    case = replace(USUAL, **terms)
    before, after, _, seen = interpreter(hopper_child.repair, case, 1.0, value, (1, 0, 33, 5))
    touched = torch.zeros(after.o.shape, dtype=torch.bool)
    touched[1, :, :, 5] = seen[1, :, :, 33]
    assert touched.any()
    assert torch.equal(~after.o.isfinite(), touched)
    torch.testing.assert_close(after.o[~touched], before.o[~touched], rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(after.lse, before.lse, rtol=1e-4, atol=1e-4)
