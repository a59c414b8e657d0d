"""A Toeplitz bias, as the kernels of this folder are told of it.

Nothing here imports triton: the plan asks on machines that have none.
"""

from __future__ import annotations

from typing import Any

from tilewise.problem import Problem
from tilewise.score.terms import Far


def far_of(problem: Problem) -> Far | None:
    """Where the entries of its Toeplitz bias need not be read, within the distances that the call has."""
    far = problem.score.toeplitz
    if far is None or problem.parts is None or problem.parts.toeplitz is None:
        return None
    M, N = problem.queries, problem.keys
    lo = min(max(far.lo, -M), N - 1)
    return Far(lo, max(min(max(far.hi, 1 - M), N), lo), far.linear)


def far_numbers(problem: Problem) -> dict[str, Any]:
    """Fields of `score.Terms`."""
    far = far_of(problem)
    return {} if far is None else {"far_lo": far.lo, "far_hi": far.hi}


def toeplitz_constants(problem: Problem, block: int) -> dict[str, Any]:
    """What kernels know of it when they are compiled; ``block``: a bound for the rows and columns of a tile.

    A mask lists tiles in an order of its own: beside one all entries are read.
    """
    far = far_of(problem)
    if far is None or problem.parts is None or problem.parts.toeplitz is None:
        return {"TOEPLITZ": "none", "TOEPLITZ_BATCH": False, "TOEPLITZ_GROUP": 1, "FAR_LO": False, "FAR_HI": False}
    band, vector = problem.score.band, problem.parts.toeplitz
    least, most = 1 - problem.queries, problem.keys - 1
    least = least if band.lo is None else max(band.lo, least)
    most = most if band.hi is None else min(band.hi, most)
    plain = problem.mask is None
    return {
        "TOEPLITZ": "line" if far.linear else "number",
        "TOEPLITZ_BATCH": vector.batch > 1,
        "TOEPLITZ_GROUP": problem.heads // vector.heads,
        "FAR_LO": plain and far.lo - least >= block,
        "FAR_HI": plain and most - far.hi >= block,
    }
