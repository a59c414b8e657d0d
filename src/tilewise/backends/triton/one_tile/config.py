"""Tiles and options of the one-tile kernels, and how their programs share the work. Does not import triton."""

from __future__ import annotations

from typing import NamedTuple

from tilewise.backends.triton.config import TritonConfig, padded
from tilewise.spec.problem import Problem

# Twelve for each multiprocessor of an H200. The number does not depend on the device, so that the bits of dBias, a sum
# over programs, do not either.
WARPS = 12 * 132
MOST_REGISTERS = 168  # of a thread, so that twelve warps share the 65,536 of a multiprocessor


class Sharing(NamedTuple):
    """Matrices of bias and mask, and the programs that share one.

    Batch element b and head h have matrix (b % batch, h % heads). masks_vary: the mask differs between elements that
    share a matrix, so it is read for each of them.
    """

    batch: int
    heads: int
    programs: int
    masks_vary: bool


def one_tile_config(problem: Problem, backward: bool) -> TritonConfig:
    """Return the config of a pass. Where registers would spill much, fewer warps share a multiprocessor instead."""
    rows, cols = padded(problem.queries), padded(problem.keys)
    warps = max(rows, cols) // 16
    if max(problem.head_dim, problem.value_dim) <= 32:
        return TritonConfig(rows, cols, warps, 3, maxnreg=MOST_REGISTERS)
    if backward:
        return TritonConfig(rows, cols, warps, 1)
    return TritonConfig(rows, cols, warps, 2, maxnreg=MOST_REGISTERS)


def sharing(problem: Problem) -> Sharing:
    """Return which elements share a matrix, and how many programs their sequences have."""
    p, most = problem, WARPS // one_tile_config(problem, False).num_warps
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
    c, found = one_tile_config(problem, False), sharing(problem)
    programs = found.batch * found.heads * found.programs
    return (
        f"whole sequences in tiles of {c.block_m} queries x {c.block_n} keys, one after the other, by {programs:,} "
        "programs"
    )
