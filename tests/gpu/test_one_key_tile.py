"""Hopper's backward where all keys are one tile of it: dQ leaves as what it is, by two launches."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers import Case, check, run, tensors

BRAIN = torch.bfloat16
TINY = Case(B=2, H=4, Hkv=2, M=128, N=128, D=64, dtype=BRAIN)

if torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs compute capability 9.0", allow_module_level=True)


@pytest.mark.parametrize("length", [1, 3, 17, 64, 127, 128])
@pytest.mark.parametrize(
    "terms",
    [{}, {"causal": True}, {"causal": True, "deterministic": True}, {"D": 128},
     {"lse": False, "layout": "heads_last"}],
    ids=str,
)  # fmt: skip
def test_lengths(hopper_backwards, terms, length):
    check(replace(TINY, M=length, N=length, **terms), "hopper", "cuda")
    assert [made.dq_stored for made in hopper_backwards] == [True]


@pytest.mark.parametrize(
    "terms",
    [
        {"M": 300, "causal": True},  # the first tile of queries sees nothing
        {"M": 700, "N": 60, "window": (20, 5)},
        {"M": 3, "N": 8, "Hkv": 4, "B": 1, "bias": "1hmn"},
        {"M": 127, "N": 120, "Hkv": 4, "B": 1, "bias": "1hmn"},
        {"M": 65, "N": 128, "causal": True},
        {"M": 1000, "N": 3},
        {"N": 64, "softcap": 5.0},
        {"N": 64, "bias": "b11n"},
        {"M": 200, "bias": "bhm1"},
        {"M": 200, "Hkv": 4, "bias": "bhmn", "bias_hides": True, "planted": float("nan")},
        {"N": 60, "Hkv": 4, "B": 1, "bias": "1hmn", "bias_dtype": torch.float32},
        {"sink": "h"},
        {"D": 96, "Dv": 40, "dtype": torch.float16},
        {"B": 40, "H": 16, "Hkv": 8, "D": 64},  # more work tiles than programs: these stay
    ],
    ids=str,
)
def test_beside(hopper_backwards, terms):
    check(replace(TINY, **terms), "hopper", "cuda")
    assert [made.dq_stored for made in hopper_backwards] == [True]


@pytest.mark.parametrize("terms", [{"N": 129}, {"mask": "b1mn", "blind": True}, {"D": 32}, {"D": 256}], ids=str)
def test_others_take_the_usual_way(hopper_backwards, terms):
    check(replace(TINY, **terms), "hopper", "cuda")
    assert [made.dq_stored for made in hopper_backwards] == [False]


def test_the_same_bits():
    x = tensors(TINY, "cuda")
    first = run(TINY, "hopper", "cuda", x)
    for _ in range(5):
        again = run(TINY, "hopper", "cuda", x)
        assert all(torch.equal(getattr(again, name), getattr(first, name)) for name in ("dq", "dk", "dv"))
