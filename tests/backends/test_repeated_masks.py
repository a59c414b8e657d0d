"""Masks that repeat along the batch, in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from repeated_masks import RepeatedCase, hold_repeated

FLOAT = torch.float32


@pytest.mark.parametrize(
    "case",
    [
        RepeatedCase("w1mn", N=90, planted=True, causal=True),
        RepeatedCase("w11n", "whmn", N=40, dtype=FLOAT),
        RepeatedCase("whmn", "1hmn", N=90, Hkv=1, deterministic=True),
        RepeatedCase("w1m1", M=5, N=40),
    ],
    ids=str,
)
def test_triton(interpreter, case):
    interpreter(hold_repeated, case, "triton")
