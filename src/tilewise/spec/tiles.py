"""Ranges of empty, partial and full tiles of the score matrix, in integer arithmetic.

The functions of tiles use only ``+ - // min max``, with operands of ``//`` that are not negative, so that one source
serves the host, the tests and the GPU (``triton.jit(key_tiles)``).
"""

from __future__ import annotations

from tilewise.spec.score import Band

# "No limit": beyond any index difference, and far from int32 overflow when indices are added.
NO_LO = -(1 << 30)
NO_HI = 1 << 30


def limits(band: Band) -> tuple[int, int]:
    """Return the limits of ``band`` as two integers, clipped to ±2³⁰."""
    return clipped(band.lo, band.hi)


def clipped(lo: int | None, hi: int | None) -> tuple[int, int]:
    """Return `limits` of a band with these limits."""
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
    """True if a band with these limits hides some of M·N > 0 (query, key) pairs."""
    return (hi is not None and hi < N - 1) or (lo is not None and lo > 1 - M)


def key_tiles(row0, rows, N, lo, hi, BLOCK):
    """Return the key tiles of the query rows ``row0 .. row0 + rows - 1``: ``(begin, full_begin, full_end, end)``.

    Tiles ``begin .. end - 1`` of ``BLOCK`` keys are not empty. Of these ``full_begin .. full_end - 1`` need no mask:
    all rows see them and they end within the ``N`` keys. ``begin <= full_begin <= full_end <= end``.
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
    """Return split ``part`` of ``parts`` of the interval of `key_tiles`, as four such numbers.

    Splits are consecutive, cover the interval and differ by one tile at most; a split without tiles is empty.
    """
    tiles = end - begin
    longer = tiles % parts  # the first `longer` splits have one tile more
    first = part * (tiles // parts) + min(part, longer) + begin
    last = first + tiles // parts + min(max(longer - part, 0), 1)
    full_first = min(max(full_begin, first), last)
    return first, full_first, min(max(full_end, full_first), last), last


def query_tiles(col0, cols, M, lo, hi, BLOCK):
    """Return the query tiles of the keys ``col0 .. col0 + cols - 1``, in the form of `key_tiles`."""
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
    """Return the number of M·N (query, key) pairs that the band leaves visible, in closed form."""
    lo, hi = limits(band)
    seen = M * N if band.hi is None else _at_most(M, N, hi)
    return seen if band.lo is None else max(seen - _at_most(M, N, lo - 1), 0)


def _at_most(M: int, N: int, d: int) -> int:
    """Return the number of pairs with ``j - i <= d``: row i has ``clamp(i + d + 1, 0, N)`` of them."""
    # rows below `rise` have none, rows from `top` on have N, and between them the count grows by 1 per row
    rise = min(max(-d, 0), M)
    top = min(max(N - d - 1, rise), M)
    first, count = rise + d + 1, top - rise
    return count * first + count * (count - 1) // 2 + (M - top) * N
