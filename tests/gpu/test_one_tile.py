"""Many short sequences, each in one tile, on the device, by the error rule of helpers.py."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from helpers import Case, check, tensors
from repeated_masks import RepeatedCase, hold_repeated

import tilewise
from tilewise import attention

BRAIN, HALF, FLOAT = torch.bfloat16, torch.float16, torch.float32
WINDOWS = Case(B=128, H=3, M=49, N=49, D=32, dtype=BRAIN, bias="1hmn")
TERMS = [
    {},
    {"bias": None},
    {"bias": None, "causal": True, "D": 64},
    {"mask": "11mn", "dtype": HALF},
    {"mask": "b1mn", "planted": math.nan},
    {"mask": "bhmn", "bias": "b1mn", "blind": True},
    {"B": 700, "mask": "b1mn", "planted": math.inf, "bias": "11mn"},
    {"bias": "bhmn", "bias_hides": True, "blind": True, "planted": math.nan},
    {"bias": None, "mask": "bhm1", "blind": True, "lse": False},
    {"M": 64, "N": 64, "D": 64, "Dv": 24, "softcap": 2.0},
    {"M": 3, "N": 7, "D": 5, "Dv": 9, "bias": "bhmn"},
    {"M": 17, "N": 60, "D": 40, "window": (9, 20), "layout": "sliced", "bias_dtype": FLOAT},
    {"M": 33, "N": 16, "layout": "expanded", "dtype": HALF},
    {"bias_dtype": FLOAT, "bias_scale": 1e4},
    {"bias_dtype": FLOAT, "bias_scale": 1e6},
    {"grads": "b"},
    {"grads": "kv", "mask": "1hmn", "deterministic": True},
]


@pytest.mark.parametrize("terms", TERMS, ids=str)
def test_terms(terms):
    case = replace(WINDOWS, **terms)
    x = tensors(case, "cuda")
    plan = tilewise.explain(x.q, x.k, x.v, bias=x.bias, mask=x.mask, **case.terms)
    assert plan.plan.backend == "triton"
    assert "whole sequences" in plan.tiles
    check(case, "triton", "cuda")


def test_a_mask_that_repeats():
    hold_repeated(
        RepeatedCase("w1mn", "1hmn", images=9, windows=16, M=49, N=49, dtype=BRAIN, planted=True), "triton", "cuda"
    )


def test_rows_past_2_to_the_31_elements():
    """Windows of a long packed tensor, the last past 2³¹ elements."""
    rows, width = 1 << 13, 1 << 19
    x = torch.zeros(rows, width, dtype=BRAIN, device="cuda")  # 8 GiB
    q, k, v = (
        x[:, n * 64 : n * 64 + 64].unflatten(0, (-1, 64)).unflatten(2, (2, 32)).transpose(1, 2) for n in range(3)
    )
    for n, y in enumerate((q, k, v)):
        y.copy_(torch.randn(y.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(n)))
    leaves = [y.detach().requires_grad_() for y in (q, k, v)]
    dense = [y.detach().contiguous().requires_grad_() for y in (q, k, v)]
    for o, of in ((attention(*leaves), leaves), (attention(*dense), dense)):
        o.float().square().sum().backward()
        of.append(o.detach())
    for a, b in zip(leaves[:3], dense[:3], strict=True):
        assert torch.equal(a.grad, b.grad)
    assert torch.equal(leaves[3], dense[3])


def test_two_calls_have_equal_bits():
    x = tensors(WINDOWS, "cuda")
    found = []
    for _ in range(2):
        leaves = [y.detach().requires_grad_() for y in (x.q, x.k, x.v, x.bias)]
        o = attention(*leaves[:3], bias=leaves[3])
        found.append((o, *torch.autograd.grad(o, leaves, torch.ones_like(o))))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # PyTorch's own use
def test_compile():
    x = tensors(replace(WINDOWS, mask="11mn"), "cuda")

    def call(q, k, v, bias):
        return attention(2 * q, k, v, bias=bias, mask=x.mask).square()

    found = []
    for function in (call, torch.compile(call, fullgraph=True)):
        leaves = [y.detach().requires_grad_() for y in (x.q, x.k, x.v, x.bias)]
        o = function(*leaves)
        found.append((o, *torch.autograd.grad(o, leaves, torch.ones_like(o))))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=2**-6, atol=2**-6 * float(b.detach().abs().max()))
