"""Who sees whom, tile by tile: band ∧ mask, as one account for every walk over tiles, of rows and of keys.

A program that holds a tile of queries walks the tiles of keys that some of them see, and one that holds keys the tiles
of queries. Of each tile it visits it wants to know what may hide a pair in it:

    full     nothing: no test at all
    cut      the band, or the end of the keys or queries
    mixed    the mask, of which the tile has hidden and visible elements; cut or not

The band leaves an interval of tiles, with an interval of full ones inside (`tiles.key_tiles`, `tiles.query_tiles`). A
mask says of each tile whether it is `HIDDEN`, `MIXED` or `WHOLE`, and takes hidden tiles out of the walk. What is left
is a count and a list of entries, the full ones first, because these have a loop of their own:

    queries 128 .. 255 in a causal band, BLOCK 64:    interval 0 .. 3, full 0 .. 1
    the mask of these tiles:                          WHOLE, HIDDEN, WHOLE, MIXED
    entries:                                          0 full;  2 cut, 3 cut and mixed

`visited`, `is_full` and `entry` use nothing but comparisons and ``& | + *``: on integers, and, compiled, on a vector of
tile numbers (``triton.jit(entry)``).
"""

from __future__ import annotations

from collections.abc import Sequence

# What a mask leaves of a tile.
HIDDEN, MIXED, WHOLE = 0, 1, 2


def visited(n, begin, end, state):
    """Whether a walk over the interval ``begin .. end - 1`` visits tile ``n``, of which the mask leaves ``state``."""
    return (n >= begin) & (n < end) & (state > 0)


def is_full(n, full_begin, full_end, state):
    """Whether nothing hides a pair of tile ``n``, which is visited."""
    return (n >= full_begin) & (n < full_end) & (state == 2)


def entry(n, full_begin, full_end, state):
    """Tile ``n`` with its kind, in one number: 4·n, + 1 if it is cut, + 2 if it is mixed."""
    return 4 * n + 1 * ((n < full_begin) | (n >= full_end)) + 2 * (state == 1)


def entries(begin: int, full_begin: int, full_end: int, end: int, states: Sequence[int] | None = None) -> list[int]:
    """The walk over an interval, full tiles first; without ``states`` of its tiles 0, 1, ... there is no mask."""
    found = [(n, WHOLE if states is None else states[n]) for n in range(begin, end)]
    walk = [(n, state) for n, state in found if visited(n, begin, end, state)]
    first = [(n, state) for n, state in walk if is_full(n, full_begin, full_end, state)]
    rest = [(n, state) for n, state in walk if not is_full(n, full_begin, full_end, state)]
    return [entry(n, full_begin, full_end, state) for n, state in first + rest]


def tile_of(entry: int) -> int:
    return entry // 4


def is_cut(entry: int) -> bool:
    return entry % 2 == 1


def is_mixed(entry: int) -> bool:
    return entry // 2 % 2 == 1
