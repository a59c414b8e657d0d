"""What resized launches hand over, in a child process of `aot_compilers.Compilers`: see test_launcher.py."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from launcher_child import triton_launcher, utilities
from torch import Tensor

BRAIN = torch.bfloat16
HEADS, LONGEST = 4, 700


def laid(layout: str, n: int, dim: int, batch: int = 2) -> Tensor:
    """(batch, HEADS, n, dim): dense, heads last, in a cache or a longer one, or with gaps between rows."""
    if layout == "heads last":
        return torch.zeros(batch, n, HEADS, dim, dtype=BRAIN).transpose(1, 2)
    if layout == "cache":
        return torch.zeros(batch, HEADS, LONGEST, dim, dtype=BRAIN)[:, :, :n]
    if layout == "longer cache":
        return torch.zeros(batch, HEADS, LONGEST + 100, dim, dtype=BRAIN)[:, :, :n]
    if layout == "wide":
        return torch.zeros(batch, HEADS, n, 2 * dim, dtype=BRAIN)[..., :dim]
    return torch.zeros(batch, HEADS, n, dim, dtype=BRAIN)


def resized_arguments(
    backend: str, calls: list[tuple[str, str, int, int]], more: dict[str, bool]
) -> tuple[list[tuple[Any, Any]], int]:
    """Of each call, one after the other, what its forward and backward hand to the launcher in C, and then, watched by
    hooks, to Triton; what they do where no call came before; and how many launches were resized.

    calls: layouts of q and of k and v, M and N. more: batch, and whether it is causal, has a bias and a sink. Triton
    compiles nothing, and tensors on the CPU pass for a Hopper GPU's.
    """
    from triton import knobs
    from triton.backends.nvidia import driver as nvidia
    from triton.runtime import driver

    from tilewise import attention, cache
    from tilewise.backends.launch import launcher
    from tilewise.operator import dispatch
    from tilewise.spec.problem import Problem

    class Driver(nvidia.CudaDriver):
        def __init__(self) -> None:
            self.utils = utilities(lambda address, *given: ("map", address, *given))
            self.get_current_device = self.get_current_stream = lambda *_: 0

    def ask(self: launcher.Launch, tensors: Any, wants: tuple) -> Any:
        """In the place of a compiled kernel one that writes down what it gets."""
        metas, signature, name = [], {}, self.kernel.__name__
        for n, x in enumerate(self.layouts):
            signature[n] = "*bf16"
            if hasattr(x, "block_shape"):
                signature[n] = "tensordesc<bf16[64,64]>"
                box = list(x.block_shape)
                metas.append({"swizzle": 3, "elem_size": 2, "elem_type": 5, "block_size": box, "fp4_padded": False})
        options = dict.fromkeys(("launch_cooperative_grid", "launch_pdl"), False)
        scratch = {f"{kind}_scratch_{of}": of == "align" for kind in ("global", "profile") for of in ("size", "align")}
        metadata = SimpleNamespace(tensordesc_meta=metas, num_ctas=1, **options, **scratch)
        names[str(wants)] = name
        launched = lambda head, args: log.append((names[head[4]], head[0], head[4], *args))  # noqa: E731
        run = triton_launcher(SimpleNamespace(signature=signature), metadata, launched)
        return launcher.kernels.put(wants, Compiled(name, str(wants), metadata, run))

    log: list[tuple] = []
    names: dict[str, str] = {}  # of kernels, by their functions: from Triton 3.7 on all have one launcher in C
    of = Problem.of.__func__  # type: ignore[attr-defined]

    def on_hopper(cls: Any, *given: Any, **options: Any) -> Problem:
        return dataclasses.replace(of(cls, *given, **options), device="cuda", capability=(9, 0))

    class Compiled:
        def __init__(self, name: str, wants: str, metadata: Any, run: Any) -> None:
            self.name, self.function, self.metadata, self.run, self.packed_metadata = name, wants, metadata, run, ()

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            """The way of launches that hooks watch."""
            return lambda *args: log.append((self.name, grid[0], self.function, *args))

    def step(x: list[Tensor], options: dict[str, Any]) -> list[Any]:
        log.clear()
        for watched in (False, True):
            with mock.patch.object(knobs.runtime, "launch_enter_hook", print if watched else None):
                known = one_step(x, options)
        return [named(args, known) for args in log]

    def one_step(x: list[Tensor], options: dict[str, Any]) -> dict[int, str]:
        o = attention(*x, **options, causal=more["causal"], backend=backend)
        do = torch.zeros(o.shape, dtype=BRAIN)
        torch.autograd.grad(o, x, do)
        return {y.data_ptr(): name for name, y in (*zip("qkv", x, strict=True), *options.items())}

    found, batch = [], 1 if more["single"] else 2
    with (
        mock.patch.object(driver, "_active", Driver()),
        mock.patch.object(Problem, "of", classmethod(on_hopper)),
        mock.patch.object(launcher.Launch, "_ask", ask),
        mock.patch.object(launcher, "kernels", cache.CallCache(1024)),
        mock.patch.object(launcher, "knows_launcher", return_value=True),
        mock.patch.object(launcher._thread, "bound", True),
        mock.patch.object(launcher.Whole, "whole", autospec=True, side_effect=launcher.Whole.whole) as whole,
        torch.autograd.set_multithreading_enabled(False),
    ):
        made = []
        for q_layout, layout, M, N in calls:
            x = [laid(q_layout, M, 64, batch), laid(layout, N, 64, batch), laid(layout, N, 64, batch)]
            options: dict[str, Any] = {}
            if more["bias"]:
                options["bias"] = torch.zeros(1, HEADS, M, 16 * -(-N // 16), dtype=BRAIN)[..., :N]
            if more["sink"]:
                options["sink"] = torch.zeros(HEADS, dtype=BRAIN)
            made.append(([y.requires_grad_() for y in x], options))
        cache.calls.clear()
        for x, options in made:
            step(x, options)
        for prepared in (cache.calls._recent, cache.calls._older):  # variants stay, with what was prepared first
            for key in [key for key in prepared if key[0] in ("call", "forward", "backward")]:
                del prepared[key]
        whole.reset_mock()
        after = [step(x, options) for x, options in made]
        # Of those that hooks see, how many the launcher in C has launched before.
        count = sum(given.args[0].is_short for given in whole.call_args_list)
        for (x, options), mine in zip(made, after, strict=True):
            cache.calls.clear()
            with mock.patch.object(dispatch, "_keep_variant", return_value=False):  # nothing to resize
                for _ in range(2):  # the first asks for kernels
                    alone = step(x, options)
            found.append((mine, alone))
    return found, count


def named(x: Any, known: dict[int, str]) -> Any:
    """Addresses by what lies there, or as a word; constants by their values."""
    if isinstance(x, Tensor):
        x = x.data_ptr()
    if hasattr(x, "block_shape"):
        x = x.base, x.shape, x.strides, x.block_shape
    if isinstance(x, (tuple, list)):
        return [named(y, known) for y in x]
    if isinstance(x, int) and not isinstance(x, bool):
        return known.get(x, "made by the call") if x >= 2**40 else x
    return x if isinstance(x, (float, str, type(None), bool)) else str(x)
