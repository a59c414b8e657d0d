"""What a repeated call does on the host, in a process of its own where CPU tensors pass for a Hopper GPU's."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import FrameType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

SEQUENCES, S, H, D = 2, 128, 4, 64


class Repeated(NamedTuple):
    """Python frames of tilewise in a repeated call, the kernels that it launches; forward, then both passes.

    layouts: shape and strides of o, the LSE and all gradients, also of a backward by the operator.
    alone: those of a call that was not cached.
    """

    frames: tuple[int, int]
    kernels: tuple[list[str], list[str]]
    layouts: list[Any]
    alone: list[Any]


def repeated(*names: str) -> dict[str, Repeated]:
    """Measure the calls of these names: "attention" is dense, the others are of packed batches."""
    launched = _pass_for_a_gpu()
    return {name: _measured(_calls()[name], launched) for name in names}


def _calls() -> dict[str, Callable[..., Any]]:
    import tilewise
    from tilewise.bias import alibi, t5_bias
    from tilewise.integrations.flash_attn import flash_attn_varlen_func

    offsets, slopes, table = torch.arange(SEQUENCES + 1, dtype=torch.int32) * S, torch.rand(H), torch.randn(32, H)
    lengths = offsets, offsets, S, S
    packed = tilewise.varlen_attention
    return {
        "attention": lambda x, rows: tilewise.attention(*(y.view(SEQUENCES, S, H, D).transpose(1, 2) for y in x)),
        "varlen_attention": lambda x, rows: packed(*x, *lengths),
        "causal": lambda x, rows: packed(*x, *lengths, causal=True),
        "sink": lambda x, rows: packed(*x, *lengths, sink=slopes),
        "along the keys": lambda x, rows: packed(*x, *lengths, bias=rows[..., 0]),
        "along the queries": lambda x, rows: packed(*x, *lengths, bias=rows, return_lse=True),
        "mask": lambda x, rows: packed(*x, *lengths, mask=torch.ones(1, 1, S, S, dtype=torch.bool)),
        "dropout": lambda x, rows: packed(*x, *lengths, dropout_p=0.5),
        "varlen_attn": lambda x, rows: tilewise.varlen_attn(*x, *lengths, window_size=(-1, -1)),
        "flash_attn": lambda x, rows: flash_attn_varlen_func(*x, *lengths),
        "alibi": lambda x, rows: packed(*x, *lengths, bias=alibi(slopes)),
        "t5_bias": lambda x, rows: packed(*x, *lengths, bias=t5_bias(table, bidirectional=True)),
    }


def _measured(call: Callable[..., Any], launched: list[str]) -> Repeated:
    import tilewise.varlen as public
    from tilewise.cache import clear_caches
    from tilewise.frontend import varlen

    tensors = [torch.randn(SEQUENCES * S, H, D, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    rows = torch.randn(H, SEQUENCES * S, 1, requires_grad=True)

    def both(counted: bool = False) -> list[Tensor | None]:
        results = call(tensors, rows)
        results = results if isinstance(results, tuple) else (results,)
        with FlopCounterMode(display=False) if counted else nullcontext():
            return [*results, *torch.autograd.grad(results, (*tensors, rows), results, allow_unused=True)]

    clear_caches()
    frames, kernels = [], []
    for step in (torch.no_grad()(lambda: call(tensors, rows)), both):
        for _ in range(3):
            step()
        launched.clear()
        frames.append(_frames(step))
        kernels.append(list(launched))
    found = [None if x is None else (x.shape, x.stride()) for x in (*both(), *both(counted=True))]
    clear_caches()
    cached = varlen.cached_packed
    varlen.cached_packed = public.cached_packed = lambda *_: None
    alone = [None if x is None else (x.shape, x.stride()) for x in (*both(), *both(counted=True))]
    varlen.cached_packed = public.cached_packed = cached
    return Repeated((frames[0], frames[1]), (kernels[0], kernels[1]), found, alone)


def _frames(step: Callable[[], Any]) -> int:
    found = 0

    def count(frame: FrameType, event: str, _: Any) -> None:
        nonlocal found
        name = frame.f_globals.get("__name__", "")
        found += event == "call" and (name.startswith("tilewise.") or frame.f_code.co_filename == "<tilewise launch>")

    sys.setprofile(count)
    try:
        step()
    finally:
        sys.setprofile(None)
    return found


def _pass_for_a_gpu() -> list[str]:
    """Let tensors pass for a Hopper GPU's, without Triton's compiler and launcher; return the names of kernels that
    will be launched."""
    from tilewise.backends.launch import launcher, short_launch
    from tilewise.spec.problem import Problem

    launched: list[str] = []

    class Compiled:
        def __init__(self, name: str) -> None:
            self.name, self.metadata = name, SimpleNamespace(tensordesc_meta=[1] * 24)

    def ask(self: Any, tensors: Any, wants: tuple) -> Any:
        launched.append(self.kernel.__name__)
        return launcher.kernels.put(wants, Compiled(self.kernel.__name__))

    def run_of(compiled: Compiled, _: bool) -> tuple[Any, tuple]:
        return lambda *_: launched.append(compiled.name), ()

    launcher.CompiledKernel, launcher.Launch._ask = Compiled, ask
    launcher.knows_launcher, launcher._bind, launcher._thread.bound = lambda _: True, lambda: None, True
    active = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda _: 0)
    short_launch.driver = SimpleNamespace(active=active)
    short_launch._launcher, short_launch._descriptor_maker = run_of, lambda: lambda *_: 1
    short_launch._box = lambda *_: (0,) * 5
    of = Problem.of
    Problem.of = lambda *args, **more: replace(of(*args, **more), device="cuda", capability=(9, 0))
    torch.Tensor.is_cuda, torch.Tensor.is_cpu = True, False
    return launched
