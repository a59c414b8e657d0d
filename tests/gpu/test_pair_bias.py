"""Hopper's backward of the pair bias of structure models: three batch elements of a program share the bias."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers import Case, check, run, tensors

PAIR = Case(B=45, H=4, M=768, N=768, D=32, bias="1hmn", dtype=torch.bfloat16)

if torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs compute capability 9.0", allow_module_level=True)


@pytest.mark.parametrize(
    "terms",
    [
        {},
        {"B": 43},  # the last program of a head has one
        {"B": 44, "M": 833, "N": 776},
        {"B": 60, "Hkv": 2, "N": 1160},
        {"H": 8, "bias": "11mn"},
        {"D": 24, "Dv": 16},
        {"dtype": torch.float16, "lse": False},
        {"bias_hides": True, "planted": float("nan")},
        {"sink": "h"},
    ],
    ids=str,
)
def test_batch_elements_side_by_side(hopper_backwards, terms):
    check(replace(PAIR, **terms), "hopper", "cuda")
    assert [made.config.lanes for made in hopper_backwards] == [3]


@pytest.mark.parametrize("terms", [{"deterministic": True}, {"B": 16}, {"N": 760}, {"mask": "b11n"}], ids=str)
def test_others_have_a_sum_each(hopper_backwards, terms):
    check(replace(PAIR, **terms), "hopper", "cuda")
    assert [made.config.lanes for made in hopper_backwards] == [1]


def test_dbias_has_the_same_bits_where_that_is_asked_for():
    case = replace(PAIR, deterministic=True)
    x = tensors(case, "cuda")
    first = run(case, "hopper", "cuda", x)
    for _ in range(5):
        again = run(case, "hopper", "cuda", x)
        assert all(torch.equal(getattr(again, name), getattr(first, name)) for name in ("dq", "dk", "dv", "dbias"))
