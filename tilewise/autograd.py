"""The two operators, ``tilewise::attention`` and ``tilewise::attention_backward``, and how they meet autograd.

This module alone knows torch.autograd and torch.library. Both operators describe their call as a Problem, take its
Plan and run the plan's backend; under torch.compile they are opaque and their fake kernels give shapes only. An eager
call on plain tensors takes an autograd.Function around the same two functions instead of the dispatcher, which costs
50 µs of host time when its kernels are Python.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import TransformType, peek_interpreter_stack
from torch._C._functorch import is_functorch_wrapped_tensor as _is_wrapped
from torch._C._functorch import is_legacy_batchedtensor as _is_legacy_batched
from torch.autograd import forward_ad, profiler
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from tilewise.backends import Gradients, Inputs, Needs, Outputs, address, empty_output, lse_dtype
from tilewise.ops.runtime import announce, exports_onnx, plain, recorded
from tilewise.plan import Plan, make_plan
from tilewise.problem import Problem, irregular
from tilewise.score.terms import Band, Score
from tilewise.tensors import PLAIN

_library = torch.library.Library("tilewise", "DEF")

# The score terms that both operators take, as the dispatcher can carry them.
_TERMS = "SymInt? lo, SymInt? hi, float scale, float? softcap, bool deterministic, bool exact, str backend"
_library.define(f"attention(Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? mask, {_TERMS}) -> (Tensor, Tensor)")
_library.define(
    "attention_backward(Tensor? do, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? mask, "
    f"Tensor o, Tensor lse, {_TERMS}, bool[] needs) -> (Tensor, Tensor, Tensor, Tensor)"
)


def _terms(score: Score, deterministic: bool, exact: bool, backend: str) -> tuple:
    return score.band.lo, score.band.hi, score.scale, score.softcap, deterministic, exact, backend


def _problem(inputs: Inputs, terms: tuple, **more: Any) -> Problem:
    lo, hi, scale, softcap, deterministic, exact, _ = terms
    score = Score(scale, softcap, Band(lo, hi))
    return Problem.of(*inputs, score, deterministic=deterministic, exact=exact, **more)


# What computes a call, kept under all that a Problem and a backend read of its tensors: a second call is one look-up.
Forward = Callable[[Inputs], Outputs]
Backward = Callable[[Inputs, Outputs, Outputs], Gradients]
_forwards: dict[tuple, Forward] = {}
_backwards: dict[tuple, Backward] = {}
_KEPT = 4096  # of each


def _layouts(*tensors: Tensor | None) -> tuple:
    """Their layouts, as `tilewise.backends` means it; a CPU's backends read any address alike."""
    return tuple([
        None if x is None else (x.shape, x.dtype, x.device, x.stride(), 0 if x.is_cpu else address(x) % 16)
        for x in tensors
    ])  # fmt: skip


def _irregular(inputs: Inputs, do: Tensor | None = None) -> tuple[str, ...]:
    """On the CPU, whose backends read any strides, none."""
    return () if inputs.q.is_cpu else irregular(*inputs[:4], do)


def _forward_of(inputs: Inputs, terms: tuple) -> Forward:
    key = (_layouts(*inputs), terms)
    run = _forwards.get(key)
    if run is None:
        plan = make_plan(_problem(inputs, terms, irregular=_irregular(inputs)), terms[-1])
        run = _keep(_forwards, key, _prepare_forward(plan, inputs))
    return run


def _prepare_forward(plan: Plan, inputs: Inputs) -> Forward:
    if plan.problem.empty:
        return _empty_forward
    if hasattr(plan.module, "prepare_forward"):
        return plan.module.prepare_forward(plan.problem, inputs)
    return lambda inputs: plan.module.forward(plan.problem, inputs)


def _empty_forward(inputs: Inputs) -> Outputs:
    q = inputs.q
    lse = q.new_full(q.shape[:3], -torch.inf, dtype=lse_dtype(q.dtype))
    return Outputs(empty_output(q, inputs.v.shape[3]).zero_(), lse)


def _backward_of(
    inputs: Inputs, outputs: Outputs, cotangents: Outputs, terms: tuple, needs: Needs
) -> Backward:  # fmt: skip
    key = (_layouts(*inputs, *outputs, *cotangents), terms, needs)
    run = _backwards.get(key)
    if run is None:
        names = _irregular(inputs, cotangents.o)
        plan = make_plan(_problem(inputs, terms, bias_grad=needs.bias, irregular=names), terms[-1])
        run = _keep(_backwards, key, _prepare_backward(plan, inputs, outputs, cotangents, needs))
    return run


def _prepare_backward(
    plan: Plan, inputs: Inputs, outputs: Outputs, cotangents: Outputs, needs: Needs
) -> Backward:  # fmt: skip
    problem, module = plan.problem, plan.backward_module
    if problem.empty:
        return lambda inputs, outputs, cotangents: Gradients(
            *(torch.zeros_like(x) if need and x is not None else None for x, need in zip(inputs, needs, strict=False))
        )
    if hasattr(module, "prepare_backward"):
        return module.prepare_backward(problem, inputs, outputs, cotangents, needs)
    return lambda inputs, outputs, cotangents: module.backward(problem, inputs, outputs, cotangents, needs)


def _keep(kept: dict[tuple, Any], key: tuple, value: Any) -> Any:
    if len(kept) >= _KEPT:
        kept.clear()
    kept[key] = value
    return value


def _gradients(do: Tensor | None, dlse: Tensor | None, saved: Sequence[Any], terms: tuple, needs: Needs) -> Gradients:
    """``saved``: the inputs, o and lse. No cotangent of o is one of zeros."""
    q, k, v, bias, mask, o, lse = saved
    inputs, outputs = Inputs(q, k, v, bias, mask), Outputs(o, lse)
    # resolve_neg: a kernel would not see the sign of a cotangent whose memory holds its negative.
    do = torch.zeros_like(o) if do is None else do.resolve_neg()
    cotangents = Outputs(do, None if dlse is None else dlse.resolve_neg())
    return _backward_of(inputs, outputs, cotangents, terms, needs)(inputs, outputs, cotangents)


# --- the operators, which the dispatcher calls ---


def _forward(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: Tensor | None, *terms) -> Any:
    inputs = Inputs(q, k, v, bias, mask)
    o, lse = _forward_of(inputs, terms)(inputs)
    return o, lse


def _forward_fake(q, k, v, bias, mask, *terms):
    _problem(Inputs(q, k, v, bias, mask), terms)
    return empty_output(q, v.shape[3]), q.new_empty(q.shape[:3], dtype=lse_dtype(q.dtype))


def _backward(do, dlse, q, k, v, bias, mask, o, lse, *terms_and_needs):
    *terms, wanted = terms_and_needs
    grads = _gradients(do, dlse, (q, k, v, bias, mask, o, lse), tuple(terms), Needs(*wanted))
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
    ctx.terms = inputs[5:]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:5], *output)


def _differentiate(ctx, do, dlse):
    """The gradients of q, k, v and bias by the operator."""
    if do is None and dlse is None:
        return None, None, None, None
    needs = list(ctx.needs_input_grad[:4])
    grads = _call_backward(do, dlse, *ctx.saved_tensors, *ctx.terms, needs)
    return tuple(g if need else None for g, need in zip(grads, needs, strict=True))


def _autograd_backward(ctx, do, dlse):
    return *_differentiate(ctx, do, dlse), *(None,) * (1 + len(ctx.terms))  # the mask and the score terms


def _no_second_derivative(ctx, *grads):
    raise NotImplementedError("tilewise.attention has no second derivative: its backward cannot be differentiated")


torch.library.register_autograd("tilewise::attention", _autograd_backward, setup_context=_setup_context, lib=_library)
torch.library.register_autograd("tilewise::attention_backward", _no_second_derivative, lib=_library)
announce("attention", "attention_backward")


# --- under torch.func ---
#
# Its transforms do not know how to differentiate an operator whose derivative is written in Python: of the tangents of
# torch.func.jvp nothing would be left, without a word. They know autograd.Function with a setup_context.


class _TransformedAttention(torch.autograd.Function):
    """The arguments of ``tilewise::attention``, and its results."""

    @staticmethod
    def forward(*arguments):
        return torch.ops.tilewise.attention(*arguments)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.terms = inputs[5:]
        ctx.save_for_backward(*inputs[:5], *output)

    @staticmethod
    def backward(ctx, do, dlse):
        return _autograd_backward(ctx, do, dlse)

    @staticmethod
    def jvp(ctx, *tangents):
        _no_tangents()

    @staticmethod
    def vmap(info, in_dims, *arguments):
        return _one_by_one(_call_forward, info.batch_size, in_dims, arguments)


class _TransformedBackward(torch.autograd.Function):
    """The arguments of ``tilewise::attention_backward``, and its results."""

    @staticmethod
    def forward(*arguments):
        return torch.ops.tilewise.attention_backward(*arguments)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, *grads):
        _no_second_derivative(ctx, *grads)

    @staticmethod
    def jvp(ctx, *tangents):
        _no_second_derivative(ctx, *tangents)

    @staticmethod
    def vmap(info, in_dims, *arguments):
        return _one_by_one(_call_backward, info.batch_size, in_dims, arguments)


def _one_by_one(call: Callable, size: int, in_dims: Sequence, arguments: Sequence) -> tuple[tuple, tuple]:
    """``call`` for each of ``size`` elements along ``in_dims``, and the results along their dimension 0."""
    pairs = [(x, dim if isinstance(x, Tensor) else None) for x, dim in zip(arguments, in_dims, strict=True)]
    calls = [call(*(x if dim is None else x.select(dim, i) for x, dim in pairs)) for i in range(size)]
    results = tuple(torch.stack(parts) for parts in zip(*calls, strict=True))
    return results, (0,) * len(results)


def _call_forward(*arguments: Any) -> Any:
    announce("attention")
    return _TransformedAttention.apply(*arguments) if _is_transformed() else torch.ops.tilewise.attention(*arguments)


def _call_backward(*arguments: Any) -> Any:
    announce("attention_backward")
    if _is_transformed():
        return _TransformedBackward.apply(*arguments)
    return torch.ops.tilewise.attention_backward(*arguments)


def _is_transformed() -> bool:
    """A transform of torch.func other than functionalize, which takes operators alone, is at work."""
    if torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active():
        return False
    return peek_interpreter_stack().key() != TransformType.Functionalize


def _no_tangents() -> None:
    raise NotImplementedError("tilewise.attention has no forward-mode derivative (torch.func.jvp, forward AD)")


def _watched(inputs: Inputs, terms: tuple) -> Any:
    """A call at which a compiler, a tracer or a transform looks on."""
    if forward_ad._current_level >= 0:
        # The operator would drop them.
        tangents = [forward_ad.unpack_dual(x).tangent for x in inputs if x is not None and x.is_floating_point()]
        if any(tangent is not None for tangent in tangents):
            _no_tangents()
    if exports_onnx():
        return plain.attention(*inputs, *terms[:4])
    return _call_forward(*inputs, *terms)


# --- eager calls ---


class _EagerAttention(torch.autograd.Function):
    """``q, k, v, bias, call -> o`` or ``o, lse``, where call is (inputs, terms, what computes it, return_lse)."""

    @staticmethod
    def forward(ctx, q, k, v, bias, call):
        inputs, ctx.terms, run, return_lse = call
        o, lse = run(inputs)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs, o, lse)
        return (o, lse) if return_lse else o

    @staticmethod
    def backward(ctx, do, dlse=None):
        # To be differentiated, of which the operator says that it cannot; batched, by is_grads_batched; or watched.
        if torch.is_grad_enabled() or _is_batched(do) or _is_batched(dlse) or is_in_torch_dispatch_mode():
            return *_differentiate(ctx, do, dlse), None
        if do is None and dlse is None:
            return None, None, None, None, None
        call = do, dlse, ctx.saved_tensors, ctx.terms, Needs(*ctx.needs_input_grad[:4])
        if profiler._is_profiler_enabled:
            return *recorded("tilewise::attention_backward", (do, dlse, *call[2]), _gradients, *call), None
        return *_gradients(*call), None

    @staticmethod
    def jvp(ctx, *tangents):
        _no_tangents()


# _EagerAttention.apply without its steps for functorch, which `_is_eager` leaves to the dispatcher.
_apply = super(torch.autograd.Function, _EagerAttention).apply


def _is_batched(x: Tensor | None) -> bool:
    return x is not None and (_is_wrapped(x) or _is_legacy_batched(x))


_NO_COMPLEX = torch.bfloat16  # has no complex numbers, so that no memory holds its negatives; asking takes longer


def _is_eager(inputs: Inputs) -> bool:
    """No compiler, no tracer and no transform looks on: nobody would miss the dispatcher. It also knows what to do with
    a tensor that outlived its transform, or whose memory holds its negative (``z.conj().imag``)."""
    q, k, v, bias, mask = inputs
    return (
        not torch.compiler.is_compiling()
        and type(q) in PLAIN and type(k) in PLAIN and type(v) in PLAIN
        and type(bias) in PLAIN and type(mask) in PLAIN
        and not (q.is_meta or _is_wrapped(q) or _is_wrapped(k) or _is_wrapped(v))
        and (q.dtype is _NO_COMPLEX or not (q.is_neg() or k.is_neg() or v.is_neg()))
        and not (bias is not None and (_is_wrapped(bias) or bias.is_neg()))
        and not (mask is not None and _is_wrapped(mask))
        and not is_in_torch_dispatch_mode()
        and not torch._C._is_tracing()
        and not torch._C._are_functorch_transforms_active()
    )  # fmt: skip


def _is_differentiated(inputs: Inputs) -> bool:
    """Whether somebody may ask for a gradient, or has tangents on the way, which autograd.Function refuses."""
    q, k, v, bias, _ = inputs
    if not torch.is_grad_enabled():
        return forward_ad._current_level >= 0
    needs = q.requires_grad or k.requires_grad or v.requires_grad or (bias is not None and bias.requires_grad)
    return needs or forward_ad._current_level >= 0


def attention_op(
    inputs: Inputs, score: Score, deterministic: bool, backend: str, *, return_lse: bool = True, exact: bool = False
) -> tuple[Tensor, Tensor | None]:
    """``(o, lse)`` of a call whose numbers are checked; differentiable in q, k, v and bias, through o and lse.

    Without ``return_lse`` nobody looks at the lse, and its place may hold anything. exact: see `Problem`.
    """
    terms = _terms(score, deterministic, exact, backend)
    if not _is_eager(inputs):
        return _watched(inputs, terms)
    return _run(inputs, terms, _forward_of(inputs, terms), return_lse)


def _run(inputs: Inputs, terms: tuple, run: Forward, return_lse: bool) -> tuple[Tensor, Tensor | None]:
    if profiler._is_profiler_enabled:
        run = partial(recorded, "tilewise::attention", inputs, run)
    if not _is_differentiated(inputs):
        return run(inputs)
    q, k, v, bias, _ = inputs
    found = _apply(q, k, v, bias, (inputs, terms, run, return_lse))
    return found if return_lse else (found, None)


# The usual call, one that differs from an earlier one in nothing but its numbers: the arguments that are no tensors,
# and the layouts of those that are, lead to what `attention_op` made of them then. Nothing is read or checked again.
_usual_calls: dict[tuple, tuple[tuple, Forward]] = {}


def usual_call(inputs: Inputs, arguments: tuple, return_lse: bool) -> tuple[Tensor, Tensor | None] | None:
    """``(o, lse)`` of a call like an earlier one; None of any other. ``inputs`` are as the caller gave them."""
    known = _usual_calls.get(_usual_key(inputs, arguments)) if _is_usual(inputs) else None
    return None if known is None else _run(inputs, *known, return_lse)


def remember_call(inputs: Inputs, arguments: tuple, score: Score, deterministic: bool, backend: str) -> None:
    """After a call that went well, with what it was read as; see `usual_call`."""
    if _is_usual(inputs):
        terms = _terms(score, deterministic, False, backend)
        _keep(_usual_calls, _usual_key(inputs, arguments), (terms, _forward_of(inputs, terms)))


def _is_usual(inputs: Inputs) -> bool:
    q, k, v, bias, mask = inputs
    return (
        q is not None and k is not None and v is not None
        and _is_eager(inputs)
        and q.layout is k.layout is v.layout is torch.strided
        and (bias is None or (bias.dim() == 4 and bias.layout is torch.strided))
        and (mask is None or (mask.dim() == 4 and mask.layout is torch.strided))
    )  # fmt: skip


def _usual_key(inputs: Inputs, arguments: tuple) -> tuple:
    q, k, v, bias, mask = inputs
    return (
        q.shape, q.stride(), q.dtype, q.device,
        k.shape, k.stride(), k.dtype, k.device,
        v.shape, v.stride(), v.dtype, v.device,
        None if q.is_cpu else (address(q) % 16, address(k) % 16, address(v) % 16),
        None if bias is None else _layouts(bias), None if mask is None else _layouts(mask), arguments,
    )  # fmt: skip
