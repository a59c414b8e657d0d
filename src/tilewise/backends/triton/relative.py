"""Relative-position biases in the Triton kernels: loads of values, stores of gradients.

Twins of `tilewise.spec.relative`, by pointers. Pair (i, j) has entry ``j - i + origin`` (`origin_of`) in a row of
values that belongs to its query, to its key, or to all. Entries outside the row are excluded by the load's mask, not by
a clamped index, because that would hide from the compiler that neighbouring keys have neighbouring addresses.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from tilewise.backends.kernels.score import key_tiles, query_tiles
from tilewise.backends.triton.reductions import is_summed
from tilewise.backends.triton.tensors import load_operand, operand_place
from tilewise.spec.problem import Problem
from tilewise.spec.relative import Relative

# Larger numbers are replaced by it: such positions have no entry.
FAR_AWAY = 1 << 28
ORIGIN_END = tl.constexpr(1 << 29)


class Range(NamedTuple):
    """Numbers of a relative-position bias, each encoded as ``4 n + 2``.

    Triton specializes kernels on integers that are 1 or divisible by 16. Encoded numbers are neither, so that other
    starts and lengths reuse the compiled kernel.
    """

    lo: int  # least ``j - i`` with an entry, minus the shift
    distances: int  # number of distances with an entry
    entries: int  # per row of values


class ByDistance(NamedTuple):
    """Access to the values of a relative-position bias; every field is a tl.constexpr."""

    AXIS: Any  # rows belong to a "query", a "key" or all ("none")
    OUTSIDE: Any  # rule for other distances: "zero", "hidden" or "clamp"
    EVERY: Any  # every pair inside the tensor and the window has an entry
    REVERSE: Any
    GROUP: Any  # query heads that share values
    SHIFT: Any  # "none", "one" for all, or one per element of the "batch"
    BUCKETS: Any
    WIDE: Any  # offsets inside one tile need 64 bits
    SUMMED: Any  # several pairs may share an entry, so that its gradient is a sum
    PACKED: Any  # rows of values are packed: a sequence's begin at its first query or key


def by_distance(problem: Problem, name: str, x: Relative) -> ByDistance:
    """Return the `ByDistance` of the bias component ``name``."""
    operand, distances, band = getattr(problem.parts, name), x.distances, problem.score.band
    inside_band = (
        x.shift is None and problem.totals is None
        and band.lo is not None and band.lo >= distances.lo
        and band.hi is not None and band.hi <= distances.hi
    )  # fmt: skip
    shift = "none" if x.shift is None else "one" if x.shift.shape[0] == 1 else "batch"
    values: tuple[Any, ...] = (
        distances.axis, distances.outside, distances.axis == "none" or inside_band, distances.reverse,
        problem.broadcast_group(operand).heads, shift, x.buckets is not None, _is_wide(x.values),
        is_summed(problem, name), problem.totals is not None,
    )  # fmt: skip
    return ByDistance(*values)


def _is_wide(values: Tensor) -> bool:
    """True if an offset from a tile's first row needs 64 bits; a clamped entry may be any in its row."""
    (row, entry), count = values.stride()[2:], max(values.shape[3], 512)
    return 256 * max(row, count) + count * entry >= 2**31


def numbers_of(x: Relative) -> Range:
    distances = x.distances
    lo = min(max(distances.lo, -FAR_AWAY), FAR_AWAY)
    return Range(4 * lo + 2, 4 * distances.count + 2, 4 * x.values.shape[-1] + 2)


def far_tiles_differ(problem: Problem, relatives: list[tuple[str, Relative]]) -> bool:
    """True if tiles without an entry are cheaper to compute: they add 0, or one value per query."""
    return all(
        x.distances.axis != "none"
        and (x.distances.outside == "zero" or (x.distances.outside == "clamp" and x.distances.axis == "query"))
        and not by_distance(problem, name, x).EVERY
        for name, x in relatives
    )  # fmt: skip


@triton.jit
def _plain(x):
    """Decode a number of `Range`."""
    return (x - 2) // 4


@triton.jit
def counts_of(numbers):
    """Return the number of distances with an entry, and the number of entries in a row."""
    return _plain(numbers.distances), _plain(numbers.entries)


@triton.jit
def origin_of(shift, numbers, how, b):
    """Return the entry of distance 0: pair (i, j) of batch element b has entry ``j - i + origin``."""
    origin = -_plain(numbers.lo)
    if how.SHIFT != "none":
        at = shift
        if how.SHIFT == "batch":
            at += b
        # Shifts may be any 64-bit number; clamp, so that sums with the origin fit 32 bits.
        origin = tl.minimum(tl.maximum(tl.load(at) + origin, -ORIGIN_END), ORIGIN_END).to(tl.int32)
    return origin


@triton.jit
def origins(parts, terms, b, c):
    """Return `origin_of` the values per query and of those per key; meaningless for absent ones."""
    query, key = b, b
    if c.HAS_PARTS:
        if parts.query is not None:
            query = origin_of(parts.query_shift, terms.query, c.PARTS.query, b)
        if parts.key is not None:
            key = origin_of(parts.key_shift, terms.key, c.PARTS.key, b)
    return query, key


@triton.jit
def entries_at(x, buckets, numbers, origin, how, start, at, n0, cols, TAIL: tl.constexpr, FAR: tl.constexpr, sizes):
    """Return pointers to a tile's entries in ``x``, which pairs have one, and which may be read.

    at: `QueryRows`; cols: as in `load_operand`. TAIL: the tile may reach past the queries or keys. FAR: no distance in
    the tile has an entry and the bias clamps, so that each row has one entry.
    """
    head = (at.first_head if how.GROUP > 1 else at.head) // how.GROUP
    place = x.pointer + tl.cast(at.b, tl.int64) * x.stride0 + tl.cast(head, tl.int64) * x.stride1
    count = _plain(numbers.distances)
    first = origin + n0 - at.m0
    rows, columns = at.rows, cols
    if FAR:
        columns = rows * 0
    entry = first + columns - rows
    inside = entry.to(tl.uint32) < count.to(tl.uint32)  # nor below 0
    exists = inside
    if how.AXIS == "query":
        place = place + tl.cast(at.m0 + start.query if how.PACKED else at.m0, tl.int64) * x.stride2
        exists = at.m0 + rows < sizes.queries
    elif how.AXIS == "key":
        place = place + tl.cast(n0 + start.key if how.PACKED else n0, tl.int64) * x.stride2
        # Past the last query a key's row goes on, with entries that no pair has and that may be NaN.
        exists = (n0 + cols < sizes.keys) & (at.m0 + rows < sizes.queries)
    if how.WIDE:
        rows, columns, entry = rows.to(tl.int64), columns.to(tl.int64), entry.to(tl.int64)
    # Add up 32-bit offsets inside the tile, then add them to the address once.
    offset = rows * 0
    if how.AXIS == "query":
        offset = rows * x.stride2
    elif how.AXIS == "key":
        offset = columns * x.stride2
    if how.BUCKETS or how.OUTSIDE == "clamp":
        entry = tl.minimum(tl.maximum(entry, 0), count - 1)
        if how.REVERSE:
            entry = count - 1 - entry
        if how.BUCKETS:
            entry = tl.load(buckets + entry)
            entry = tl.minimum(tl.maximum(entry, 0), _plain(numbers.entries) - 1)
            if not how.WIDE:
                entry = entry.to(tl.int32)
        offset = offset + entry * x.stride3
    elif how.REVERSE:
        place = place + tl.cast(count - 1 - first, tl.int64) * x.stride3
        offset = offset + rows * x.stride3 - columns * x.stride3
    else:
        place = place + tl.cast(first, tl.int64) * x.stride3
        offset = offset - rows * x.stride3 + columns * x.stride3
    place = place + offset
    read = exists
    if not TAIL:
        read = at.rows >= 0
    if how.OUTSIDE != "clamp" and (TAIL or not how.EVERY):
        read = read & inside
    return place, inside, read


@triton.jit
def _add_by_distance(added, ALONE: tl.constexpr, x, buckets, numbers, origin, how, start, at, n0, cols,
                     TAIL: tl.constexpr, FAR: tl.constexpr, sizes):  # fmt: skip
    """Return ``added`` (ALONE: 0) plus a tile's bias, in float32; skip values without a pair."""
    place, inside, read = entries_at(x, buckets, numbers, origin, how, start, at, n0, cols, TAIL, FAR, sizes)
    if TAIL or (how.OUTSIDE != "clamp" and not how.EVERY):  # noqa: SIM108  (a compile-time condition)
        value = tl.load(place, mask=read, other=0.0)
    else:
        value = tl.load(place)
    value = value.to(tl.float32)
    if not ALONE:  # the compiler does not remove an addition of 0
        value += added
    if how.OUTSIDE == "hidden" and not how.EVERY:
        value = tl.where(inside, value, -float("inf"))  # also replaces ``added``
    return value


@triton.jit
def _first_diagonal(start, sizes, c):
    """Return the entry of distance 0 in a Toeplitz bias."""
    return sizes.queries - 1 + (start.skew if c.PACKED else 0)


@triton.jit
def load_added(x, at, n0, cols, TAIL: tl.constexpr, NEAR: tl.constexpr, terms, sizes, c):
    """Return the sum of bias and bias components for a tile, in float32, broadcastable to the scores."""
    parts = x.parts
    added = tl.zeros([1, 1], tl.float32)
    if c.BIAS_TENSOR:
        added = load_operand(x.bias, c.BIAS_HOW, x.start, at, n0, cols, TAIL, sizes, c).to(tl.float32)
    if c.HAS_PARTS:
        if parts.cols is not None:
            added += load_operand(parts.cols, c.PARTS.cols, x.start, at, n0, cols, TAIL, sizes, c).to(tl.float32)
        if parts.rows is not None:
            added += load_operand(parts.rows, c.PARTS.rows, x.start, at, n0, cols, TAIL, sizes, c).to(tl.float32)
        if parts.toeplitz is not None:
            added = _add_by_distance(
                added, c.FIRST == "toeplitz", parts.toeplitz, None, terms.toeplitz, _first_diagonal(x.start, sizes, c),
                c.PARTS.toeplitz, x.start, at, n0, cols, TAIL, False, sizes,
            )  # fmt: skip
        if parts.query is not None and (NEAR or c.PARTS.query.OUTSIDE == "clamp"):
            added = _add_by_distance(
                added, c.FIRST == "query", parts.query, parts.query_buckets, terms.query, x.query_origin,
                c.PARTS.query, x.start, at, n0, cols, TAIL, not NEAR, sizes,
            )  # fmt: skip
        if parts.key is not None and NEAR:
            added = _add_by_distance(
                added, c.FIRST == "key", parts.key, parts.key_buckets, terms.key, x.key_origin, c.PARTS.key, x.start,
                at, n0, cols, TAIL, False, sizes,
            )  # fmt: skip
    return added


# --- visited tiles ---


@triton.jit
def limits_of(x, terms, c):
    """Return a batch element's window limits (lo, hi), narrowed by relative-position biases."""
    lo, hi = terms.lo, terms.hi
    if c.PACKED:  # the window is aligned to the last query and key
        lo, hi = lo + x.start.diagonal, hi + x.start.diagonal
    if c.HAS_PARTS:
        if x.parts.query is not None:
            lo, hi = _narrower(lo, hi, terms.query, x.query_origin, c.PARTS.query)
        if x.parts.key is not None:
            lo, hi = _narrower(lo, hi, terms.key, x.key_origin, c.PARTS.key)
    return lo, hi


@triton.jit
def _narrower(lo, hi, numbers, origin, how):
    if how.OUTSIDE == "hidden" and not how.EVERY:
        lo = tl.maximum(lo, -origin)
        hi = tl.minimum(hi, _plain(numbers.distances) - 1 - origin)
    return lo, hi


@triton.jit
def near_tiles(x, first, count, begin, end, BY_KEYS: tl.constexpr, terms, sizes, c):
    """Return the interval of the tiles ``begin .. end - 1`` that may have distances with an entry.

    They are tiles of keys for the queries ``first .. first + count - 1``; BY_KEYS swaps queries and keys.
    """
    near_begin, near_end = end, begin
    if x.parts.query is not None:
        a, z = reached(first, count, terms.query, x.query_origin, BY_KEYS, sizes, c)
        near_begin, near_end = tl.minimum(near_begin, a), tl.maximum(near_end, z)
    if x.parts.key is not None:
        a, z = reached(first, count, terms.key, x.key_origin, BY_KEYS, sizes, c)
        near_begin, near_end = tl.minimum(near_begin, a), tl.maximum(near_end, z)
    near_begin = tl.minimum(tl.maximum(near_begin, begin), end)
    return near_begin, tl.minimum(tl.maximum(near_end, near_begin), end)


@triton.jit
def reached(first, count, numbers, origin, BY_KEYS: tl.constexpr, sizes, c):
    hi = _plain(numbers.distances) - 1 - origin
    if BY_KEYS:
        begin, _full_begin, _full_end, end = query_tiles(first, count, sizes.queries, -origin, hi, c.BLOCK_M)
    else:
        begin, _full_begin, _full_end, end = key_tiles(first, count, sizes.keys, -origin, hi, c.BLOCK_N)
    return begin, end


@triton.jit
def far_count(begin, near_begin, near_end, end):
    """Return how many tiles of ``begin .. end - 1`` are far: those before and after the near ones."""
    left = near_begin - begin
    return left + end - near_end


@triton.jit
def far_place(i, begin, near_begin, near_end):
    """Return the number of the ``i``-th far tile."""
    left = near_begin - begin
    return tl.where(i < left, begin + i, near_end + i - left)


# --- gradients, of transposed tiles: rows are keys ---


@triton.jit
def give_parts(x, db, at, n0, cols, TAIL: tl.constexpr, NEAR: tl.constexpr, terms, sizes, c):
    """Store or add a tile's gradients of the bias components; ``db`` is that of the biased scores."""
    parts = x.parts
    if parts.dcols is not None:
        _give_cols(parts.dcols, c.PARTS.cols, x.start, db, at, n0, cols, sizes)
    if parts.drows is not None:
        _give_rows(parts.drows, c.PARTS.rows, x.start, db, at, sizes)
    if parts.dtoeplitz is not None:
        _give_diagonals(parts.dtoeplitz, c.PARTS.toeplitz, x.start, db, at, n0, cols, sizes, c)
    if parts.dquery is not None and (NEAR or c.PARTS.query.OUTSIDE == "clamp"):
        _give_by_distance(
            parts.dquery, parts.query_buckets, terms.query, x.query_origin, c.PARTS.query, x.start, db, at, n0, cols,
            TAIL, not NEAR, sizes, c,
        )  # fmt: skip
    if parts.dkey is not None and NEAR:
        _give_by_distance(
            parts.dkey, parts.key_buckets, terms.key, x.key_origin, c.PARTS.key, x.start, db, at, n0, cols, TAIL, False,
            sizes, c,
        )  # fmt: skip


@triton.jit
def _give_by_distance(x, buckets, numbers, origin, how, start, db, at, n0, cols, TAIL: tl.constexpr,
                      FAR: tl.constexpr, sizes, c):  # fmt: skip
    """Store the gradients of values, or add them if SUMMED. Pairs past the end have a gradient of 0."""
    place, _inside, read = entries_at(x, buckets, numbers, origin, how, start, at, n0, cols, TAIL, FAR, sizes)
    if FAR:
        db = tl.sum(db, 0)[None, :]
    if how.SUMMED:
        tl.atomic_add(place, db, mask=read, sem="relaxed")
    else:
        tl.store(place, db.to(x.pointer.dtype.element_ty), mask=read)


@triton.jit
def _give_diagonals(x, how, start, db, at, n0, cols, sizes, c):
    """Add the sums along a tile's diagonals to a Toeplitz gradient, with one atomic per distance.

    Column m is rotated by m rows, which turns diagonals into rows: row r has distance r and, where columns wrapped
    around, distances smaller by multiples of the height.
    """
    turned = tl.gather(db, (cols + at.rows) % c.BLOCK_N, 0)
    head = (at.first_head if how.GROUP > 1 else at.head) // how.GROUP
    place = x.pointer + tl.cast(at.b, tl.int64) * x.stride0 + tl.cast(head, tl.int64) * x.stride1
    first = sizes.queries - 1 + n0 - at.m0
    if c.PACKED:
        place += tl.cast(start.skew, tl.int64) * x.stride3
    place += tl.cast(first, tl.int64) * x.stride3
    r = tl.arange(0, c.BLOCK_N)
    for turn in tl.static_range((c.BLOCK_M + c.BLOCK_N - 2) // c.BLOCK_N + 1):
        total = tl.sum(tl.where((cols + at.rows) // c.BLOCK_N == turn, turned, 0.0), 1)
        distance = r - turn * c.BLOCK_N
        entry = first + distance
        inside = (entry >= 0) & (entry < sizes.queries + sizes.keys - 1) & (distance > -c.BLOCK_M)
        tl.atomic_add(place + distance * x.stride3, total, mask=inside, sem="relaxed")


@triton.jit
def _give_cols(x, how, start, db, at, n0, cols, sizes):
    place, _stride2, _stride3 = operand_place(x, how, start, at.b, at.head, sizes)
    total = tl.sum(db, 1)
    if how.COLS:
        n = n0 + tl.arange(0, cols.shape[0])
        tl.atomic_add(place + n.to(tl.int64) * x.stride3, total, mask=n < sizes.keys, sem="relaxed")
    else:
        tl.atomic_add(place, tl.sum(total, 0), sem="relaxed")


@triton.jit
def _give_rows(x, how, start, db, at, sizes):
    place, _stride2, _stride3 = operand_place(x, how, start, at.b, at.head, sizes)
    m = at.m0 + tl.arange(0, at.rows.shape[1])
    tl.atomic_add(place + m.to(tl.int64) * x.stride2, tl.sum(db, 0), mask=m < sizes.queries, sem="relaxed")
