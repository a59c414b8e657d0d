"""Prepared passes of calls, cached by layout: their Problem, the plan, and the backend's pass.

The key of a prepared pass has all that a Problem and a backend read of the tensors, and the `ScoreNumbers`; a second
call is one lookup.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tilewise.backends import (
    blank_statistics,
    empty_low_bits,
    empty_output,
    lse_dtype,
    sink_gradient,
)
from tilewise.backends.protocol import JVP, Backward, Forward, Gradients, Inputs, Needs, Outputs, Tangents
from tilewise.cache import calls
from tilewise.derivatives import packed
from tilewise.operator.structure import Layout, Structure, Variants, layouts, restored_layouts, structure_of, terms_key
from tilewise.operator.views import with_rows, without_rows
from tilewise.planner import Plan, make_plan
from tilewise.spec.problem import Problem, irregular
from tilewise.spec.score import ScoreNumbers


def describe(inputs: Inputs, terms: ScoreNumbers, **more: Any) -> Problem:
    """Return the Problem of a call; raises its errors."""
    if (inputs.seed is None) == (terms.dropout > 0):
        raise ValueError("seed: goes with dropout, and dropout with a seed")
    return Problem.of(*inputs, terms.score, deterministic=terms.deterministic, exact=terms.exact, **more)


def forward_of(inputs: Inputs, terms: ScoreNumbers) -> Forward:
    """Return the prepared forward for ``inputs`` and all inputs of equal layout."""
    found = layouts(*inputs.tensors())
    key = ("forward", found, terms)
    run: Forward | None = calls.get(key)
    if run is None:
        structure = _structure(inputs, found)
        run = _resized_forward(structure, inputs, terms)
        if run is None:
            problem = describe(inputs, terms, irregular=_irregular(inputs))
            run = _prepare_forward(make_plan(problem, terms.backend), inputs)
            if structure is not None and _keep_variant(_variants_key("forward", structure, terms), problem, run):
                run = _resized_forward(structure, inputs, terms) or run
        calls.put(key, run)
    return run


def _resized_forward(structure: Structure | None, inputs: Inputs, terms: ScoreNumbers) -> Forward | None:
    variants = None if structure is None else forward_variants(structure, terms)
    return None if variants is None or structure is None else variants.resized(structure, terms, inputs)


def _structure(inputs: Inputs, found: tuple[Layout | None, ...]) -> Structure | None:
    """Return the `Structure` of a call, or None; found: the `layouts` of all tensors."""
    _, _, _, _, _, _, parts, seed, lengths, tiles = inputs
    if _repeats(inputs):
        return None
    return structure_of(*found) if parts is seed is lengths is tiles is None else None  # type: ignore[arg-type]


def forward_variants(structure: Structure, terms: ScoreNumbers) -> Variants | None:
    """Return the prepared forwards of this structure that can be resized, or None."""
    return calls.get(_variants_key("forward", structure, terms))


def _variants_key(name: str, structure: Structure, terms: ScoreNumbers, *more: Any) -> tuple:
    return "variants", name, structure.key, terms_key(terms), *more


def _keep_variant(key: tuple, problem: Problem, run: Any) -> bool:
    """Return True if the pass is kept as a variant to resize, for other lengths and its own: a resized pass checks less
    and is faster."""
    if not getattr(run, "resizable", False):
        return False
    variants: Variants = calls.get(key) or calls.put(key, Variants([]))
    return variants.add(problem, run)


def backward_of(
    inputs: Inputs, outputs: Outputs, cotangents: Outputs, terms: ScoreNumbers, needs: Needs,
    forward: Forward | None = None,
) -> Backward:  # fmt: skip
    """Return the prepared backward for tensors of this layout.

    forward: the prepared forward that took inputs of these layouts; a hook may have saved and restored them with other
    strides, at other addresses. One that `takes_rows` may have taken the caller's shapes.
    """
    tensors = (*inputs.tensors(), outputs.o, outputs.lse, cotangents.o, cotangents.lse)
    if outputs.o_low is not None:  # with dropout: no structure
        tensors = *tensors, outputs.o_low
    found = layouts(*tensors) if forward is None else restored_layouts(tensors)
    key = ("backward", found, terms, needs) if forward is None else ("backward", found, forward, needs)
    run: Backward | None = calls.get(key)
    if run is None:
        if inputs.q.dim() == 3:
            rows = without_rows(inputs, outputs, cotangents)
            return calls.put(key, _for_rows(backward_of(*rows, terms, needs)))
        terms = terms._replace(statistics=0)  # of the forward alone
        found, structure = layouts(*tensors), None
        if len(found) == 10 and not _repeats(inputs):
            structure = structure_of(*found)  # type: ignore[arg-type]
        if structure is not None:
            alike = _variants_key("backward", structure, terms, needs)
            variants: Variants | None = calls.get(alike)
            if variants is not None:
                run = variants.resized(structure, terms, inputs, outputs, cotangents, needs)
        if run is None:
            names = _irregular(inputs, cotangents.o)
            problem = describe(inputs, terms, **needs.of_problem, irregular=names)
            run = _prepare_backward(make_plan(problem, terms.backend), inputs, outputs, cotangents, needs)
            if structure is not None and _keep_variant(alike, problem, run):
                return run
        calls.put(key, run)
    return run


def tangents_of(inputs: Inputs, outputs: Outputs, given: Tangents, terms: ScoreNumbers) -> JVP:
    """Return the prepared tangents for tensors of this layout: a backend's kernel, else `packed.tangents`."""
    key = ("tangents", layouts(*inputs.tensors(), *given, outputs.o), terms)
    run: JVP | None = calls.get(key)
    if run is None:
        problem = describe(inputs, terms)
        run = calls.put(key, _prepare_tangents(make_plan(problem, terms.backend), inputs, outputs, given))
    return run


def derivatives_of(plan: Plan) -> Mapping[str, Any]:
    """Return what a backend has instead of `packed.tangents` and `packed.second`."""
    found: Mapping[str, Any] = getattr(plan.module, "derivatives", {})
    return found


def _for_rows(run: Backward) -> Backward:
    """Return a backward for the caller's shapes of a packed batch."""
    if getattr(run, "takes_rows", False):
        return run
    return lambda *tensors: with_rows(run(*without_rows(*tensors)))


def _irregular(inputs: Inputs, do: Tensor | None = None) -> tuple[str, ...]:
    """Return the operands with irregular strides; none on the CPU, where backends read any strides."""
    return () if inputs.q.is_cpu else irregular(*inputs[:4], do)


def _prepare_forward(plan: Plan, inputs: Inputs) -> Forward:
    if plan.problem.empty:
        return partial(_empty_forward, plan.problem)
    run = plan.module.prepare["forward"](plan.problem, inputs.with_matrices())
    return (lambda inputs: run(inputs.with_matrices())) if _repeats(inputs) else run


def _repeats(inputs: Inputs) -> bool:
    """True if the mask is (1, n, H, M, N) or the bias (n, 1, H, M, N), see `check_repeated`, `check_in_runs`."""
    bias, mask = inputs.bias, inputs.mask
    return (mask is not None and mask.dim() == 5) or (bias is not None and bias.dim() == 5)


def _like_inputs(found: Gradients, inputs: Inputs) -> Gradients:
    """Return the gradients with that of the bias in the bias's shape."""
    if found.bias is None or inputs.bias is None or inputs.bias.dim() != 5:
        return found
    return found._replace(bias=found.bias.unsqueeze(1))


def _prepare_tangents(plan: Plan, inputs: Inputs, outputs: Outputs, given: Tangents) -> JVP:
    problem = plan.problem
    pairs = zip(given, inputs.differentiable(), strict=True)
    alike = all(x is None or y is None or x.dtype == y.dtype for x, y in pairs)  # PyTorch allows other dtypes
    if problem.empty or not alike or plan.tangents_declined is not None:
        compute = derivatives_of(plan).get("tangents", packed.tangents)
        return lambda inputs, outputs, given: Outputs(*compute(problem, inputs, given))
    make = plan.tangents_module.prepare["tangents"]
    run: JVP = make(problem, inputs.with_matrices(), outputs, packed.with_matrix(given))
    if not _repeats(inputs):
        return run
    return lambda inputs, outputs, given: run(inputs.with_matrices(), outputs, packed.with_matrix(given))


def _empty_forward(problem: Problem, inputs: Inputs) -> Outputs:
    q = inputs.q
    lse = q.new_full(q.shape[:3], -torch.inf, dtype=lse_dtype(q.dtype))
    if inputs.sink is not None:
        lse.copy_(inputs.sink.expand_as(lse))
        if inputs.lengths is not None and inputs.lengths.cu_q is not None:  # rows past the last sequence have no sink
            lse.masked_fill_(torch.arange(q.shape[2], device=q.device) >= inputs.lengths.cu_q[-1], -torch.inf)
    o = empty_output(q, inputs.v.shape[3]).zero_()
    o_low = empty_low_bits(o, problem)
    return Outputs(o, lse, None if o_low is None else o_low.zero_(), blank_statistics(o, problem))


def _empty_backward(inputs: Inputs, outputs: Outputs, cotangents: Outputs, needs: Needs) -> Gradients:
    pairs = zip(Needs._fields, needs, inputs.differentiable(), strict=True)
    found = {name: torch.zeros_like(x) for name, need, x in pairs if need and x is not None}
    if "sink" in found and inputs.sink is not None:
        assert outputs.lse is not None
        dlse = torch.zeros_like(outputs.lse) if cotangents.lse is None else cotangents.lse
        nothing = outputs.lse == -torch.inf
        lse, dlse = outputs.lse.masked_fill(nothing, torch.inf), dlse.masked_fill(nothing, 0.0)
        found["sink"] = sink_gradient(inputs.sink, lse, dlse)
    return Gradients(*map(found.get, Gradients._fields))


def _prepare_backward(plan: Plan, inputs: Inputs, outputs: Outputs, cotangents: Outputs, needs: Needs) -> Backward:
    problem = plan.problem
    if problem.empty:
        return lambda inputs, outputs, cotangents: _empty_backward(inputs, outputs, cotangents, needs)
    run = plan.backward_module.prepare["backward"](problem, inputs.with_matrices(), outputs, cotangents, needs)
    if not _repeats(inputs):
        return run
    return lambda inputs, outputs, cotangents: _like_inputs(run(inputs.with_matrices(), outputs, cotangents), inputs)
