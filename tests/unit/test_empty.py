"""Calls without batch elements, heads, queries or keys: what they return, their gradients, and their plans for GPUs."""

from __future__ import annotations

import importlib.util
from itertools import product

import pytest
import torch
from empty_helpers import USUAL, arguments, calls, check_attention, check_calls, of_sizes, zeros

from tilewise import explain, explain_varlen

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
ON_HOPPER = ("plain", "bias 1hmn", "bias bhmn", "bias b11n", "mask bhmn", "sink h", "T5", "softcap", "causal", "tiles")


@of_sizes
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_attention(empty, backend):
    check_attention(empty, torch.float32, backend=backend)


@of_sizes
@needs_triton
def test_plans_for_gpus(empty):
    for dtype in (torch.bfloat16, torch.float32):
        qkv, others = arguments(USUAL | empty, dtype)
        for device, (name, (more, _)) in product(("sm_80", "sm_90", "sm_100"), others.items()):
            hopper = device == "sm_90" and dtype == torch.bfloat16 and name in ON_HOPPER
            explained = explain(*qkv, **more, device=device, backend="hopper" if hopper else None)
            assert str(explained), name
            assert explained.plan.backward in ("hopper", "triton"), name


@of_sizes
def test_other_entry_points(empty):
    check_calls(empty)


@of_sizes
@needs_triton
def test_plans_of_packed_batches(empty):
    _, packed, lengths = calls(**USUAL | empty)
    for options in ({}, {"causal": True}, {"bias": zeros(packed[0].shape[1], 1, packed[1].shape[0])}):
        for device in ("cpu", "sm_80", "sm_90"):
            assert str(explain_varlen(*(x.bfloat16() for x in packed), *lengths, **options, device=device))
