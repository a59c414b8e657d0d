"""The operators ``tilewise::attention`` and ``tilewise::attention_backward``, and how a call meets autograd.

Both take what computes them from `tilewise.dispatch`; under torch.compile they are opaque. An eager call on plain
tensors takes an autograd.Function around the same two functions instead of the dispatcher.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import profiler

from tilewise.backends import Gradients, Inputs, Needs, Outputs, empty_output, lse_dtype
from tilewise.dispatch import Forward, backward_of, describe, forward_of
from tilewise.ops.runtime import plain
from tilewise.ops.runtime.eager import apply_of, is_differentiated, is_eager, is_eager_backward
from tilewise.ops.runtime.operator import Operator
from tilewise.ops.runtime.tools import announce, recorded
from tilewise.score.terms import Score, Terms


class _Cotangents(NamedTuple):
    do: Tensor | None
    dlse: Tensor | None


class _Saved(NamedTuple):
    o: Tensor
    lse: Tensor


class _Wanted(NamedTuple):
    needs: list[bool]  # see `Needs`


# --- the operators, which the dispatcher calls ---


def _forward(inputs: Inputs, terms: Terms) -> tuple[Tensor, Tensor | None]:
    o, lse = forward_of(inputs, terms)(inputs)
    return o, lse


def _forward_fake(inputs: Inputs, terms: Terms) -> tuple[Tensor, Tensor]:
    describe(inputs, terms)  # or its error
    q = inputs.q
    return empty_output(q, inputs.v.shape[3]), q.new_empty(q.shape[:3], dtype=lse_dtype(q.dtype))


def _backward(
    cotangents: _Cotangents, inputs: Inputs, saved: _Saved, terms: Terms, wanted: _Wanted
) -> tuple[Tensor, ...]:  # fmt: skip
    grads = _gradients(*cotangents, (*inputs, *saved), terms, Needs(*wanted.needs))
    # An operator returns tensors only: an empty one stands for a gradient that nobody needs.
    return tuple(inputs.q.new_empty(0) if g is None else g for g in grads)


def _backward_fake(
    cotangents: _Cotangents, inputs: Inputs, saved: _Saved, terms: Terms, wanted: _Wanted
) -> tuple[Tensor, ...]:  # fmt: skip
    q, k, v, bias, _, sink = inputs
    pairs = zip((q, k, v, bias, sink), wanted.needs, strict=True)
    return tuple(torch.empty_like(x) if need else q.new_empty(0) for x, need in pairs)  # type: ignore[arg-type]


def _gradients(do: Tensor | None, dlse: Tensor | None, saved: Sequence[Any], terms: Terms, needs: Needs) -> Gradients:
    """``saved``: the inputs, o and lse. No cotangent of o is one of zeros."""
    *given, o, lse = saved
    inputs, outputs = Inputs(*given), Outputs(o, lse)
    # resolve_neg: a kernel would not see the sign of a cotangent whose memory holds its negative.
    do = torch.zeros_like(o) if do is None else do.resolve_neg()
    cotangents = Outputs(do, None if dlse is None else dlse.resolve_neg())
    return backward_of(inputs, outputs, cotangents, terms, needs)(inputs, outputs, cotangents)


def _setup(ctx: Any, inputs: Inputs, terms: Terms, output: tuple[Tensor, Tensor | None]) -> None:
    ctx.terms = terms
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs, *output)


def _differentiate(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradients of `Inputs`."""
    q, k, v, bias, _, sink = ctx.needs_input_grad[: len(Inputs._fields)]
    *dqkvb, dsink = _by_operator(ctx, do, dlse, [q, k, v, bias, sink])
    return *dqkvb, None, dsink


def _by_operator(ctx: Any, do: Tensor | None, dlse: Tensor | None, needs: list[bool]) -> tuple[Tensor | None, ...]:
    """`Gradients` by the operator."""
    if do is None and dlse is None:
        return (None,) * len(needs)
    grads = ATTENTION_BACKWARD(do, dlse, *ctx.saved_tensors, *ctx.terms, needs)
    return tuple(g if need else None for g, need in zip(grads, needs, strict=True))


def _plain(inputs: Inputs, terms: Terms) -> tuple[Tensor, Tensor]:
    return plain.attention(*inputs, terms.score)


ATTENTION = Operator(
    "attention", (Inputs, Terms), 2, _forward, _forward_fake, setup=_setup, backward=_differentiate, plain=_plain
)
ATTENTION_BACKWARD = Operator(
    "attention_backward", (_Cotangents, Inputs, _Saved, Terms, _Wanted), 5, _backward, _backward_fake,
    part_of="attention",
)  # fmt: skip
announce("attention", "attention_backward")


# --- eager calls ---


class _EagerAttention(torch.autograd.Function):
    """``q, k, v, bias, sink, call -> o`` or ``o, lse``, where call is (inputs, terms, what computes it, return_lse)."""

    @staticmethod
    def forward(ctx, q, k, v, bias, sink, call):
        inputs, terms, run, return_lse = call
        o, lse = run(inputs)
        _setup(ctx, inputs, terms, (o, lse))
        return (o, lse) if return_lse else o

    @staticmethod
    def backward(ctx, do, dlse=None):
        if not is_eager_backward(do, dlse):
            return *_by_operator(ctx, do, dlse, list(ctx.needs_input_grad[:5])), None
        if do is None and dlse is None:
            return None, None, None, None, None, None
        call = do, dlse, ctx.saved_tensors, ctx.terms, Needs(*ctx.needs_input_grad[:5])
        if profiler._is_profiler_enabled:
            return *recorded("tilewise::attention_backward", (do, dlse, *call[2]), _gradients, *call), None
        return *_gradients(*call), None

    jvp = staticmethod(ATTENTION.refuse_tangents)


_apply = apply_of(_EagerAttention)


def attention_op(
    inputs: Inputs, score: Score, deterministic: bool, backend: str, *, return_lse: bool = True, exact: bool = False
) -> tuple[Tensor, Tensor | None]:
    """``(o, lse)`` of a call whose numbers are checked; differentiable in q, k, v, bias and sink, through o and lse.

    Without ``return_lse`` nobody looks at the lse, and its place may hold anything. exact: see `Problem`.
    """
    terms = Terms.of(score, deterministic, backend, exact)
    if not is_eager(inputs):
        return ATTENTION.watched(*inputs, *terms)
    return eager_attention(inputs, terms, forward_of(inputs, terms), return_lse)


def eager_attention(
    inputs: Inputs, terms: Terms, run: Forward, return_lse: bool
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The same where `is_eager` has said yes, by ``run``, which `forward_of` gives."""
    if profiler._is_profiler_enabled:
        run = partial(recorded, "tilewise::attention", inputs, run)
    if not is_differentiated(inputs):
        return run(inputs)
    q, k, v, bias, _, sink = inputs
    found = _apply(q, k, v, bias, sink, (inputs, terms, run, return_lse))
    return found if return_lse else (found, None)
