"""The two operators, ``tilewise::attention`` and ``tilewise::attention_backward``, and how they meet autograd.

This module alone knows torch.autograd and torch.library. Both operators describe their call as a Problem, take its
Plan and run the plan's backend; under torch.compile they are opaque and their fake kernels give shapes only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.backends import Inputs, Needs, Outputs, empty_output, lse_dtype
from tilewise.plan import make_plan
from tilewise.problem import Problem
from tilewise.score.terms import Band, Score

_library = torch.library.Library("tilewise", "DEF")

# The score terms that both operators take, as the dispatcher can carry them.
_TERMS = "SymInt? lo, SymInt? hi, float scale, float? softcap, bool deterministic, str backend"
_library.define(f"attention(Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? mask, {_TERMS}) -> (Tensor, Tensor)")
_library.define(
    "attention_backward(Tensor? do, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? mask, "
    f"Tensor o, Tensor lse, {_TERMS}, bool[] needs) -> (Tensor, Tensor, Tensor, Tensor)"
)


def _problem(inputs: Inputs, terms: tuple, bias_grad: bool = False) -> Problem:
    lo, hi, scale, softcap, deterministic, _ = terms
    score = Score(scale, softcap, Band(lo, hi))
    return Problem.of(*inputs, score, bias_grad=bias_grad, deterministic=deterministic)


def _forward(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: Tensor | None, *terms) -> tuple[Tensor, Tensor]:
    inputs = Inputs(q, k, v, bias, mask)
    problem = _problem(inputs, terms)
    if problem.empty:
        lse = q.new_full(q.shape[:3], -torch.inf, dtype=lse_dtype(q.dtype))
        return empty_output(q, v.shape[3]).zero_(), lse
    o, lse = make_plan(problem, terms[-1]).module.forward(problem, inputs)
    return o, lse


def _forward_fake(q, k, v, bias, mask, *terms):
    _problem(Inputs(q, k, v, bias, mask), terms)
    return empty_output(q, v.shape[3]), q.new_empty(q.shape[:3], dtype=lse_dtype(q.dtype))


def _backward(do, dlse, q, k, v, bias, mask, o, lse, *terms_and_needs):
    *terms, wanted = terms_and_needs
    inputs, needs = Inputs(q, k, v, bias, mask), Needs(*wanted)
    problem = _problem(inputs, tuple(terms), needs.bias)
    if problem.empty:
        grads = [torch.zeros_like(x) if need else None for x, need in zip(inputs, needs, strict=False)]
    else:
        cotangents = Outputs(torch.zeros_like(o) if do is None else do, dlse)
        backend = make_plan(problem, terms[-1]).module
        grads = backend.backward(problem, inputs, Outputs(o, lse), cotangents, needs)
    # An operator returns tensors only: an empty one stands for a gradient that nobody needs.
    return tuple(q.new_empty(0) if g is None else g for g in grads)


def _backward_fake(do, dlse, q, k, v, bias, mask, o, lse, *terms_and_needs):
    wanted = terms_and_needs[-1]
    inputs = (q, k, v, bias)
    return tuple(torch.empty_like(x) if need else q.new_empty(0) for x, need in zip(inputs, wanted, strict=True))


for _name, _real, _fake in (
    ("attention", _forward, _forward_fake),
    ("attention_backward", _backward, _backward_fake),
):
    _library.impl(_name, _real, "CompositeExplicitAutograd")
    torch.library.register_fake(f"tilewise::{_name}", _fake, lib=_library)


def _setup_context(ctx, inputs, output):
    q, k, v, bias, mask, *ctx.terms = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, bias, mask, *output)


def _autograd_backward(ctx, do, dlse):
    none = (None,) * (1 + len(ctx.terms))  # the mask and the score terms
    if do is None and dlse is None:
        return None, None, None, None, *none
    needs = list(ctx.needs_input_grad[:4])
    grads = torch.ops.tilewise.attention_backward(do, dlse, *ctx.saved_tensors, *ctx.terms, needs)
    return *(g if need else None for g, need in zip(grads, needs, strict=True)), *none


def _no_second_derivative(ctx, *grads):
    raise NotImplementedError("tilewise.attention has no second derivative: its backward cannot be differentiated")


torch.library.register_autograd("tilewise::attention", _autograd_backward, setup_context=_setup_context, lib=_library)
torch.library.register_autograd("tilewise::attention_backward", _no_second_derivative, lib=_library)


def attention_op(inputs: Inputs, score: Score, deterministic: bool, backend: str) -> tuple[Tensor, Tensor]:
    """``(o, lse)`` of a call whose numbers are checked; differentiable in q, k, v and bias, through o and lse."""
    lo, hi = score.band.lo, score.band.hi
    return torch.ops.tilewise.attention(*inputs, lo, hi, score.scale, score.softcap, deterministic, backend)


