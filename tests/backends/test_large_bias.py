"""Biases as large as the masks of the field, -1e4 and beyond: P is made again from the LSE, whose rounding it must not
have.

Source of the numbers: transformers' float masks (-1e4, finfo.min), AlphaFold's (-1e9).
"""

from __future__ import annotations

import pytest
import torch
from helpers import Case, check
from pairwise import each

from tilewise import attention

HALF, FLOAT, BRAIN = torch.float16, torch.float32, torch.bfloat16
SHAPES = ("1hmn", "11mn", "1h1n", "bhm1", "1111")


@each(
    Case(B=2, H=2, M=65, N=600, D=64, dtype=dtype, bias=bias, bias_dtype=FLOAT, bias_scale=scale)
    for bias in SHAPES
    for dtype, scale in ((FLOAT, 1e4), (FLOAT, 1e6), (BRAIN, 1e6))
)
def test_cpu(case):
    check(case, "cpu")


@each(
    Case(B=2, H=2, M=65, N=200, D=32, dtype=dtype, bias=bias, bias_dtype=FLOAT, bias_scale=scale, **terms)
    for bias, terms in (
        ("1hmn", {}),
        ("11mn", {"deterministic": True}),
        ("1h1n", {"causal": True}),
        ("bhmn", {"mask": "b1mn"}),
        ("1111", {"lse": True}),
    )
    for dtype, scale in ((FLOAT, 1e4), (FLOAT, 1e6), (HALF, 1e4))
)
def test_triton(interpreter, case):
    """Without a bias over the queries: there all scores of a row are large, and numpy, which the interpreter computes
    with, rounds twice where a GPU multiplies and adds at once."""
    interpreter(check, case, "triton")


@each(
    Case(B=2, H=2, M=40, N=70, D=64, dtype=dtype, bias="1hmn", bias_dtype=FLOAT, bias_scale=scale, sink=sink,
         sink_dtype=FLOAT, sink_at=2 * scale)
    for sink in ("h", "bhm")
    for dtype, scale in ((FLOAT, 1e4), (FLOAT, 1e6), (HALF, 1e4))
)  # fmt: skip
def test_beside_a_sink_triton(interpreter, case):
    interpreter(check, case, "triton")


@pytest.mark.parametrize("sink", ["h", "bhm"])
def test_gradient_of_a_sink_beside_large_scores_triton(interpreter, sink):
    interpreter(check_gradient_of_a_sink, "triton", sink)


def test_one_key_triton(interpreter):
    interpreter(check_one_key, "triton")


def check_one_key(backend):
    """One key has all of the softmax, whatever its bias: dV is dO, to the bit."""
    q, k, v = (torch.randn(1, 1, n, 64, requires_grad=True) for n in (3, 1, 1))
    bias = torch.tensor([-1e4, 12345.678, -1e6]).view(1, 1, 3, 1).requires_grad_()
    o = attention(q, k, v, bias=bias, backend=backend)
    do = torch.randn_like(o)
    dv, dbias = torch.autograd.grad(o, (v, bias), do)
    torch.testing.assert_close(o, v.expand_as(o), rtol=1e-6, atol=0)
    torch.testing.assert_close(dv[0, 0, 0], do[0, 0].sum(0), rtol=2e-6, atol=2e-6)
    assert dbias.abs().max() < 1e-4


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_one_key(backend):
    check_one_key(backend)


def check_gradient_of_a_sink(backend, sink):
    """A sink as large as the bias, or the product, shares the softmax with it."""
    case = Case(B=1, H=2, M=40, N=70, D=256, dtype=FLOAT, bias="1hmn", bias_scale=100.0, sink=sink, sink_at=200.0)
    check(case, backend)
    check(Case(B=1, H=2, M=40, N=70, D=256, dtype=FLOAT, sink=sink, sink_at=300.0, scale=3.0), backend)


@pytest.mark.parametrize("sink", ["h", "bhm"])
def test_gradient_of_a_sink_beside_large_scores(sink):
    check_gradient_of_a_sink("cpu", sink)


def test_a_bias_without_a_gradient():
    """By PyTorch's own kernel on the CPU, which has P from the LSE alone."""
    for scale in (1e4, 1e6):
        check(Case(M=65, N=130, D=64, dtype=FLOAT, bias="1hmn", bias_scale=scale, grads="qkv"), "cpu")
