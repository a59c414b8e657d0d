"""The Hopper kernels beside a bias by distance, compiled ahead of time for sm_90a: next to nothing spills, no wgmma
waits for another or races. See test_hopper_aot.py."""

from __future__ import annotations

import pytest
import torch
from aot_compilers import hold_hopper
from hopper_terms_child import Values, compile_values

CAUSAL = Values(causal=True)
# Triton, call, wgmma of the forward kernel, bytes that may spill: numbers of the whole walk. What lies below the range
# has a loop of its own, with products of its own; of a range without an upper end so has what lies inside,
# but in small programs.
FORWARDS = [
    ("3.6.0", CAUSAL, 2 * (8 + 8) * 5, 0),
    ("installed", CAUSAL, 2 * (8 + 8) * 5, 4),
    ("3.6.0", Values(lo=-512), 2 * (8 + 8) * 3, 0),
    ("3.6.0", Values(lo=-4500, count=5000), 2 * (8 + 8) * 2, 0),
    ("3.6.0", Values(causal=True, window=(2000, None)), 2 * (8 + 8) * 4, 0),
    ("3.6.0", Values(causal=True, window=(1000, None)), 2 * (8 + 8) * 2, 24),
    ("3.6.0", Values(D=64, causal=True), 2 * (4 + 8) * 5, 0),
    ("3.6.0", Values(D=64, lo=-512, M=4000, dtype=torch.float16, shared=True, grad=False), 2 * (4 + 8) * 3, 0),
    ("3.6.0", Values(D=32, causal=True), 2 * (2 + 4) * 4, 16),
    ("3.6.0", Values(causal=True, values_dtype=torch.float32), 2 * (8 + 4) * 5, 16),  # what repairs rows
]
# The same of the backward: products as beside a bias tile, in two loops more
# for tiles below the range and inside it. In subtiles a few numbers of a tile of queries spill.
BACKWARDS = [
    ("3.6.0", CAUSAL, 4 * (2 * 8 + 2 * 4 + 8), 0),
    ("installed", CAUSAL, 4 * (2 * 8 + 2 * 4 + 8), 0),
    ("3.6.0", Values(lo=-512), 2 * 8 + 2 * 4 + 8, 0),
    ("3.6.0", Values(causal=True, deterministic=True), 4 * (2 * 8 + 2 * 4 + 8), 8),
    ("3.6.0", Values(causal=True, grad=False), 4 * (2 * 8 + 2 * 4 + 8), 0),
    ("3.6.0", Values(causal=True, window=(1000, None)), 3 * (2 * 8 + 2 * 4 + 8), 24),
    ("3.6.0", Values(D=64, causal=True), 2 * (2 * 4 + 2 * 4) + 8, 32),
    ("3.6.0", Values(D=64, lo=-512, M=4000, dtype=torch.float16), 2 * (2 * 4 + 2 * 4) + 8, 48),
    ("3.6.0", Values(D=32, lo=-512), 2 * 2 + 2 * 4 + 4, 32),
]


def held(codes, designed, spilled):
    hold_hopper(codes, spilled)
    assert {code.wgmma for code in codes if code.kernel.name in ("forward_kernel", "backward_kernel")} == {designed}


def by_triton(runs):
    """In this order a compiler starts once for each triton."""
    return sorted(runs, key=lambda run: run[0])


@pytest.mark.parametrize(("triton", "x", "designed", "spilled"), by_triton(FORWARDS), ids=str)
def test_forward(compilers, triton, x, designed, spilled):
    codes = compilers.compile(compile_values, triton, 90, x)
    assert [code.kernel.name for code in codes] == ["forward_kernel", "nan_fixup_kernel"]
    held(codes, designed, spilled)


@pytest.mark.parametrize(("triton", "x", "designed", "spilled"), by_triton(BACKWARDS), ids=str)
def test_backward(compilers, triton, x, designed, spilled):
    codes = compilers.compile(compile_values, triton, 90, x, True)
    names = ["preprocess_kernel", "backward_kernel", "postprocess_kernel"]
    assert [code.kernel.name for code in codes] == (["zero_kernel"] if x.grad else []) + names
    held(codes, designed, spilled)
    assert codes[-2].kernel.instructions["added by TMA"]
