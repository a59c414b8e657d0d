"""Choice of the one-tile kernels, and how their programs share the work. Does not import triton."""

from __future__ import annotations

from typing import NamedTuple

from tilewise.backends.triton.config import padded
from tilewise.spec.operands import BiasKind
from tilewise.spec.problem import Problem

MOST = 64  # queries, and keys, of a tile
MOST_WIDTH = 64  # head and value dimension; with more, or in float32, registers spill thousands of bytes
LEAST_SEQUENCES = 128  # heads of all batch elements; with fewer, a GPU has nothing to do beside the first tile
# Twelve for each multiprocessor of an H200. The number does not depend on the device, so that the bits of dBias, a sum
# over programs, do not either.
WARPS = 12 * 132
MOST_REGISTERS = 168  # of a thread, so that twelve warps share the 65,536 of a multiprocessor


class Options(NamedTuple):
    """Options of a `Launch`."""

    num_warps: int
    num_stages: int
    maxnreg: int | None


class Sharing(NamedTuple):
    """Matrices of bias and mask, and the programs that share one.

    Batch element b and head h have matrix (b % batch, h % heads). masks_vary: the mask differs between elements that
    share a matrix, so it is read for each of them.
    """

    batch: int
    heads: int
    programs: int
    masks_vary: bool


def fits(problem: Problem) -> bool:
    """True if the one-tile kernels compute the problem."""
    p = problem
    if p.totals is not None or p.parts is not None or p.sink is not None or p.tile_mask is not None:
        return False
    if p.score.dropout or p.group != 1 or p.few_queries or p.batch * p.heads < LEAST_SEQUENCES:
        return False
    if p.bias is not None and p.bias.axes != BiasKind.MATRIX:
        return False
    small = max(p.queries, p.keys) <= MOST and max(p.head_dim, p.value_dim) <= MOST_WIDTH
    return small and p.dtype.itemsize == 2


def options(problem: Problem, backward: bool) -> Options:
    """Return the options of a pass. Where registers would spill much, fewer warps share a multiprocessor instead."""
    warps = padded(max(problem.queries, problem.keys)) // 16
    if max(problem.head_dim, problem.value_dim) <= 32:
        return Options(warps, 3, MOST_REGISTERS)
    return Options(warps, 1, None) if backward else Options(warps, 2, MOST_REGISTERS)


def sharing(problem: Problem) -> Sharing:
    p, most = problem, WARPS // options(problem, False).num_warps
    batch, heads = (1, 1) if p.bias is None else (p.bias.batch, p.bias.heads)
    vary = False
    if p.mask is not None:
        whole = max(batch, p.mask.batch), max(heads, p.mask.heads)
        vary = whole != (batch, heads) and whole[0] * whole[1] > most
        if not vary:
            batch, heads = whole
    sequences = p.batch // batch * (p.heads // heads)
    return Sharing(batch, heads, min(sequences, max(1, most // (batch * heads))), vary)


def tiles(problem: Problem) -> str:
    """Describe the tiles in words, for explain()."""
    found = sharing(problem)
    rows, cols = padded(problem.queries), padded(problem.keys)
    programs = found.batch * found.heads * found.programs
    return f"whole sequences in tiles of {rows} queries x {cols} keys, one after the other, by {programs:,} programs"
