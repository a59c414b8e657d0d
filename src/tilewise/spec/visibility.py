"""Tiles that a program visits, under the band (causal or local window) and a tile mask.

A program with a tile of queries loops over the key tiles that some of them see, one with a tile of keys over query
tiles. Each visited tile is of one kind:

    full     no pair is hidden: no mask at all
    mixed    partial under the mask alone
    cut      the band, or the end of the keys or queries, may hide pairs, and perhaps the mask too

The band leaves an interval of tiles, with an interval of full ones inside (`tiles.key_tiles`, `tiles.query_tiles`). The
mask gives each tile a state, empty (`HIDDEN`), partial (`MIXED`) or full (`WHOLE`); empty tiles are skipped. Tiles are
listed by kind, because each kind has its own loop:

    queries 192 .. 255, causal, BLOCK 64:       interval 0 .. 3, full inside the band 0 .. 2
    the mask of these tiles:                    MIXED, HIDDEN, WHOLE, MIXED
    visited:                                    full 2;  mixed 0;  cut 3

`visited`, `is_cut` and `is_full` use only comparisons and ``& |``: they work on integers and, compiled, on vectors of
tile numbers (``triton.jit(visited)``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

# States of a tile under a mask: empty, partial, full.
HIDDEN, MIXED, WHOLE = 0, 1, 2


def visited(n, begin, end, state):
    """True if tile ``n`` with this mask ``state`` is visited in the interval ``begin .. end - 1``."""
    return (n >= begin) & (n < end) & (state > 0)


def is_cut(n, full_begin, full_end):
    """True if the band or an end may hide pairs of the visited tile ``n``."""
    return (n < full_begin) | (n >= full_end)


def is_full(n, full_begin, full_end, state):
    """True if no pair of the visited tile ``n`` is hidden."""
    return (n >= full_begin) & (n < full_end) & (state == 2)


class Kinds(NamedTuple):
    """The visited tiles of each kind, in the order of the loops."""

    full: list[int]
    mixed: list[int]
    cut: list[int]


def kinds(begin: int, full_begin: int, full_end: int, end: int, states: Sequence[int] | None = None) -> Kinds:
    """Return the visited tiles of an interval by kind; ``states`` of tiles 0, 1, ..., or None without a mask."""
    found = Kinds([], [], [])
    for n in range(begin, end):
        state = WHOLE if states is None else states[n]
        if not visited(n, begin, end, state):
            continue
        if is_cut(n, full_begin, full_end):
            found.cut.append(n)
        elif is_full(n, full_begin, full_end, state):
            found.full.append(n)
        else:
            found.mixed.append(n)
    return found
