"""Tangents and second derivatives of a call, dense or packed: a packed batch is one dense call after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from tilewise.backends import Gradients, Inputs, Needs, Outputs, empty_output, lse_dtype
from tilewise.backends.protocol import Tangents
from tilewise.backends.sequences import DenseCall, dense_calls, shared_names
from tilewise.derivatives.second import Second, dense_second
from tilewise.derivatives.tangents import dense_tangents
from tilewise.spec.operands import PART_WORDS
from tilewise.spec.problem import Problem


def tangents(
    problem: Problem, inputs: Inputs, given: Tangents,
    dense: Callable[..., tuple[Tensor, Tensor]] = dense_tangents,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the tangents of o and the LSE; 0 for rows of no sequence.

    given: tangents of the operands, in their shapes. None is zero. dense: the function for a dense call.
    """
    with _products(problem):
        if problem.totals is None:
            return dense(problem, inputs.with_matrices(), with_matrix(given))
        o, lse = _zeros(problem, inputs)
        for x in dense_calls(problem, inputs):
            found_o, found_lse = dense(x.problem, x.inputs, _of(x, given))
            x.part("q", o).copy_(found_o)
            x.part("q", lse).copy_(found_lse)
        return o, lse


def second(
    problem: Problem, inputs: Inputs, given: Tangents, cotangents: Outputs, needs: Needs,
    dense: Callable[..., Second] = dense_second,
) -> Second:  # fmt: skip
    """Return the tangents of the gradients that are needed, and of o and the LSE.

    given: tangents of the operands. cotangents: of o and of the LSE, which may be None; they are held fixed.
    dense: the function for a dense call.
    """
    _check_order(problem, needs)
    with _products(problem):
        if problem.totals is None:
            found = dense(problem, inputs.with_matrices(), with_matrix(given), cotangents, needs)
            dbias = found.gradients.bias
            if dbias is None or inputs.bias is None:
                return found
            return found._replace(gradients=found.gradients._replace(bias=dbias.view(inputs.bias.shape)))
        o, lse = _zeros(problem, inputs)
        named = dict(zip(Needs._fields, inputs.differentiable(), strict=True))
        sums = {
            name: torch.zeros_like(x, dtype=lse_dtype(problem.dtype))
            for name, x in named.items()
            if x is not None and getattr(needs, name)
        }
        for x in dense_calls(problem, inputs, wide=shared_names(problem, inputs) & sums.keys()):
            own = Outputs(*(None if y is None else x.part("q", y) for y in cotangents))  # type: ignore[arg-type]
            found = dense(x.problem, x.inputs, _of(x, given), own, needs)
            x.part("q", o).copy_(found.o)
            x.part("q", lse).copy_(found.lse)
            for name, total in sums.items():
                x.part(name, total).add_(getattr(found.gradients, name))
        grads = {name: torch.empty_like(named[name]).copy_(x) for name, x in sums.items()}
        return Second(Gradients(*map(grads.get, Gradients._fields)), o, lse)


def _check_order(problem: Problem, needs: Needs) -> None:
    """Raise an error if a sum must have an order and PyTorch's operator for it has none on a GPU."""
    parts = problem.parts
    if not problem.deterministic or problem.device == "cpu" or parts is None:
        return
    for name in needs.parts:
        if name in (*parts.shifts, *parts.buckets):
            raise NotImplementedError(
                f"deterministic: the second derivative by {PART_WORDS[name]}, with buckets or with positions on the "
                "device, has no deterministic sum on a GPU yet; pass deterministic=False"
            )


def with_matrix(given: Tangents) -> Tangents:
    """Return the tangents with that of a bias of runs as `Inputs.with_matrices` has the bias."""
    return given if given.bias is None or given.bias.dim() == 4 else given._replace(bias=given.bias.squeeze(1))


def _of(x: DenseCall, given: Tangents) -> Tangents:
    """Return the tangents of the operands of one dense call."""
    pairs = zip(Tangents._fields, given, strict=True)
    return Tangents(*(None if tangent is None else x.part(name, tangent) for name, tangent in pairs))


def _zeros(problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor]:
    o = empty_output(inputs.q, problem.value_dim).zero_()
    return o, o.new_zeros(o.shape[:3], dtype=lse_dtype(o.dtype))


@contextmanager
def _products(problem: Problem) -> Iterator[None]:
    """Compute products in the dtype of the sums: no autocast, and with `Problem.exact` no TF32."""
    matmul = torch.backends.cuda.matmul
    setting, strict = matmul.fp32_precision, problem.exact and problem.device == "cuda"
    with torch.autocast(problem.device, enabled=False):
        try:
            if strict:
                matmul.fp32_precision = "ieee"
            yield
        finally:
            if strict:
                matmul.fp32_precision = setting
