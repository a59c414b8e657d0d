"""Biases of 10,000 and 1,000,000 on the device, by the error rule: P is made again from an LSE that has no rounding."""

from __future__ import annotations

import pytest
import torch
import triton
from helpers import Case, check

BRAIN, HALF, FLOAT = torch.bfloat16, torch.float16, torch.float32
HOPPER = pytest.mark.skipif(torch.cuda.get_device_capability() != (9, 0), reason="needs compute capability 9.0")
TERMS = [
    {"bias": "1hmn"},
    {"bias": "bhmn", "causal": True},
    {"bias": "11mn", "deterministic": True},
    {"bias": "bhm1"},
    {"bias": "1hmn", "mask": "b1mn", "lse": True},
    {"bias": "1hmn", "dropout_p": 0.1},
    {"bias": "1hmn", "sink": "bhm", "sink_dtype": FLOAT},
]


ONE_ROUNDING = "O is one rounding off: P·V rounds P, the sum of P does not"
# By backend, dtype, terms, D and scale: what is more than twice as wrong as unfused PyTorch.
KNOWN = [
    (
        "hopper", BRAIN, {"bias": "1hmn"}, 32, 1e6,
        "the forward of small heads rounds scores in other places than the backward",
    ),
    ("hopper", HALF, {"bias": "11mn", "deterministic": True}, 128, 1e4, ONE_ROUNDING),
    ("hopper", HALF, {"bias": "1hmn", "sink": "bhm", "sink_dtype": FLOAT}, 32, 1e4, ONE_ROUNDING),
]  # fmt: skip
if triton.__version__.startswith("3.9."):
    KNOWN.append(("triton", FLOAT, {"bias": "1hmn"}, 256, 1e6, "by Triton 3.9 alone; not understood yet"))


@pytest.mark.parametrize("scale", [1e4, 1e6])
@pytest.mark.parametrize("D", [32, 64, 128, 256])
@pytest.mark.parametrize("terms", TERMS, ids=str)
@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        ("triton", FLOAT),
        ("triton", BRAIN),
        pytest.param("hopper", HALF, marks=HOPPER),
        pytest.param("hopper", BRAIN, marks=HOPPER),
    ],
)
def test_large_biases(backend, dtype, terms, D, scale, request):
    if dtype is HALF and scale == 1e6:
        pytest.skip("beyond float16")
    for *known, reason in KNOWN:
        if known == [backend, dtype, terms, D, scale]:
            request.applymarker(pytest.mark.xfail(reason=reason, raises=AssertionError, strict=True))
    bias_dtype = FLOAT if backend == "triton" else dtype
    sink = {"sink_at": 3 * scale} if "sink" in terms else {}
    check(
        Case(B=3, H=4, M=300, N=600, D=D, dtype=dtype, bias_dtype=bias_dtype, bias_scale=scale, **terms, **sink),
        backend, "cuda",
    )  # fmt: skip
