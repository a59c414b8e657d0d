"""Masks by tiles on the device: the Triton kernels against the oracle with the bool mask, by the error rule, what is
made on the device against what a CPU makes, and equal bits of equal calls."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from helpers import Case, tensors
from tile_mask_helpers import PATTERNS, check, check_wrong, pattern
from torch.nn.attention.flex_attention import create_block_mask

from tilewise import TileMask, attention, dynamic_mask

BRAIN, HALF, FLOAT = torch.bfloat16, torch.float16, torch.float32
USUAL = Case(B=2, H=4, Hkv=2, M=799, N=799, D=64, dtype=BRAIN)
TERMS = [
    {},
    {"D": 128, "causal": True, "bias": "1hmn", "dtype": HALF},
    {"bias": "11mn", "deterministic": True},
    {"bias": "bkm1", "sink": "bhm", "softcap": 9.0, "layout": "heads_last"},
    {"dropout_p": 0.2, "window": (300, 50), "layout": "sliced"},
    {"dtype": FLOAT, "D": 48, "bias": "bhmn", "grads": "b"},
]


@pytest.mark.parametrize("block", [64, (128, 64), 256], ids=str)
@pytest.mark.parametrize("name", PATTERNS)
def test_patterns(name, block):
    check(USUAL, name, "triton", block, "cuda")


@pytest.mark.parametrize("terms", TERMS, ids=str)
@pytest.mark.parametrize("name", ["bits", "documents"])
def test_beside_other_terms(name, terms):
    check(replace(USUAL, **terms), name, "triton", 128, "cuda")


@pytest.mark.parametrize(
    ("M", "N"), [(1, 1), (1, 1023), (3, 2000), (127, 129), (129, 127), (1000, 3), (2048, 2048)], ids=str
)
@pytest.mark.parametrize("name", ["bits", "window"])
def test_lengths(name, M, N):
    check(replace(USUAL, M=M, N=N, D=128), name, "triton", 128, "cuda")


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["bits", "documents"])
def test_hidden_nan(name, value):
    check(replace(USUAL, planted=value, bias="11mn"), name, "triton", 64, "cuda")


def test_wrong_numbers_reach_no_memory():
    check_wrong(replace(USUAL, bias="11mn"), "triton", "cuda")


@pytest.mark.parametrize("name", PATTERNS)
def test_made_on_the_device(name):
    """Each constructor gives the bits that it gives on a CPU."""
    with torch.device("cuda"):
        here, _ = pattern(name, USUAL, 64) if name != "blocks" else (pattern(name, USUAL, 64)[0].to("cuda"), None)
    for x, y in zip(here.tensors, pattern(name, USUAL, 64)[0].tensors, strict=True):
        assert x is y is None or torch.equal(x.cpu(), y)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rows", [1, 1000])
def test_dynamic_masks(causal, rows):
    """The keys that a CPU keeps, ties among them; the call waits for nothing."""
    scores = torch.randn(2, 4, rows, 1000, device="cuda").mul(8).round()
    expected = dynamic_mask(scores.cpu(), keep=100, causal=causal, queries=1000)
    with_sync = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        mask = dynamic_mask(scores, keep=100, causal=causal, queries=1000)
        q, k, v = (torch.randn(2, 4, 1000, 64, device="cuda", dtype=BRAIN, requires_grad=True) for _ in range(3))
        o = attention(q, k, v, mask=mask, causal=causal)
        o.sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode(with_sync)
    assert torch.equal(mask.dense().cpu(), expected.dense())
    assert all(x.grad.isfinite().all() for x in (q, k, v))


def test_a_block_mask():
    ids = torch.arange(1000, device="cuda") // 300
    block_mask = create_block_mask(lambda b, h, q, kv: ids[q] == ids[kv], None, None, 1000, 1000)
    q, k, v = tensors(replace(USUAL, M=1000, N=1000), "cuda")[:3]
    expected = attention(q, k, v, mask=(ids[:, None] == ids)[None, None])
    torch.testing.assert_close(attention(q, k, v, mask=block_mask), expected)
    torch.testing.assert_close(attention(q, k, v, mask=TileMask.documents(ids)), expected)


@pytest.mark.parametrize("name", ["bits", "documents"])
def test_equal_bits(name):
    found, _ = pattern(name, USUAL, 128)
    inputs = tensors(replace(USUAL, bias="11mn"), "cuda")
    leaves = [x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v, inputs.bias)]

    def results():
        o = attention(*leaves[:3], bias=leaves[3], mask=found.to("cuda"), deterministic=True)
        return [o.detach(), *torch.autograd.grad(o, leaves, inputs.do)]

    first = results()
    for _ in range(100):
        assert all(map(torch.equal, first, results()))
