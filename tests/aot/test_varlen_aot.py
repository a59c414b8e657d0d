"""The kernels of packed batches, compiled ahead of time: see test_triton_aot.py and test_hopper_aot.py."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import aot_child
import pytest
import torch
from aot_compilers import hold_hopper
from test_triton_aot import TENSOR_CORES, hold

from tilewise.bias import RaggedBias, RelativeBias, t5_bias

H, TOTAL, LONGEST, SEQUENCES = 16, 32768, 3800, 52


class Packed(NamedTuple):
    """A packed batch of 52 sequences; bias: "", "ragged", "t5", "relative", "buckets" of these, "padded", one for all,
    or "keys" or "queries", packed as they are."""

    D: int = 128
    Hkv: int = H
    bias: str = ""
    causal: bool = False
    deterministic: bool = False
    dtype: torch.dtype = torch.bfloat16
    longest: int = LONGEST

    def __str__(self) -> str:
        words = [f"D{self.D}"] + [f"Hkv {self.Hkv}"] * (self.Hkv != H) + [self.bias] * (self.bias != "")
        words += [f"at most {self.longest}"] * (self.longest != LONGEST)
        return ", ".join(words + ["causal"] * self.causal + ["deterministic"] * self.deterministic)


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


def _bias(x: Packed) -> Any:
    def meta(*shape: int, dtype: torch.dtype = x.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    return {
        "": lambda: None,
        "keys": lambda: meta(1, TOTAL),
        "queries": lambda: meta(1, TOTAL, 1),
        "ragged": lambda: RaggedBias(meta(H, 40_000_000), meta(SEQUENCES + 1, dtype=torch.int64)),
        "t5": lambda: t5_bias(meta(32, H), True),
        "relative": lambda: RelativeBias(meta(TOTAL, H, 1024), lo=-1023),
        "buckets": lambda: RelativeBias(
            meta(TOTAL, 1, 32), lo=-128, outside="clamp", buckets=meta(257, dtype=torch.int64)
        ),
        "padded": lambda: meta(1, 1, x.longest, x.longest),
    }[x.bias]()


def _call(x: Packed) -> tuple[Any, Any, tuple[str, ...]]:
    """The problem on the target, inputs on the meta device, and the parts that want a gradient."""
    from tilewise.frontend.varlen import read_packed
    from tilewise.spec.bias_components import DIFFERENTIABLE
    from tilewise.spec.problem import Problem
    from tilewise.spec.seqlens import Lengths

    q, k, v = (torch.empty(TOTAL, heads, x.D, dtype=x.dtype, device="meta") for heads in (H, x.Hkv, x.Hkv))
    offsets = torch.empty(SEQUENCES + 1, dtype=torch.int32, device="meta")
    call = read_packed(
        q, k, v, Lengths(offsets, offsets), (x.longest, x.longest), bias=_bias(x), mask=None, sink=None,
        causal=x.causal, window=None, dropout_p=0.0, dropout_seed=None, deterministic=x.deterministic, backend=None,
    )  # fmt: skip
    inputs, parts = call.inputs, call.inputs.parts
    grads = tuple(name for name in DIFFERENTIABLE if parts is not None and getattr(parts, name) is not None)
    problem = Problem.of(
        *inputs, call.score, bias_grad=inputs.bias is not None, part_grads=grads, deterministic=x.deterministic
    )
    return dataclasses.replace(problem, device="cuda", capability=aot_child._capability), inputs, grads


def compile_hopper_packed(x: Packed, backward: bool = False) -> list[aot_child.Code]:
    """Every kernel that the forward, or the backward, launches in the Hopper backend."""
    from tilewise.backends import Needs, Outputs, empty_output
    from tilewise.backends.gluon import sm90
    from tilewise.backends.gluon.sm90.backward import launch as backward_launch
    from tilewise.backends.gluon.sm90.common import config
    from tilewise.backends.gluon.sm90.forward import launch

    problem, inputs, _ = _call(x)
    assert sm90.declines(problem, "backward" if backward else "forward") is None
    aot_child._launched.clear()
    if backward:
        o = empty_output(inputs.q, x.D)
        outputs = Outputs(o, torch.empty(o.shape[:3], dtype=torch.float32, device="meta"))
        needs = Needs(q=True, k=True, v=True, bias=False)
        backward_launch.HopperBackward(problem, inputs, outputs, outputs, needs)(inputs, outputs, outputs)
    else:
        launch.HopperForward(problem, inputs)(inputs)
    return aot_child._codes(config.SHARED_MEMORY)


def compile_packed(x: Packed) -> list[aot_child.Kernel]:
    """Every Triton kernel that the forward and backward launch."""
    from tilewise.backends import Needs, Outputs, empty_output
    from tilewise.backends.triton import config, launch

    problem, inputs, grads = _call(x)
    aot_child._launched.clear()
    launch.TritonForward(problem, inputs)(inputs)
    o = empty_output(inputs.q, x.D)
    outputs = Outputs(o, torch.empty(o.shape[:3], dtype=torch.float32, device="meta"))
    needs = Needs(True, True, True, inputs.bias is not None, **dict.fromkeys(grads, True))
    launch.TritonBackward(problem, inputs, outputs, outputs, needs)(inputs, outputs, outputs)
    limit = config.shared_memory(problem)
    return [aot_child._report(launched, limit) for launched in aot_child._launched]


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
