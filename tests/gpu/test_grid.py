"""The Triton backend on a GPU, held to the error rule of helpers.py, in every dtype that it has."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from helpers import LAYOUTS, Case, check

HALF, BRAIN, FLOAT = torch.float16, torch.bfloat16, torch.float32
LENGTHS = (1, 3, 127, 128, 129, 239, 799, 1023)
BROADCASTS = ["".join(axes) for axes in itertools.product("b1", "hk1", "m1", "n1")]


def each(cases):
    return pytest.mark.parametrize("case", [pytest.param(case, id=str(case)) for case in cases])


TERMS_OF_LENGTHS = (
    {},
    {"causal": True, "bias": "1hmn", "bias_dtype": FLOAT},
    {"mask": "b1mn", "window": (60, 40), "bias": "1h1n"},
    {"bias": "bhmn"},
)


@each(
    Case(M=M, N=N, D=(128, 64)[n % 2], dtype=BRAIN, **TERMS_OF_LENGTHS[n % 4])
    for n, (M, N) in enumerate(itertools.product(LENGTHS, LENGTHS))
)
def test_lengths(case):
    check(case, "triton", "cuda")


@each(
    Case(M=1024 + r, N=1024 + r, D=64, dtype=BRAIN, causal=True, bias="1hmn" if r % 2 else None)
    for r in range(0, 128, 3)
)
def test_every_remainder(case):
    check(case, "triton", "cuda")


@each(
    Case(H=4 if bias[1] == "k" else 2, Hkv=2, M=200, N=267, D=(64, 128, 32, 256)[n % 4], dtype=BRAIN, bias=bias,
         bias_dtype=dtype, deterministic=deterministic, **terms)
    for n, bias in enumerate(BROADCASTS)
    for deterministic in (False, True)
    for dtype, terms in (((None, {}), (FLOAT, {"window": (90, 35)}), (HALF, {"softcap": 2.0}))[n % 3],)
)  # fmt: skip
def test_bias_broadcasts(case):
    check(case, "triton", "cuda")


@each(
    Case(H=4 if mask[1] == "k" else 2, Hkv=2, M=200, N=267, D=64, dtype=BRAIN, mask=mask, bias=("1hmn", None)[n % 2])
    for n, mask in enumerate(BROADCASTS)
)
def test_mask_broadcasts(case):
    check(case, "triton", "cuda")


DIMENSIONS = [(1, 1), (8, 8), (40, 40), (96, 96), (64, 256), (256, 64), (160, 192), (256, 256), (40, 96)]


@each(
    Case(M=130, N=257, D=D, Dv=Dv, dtype=dtype, **terms)
    for D, Dv in DIMENSIONS
    for dtype, terms in ((BRAIN, {"bias": "1hmn"}), (HALF, {"causal": True}), (BRAIN, {"softcap": 1.5}), (FLOAT, {}))
)
def test_head_dimensions(case):
    check(case, "triton", "cuda")


@each(
    Case(
        B=2, H=H, Hkv=Hkv, M=150, N=300, D=64, dtype=BRAIN, bias=bias, causal=bias is None, deterministic=deterministic
    )
    for H, Hkv in ((8, 2), (4, 1))
    for bias in (None, "bkmn", "1h1n")
    for deterministic in (False, True)
)
def test_grouped_heads(case):
    check(case, "triton", "cuda")


@each(
    Case(M=200, N=300, D=64, dtype=BRAIN, layout=layout, bias=bias, causal=causal)
    for layout in LAYOUTS
    for bias, causal in ((None, True), ("bhmn", False), ("1h1n", False))
)
def test_layouts(case):
    check(case, "triton", "cuda")


@each(
    Case(M=150, N=260, D=64, dtype=BRAIN, planted=planted, deterministic=deterministic, **terms)
    for planted in (math.nan, math.inf, -math.inf)
    for deterministic in (False, True)
    for terms in (
        {"mask": "b11n"},
        {"mask": "bhmn", "bias": "1hmn"},
        {"window": (20, 0)},
        {"bias": "bhmn", "bias_hides": True},
    )
)
def test_hidden_keys_that_are_not_finite(case):
    check(case, "triton", "cuda")


@each(
    Case(M=150, N=260, D=64, dtype=BRAIN, blind=True, deterministic=deterministic, **terms)
    for deterministic in (False, True)
    for terms in ({"mask": "bhmn"}, {"mask": "b1m1", "causal": True}, {"bias": "bhmn"})
)
def test_rows_that_see_nothing(case):
    check(case, "triton", "cuda")


@each(
    Case(M=200, N=200, D=64, dtype=BRAIN, bias=bias, grads=grads, lse=lse)
    for bias in ("bhmn", "1hmn", "b11n")
    for grads, lse in (("b", True), ("q", False), ("kv", True), ("v", False), ("qb", False))
)
def test_gradients_on_demand(case):
    check(case, "triton", "cuda")
