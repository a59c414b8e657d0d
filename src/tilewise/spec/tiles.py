"""Which tiles of the score matrix are empty, partial or full: integers only.

The tile functions use nothing but ``+ - // min max`` on integers that are not negative where they are divided, so
that the same source is compiled for the GPU (``triton.jit(key_tiles)``): host, kernel and test share one definition.
"""

from __future__ import annotations

from tilewise.spec.score import Band

# Limits for "no limit": beyond any index difference that occurs, and far from int32 overflow when indices are added.
NO_LO = -(1 << 30)
NO_HI = 1 << 30


def limits(band: Band) -> tuple[int, int]:
    """``band`` as two integers, clipped to ±2³⁰."""
    return clipped(band.lo, band.hi)


def clipped(lo: int | None, hi: int | None) -> tuple[int, int]:
    """The same of its limits."""
    if lo is None:
        lo = NO_LO
    elif not NO_LO <= lo <= NO_HI:
        lo = NO_LO if lo < 0 else NO_HI
    if hi is None:
        hi = NO_HI
    elif not NO_LO <= hi <= NO_HI:
        hi = NO_LO if hi < 0 else NO_HI
    return lo, hi


def hides(M: int, N: int, lo: int | None, hi: int | None) -> bool:
    """Whether a band with these limits leaves some of M·N (query, key) pairs out, which are not 0."""
    return (hi is not None and hi < N - 1) or (lo is not None and lo > 1 - M)


def key_tiles(row0, rows, N, lo, hi, BLOCK):
    """Key tiles of the query rows ``row0 .. row0 + rows - 1``: ``(begin, full_begin, full_end, end)``.

    Tiles ``begin .. end - 1`` of ``BLOCK`` keys are not empty; of these ``full_begin .. full_end - 1`` are visible to
    every row and inside the ``N`` keys, so that they need no mask. ``begin <= full_begin <= full_end <= end``.
    """
    first = min(max(row0 + lo, 0), N)  # the first key that any row sees
    last = max(min(row0 + rows - 1 + hi + 1, N), first)  # one past the last key that any row sees
    begin = first // BLOCK
    end = min((last + BLOCK - 1) // BLOCK, begin + last - first)  # the second term: no tile when no key is seen
    first_full = min(max(row0 + rows - 1 + lo, 0), N)  # the first key that every row sees
    last_full = max(min(row0 + hi + 1, N), 0)
    full_begin = min(max((first_full + BLOCK - 1) // BLOCK, begin), end)
    full_end = min(max(last_full // BLOCK, full_begin), end)
    return begin, full_begin, full_end, end


def split_tiles(begin, full_begin, full_end, end, part, parts):
    """Piece ``part`` of ``parts`` of an interval of `key_tiles`, as the same four numbers.

    The pieces follow each other, cover the interval and differ by one tile at most; a piece without tiles is empty.
    """
    tiles = end - begin
    longer = tiles % parts  # so many pieces, the first ones, have one tile more
    first = part * (tiles // parts) + min(part, longer) + begin
    last = first + tiles // parts + min(max(longer - part, 0), 1)
    full_first = min(max(full_begin, first), last)
    return first, full_first, min(max(full_end, full_first), last), last


def query_tiles(col0, cols, M, lo, hi, BLOCK):
    """Query tiles of the keys ``col0 .. col0 + cols - 1``: ``(begin, full_begin, full_end, end)``, as `key_tiles`."""
    first = min(max(col0 - hi, 0), M)  # lo <= j - i <= hi  is  -hi <= i - j <= -lo
    last = max(min(col0 + cols - 1 - lo + 1, M), first)
    begin = first // BLOCK
    end = min((last + BLOCK - 1) // BLOCK, begin + last - first)
    first_full = min(max(col0 + cols - 1 - hi, 0), M)
    last_full = max(min(col0 - lo + 1, M), 0)
    full_begin = min(max((first_full + BLOCK - 1) // BLOCK, begin), end)
    full_end = min(max(last_full // BLOCK, full_begin), end)
    return begin, full_begin, full_end, end


def visible_pairs(M: int, N: int, band: Band) -> int:
    """How many of the M·N (query, key) pairs the band leaves visible; closed form, no loop over rows."""
    lo, hi = limits(band)
    seen = M * N if band.hi is None else _at_most(M, N, hi)
    return seen if band.lo is None else max(seen - _at_most(M, N, lo - 1), 0)


def _at_most(M: int, N: int, d: int) -> int:
    """Pairs with ``j - i <= d``: row i has ``clamp(i + d + 1, 0, N)`` of them."""
    # rows below `rise` have none, rows from `top` on have all N, between them the count grows by one a row
    rise = min(max(-d, 0), M)
    top = min(max(N - d - 1, rise), M)
    first, count = rise + d + 1, top - rise
    return count * first + count * (count - 1) // 2 + (M - top) * N
