"""The backward of attention, its tangents (JVP) and the derivatives of both, as operators of the dispatcher.

With o, L = f(x), J the Jacobian of f, and ⟨w, f⟩ = ⟨do, o⟩ + ⟨dlse, L⟩:

    attention_backward    (w, x) -> Jᵀw                         by the backend's kernels
    attention_tangents    (x, u) -> J u                         a backend's kernel, or `tilewise.derivatives`
    attention_second      (w, x, u) -> (∇²⟨w, f⟩) u, J u        `tilewise.derivatives`

The derivatives of the first two are sums of the three: ⟨u, Jᵀw⟩ = ⟨w, J u⟩ has the gradients ∇²⟨w, f⟩ u by x, J u by w
and Jᵀw by u; the tangent of Jᵀw is ∇²⟨w, f⟩ dx + Jᵀdw.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.backends import INPUT_NAMES, Gradients, Inputs, Needs, Outputs, empty_output, lse_dtype, saved_lse_dtype
from tilewise.backends.protocol import Tangents
from tilewise.derivatives import packed
from tilewise.operator.custom_op import Operator, fake_gradients_like, gradients_like
from tilewise.operator.dispatch import Forward, backward_of, derivatives_of, describe, tangents_of
from tilewise.operator.views import with_rows, without_rows
from tilewise.planner import make_plan
from tilewise.spec.score import ScoreNumbers


class _Cotangents(NamedTuple):
    do: Tensor | None
    dlse: Tensor | None


class _Saved(NamedTuple):
    o: Tensor
    lse: Tensor
    o_low: Tensor | None


class _Wanted(NamedTuple):
    needs: list[bool]  # see `Needs`


# Fields of `Tangents`, by names that no other argument has.
_Given: Any = NamedTuple("_Given", [(f"{name}_tangent", Tensor | None) for name in Tangents._fields])  # type: ignore[misc]
_NONE = Tangents(*[None] * len(Tangents._fields))


def operator_lse_dtype(inputs: Inputs) -> torch.dtype:
    """Return the dtype of the operators' LSE, whichever backend computes it."""
    q = inputs.q
    return saved_lse_dtype(q.dtype, inputs) if q.is_cuda else lse_dtype(q.dtype)


def public_lse(lse: Tensor, o: Tensor) -> Tensor:
    """Return the LSE, or its cotangent, in the dtype that callers see; see `saved_lse_dtype`."""
    dtype = lse_dtype(o.dtype)
    return lse if lse.dtype == dtype else lse.to(dtype)


def gradients_of(
    do: Tensor | None, dlse: Tensor | None, inputs: Inputs, saved: Sequence[Any], terms: ScoreNumbers, needs: Needs,
    forward: Forward | None = None,
) -> Gradients:  # fmt: skip
    """Return the gradients. ``do`` None means zeros. saved: `_Saved`. forward: see `backward_of`."""
    o, lse, o_low = saved
    outputs = Outputs(o, lse, None if o_low is None or o_low.shape != o.shape else o_low)
    # resolve_neg: a kernel reads memory and would miss a tensor's negative bit.
    do = torch.zeros_like(o) if do is None else do.resolve_neg()
    cotangents = Outputs(do, None if dlse is None else public_lse(dlse.resolve_neg(), o))
    return backward_of(inputs, outputs, cotangents, terms, needs, forward)(inputs, outputs, cotangents)


# --- calls of the operators ---


def gradients_by_operator(
    do: Tensor | None, dlse: Tensor | None, inputs: Inputs, saved: Sequence[Any], terms: ScoreNumbers, needs: Needs
) -> tuple[Tensor | None, ...]:
    """Return `gradients_of`, in the order of `Needs`."""
    if not any(needs) or (do is None and dlse is None):
        return (None,) * len(needs)
    if inputs.q.dim() == 3:
        inputs, saved, (do, dlse, *_) = without_rows(inputs, saved, (do, dlse, None))
        return with_rows(Gradients(*gradients_by_operator(do, dlse, inputs, saved[:3], terms, needs)))
    grads = ATTENTION_BACKWARD(do, dlse, *inputs.flat(), *saved, *terms, [*needs])
    return tuple(g if need else None for g, need in zip(grads, needs, strict=True))


def tangents_by_operator(
    inputs: Inputs, given: Tangents, saved: Sequence[Any], terms: ScoreNumbers
) -> tuple[Tensor | None, Tensor | None]:
    """Return the tangents of o and the LSE; None is zero."""
    if given == _NONE:
        return None, None
    found: tuple[Tensor, Tensor] = ATTENTION_TANGENTS(*inputs.flat(), *given, *saved, *terms)
    return found


def _second_by_operator(
    do: Tensor | None, dlse: Tensor | None, inputs: Inputs, given: Tangents, terms: ScoreNumbers, needs: Needs
) -> tuple[Tensor | None, ...]:
    """Return the tangents of the gradients in the order of `Needs`, of o, and of the LSE; None is zero."""
    if given == _NONE:
        return (None,) * (len(needs) + 2)
    *grads, o, lse = ATTENTION_SECOND(do, dlse, *inputs.flat(), *given, *terms, [*needs])
    return *(g if need else None for g, need in zip(grads, needs, strict=True)), o, lse


# --- what they compute ---


def _backward(
    cotangents: _Cotangents, inputs: Inputs, saved: _Saved, terms: ScoreNumbers, wanted: _Wanted
) -> tuple[Tensor, ...]:  # fmt: skip
    grads = gradients_of(*cotangents, inputs, saved, terms, Needs(*wanted.needs))
    return gradients_like(inputs.differentiable(), grads, inputs.q)


def _backward_fake(
    cotangents: _Cotangents, inputs: Inputs, saved: _Saved, terms: ScoreNumbers, wanted: _Wanted
) -> tuple[Tensor, ...]:  # fmt: skip
    return fake_gradients_like(inputs.differentiable(), wanted.needs, inputs.q)


def _tangents(inputs: Inputs, given: Any, saved: _Saved, terms: ScoreNumbers) -> tuple[Tensor, Tensor]:
    outputs, given = Outputs(saved.o, saved.lse), Tangents(*given)
    o, lse, *_ = tangents_of(inputs, outputs, given, terms)(inputs, outputs, given)
    assert lse is not None
    return o, lse.to(operator_lse_dtype(inputs))


def _tangents_fake(inputs: Inputs, given: Any, saved: _Saved, terms: ScoreNumbers) -> tuple[Tensor, Tensor]:
    o = empty_output(inputs.q, inputs.v.shape[3])
    return o, o.new_empty(o.shape[:3], dtype=operator_lse_dtype(inputs))


def _second(
    cotangents: _Cotangents, inputs: Inputs, given: Any, terms: ScoreNumbers, wanted: _Wanted
) -> tuple[Tensor, ...]:  # fmt: skip
    problem = describe(inputs, terms)
    do, dlse = cotangents
    do = empty_output(inputs.q, inputs.v.shape[3]).zero_() if do is None else do
    second = derivatives_of(make_plan(problem, terms.backend)).get("second", packed.second)
    found = second(problem, inputs, Tangents(*given), Outputs(do, dlse), Needs(*wanted.needs))
    grads = gradients_like(inputs.differentiable(), found.gradients, inputs.q)
    return *grads, found.o, found.lse.to(operator_lse_dtype(inputs))


def _second_fake(
    cotangents: _Cotangents, inputs: Inputs, given: Any, terms: ScoreNumbers, wanted: _Wanted
) -> tuple[Tensor, ...]:  # fmt: skip
    grads = fake_gradients_like(inputs.differentiable(), wanted.needs, inputs.q)
    return *grads, *_tangents_fake(inputs, given, None, terms)  # type: ignore[arg-type]


# --- derivatives ---


def _setup_backward(
    ctx: Any, cotangents: _Cotangents, inputs: Inputs, saved: _Saved, terms: ScoreNumbers, wanted: _Wanted, _: Any
) -> None:  # fmt: skip
    ctx.terms, ctx.needs = terms, Needs(*wanted.needs)
    _save(ctx, *cotangents, *inputs.flat(), *saved)


def _save(ctx: Any, *tensors: Tensor | None) -> None:
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors)
    ctx.save_for_forward(*tensors)


_BACKWARD_NAMES = (*_Cotangents._fields, *INPUT_NAMES)


def _read_backward(ctx: Any) -> tuple[Tensor | None, Tensor | None, Inputs, Sequence[Any]]:
    do, dlse, *tensors = ctx.saved_tensors
    return do, dlse, Inputs.of(tensors[: len(INPUT_NAMES)]), tensors[len(INPUT_NAMES) :]


def _differentiate_backward(ctx: Any, *cotangents: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the gradients of dO, dLSE and the inputs. O and the LSE count as functions of the inputs."""
    do, dlse, inputs, _ = _read_backward(ctx)
    given = Tangents(*[x if need else None for x, need in zip(cotangents, ctx.needs, strict=True)])
    asked = dict(zip(_BACKWARD_NAMES, ctx.needs_input_grad, strict=False))
    needs = Needs(*[asked[name] for name in Needs._fields])
    *grads, o, lse = _second_by_operator(do, dlse, inputs, given, ctx.terms, needs)
    named = dict(zip(Needs._fields, grads, strict=True))
    ddo, ddlse = (x if asked[name] else None for name, x in (("do", o), ("dlse", lse)))
    ddlse = ddlse if ddlse is None or dlse is None else ddlse.to(dlse.dtype)
    return ddo, ddlse, *(named.get(name) for name in INPUT_NAMES)


def _tangents_of_backward(ctx: Any, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the tangents of the gradients."""
    do, dlse, inputs, saved = _read_backward(ctx)
    named = dict(zip(_BACKWARD_NAMES, tangents, strict=False))
    given = Tangents(*[named[name] for name in Tangents._fields])
    *found, _, _ = _second_by_operator(do, dlse, inputs, given, ctx.terms, ctx.needs)
    others = gradients_by_operator(named["do"], named["dlse"], inputs, saved, ctx.terms, ctx.needs)
    return gradients_like(inputs.differentiable(), [_sum(x, y) for x, y in zip(found, others, strict=True)], inputs.q)


def _sum(x: Tensor | None, y: Tensor | None) -> Tensor | None:
    return y if x is None else x if y is None else x + y


def _setup_tangents(
    ctx: Any, inputs: Inputs, given: Any, saved: _Saved, terms: ScoreNumbers, _: Any
) -> None:  # fmt: skip
    ctx.terms = terms
    _save(ctx, *inputs.flat(), *given, *saved)


def _differentiate_tangents(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the gradients of the inputs and of their tangents."""
    count, size = len(INPUT_NAMES), len(Tangents._fields)
    tensors = ctx.saved_tensors
    inputs, given = Inputs.of(tensors[:count]), Tangents(*tensors[count : count + size])
    asked = dict(zip(INPUT_NAMES, ctx.needs_input_grad, strict=False))
    by_inputs = Needs(*[asked[name] for name in Needs._fields])
    by_tangents = Needs(*ctx.needs_input_grad[count : count + size])
    grads: Sequence[Tensor | None] = [None] * size
    if any(by_inputs) and not (do is None and dlse is None):
        *grads, _, _ = _second_by_operator(do, dlse, inputs, given, ctx.terms, by_inputs)
    others = gradients_by_operator(do, dlse, inputs, tensors[count + size :], ctx.terms, by_tangents)
    named = dict(zip(Needs._fields, grads, strict=True))
    return *(named.get(name) for name in INPUT_NAMES), *others


ATTENTION_BACKWARD = Operator(
    "attention_backward", (_Cotangents, Inputs, _Saved, ScoreNumbers, _Wanted), len(Needs._fields),
    _backward, _backward_fake, setup=_setup_backward, backward=_differentiate_backward, tangents=_tangents_of_backward,
    part_of="attention",
)  # fmt: skip
ATTENTION_TANGENTS = Operator(
    "attention_tangents", (Inputs, _Given, _Saved, ScoreNumbers), 2, _tangents, _tangents_fake, setup=_setup_tangents,
    backward=_differentiate_tangents, lacks="second derivative in forward mode over forward mode (a jvp of a jvp)",
    part_of="attention",
)  # fmt: skip
ATTENTION_SECOND = Operator(
    "attention_second", (_Cotangents, Inputs, _Given, ScoreNumbers, _Wanted), len(Needs._fields) + 2,
    _second, _second_fake, lacks="third derivative (leave dual_level before a backward through tangents)",
    part_of="attention",
)  # fmt: skip
