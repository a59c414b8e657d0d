"""Shared by the sweeps: interleaved runs, comparison of results, selection of cases."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

Options = argparse.Namespace
Step = Callable[[], Sequence[Tensor]]
Found = TypeVar("Found")


def in_turns(
    takes: Mapping[str, Callable[[], Found]], turns: int, unmeasured: int = 0, seconds: float = 0.0
) -> dict[str, list[Found]]:
    """Run all ``takes`` in interleaved rounds and return the results of each.

    There are at least ``turns`` rounds after the first ``unmeasured``, for at least ``seconds``. The order rotates in
    every round.
    """
    found: dict[str, list[Found]] = {name: [] for name in takes}
    names, start, turn = [*takes], time.perf_counter(), 0
    while turn < unmeasured + turns or time.perf_counter() - start < seconds:
        for i in range(len(names)):
            name = names[(i + turn) % len(names)]
            result = takes[name]()
            if turn >= unmeasured:
                found[name].append(result)
        turn += 1
    return found


def medians(found: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: statistics.median(times) for name, times in found.items()}


def elapsed(step: Callable[[], object], calls: int = 1, clock: Callable[[], float] = time.perf_counter) -> float:
    """Return the mean seconds of a call."""
    start = clock()
    for _ in range(calls):
        step()
    return (clock() - start) / calls


def difference(found: Iterable[Tensor], right: Iterable[Tensor], tolerance: float, name: str) -> float:
    """Return the largest difference, relative to the largest element; exit above ``tolerance``."""
    errors = [((x - y).abs().max() / y.abs().max()).item() for x, y in zip(found, right, strict=True)]
    for error in errors:
        if not error <= tolerance:  # also if it is NaN
            raise SystemExit(f"{name}: the results differ by {error:.1e} of their largest element")
    return max(errors)


def verdict(met: bool | None) -> str:
    return {True: "met", False: "MISSED", None: ""}[met]


def is_wanted(name: str, options: Options) -> bool:
    return not options.parts or any(part in name for part in options.parts)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
