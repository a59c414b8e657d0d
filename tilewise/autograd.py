"""The two operators, ``tilewise::attention`` and ``tilewise::attention_backward``, and how they meet autograd.

This module alone knows torch.autograd and torch.library. Both operators describe their call as a Problem, take its
Plan and run the plan's backend; under torch.compile they are opaque and their fake kernels give shapes only. An eager
call on plain tensors takes an autograd.Function around the same two functions instead of the dispatcher, which costs
50 µs of host time when its kernels are Python.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from tilewise.backends import Inputs, Needs, Outputs, empty_output, lse_dtype
from tilewise.plan import Plan, make_plan
from tilewise.problem import Problem, irregular
from tilewise.score.terms import Band, Score

_library = torch.library.Library("tilewise", "DEF")

# The score terms that both operators take, as the dispatcher can carry them.
_TERMS = "SymInt? lo, SymInt? hi, float scale, float? softcap, bool deterministic, str backend"
_library.define(f"attention(Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? mask, {_TERMS}) -> (Tensor, Tensor)")
_library.define(
    "attention_backward(Tensor? do, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? mask, "
    f"Tensor o, Tensor lse, {_TERMS}, bool[] needs) -> (Tensor, Tensor, Tensor, Tensor)"
)


def _problem(inputs: Inputs, terms: tuple, **more: Any) -> Problem:
    lo, hi, scale, softcap, deterministic, _ = terms
    score = Score(scale, softcap, Band(lo, hi))
    return Problem.of(*inputs, score, deterministic=deterministic, **more)


_plans: dict[tuple, Plan] = {}


def _plan(inputs: Inputs, terms: tuple, bias_grad: bool = False, do: Tensor | None = None) -> Plan:
    """The plan of a call, kept under all that a Problem reads of its tensors: a second call is one look-up."""
    on_cpu = inputs.q.device.type == "cpu"
    if on_cpu:  # whose backends read tensors of any layout
        signature: tuple = tuple(None if x is None else (x.shape, x.dtype, x.device) for x in inputs)
    else:
        signature = tuple(
            None if x is None else (x.shape, x.dtype, x.device, x.stride(), x.data_ptr() % 16) for x in (*inputs, do)
        )
    key = (signature, terms, bias_grad)
    plan = _plans.get(key)
    if plan is None:
        names = () if on_cpu else irregular(*inputs[:4], do)
        plan = make_plan(_problem(inputs, terms, bias_grad=bias_grad, irregular=names), terms[-1])
        if len(_plans) >= 4096:
            _plans.clear()
        _plans[key] = plan
    return plan


def _forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: Tensor | None, *terms
) -> tuple[Tensor, Tensor]:
    inputs = Inputs(q, k, v, bias, mask)
    plan = _plan(inputs, terms)
    if plan.problem.empty:
        lse = q.new_full(q.shape[:3], -torch.inf, dtype=lse_dtype(q.dtype))
        return empty_output(q, v.shape[3]).zero_(), lse
    o, lse = plan.module.forward(plan.problem, inputs)
    return o, lse


def _forward_fake(q, k, v, bias, mask, *terms):
    _problem(Inputs(q, k, v, bias, mask), terms)
    return empty_output(q, v.shape[3]), q.new_empty(q.shape[:3], dtype=lse_dtype(q.dtype))


def _backward(do, dlse, q, k, v, bias, mask, o, lse, *terms_and_needs):
    *terms, wanted = terms_and_needs
    inputs, needs = Inputs(q, k, v, bias, mask), Needs(*wanted)
    do = torch.zeros_like(o) if do is None else do
    plan = _plan(inputs, tuple(terms), needs.bias, do)
    if plan.problem.empty:
        grads = [
            torch.zeros_like(x) if need and x is not None else None for x, need in zip(inputs[:4], needs, strict=True)
        ]
    else:
        grads = plan.backward_module.backward(plan.problem, inputs, Outputs(o, lse), Outputs(do, dlse), needs)
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
    ctx.eager = False
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, bias, mask, *output)


def _autograd_backward(ctx, do, dlse):
    none = (None,) * (1 + len(ctx.terms))  # the mask and the score terms
    if do is None and dlse is None:
        return None, None, None, None, *none
    needs = list(ctx.needs_input_grad[:4])
    # An eager call's backward is eager too, unless it is to be differentiated: then the operator says that it cannot.
    backward = _backward if ctx.eager and not torch.is_grad_enabled() else torch.ops.tilewise.attention_backward
    grads = backward(do, dlse, *ctx.saved_tensors, *ctx.terms, needs)
    return *(g if need else None for g, need in zip(grads, needs, strict=True)), *none


def _no_second_derivative(ctx, *grads):
    raise NotImplementedError("tilewise.attention has no second derivative: its backward cannot be differentiated")


torch.library.register_autograd("tilewise::attention", _autograd_backward, setup_context=_setup_context, lib=_library)
torch.library.register_autograd("tilewise::attention_backward", _no_second_derivative, lib=_library)


class _EagerAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *args):
        output = _forward(*args)
        _setup_context(ctx, args, output)
        ctx.eager = True
        return output

    @staticmethod
    def backward(ctx, do, dlse):
        return _autograd_backward(ctx, do, dlse)


def _is_eager(inputs: Inputs) -> bool:
    """No compiler, no tracer and no transform looks on: nobody would miss the dispatcher."""
    return (
        not torch.compiler.is_compiling()
        and not inputs.q.is_meta
        and all(x is None or type(x) in (Tensor, Parameter) for x in inputs)
        and not is_in_torch_dispatch_mode()
        and not torch._C._are_functorch_transforms_active()
    )


def attention_op(inputs: Inputs, score: Score, deterministic: bool, backend: str) -> tuple[Tensor, Tensor]:
    """``(o, lse)`` of a call whose numbers are checked; differentiable in q, k, v and bias, through o and lse."""
    args = (*inputs, score.band.lo, score.band.hi, score.scale, score.softcap, deterministic, backend)
    return _EagerAttention.apply(*args) if _is_eager(inputs) else torch.ops.tilewise.attention(*args)
