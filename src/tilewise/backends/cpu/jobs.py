"""Concurrent jobs of a call's backward, and the addition of their partial sums.

Heads that add to the same elements of a gradient are a group. With fewer groups than workers, a group's blocks of rows,
and then its heads, are divided among jobs, whose partial sums are added in a fixed order: results are deterministic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.backends import Gradients

Heads = tuple[slice, slice]  # batches and key/value heads, as many as share a tile
BY_ROWS = ("rows", "query")  # bias components whose rows belong to queries
LARGEST_SUM = 1 << 20  # elements of a bias component's gradient, at most, for partial sums in several jobs


class Job(NamedTuple):
    """Blocks of rows ``turn, turn + turns, ...`` of some heads."""

    heads: list[Heads]
    turn: int
    turns: int
    shared: bool = False  # heads in other jobs add to the same elements of a gradient

    def of(self, blocks: list[slice]) -> list[slice]:
        """Return the job's blocks among the blocks of all rows."""
        return blocks[self.turn :: self.turns]


def groups(heads: Iterable[Heads], gradients: Iterable[Tensor]) -> list[list[Heads]]:
    """Group the heads that add to the same elements of one of ``gradients``, (B|1, H|Hkv|1, ...)."""
    by_batch, by_head = True, True
    for x in gradients:
        by_batch, by_head = by_batch and x.shape[0] > 1, by_head and x.shape[1] > 1
    found: dict[tuple[int, int], list[Heads]] = {}
    for kv in heads:
        found.setdefault((kv[0].start * by_batch, kv[1].start * by_head), []).append(kv)
    return list(found.values())


def turns(groups: int, blocks: int, workers: int) -> int:
    """Return the number of jobs for each group's blocks of rows that keeps workers busy."""
    most = min(blocks, -(-2 * workers // groups))
    return next((n for n in range(1, most) if groups * n >= 0.8 * workers * -(-groups * n // workers)), most)


def pieces(
    heads: list[Heads], blocks: int, workers: int, dbias: Tensor | None, sums: Mapping[str, Tensor]
) -> list[list[Job]]:
    """Divide each group of heads into pieces; return for each piece the jobs of its turns.

    Jobs have partial sums of shared gradients: dK, dV and those of bias components (``sums``, by name) that are not
    large. Of a shared dBias a job sums one block of rows.
    """
    found = groups(heads, sums.values() if dbias is None else (dbias, *sums.values()))
    large = [name for name, x in sums.items() if x.numel() > LARGEST_SUM]
    taken = 1 if any(name not in BY_ROWS for name in large) else turns(len(found), blocks, workers)
    enough = taken < blocks or len(found) * taken >= workers
    count = 1 if enough or large else -(-2 * workers // (len(found) * taken))
    return [piece for group in found for piece in _divided(group, taken, min(count, len(group)))]


def _divided(group: list[Heads], turns: int, pieces: int) -> list[list[Job]]:
    parts = [group[len(group) * n // pieces : len(group) * (n + 1) // pieces] for n in range(pieces)]
    return [[Job(heads, turn, turns, pieces > 1) for turn in range(turns)] for heads in parts]


class KeyTiles(NamedTuple):
    """Partial sums of dK and dV of some heads, a (T, cols, D) tensor for each tile; None is 0."""

    kv: Heads
    dk: list[Tensor | None]
    dv: list[Tensor | None]


class Sums:
    """Partial sums of a job for views of gradients to which other jobs add too."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}

    def of(self, name: str, place: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the job's partial sum for the view ``place`` of the gradient ``name``, initially 0."""
        key = (name, int(place.storage_offset()))
        if key not in self.found:
            self.found[key] = place, place.new_zeros(place.shape, dtype=dtype)
        return self.found[key][1]


class Found(NamedTuple):
    """Partial sums of a job: dK and dV of each of its heads, and the other gradients."""

    keys: list[KeyTiles]
    sums: Sums


def puts(found: list[list[Found]], want: Gradients, cols: int) -> list[Callable[[], None]]:
    """Return functions that add and write the jobs' partial sums. ``found``: results by piece and turn."""
    places: dict[tuple[str, int], tuple[Tensor, list[Tensor]]] = {}
    for job in (x for turns in found for x in turns):
        for key, (place, x) in job.sums.found.items():
            places.setdefault(key, (place, []))[1].append(x)
    return [
        *(partial(put_sum, place, sums) for place, sums in places.values()),
        *(partial(put_keys, want, cols, x) for turns in found for x in zip(*(job.keys for job in turns), strict=True)),
    ]


def put_sum(place: Tensor, sums: list[Tensor]) -> None:
    """Write the total of ``sums``, added in order, to ``place``."""
    place.copy_(_total(sums))


def put_keys(want: Gradients, cols: int, parts: Sequence[KeyTiles]) -> None:
    """Write dK and dV of some heads: the sums of ``parts``, each of other rows."""
    for x, of_parts in ((want.k, [part.dk for part in parts]), (want.v, [part.dv for part in parts])):
        if x is None:
            continue
        blocks = x[parts[0].kv].split(cols, dim=2)
        for block, tiles in zip(blocks, zip(*of_parts, strict=True), strict=True):
            sums = [tile for tile in tiles if tile is not None]
            if sums:
                block.copy_(_total(sums).unflatten(0, block.shape[:2]))
            else:
                block.zero_()


def _total(sums: list[Tensor]) -> Tensor:
    first, *others = sums
    for x in others:
        first.add_(x)
    return first
