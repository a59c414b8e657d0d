"""Kernel arguments for a Toeplitz bias.

Nothing here imports triton: the plan calls it on machines without triton.
"""

from __future__ import annotations

from typing import Any

from tilewise.spec.problem import Problem
from tilewise.spec.score import Far

# Queries, and so keys, from which on underflowing tiles are skipped: with fewer keys the norms cost more than the
# skipping saves (H200, 16 heads of 64, backward, fraction of the speed without a bias: 0.66 became 0.56 at 2,048, and
# 0.87 became 1.03 at 4,096).
UNDERFLOW_FROM = 4096


def far_of(problem: Problem) -> Far | None:
    """Return the distances at which Toeplitz entries need not be read, clipped to those of the call."""
    far = problem.score.toeplitz
    if far is None or problem.parts is None or problem.parts.toeplitz is None:
        return None
    M, N = problem.queries, problem.keys
    lo = min(max(far.lo, -M), N - 1)
    return Far(lo, max(min(max(far.hi, 1 - M), N), lo), far.linear)


def far_numbers(problem: Problem) -> dict[str, Any]:
    """Return the Toeplitz fields of `GluonScoreArgs`."""
    far = far_of(problem)
    return {} if far is None else {"far_lo": far.lo, "far_hi": far.hi}


def toeplitz_constants(problem: Problem, block: int) -> dict[str, Any]:
    """Return the Toeplitz constants of the kernels; ``block``: an upper bound of the rows and columns of a tile.

    A mask lists tiles in its own order: with a mask all entries are read.
    """
    far = far_of(problem)
    if far is None or problem.parts is None or problem.parts.toeplitz is None:
        return {
            "TOEPLITZ": "none", "TOEPLITZ_BATCH": False, "TOEPLITZ_GROUP": 1, "FAR_LO": False, "FAR_HI": False,
            "UNDERFLOWS": False,
        }  # fmt: skip
    band, vector = problem.score.band, problem.parts.toeplitz
    least, most = 1 - problem.queries, problem.keys - 1
    least = least if band.lo is None else max(band.lo, least)
    most = most if band.hi is None else min(band.hi, most)
    plain = problem.mask is None
    far_lo, far_hi = plain and far.lo - least >= block, plain and most - far.hi >= block
    return {
        "TOEPLITZ": "line" if far.linear else "number",
        "TOEPLITZ_BATCH": vector.batch > 1,
        "TOEPLITZ_GROUP": problem.heads // vector.heads,
        "FAR_LO": far_lo,
        "FAR_HI": far_hi,
        "UNDERFLOWS": far.linear and (far_lo or far_hi) and _may_underflow(problem),
    }


def sure_distance(problem: Problem) -> int | None:
    """Return a distance near 0 at which every query sees a key; None if there is none, or if it is not known."""
    far, band, most = far_of(problem), problem.score.band, problem.keys - problem.queries
    if far is None or most < 0 or problem.mask is not None or problem.totals is not None:
        return None
    distance = min(max((far.lo + far.hi) // 2, 0), most)
    hidden = (band.lo is not None and distance < band.lo) or (band.hi is not None and distance > band.hi)
    return None if hidden else distance


def _may_underflow(problem: Problem) -> bool:
    """True if the kernels skip far tiles whose probabilities underflow to 0, see `common.underflow`."""
    return problem.queries >= UNDERFLOW_FROM and sure_distance(problem) is not None
