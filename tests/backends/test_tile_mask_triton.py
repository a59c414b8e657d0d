"""Masks by tiles in the Triton kernels, in Triton's interpreter: see tile_mask_helpers.py."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from helpers import Case, tensors
from tile_mask_helpers import PATTERNS, check, check_kept, check_wrong, pattern
from torch import Tensor

USUAL = Case(B=2, H=2, Hkv=1, M=239, N=239, D=16)
SQUARE = ("documents", "prefix", "tree")
FLOAT = torch.float32


def lists_of(case: Case, name: str, block: int | tuple[int, int]) -> list[tuple[list[Tensor], list[Tensor]]]:
    """States and lists of the forward and of the backward: of the bool mask, and of the tiles."""
    from tilewise.backends.kernels.block_mask import flat_mask
    from tilewise.backends.protocol import Inputs
    from tilewise.backends.triton.config import backward_config, forward_config
    from tilewise.backends.triton.masks import MaskLists
    from tilewise.spec.problem import Problem
    from tilewise.spec.score import Band, Score

    found, dense = pattern(name, case, block)
    q, k, v, *_ = tensors(case)
    B, H, M, N = (*found.shape[:2], case.M, case.N)
    dense = dense.expand(B, H, M, N).contiguous()
    score = Score(1.0, None, Band(None, 20))
    pairs = []
    for backward in (False, True):
        both = []
        for inputs in (Inputs(q, k, v, None, dense), Inputs(q, k, v, None, None, tiles=found.tensors)):
            problem = Problem.of(*inputs, score)
            config = backward_config(problem, False) if backward else forward_config(problem, False, False)
            make = MaskLists(problem, config, inputs.mask, q.device, by_rows=True, by_keys=True, even=backward)
            masked = make(flat_mask(inputs.mask, inputs.tiles))
            both.append([masked.states, *map(_counted, (masked.by_rows, masked.by_keys))])
        pairs.append((both[0], both[1]))
    return pairs


def hopper_lists_of(
    case: Case, name: str, block: int | tuple[int, int], many: int
) -> list[tuple[tuple[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]]:
    """Bits of visited tiles, lists and states of the Hopper kernels, by rows and by keys: of the bool mask, and of the
    tiles. What nobody has written is 0. many: see `masks.MANY`."""
    from tilewise.backends.gluon import masks
    from tilewise.backends.gluon.masks import MaskSummary
    from tilewise.backends.gluon.sm90.common.config import backward_config, forward_config
    from tilewise.backends.kernels.block_mask import flat_mask
    from tilewise.backends.protocol import Inputs
    from tilewise.spec.problem import Problem
    from tilewise.spec.score import Band, Score

    masks.MANY = many
    masks.KEYS = 0  # one row has states, too
    found, dense = pattern(name, case, block)
    q, k, v, *_ = tensors(case)
    dense = dense.expand(*found.shape[:2], case.M, case.N).contiguous()
    score = Score(1.0, None, Band.aligned(case.causal, case.window, case.N - case.M))
    pairs = []
    for by_keys in (False, True):
        both = []
        for inputs in (Inputs(q, k, v, None, dense), Inputs(q, k, v, None, None, tiles=found.tensors)):
            problem = Problem.of(*inputs, score, deterministic=case.deterministic)
            config = backward_config(problem) if by_keys else forward_config(problem)
            groups = 1 if by_keys else config.warpgroups
            summary = MaskSummary(problem, inputs.mask, q.device, config.block_n, groups, by_keys)
            summary.bits = lambda make=summary.bits: make().fill_(0x5A5A5A5A)  # no full tile's bits
            bits, lists, states, _ = summary(flat_mask(inputs.mask, inputs.tiles))
            bits = bits.view(-1, 2 * config.block_n) if by_keys else bits
            read = _read(lists, by_keys, case, bits, config.block_n, groups)
            others = -(-case.M // 64) if by_keys else -(-case.N // config.block_n)
            both.append((torch.where(read, bits, 0), _listed(lists, others), states))
        pairs.append((both[0], both[1]))
    return pairs


def _listed(lists: Tensor, others: int) -> Tensor:
    """With 0 where nothing was written, of the entries and, where there is one, of their order."""
    place = torch.arange(lists.shape[-1] - 1) % others
    return torch.cat([lists[..., :1], torch.where(place < lists[..., :1], lists[..., 1:], 0)], -1)


def _read(lists: Tensor, by_keys: bool, case: Case, bits: Tensor, block_n: int, groups: int) -> Tensor:
    """Which bits a kernel reads: of tiles in its lists that the mask cuts; the backward, that anything does."""
    others = -(-case.M // 64) if by_keys else -(-case.N // block_n)
    read = torch.zeros(*lists.shape[:2], others, dtype=torch.bool)
    for x in range(lists.shape[0]):
        for t in range(lists.shape[1]):
            for entry in lists[x, t, 1 : 1 + int(lists[x, t, 0])].tolist():
                if entry & (3 if by_keys else 2):
                    read[x, t, entry >> 2] = True
    if by_keys:
        return read.flatten()[:, None].expand(bits.shape)
    return read.repeat_interleave(64 * groups, 1)[:, : bits.shape[1], :, None].expand(bits.shape)


def _counted(lists: Tensor) -> Tensor:
    """With 0 where nothing was written."""
    from tilewise.backends.triton.visibility import HEAD

    head = HEAD.value
    written = lists.clone()
    for row in written.view(-1, lists.shape[-1]):
        row[head + int(row[0]) :] = 0
    return written


@pytest.mark.parametrize("name", PATTERNS)
def test_patterns(interpreter, name):
    case = replace(USUAL, B=1 + (name in SQUARE), bias="11mn" if name in ("window", "bits") else None)
    interpreter(check, case, name, "triton", 64 if name in ("bits", "documents") else (128, 64))


@pytest.mark.parametrize(
    ("M", "N", "name"),
    [
        (1, 239, "bits"), (1, 1, "window"), (127, 129, "bits"), (129, 127, "window"), (239, 1, "bits"),
        (2, 300, "window"),
    ],
)  # fmt: skip
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
    interpreter(check, replace(USUAL, **{"B": 1, "M": 150, "N": 150, **more}), name, "triton")


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
    for mask, tiles in interpreter(lists_of, replace(USUAL, M=300 if name in SQUARE else 239, N=300),
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
    for mask, tiles in interpreter(hopper_lists_of, case, name, block, many):
        for one, other in zip(mask, tiles, strict=True):
            assert torch.equal(one, other)


def test_wrong_numbers_reach_no_memory(interpreter):
    interpreter(check_wrong, replace(USUAL, bias="11mn"), "triton")


def test_lists_are_kept_while_a_mask_stays_as_it_is(interpreter):
    interpreter(check_kept, replace(USUAL, B=1), "triton")
