"""Attention sinks on the device: Triton, with splits too, and Hopper's kernels, by the error rule of helpers.py."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from forced import check_split
from helpers import Case, check, tensors

from tilewise import attention, explain

BRAIN, HALF, FLOAT = torch.bfloat16, torch.float16, torch.float32
USUAL = Case(B=2, H=4, Hkv=2, M=239, N=432, D=64, dtype=BRAIN, sink="h")
HOPPER = pytest.mark.skipif(torch.cuda.get_device_capability() != (9, 0), reason="needs compute capability 9.0")
TERMS = [
    {},
    {"D": 128, "causal": True, "sink_dtype": FLOAT},
    {"D": 128, "M": 700, "causal": True, "sink": "bhm"},  # the first queries see their sink alone
    {"D": 32, "window": (100, 30), "sink": "111"},
    {"D": 256, "causal": True, "sink_at": 5.0},
    {"D": 128, "softcap": 2.0, "sink_at": 60.0, "dtype": HALF},
    {"sink_at": -60.0, "sink": "b11", "lse": False},
    {"sink_at": 3000.0, "grads": "s"},
    {"bias": "1hmn", "sink": "1hm", "sink_none": True},
    {"bias": "bhmn", "bias_hides": True, "blind": True, "D": 128, "causal": True, "deterministic": True},
    {"bias": "b11n", "planted": math.nan, "sink": "bhm", "sink_none": True},
    {"bias": "1hm1"},  # Hopper declines it
    {"mask": "b1mn", "blind": True, "D": 128, "sink": "bhm", "sink_dtype": HALF},
    {"mask": "bhmn", "planted": math.inf, "D": 256, "bias": "1hmn", "softcap": 2.0},
]


@pytest.mark.parametrize("backend", ["triton", pytest.param("hopper", marks=HOPPER)])
@pytest.mark.parametrize("terms", TERMS, ids=str)
def test_sinks(backend, terms):
    case = replace(USUAL, layout="padded", **terms)
    if backend == "hopper" and case.bias == "1hm1":
        x = tensors(case, "cuda")
        with pytest.raises(ValueError, match="takes no sink beside a bias that is constant along the keys"):
            attention(x.q, x.k, x.v, bias=x.bias, sink=x.sink, backend="hopper")
        return
    check(case, backend, "cuda")


def test_in_float32():
    check(replace(USUAL, dtype=FLOAT, sink="bhm", bias="1hmn"), "triton", "cuda")


@HOPPER
def test_hopper_is_chosen():
    x = tensors(replace(USUAL, M=4096, N=4096, D=128), "cuda")
    plan = explain(x.q, x.k, x.v, sink=x.sink.requires_grad_(), causal=True).plan
    assert (plan.backend, plan.backward) == ("hopper", "hopper")


@pytest.mark.parametrize("splits", [1, 2, 40])
@pytest.mark.parametrize(
    "terms",
    [
        {},
        {"sink": "bhm", "sink_none": True, "M": 3, "causal": True, "bias": "bhmn"},
        {"sink": "1hm", "M": 5, "mask": "1hmn", "blind": True, "sink_at": 30.0, "grads": "qkvs"},
        {"sink_at": -30.0, "sink_dtype": FLOAT, "D": 128},
    ],
    ids=str,
)
def test_few_queries(terms, splits):
    check_split(replace(USUAL, **{"H": 8, "M": 1, "N": 1023, "grads": "", **terms}), splits, "cuda")


@pytest.mark.parametrize("backend", ["triton", pytest.param("hopper", marks=HOPPER)])
def test_gradients_repeat_bit_by_bit(backend):
    x = tensors(replace(USUAL, M=1000, N=1024, D=128), "cuda")
    leaves = [t.requires_grad_() for t in (x.q, x.k, x.v, x.sink)]

    def gradients():
        o = attention(*leaves[:3], sink=leaves[3], causal=True, deterministic=True, backend=backend)
        return torch.autograd.grad(o, leaves, x.do)

    first = gradients()
    for _ in range(20):
        assert all(map(torch.equal, gradients(), first))
