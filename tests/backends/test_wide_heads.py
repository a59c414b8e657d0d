"""Heads of more than 256 dimensions, on each backend, by the error rule.

The Triton kernels run in Triton's interpreter, and each kind of bias, mask and sum once; D 512 and 576 are two and
three tiles of columns, 257 to 320 have a block that is not full, and one of D and Dv alone may be wide.
"""

from __future__ import annotations

import math
from dataclasses import replace

import interpreter_child
import pytest
import relative_helpers
import torch
from forced import check_split
from helpers import Case, check
from pairwise import each, each_run
from relative_helpers import Term
from test_varlen_triton import clears_rows_that_no_sequence_has, run

from tilewise import attention, clear_caches, planner
from tilewise.backends.cpu import fused
from tilewise.spec.problem import Problem
from tilewise.spec.score import Band, Score

HALF, FLOAT = torch.float16, torch.float32
WIDE = Case(B=1, H=1, M=20, N=40, D=512)  # two tiles of keys, and in the backward two of queries
GROUPED = replace(WIDE, H=2, Hkv=1)
FEW = Case(B=2, H=4, Hkv=2, M=3, N=70, D=512, grads="")
CASES = [
    WIDE,
    replace(WIDE, M=37, D=257, Dv=300, dtype=FLOAT, causal=True),
    replace(WIDE, D=264, bias="1hmn", causal=True),
    replace(WIDE, D=320, softcap=2.0, window=(20, 3)),
    replace(GROUPED, D=576, Dv=512, bias="bhmn", bias_dtype=FLOAT),
    replace(GROUPED, D=576, Dv=512, dtype=FLOAT, scale=0.1, dropout_p=0.2),
    replace(WIDE, D=64, Dv=512, bias="1hmn", mask="1hmn"),
    replace(WIDE, D=512, Dv=16, sink="h", layout="sliced"),
    replace(WIDE, D=300, Dv=200, B=2, bias="11mn", layout="heads_last", lse=False),
    replace(WIDE, sink="bhm", causal=True, layout="padded"),
    replace(WIDE, B=2, bias="b11n", grads="qb"),
    replace(GROUPED, bias="1hm1", dropout_p=0.1),
    replace(GROUPED, bias="1111", mask="11m1", grads="kb"),
    replace(WIDE, bias="1hmn", bias_hides=True, blind=True, layout="expanded"),
    replace(WIDE, mask="b11n", planted=math.nan),
    replace(WIDE, mask="1hmn", bias="1hmn", planted=math.inf, grads="vb"),
]
ORDERED = [
    replace(WIDE, M=40, deterministic=True, bias="11mn", B=2, causal=True),
    replace(GROUPED, D=576, Dv=512, deterministic=True, bias="1h1n", dropout_p=0.2),
    replace(WIDE, D=264, Dv=320, deterministic=True, bias="11m1", mask="1hmn", planted=math.nan),
    replace(WIDE, D=512, Dv=64, deterministic=True, dtype=FLOAT, mask="b1mn", sink="h"),
    replace(WIDE, D=40, Dv=320, deterministic=True, window=(9, 2), planted=math.inf),
]


def check_stay(case: Case) -> None:
    """`check` where a forward keeps its queries, as on Hopper."""
    from tilewise.backends.triton import config, launch

    chosen = launch.forward_config
    launch.forward_config = lambda *_: config.TritonConfig(32, 16, 8, 2, queries_stay=True)
    clear_caches()
    try:
        check(case, "triton")
    finally:
        launch.forward_config = chosen
        clear_caches()


@each(CASES)
def test_dense(interpreter, case):
    interpreter(interpreter_child.watch_integers, check, case, "triton")


@each(ORDERED)
def test_deterministic(interpreter, case):
    interpreter(interpreter_child.without_atomics, check, case, "triton")


@each([WIDE, replace(WIDE, D=320, bias="1hmn", mask="1hmn", planted=math.nan, dropout_p=0.1, grads="")])
def test_queries_that_stay(interpreter, case):
    interpreter(check_stay, case)


@each(
    [
        FEW,
        replace(FEW, D=576, Dv=512, Hkv=1, dtype=FLOAT, causal=True, bias="bhmn"),
        replace(FEW, B=1, M=1, D=264, Dv=40, mask="b11n", sink="h", planted=math.nan),
        replace(FEW, D=64, Dv=320, H=2, softcap=2.0, bias="1h1n", grads="qkvb", dropout_p=0.1),
    ]
)
def test_few_queries(interpreter, case):
    interpreter(check_split, case, 3)


@each_run(
    [
        (GROUPED, (Term(),)),
        (replace(GROUPED, D=264, Dv=320, causal=True), (Term(outside="clamp", axes="11"), Term("alibi"))),
        (replace(WIDE, deterministic=True), (Term("key"), Term("all"))),
        (replace(WIDE, D=300, B=2), (Term("t5", R=16, axes="1h", dtype=FLOAT), Term("cols"), Term("rows"))),
        (replace(WIDE, deterministic=True), (Term(R=9, buckets=50, outside="clamp", lo=-25),)),
    ]
)
def test_relative_positions(interpreter, case, terms):
    interpreter(relative_helpers.check, case, terms, "triton")


@pytest.mark.parametrize(
    ("lengths", "bias", "options"),
    [
        ("FEW_TILES", None, {"causal": True, "dtype": HALF, "dims": (512, 512), "heads": (2, 1)}),
        ("USED", "ragged", {"dims": (320, 264)}),
        ("USED", "query", {"dims": (576, 512)}),
        (
            "FEW_TILES",
            "padded 11mn",
            {
                "dims": (300, 64),
                "heads": (2, 1),
                "mask_shape": (5, 1, 40, 50),
                "sink_shape": (2,),
                "deterministic": True,
            },
        ),
    ],
    ids=str,
)
def test_packed(interpreter, lengths, bias, options):
    interpreter(run, lengths, bias, options)


def test_rows_that_no_sequence_has(interpreter):
    interpreter(clears_rows_that_no_sequence_has, 512, 33)


@pytest.mark.parametrize("tiles", [False, True])
@each([*CASES, *ORDERED])
def test_cpu(case, tiles, monkeypatch):
    if tiles:
        for name in ("declines", "declines_backward"):
            monkeypatch.setattr(fused, name, lambda problem: "the test wants tiles")
    check(replace(case, dtype=FLOAT), "cpu")


def test_gradcheck():
    """Of both backends that compute in float64."""
    generator = torch.Generator().manual_seed(1)
    q, k, v, bias = (
        torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for shape in ((1, 2, 3, 257), (1, 1, 4, 257), (1, 1, 4, 264), (1, 2, 3, 4))
    )
    for backend in ("cpu", "reference"):
        assert torch.autograd.gradcheck(
            lambda *x, backend=backend: attention(*x[:3], bias=x[3], causal=True, return_lse=True, backend=backend),
            (q, k, v, bias),
            fast_mode=True,
        )


@pytest.mark.parametrize(("D", "Dv"), [(264, 64), (64, 512)])
def test_hopper_declines(D, Dv):
    of = {"batch": 1, "heads": 1, "kv_heads": 1, "queries": 512, "keys": 512, "score": Score(1.0, None, Band())}
    problem = Problem("cuda", (9, 0), torch.bfloat16, head_dim=D, value_dim=Dv, **of)
    plan = planner.make_plan(problem)
    assert plan.backend == plan.backward == "triton"
    assert plan.declined[0] == ("hopper", f"has kernels up to 256 dimensions, not for {max(D, Dv)}")
