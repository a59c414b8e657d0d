"""Kernels of packed batches, compiled ahead of time; runs in a child of `aot_compilers.Compilers`."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import aot_child
import torch

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
        validate=False,
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


def hold_named(lengths: str, bias: str | None = None, **options: Any) -> None:
    """`varlen_helpers.hold` of lengths and a bias by their names, for the interpreter's process."""
    import varlen_biases
    import varlen_helpers
    from varlen_helpers import Lengths, hold

    tiles = Lengths((70, 0, 3, 40, 1), (33, 1, 0, 80, 64), past=1)  # more queries than keys, and fewer; some tiles
    found: Any = tiles if lengths == "TILES" else getattr(varlen_helpers, lengths)
    generator = torch.Generator().manual_seed(2)
    if (shape := options.pop("mask_shape", None)) is not None:
        options["mask"] = torch.rand(shape, generator=generator) < 0.6
    if (shape := options.pop("sink_shape", None)) is not None:
        options["sink"] = torch.randn(shape, generator=generator).requires_grad_()
    hold(found, None if bias is None else varlen_biases.BIASES[bias], backend="triton", **options)


def same_drops(dropout_p: float) -> None:
    """A packed batch drops what the CPU does."""
    from varlen_helpers import USED, call, tensors

    lengths = USED
    qkv, do, _ = tensors(lengths)
    found = []
    for backend in ("cpu", "triton"):
        o, _ = call(qkv, lengths, dropout_p=dropout_p, dropout_seed=(5, 6), backend=backend)
        found.append((o, *torch.autograd.grad((o * do).sum(), qkv)))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


def stays_inside() -> None:
    """Offsets that are none: without validate= nobody is told of an error, but nothing outside is read or written. NaN
    lies around all inputs, and a ragged bias's gradient is that of the sequence whose offset is one."""
    from tilewise import varlen_attention

    def leaf(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
        whole = torch.full((shape[0] + 256, *shape[1:]), float("nan"))
        whole[128:-128] = 0.5
        whole.requires_grad_()
        return whole, whole[128:-128]

    total = 40
    for offsets in ([0, 90, 20, 40], [-5, 10, 10, 400], [7, 3, 50, 2]):
        (whole, q), (_, k), (_, v) = (leaf(total, 2, 16) for _ in range(3))
        cu = torch.tensor(offsets)
        o = varlen_attention(q, k, v, cu, cu, total, total, causal=True, backend="triton")
        o.sum().backward()
        assert o.isfinite().all()
        assert whole.grad is not None
        assert whole.grad.isfinite().all()

    cu = torch.tensor([0, 4, 8, 12])
    for begin in (-3, 30, 10**12, 2**63 - 2):
        q, k, v = (torch.rand(12, 1, 16) for _ in range(3))
        whole, values = leaf(40, 1)
        bias = RaggedBias(values.T, torch.tensor([0, begin, 20, 36]))
        o, lse = varlen_attention(q, k, v, cu, cu, 4, 4, bias=bias, backend="triton", return_lse=True)
        assert (lse == -float("inf")).tolist() == [4 * [False] + 4 * [True] + 4 * [False]]
        o.square().sum().backward()
        assert whole.grad is not None
        found = whole.grad[128:-128, 0]
        assert (found[:16] != 0).all()
        assert (found[20:36] != 0).all()
        assert (found[16:20] == 0).all()
        assert (found[36:] == 0).all()


def clears_what_no_matrix_has() -> None:
    """A ragged bias's gradient is 0 between matrices: in chunks that these fill in part, or not at all."""
    from helpers import poisoned_memory

    from tilewise import varlen_attention
    from tilewise.backends.triton.varlen_preprocess import CHUNK

    chunk, cu = CHUNK.value, torch.tensor([0, 64, 128, 133])
    q, k, v = (torch.rand(133, 1, 16) for _ in range(3))
    values = torch.rand(1, 5 * chunk - 7, requires_grad=True)
    begins = (chunk, 3 * chunk + 50, chunk - 30)  # fills the second chunk; ends past the fourth; 25 before the second
    bias = RaggedBias(values, torch.tensor([*begins, 0]))
    o = varlen_attention(q, k, v, cu, cu, 64, 64, bias=bias, backend="triton")
    with poisoned_memory():
        o.square().sum().backward()
    there = torch.zeros(values.shape[1], dtype=torch.bool)
    for begin, pairs in zip(begins, (64 * 64, 64 * 64, 25), strict=True):
        there[begin : begin + pairs] = True
    assert values.grad is not None
    assert ((values.grad[0] != 0) == there).all()  # and no NaN
    assert values.grad.isfinite().all()


def clears_rows_that_no_sequence_has() -> None:
    """Before the first sequence, past the last one, and of one past the longest that was named: 0, and their gradients
    too."""
    from helpers import poisoned_memory

    from tilewise import varlen_attention

    cu, total = torch.tensor([3, 100, 220, 221]), 300
    q, k, v = (torch.rand(total, 1, 16, requires_grad=True) for _ in range(3))
    with poisoned_memory():
        o, lse = varlen_attention(q, k, v, cu, cu, 97, 97, backend="triton", return_lse=True)
        o.square().sum().backward()
    own = torch.zeros(total, dtype=torch.bool)
    own[3 : 100 + 97] = own[220] = True
    for x in (o, q.grad, k.grad, v.grad):
        assert x is not None
        assert (x[:, 0] != 0).any(1)[:100][3:].all()
        assert (x[~own] == 0).all()  # and no NaN
        assert x.isfinite().all()
    assert (lse[0, ~own] == -float("inf")).all()
    assert lse[0, own].isfinite().all()


def reads_rows_of_two_bytes() -> None:
    """A bias in tiles of 64 keys, which come row after row, and its gradient, against the reference: calls of the same
    backend would have the same fault."""
    from tilewise import varlen_attention

    cu, pairs = torch.tensor([0, 70, 109]), torch.tensor([0, 70 * 70, 70 * 70 + 39 * 39])
    inputs = [torch.randn(109, 1, 16, dtype=torch.float16, requires_grad=True) for _ in range(3)]
    inputs.append(torch.randn(1, 70 * 70 + 39 * 39, dtype=torch.float16, requires_grad=True))
    found = []
    for backend in ("triton", "reference"):
        q, k, v, values = inputs
        o = varlen_attention(q, k, v, cu, cu, 70, 70, bias=RaggedBias(values, pairs), backend=backend)
        found.append((o, *torch.autograd.grad(o.float().square().sum(), inputs)))
    torch.testing.assert_close(found[0], found[1], rtol=1e-2, atol=4e-3)
