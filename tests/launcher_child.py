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
from room_child import launches
from soak import problems


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

    pairs = []

    def compare(launch: launcher.Launch, *tensors: torch.Tensor | None) -> None:
        through_triton(launch, *tensors)  # compiles
        compiled = launch._compiled
        compiled.module, compiled.function = None, "function"  # Triton unloads what is a module
        compiled._run = triton_launcher(compiled.src, compiled.metadata, lambda *args: given.append(args))
        with mock.patch.object(compiled, "_init_handles"):
            through_triton(launch, *tensors)
        with mock.patch.object(launcher._thread, "bound", True):
            assert launcher._short(launch, compiled, tensors).launch(tensors)
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
