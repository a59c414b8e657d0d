"""Few queries beside many keys, where the Triton backend packs heads into a tile and splits the keys.

Held to the error rule of helpers.py with the splits that the backend chooses and with others forced on it.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from forced import check_split, forced_splits
from helpers import LAYOUTS, Case, call, check, differentiate, hold, run, tensors
from pairwise import each

from tilewise import attention, explain

BRAIN, HALF, FLOAT = torch.bfloat16, torch.float16, torch.float32
BROADCASTS = ["".join(axes) for axes in itertools.product("b1", "hk1", "m1", "n1")]
USUAL = Case(B=2, H=8, Hkv=2, M=1, N=1023, D=64, dtype=BRAIN, grads="")
SPLITS = (1, 2, 5, 40)


def check_all(case):
    check(case, "triton", "cuda")
    for splits in SPLITS:
        check_split(case, splits, "cuda")


@pytest.mark.parametrize("N", [1, 16, 17, 127, 128, 129, 799, 2048, 5000])
def test_lengths(N):
    for terms in ({}, {"bias": "1h1n", "causal": True}):
        check_all(replace(USUAL, N=N, **terms))


@pytest.mark.parametrize("M", [1, 2, 3, 4, 8, 15, 16, 17, 31, 33, 64])
@pytest.mark.parametrize("H", [2, 8])
def test_queries(M, H):
    """Packed into one tile or several, and a head of its own a tile."""
    for terms in ({}, {"bias": "1hmn", "causal": True}):
        check_all(replace(USUAL, H=H, M=M, N=1030, **terms))


@pytest.mark.parametrize("bias", BROADCASTS)
def test_bias_broadcasts(bias):
    check_split(replace(USUAL, M=5, bias=bias), 5, "cuda")
    check_split(replace(USUAL, M=1, N=1024, bias=bias, bias_dtype=FLOAT), 5, "cuda")


@pytest.mark.parametrize("mask", [*BROADCASTS[::2], "1hm1"])
def test_mask_broadcasts(mask):
    check_split(replace(USUAL, M=3, mask=mask, bias="b11n"), 5, "cuda")


@each(
    replace(USUAL, M=M, dtype=dtype, causal=causal, window=window, softcap=softcap, bias=bias)
    for M, dtype in ((1, BRAIN), (7, HALF), (2, FLOAT))
    for causal, window, softcap, bias in (
        (True, None, None, None), (True, (100, None), 2.0, "b11n"), (False, (60, 20), None, "1hm1"),
        (False, (0, 0), None, None), (False, (None, 30), 2.0, "bhmn"),
    )
)  # fmt: skip
def test_terms(case):
    check_all(case)


@each(
    replace(USUAL, H=H, M=3, D=D, Dv=Dv, dtype=dtype, **terms)
    for H in (2, 8)
    for D, Dv, dtype, terms in (
        (8, 8, BRAIN, {}), (40, 72, BRAIN, {"bias": "1hmn"}), (128, 128, BRAIN, {"causal": True}),
        (192, 128, HALF, {"bias": "bhmn"}), (256, 256, BRAIN, {"bias": "1h1n"}), (256, 256, FLOAT, {"mask": "b1mn"}),
        (128, 64, FLOAT, {}), (13, 7, HALF, {"bias": "b11n"}), (512, 512, BRAIN, {"causal": True}),
        (576, 512, HALF, {"bias": "1h1n"}), (264, 320, FLOAT, {"mask": "b1mn"}),
    )
)  # fmt: skip
def test_head_dimensions(case):
    check_all(case)


@each(
    replace(USUAL, H=H, M=M, planted=planted, **terms)
    for H in (2, 8)
    for M, planted in ((1, math.nan), (4, math.inf))
    for terms in (
        {"mask": "b11n", "bias": "b11n"},
        {"mask": "1hmn", "softcap": 2.0, "layout": "sliced"},
        {"bias": "1hmn", "layout": "heads_last"},
        {"window": (300, 0)},
    )
)
def test_hidden_keys_that_are_not_finite(case):
    check_all(case)


@each(
    replace(USUAL, M=4, blind=True, **terms)
    for terms in ({"mask": "b1mn"}, {"bias": "bhmn", "bias_hides": True}, {"bias": "1hm1", "softcap": 2.0})
)
def test_rows_that_see_nothing(case):
    check_all(case)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout):
    for terms in ({}, {"bias": "bhmn", "mask": "b11n"}):
        check_all(replace(USUAL, M=3, layout=layout, **terms))


@each(replace(USUAL, H=H, M=M, grads="qkvb", bias="1hmn", causal=True) for H in (2, 8) for M in (1, 5))
def test_gradients(case):
    """By the plan, whichever backend's backward follows a split forward."""
    check_all(case)
    check(case, None, "cuda")


@each(
    replace(USUAL, H=2, Hkv=1, grads="qkvb", mask="111n", causal=True, lse=lse, deterministic=deterministic, **terms)
    for terms in (
        {"N": 128, "D": 128, "bias": "b11n"},
        {"N": 200, "D": 96, "bias": "111n", "window": (0, None)},
        {"N": 128, "D": 128, "bias": "1h1n", "bias_dtype": FLOAT},
        {"N": 128, "D": 256, "bias": "b111"},
    )
    for lse in (False, True)
    for deterministic in (False, True)
)
def test_gradients_of_a_bias_of_one_query(case):
    """It is a vector, for whose gradient the tiles of 128 dimensions have room."""
    check(case, "triton", "cuda")
    check(case, None, "cuda")


def test_what_is_visible_and_not_finite_shows():
    """A NaN in one split's keys or values reaches the rows that see it."""
    for name in "kv":
        x = tensors(replace(USUAL, N=2048), "cuda")
        getattr(x, name)[0, 1, 1500, 3] = math.nan
        with forced_splits(5):
            o = attention(x.q, x.k, x.v, backend="triton")
        broken = ~o.isfinite().all(-1)[..., 0]
        assert broken[0, 4:].all()
        assert broken.sum() == 4


def test_long_keys_in_few_heads():
    """More splits than a merge takes at once, and a workspace that does not grow with the keys."""
    case = replace(USUAL, B=1, H=4, Hkv=1, N=2**20, D=128)
    inputs = tensors(case, "cuda")
    text = str(explain(*inputs[:3], backend="triton"))
    assert "splits, merged by their LSE" in text
    hold(case, run(case, "triton", "cuda", inputs), "cuda", inputs)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    attention(*inputs[:3], backend="triton")
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < 2**21


def test_cuda_graph():
    """Both kernels are captured, and the partial results live on in the graph's memory."""
    case = replace(USUAL, bias="1h1n")
    static = tensors(case, "cuda")
    with forced_splits(4):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            differentiate(case, static, lambda x: call(case, "triton", x))
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = differentiate(case, static, lambda x: call(case, "triton", x))
    fresh = tensors(case, "cuda", draw=1)
    for x, y in zip(static, fresh, strict=True):
        if x is not None:
            x.copy_(y)
    for x in results[:2]:
        x.fill_(math.nan)
    graph.replay()
    torch.cuda.synchronize()
    hold(case, results, "cuda", fresh)
