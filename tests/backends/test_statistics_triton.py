"""Statistics of the scores by the Triton kernels, in Triton's interpreter, and of packed batches on the CPU."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from helpers import Case
from statistics_helpers import (
    check_packed_statistics,
    check_split_statistics,
    check_statistics,
    check_term_statistics,
)

from tilewise import AuxRequest

HALF, FLOAT = torch.float16, torch.float32
USUAL = Case(B=1, H=2, Hkv=1, M=129, N=127, D=16, dtype=HALF)


@pytest.mark.parametrize(
    "terms",
    [
        {"causal": True, "M": 200},
        {"bias": "1hmn", "window": (60, 40)},
        {"bias": "1hmn", "bias_hides": True, "blind": True, "sink": "h", "softcap": 5.0},
        {"bias": "b11n", "bias_scale": 1e6, "bias_dtype": FLOAT},
        {"mask": "b1mn", "blind": True, "planted": math.nan, "sink": "bhm", "sink_none": True},
        {"bias": "1hm1", "mask": "bhmn", "planted": math.inf},
        {"bias": "bhmn", "layout": "sliced"},  # by pointers: products start from it
        {"D": 80, "Dv": 300, "causal": True, "M": 33},  # tiles of columns
        {"dtype": FLOAT, "dropout_p": 0.3},
    ],
    ids=str,
)
def test_formulas(interpreter, terms):
    interpreter(check_statistics, replace(USUAL, **terms), "triton")


@pytest.mark.parametrize(
    "request_", [AuxRequest(entropy=True), AuxRequest(lse=True, max_scores_unbiased=True)], ids=str
)
def test_what_is_asked_for(interpreter, request_):
    interpreter(check_statistics, replace(USUAL, bias="1hmn", M=3), "triton", "cpu", request_)


@pytest.mark.parametrize("splits", [1, 3, 40])
def test_splits(interpreter, splits):
    case = replace(USUAL, M=5, N=700, Hkv=None, mask="b1mn", blind=True, bias="1hmn", sink="h", sink_none=True)
    interpreter(check_split_statistics, case, splits)


def test_packed_batches(interpreter):
    interpreter(check_packed_statistics, "triton", HALF)


@pytest.mark.parametrize("kind", ["t5", "alibi", "relative"])
def test_biases_by_distance(interpreter, kind):
    interpreter(check_term_statistics, kind, "triton")
    check_term_statistics(kind, "cpu")


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_packed_batches_on_the_cpu(backend):
    check_packed_statistics(backend, FLOAT)
