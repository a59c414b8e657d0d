"""The operator ``tilewise::attention`` and its autograd; `tilewise.operator.derivatives` has its derivatives.

`tilewise.operator.dispatch` computes both; torch.compile does not trace into them. An eager call on plain tensors uses
an autograd.Function with the same two functions instead of the dispatcher.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler

from tilewise.backends import (
    INPUT_NAMES,
    Inputs,
    Needs,
    Outputs,
    empty_low_bits,
    empty_output,
    empty_statistics,
    lse_dtype,
)
from tilewise.backends.protocol import Tangents
from tilewise.operator import onnx as plain
from tilewise.operator.custom_op import Operator
from tilewise.operator.derivatives import (
    gradients_by_operator,
    gradients_of,
    operator_lse_dtype,
    public_lse,
    tangents_by_operator,
)
from tilewise.operator.dispatch import Forward, describe, forward_of
from tilewise.operator.eager import apply_of, is_differentiated, is_eager, is_eager_backward
from tilewise.operator.tools import announce, recorded
from tilewise.operator.views import Views
from tilewise.spec.score import Score, ScoreNumbers

Found = tuple[Tensor, Tensor | None, Tensor | None]  # o; lse and statistics, or None

# --- the operators, which the dispatcher calls ---


# Operators return tensors only, see `_present` and `gradients_like`.


def _forward(inputs: Inputs, terms: ScoreNumbers) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    o, lse, *others = forward_of(inputs, terms)(inputs)
    lse = None if lse is None else lse.to(operator_lse_dtype(inputs))
    return o, lse, *_present(o, *others)


def _forward_fake(inputs: Inputs, terms: ScoreNumbers) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    problem = describe(inputs, terms)  # or its error
    q = inputs.q
    o = empty_output(q, inputs.v.shape[3])
    lse = q.new_empty(q.shape[:3], dtype=operator_lse_dtype(inputs))
    return o, lse, *_present(o, empty_low_bits(o, problem), empty_statistics(o, problem))


def _present(o: Tensor, o_low: Tensor | None, statistics: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return low bits of o and statistics of a call, each an empty tensor if it has none."""
    low = o.new_empty(0, dtype=torch.int16) if o_low is None else o_low
    return low, o.new_empty(0, dtype=lse_dtype(o.dtype)) if statistics is None else statistics


def _setup_operator(ctx: Any, inputs: Inputs, terms: ScoreNumbers, output: tuple[Tensor, ...]) -> None:
    *saved, statistics = output
    _setup(ctx, inputs, terms, saved)
    ctx.mark_non_differentiable(statistics)
    ctx.save_for_forward(*inputs.tensors(), *saved)


def _setup(ctx: Any, inputs: Inputs, terms: ScoreNumbers, saved: Sequence[Tensor | None]) -> None:
    """Save what a backward reads: the inputs, o, the LSE, low bits of o."""
    ctx.terms = terms
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs.tensors(), *saved)


def _differentiate(ctx: Any, do: Tensor | None, dlse: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    """Return the gradients of `Inputs.flat`."""
    if do is None and dlse is None:
        return (None,) * len(INPUT_NAMES)
    asked = dict(zip(INPUT_NAMES, ctx.needs_input_grad, strict=False))
    *given, o, lse, o_low = ctx.saved_tensors
    needs = Needs(*[asked[name] for name in Needs._fields])
    grads = gradients_by_operator(do, dlse, Inputs.of(given), (o, lse, o_low), ctx.terms, needs)
    named = dict(zip(Needs._fields, grads, strict=True))
    return tuple(named.get(name) for name in INPUT_NAMES)


def _tangents(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the tangents of the outputs from those of all arguments."""
    named = dict(zip(INPUT_NAMES, tangents, strict=False))
    given = Tangents(*[named[name] for name in Tangents._fields])
    *tensors, o, lse, o_low = ctx.saved_tensors
    return *tangents_by_operator(Inputs.of(tensors), given, (o, lse, o_low), ctx.terms), None, None


def _plain(inputs: Inputs, terms: ScoreNumbers) -> tuple[Tensor, Tensor]:
    return plain.attention(*inputs, terms.score)


ATTENTION = Operator(
    "attention", (Inputs, ScoreNumbers), 4, _forward, _forward_fake, setup=_setup_operator, backward=_differentiate,
    tangents=_tangents, plain=_plain,
)  # fmt: skip
announce("attention", "attention_backward")


# --- eager calls ---


class _EagerAttention(torch.autograd.Function):
    """Autograd function ``*tensors, call -> o`` or ``o, lse``, and statistics if the call has some. The tensors are
    those of `Needs`, all or those before the bias components; call is (inputs, terms, run, views, return_lse). Autograd
    does not record the views."""

    @staticmethod
    def forward(ctx, *arguments):
        inputs, terms, run, views, return_lse = arguments[-1]
        compute = _profiled(run, inputs) if profiler._is_profiler_enabled else run
        output = compute(inputs if views is None else views.inputs(inputs))
        o, lse, o_low, statistics = output
        _setup(ctx, inputs, terms, (o, lse, o_low))
        ctx.run, ctx.views = run, views
        if views is not None:
            o, lse, statistics = views.outputs(o, lse, statistics)
        if statistics is not None:
            ctx.mark_non_differentiable(statistics)
            return o, lse if lse is None else public_lse(lse, o), statistics
        return (o, public_lse(lse, o)) if return_lse and lse is not None else o

    @staticmethod
    def backward(ctx, do, dlse=None, _=None):
        needs = ctx.needs_input_grad[:-1]
        if do is None and dlse is None:
            return (None,) * (len(needs) + 1)
        *tensors, o, lse, o_low = ctx.saved_tensors
        views, saved = ctx.views, (o, lse, o_low)
        given = inputs = Inputs.of(tensors)
        if views is not None:
            inputs = views.inputs(given)
            do, dlse = views.cotangents(do, dlse)
        call = do, dlse, inputs, saved, ctx.terms, Needs(*needs)
        if not is_eager_backward(do, dlse):
            grads = gradients_by_operator(*call)
        elif profiler._is_profiler_enabled:
            names = do, dlse, *inputs.tensors(), *saved
            grads = recorded("tilewise::attention_backward", names, gradients_of, *call, ctx.run)
        else:
            grads = gradients_of(*call, ctx.run)
        if views is not None:
            grads = views.gradients(grads, given)
        return *grads[: len(needs)], None


_apply = apply_of(_EagerAttention)


def _profiled(run: Forward, inputs: Inputs) -> Forward:
    """Return ``run``, or a function that is also recorded as the operator if a profiler is active."""
    return partial(recorded, "tilewise::attention", inputs.tensors(), run) if profiler._is_profiler_enabled else run


def attention_op(
    inputs: Inputs, score: Score, deterministic: bool, backend: str, *, return_lse: bool = True, exact: bool = False
) -> Found:
    """Return what a checked call finds, differentiable in all inputs but the mask, through o and lse. Without
    ``return_lse``, lse is undefined. exact: see `Problem`."""
    terms = ScoreNumbers.of(score, deterministic, backend, exact)
    if not is_eager(inputs.tensors()):
        o, lse, *more = ATTENTION.traced_call(*inputs.flat(), *terms)
        return o, public_lse(lse, o), more[1] if terms.statistics else None
    return eager_attention(inputs, terms, forward_of(inputs, terms), None, return_lse)


def attention_outputs(
    inputs: Inputs, score: Score, deterministic: bool, backend: str, *, saved_lse: bool = False
) -> Outputs:  # fmt: skip
    """Return the `Outputs` of `attention_op` without autograd, for callers with their own backward. With ``saved_lse``
    the LSE has the dtype that the backward gets, see `saved_lse_dtype`."""
    terms = ScoreNumbers.of(score, deterministic, backend)
    if is_eager(inputs.tensors()):
        o, lse, o_low, _ = _profiled(forward_of(inputs, terms), inputs)(inputs)
    else:
        o, lse, o_low, _ = ATTENTION.traced_call(*inputs.flat(), *terms)
        o_low = o_low if o_low.shape == o.shape else None
    return Outputs(o, lse if lse is None or saved_lse else public_lse(lse, o), o_low)


def eager_attention(inputs: Inputs, terms: ScoreNumbers, run: Forward, views: Views | None, return_lse: bool) -> Found:
    """Return `attention_op` of inputs that pass `is_eager`, computed by ``run`` from `forward_of`.

    With ``views``, ``run`` takes views of the inputs.
    """
    tensors = inputs.to_differentiate()
    if not is_differentiated(tensors):
        compute = _profiled(run, inputs) if profiler._is_profiler_enabled else run
        o, lse, _, statistics = compute(inputs if views is None else views.inputs(inputs))
        if views is not None:
            o, lse, statistics = views.outputs(o, lse, statistics)
        return o, public_lse(lse, o) if return_lse and lse is not None else None, statistics
    found = _apply(*tensors, (inputs, terms, run, views, return_lse))
    if terms.statistics:
        return found
    return (*found, None) if return_lse else (found, None, None)
