"""The Triton kernels in Triton's interpreter, on numbers at the ends of their types: see test_triton_interpreter.py."""

from __future__ import annotations

import importlib.util
import math
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import interpreter_child
import pytest
import torch
from forced import forced_splits

from tilewise import attention

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

HALF, FLOAT, BRAIN = torch.float16, torch.float32, torch.bfloat16


@pytest.fixture(scope="module")
def interpreter():
    """Calls a function in the child process."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, initializer=interpreter_child.start) as pool:
        yield lambda function, *args: pool.submit(function, *args).result()


def check_extreme_rows(dtype, bias_dtype, queries, keys, splits, options):
    """Some models hide by the most negative number, and padding by nothing else: such a row is the mean of what it may
    see, and its gradients, for which no loss asks, are no NaN in those of the keys."""
    torch.manual_seed(0)
    leaves = [torch.randn(1, 2, rows, 16, dtype=dtype) for rows in (queries, keys, keys)]
    bias = torch.randn(1, 2, queries, keys, dtype=bias_dtype)
    extreme = [0, queries - 1]
    bias[:, :, extreme] = torch.finfo(bias_dtype).min
    bias[:, 1, 0, : keys // 3] = -math.inf  # some keys are not even there
    bias[:, :, queries // 2, ::2] = torch.finfo(bias_dtype).min  # a row with others is as if they were not
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


@pytest.mark.parametrize("splits", [1, 3])
def test_extreme_rows_of_few_queries(interpreter, splits):
    """Splits of equally many keys: an LSE as large as these cannot tell how many a split saw."""
    interpreter(check_extreme_rows, HALF, FLOAT, 5, 384, splits, {})
