"""Sizes of a backward, and the properties of its lengths that are compiled in."""

from __future__ import annotations

from typing import Any

from tilewise.backends.gluon.sm90.backward.scheduler import BackwardSizes
from tilewise.backends.gluon.sm90.common.config import BackwardConfig, head_swizzle
from tilewise.spec import tiles
from tilewise.spec.problem import Problem


def sized(
    config: BackwardConfig,
    shape: tuple[int, ...],
    queries: int,
    keys: int,
    multiprocessors: int,
    *,
    run: int = 1,
    zeroed_before: bool = False,
) -> tuple[BackwardSizes, int]:
    """Return the `BackwardSizes` and the number of groups of programs.

    shape: batch, key/value heads, query heads of each; then batch elements and key/value heads that share a bias, and
    programs of a group, or 1 each. In the batched CTA, whose elements are a group, the elements that share a bias are
    padded to a multiple. run: `BackwardSizes.run`. zeroed_before: programs do not zero dq_accum of later heads."""
    batch, kv_heads, group, broadcast_batch, broadcast_heads, broadcast_programs = shape
    row_tiles, key_tiles, heads = -(-queries // config.block_m), -(-keys // config.block_n), batch * kv_heads
    groups = key_tiles * heads // broadcast_programs
    # A group has about ended when the group starts that is as many groups later as a GPU runs at once.
    lag = -(-multiprocessors * config.programs * config.elements // broadcast_programs)
    ds_buffer_groups = min(2 * lag + 2, groups)
    # All programs of a head have begun when the head starts that is as much later as a GPU runs at once, plus one;
    # `backward.scheduler.head_and_tile` mixes some.
    zeroed = heads if config.dq_stored or zeroed_before else -(-lag // key_tiles) + 1
    zeroed = -(-zeroed // config.head_swizzle) * config.head_swizzle
    # In the batched CTA heads take turns in dq_accum: those of a group have ended when half as many groups again have
    # begun, plus one. The preprocess zeroes a place only for heads that exist; each half of the places has full groups.
    if config.elements > 1:
        zeroed = 2 * (-(-3 * lag // (2 * key_tiles)) + 1) * config.elements
        there = heads - (config.elements - 1) * kv_heads * (batch // broadcast_batch)  # at least
        zeroed = min(zeroed, there) // (2 * config.elements) * (2 * config.elements)
    found = (
        batch, kv_heads, group, queries, keys, row_tiles, key_tiles, broadcast_batch, broadcast_heads,
        ds_buffer_groups, lag, min(zeroed, heads), run,
    )  # fmt: skip
    return tuple.__new__(BackwardSizes, found), groups


def choices(
    problem: Problem, config: BackwardConfig, always_hides: bool, queries: int, keys: int, lo: int | None,
    hi: int | None, work_tiles: int, programs: int,
) -> tuple[Any, ...]:  # fmt: skip
    """Return what is compiled in for these lengths and window limits, without a bias, a mask and parts."""
    return (
        keys <= config.block_n,  # decides dq_stored, with the tile of ``config`` and not that of these lengths
        keys % config.block_n != 0,
        band_hides_end(queries, keys, hi),
        always_hides or tiles.hides(queries, keys, lo, hi),
        head_swizzle(problem, queries) if problem.deterministic else 0,
        work_tiles > programs,
        runs_beside(work_tiles, programs),
    )


def band_hides_end(queries: int, keys: int, hi: int | None) -> bool:
    """True if the window hides keys past the last from all queries; queries past the last have P = 0."""
    return hi is not None and hi <= keys - queries


def runs_beside(work_tiles: int, programs: int) -> bool:
    """True if the postprocess may start beside the last programs, which it slows down if these are most."""
    return work_tiles >= 4 * programs


def leaves_queries_out(queries: int, keys: int, lo: int | None, hi: int | None) -> bool:
    """True if some query of a dense call may see no key, so that no key tile visits its query tile."""
    return (hi is not None and hi < 0) or (lo is not None and queries - 1 + lo > keys - 1)
