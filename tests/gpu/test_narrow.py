"""The Triton kernels with narrow heads and values beside hidden keys that are NaN, by the error rule of helpers.py.

A NaN that the product meets sends the forward on a second walk over the keys, whose products once read the wrong shared
memory where keys and values are of different widths (descriptor_lint.py). Terms, dtypes and groups take turns over the
dimensions; each case runs with rows that TMA reads and with rows that it may not, and every third with its gradients.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from helpers import Case, check
from pairwise import each

BRAIN, HALF = torch.bfloat16, torch.float16
NARROW = (1, 8, 16, 24, 32)
WIDE = [(64, 1), (64, 8), (64, 24), (64, 32), (72, 8), (128, 8), (128, 32), (256, 8), (256, 64), (8, 64), (32, 128)]
TERMS = (
    {"bias": "bhmn"},
    {"mask": "b11n"},
    {"window": (50, None)},
    {"bias": "b11n", "causal": True},
    {"mask": "1hmn", "bias": "1hmn"},
    {"bias": "1h1n", "bias_hides": True, "softcap": 2.0},
    {"window": (50, 20), "causal": True, "bias": "1hmn", "bias_dtype": torch.float32},
)
USUAL = Case(B=2, H=4, M=239, N=432, planted=math.nan)


def cases(dimensions, usual, terms):
    for n, (D, Dv) in enumerate(dimensions):
        yield replace(
            usual, D=D, Dv=Dv, dtype=(BRAIN, HALF)[n % 2], Hkv=(4, 2, 2, 4)[n % 4],
            grads="qkvb" if n % 3 == 0 else "", **terms[n % len(terms)],
        )  # fmt: skip


@each(cases([*itertools.product(NARROW, NARROW), *WIDE], USUAL, TERMS))
@pytest.mark.parametrize("layout", ["padded", "contiguous"])
def test_many_queries(case, layout):
    check(replace(case, layout=layout), "triton", "cuda")


# Packed tiles of 64 rows, and of 16 with Ampere's product.
FEW = (
    {"M": 40, "bias": "b11n"},
    {"M": 7, "mask": "b1mn"},
    {"M": 40, "mask": "1k1n", "softcap": 2.0},
    {"M": 23, "bias": "11mn", "window": (500, 20)},
    {"M": 33, "causal": True, "window": (300, 0)},
)


@each(cases([(8, 8), (32, 8), (64, 8), (64, 32), (72, 8), (128, 1), (128, 24), (128, 32), (8, 64), (256, 16)],
            replace(USUAL, N=1023), FEW))  # fmt: skip
@pytest.mark.parametrize("layout", ["padded", "contiguous"])
def test_few_queries(case, layout):
    check(replace(case, layout=layout), "triton", "cuda")
