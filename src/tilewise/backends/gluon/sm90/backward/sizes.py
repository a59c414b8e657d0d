"""Sizes of a backward, and what of its lengths is compiled in."""

from __future__ import annotations

from typing import Any

from tilewise.backends.gluon.sm90.backward.scheduler import BackwardSizes
from tilewise.backends.gluon.sm90.common.config import BackwardConfig, head_swizzle
from tilewise.spec import tiles
from tilewise.spec.problem import Problem


def sized(
    config: BackwardConfig, shape: tuple[int, ...], queries: int, keys: int, multiprocessors: int
) -> tuple[BackwardSizes, int]:
    """Sizes, and how many groups of programs there are.

    shape: batch, key/value heads, query heads of each; of a bias that is shared the batch elements, key/value heads and
    programs of a group, or 1. With elements, which are a group, the batch is filled up to a multiple of them.
    """
    batch, kv_heads, group, broadcast_batch, broadcast_heads, broadcast_programs = shape
    row_tiles, key_tiles, heads = -(-queries // config.block_m), -(-keys // config.block_n), batch * kv_heads
    groups = key_tiles * heads // broadcast_programs
    # A group has about ended when one starts that is as many groups later as a GPU runs at once.
    lag = -(-multiprocessors * config.programs * config.elements // broadcast_programs)
    ds_slots = min(2 * lag + 2, groups)
    # Where a bias is shared, heads are not in their order. Else the programs of a head have begun when those of a head
    # start that is as much later as a GPU runs at once, and one more; `backward.scheduler.head_and_tile` may mix some
    # heads.
    none_later = config.dq_stored or broadcast_batch * broadcast_heads > 1
    zeroed = heads if none_later else -(-lag // key_tiles) + 1
    zeroed = -(-zeroed // config.head_swizzle) * config.head_swizzle
    # Elements' heads take turns: those of a group have ended when half as many groups again have begun, and one more.
    # What the preprocess zeroes is a place for each head that there is, and each half of the ds_slots has whole groups.
    if config.elements > 1:
        zeroed = 2 * (-(-3 * lag // (2 * key_tiles)) + 1) * config.elements
        there = heads - (config.elements - 1) * kv_heads  # at least
        zeroed = min(zeroed, there) // (2 * config.elements) * (2 * config.elements)
    found = (
        batch, kv_heads, group, queries, keys, row_tiles, key_tiles, broadcast_batch, broadcast_heads, ds_slots, lag,
        min(zeroed, heads),
    )  # fmt: skip
    return tuple.__new__(BackwardSizes, found), groups


def choices(
    problem: Problem, config: BackwardConfig, always_hides: bool, queries: int, keys: int, lo: int | None,
    hi: int | None, work_tiles: int, programs: int,
) -> tuple[Any, ...]:  # fmt: skip
    """All that depends on lengths in what is compiled in, of a problem without a bias, a mask and parts; of these
    lengths and limits of the band, not its own."""
    return (
        keys <= config.block_n,  # which dQ is stored by: not by the tile that these lengths would get
        keys % config.block_n != 0,
        band_hides_end(queries, keys, hi),
        always_hides or tiles.hides(queries, keys, lo, hi),
        head_swizzle(problem, queries) if problem.deterministic else 0,
        work_tiles > programs,
        runs_beside(work_tiles, programs),
    )


def band_hides_end(queries: int, keys: int, hi: int | None) -> bool:
    """Whether the last query, and so each, sees no key past the last; queries past the last have probabilities of 0."""
    return hi is not None and hi <= keys - queries


def runs_beside(work_tiles: int, programs: int) -> bool:
    """Whether the postprocess begins beside the last programs of the main kernel, unless they are most of it: what
    waits disturbs them."""
    return work_tiles >= 4 * programs


def leaves_queries_out(queries: int, keys: int, lo: int | None, hi: int | None) -> bool:
    """Whether a query of a call that is no packed batch may see no key, so that no tile of keys visits its tile."""
    return (hi is not None and hi < 0) or (lo is not None and queries - 1 + lo > keys - 1)
