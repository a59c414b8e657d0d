"""Masks that repeat along the batch on the device: one launch, with each form of a mask, of a bias and of its
gradient."""

from __future__ import annotations

import pytest
import torch
from repeated_masks import RepeatedCase, hold_repeated

HOPPER = pytest.mark.skipif(torch.cuda.get_device_capability() != (9, 0), reason="needs compute capability 9.0")


@pytest.mark.parametrize("backend", ["triton", pytest.param("hopper", marks=HOPPER)])
@pytest.mark.parametrize("D", [32, 64, 128])
@pytest.mark.parametrize(
    "case",
    [
        RepeatedCase("w1mn", "1hmn", images=5, windows=4, H=3, Hkv=3, M=49, N=56),
        RepeatedCase("w1mn", "whmn", N=152, planted=True),
        RepeatedCase("w11n", "1hmn", images=4, planted=True),
        RepeatedCase("w11n", "whmn", causal=True, M=300, N=704),
        RepeatedCase("whmn", "11mn", M=260, N=520, deterministic=True),
        RepeatedCase("whmn", "w11n", H=4, M=260, N=520, planted=True),
        RepeatedCase("w1mn", None, H=4, M=257, N=1030, causal=True, planted=True),
        RepeatedCase("w1m1", "1hmn", M=129, N=200),
        RepeatedCase("w1mn", "1hmn", images=2, windows=3, H=4, M=1024, N=1024),
    ],
    ids=str,
)
def test_repeated_masks(backend, case, D):
    """Of bias gradients the order of additions, and so the rounding, differs from call to call."""
    hold_repeated(case._replace(D=D, dtype=torch.bfloat16), backend, "cuda")
