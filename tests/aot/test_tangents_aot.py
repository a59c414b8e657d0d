"""Triton's kernel of the tangents compiled ahead of time for GPUs that are not here, as in test_triton_aot.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from aot_child import compile_tangents
from helpers import Case

pytest.importorskip("triton")

TENSOR_CORES = {80: "mma.sync", 90: "wgmma", 100: "tcgen05"}
USUAL = Case(B=2, H=16, M=4096, N=4096, dtype=torch.bfloat16, lse=False)
# (triton, target, case, operands with a tangent, bytes that may spill): ceilings, to be lowered when it gets better.
# Only the pass past values that are not finite spills.
RUNS = [
    ("3.6.0", 90, replace(USUAL, D=64), "qkv", 0),
    ("installed", 90, replace(USUAL, D=128), "qkv", 0),
    ("3.6.0", 90, replace(USUAL, D=128, causal=True), "qkv", 40),
    ("3.6.0", 90, replace(USUAL, D=128, bias="1hmn"), "qkvb", 0),
    ("3.6.0", 90, replace(USUAL, D=64, bias="b11n", sink="h", softcap=20.0, window=(512, 0)), "vbs", 8),
    ("3.6.0", 90, replace(USUAL, D=128, bias="1hmn", mask="b1mn"), "qkvb", 56),
    ("installed", 90, replace(USUAL, D=256), "qkv", 0),
    # beside narrow values, see descriptor_lint.py
    ("3.6.0", 90, replace(USUAL, D=128, Dv=32, mask="b11n"), "qkv", 0),
    ("installed", 90, replace(USUAL, D=128, Dv=32, layout="sliced", causal=True), "qkv", 0),
    ("installed", 80, replace(USUAL, D=128, causal=True, bias="1hmn"), "qkvb", 8),
    ("installed", 100, replace(USUAL, D=128, causal=True, bias="1hmn"), "qkvb", 64),
]


@pytest.mark.parametrize(
    ("triton", "target", "case", "given", "spilled"),
    [pytest.param(*run, id="sm_{1}, {2}, tangents {3}, triton {0}".format(*run)) for run in RUNS],
)
def test_compiled_tangents(compilers, triton, target, case, given, spilled):
    *before, kernel = compilers.compile(compile_tangents, triton, target, case, given)
    print(kernel)
    assert [x.name for x in before] == (["summary_kernel", "list_kernel"] if case.mask else [])
    assert kernel.name == "tangents_kernel"
    assert kernel.shared <= kernel.shared_limit
    assert kernel.tensor_memory <= 512
    assert kernel.spill_stores <= spilled
    assert not kernel.warnings
    assert kernel.instructions[TENSOR_CORES[target]]


def test_two_programs_share_a_multiprocessor(compilers):
    """At 64 dimensions, also with a bias: of 228 KiB a program takes 1 for itself."""
    for bias in (None, "1hmn"):
        given = "qkv" if bias is None else "qkvb"
        case = replace(USUAL, D=64, bias=bias)
        (kernel,) = compilers.compile(compile_tangents, "3.6.0", 90, case, given)
        assert 2 * (kernel.shared + 1024) <= 228 * 1024
        assert 2 * 128 * -(-kernel.registers // 8) * 8 <= 65536


def test_absent_tangents_take_no_product(compilers):
    """Two products of the scores' tangents and two over the values, in each copy of the loop."""
    count = {
        given: compilers.compile(compile_tangents, "3.6.0", 90, replace(USUAL, D=64), given)[0].instructions["wgmma"]
        for given in ("qkv", "qk", "q", "v")
    }
    assert count["qkv"] > count["qk"] > count["q"] >= count["v"]
