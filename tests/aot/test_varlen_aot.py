"""The kernels of packed batches, compiled ahead of time: see test_triton_aot.py and test_hopper_aot.py."""

from __future__ import annotations

import importlib.util

import pytest
from aot_compilers import hold_hopper
from packed_child import Packed, compile_hopper_packed, compile_packed
from test_triton_aot import TENSOR_CORES, hold

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

# Triton, target, call, bytes that may spill: ceilings. Rows come by pointers, whose addresses take registers.
RUNS = [
    ("3.6.0", 90, Packed(), {"backward_kernel": 180}),
    ("3.6.0", 90, Packed(causal=True, Hkv=4), {"forward_kernel": 148, "backward_kernel": 292}),
    # Of the forward nearly all is in its second walk, past hidden values that are not finite.
    ("3.6.0", 90, Packed(D=64, bias="ragged"), {"forward_kernel": 352, "backward_kernel": 320}),
    ("3.6.0", 90, Packed(D=64, bias="t5"), {"backward_kernel": 708}),
    ("3.6.0", 90, Packed(bias="relative", causal=True), {"forward_kernel": 584, "backward_kernel": 468}),
    ("3.6.0", 90, Packed(causal=True, deterministic=True), {"forward_kernel": 140, "query_gradient_kernel": 260}),
    ("installed", 80, Packed(D=64, bias="ragged"), {"forward_kernel": 20, "backward_kernel": 124}),
    ("installed", 90, Packed(causal=True), {"forward_kernel": 92, "backward_kernel": 48}),
    (
        "installed", 80, Packed(D=64, bias="buckets", causal=True, deterministic=True),
        {"backward_kernel": 8, "query_gradient_kernel": 60, "distance_gradient_kernel": 24},
    ),
    ("installed", 100, Packed(causal=True), {"forward_kernel": 56}),
]  # fmt: skip


@pytest.mark.parametrize(("triton", "target", "x", "allowed"), RUNS, ids=str)
def test_compiled_kernels(compilers, triton, target, x, allowed):
    kernels = compilers.compile(compile_packed, triton, target, x)
    names = {kernel.name for kernel in kernels}
    assert names >= {"forward_kernel", "packed_preprocess_kernel", "backward_kernel"}
    assert not names & {"preprocess_kernel", "finite_kernel"}
    assert ("query_gradient_kernel" in names) == x.deterministic != ("postprocess_kernel" in names)
    assert ("distance_gradient_kernel" in names) == (x.bias == "buckets")
    hold(kernels, TENSOR_CORES[target], allowed)


# Triton, call, backward, wgmma of the main kernel as of a dense call, bytes that may spill.
HOPPER = [
    ("3.6.0", Packed(), False, 64, 0),
    ("3.6.0", Packed(causal=True), False, 96, 0),
    ("3.6.0", Packed(D=64), False, 72, 0),
    ("3.6.0", Packed(D=64, causal=True), False, 72, 0),
    ("3.6.0", Packed(bias="keys", causal=True), False, 96, 0),
    ("3.6.0", Packed(D=64, bias="keys"), False, 72, 0),
    ("installed", Packed(causal=True, Hkv=4), False, 96, 0),
    ("3.6.0", Packed(causal=True), True, 64, 0),
    ("3.6.0", Packed(D=64), True, 44, 8),
    ("3.6.0", Packed(D=64, causal=True, deterministic=True), True, 84, 0),
    ("3.6.0", Packed(causal=True, Hkv=4, deterministic=True), True, 64, 0),
    ("installed", Packed(causal=True), True, 64, 0),
    ("3.6.0", Packed(D=64, longest=64), True, 24, 0),
    ("3.6.0", Packed(longest=64, causal=True), True, 64, 0),
    ("3.6.0", Packed(bias="keys", causal=True), True, 64, 52),
    ("3.6.0", Packed(D=64, bias="keys", causal=True), True, 20, 0),
    ("3.6.0", Packed(D=32, bias="keys"), True, 32, 0),
    ("3.6.0", Packed(D=256, bias="keys", causal=True), True, 64, 24),
    ("3.6.0", Packed(bias="relative", causal=True), False, 160, 0),
    ("3.6.0", Packed(bias="relative", causal=True), True, 64, 0),
    ("3.6.0", Packed(D=64, bias="relative", causal=True, deterministic=True), True, 40, 32),
]


@pytest.mark.parametrize(("triton", "x", "backward", "designed", "spilled"), HOPPER, ids=str)
def test_hopper_kernels(compilers, triton, x, backward, designed, spilled):
    codes = compilers.compile(compile_hopper_packed, triton, 90, x, backward)
    names = [code.kernel.name for code in codes]
    if backward:
        main = "backward_kernel"
        before = ["move_kernel", "packed_zero_kernel"] * (x.bias == "relative")
        after = ["move_kernel"] * (x.bias == "relative")
        names_of_packed = ["both_lists_kernel", *before, "packed_preprocess_kernel", main]
        summed = ["packed_postprocess_kernel"] * (x.longest > 64)
        assert names == [*names_of_packed, *summed, *after]
    else:
        main = "forward_kernel"
        laid_out = ["move_kernel"] * (x.bias == "relative")
        assert names == ["tiles_kernel", *laid_out, main] + ["packed_nan_fixup_kernel"] * (x.causal or bool(x.bias))
    hold_hopper(codes, spilled)
    assert [code.wgmma for code in codes if code.kernel.name == main] == [designed]
