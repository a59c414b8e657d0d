"""Hopper's backward where more heads share a bias than the ring of dq_accum has room for: they take turns in it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers import Case, check, run, tensors

from tilewise.backends.gluon.sm90 import backward_launch

PAIR = Case(B=120, H=4, M=200, N=232, D=32, bias="1hmn", dtype=torch.bfloat16)

if torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs compute capability 9.0", allow_module_level=True)


@pytest.fixture
def turns(monkeypatch):
    """Of each backward, whether heads took turns."""
    log = []
    before = backward_launch.Backward.__call__

    def watched(self, *arguments):
        log.append("lanes" if self.config.lanes > 1 else self.dq_ring)
        return before(self, *arguments)

    monkeypatch.setattr(backward_launch.Backward, "__call__", watched)
    return log


@pytest.mark.parametrize(
    "terms",
    [
        {},
        {"M": 64, "N": 64, "B": 299},  # groups of one program
        {"M": 333, "N": 56, "B": 240},  # one tile of keys
        {"B": 119},  # groups of four programs of as many heads
        {"B": 58, "H": 8},
        {"Hkv": 2, "H": 8},
        {"D": 24, "Dv": 16, "layout": "heads_last"},
        {"dtype": torch.float16, "lse": False},
        {"bias_dtype": torch.float32},
        {"causal": True},
        {"softcap": 5.0},
        {"mask": "b11n"},
        {"mask": "b1mn", "blind": True, "planted": float("nan")},
        {"bias_hides": True, "planted": float("nan")},
        {"dropout_p": 0.2},
    ],
    ids=str,
)
def test_heads_take_turns(turns, terms):
    check(replace(PAIR, **terms), "hopper", "cuda")
    assert turns == [True]


@pytest.mark.parametrize(
    "terms",
    [
        {},
        {"B": 257},  # the last program of a head has two
        {"B": 259, "M": 129, "N": 168},
        {"B": 700, "M": 300, "N": 64},
        {"B": 256, "Hkv": 2, "N": 256},
        {"H": 8, "bias": "11mn"},
        {"D": 24, "Dv": 16, "layout": "heads_last"},
        {"dtype": torch.float16, "lse": False},
        {"bias_hides": True, "planted": float("nan")},
        {"sink": "h"},
    ],
    ids=str,
)
def test_batch_elements_side_by_side(turns, terms):
    case = replace(PAIR, **{"B": 258, **terms})
    check(case, "hopper", "cuda")
    assert turns == ["lanes"]


@pytest.mark.parametrize("terms", [{"deterministic": True}, {"B": 16}], ids=str)
def test_others_have_a_sum_each(turns, terms):
    check(replace(PAIR, **terms), "hopper", "cuda")
    assert turns == [False]


def test_dbias_has_the_same_bits_where_that_is_asked_for():
    case = replace(PAIR, deterministic=True)
    x = tensors(case, "cuda")
    first = run(case, "hopper", "cuda", x)
    for _ in range(5):
        again = run(case, "hopper", "cuda", x)
        assert all(torch.equal(getattr(again, name), getattr(first, name)) for name in ("dq", "dk", "dv", "dbias"))
