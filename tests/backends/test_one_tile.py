"""Many short sequences, each in one tile, in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import interpreter_child
import pytest
import torch
from helpers import Case, check, run
from pairwise import each
from repeated_masks import RepeatedCase, hold_repeated

from tilewise import attention, clear_caches
from tilewise.backends import short_sequences
from tilewise.backends.short_sequences import fit_tiles
from tilewise.backends.triton.one_tile.config import sharing
from tilewise.planner import make_plan
from tilewise.spec.operands import TensorSpec
from tilewise.spec.problem import Problem
from tilewise.spec.score import Band, Score

WINDOWS = Case(B=5, H=2, M=17, N=20, D=16, bias="1hmn")
NAN, INF = float("nan"), float("inf")


def hold(case: Case) -> None:
    """Check the case, and that the kernels of one tile compute both passes."""
    assert launched(check, case, "triton") == ["one_tile_forward_kernel", "one_tile_backward_kernel"]


def launched(function, *arguments) -> list[str]:
    """Return the names of the kernels that a call of the function launches, where few sequences are enough."""
    from tilewise.backends.launch import launcher

    names, call, least = [], launcher.Launch.__call__, short_sequences.LEAST_SEQUENCES

    def noted(self, *given) -> None:
        names.append(self.kernel.__name__)
        call(self, *given)

    launcher.Launch.__call__, short_sequences.LEAST_SEQUENCES = noted, 1
    clear_caches()
    try:
        function(*arguments)
    finally:
        launcher.Launch.__call__, short_sequences.LEAST_SEQUENCES = call, least
        clear_caches()
    return names


@each(
    [
        replace(WINDOWS, bias=None),
        replace(WINDOWS, bias="11mn", mask="11mn"),
        replace(WINDOWS, bias="b1mn", mask="1h1n"),
        replace(WINDOWS, bias="bhmn", window=(9, 4)),
        replace(WINDOWS, mask="bhmn", deterministic=True),
        replace(WINDOWS, mask="b1m1", blind=True),
        replace(WINDOWS, causal=True, softcap=1.5, lse=False),
        replace(WINDOWS, bias=None, causal=True, window=(5, None)),
        replace(WINDOWS, M=49, N=49, D=24, Dv=40, mask="11mn"),
        replace(WINDOWS, M=64, N=64, D=64, Dv=7),
        replace(WINDOWS, bias=None, M=1, N=3, D=1),
        replace(WINDOWS, M=5, N=64, bias_dtype=torch.float32),
        replace(WINDOWS, layout="sliced"),
        replace(WINDOWS, layout="expanded"),
        replace(WINDOWS, scale=0.7, grads="kb"),
        replace(WINDOWS, grads="q", mask="1hmn"),
        replace(WINDOWS, bias=None, grads="v"),
        replace(WINDOWS, bias_dtype=torch.float32, bias_scale=1e4),
    ]
)
def test_terms(interpreter, case):
    interpreter(hold, case)


@each(
    [
        replace(WINDOWS, mask="b1mn", planted=NAN),
        replace(WINDOWS, bias=None, mask="11mn", planted=INF),
        replace(WINDOWS, bias_hides=True, planted=NAN),
        replace(WINDOWS, bias_hides=True, blind=True),
    ]
)
def test_hidden_pairs(interpreter, case):
    interpreter(hold, case)


def with_few_programs(function, *arguments):
    """Call the function where a matrix has three programs at most, so that each computes several sequences."""
    from tilewise.backends.triton.one_tile import config

    warps, config.WARPS = config.WARPS, 6
    try:
        return function(*arguments)
    finally:
        config.WARPS = warps


@each(
    [
        WINDOWS,
        replace(WINDOWS, bias="11mn", mask="11mn", M=49, N=49),
        replace(WINDOWS, mask="b1mn", planted=NAN),  # more masks than programs: one is read in each step
        replace(WINDOWS, bias=None, mask="bhmn", blind=True),
    ]
)
def test_several_sequences_for_a_program(interpreter, case):
    interpreter(with_few_programs, hold, case)


def probabilities(bias: torch.Tensor) -> torch.Tensor:
    """Return P (M, N) of the backward beside a bias (M, N): dV of a dO that is 1 where query and column are equal."""
    M, N = bias.shape
    q, k, v = (torch.zeros(64, 2, n, M, dtype=torch.float16) for n in (M, N, N))
    o = attention(q, k, v.requires_grad_(), bias=bias[None, None], backend="triton")
    (dv,) = torch.autograd.grad(o, v, torch.eye(M, dtype=torch.float16).expand_as(o))
    return dv[0, 0].T


def test_p_has_no_rounding_of_a_large_lse(interpreter):
    """Three equal scores of -30,000 have 1/3 each. Their LSE is -30,000 + log 3; float32 numbers of that size are 0.002
    apart, and this one is halfway between two."""
    found = interpreter(probabilities, torch.full((16, 3), -30000.0))
    assert torch.equal(found, torch.full((16, 3), 1 / 3, dtype=torch.float16))


def test_a_mask_that_repeats(interpreter):
    case = RepeatedCase("w1mn", "1hmn", images=2, windows=3, M=12, N=12)
    assert interpreter(launched, hold_repeated, case, "triton").count("one_tile_forward_kernel") > 0


def test_nothing_is_added_in_any_order(interpreter):
    interpreter(interpreter_child.without_atomics, hold, replace(WINDOWS, mask="b1mn"))


def test_sequences_longer_than_a_tile(interpreter):
    names = interpreter(launched, run, replace(WINDOWS, N=65), "triton")
    assert "forward_kernel" in names
    assert not [name for name in names if name.startswith("one_tile")]


# --- the choice ---


def problem(**changes) -> Problem:
    values = {
        "device": "cuda", "capability": (9, 0), "dtype": torch.bfloat16, "batch": 64, "heads": 3, "kv_heads": 3,
        "queries": 49, "keys": 49, "head_dim": 32, "value_dim": 32, "score": Score(1.0, None, Band()),
        "bias": TensorSpec(torch.bfloat16, 1, 3, 49, 49),
    }  # fmt: skip
    return Problem(**values | changes)


def mask(batch: int, heads: int = 1) -> TensorSpec:
    return TensorSpec(torch.bool, batch, heads, 49, 49)


@pytest.mark.parametrize(
    "changes",
    [
        {"queries": 65}, {"keys": 65}, {"head_dim": 65}, {"value_dim": 65}, {"dtype": torch.float32}, {"batch": 42},
        {"kv_heads": 1}, {"queries": 3}, {"sink": TensorSpec(torch.bfloat16, 1, 3, 1, 1)}, {"totals": (49, 49)},
        {"bias": TensorSpec(torch.bfloat16, 1, 3, 1, 49)}, {"score": Score(1.0, None, Band(), dropout=1000)},
    ],
    ids=str,
)  # fmt: skip
def test_other_problems_take_the_general_kernels(changes):
    assert fit_tiles(problem())
    assert not fit_tiles(problem(**changes))


def test_hopper_leaves_short_sequences_to_triton(monkeypatch):
    monkeypatch.setattr("tilewise.backends.triton.has_triton", lambda: True)
    plan = make_plan(problem())
    assert plan.backend == "triton"
    assert "in one tile" in dict(plan.declined)["hopper"]
    assert "whole sequences in tiles of 64 queries x 64 keys" in plan.module.tiles(problem())


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, (1, 3, 64, False)),
        ({"bias": None}, (1, 1, 192, False)),
        ({"batch": 640, "mask": mask(64)}, (64, 3, 2, False)),
        ({"batch": 640, "mask": mask(640)}, (1, 3, 132, True)),
        ({"batch": 640, "mask": mask(1, 3), "bias": None}, (1, 3, 132, False)),
        ({"batch": 640, "mask": mask(640, 3), "bias": TensorSpec(torch.bfloat16, 640, 3, 49, 49)}, (640, 3, 1, False)),
    ],
)
def test_programs_share_matrices(changes, expected):
    assert tuple(sharing(problem(**changes))) == expected
