"""A bias by distance in the Triton kernels: which of its values a tile of scores reads, and where its gradient goes.

Twins of `tilewise.spec.relative`, by pointers. Pair (i, j) has entry ``j - i + origin`` of the row of values that
belongs to its query, to its key, or to all; `origin_of` makes one number of all that the distances are counted from.
In a row that belongs to queries neighbouring keys have neighbouring entries. What lies outside is therefore left out
by the mask of the load: an index that is clamped into the row would hide from the compiler that addresses ascend.
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

# Positions beyond it are as far from all entries as any.
FAR_AWAY = 1 << 28
ORIGIN_END = tl.constexpr(1 << 29)


class Range(NamedTuple):
    """Numbers of a bias by distance, each as ``4 n + 2``.

    Triton compiles a kernel anew for an integer that is 1 and for one that 16 divides. These are never either, so that
    another start or length finds the kernel of the last.
    """

    lo: int  # the least ``j - i`` that has an entry, less the shift
    distances: int  # how many have one
    entries: int  # in a row of values


class ByDistance(NamedTuple):
    """How a bias by distance reads its values; every field is a tl.constexpr."""

    AXIS: Any  # whose rows: "query", "key" or "none"
    OUTSIDE: Any  # what other distances have: "zero", "hidden" or "clamp"
    EVERY: Any  # inside the tensor and the band every pair has an entry
    REVERSE: Any
    GROUP: Any  # query heads that share values
    SHIFT: Any  # "none", "one" for all, or one for each element of the "batch"
    BUCKETS: Any
    WIDE: Any  # offsets inside one tile need 64 bits
    SUMMED: Any  # several pairs may share an entry, so that its gradient is a sum
    PACKED: Any  # rows of values lie packed, those of a sequence from its first on


def by_distance(problem: Problem, name: str, x: Relative) -> ByDistance:
    """Of the part of that name."""
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
    """Whether an offset from the first row of a tile needs 64 bits; an entry that is clamped may be any of its row."""
    (row, entry), count = values.stride()[2:], max(values.shape[3], 512)
    return 256 * max(row, count) + count * entry >= 2**31


def numbers_of(x: Relative) -> Range:
    distances = x.distances
    lo = min(max(distances.lo, -FAR_AWAY), FAR_AWAY)
    return Range(4 * lo + 2, 4 * distances.count + 2, 4 * x.values.shape[-1] + 2)


def far_tiles_differ(problem: Problem, relatives: list[tuple[str, Relative]]) -> bool:
    """Whether tiles that meet no distance with an entry can be computed with less: 0 is added, or the end of a row."""
    return all(
        x.distances.axis != "none"
        and (x.distances.outside == "zero" or (x.distances.outside == "clamp" and x.distances.axis == "query"))
        and not by_distance(problem, name, x).EVERY
        for name, x in relatives
    )  # fmt: skip


@triton.jit
def _plain(x):
    """A number of `Range` as it is."""
    return (x - 2) // 4


@triton.jit
def counts_of(numbers):
    """How many distances have an entry, and how many entries a row has."""
    return _plain(numbers.distances), _plain(numbers.entries)


@triton.jit
def origin_of(shift, numbers, how, b):
    """The entry of distance 0: pair (i, j) of batch element b has entry ``j - i + origin``."""
    origin = -_plain(numbers.lo)
    if how.SHIFT != "none":
        at = shift
        if how.SHIFT == "batch":
            at += b
        # Positions may be any 64-bit number; sums of this one stay far from 2³¹.
        origin = tl.minimum(tl.maximum(tl.load(at) + origin, -ORIGIN_END), ORIGIN_END).to(tl.int32)
    return origin


@triton.jit
def origins(parts, terms, b, c):
    """`origin_of` the values per query and of those per key, anything where there are none."""
    query, key = b, b
    if c.HAS_PARTS:
        if parts.query is not None:
            query = origin_of(parts.query_shift, terms.query, c.PARTS.query, b)
        if parts.key is not None:
            key = origin_of(parts.key_shift, terms.key, c.PARTS.key, b)
    return query, key


@triton.jit
def entries_at(x, buckets, numbers, origin, how, start, at, n0, cols, TAIL: tl.constexpr, FAR: tl.constexpr, sizes):
    """Where the entries of a tile are in the `Strided` ``x``, which pairs have one, and which may be read.

    at: `QueryRows`; cols as `load_operand` has them. TAIL: the tile may reach past the queries or keys. FAR: it meets
    no distance with an entry, of a bias that is clamped: its rows have one entry each.
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
        # Past the end of the queries a key's row goes on, with entries that no pair has and that may hold NaN.
        exists = (n0 + cols < sizes.keys) & (at.m0 + rows < sizes.queries)
    if how.WIDE:
        rows, columns, entry = rows.to(tl.int64), columns.to(tl.int64), entry.to(tl.int64)
    # One sum of 32-bit offsets in a tile, then one of addresses.
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
    """``added``, or ALONE nothing, and the bias of a tile, in float32; a value that no pair of it has is not read."""
    place, inside, read = entries_at(x, buckets, numbers, origin, how, start, at, n0, cols, TAIL, FAR, sizes)
    if TAIL or (how.OUTSIDE != "clamp" and not how.EVERY):  # noqa: SIM108  (one branch is compiled, not both)
        value = tl.load(place, mask=read, other=0.0)
    else:
        value = tl.load(place)
    value = value.to(tl.float32)
    if not ALONE:  # a compiler keeps a sum with 0
        value += added
    if how.OUTSIDE == "hidden" and not how.EVERY:
        value = tl.where(inside, value, -float("inf"))  # whatever else is added there
    return value


@triton.jit
def _first_diagonal(start, sizes, c):
    """The entry of distance 0 in a Toeplitz bias."""
    return sizes.queries - 1 + (start.skew if c.PACKED else 0)


@triton.jit
def load_added(x, at, n0, cols, TAIL: tl.constexpr, NEAR: tl.constexpr, terms, sizes, c):
    """What a tile of scores gets added, in float32: the bias, and the parts of bias terms.

    Of a shape that broadcasts to that of the scores. NEAR: see `score_products`.
    """
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


# --- walks ---


@triton.jit
def limits_of(x, terms, c):
    """The band of a batch element, (lo, hi): the call's, and what a bias by distance hides by a shift on the device."""
    lo, hi = terms.lo, terms.hi
    if c.PACKED:  # counted from the last query and key
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
    """Of tiles ``begin .. end - 1`` those that may meet distances with an entry, an interval.

    They are tiles of keys, seen from queries ``first .. first + count - 1``, or BY_KEYS the other way round.
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
    """Of tiles ``begin .. end - 1`` how many are far; they lie on both sides of those that are near."""
    left = near_begin - begin
    return left + end - near_end


@triton.jit
def far_place(i, begin, near_begin, near_end):
    """The place of the ``i``-th tile that is far."""
    left = near_begin - begin
    return tl.where(i < left, begin + i, near_end + i - left)


# --- gradients, of transposed tiles: rows are keys ---


@triton.jit
def give_parts(x, db, at, n0, cols, TAIL: tl.constexpr, NEAR: tl.constexpr, terms, sizes, c):
    """The gradients of the parts that want one leave a tile; ``db`` is that of the biased scores."""
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
    """Stored where an entry has one pair, else added. A pair past the end of the tensor has a gradient of 0."""
    place, _inside, read = entries_at(x, buckets, numbers, origin, how, start, at, n0, cols, TAIL, FAR, sizes)
    if FAR:
        db = tl.sum(db, 0)[None, :]
    if how.SUMMED:
        tl.atomic_add(place, db, mask=read, sem="relaxed")
    else:
        tl.store(place, db.to(x.pointer.dtype.element_ty), mask=read)


@triton.jit
def _give_diagonals(x, how, start, db, at, n0, cols, sizes, c):
    """Sums along the diagonals of a tile, one addition for each distance.

    Column m is turned by m, so that every diagonal lies in a row: row r has distance r and, from where the columns came
    round again, those that are less by multiples of the height.
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
