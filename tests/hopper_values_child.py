"""What runs in child processes for test_hopper_relative.py and test_hopper_relative_aot.py: the Hopper kernels beside a
bias by distance, compiled, and the one that repairs rows, as Python."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.backends import Inputs, Needs, Outputs, empty_output
from tilewise.spec.bias_components import Parts
from tilewise.spec.problem import Problem
from tilewise.spec.score import Band, Distances, Score


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
        """What differs from the default, as a test id and a name in the ledger."""
        usual = Values()
        words = [f"{name} {x}" for name, x, y in zip(self._fields, self, usual, strict=True) if x != y]
        return "values, " + ", ".join(words).replace("(", "").replace(")", "").replace("torch.", "")

    @property
    def first(self) -> int:
        return 1 - self.count if self.lo is None else self.lo


def call(x: Values, heads: int = 16) -> tuple[Problem, Inputs]:
    """On the meta device, and the target's capability."""
    import aot_child

    def meta(*shape: int, dtype: torch.dtype = x.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

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


def launches(x: Values, backward: bool = False) -> None:
    from tilewise.backends.gluon import sm90
    from tilewise.backends.gluon.sm90.backward import launch as backward_launch
    from tilewise.backends.gluon.sm90.forward import launch

    problem, inputs = call(x)
    assert sm90.declines(problem, "backward" if backward else "forward") is None
    if not backward:
        launch.HopperForward(problem, inputs)(inputs)
        return
    o = empty_output(inputs.q, x.D)
    outputs = Outputs(o, torch.empty(o.shape[:3], dtype=torch.float32, device="meta"))
    needs = Needs(True, True, True, False, query=x.grad)
    backward_launch.HopperBackward(problem, inputs, outputs, outputs, needs)(inputs, outputs, outputs)


def compile_values(x: Values, backward: bool = False) -> Any:
    """Every kernel that the forward, or the backward, launches."""
    import aot_child

    from tilewise.backends.gluon.sm90.common import config

    aot_child._launched.clear()
    launches(x, backward)
    return aot_child._codes(config.SHARED_MEMORY)


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


def repair(M: int, N: int, lo: int, count: int, causal: bool, reverse: bool) -> tuple[Tensor, ...]:
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
    run.nan_fixup(q, k, v, values, None, None, None, o, None, lse)
    return o, lse, *cpu.prepare["forward"](problem, inputs)(inputs)[:2]
