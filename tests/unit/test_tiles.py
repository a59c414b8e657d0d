"""Tile intervals and pair counts against brute force: every small case is enumerated."""

import itertools

import pytest

from tilewise.spec.score import Band
from tilewise.spec.tiles import NO_HI, NO_LO, hides, key_tiles, limits, query_tiles, split_tiles, visible_pairs

LIMITS = (None, -11, -7, -4, -3, -1, 0, 1, 2, 5, 10)
BANDS = [Band(lo, hi) for lo, hi in itertools.product(LIMITS, LIMITS) if lo is None or hi is None or lo <= hi]


def sees(band, row, col):
    return (band.lo is None or band.lo <= col - row) and (band.hi is None or col - row <= band.hi)


def brute_tiles(visible, length, block):
    """Which tiles of the looped axis hold a visible pair, and which hold whole columns of visible pairs only.

    ``visible[n]`` lists, for index n of the looped axis, whether each index of the fixed tile sees it.
    """
    tiles = range(-(-length // block))
    inside = [range(t * block, min((t + 1) * block, length)) for t in tiles]
    some = [t for t in tiles if any(any(visible[n]) for n in inside[t])]
    full = [t for t in tiles if len(inside[t]) == block and all(all(visible[n]) for n in inside[t])]
    return some, full


def check(intervals, visible, length, block):
    begin, full_begin, full_end, end = intervals
    assert begin <= full_begin <= full_end <= end
    some, full = brute_tiles(visible, length, block)
    assert list(range(begin, end)) == some
    assert list(range(full_begin, full_end)) == full


@pytest.mark.parametrize("block", [1, 2, 3, 4])
def test_key_tiles(block):
    for N, row0, rows, band in itertools.product((0, 1, 2, 4, 7, 8), (0, 1, 4, 6), (1, 2, 4), BANDS):
        visible = [[sees(band, i, j) for i in range(row0, row0 + rows)] for j in range(N)]
        check(key_tiles(row0, rows, N, *limits(band), block), visible, N, block)


@pytest.mark.parametrize("block", [1, 2, 3, 4])
def test_query_tiles(block):
    for M, col0, cols, band in itertools.product((0, 1, 2, 4, 7, 8), (0, 1, 4, 6), (1, 2, 4), BANDS):
        visible = [[sees(band, i, j) for j in range(col0, col0 + cols)] for i in range(M)]
        check(query_tiles(col0, cols, M, *limits(band), block), visible, M, block)


def test_split_tiles():
    """The pieces hold the tiles in their order, each once and as full as before, shared out evenly."""
    for begin, partial, full, after, parts in itertools.product((0, 3), range(3), range(5), range(3), range(1, 7)):
        interval = (begin, begin + partial, begin + partial + full, begin + partial + full + after)
        pieces = [split_tiles(*interval, part, parts) for part in range(parts)]
        assert all(first <= full_first <= full_last <= last for first, full_first, full_last, last in pieces)
        assert [t for piece in pieces for t in range(piece[0], piece[3])] == list(range(interval[0], interval[3]))
        assert [t for piece in pieces for t in range(*piece[1:3])] == list(range(*interval[1:3]))
        lengths = [piece[3] - piece[0] for piece in pieces]
        assert max(lengths) - min(lengths) <= 1


def test_both_directions_find_the_same_tiles():
    """A tile is in the key interval of its rows exactly when it is in the query interval of its columns."""
    for M, N, band, (block_m, block_n) in itertools.product((5, 8), (4, 7), BANDS, ((2, 3), (4, 2))):
        lo, hi = limits(band)
        # Only whole tiles of the fixed axis: of a ragged one the indices past the end see keys too.
        rows, cols = range(M // block_m), range(N // block_n)
        by_row = {(i, j) for i in rows for j in range(*key_tiles(i * block_m, block_m, N, lo, hi, block_n)[::3])}
        by_col = {(i, j) for j in cols for i in range(*query_tiles(j * block_n, block_n, M, lo, hi, block_m)[::3])}
        assert {(i, j) for i, j in by_row if j in cols} == {(i, j) for i, j in by_col if i in rows}


@pytest.mark.parametrize("length", [1, 64, 1 << 20, (1 << 30) - 128])
def test_no_limit_is_no_limit_at_any_length(length):
    """Every tile is visited, all but a ragged last one without a mask, and no sum leaves int32."""
    block = 64
    tiles, whole = -(-length // block), length // block
    last = max(length - block, 0)
    for tiles_of in (key_tiles, query_tiles):
        for start in (0, last):
            assert tiles_of(start, block, length, NO_LO, NO_HI, block) == (0, 0, whole, tiles)
    assert length + block + NO_HI < 1 << 31
    assert NO_LO - length - block >= -(1 << 31)


def test_visible_pairs():
    for M, N, lo, hi in itertools.product(range(7), range(7), LIMITS, LIMITS):
        band = Band(lo, hi)
        pairs = sum(sees(band, i, j) for i in range(M) for j in range(N))
        assert visible_pairs(M, N, band) == pairs, (M, N, band)
        assert M * N == 0 or hides(M, N, lo, hi) == (pairs < M * N), (M, N, band)


def test_visible_pairs_has_no_loop_over_rows():
    million = 10**6
    assert visible_pairs(million, million, Band(None, 0)) == million * (million + 1) // 2
    assert visible_pairs(million, million, Band(-1, 1)) == 3 * million - 2


def test_limits():
    assert limits(Band()) == (NO_LO, NO_HI)
    assert limits(Band(-3, 4)) == (-3, 4)
    assert limits(Band(-(2**40), 2**40)) == (NO_LO, NO_HI)
