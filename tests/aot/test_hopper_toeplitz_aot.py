"""The Hopper kernels beside a Toeplitz bias, compiled ahead of time for sm_90a: little spills, no wgmma waits for
another or races. See test_hopper_aot.py."""

from __future__ import annotations

import pytest
from hopper_terms_child import Toeplitz, compile_toeplitz
from test_hopper_relative_aot import by_triton, held

CAUSAL = Toeplitz(causal=True)
ALIBI = Toeplitz(linear=True, far=0)
# Triton, call, wgmma of the forward kernel, bytes that may spill. Tiles above, near and below have a loop each, and the
# first one is apart; with a causal mask so are those that it cuts, and nothing lies above. Far tiles on a line begin
# with a product more.
FORWARDS = [
    ("3.6.0", Toeplitz(), 3 * (4 + 8) * 4, 0),
    ("installed", Toeplitz(), 3 * (4 + 8) * 4, 0),
    ("3.6.0", CAUSAL, 3 * (4 + 8) * 4, 56),
    ("3.6.0", ALIBI, 3 * ((4 + 8) * 4 + 2), 260),  # in loops none
    ("3.6.0", ALIBI._replace(causal=True), 3 * ((4 + 8) * 4 + 1), 100),
    ("3.6.0", Toeplitz(D=128), 2 * (8 + 8) * 4, 0),
    ("3.6.0", Toeplitz(masked=True), 2 * (4 + 8) * 2, 0),
    ("3.6.0", Toeplitz(dropout=6554), 2 * (4 + 8) * 4, 0),
]
# The same of the backward.
BACKWARDS = [
    ("3.6.0", Toeplitz(), 3 * (2 * (2 * 4 + 2 * 4) + 8), 32),
    ("installed", Toeplitz(), 3 * (2 * (2 * 4 + 2 * 4) + 8), 40),
    ("3.6.0", CAUSAL, 2 * 40, 16),
    ("3.6.0", ALIBI, 3 * 40, 40),
    ("3.6.0", Toeplitz(grad=False), 3 * 40 + 4, 0),
    ("3.6.0", Toeplitz(D=128), 3 * 32, 64),
    ("3.6.0", Toeplitz(dropout=6554), 3 * 20, 16),
    ("3.6.0", Toeplitz(D=128, dropout=6554), 3 * 32, 160),
]


@pytest.mark.parametrize(("triton", "x", "designed", "spilled"), by_triton(FORWARDS), ids=str)
def test_forward(compilers, triton, x, designed, spilled):
    codes = compilers.compile(compile_toeplitz, triton, 90, x)
    names = ["pairs_kernel", "forward_kernel", "nan_fixup_kernel"]
    assert [code.kernel.name for code in codes if code.kernel.name in names] == names
    held(codes, designed, spilled)


@pytest.mark.parametrize(("triton", "x", "designed", "spilled"), by_triton(BACKWARDS), ids=str)
def test_backward(compilers, triton, x, designed, spilled):
    codes = compilers.compile(compile_toeplitz, triton, 90, x, True)
    underflows = ["norms_kernel", "reach_kernel"] if x.linear else []
    names = [
        "pairs_kernel",
        "far_stats_kernel",
        *underflows,
        "preprocess_kernel",
        "backward_kernel",
        "postprocess_kernel",
    ]
    assert [code.kernel.name for code in codes] == names
    held(codes, designed, spilled)
