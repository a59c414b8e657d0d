"""Many short sequences: hopper leaves them to triton, which computes each in one tile."""

from __future__ import annotations

from tilewise.spec.operands import BiasKind
from tilewise.spec.problem import Problem

MOST = 64  # queries, and keys, of a tile
MOST_WIDTH = 64  # head and value dimension; with more, or in float32, registers spill thousands of bytes
LEAST_SEQUENCES = 128  # heads of all batch elements; with fewer, a GPU has nothing to do beside the first tile


def fit_tiles(problem: Problem) -> bool:
    """True if each sequence of the problem is computed in one tile."""
    p = problem
    if p.totals is not None or p.parts is not None or p.sink is not None or p.tile_mask is not None:
        return False
    if (
        any(p.score.statistics)
        or p.score.dropout
        or p.group != 1
        or p.few_queries
        or p.batch * p.heads < LEAST_SEQUENCES
    ):
        return False
    if p.bias is not None and (p.bias.axes != BiasKind.MATRIX or p.bias_in_runs):
        return False
    small = max(p.queries, p.keys) <= MOST and max(p.head_dim, p.value_dim) <= MOST_WIDTH
    return small and p.dtype.itemsize == 2
