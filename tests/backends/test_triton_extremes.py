"""The Triton kernels in Triton's interpreter, on numbers at the ends of their types, and on those that tf32 rounds."""

from __future__ import annotations

import math

import pytest
import torch
from forced import forced_splits

from tilewise import attention, scaled_dot_product_attention

HALF, FLOAT, BRAIN = torch.float16, torch.float32, torch.bfloat16


def check_extreme_rows(dtype, bias_dtype, queries, keys, splits, options, low=None):
    """Some models hide by a large negative number, and padding by nothing else: such a row is the mean of what it may
    see, and its gradients, for which no loss asks, are no NaN in those of the keys. ``low``: by default the dtype's
    most negative."""
    low = torch.finfo(bias_dtype).min if low is None else low
    torch.manual_seed(0)
    leaves = [torch.randn(1, 2, rows, 16, dtype=dtype) for rows in (queries, keys, keys)]
    bias = torch.randn(1, 2, queries, keys, dtype=bias_dtype)
    extreme = [0, queries - 1]
    bias[:, :, extreme] = low
    bias[:, 1, 0, : keys // 3] = -math.inf  # some keys are not even there
    bias[:, :, queries // 2, ::2] = low  # a row with others is as if they were not
    leaves = [x.requires_grad_() for x in (*leaves, bias)]
    do = torch.randn(1, 2, queries, 16, dtype=dtype)
    do[:, :, extreme] = 0
    with forced_splits(splits):
        o, lse = attention(*leaves[:3], bias=leaves[3], return_lse=True, backend="triton", **options)
        gradients = torch.autograd.grad(o, leaves, do)

    scores = leaves[0].float() @ leaves[1].float().mT / 4 + bias.float()
    if options.get("causal"):
        seen = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
        scores = scores.masked_fill(~seen, -math.inf)
    expected = scores.softmax(-1) @ leaves[2].float()
    tolerance = 1e-4 if dtype == FLOAT else 1e-2
    for x, y in zip(
        (o, lse, *gradients),
        (expected, scores.logsumexp(-1), *torch.autograd.grad(expected, leaves, do.float())),
        strict=True,
    ):
        torch.testing.assert_close(x.float(), y.float(), rtol=tolerance, atol=tolerance)
    assert not gradients[0][:, :, extreme].any()


@pytest.mark.parametrize(("dtype", "bias_dtype"), [(FLOAT, FLOAT), (HALF, FLOAT), (HALF, BRAIN), (HALF, HALF)])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"deterministic": True}], ids=str)
def test_rows_at_the_most_negative_bias_harm_no_other(interpreter, dtype, bias_dtype, options):
    interpreter(check_extreme_rows, dtype, bias_dtype, 70, 150, 1, options)


@pytest.mark.parametrize("low", [-1e9, -1e10, -1e30])
def test_rows_at_a_large_negative_bias_harm_no_other(interpreter, low):
    interpreter(check_extreme_rows, FLOAT, FLOAT, 20, 67, 1, {}, low)


@pytest.mark.parametrize("splits", [1, 3])
def test_extreme_rows_of_few_queries(interpreter, splits):
    """Splits of equally many keys: an LSE as large as these cannot tell how many a split saw."""
    interpreter(check_extreme_rows, HALF, FLOAT, 5, 384, splits, {})


def check_tf32(deterministic):
    """float32 products by tf32 are those of the nearest numbers of ten mantissa bits, not of what lies below them."""
    torch.manual_seed(0)
    q, k, v, do = (torch.rand(1, 1, 16, 16).requires_grad_() for _ in range(4))
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        o = attention(q, k, v, scale=1.0, deterministic=deterministic, backend="triton")
        gradients = torch.autograd.grad(o, (q, k, v), do)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before

    def product(a, b):
        return nearest(a) @ nearest(b)

    with torch.no_grad():
        s = product(q, k.mT)
        p = (s - s.amax(-1, keepdim=True)).exp()
        total = p.sum(-1, keepdim=True)
        torch.testing.assert_close(o, product(p, v) / total, rtol=2e-6, atol=2e-6)
        p = p / total
        ds = p * (product(do, v.mT) - (do * o).sum(-1, keepdim=True))
        expected = product(ds, k), product(ds.mT, q), product(p.mT, do)
        for x, y in zip(gradients, expected, strict=True):
            # a computed operand may lie on the other side of the middle between two such numbers
            assert (x - y).abs().mean() <= 2e-6, (x - y).abs().mean()
            torch.testing.assert_close(x, y, rtol=0, atol=1e-4)


def nearest(x):
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp((mantissa * 2**11).round(), exponent - 11)


@pytest.mark.parametrize("deterministic", [False, True])
def test_tf32_operands_are_rounded(interpreter, deterministic):
    interpreter(check_tf32, deterministic)


def check_drop_in():
    """What stands in for PyTorch's function is as exact as it, whatever the setting for matrix products says."""
    torch.manual_seed(0)
    q, k, v, do = (torch.rand(1, 1, 16, 16).requires_grad_() for _ in range(4))

    def results(function):
        o = function(q, k, v, scale=1.0)
        return (o, *torch.autograd.grad(o, (q, k, v), do))

    exact = results(scaled_dot_product_attention)
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        drop_in, rounded = results(scaled_dot_product_attention), results(attention)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    for x, y, z in zip(drop_in, exact, rounded, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-6)
        assert (z - y).abs().max() > 1e-5  # and the setting does round


def test_the_drop_in_does_not_round_to_tf32(interpreter):
    interpreter(check_drop_in)
