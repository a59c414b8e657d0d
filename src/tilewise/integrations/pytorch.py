"""PyTorch's scaled_dot_product_attention in code of others, computed by tilewise."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from functools import cache
from threading import Lock
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
from torch.jit._builtins import _register_builtin
from torch.nn import functional
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from tilewise import scaled_dot_product_attention
from tilewise.integrations.checkpoints import recompute_within
from tilewise.integrations.sdpa_calls import why_not

_lock = Lock()
_counts: Counter[str | None] = Counter()  # reasons; None for calls by tilewise
_FAST_PATH = "a fast path of nn.TransformerEncoderLayer or nn.MultiheadAttention for inference"


class SdpaReport(NamedTuple):
    """Numbers of calls: by tilewise, and by PyTorch for each reason."""

    tilewise: int
    pytorch: dict[str, int]

    def __str__(self) -> str:
        lines = [f"scaled_dot_product_attention: {self.tilewise} by tilewise, {sum(self.pytorch.values())} by PyTorch"]
        return "\n".join(
            [*lines, *(f"  {count} by PyTorch: {reason}" for reason, count in sorted(self.pytorch.items()))]
        )


class sdpa(TorchFunctionMode):
    """Compute calls of PyTorch's ``scaled_dot_product_attention`` by tilewise, within ``with tilewise.sdpa():``.

    ``with`` covers the calls of its thread, by whatever name the function was imported, also
    ``torch.ops.aten.scaled_dot_product_attention`` and the calls of nn.MultiheadAttention and nn.Transformer; under
    `torch.compile` too, inside and outside of the compiled function. Their backward may run outside of it, and what
    `torch.utils.checkpoint` recomputes there is covered. ``with`` may be nested. `install` covers all threads.

    Results are those of `tilewise.scaled_dot_product_attention`: dropout draws other random numbers than PyTorch's, a
    query that sees no key gives 0. `torch.nn.attention.sdpa_kernel`, which chooses among PyTorch's kernels, has no
    effect on them.

    Left to PyTorch, and counted by their reasons in `report`, are calls on devices other than a CPU and GPUs of compute
    capability 8.0 and later, in float64 on a GPU, of tensor subclasses (DTensor too) or nested tensors that are not all
    jagged, with forward-mode derivatives, with a head dimension of 0, or with dtypes that tilewise does not take.

    Not covered are TorchScript, attention that is written as products and softmax, nn.MultiheadAttention with
    ``need_weights=True``, and PyTorch's fast paths of nn.MultiheadAttention and nn.TransformerEncoder for inference. It
    takes them under `torch.compile` and `install`, where `report` counts them, and not in eager calls within ``with``;
    ``torch.backends.mha.set_fastpath_enabled(False)`` turns them off.

    Each PyTorch function that Python calls within ``with`` passes through this mode, which takes host time; under
    `install` only the replaced functions take more.

    Examples:
        >>> encoder = torch.nn.TransformerEncoderLayer(64, 4, batch_first=True)
        >>> with tilewise.sdpa():
        ...     encoder(torch.randn(2, 10, 64)).sum().backward()
        >>> print(tilewise.sdpa.report(reset=True))
        scaled_dot_product_attention: 1 by tilewise, 0 by PyTorch
    """

    def __init__(self) -> None:
        super().__init__()
        if not torch.compiler.is_compiling():  # a compiler has a checkpoint of its own
            _recompute_within()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _WITHIN.get(func, func)(*args, **(kwargs or {}))

    @staticmethod
    def install() -> None:
        """Replace the function in all loaded modules: calls of all threads are covered until `uninstall`.

        A module that holds PyTorch's function under any name gets one that calls tilewise, `torch.nn.functional` first
        of all, from which modules that are loaded later get it. Not covered are attributes of classes and objects,
        default arguments and closures that hold the function already, a checkpoint's recomputation after `uninstall`,
        and other processes: each calls this for itself.
        """
        _register_builtin(_attention, "aten::scaled_dot_product_attention")  # TorchScript compiles PyTorch's own
        _replace(_INSTALLED)

    @staticmethod
    def uninstall() -> None:
        """Give PyTorch's function back to all loaded modules."""
        _replace({new: old for old, new in _INSTALLED.items()})

    @staticmethod
    def report(*, reset: bool = False) -> SdpaReport:
        """Return how many calls of all threads tilewise has computed, and how many PyTorch, by reason.

        Recomputed calls count again. A call in a compiled function counts once, when it is compiled.

        Args:
            reset: start to count from 0.

        Returns:
            A named tuple ``(tilewise, pytorch)``: an int, and a dict of reasons and ints. ``print`` shows it in lines.
        """
        with _lock:
            found = dict(_counts)
            if reset:
                _counts.clear()
        by_tilewise = found.pop(None, 0)
        return SdpaReport(by_tilewise, {str(reason): count for reason, count in found.items()})


def _is_active() -> bool:
    return any(type(mode) is sdpa for mode in _get_current_function_mode_stack())


@cache
def _recompute_within() -> None:
    recompute_within(_is_active, sdpa)


def _count(reason: str | None) -> None:
    with _lock:
        _counts[reason] += 1


# As torch.compiler.assume_constant_result does, which imports torch._dynamo: it runs once, when a call is compiled.
_count._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _attention(*args: Any, **named: Any) -> Any:
    if _is_active():  # the outermost sdpa() decides and counts; the call reaches it next
        return _PYTORCH(*args, **named)
    reason = why_not(*args, **named)
    _count(reason)
    return (scaled_dot_product_attention if reason is None else _PYTORCH)(*args, **named)


def _counted(function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **named: Any) -> Any:
        _count(_FAST_PATH)
        return function(*args, **named)

    return call


def _multi_head_attention() -> FunctionType:
    """Return a copy of PyTorch's multi_head_attention_forward that calls `_attention`.

    A mode sees a function of torch.nn.functional as one, and is off inside of it.
    """
    old: Any = functional.multi_head_attention_forward
    names = {**old.__globals__, "scaled_dot_product_attention": _attention}
    new = FunctionType(old.__code__, names, old.__name__, old.__defaults__, old.__closure__)
    new.__kwdefaults__ = old.__kwdefaults__
    names[old.__name__] = new  # which it hands to other modes
    return new


_PYTORCH = torch._C._nn.scaled_dot_product_attention
_ATEN = torch.ops.aten.scaled_dot_product_attention
_FAST_PATHS = {f: _counted(f) for f in (torch._transformer_encoder_layer_fwd, torch._native_multi_head_attention)}
_INSTALLED: dict[Any, Callable[..., Any]] = {_PYTORCH: _attention, **_FAST_PATHS}
_WITHIN: dict[Any, Callable[..., Any]] = {
    **_INSTALLED,
    _ATEN: _attention,
    _ATEN.default: _attention,
    functional.multi_head_attention_forward: _multi_head_attention(),
}


def _replace(table: dict[Any, Any]) -> None:
    """Replace keys of ``table`` by their values in all loaded modules; torch._C and this one keep what they have."""
    new = {id(old): new for old, new in table.items()}
    for module in list(sys.modules.values()):
        if not isinstance(module, ModuleType) or module.__name__ == __name__ or module.__name__.startswith("torch._C"):
            continue
        for name, value in list(vars(module).items()):
            if id(value) in new:
                setattr(module, name, new[id(value)])
