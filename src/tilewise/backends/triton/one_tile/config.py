"""Options of the one-tile kernels, and how their programs share the work. Does not import triton."""

from __future__ import annotations

from typing import NamedTuple

from tilewise.backends.triton.config import padded
from tilewise.spec.problem import Problem

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
