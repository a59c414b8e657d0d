"""From a call to what computes it: its Problem, the plan, and what the plan's backend prepared, kept for the next.

What computes a call is kept under all that a Problem and a backend read of its tensors, and under its `Terms`: a second
call is one look-up.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewise.backends import address, empty_output, lse_dtype, sink_gradient
from tilewise.backends.protocol import Backward, Forward, Gradients, Inputs, Needs, Outputs
from tilewise.ops.runtime.prepared import Prepared
from tilewise.plan import Plan, make_plan
from tilewise.problem import Problem, irregular
from tilewise.score.terms import Terms
from tilewise.structure import MOST_VARIANTS, Structure, Variants, structure_of, terms_key

forwards: Prepared[Forward] = Prepared()
backwards: Prepared[Backward] = Prepared()
structures: Prepared[Variants] = Prepared()  # of those that can be resized


def describe(inputs: Inputs, terms: Terms, **more: Any) -> Problem:
    if (inputs.seed is None) == (terms.dropout > 0):
        raise ValueError("seed: goes with dropout, and dropout with a seed")
    return Problem.of(*inputs, terms.score, deterministic=terms.deterministic, exact=terms.exact, **more)


def forward_of(inputs: Inputs, terms: Terms) -> Forward:
    """What computes a forward of ``inputs``, and of all that lie as they do."""
    key = (layouts(*inputs.tensors()), terms)
    run = forwards.get(key)
    if run is None:
        structure = structure_of(inputs)
        run = None if structure is None else forward_like(structure, inputs, terms)
        if run is None:
            problem = describe(inputs, terms, irregular=_irregular(inputs))
            run = _prepare_forward(make_plan(problem, terms.backend), inputs)
            if structure is not None:
                _keep_variant(("forward", structure.key, terms_key(terms)), problem, run)
        forwards.keep(key, run)
    return run


def forward_like(structure: Structure, inputs: Inputs, terms: Terms) -> Forward | None:
    """What computes a forward of ``inputs``, of this structure, made from what computes another one of it; None where
    there is none."""
    variants = structures.get(("forward", structure.key, terms_key(terms)))
    return None if variants is None else variants.resized(structure, terms, inputs)


def _keep_variant(key: tuple, problem: Problem, run: Any) -> None:
    if getattr(run, "resizable", False):
        variants = structures.get(key) or structures.keep(key, Variants([]))
        if len(variants.prepared) < MOST_VARIANTS:
            variants.prepared.append((problem, run))


def backward_of(inputs: Inputs, outputs: Outputs, cotangents: Outputs, terms: Terms, needs: Needs) -> Backward:
    """What computes a backward, likewise."""
    key = (layouts(*inputs.tensors(), *outputs, *cotangents), terms, needs)
    run = backwards.get(key)
    if run is None:
        structure, variants = structure_of(inputs, *outputs, *cotangents), None
        if structure is not None:
            alike = "backward", structure.key, terms_key(terms), needs
            variants = structures.get(alike)
        if structure is not None and variants is not None:
            run = variants.resized(structure, terms, inputs, outputs, cotangents, needs)
        if run is None:
            names = _irregular(inputs, cotangents.o)
            grads = {"bias_grad": needs.bias, "sink_grad": needs.sink, "part_grads": needs.parts}
            problem = describe(inputs, terms, **grads, irregular=names)
            run = _prepare_backward(make_plan(problem, terms.backend), inputs, outputs, cotangents, needs)
            if structure is not None:
                _keep_variant(alike, problem, run)
        backwards.keep(key, run)
    return run


def layouts(*tensors: Tensor | None) -> tuple:
    """Their layouts, as `tilewise.backends` means it; a CPU's backends read any address alike."""
    return tuple([
        None if x is None else (x.shape, x.dtype, x.device, x.stride(), 0 if x.is_cpu else address(x) % 16)
        for x in tensors
    ])  # fmt: skip


def _irregular(inputs: Inputs, do: Tensor | None = None) -> tuple[str, ...]:
    """On the CPU, whose backends read any strides, none."""
    return () if inputs.q.is_cpu else irregular(*inputs[:4], do)


def _prepare_forward(plan: Plan, inputs: Inputs) -> Forward:
    return _empty_forward if plan.problem.empty else plan.module.prepare["forward"](plan.problem, inputs)


def _empty_forward(inputs: Inputs) -> Outputs:
    q = inputs.q
    lse = q.new_full(q.shape[:3], -torch.inf, dtype=lse_dtype(q.dtype))
    if inputs.sink is not None:
        lse.copy_(inputs.sink.expand_as(lse))
        if inputs.lengths is not None and inputs.lengths.cu_q is not None:  # rows past the last sequence have no sink
            lse.masked_fill_(torch.arange(q.shape[2], device=q.device) >= inputs.lengths.cu_q[-1], -torch.inf)
    return Outputs(empty_output(q, inputs.v.shape[3]).zero_(), lse)


def _empty_backward(inputs: Inputs, outputs: Outputs, cotangents: Outputs, needs: Needs) -> Gradients:
    q, k, v, bias, _, sink, parts, *_ = inputs
    dq, dk, dv, dbias = (
        torch.zeros_like(x) if need and x is not None else None
        for x, need in zip((q, k, v, bias), needs[:4], strict=True)
    )
    dsink = None
    if needs.sink and sink is not None:
        assert outputs.lse is not None
        dlse = torch.zeros_like(outputs.lse) if cotangents.lse is None else cotangents.lse
        nothing = outputs.lse == -torch.inf
        dsink = sink_gradient(sink, outputs.lse.masked_fill(nothing, torch.inf), dlse.masked_fill(nothing, 0.0))
    dparts = {name: torch.zeros_like(getattr(parts, name)) for name in needs.parts}
    return Gradients(dq, dk, dv, dbias, dsink, **dparts)


def _prepare_backward(plan: Plan, inputs: Inputs, outputs: Outputs, cotangents: Outputs, needs: Needs) -> Backward:
    problem = plan.problem
    if problem.empty:
        return lambda inputs, outputs, cotangents: _empty_backward(inputs, outputs, cotangents, needs)
    return plan.backward_module.prepare["backward"](problem, inputs, outputs, cotangents, needs)
