"""The Hopper kernels have room in shared memory: their pipelines and tiles are added up for every structure that the
backend takes, and what compilers make of some of them is held to the sum."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from helpers import Case
from room_child import room

from tilewise.spec.operands import PartOperands, TensorSpec
from tilewise.spec.problem import Problem
from tilewise.spec.score import Band, Distances, Score

pytest.importorskip("triton")

from tilewise.backends.gluon import sm90
from tilewise.backends.gluon.sm90.backward import launch as backward_launch
from tilewise.backends.gluon.sm90.backward.dbias import reduction
from tilewise.backends.gluon.sm90.common.config import (
    SHARED_MEMORY,
    backward_config,
    backward_width,
    forward_config,
)
from tilewise.backends.gluon.sm90.forward import launch
from tilewise.backends.gluon.values import as_matrix

BRAIN, HALF, FLOAT = torch.bfloat16, torch.float16, torch.float32
A_MULTIPROCESSOR = 228 * 1024  # one KiB of it goes with each program
# Barriers, numbers that programs hand on, what roles are given, sums across warps, and gaps between aligned tiles.
BESIDE = 1024


def forward_bytes(problem: Problem) -> int:
    """Rings and tiles of a program of the forward."""
    config = forward_config(problem)
    c = launch._compiled(problem, config, config.dynamic)
    d, dv, n, size = c.BLOCK_D.value, c.BLOCK_DV.value, config.block_n, problem.dtype.itemsize
    queries = config.q_stages * config.block_m * d * size
    keys = config.stages * n * (d + dv) * size
    bias = config.bias_stages * config.block_m * n * problem.bias_itemsize
    along_keys = config.stages * n * 4 if c.BIAS.value == "cols" else 0
    o = 0 if config.o_in_q or config.o_in_bias else config.block_m * dv * size
    return queries + keys + bias + along_keys + o


def backward_bytes(problem: Problem, dynamic: bool) -> int:
    """Of the backward."""
    config, size = backward_config(problem), problem.dtype.itemsize
    c = backward_launch._compiled(problem, config, backward_width(problem), dynamic)
    m, n, d = config.block_m, config.block_n, c.BLOCK_D.value
    keys = (c.KEY_STAGES.value + c.VALUE_STAGES.value) * n * d * size
    queries = (config.stages + config.do_stages) * m * d * size + 2 * config.stages * m * 4
    dq = m * d // config.dq_parts * 4 if config.dq_by_tma else 0
    tile, apart = problem.bias_itemsize, c.BIAS_APART.value
    cut = c.DBIAS.value == "add"
    ds = (config.stages + cut if tile and not apart else 1) * m * n * size
    bias = config.stages * m * n * tile if apart else 0
    p = m * n * size if config.shares_keys else 0
    stored = c.DBIAS.value in ("store", "accumulate", "reduce") and problem.score.softcap is not None and not apart
    along_keys = n * 4 if c.BIAS.value == "cols" else 0
    bits = config.stages * 2 * n * 4 if problem.mask is not None else 0
    sums = config.sum_bytes if c.DBIAS.value == "reduce" else 0
    return keys + queries + dq + ds + bias + p + stored * m * n * size + along_keys + bits + sums


def problems():
    """One of each structure: widths of tiles, kinds of bias, mask, band, softcap, order, trained or not."""
    B, H, N = 4, 8, 4096
    shapes = {"bhmn": (B, H, N, N), "1hmn": (1, H, N, N), "b11n": (B, 1, 1, N), "1hm1": (1, H, N, 1)}
    biases = [None, *(TensorSpec(dtype, *shape) for dtype in (BRAIN, HALF, FLOAT) for shape in shapes.values())]
    masks = [None, TensorSpec(torch.bool, B, 1, N, N)]
    bands = [Band(), Band.aligned(True, None, 0), Band.aligned(False, (300, 20), 0)]
    for d, dv, bias, mask, band, cap, ordered in itertools.product(
        (32, 64, 128, 256), (32, 64, 128, 256), biases, masks, bands, (None, 9.0), (False, True)
    ):
        yield Problem(
            "cuda", (9, 0), BRAIN, B, H, H, N, N, d, dv, Score(0.1, cap, band), bias, mask,
            bias_grad=bias is not None, deterministic=ordered,
        )  # fmt: skip


def problems_by_distance():
    """The same with values per query."""
    B, H, N = 4, 8, 4096
    bands = [Band(), Band.aligned(True, None, 0), Band.aligned(False, (300, 20), 0)]
    shapes = ((B, H), (1, H), (1, 1))
    for d, dv, dtype, (b, h), band, (lo, count), ordered, trained in itertools.product(
        (32, 64, 128), (32, 64, 128), (BRAIN, HALF, FLOAT), shapes, bands, ((-1024, 1025), (-9000, 18000)),
        (False, True), (False, True),
    ):  # fmt: skip
        distances = Distances("query", lo, count)
        parts = PartOperands(query=TensorSpec(dtype, b, h, N, count), grads=("query",) if trained else ())
        yield Problem(
            "cuda", (9, 0), BRAIN, B, H, H, N, N, d, dv, Score(0.1, None, band, query=distances), parts=parts,
            deterministic=ordered,
        )  # fmt: skip


@pytest.mark.parametrize("made", [problems, problems_by_distance])
def test_every_structure_has_room(made):
    taken = declined = 0
    for call in made():
        assert sm90.declines(call) is None
        problem = as_matrix(call)
        forward = forward_bytes(problem) + BESIDE
        assert forward <= SHARED_MEMORY, (problem, forward)
        assert forward_config(problem).programs * (forward + 1024) <= A_MULTIPROCESSOR, problem
        if sm90.declines(call, "backward") is not None:
            declined += 1
            continue
        taken += 1
        shares = reduction(problem) == "reduce"
        for dynamic in (False, True)[: 1 if shares or not backward_config(problem).dynamic else 2]:
            backward = backward_bytes(problem, dynamic) + BESIDE
            assert backward <= SHARED_MEMORY, (problem, backward)
            assert backward_config(problem).programs * (backward + 1024) <= A_MULTIPROCESSOR, (problem, backward)
    assert taken
    assert declined
    assert made is problems_by_distance or taken > 10 * declined


FULL = Case(B=4, H=8, M=4096, N=4096, D=128, dtype=BRAIN)
COMPILED = [
    replace(FULL, bias="1hmn", mask="b1mn", softcap=9.0, window=(300, 20), deterministic=True),
    replace(FULL, D=64, bias="b11n", causal=True),
]


@pytest.mark.parametrize("case", COMPILED, ids=str)
def test_the_sum_is_what_a_compiler_takes(compilers, case):
    found = {x.name: x.shared for x in compilers.rooms(room, "3.6.0", 90, case, "hopper")}
    bias, mask = (
        (TensorSpec(dtype, *case.shape(x)) if x else None) for dtype, x in ((BRAIN, case.bias), (torch.bool, case.mask))
    )
    score = Score(0.1, case.softcap, Band.aligned(case.causal, case.window, 0))
    problem = Problem(
        "cuda",
        (9, 0),
        BRAIN,
        case.B,
        case.H,
        case.H,
        case.M,
        case.N,
        case.D,
        case.D,
        score,
        bias,
        mask,
        bias_grad=True,
        deterministic=case.deterministic,
    )
    dynamic = backward_config(problem).dynamic and reduction(problem) != "reduce"
    for name, sum_of in (
        ("forward_kernel", forward_bytes(problem)),
        ("backward_kernel", backward_bytes(problem, dynamic)),
    ):
        assert sum_of <= found[name] <= sum_of + BESIDE, (name, found[name] - sum_of)
