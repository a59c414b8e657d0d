"""What the hopper backend declines and says of itself; none of it needs a GPU or triton's compiler."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from tilewise import explain
from tilewise.backends.gluon import sm90 as hopper
from tilewise.planner import make_plan
from tilewise.spec.operands import TensorSpec
from tilewise.spec.problem import Problem, irregular
from tilewise.spec.score import Band, Score

pytest.importorskip("triton")

PROBLEM = Problem(
    device="cuda", capability=(9, 0), dtype=torch.bfloat16, batch=2, heads=8, kv_heads=2, queries=239, keys=432,
    head_dim=128, value_dim=128, score=Score(0.1, None, Band()),
)  # fmt: skip
MATRIX = TensorSpec(torch.bfloat16, 1, 8, 239, 432)
UNSHARED = TensorSpec(torch.bfloat16, 2, 8, 239, 432)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"device": "cpu", "capability": None}, "needs a CUDA device, the tensors are on cpu"),
        ({"capability": (8, 0)}, "needs compute capability 9.0, this GPU has 8.0"),
        ({"capability": (10, 0)}, "needs compute capability 9.0, this GPU has 10.0"),
        ({"dtype": torch.float32}, "has kernels for float16 and bfloat16, not for float32"),
        ({"bias": replace(MATRIX, dtype=torch.float64)}, "reads a bias in float16, bfloat16 or float32, not float64"),
        ({"irregular": ("k", "v")}, "reads by TMA, which cannot describe k, v: "),
        ({"bias": MATRIX, "irregular": ("bias",)}, "reads by TMA, which cannot describe bias: "),
        ({"bias": MATRIX, "irregular": ("bias",), "batch": 4}, None),  # so many share it that it is copied
        ({"bias": MATRIX, "irregular": ("q", "bias"), "batch": 4}, "reads by TMA, which cannot describe q: "),
        ({"bias": UNSHARED, "irregular": ("bias",)}, "reads by TMA, which cannot describe bias: "),
        ({"value_dim": 13}, "writes o by TMA, in rows of a multiple of 16 bytes: not 13 elements"),
        ({}, None),
        ({"dtype": torch.float16, "head_dim": 40, "value_dim": 256, "queries": 1, "keys": 1}, None),
        ({"score": Score(0.1, 20.0, Band(-3, 5))}, None),
        ({"bias": replace(MATRIX, dtype=torch.float32)}, None),
        ({"bias": replace(MATRIX, rows=1), "irregular": ("bias",)}, None),
        ({"bias": replace(MATRIX, cols=1), "irregular": ("bias",)}, None),
        ({"mask": TensorSpec(torch.bool, 1, 1, 239, 432), "bias": MATRIX}, None),
    ],
)
def test_declines(change, reason):
    problem = replace(PROBLEM, **change)
    found = hopper.declines(problem)
    assert found is None if reason is None else found.startswith(reason)
    if problem.device == "cuda" and (problem.bias is None or problem.bias.dtype != torch.float64):
        plan = make_plan(problem)
        assert plan.backend == ("hopper" if reason is None else "triton")
        assert dict(plan.declined).get("hopper") == found


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"bias": MATRIX}, None),
        ({"bias": MATRIX, "bias_grad": True}, None),
        ({"head_dim": 40, "value_dim": 64, "score": Score(0.1, 20.0, Band(-3, 5))}, None),
        ({"deterministic": True}, None),
        ({"bias": MATRIX, "bias_grad": True, "deterministic": True, "score": Score(0.1, 20.0, Band())}, None),
        ({"mask": TensorSpec(torch.bool, 1, 1, 239, 432)}, None),
        (
            {"mask": TensorSpec(torch.bool, 2, 8, 1, 432), "bias": MATRIX, "bias_grad": True, "deterministic": True},
            None,
        ),
        (
            {"mask": TensorSpec(torch.bool, 2, 8, 2**16, 2**16), "queries": 2**16, "keys": 2**16},
            "counts the words of the",
        ),
        ({"value_dim": 64}, None),
        ({"head_dim": 40, "value_dim": 256}, None),
        ({"head_dim": 256, "value_dim": 256}, None),
        ({"head_dim": 192, "bias": MATRIX, "bias_grad": True, "deterministic": True}, None),
        ({"value_dim": 200, "bias": UNSHARED, "bias_grad": True, "score": Score(0.1, 20.0, Band())}, None),
        ({"head_dim": 192, "bias": MATRIX, "score": Score(0.1, 20.0, Band())}, None),
        ({"head_dim": 192, "bias": MATRIX, "bias_grad": True, "score": Score(0.1, 20.0, Band())}, None),
        (
            {
                "head_dim": 192, "bias": MATRIX, "bias_grad": True, "score": Score(0.1, 20.0, Band()),
                "deterministic": True,
            },
            "has no shared memory left past 128 dimensions for dbias of a bias that is shared, beside a softcap, with "
            "deterministic=True",
        ),
        ({"head_dim": 192, "mask": TensorSpec(torch.bool, 1, 1, 239, 432)}, None),
        ({"head_dim": 192, "mask": TensorSpec(torch.bool, 1, 1, 239, 432), "deterministic": True}, None),
        ({"head_dim": 192, "bias": replace(MATRIX, dtype=torch.float32)}, None),
        (
            {"head_dim": 192, "bias": replace(MATRIX, dtype=torch.float32), "deterministic": True},
            "has no shared memory left past 128 dimensions for a matrix bias of another dtype than q's, with",
        ),
        ({"irregular": ("do",)}, "reads do by TMA, which cannot describe it"),
        ({"bias": replace(MATRIX, rows=1, dtype=torch.float32), "bias_grad": True}, None),
        ({"bias": replace(MATRIX, cols=1), "bias_grad": True, "score": Score(0.1, 20.0, Band())}, None),
        ({"bias": replace(MATRIX, dtype=torch.float32), "bias_grad": True}, None),
        ({"bias": replace(MATRIX, dtype=torch.float16), "bias_grad": True}, None),
        ({"bias": replace(MATRIX, dtype=torch.float32, cols=436), "keys": 436, "bias_grad": True}, None),
        ({"bias": replace(MATRIX, dtype=torch.float32, cols=434), "keys": 434, "bias_grad": True}, "writes dbias by"),
        ({"bias": replace(MATRIX, dtype=torch.float32, cols=434), "keys": 434}, None),
        ({"bias": replace(MATRIX, cols=433), "keys": 433, "bias_grad": True}, "writes dbias by TMA, in rows of"),
        ({"bias": replace(MATRIX, cols=433), "keys": 433, "bias_grad": True, "batch": 4}, None),
    ],
)  # fmt: skip
def test_declines_backward(change, reason):
    problem = replace(PROBLEM, **change)
    plan = make_plan(problem)
    assert plan.backend == "hopper"
    assert plan.backward == ("hopper" if reason is None else "triton")
    assert plan.backward_declined == hopper.declines(problem, "backward")
    assert reason is None or plan.backward_declined.startswith(reason)


def test_the_interpreter_does_not_run_gluon(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert hopper.declines(PROBLEM) == "Triton's interpreter does not run Gluon"


def buffer(*shape, dtype=torch.bfloat16):
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("x", "regular"),
    [
        (buffer(2, 3, 5, 64), True),
        (buffer(2, 5, 3, 64).transpose(1, 2), True),
        (buffer(2, 3, 5, 40), True),
        (buffer(2, 3, 5, 13), False),  # rows of 26 bytes
        (buffer(2, 3, 1, 13), False),  # heads of 26 bytes
        (buffer(1, 1, 1, 13), True),
        (buffer(2, 3, 5, 72)[..., 8:], True),
        (buffer(2, 3, 5, 72)[..., 4:68], False),  # begins off 16 bytes
        (buffer(2, 3, 64, 16).mT, False),
        (buffer(1, 3, 5, 64).expand(2, 3, 5, 64), False),
        (buffer(2, 3, 5, 12, dtype=torch.float32), True),
        (buffer(2, 3, 0, 13), True),
    ],
)
def test_irregular(x, regular):
    q = buffer(1, 1, 1, 8)
    assert irregular(q, x, q, None) == (() if regular else ("k",))
    assert irregular(q, q, q, x) == (() if regular else ("bias",))


def test_explain_reads_the_layout():
    x = torch.empty(4, 16, 4096, 128, dtype=torch.bfloat16, device="meta")
    lines = str(explain(x, x, x, device="sm_90")).splitlines()
    words = r"backend hopper: 128 queries x 128 keys, 2 consumer warpgroups, .*"
    assert any(re.fullmatch(words, line) for line in lines)
    assert not any("gradients by" in line for line in lines)
    wide = torch.empty(4, 16, 4096, 256, dtype=torch.bfloat16, device="meta")
    lines = str(explain(wide, wide, wide, device="sm_90")).splitlines()
    assert not any("gradients by" in line for line in lines)
    odd = torch.empty(4, 16, 4096, 136, dtype=torch.bfloat16, device="meta")[..., :129]
    lines = str(explain(odd, odd, x, device="sm_90")).splitlines()
    assert any(line.startswith("  gradients by triton: hopper writes gradients by TMA, in rows") for line in lines)
    expanded = x[:, :1].expand_as(x)
    text = str(explain(x, expanded, expanded, device="sm_90"))
    assert "backend triton: " in text
    assert "  not hopper: reads by TMA, which cannot describe k, v: the last dimension must be contiguous" in text
    assert "gradients by" not in text
    with pytest.raises(ValueError, match=r"^backend: 'hopper' cannot run this call: reads by TMA"):
        explain(x, expanded, expanded, device="sm_90", backend="hopper")
