"""Statistics of the scores on the device: by Triton, with splits and packed batches too, and by Hopper's kernels."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from helpers import Case, tensors
from statistics_helpers import (
    EVERY,
    check_packed_statistics,
    check_split_statistics,
    check_statistics,
    check_term_statistics,
)

from tilewise import AuxRequest, TileMask, attention

BRAIN, HALF, FLOAT = torch.bfloat16, torch.float16, torch.float32
USUAL = Case(B=2, H=4, Hkv=2, M=239, N=432, D=64, dtype=BRAIN, layout="padded")
HOPPER = pytest.mark.skipif(torch.cuda.get_device_capability() != (9, 0), reason="needs compute capability 9.0")
BIASED = AuxRequest(lse=True, max_scores=True, entropy=True)
TERMS = [
    {},
    {"D": 128, "M": 1023, "N": 799},
    {"D": 128, "M": 1024, "N": 1024, "causal": True},
    {"M": 4096, "N": 4096, "H": 32, "Hkv": 32, "B": 1},  # three warpgroups
    {"M": 700, "causal": True, "sink": "h"},  # the first queries see their sink alone
    {"D": 256, "causal": True, "dtype": HALF},
    {"D": 32, "window": (100, 30), "sink": "bhm", "sink_none": True},
    {"D": 192, "Dv": 128, "softcap": 2.0},
    {"D": 128, "bias": "1hm1", "bias_hides": True},
    {"mask": "b1mn", "blind": True, "planted": math.nan},
    {"D": 128, "mask": "b11n", "planted": math.inf, "sink": "h"},
    {"dropout_p": 0.2, "D": 128},
]
BIASES = [
    {"bias": "1hmn"},
    {"D": 128, "bias": "bhmn", "causal": True, "softcap": 5.0},
    {"D": 32, "B": 8, "H": 4, "bias": "1hmn"},  # small heads
    {"D": 32, "bias": "1hmn", "mask": "b11n", "Hkv": None},
    {"D": 128, "bias": "b11n", "bias_scale": 1e6, "bias_dtype": FLOAT},
    {"D": 256, "bias": "1hmn", "mask": "b1mn", "blind": True, "sink": "1hm"},
    {"bias": "bhmn", "bias_hides": True, "blind": True, "planted": math.nan, "bias_dtype": FLOAT},
]


@pytest.mark.parametrize("backend", ["triton", pytest.param("hopper", marks=HOPPER)])
@pytest.mark.parametrize("terms", TERMS, ids=str)
def test_formulas(backend, terms):
    check_statistics(replace(USUAL, **terms), backend, "cuda", grad=True)


@pytest.mark.parametrize("backend", ["triton", pytest.param("hopper", marks=HOPPER)])
@pytest.mark.parametrize("terms", BIASES, ids=str)
def test_biases(backend, terms):
    case = replace(USUAL, **terms)
    check_statistics(case, backend, "cuda", EVERY if backend == "triton" else BIASED, grad=True)
    if backend == "hopper":
        with pytest.raises(ValueError, match="starts its scores from the bias, and finds no maximum without it"):
            check_statistics(case, "hopper", "cuda")


@HOPPER
@pytest.mark.parametrize("D", [64, 128])
def test_training_after_another_backends_forward(D):
    """Triton finds the maximum without the bias, and Hopper differentiates."""
    case = replace(USUAL, M=1024, N=1024, D=D, bias="1hmn", causal=True)
    check_statistics(case, "auto", "cuda", grad=True)


def test_each_alone():
    for request in (AuxRequest(max_scores=True), AuxRequest(entropy=True), AuxRequest(max_scores_unbiased=True)):
        check_statistics(replace(USUAL, causal=True, D=128), "auto", "cuda", request)


@pytest.mark.parametrize("splits", [1, 2, 40])
@pytest.mark.parametrize("terms", [{}, {"bias": "bhmn", "sink": "h", "M": 3, "causal": True}], ids=str)
def test_few_queries(terms, splits):
    check_split_statistics(replace(USUAL, **{"H": 8, "M": 1, "N": 1023, **terms}), splits, "cuda")


@pytest.mark.parametrize("backend", ["auto", "triton"])
@pytest.mark.parametrize("D", [64, 128])
def test_packed_batches(backend, D):
    check_packed_statistics(backend, BRAIN, "cuda", D)


@pytest.mark.parametrize("backend", ["triton", pytest.param("hopper", marks=HOPPER)])
@pytest.mark.parametrize("kind", ["t5", "alibi", "relative"])
def test_biases_by_distance(backend, kind):
    check_term_statistics(kind, backend, "cuda", 128, biased=backend == "hopper")


@HOPPER
def test_documents():
    """A TileMask of documents, which the kernel replaces by a packed batch."""
    x = tensors(replace(USUAL, B=1, M=4096, N=4096, H=8, Hkv=8, D=128), "cuda")
    numbers = torch.arange(4096, device="cuda") // 1500
    mask = TileMask.documents(numbers[None])
    _, aux = attention(x.q, x.k, x.v, mask=mask, return_aux=EVERY, backend="hopper")
    _, wanted = attention(x.q, x.k, x.v, mask=mask.dense(), return_aux=EVERY, backend="triton")
    for found, y in zip(aux, wanted, strict=True):
        torch.testing.assert_close(found, y, rtol=1e-5, atol=1e-5)


def test_a_graph():
    x = tensors(replace(USUAL, causal=True, layout="contiguous"), "cuda")
    run = lambda: attention(x.q, x.k, x.v, causal=True, return_aux=BIASED)  # noqa: E731
    _, wanted = run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, aux = run()
    x.q.mul_(1.0)
    graph.replay()
    for found, y in zip(aux, wanted, strict=True):
        assert found is y is None or torch.equal(found, y)
