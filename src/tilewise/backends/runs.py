"""Runs of batch elements that share a bias, for backends that take one bias for all: one call after the other.

Operands are views; results are copied into the whole batch's tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.backends import (
    Gradients,
    Inputs,
    Needs,
    Outputs,
    empty_low_bits,
    empty_output,
    empty_statistics,
    lse_dtype,
)
from tilewise.backends.protocol import INPUT_NAMES, OPERANDS
from tilewise.spec.problem import Problem


def forward(compute: Callable[..., Outputs], problem: Problem, inputs: Inputs) -> Outputs:
    """Return ``compute(problem, inputs)``, one run at a time if runs of the batch share a bias."""
    if not problem.bias_in_runs:
        return compute(problem, inputs)
    o = empty_output(inputs.q, problem.value_dim)
    lse = o.new_empty(o.shape[:3], dtype=lse_dtype(o.dtype))
    outputs = Outputs(o, lse, empty_low_bits(o, problem), empty_statistics(o, problem))
    for run in _runs(problem, inputs):
        for whole, x in zip(outputs, compute(run.problem, run.inputs), strict=True):
            if whole is not None and x is not None:
                whole[run.batch].copy_(x)
    return outputs


def backward(
    compute: Callable[..., Gradients], problem: Problem, inputs: Inputs, outputs: Outputs, cotangents: Outputs,
    needs: Needs,
) -> Gradients:  # fmt: skip
    """Return ``compute`` of a backward likewise; gradients that runs share are summed in the LSE's dtype."""
    if not problem.bias_in_runs:
        return compute(problem, inputs, outputs, cotangents, needs)
    named = dict(zip(Needs._fields, inputs.differentiable(), strict=True))
    found = {name: torch.empty_like(x) for name, x in named.items() if x is not None and getattr(needs, name)}
    sums = {name: torch.zeros_like(x, dtype=lse_dtype(x.dtype)) for name, x in found.items() if x.shape[0] == 1}
    for n, run in enumerate(_runs(problem, inputs)):
        own = [Outputs(*[None if x is None else x[run.batch] for x in y]) for y in (outputs, cotangents)]  # type: ignore[arg-type]
        gradients = compute(run.problem, run.inputs, *own, needs)
        for name, whole in found.items():
            x = getattr(gradients, name)
            if name in sums:
                sums[name] += x
            else:
                whole[slice(n, n + 1) if name == "bias" else run.batch].copy_(x)
    found |= {name: x.to(found[name].dtype) for name, x in sums.items()}
    return Gradients(*map(found.get, Gradients._fields))


class _BatchRun(NamedTuple):
    """Dense call of the batch elements ``batch``."""

    batch: slice
    problem: Problem
    inputs: Inputs


def _runs(problem: Problem, inputs: Inputs) -> Iterator[_BatchRun]:
    bias = problem.bias
    assert bias is not None
    count = problem.batch // bias.batch
    for n in range(bias.batch):
        batch = slice(n * count, (n + 1) * count)
        tensors = dict(zip(INPUT_NAMES, inputs.flat(), strict=True))
        own = {name: None if x is None else _own(name, x, batch, problem.batch) for name, x in tensors.items()}
        assert inputs.bias is not None
        own["bias"] = inputs.bias[n : n + 1]
        found = Inputs.of(list(own.values()))
        described = Problem.of(
            *found, problem.score, bias_grad=problem.bias_grad, sink_grad=problem.sink_grad,
            part_grads=() if problem.parts is None else problem.parts.grads, deterministic=problem.deterministic,
            exact=problem.exact,
        )  # fmt: skip
        yield _BatchRun(batch, replace(described, sequence=problem.sequence + batch.start), found)


def _own(name: str, x: Tensor, batch: slice, every: int) -> Tensor:
    """Return a run's part of an operand; of a mask that repeats along the batch a copy."""
    if "B" not in OPERANDS[name].sizes(0) or x.shape[0] == 1:
        return x
    if x.shape[0] == every:
        return x[batch]
    return x[torch.arange(batch.start, batch.stop, device=x.device) % x.shape[0]]
