"""Calls of the Hopper kernels beside a bias by distance or a Toeplitz bias, compiled; and those of their kernels that
are Python elsewhere. What runs in child processes for test_hopper_relative.py, test_hopper_toeplitz.py, those of aot/
and test_hopper_underflow.py."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.backends import Inputs, Needs, Outputs, empty_output
from tilewise.spec.bias_components import Parts
from tilewise.spec.problem import Problem
from tilewise.spec.score import Band, Distances, Far, Score


def _differing(name: str, x: Any) -> str:
    """What differs from the default, as a test id and a name in the ledger."""
    words = [f"{field} {y}" for field, y, usual in zip(x._fields, x, type(x)(), strict=True) if y != usual]
    return f"{name}, " + ", ".join(words).replace("(", "").replace(")", "").replace("torch.", "")


def _meta(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


class Values(NamedTuple):
    """A call with ``count`` values of each query from the distance ``lo`` on; without it up to the query's own place.

    shared: all heads and batch elements have the same. grad: the values need a gradient.
    """

    D: int = 128
    M: int = 4096
    count: int = 1025
    lo: int | None = None
    dtype: torch.dtype = torch.bfloat16
    values_dtype: torch.dtype | None = None
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    Hkv: int = 8
    shared: bool = False
    grad: bool = True
    deterministic: bool = False

    def __str__(self) -> str:
        return _differing("values", self)

    @property
    def first(self) -> int:
        return 1 - self.count if self.lo is None else self.lo


class Toeplitz(NamedTuple):
    """A call with a vector a head; ``far``: `Far` beyond that distance on either side.

    shared: all heads and batch elements have the same. grad: the vector needs a gradient.
    """

    D: int = 64
    M: int = 4096
    far: int = 94
    linear: bool = False
    dtype: torch.dtype = torch.bfloat16
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    masked: bool = False
    Hkv: int = 16
    shared: bool = False
    grad: bool = True
    dropout: int = 0

    def __str__(self) -> str:
        return _differing("toeplitz", self)


def values_call(x: Values, heads: int = 16) -> tuple[Problem, Inputs]:
    """On the meta device, and the target's capability."""
    import aot_child

    meta = partial(_meta, dtype=x.dtype)
    shape = (1, 1) if x.shared else (4, heads)
    inputs = Inputs(
        meta(4, heads, x.M, x.D), meta(4, x.Hkv, x.M, x.D), meta(4, x.Hkv, x.M, x.D), None, None, None,
        Parts(query=meta(*shape, x.M, x.count, dtype=x.values_dtype or x.dtype)),
    )  # fmt: skip
    distances = Distances("query", x.first, x.count)
    score = Score(x.D**-0.5, None, Band.aligned(x.causal, x.window, 0), query=distances)
    grads = ("query",) if x.grad else ()
    problem = Problem.of(*inputs, score, part_grads=grads, deterministic=x.deterministic)
    return dataclasses.replace(problem, device="cuda", capability=aot_child._capability), inputs


def toeplitz_call(x: Toeplitz, heads: int = 16) -> tuple[Problem, Inputs]:
    """On the meta device, and the target's capability."""
    import aot_child

    meta = partial(_meta, dtype=x.dtype)
    batch = 1 if x.shared else 4
    mask = meta(4, 1, x.M, x.M, dtype=torch.bool) if x.masked else None
    inputs = Inputs(
        meta(4, heads, x.M, x.D), meta(4, x.Hkv, x.M, x.D), meta(4, x.Hkv, x.M, x.D), None, mask, None,
        Parts(toeplitz=meta(batch, 1 if x.shared else heads, 1, 2 * x.M - 1, dtype=torch.float32)),
        meta(2, dtype=torch.int64) if x.dropout else None,
    )  # fmt: skip
    far = Far(-x.far, x.far, x.linear)
    score = Score(x.D**-0.5, None, Band.aligned(x.causal, x.window, 0), dropout=x.dropout, toeplitz=far)
    grads = ("toeplitz",) if x.grad else ()
    problem = Problem.of(*inputs, score, part_grads=grads)
    return dataclasses.replace(problem, device="cuda", capability=aot_child._capability), inputs


def _codes(problem: Problem, inputs: Inputs, backward: bool, **grads: bool) -> Any:
    """Every kernel that the forward, or the backward, launches; grads: of the bias."""
    import aot_child

    from tilewise.backends.gluon import sm90
    from tilewise.backends.gluon.sm90.backward import launch as backward_launch
    from tilewise.backends.gluon.sm90.common import config
    from tilewise.backends.gluon.sm90.forward import launch

    aot_child._launched.clear()
    assert sm90.declines(problem, "backward" if backward else "forward") is None
    if not backward:
        launch.HopperForward(problem, inputs)(inputs)
    else:
        o = empty_output(inputs.q, problem.value_dim)
        outputs = Outputs(o, torch.empty(o.shape[:3], dtype=torch.float32, device="meta"))
        needs = Needs(True, True, True, False, **grads)
        backward_launch.HopperBackward(problem, inputs, outputs, outputs, needs)(inputs, outputs, outputs)
    return aot_child._codes(config.SHARED_MEMORY)


def compile_values(x: Values, backward: bool = False) -> Any:
    return _codes(*values_call(x), backward, query=x.grad)


def compile_toeplitz(x: Toeplitz, backward: bool = False) -> Any:
    return _codes(*toeplitz_call(x), backward, toeplitz=x.grad)


# --- in the interpreter ---


def zeroed(M: int, N: int, distances: Distances, band: Band, dim: int, batch: int = 1) -> Tensor:
    """A gradient of values, (batch, 2, M, R), that was NaN, when what the backward does not store has been zeroed."""
    from tilewise.backends.gluon.sm90.backward.launch import HopperBackward

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.float16)

    q, k = zeros(batch, 2, M, dim), zeros(batch, 1, N, dim)
    values = zeros(batch, 2, M, distances.count)
    inputs = Inputs(q, k, k, None, None, None, Parts(query=values))
    problem = Problem.of(*inputs, Score(0.3, None, band, query=distances), part_grads=("query",))
    outputs = Outputs(q, q[..., 0].float())
    run = HopperBackward(problem, inputs, outputs, outputs, Needs(True, True, True, False, query=True))
    assert run.values is not None
    gradient = run.values.empty_gradient(values)
    assert gradient._base is not None or not run.values.gradient_copies
    gradient.fill_(float("nan"))
    run.zeros(gradient)
    return run.values.entries(gradient)


def repair_beside_values(M: int, N: int, lo: int, count: int, causal: bool, reverse: bool) -> tuple[Tensor, ...]:
    """o and lse of the kernel that computes rows again, where all are to be, and of the CPU backend."""
    from tilewise.backends import cpu
    from tilewise.backends.gluon.sm90.forward.launch import HopperForward

    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).half()

    q, k, v = normal(2, 4, M, 24), normal(2, 2, N, 24), normal(2, 2, N, 24)
    distances = Distances("query", lo, count, reverse)
    score = Score(0.3, None, Band.aligned(causal, None, N - M), query=distances)
    inputs = Inputs(q, k, v, None, None, None, Parts(query=normal(2, 4, M, count)))
    problem = Problem.of(*inputs, score)
    run = HopperForward(problem, inputs)
    assert run.nan_fixup is not None
    assert run.values is not None
    assert inputs.parts is not None
    assert inputs.parts.query is not None
    values = run.values.laid_out(inputs.parts.query)
    o, lse = torch.full_like(q, 7.0), torch.full((2, 4, M), float("nan"))
    run.nan_fixup(q, k, v, values, None, None, None, o, None, lse, None)
    return o, lse, *cpu.prepare["forward"](problem, inputs)(inputs)[:2]


def drawn(M: int, N: int, causal: bool, linear: bool = False) -> tuple[Problem, Inputs]:
    """Small, of float16; beyond the distances -3 and 5 a number each, of which one is -inf, or a line each."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    q, k, v = normal(2, 4, M, 24).half(), normal(2, 2, N, 24).half(), normal(2, 2, N, 24).half()
    vector = normal(1, 4, 1, M + N - 1)
    distance = torch.arange(1 - M, N)
    below, above = vector[..., distance <= -3][..., :1], vector[..., distance >= 5][..., :1]
    below[:, 2] = -torch.inf
    if linear:
        below = below.nan_to_num(0, 0, 0) + 0.25 * (distance + 3)
        above = above - 0.5 * (distance - 5)
    vector = torch.where(distance <= -3, below, torch.where(distance >= 5, above, vector))
    inputs = Inputs(q, k, v, None, None, None, Parts(toeplitz=vector))
    score = Score(0.3, None, Band.aligned(causal, None, N - M), toeplitz=Far(-3, 5, linear))
    return Problem.of(*inputs, score, part_grads=("toeplitz",)), inputs


def repair_beside_toeplitz(M: int, N: int, causal: bool) -> tuple[Tensor, ...]:
    """o and lse of the kernel that computes rows again, where all are to be, and of the CPU backend."""
    from tilewise.backends import cpu
    from tilewise.backends.gluon.sm90.forward.launch import HopperForward

    problem, inputs = drawn(M, N, causal)
    run = HopperForward(problem, inputs)
    assert run.nan_fixup is not None
    assert inputs.parts is not None
    o, lse = torch.full_like(inputs.q, 7.0), torch.full((2, 4, M), float("nan"))
    run.nan_fixup(*inputs[:3], inputs.parts.toeplitz, None, None, None, o, None, lse, None)
    return o, lse, *cpu.prepare["forward"](problem, inputs)(inputs)[:2]


def words_in_memory(scale: float, step: int) -> tuple[Tensor, Tensor, Tensor]:
    """A vector (2, 3, 1, 700), of strides of its own, what `pairs_kernel` makes of it, (6, width, 2), a gradient."""
    from tilewise.backends.gluon.sm90.common.toeplitz import Pairs

    problem, _ = drawn(40, 40, False)
    vector = torch.randn(2, 3, 1, 2 * 700)[..., ::2]
    vector[0, 1, 0, :4] = torch.tensor([torch.inf, -torch.inf, 3e38, -3e38])
    pairs = Pairs(problem, vector, 1 / scale, step)
    gradient = torch.full((2, 3, 1, pairs.empty().shape[1]), torch.nan)
    words = pairs(vector, gradient)
    return vector.contiguous(), words.view(torch.float32).view(6, -1, 2), gradient


def far_stats(causal: bool, linear: bool) -> tuple[Any, ...]:
    """The LSE, what a backward has before it runs, the numbers below and above, and the queries of a tile."""
    from tilewise.backends.gluon.sm90.backward.launch import HopperBackward

    problem, inputs = drawn(300, 900, causal, linear)
    lse = torch.randn(2, 4, 300)
    lse[1, 1, 7] = -torch.inf
    outputs = Outputs(inputs.q, lse)
    run = HopperBackward(problem, inputs, outputs, outputs, Needs(True, True, True, False, toeplitz=True))
    assert run.pairs is not None
    assert inputs.parts is not None
    vector = inputs.parts.toeplitz
    assert vector is not None
    stats, _, _ = run.buffers(inputs.q)
    stats.fill_(float("nan"))
    run.toeplitz.begin(run.pairs, vector, lse, stats)
    return lse, stats, vector[..., 0], vector[..., -1], run.block_m


def reaches(problem: Problem, inputs: Inputs, do: Tensor | None) -> Tensor | None:
    """What of far tiles counts, of a forward, or with a ``do`` of a backward; None where nobody asks, as small calls do
    here, and not in what this process runs next."""
    from tilewise.backends.gluon import toeplitz

    usual, toeplitz.UNDERFLOW_FROM = toeplitz.UNDERFLOW_FROM, 1024
    try:
        return _reaches(problem, inputs, do)
    finally:
        toeplitz.UNDERFLOW_FROM = usual


def _reaches(problem: Problem, inputs: Inputs, do: Tensor | None) -> Tensor | None:
    from tilewise.backends.gluon.sm90.backward import launch as backward_launch
    from tilewise.backends.gluon.sm90.common import config
    from tilewise.backends.gluon.sm90.common.toeplitz import Pairs
    from tilewise.backends.gluon.sm90.common.underflow import Reach
    from tilewise.backends.gluon.sm90.forward import launch

    assert inputs.parts is not None
    vector = inputs.parts.toeplitz
    assert vector is not None
    if do is None:
        c: Any = launch._compiled(problem, config.forward_config(problem), False)
    else:
        chosen = config.backward_config(problem)
        c = backward_launch._compiled(problem, chosen, config.backward_width(problem), False)
    if not c.UNDERFLOWS.value:
        return None
    pairs = Pairs(problem, vector, 1.0 / problem.score.scale, 1 if do is None else -1)(vector)
    return Reach(problem, inputs, c, do)(*inputs[:3], pairs, do)
