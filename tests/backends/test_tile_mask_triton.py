"""Masks by tiles in the Triton kernels, in Triton's interpreter: see tile_mask_helpers.py."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import tile_mask_child
import torch
from helpers import Case
from tile_mask_helpers import PATTERNS, check, check_kept, check_wrong

USUAL = Case(B=2, H=2, Hkv=1, M=239, N=239, D=16)
SQUARE = ("documents", "prefix")
FLOAT = torch.float32


@pytest.mark.parametrize("name", PATTERNS)
def test_patterns(interpreter, name):
    case = replace(USUAL, B=1 + (name in SQUARE), bias="11mn" if name in ("window", "bits") else None)
    interpreter(check, case, name, "triton", 64 if name in ("bits", "documents") else (128, 64))


@pytest.mark.parametrize(
    ("M", "N", "name"),
    [
        (1, 239, "bits"),
        (1, 1, "window"),
        (127, 129, "bits"),
        (129, 127, "window"),
        (239, 1, "bits"),
        (2, 300, "window"),
    ],
)
def test_lengths(interpreter, M, N, name):
    interpreter(check, replace(USUAL, B=1, M=M, N=N), name, "triton")


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("bits", {"causal": True, "bias": "bhmn", "dtype": FLOAT}),
        ("documents", {"causal": True, "bias": "11mn", "deterministic": True}),
        ("bits", {"window": (50, 10), "bias": "11mn", "grads": "b"}),
        ("window", {"bias": "1k1n", "sink": "h", "softcap": 9.0, "deterministic": True}),
        ("bits", {"dropout_p": 0.2, "sink": "bhm", "dtype": FLOAT}),
        ("bits", {"M": 3, "N": 500, "dtype": FLOAT}),
        ("blocks", {"M": 60, "N": 1000, "H": 4, "Hkv": 2}),
        ("blocks", {"B": 2, "H": 4, "Hkv": 2}),
        ("dilated", {"D": 80, "Dv": 16, "layout": "heads_last"}),
    ],
    ids=str,
)
def test_beside_other_terms(interpreter, name, more):
    interpreter(check, replace(USUAL, **{"B": 1, **more}), name, "triton")


@pytest.mark.parametrize(
    ("name", "value", "bias"), [("bits", math.nan, "11mn"), ("bits", math.inf, None), ("documents", math.nan, None)]
)
def test_hidden_nan(interpreter, name, value, bias):
    interpreter(check, replace(USUAL, B=1, planted=value, bias=bias), name, "triton")


@pytest.mark.parametrize(
    ("name", "block"), [*((name, 64) for name in PATTERNS), ("bits", (192, 128)), ("documents", 128)]
)
def test_lists_are_those_of_the_bool_mask(interpreter, name, block):
    """Bit for bit, in the forward and in the backward."""
    for mask, tiles in interpreter(tile_mask_child.lists_of, replace(USUAL, M=300 if name in SQUARE else 239, N=300),
                                   name, block):  # fmt: skip
        for one, other in zip(mask, tiles, strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize(
    ("name", "block", "more"),
    [
        ("documents", 64, {"causal": True}),
        ("prefix", 128, {"D": 128}),
        ("window", (64, 128), {"deterministic": True, "M": 300}),
        ("bits", (192, 128), {"D": 128, "deterministic": True}),
        ("bits", 64, {"M": 1}),
        ("blocks", 64, {"D": 256, "causal": True, "B": 2, "H": 4, "Hkv": 2, "M": 500}),
        ("blocks", (128, 192), {"M": 500, "deterministic": True}),
        ("strided", 128, {"window": (100, 3)}),
        ("blocks", 64, {"B": 1, "H": 1, "Hkv": 1, "M": 70, "N": 1300, "D": 128}),  # more tiles than a program has
    ],
    ids=str,
)
def test_lists_for_hopper_are_those_of_the_bool_mask(interpreter, name, block, more):
    """Bit for bit, in the forward and in the backward, with the bits of each tile that a kernel reads."""
    case = replace(USUAL, **{"M": 300 if name in SQUARE else 239, "N": 300, "D": 64, **more})
    many = 0 if name in ("documents", "window") or case.N > 1000 else 1 << 14  # a program has several tiles, or one
    for mask, tiles in interpreter(tile_mask_child.hopper_lists_of, case, name, block, many):
        for one, other in zip(mask, tiles, strict=True):
            assert torch.equal(one, other)


def test_wrong_numbers_reach_no_memory(interpreter):
    interpreter(check_wrong, replace(USUAL, bias="11mn"), "triton")


def test_lists_are_kept_while_a_mask_stays_as_it_is(interpreter):
    interpreter(check_kept, replace(USUAL, B=1), "triton")
