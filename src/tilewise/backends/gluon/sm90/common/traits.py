"""Properties of a problem that the launches of both passes need."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from tilewise.backends.gluon.sm90.common.config import band_of
from tilewise.backends.launch.launcher import kinds
from tilewise.spec import tiles
from tilewise.spec.operands import BiasKind
from tilewise.spec.problem import Problem


def bias_axes(problem: Problem) -> BiasKind:
    """Return the bias's `axes`, with "rows" for "one" too: both are constant along the keys and change only the LSE.
    "none" without a bias."""
    if problem.bias is None:
        return BiasKind.NONE
    return BiasKind.ROWS if problem.bias.axes == BiasKind.ONE else problem.bias.axes


def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


@lru_cache(1024)
def limits_of(lo: int | None, hi: int | None) -> tuple[int, int, tuple[Any, ...]]:
    """Return the window's limits as kernel arguments, and their `kinds`."""
    limits = tiles.clipped(lo, hi)
    return *limits, kinds(limits)


def hides(problem: Problem) -> bool:
    """True if the forward kernel may multiply masked pairs, or a bias that overflows the units of the scores."""
    return always_hides(problem) or tiles.hides(*band_of(problem))


def always_hides(problem: Problem) -> bool:
    """True if `hides` holds for all lengths."""
    toeplitz = problem.parts is not None and problem.parts.toeplitz is not None
    if problem.mask is not None or toeplitz or bias_axes(problem) in (BiasKind.MATRIX, BiasKind.COLS):
        return True
    # In a packed batch the window counts from each sequence's end, and the lengths are on the device.
    return problem.totals is not None and not problem.score.band.unlimited
