"""What a launch hands over, in a child process of `aot_compilers.Compilers`: see test_launcher.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import aot_child
import relative_helpers
import torch
from helpers import Case, rows_of, tensors
from relative_helpers import Term
from room_child import launches, no_machine_code
from soak import problems
from torch import Tensor

BRAIN = torch.bfloat16
HEADS, LONGEST = 4, 700
# Of a kernel that takes none.
SCRATCH = {f"{kind}_scratch_{of}": of == "align" for kind in ("global", "profile") for of in ("size", "align")}


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
) -> tuple[list[tuple[Any, Any]], int, int]:
    """Of each call, one after the other, what its forward and backward hand to the launcher in C, and then, watched by
    hooks, to Triton; what they do where no call came before; how many launches were resized; and how many of the first
    call, repeated, do not go to the launcher in C.

    calls: layouts of q and of k and v, M and N. more: batch, and whether it is causal, has a window, a scale, a bias
    and a sink. Triton compiles nothing, and tensors on the CPU pass for a Hopper GPU's.
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
        metadata = SimpleNamespace(tensordesc_meta=metas, num_ctas=1, **options, **SCRATCH)
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
        window, scale = (90, None) if more["window"] else None, 0.3 if more["scale"] else None
        o = attention(*x, **options, causal=more["causal"], window=window, scale=scale, backend=backend)
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
        with mock.patch.object(launcher.Launch, "__call__", autospec=True) as triton_way:
            one_step(*made[0])
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
    return found, count, triton_way.call_count


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


def launcher_arguments(case: Case, backend: str, terms: tuple[Term, ...] = ()) -> list[tuple[str, Any, Any]]:
    """For every launch of a case: the kernel's name, and what Triton and `launcher.Short` give the launcher in C.

    The tensors are on the CPU and nothing is launched. Hooks and what Triton makes for them are left out.
    """
    from triton.runtime import driver

    from tilewise.backends import Inputs, Needs, Outputs
    from tilewise.backends.launch import launcher
    from tilewise.frontend.arguments import read_call
    from tilewise.spec.bias_components import DIFFERENTIABLE
    from tilewise.spec.problem import Problem
    from tilewise.spec.score import Band, Score

    given: list[tuple] = []
    driver.active.utils = utilities(lambda *args: ("map", *map(str, args)))
    if backend == "hopper":
        from tilewise.backends.gluon.sm90.backward.launch import HopperBackward as Backward
        from tilewise.backends.gluon.sm90.forward.launch import HopperForward as Forward
    else:
        from tilewise.backends.triton.launch import TritonBackward as Backward
        from tilewise.backends.triton.launch import TritonForward as Forward

    pairs, kernels = [], set()
    memory = {"shared": 0, "tmem_size": 0} | SCRATCH

    def compare(launch: launcher.Launch, *tensors: torch.Tensor | None) -> None:
        kernels.add(launch.kernel)
        with no_machine_code(memory):  # what a launch takes, descriptors too, is known before there is any
            through_triton(launch, *tensors)  # compiles
        compiled = launch._compiled
        compiled.module, compiled.function = None, "function"  # Triton unloads what is a module
        compiled._run = triton_launcher(compiled.src, compiled.metadata, lambda *args: given.append(args))
        with mock.patch.object(compiled, "_init_handles"):
            through_triton(launch, *tensors)
        with mock.patch.object(launcher._thread, "bound", True):
            assert launcher._short(launch, compiled, tensors).launch(*tensors)
        own, short = (_by_address(args) for args in given[-2:])
        pairs.append((launch.kernel.__name__, own, short))

    through_triton, launcher.Launch.__call__ = launcher.Launch.__call__, compare
    try:
        x = tensors(case)
        seed = torch.tensor([1, 2]) if case.dropout_p else None
        inputs = Inputs(*x[:5], None if x.sink is None else rows_of(x.sink), seed=seed)
        score = Score.of(Band(), case.D, dropout_p=case.dropout_p)
        if terms:
            made = [
                term.of(leaf, case) for term, leaf in zip(terms, relative_helpers.made(case, terms, "cpu"), strict=True)
            ]
            call = read_call(
                *x[:3], bias=(x.bias, *made), mask=x.mask, sink=None, causal=False, window=None, dropout_p=0.0,
                dropout_seed=None, deterministic=None, backend=None,
            )  # fmt: skip
            inputs, score = call.inputs, call.score
        wanted = [
            name for name in DIFFERENTIABLE if inputs.parts is not None and getattr(inputs.parts, name) is not None
        ]
        problem = Problem.of(*inputs, score, bias_grad=True, part_grads=tuple(wanted))
        problem = dataclasses.replace(problem, device="cuda", capability=aot_child._capability)
        outputs = Forward(problem, inputs)(inputs)
        cotangents, needs = Outputs(x.do, x.dlse), Needs(True, True, True, True, **dict.fromkeys(wanted, True))
        Backward(problem, inputs, outputs, cotangents, needs)(inputs, outputs, cotangents)
    finally:
        launcher.Launch.__call__ = through_triton
        for kernel in kernels:
            kernel.device_caches.clear()  # nobody else is to get what has no machine code
    return pairs


def utilities(make_descriptor: Callable[..., Any]) -> SimpleNamespace:
    """Stands in for the functions of Triton's driver in C; `triton_launcher` gives it the launcher."""
    return SimpleNamespace(
        fill_tma_descriptor=make_descriptor, fill_tma_descriptor_tiled=make_descriptor, build_signature_metadata=tuple
    )


def triton_launcher(source: Any, metadata: Any, launched: Callable[[tuple, tuple], None]) -> Any:
    """Make Triton's own `CudaLauncher` of a kernel around a launcher in C that only says what it gets: what is the same
    for all kernels, without hooks and what Triton makes for them, and the kernel's arguments."""
    from triton.backends.nvidia import driver as nvidia
    from triton.runtime import driver

    from tilewise.backends.launch.launcher import VERSION

    if VERSION == (3, 6):
        run = object.__new__(nvidia.CudaLauncher)
        launch = lambda *args: launched(args[:10], args[13:])  # noqa: E731
        run.launch = nvidia.wrap_handle_tensordesc(launch, source.signature, metadata.tensordesc_meta)
        run.global_scratch_size = run.profile_scratch_size = 0
        run.global_scratch_align = run.profile_scratch_align = 1
        run.launch_cooperative_grid, run.launch_pdl = metadata.launch_cooperative_grid, metadata.launch_pdl
        return run
    driver.active.utils.launch = lambda *args: launched((*args[:8], *args[11:15]), tuple(args[15]))
    with mock.patch.object(nvidia, "PyKernelArg", lambda nested_tuple, type: (type, nested_tuple)):
        return nvidia.CudaLauncher(source, metadata)


def _by_address(args: Any) -> Any:
    """Tensors replaced by their addresses, constants by their values, for comparison and for the way back."""
    if isinstance(args, (tuple, list)):
        return tuple(_by_address(x) for x in args)
    if isinstance(args, torch.Tensor):
        return args.data_ptr()
    return args if isinstance(args, (int, float, str, type(None))) else str(args)


def wanted(kernels: Sequence[int], count: int) -> list[tuple[str, str]]:
    """For every launch of ``count`` problems of each of the soak's kernels: what it wants, and all that Triton chooses
    a kernel by. Nothing is compiled."""
    from tilewise.backends.launch import launcher

    found: list[tuple[str, str]] = []

    def ask(launch: launcher.Launch, *tensors: torch.Tensor | None) -> None:
        aligned = [x is not None and x.data_ptr() % 16 == 0 for x in tensors]
        kernel = launch.kernel
        *_, bind = kernel.device_caches[0]
        _, chosen, options = bind(*launch._arguments(tensors), debug=False, instrumentation_mode="", **launch.options)
        found.append((str(launch.wants(tensors, aligned)), f"{kernel.__name__} {chosen} {options}"))

    through_triton, launcher.Launch.__call__ = launcher.Launch.__call__, ask
    try:
        for n in kernels:
            for case, backend, terms in problems(n, count):
                launches(case, backend, terms=terms)
    finally:
        launcher.Launch.__call__ = through_triton
    return found
