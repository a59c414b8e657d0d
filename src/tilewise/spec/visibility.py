"""Who sees whom, tile by tile: band ∧ mask, as one account for every walk over tiles, of rows and of keys.

A program that holds a tile of queries walks the tiles of keys that some of them see, and one that holds keys the tiles
of queries. Of each tile it visits it wants to know what may hide a pair in it:

    full     nothing: no test at all
    mixed    the mask alone, of which the tile has hidden and visible elements
    cut      the band, or the end of the keys or queries; and perhaps the mask too

The band leaves an interval of tiles, with an interval of full ones inside (`tiles.key_tiles`, `tiles.query_tiles`). A
mask says of each tile whether it is `HIDDEN`, `MIXED` or `WHOLE`, and takes hidden tiles out of the walk. What is left
is a list of tiles, one kind after the other, because each has a loop of its own:

    queries 192 .. 255 in a causal band, BLOCK 64:    interval 0 .. 3, inside the band 0 .. 2
    the mask of these tiles:                          MIXED, HIDDEN, WHOLE, MIXED
    the walk:                                         full 2;  mixed 0;  cut 3

`visited`, `is_cut` and `is_full` use nothing but comparisons and ``& |``: on integers, and, compiled, on a vector of
tile numbers (``triton.jit(visited)``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

# What a mask leaves of a tile.
HIDDEN, MIXED, WHOLE = 0, 1, 2


def visited(n, begin, end, state):
    """Whether a walk over the interval ``begin .. end - 1`` visits tile ``n``, of which the mask leaves ``state``."""
    return (n >= begin) & (n < end) & (state > 0)


def is_cut(n, full_begin, full_end):
    """Whether the band or an end may hide a pair of tile ``n``, which the interval visits."""
    return (n < full_begin) | (n >= full_end)


def is_full(n, full_begin, full_end, state):
    """Whether nothing hides a pair of tile ``n``, which is visited."""
    return (n >= full_begin) & (n < full_end) & (state == 2)


class Kinds(NamedTuple):
    """The tiles that a walk visits, in its order."""

    full: list[int]
    mixed: list[int]
    cut: list[int]


def kinds(begin: int, full_begin: int, full_end: int, end: int, states: Sequence[int] | None = None) -> Kinds:
    """The walk over an interval; without ``states`` of its tiles 0, 1, ... there is no mask."""
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
