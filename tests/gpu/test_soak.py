"""Problems at random against the float64 reference, through the plan: TILEWISE_SOAK of them, 200 if it does not say.

And forwards, one of each kind of kernel, a thousand times: equal bits.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from forced import forced_splits
from helpers import Case, call, tensors
from soak import soak

COUNT = int(os.environ.get("TILEWISE_SOAK", "200"))
KERNELS = min(16 + COUNT // 8, 400)  # a compiler takes ten seconds for all that one of them needs


@pytest.mark.parametrize("n", range(KERNELS))
def test_soak(n):
    failures = soak(n, COUNT // KERNELS + (n < COUNT % KERNELS))
    assert not failures, "\n".join(
        ["with `import torch; from helpers import Case, check; from math import nan, inf`:", *failures]
    )


BRAIN = torch.bfloat16
FULL = Case(B=2, H=8, M=1024, N=1024, D=128, dtype=BRAIN, grads="")
FEW = Case(B=4, H=32, Hkv=8, M=1, N=4096, D=128, dtype=BRAIN, grads="")
HOPPER = pytest.mark.skipif(torch.cuda.get_device_capability() != (9, 0), reason="needs compute capability 9.0")


@pytest.mark.parametrize(
    ("case", "backend"),
    [
        *(
            pytest.param(replace(FULL, **terms), "hopper", marks=HOPPER)
            for terms in ({}, {"D": 64}, {"D": 256}, {"causal": True, "B": 8}, {"bias": "1hmn"},
                          {"bias": "b11n", "D": 64})
        ),
        *(
            (replace(FULL, **terms), "triton")
            for terms in ({}, {"D": 64}, {"D": 256}, {"causal": True}, {"bias": "1hmn"}, {"mask": "b1mn"},
                          {"dtype": torch.float32, "D": 64})
        ),
        *(
            (replace(FEW, **terms), "triton")
            for terms in ({}, {"bias": "1h1n"}, {"Hkv": 32, "M": 4}, {"M": 16, "causal": True, "bias": "1hmn"},
                          {"D": 256, "mask": "b11n"}, {"dtype": torch.float32})
        ),
    ],
    ids=str,
)  # fmt: skip
def test_a_thousand_forwards_are_equal(case, backend):
    inputs = tensors(case, "cuda")
    o, lse = call(case, backend, inputs)
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        again = call(case, backend, inputs)
        different += (again[0] != o).any() | (again[1] != lse).any()
    assert not different.item()


@pytest.mark.parametrize("splits", [2, 7, 64])
def test_splits_are_merged_in_one_order(splits):
    inputs = tensors(replace(FEW, bias="1h1n"), "cuda")
    case = replace(FEW, bias="1h1n")
    with forced_splits(splits):
        o, lse = call(case, "triton", inputs)
        for _ in range(200):
            again = call(case, "triton", inputs)
            assert torch.equal(again[0], o)
            assert torch.equal(again[1], lse)
