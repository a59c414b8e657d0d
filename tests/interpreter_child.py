"""What runs in the child process of the fixture `interpreter` of conftest.py, where Triton's kernels are Python."""

from __future__ import annotations

import os
import pkgutil
import warnings
from collections.abc import Callable
from typing import Any

import bytecode_written  # noqa: F401  (before torch)
import torch
from garbage import collect_seldom
from helpers import Case, Tensors
from torch import Tensor

from tilewise.spec.problem import Problem
from tilewise.spec.score import Band, Score


def start() -> None:
    """Make this process an interpreter of Triton kernels; triton reads the variable when it is imported."""
    os.environ["TRITON_INTERPRET"] = "1"
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    # numpy speaks up where a GPU computes on: log2(0), inf - inf, a product of NaN, an overflow that marks one.
    for message in (
        "divide by zero encountered in log2", "invalid value encountered", "overflow encountered", "All-NaN slice",
    ):  # fmt: skip
        warnings.filterwarnings(
            "ignore", message, RuntimeWarning, r"triton\.runtime\.interpreter|interpreter_speed|numpy\..*"
        )
    warnings.filterwarnings("ignore", ".*torch.jit.script", DeprecationWarning)  # by PyTorch's forward AD
    import interpreter_speed  # which imports triton

    interpreter_speed.hurry()
    collect_seldom()


def call(function: Callable[..., Any] | str, *arguments: Any) -> Any:
    return (pkgutil.resolve_name(function) if isinstance(function, str) else function)(*arguments)


def watch_integers(function: Any, *arguments: Any) -> Any:
    """``function(*arguments)``, where integers that overflow are an error."""
    from interpreter_speed import watch_overflow

    watch_overflow(True)
    try:
        return function(*arguments)
    finally:
        watch_overflow(False)


def without_atomics(function: Any, *arguments: Any) -> Any:
    """``function(*arguments)``, where an atomic addition is an error."""
    from triton.runtime import interpreter

    def refuse(*_) -> None:
        raise AssertionError("an atomic, in whose order nothing is fixed")

    interpreter.interpreter_builder.create_atomic_rmw = refuse
    try:
        return function(*arguments)
    finally:
        del interpreter.interpreter_builder.create_atomic_rmw


def problem_of(case: Case, x: Tensors) -> Problem:
    score = Score(1.0, None, Band.aligned(case.causal, case.window, case.N - case.M))
    return Problem.of(x.q, x.k, x.v, x.bias, x.mask, *(None,) * 5, score, deterministic=case.deterministic)


def make_sparse(mask: Tensor) -> None:
    """Of blocks of 128 x 64 leave some as they are, hide a quarter, and show the others."""
    block = (torch.arange(mask.shape[2])[:, None] // 128 + torch.arange(mask.shape[3]) // 64) % 4
    mask[:] = torch.where(block == 0, mask, block != 1)
