"""Facts about a problem that the launches of both passes ask for."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from tilewise.backends.gluon.sm90.common.config import band_of
from tilewise.backends.launch.launcher import kinds
from tilewise.spec import tiles
from tilewise.spec.problem import Problem


def bias_axes(problem: Problem) -> str:
    """The bias's `axes`, but "rows" for "one" as well: both are constant along the keys and move the LSE
    alone. "none" without a bias."""
    if problem.bias is None:
        return "none"
    return "rows" if problem.bias.axes == "one" else problem.bias.axes


def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


@lru_cache(1024)
def limits_of(lo: int | None, hi: int | None) -> tuple[int, int, tuple[Any, ...]]:
    """The band's limits as kernels get them, and their `kinds`."""
    limits = tiles.clipped(lo, hi)
    return *limits, kinds(limits)


def hides(problem: Problem) -> bool:
    """Whether the forward kernel may multiply a pair that is hidden, or a bias that its units cannot hold."""
    return always_hides(problem) or tiles.hides(*band_of(problem))


def always_hides(problem: Problem) -> bool:
    """Whatever the lengths."""
    toeplitz = problem.parts is not None and problem.parts.toeplitz is not None
    if problem.mask is not None or toeplitz or bias_axes(problem) in ("matrix", "cols"):
        return True
    # Of a packed batch a band counts from each sequence's end, and its lengths lie on the device.
    return problem.totals is not None and not problem.score.band.unlimited
