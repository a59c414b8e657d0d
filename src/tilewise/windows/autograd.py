"""Operators ``tilewise::window_attention`` and ``tilewise::window_attention_backward``, and their autograd.

As in `tilewise.operator.autograd`, an eager call on plain tensors bypasses the dispatcher.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import profiler

from tilewise.backends import empty_output, float32_precision
from tilewise.cache import calls
from tilewise.operator.custom_op import Operator, fake_gradients_like, gradients_like
from tilewise.operator.eager import apply_of, is_differentiated, is_eager_backward
from tilewise.operator.tools import recorded
from tilewise.windows import Geometry, WindowNeeds

if TYPE_CHECKING:
    from tilewise.windows.launch import Gradients, Windowed


class _WindowCall(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    mask: Tensor | None
    scale: float
    q_block: int
    k_block: int
    shift: bool


class _SavedWindows(NamedTuple):
    o: Tensor
    stats: Tensor
    do: Tensor


class _WantedWindows(NamedTuple):
    needs: list[bool]  # see `WindowNeeds`


def layouts(tensors: Sequence[Tensor | None]) -> tuple:
    """Return all that a launch depends on except alignment, which it checks itself; with the float32 precision."""
    q = tensors[0]
    precision = float32_precision(torch.float32) if q is not None and q.dtype is torch.float32 else None
    return (*[None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in tensors], precision)


def windowed(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: Tensor | None, scale: float, q_block: int,
    k_block: int, shift: bool,
) -> Windowed:  # fmt: skip
    """Return the prepared computation of this layout; requires `config.fits` and `config.rows_merge`."""
    key = ("windows", layouts((q, k, v, bias, mask)), scale, q_block, k_block, shift)
    run: Windowed | None = calls.get(key)
    if run is None:
        from tilewise.windows.launch import Windowed

        run = Windowed(q, k, v, bias, mask, Geometry(q_block, k_block, shift), scale)
        calls.put(key, run)
    return run


# --- the operators, which the dispatcher calls ---


def _forward(call: _WindowCall) -> tuple[Tensor, Tensor]:
    o, stats = windowed(*call).forward(*call[:5], True)
    assert stats is not None
    return o, stats


def _forward_fake(call: _WindowCall) -> tuple[Tensor, Tensor]:
    q = call.q
    return empty_output(q, call.v.shape[3]), q.new_empty((2, *q.shape[:3]), dtype=torch.float32)


def _backward(call: _WindowCall, saved: _SavedWindows, wanted: _WantedWindows) -> tuple[Tensor, ...]:
    grads = windowed(*call).backward(*call[:5], *saved, WindowNeeds(*wanted.needs))
    return gradients_like(call[:4], grads, call.q)


def _backward_fake(call: _WindowCall, saved: _SavedWindows, wanted: _WantedWindows) -> tuple[Tensor, ...]:
    return fake_gradients_like(call[:4], wanted.needs, call.q)


def _setup(ctx: Any, call: tuple, output: tuple[Tensor, Tensor | None]) -> None:
    ctx.numbers = call[5:]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*call[:5], *output)


def _differentiate(ctx: Any, do: Tensor | None, dstats: Tensor | None) -> tuple[Tensor | None, ...]:
    if do is None:
        return (None,) * 4
    *tensors, o, stats = ctx.saved_tensors
    return _by_operator(tensors, ctx.numbers, o, stats, do.resolve_neg(), WindowNeeds(*ctx.needs_input_grad[:4]))


def _by_operator(
    tensors: list[Tensor | None], numbers: tuple, o: Tensor, stats: Tensor, do: Tensor, needs: WindowNeeds
) -> Gradients:
    grads = WINDOWS_BACKWARD(*tensors, *numbers, o, stats, do, list(needs))
    return tuple(g if need else None for g, need in zip(grads, needs, strict=True))  # type: ignore[return-value]


WINDOWS = Operator(
    "window_attention", (_WindowCall,), 2, _forward, _forward_fake, setup=_setup, backward=_differentiate
)  # fmt: skip
WINDOWS_BACKWARD = Operator(
    "window_attention_backward",
    (_WindowCall, _SavedWindows, _WantedWindows),
    4,
    _backward,
    _backward_fake,
    part_of="window_attention",
)


# --- eager calls ---


class _EagerWindows(torch.autograd.Function):
    """Autograd function ``q, k, v, bias, mask, call -> o``; call: (`Windowed`, numbers of the operator)."""

    @staticmethod
    def forward(ctx, q, k, v, bias, mask, call):
        run, ctx.numbers = call
        ctx.run = run
        o, stats = run.forward(q, k, v, bias, mask, True)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, bias, mask, o, stats)
        return o

    @staticmethod
    def backward(ctx, do):
        if do is None:
            return (None,) * 6
        # resolve_neg: kernels read memory, which has the opposite sign under the negative bit
        do, needs, saved = do.resolve_neg(), WindowNeeds(*ctx.needs_input_grad[:4]), ctx.saved_tensors
        if not is_eager_backward(do):
            *tensors, o, stats = saved
            return *_by_operator(tensors, ctx.numbers, o, stats, do, needs), None, None
        if profiler._is_profiler_enabled:
            name = "tilewise::window_attention_backward"
            return *recorded(name, (do, *saved), ctx.run.backward, *saved, do, needs), None, None
        return *ctx.run.backward(*saved, do, needs), None, None

    jvp = staticmethod(WINDOWS.refuse_tangents)


_apply = apply_of(_EagerWindows)


def eager_windows(
    run: Windowed, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: Tensor | None, numbers: tuple
) -> Tensor:
    """Return O by ``run``, from `windowed`; requires `is_eager`."""
    if is_differentiated((q, k, v, bias)):
        if profiler._is_profiler_enabled:
            return recorded("tilewise::window_attention", (q, k, v, bias, mask), _apply, q, k, v, bias, mask,
                            (run, numbers))  # fmt: skip
        return _apply(q, k, v, bias, mask, (run, numbers))
    if profiler._is_profiler_enabled:
        return recorded("tilewise::window_attention", (q, k, v, bias, mask), run.forward, q, k, v, bias, mask, False)[0]
    return run.forward(q, k, v, bias, mask, False)[0]
