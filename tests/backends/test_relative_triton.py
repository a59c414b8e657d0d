"""Bias terms in the Triton kernels, in Triton's interpreter, by the error rule: see relative_helpers.py."""

from __future__ import annotations

import math
from dataclasses import replace

import interpreter_child
import pytest
import torch
from helpers import Case
from pairwise import each_run as each
from relative_helpers import Term, check, check_split

from tilewise import explain
from tilewise.backends import triton
from tilewise.bias import RelativeBias, alibi

HALF, FLOAT = torch.float16, torch.float32
HIDDEN = -math.inf
USUAL = Case(B=2, H=4, Hkv=2, M=20, N=70, D=16)
SMALL = replace(USUAL, B=1, H=2, Hkv=1, M=20, N=67)


@each(
    [
        (USUAL, (Term(),)),
        (USUAL, (Term(outside=HIDDEN, axes="bk"),)),
        (USUAL, (Term(outside=HIDDEN, axes="1h", starts="batch"),)),
        (USUAL, (Term(outside="clamp", reverse=True, axes="11"),)),
        (USUAL, (Term(R=9, buckets=50, outside="clamp", lo=-25),)),
        (USUAL, (Term(R=9, buckets=50, axes="1k", starts="one"),)),
        (USUAL, (Term(R=9, buckets=50, outside="clamp", layout="sliced"),)),
        (USUAL, (Term(R=300, lo=-150, reverse=True, hides=True),)),  # longer than the keys
        (USUAL, (Term(R=3, lo=0, axes="1k", starts="batch", start=-3),)),
        (USUAL, (Term("key"),)),
        (USUAL, (Term("key", outside=HIDDEN, axes="1k", reverse=True),)),
        (USUAL, (Term("key", outside="clamp", axes="b1", starts="batch"),)),
        (USUAL, (Term("key", R=9, buckets=50, outside="clamp"),)),
        (USUAL, (Term("all", axes="bk"),)),
        (USUAL, (Term("all", outside=HIDDEN, axes="1h", R=60, starts="batch"),)),
        (USUAL, (Term("t5", R=16, axes="1h", dtype=FLOAT),)),
        (USUAL, (Term("alibi"),)),
    ]
)
def test_terms(interpreter, case, terms):
    interpreter(check, case, terms, "triton")


ONE_OF_EACH = (Term(R=40, lo=-30), Term("all"), Term("key", axes="11"))


@each(
    (Case(B=1, H=1, M=M, N=N, D=16, causal=n % 2 == 1), (ONE_OF_EACH[n % 3],))
    for n, (M, N) in enumerate((M, N) for M in (1, 3, 127, 129) for N in (1, 3, 127, 129))
)
def test_lengths(interpreter, case, terms):
    interpreter(check, case, terms, "triton")


@each(
    [
        # Tiles on both sides of the entries, one of them without any.
        (replace(SMALL, M=300, N=299), (Term(R=20, lo=-9, outside="clamp"),)),
        (replace(SMALL, M=300, N=299, causal=True, dtype=FLOAT), (Term(R=70, lo=-69), Term("key", R=30, lo=-80))),
        (replace(SMALL, M=140, N=260, window=(30, 20)), (Term(R=20, lo=-9),)),
        (replace(SMALL, M=140, N=260, window=(5, 2)), (Term(R=20, lo=-9, outside=HIDDEN),)),
        (replace(SMALL, M=200, N=100, causal=True), (Term(R=60, lo=-59, outside=HIDDEN, starts="one", start=7),)),
        # A window wider than the entries on one side alone.
        (replace(SMALL, M=300, N=400, window=(250, 2)), (Term(R=100, lo=-90),)),
        (replace(SMALL, M=300, N=400, window=(5, 250)), (Term(R=100, lo=-9),)),
        # Of the tile furthest up one pair has an entry.
        (replace(SMALL, M=150, N=150), (Term(R=20, lo=-9, outside=HIDDEN, starts="one", start=23),)),
        (replace(SMALL, M=150, N=150), (Term(R=20, lo=-9, starts="one", start=23),)),
        (replace(SMALL, M=300, N=299), (Term("key", R=20, lo=-9, outside="clamp"),)),
        (SMALL, (Term(R=5, lo=900),)),
        (SMALL, (Term(R=5, lo=900, outside=HIDDEN),)),
        (SMALL, (Term(R=5, lo=1 << 40, outside=HIDDEN, starts="one", start=-(1 << 41)),)),
        (SMALL, (Term(R=1, lo=0, outside="clamp"),)),
    ]
)
def test_tiles_without_an_entry(interpreter, case, terms):
    interpreter(check, case, terms, "triton")


@each(
    [
        (replace(USUAL, mask="b1mn", bias="1hmn", sink="h", softcap=2.0, window=(70, 30)),
         (Term(), Term("key", axes="11", outside="clamp"), Term("t5", R=8, axes="1h"), Term("cols", axes="b1"),
          Term("rows", axes="1h"))),
        (replace(SMALL, mask="1hm1", blind=True), (Term(hides=True), Term("cols", axes="1k"))),
        (replace(SMALL, mask="b11n", planted=math.nan, bias="11mn"), (Term(hides=True), Term("rows", axes="bh"))),
        (replace(SMALL, dtype=FLOAT), (Term(dtype=HALF), Term("key", dtype=torch.bfloat16))),
        (replace(SMALL, lse=False), (Term(dtype=FLOAT), Term("alibi", dtype=FLOAT))),
        (replace(SMALL, layout="sliced", scale=0.3), (Term(layout="padded"), Term("key", layout="heads_last"))),
        (replace(SMALL, layout="heads_last"), (Term(layout="sliced"), Term("key", layout="expanded"))),
        (SMALL, (Term(R=200, lo=-90, planted=math.nan),)),
        (SMALL, (Term("key", R=200, lo=-90, planted=math.nan, starts="batch"),)),
    ]
)  # fmt: skip
def test_together(interpreter, case, terms):
    interpreter(check, case, terms, "triton")


@pytest.mark.parametrize("wanted", ["terms", ""])
@each([(SMALL, (Term(), Term("key"), Term("t5", R=8), Term("cols"), Term("rows")))])
def test_gradients_on_demand(interpreter, case, terms, wanted):
    interpreter(check, case, terms, "triton", "cpu", wanted)


FEW = Case(B=2, H=4, Hkv=2, M=1, N=300, D=16)


@pytest.mark.parametrize("splits", [1, 3])
@each(
    [
        (FEW, (Term(R=60, lo=-59, starts="batch"),)),
        (replace(FEW, M=3, causal=True), (Term(R=60, lo=-59, axes="bk", outside=HIDDEN, starts="batch"), Term("all"))),
        (replace(FEW, M=5, causal=True, dtype=FLOAT), (Term(axes="1k", outside="clamp"), Term("key", axes="11"))),
        (replace(FEW, M=2, mask="b11n", sink="h"), (Term("alibi"), Term("cols", axes="b1"), Term("rows", axes="1h"))),
    ]
)  # fmt: skip
def test_few_queries(interpreter, case, terms, splits):
    interpreter(check_split, case, terms, splits)


ORDERED = replace(SMALL, B=2, deterministic=True)


@each(
    [
        (ORDERED, (Term(), Term("key"))),
        (ORDERED, (Term(axes="1k", starts=None), Term("all"), Term("cols", axes="b1"), Term("rows", axes="1h"))),
        (replace(ORDERED, causal=True, M=150, N=90), (Term("t5", R=8, axes="1h"), Term("key", axes="1k", lo=-60))),
        (replace(ORDERED, mask="1hmn", N=140), (Term("all", axes="1h"), Term(axes="11"))),
        (ORDERED, (Term(outside="clamp"), Term("key", outside="clamp", R=9, lo=-4))),
        (replace(ORDERED, M=150, N=90), (Term(R=70, outside="clamp", axes="1k", reverse=True),)),
        (replace(ORDERED, causal=True, N=140), (Term("key", R=70, outside="clamp", axes="11", reverse=True),)),
        (replace(ORDERED, mask="1hmn", window=(20, 9)),
         (Term(R=8, buckets=50, layout="padded"), Term("key", buckets=50, outside="clamp", axes="1h", reverse=True))),
        (ORDERED, (Term(axes="1h", starts="batch"), Term("key", axes="1k", starts="batch", outside="clamp"))),
        (replace(ORDERED, dropout_p=0.3), (Term(axes="1k", outside=HIDDEN), Term("key", R=1, outside="clamp"))),
    ]
)  # fmt: skip
def test_what_has_an_order_has_no_atomics(interpreter, case, terms):
    interpreter(interpreter_child.without_atomics, check, case, terms, "triton")


@pytest.mark.parametrize("deterministic", [False, True])
def test_integers_stay_in_range(interpreter, deterministic):
    case = replace(SMALL, causal=True, deterministic=deterministic)
    terms = (Term(lo=-(1 << 40), outside="clamp", starts="one", start=1 << 60), Term("key", lo=1 << 50), Term("all"))
    interpreter(interpreter_child.watch_integers, check, case, terms, "triton")


# --- plans ---


def plan_of(bias, **more):
    meta = {"device": "meta", "dtype": torch.bfloat16}
    q, k, v = (torch.empty(2, 4, 4096, 128, **meta) for _ in range(3))
    return explain(q, k, v, bias=bias, device="cpu", **more).problem


def test_declines():
    meta = {"device": "meta"}
    relative = RelativeBias(torch.empty(1, 4, 4096, 1024, **meta), lo=-1023)
    on_device = {"device": "cuda", "capability": (9, 0)}
    for bias in (relative, alibi(torch.empty(4, **meta)), (torch.empty(4096, 4096, **meta), torch.empty(4096, **meta))):
        assert triton.declines(replace(plan_of(bias), **on_device)) is None
        assert triton.declines(replace(plan_of(bias), **on_device), "backward") is None
    wide = RelativeBias(torch.empty(1, 4, 4096, 1024, dtype=torch.float64, **meta), lo=-1023)
    words = "reads a bias by distance with values per query in float16, bfloat16 or float32, not float64"
    assert triton.declines(replace(plan_of(wide), **on_device)) == words


def test_another_start_or_length_finds_the_kernel_of_the_last():
    """What a launch is looked up by, see `launcher.Launch.wants`."""
    from tilewise.backends.triton.launch import TritonForward
    from tilewise.frontend.arguments import read_call
    from tilewise.spec.problem import Problem

    def wants(N, start=None, R=1024, M=128):
        q, k = (torch.empty(1, 4, n, 64, dtype=HALF, device="meta") for n in (M, N))
        bias = RelativeBias(torch.empty(1, 4, M, R, dtype=HALF, device="meta"), lo=1 - R, query_start=start)
        call = read_call(q, k, k, bias=bias, mask=None, sink=None, causal=False, window=None, dropout_p=0.0,
                         dropout_seed=None, deterministic=None, backend=None)  # fmt: skip
        problem = replace(Problem.of(*call.inputs, call.score), device="cuda", capability=(8, 0))
        launch = TritonForward(problem, call.inputs).main
        tensors = (*call.inputs[:6], *call.inputs.parts, None, q, q)
        return launch.wants(tensors, [x is not None for x in tensors])

    usual = wants(1024)
    assert all(wants(1024, start) == usual for start in (-1023, 0, 1, 7, 16, 1024))
    assert all(wants(N) == usual for N in (512, 2048, 4096 + 128))
    assert wants(1024, R=512) == usual
    assert wants(1024, R=513) != usual  # rows that are no multiple of 16 bytes apart
