"""What a backend is: a module with the members of `Backend`. And what goes in and comes out of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, Protocol

from torch import Tensor

from tilewise.problem import Problem

Pass = Literal["forward", "backward"]


class Inputs(NamedTuple):
    """q (B, H, M, D), k (B, Hkv, N, D), v (B, Hkv, N, Dv); bias and mask (B|1, H|Hkv|1, M|1, N|1) or None; sink
    (B|1, H|1, M|1) or None."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    mask: Tensor | None
    sink: Tensor | None = None


class Outputs(NamedTuple):
    """o (B, H, M, Dv) in q's dtype and the natural-log LSE (B, H, M) in `lse_dtype`; or their cotangents."""

    o: Tensor
    lse: Tensor | None


class Needs(NamedTuple):
    """Which inputs want a gradient."""

    q: bool
    k: bool
    v: bool
    bias: bool
    sink: bool = False


class Gradients(NamedTuple):
    """Gradients in the shape and dtype of their inputs; None where `Needs` is False."""

    q: Tensor | None
    k: Tensor | None
    v: Tensor | None
    bias: Tensor | None
    sink: Tensor | None = None


Forward = Callable[[Inputs], Outputs]
Backward = Callable[[Inputs, Outputs, Outputs], Gradients]  # of inputs, outputs and their cotangents


class Backend(Protocol):
    """What the plan asks of a backend, and how it is run. It gets validated problems that are not empty.

    prepare: for each pass that the backend has, a function that does once for many calls what does not depend on the
    numbers in tensors, and returns what computes the pass,

        "forward":   (problem, inputs) -> `Forward`
        "backward":  (problem, inputs, outputs, cotangents, needs) -> `Backward`

    What it returns serves all tensors of the same layout, and its caller keeps it by that: shape, dtype, strides,
    device, and address modulo 16. Gradients that nobody needs are None.
    """

    prepare: Mapping[Pass, Callable[..., Callable[..., Any]]]

    def declines(self, problem: Problem, work: Pass = "forward") -> str | None:
        """Why it cannot run the pass; None if it can. Where a backward alone is declined, the gradients come from the
        backend that `tilewise.plan.GRADIENTS` names."""

    def prefers(self, problem: Problem) -> str | None:
        """Why it prefers to leave the problem to another, which would be faster; None if it does not. Asked for by name
        it runs all the same."""

    def tiles(self, problem: Problem) -> str:
        """Its tiles in words, for explain()."""


def at_once(compute: Callable[..., Any]) -> Callable[..., Callable[..., Any]]:
    """A member of `Backend.prepare` that prepares nothing: ``compute`` takes the problem, the tensors and, last, what
    else there is."""

    def prepare(problem: Problem, *call: Any) -> Callable[..., Any]:
        return lambda *tensors: compute(problem, *tensors, *call[len(tensors) :])

    return prepare
