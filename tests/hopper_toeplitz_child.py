"""What runs in child processes for test_hopper_toeplitz.py and test_hopper_toeplitz_aot.py: the Hopper kernels beside a
Toeplitz bias, compiled, and those of them that are Python elsewhere."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.backends import Inputs, Needs, Outputs, empty_output
from tilewise.problem import Problem
from tilewise.score.parts import Parts
from tilewise.score.terms import Band, Far, Score


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

    def __str__(self) -> str:
        """What differs from the default, as a test id and a name in the ledger."""
        usual = Toeplitz()
        words = [f"{name} {x}" for name, x, y in zip(self._fields, self, usual, strict=True) if x != y]
        return "toeplitz, " + ", ".join(words).replace("(", "").replace(")", "").replace("torch.", "")


def call(x: Toeplitz, heads: int = 16) -> tuple[Problem, Inputs]:
    """On the meta device, and the target's capability."""
    import aot_child

    def meta(*shape: int, dtype: torch.dtype = x.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    batch = 1 if x.shared else 4
    mask = meta(4, 1, x.M, x.M, dtype=torch.bool) if x.masked else None
    inputs = Inputs(
        meta(4, heads, x.M, x.D), meta(4, x.Hkv, x.M, x.D), meta(4, x.Hkv, x.M, x.D), None, mask, None,
        Parts(toeplitz=meta(batch, 1 if x.shared else heads, 1, 2 * x.M - 1, dtype=torch.float32)),
    )  # fmt: skip
    score = Score(x.D**-0.5, None, Band.aligned(x.causal, x.window, 0), toeplitz=Far(-x.far, x.far, x.linear))
    grads = ("toeplitz",) if x.grad else ()
    problem = Problem.of(*inputs, score, part_grads=grads)
    return dataclasses.replace(problem, device="cuda", capability=aot_child._capability), inputs


def launches(x: Toeplitz, backward: bool = False) -> None:
    from tilewise.backends.gluon import sm90
    from tilewise.backends.gluon.sm90 import backward_launch, launch

    problem, inputs = call(x)
    assert sm90.declines(problem, "backward" if backward else "forward") is None
    if not backward:
        launch.Forward(problem, inputs)(inputs)
        return
    o = empty_output(inputs.q, x.D)
    outputs = Outputs(o, torch.empty(o.shape[:3], dtype=torch.float32, device="meta"))
    needs = Needs(True, True, True, False, toeplitz=x.grad)
    backward_launch.Backward(problem, inputs, outputs, outputs, needs)(inputs, outputs, outputs)


def compile_toeplitz(x: Toeplitz, backward: bool = False) -> Any:
    """Every kernel that the forward, or the backward, launches."""
    import aot_child

    from tilewise.backends.gluon.sm90 import config

    aot_child._launched.clear()
    launches(x, backward)
    return aot_child._codes(config.SHARED_MEMORY)
