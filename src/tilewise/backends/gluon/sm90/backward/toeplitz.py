"""Toeplitz bias in the backward: its values for transposed tiles, and its gradient.

The query tiles of a key tile, from the last to the first, are below the near distances, then among them, then above
(`tilewise.spec.score.Far`). The bias of a far tile is in the LSE, which the loading warp takes from another buffer
(`far_stats_kernel`); the keys' share of a line is added to the scores. dS of far tiles is summed within threads, for a
line also dS times the distance. For each side of a program the sums are added once to the two entries that define the
line, with the same gradient of the line as from all entries. dS of a near tile is added along its diagonals.

The gradient is float32, with `PAD` places before the first entry and behind the last, to which 0 is added.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise.backends.gluon.score import kept_weight
from tilewise.backends.gluon.sm90.backward.masks import in_words
from tilewise.backends.gluon.sm90.backward.scheduler import BackwardSizes
from tilewise.backends.gluon.sm90.common.toeplitz import PAD, Pairs, anew, diagonal_of, line_above, line_below, words
from tilewise.backends.gluon.sm90.common.wgmma import accumulator
from tilewise.backends.launch.launcher import POINTER, Launch
from tilewise.spec.problem import Problem
from tilewise.spec.score import COARSE_LSE

LOG2E = tl.constexpr(1.4426950408889634)
COARSE = tl.constexpr(COARSE_LSE)


class FarSums(NamedTuple):
    """Sums of each thread, [keys / 16, 8, 4], for one side of a program and head."""

    total: Any  # of dS
    weighted: Any  # of dS times the distance from the start of the line


# --- the LSE of far tiles ---


@triton.jit
def far_stats_kernel(lse, pairs, stats, sizes, terms, exponent, weight, c, BLOCK: tl.constexpr):
    """Store the LSE in base 2 of each query tile for far tiles, below and above the near distances.

    It is that of `preprocess_kernel` less the number, or less the line's change from the tile's first query on. lse:
    (B, H, M)."""
    pid = tl.program_id(0)
    heads = sizes.kv_heads * sizes.group
    bh = pid // sizes.row_tiles
    rows = pid % sizes.row_tiles * BLOCK + tl.arange(0, BLOCK)
    natural = tl.load(lse + tl.cast(bh, tl.int64) * sizes.queries + rows, mask=rows < sizes.queries, other=float("inf"))
    head = bh % heads // c.TOEPLITZ_GROUP
    if c.TOEPLITZ_BATCH:
        head += bh // heads * (heads // c.TOEPLITZ_GROUP)
    width = sizes.queries + sizes.keys - 1 + 2 * PAD
    diagonal = pairs + tl.cast(head, tl.int64) * width + (sizes.queries - 1 + PAD)
    at = stats + tl.cast(pid, tl.int64) * (2 * BLOCK) + tl.arange(0, BLOCK)
    left_out = tl.abs(natural) > COARSE
    base2 = natural * LOG2E
    if weight is not None:
        base2 -= tl.log2(weight)
    if c.FAR_LO:
        below = _of_queries(diagonal, terms.far_lo, 1 - sizes.queries, c, BLOCK)
        tl.store(at, tl.where(left_out, float("inf"), base2 - below * exponent))
    if c.FAR_HI:
        above = _of_queries(diagonal, terms.far_hi, sizes.keys - 1, c, BLOCK)
        tl.store(at + BLOCK, tl.where(left_out, float("inf"), base2 - above * exponent))


@triton.jit
def _of_queries(diagonal, at, end, c, BLOCK: tl.constexpr):
    """Return the queries' share of the bias at far distances ``at`` to ``end``; slope as in `line_of`."""
    value = tl.load(diagonal + at).to(tl.int32).to(tl.float32, bitcast=True)
    if c.TOEPLITZ == "line":
        last = tl.load(diagonal + end).to(tl.int32).to(tl.float32, bitcast=True)
        span = end - at
        rise = (last - value) / tl.where(span == 0, 1, span).to(tl.float32)
        slope = tl.where((span == 0) | (tl.abs(value) == float("inf")), 0.0, rise)
        return -slope * tl.arange(0, BLOCK).to(tl.float32)
    else:
        return value


class ToeplitzGradient:
    """Gradient buffer of a Toeplitz vector, and the launch that precedes the backward."""

    def __init__(self, problem: Problem, vector: Tensor, sizes: BackwardSizes, terms: Any, c: Any, programs: int):
        B, H, _, self.count = vector.shape
        self.shape = B, H, 1, self.count + 2 * PAD.value
        self.dtype, self.wanted = vector.dtype, c.DTOEPLITZ.value
        self.stats = None
        if c.FAR_LO.value or c.FAR_HI.value:
            numbers = (sizes, terms, terms.exponent, kept_weight(problem), c, c.BLOCK_M.value)
            self.stats = Launch(far_stats_kernel, programs, (POINTER, POINTER, POINTER), numbers, num_warps=4)

    def begin(self, pairs_of: Pairs, vector: Tensor, lse: Tensor, stats: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the vector's words and a zeroed gradient; store the LSE of far tiles at the end of ``stats``."""
        found = torch.empty(self.shape, dtype=torch.float32, device=lse.device) if self.wanted else None
        pairs = pairs_of(vector, found)
        if self.stats is not None:
            self.stats(lse, pairs, stats[stats.shape[0] // 2 :])
        return pairs, found

    def end(self, found: Tensor) -> Tensor:
        """Return the gradient in the vector's dtype, a view if that is float32."""
        return found[..., PAD.value : PAD.value + self.count].to(self.dtype)


# --- which tiles ---


@gluon.jit
def near_queries(work_tile, terms, c):
    """Return ``(begin, end)`` of the query tiles that read entries: later ones are below, earlier above."""
    begin, end = work_tile.begin, work_tile.end
    if c.FAR_HI:
        begin = gl.minimum(gl.maximum(gl.maximum(work_tile.n0 + 1 - terms.far_hi, 0) // c.BLOCK_M, begin), end)
    if c.FAR_LO:
        after = gl.cdiv(gl.maximum(work_tile.n0 + c.BLOCK_N - 1 - terms.far_lo, 0), c.BLOCK_M)
        end = gl.minimum(gl.maximum(after, begin), end)
    return begin, end


@gluon.jit
def end_of_part(PART: gl.constexpr, count, work_tile, near_begin, near_end, c):
    """Return the end of a part of the ``count`` query tiles, last to first: 0 below, 1 near, 2 above."""
    if PART == 0:
        return work_tile.end - near_end
    elif PART == 1 and (c.FAR_LO or c.FAR_HI):
        return work_tile.end - near_begin
    else:
        return count


@gluon.jit
def place_of_lse(at_stats, m, near_begin, near_end, sizes, c):
    """Return the offset of a query tile's LSE; ``at_stats``: that of a near one."""
    if c.FAR_LO or c.FAR_HI:
        tiles = sizes.batch * sizes.kv_heads * sizes.group * sizes.row_tiles
        far = gl.where(m >= near_end, tiles * (2 * c.BLOCK_M), tiles * (2 * c.BLOCK_M) + c.BLOCK_M)
        at_stats += gl.where((m >= near_end) | (m < near_begin), far, 0)
    return at_stats


@gluon.jit
def far_line(diagonal, BELOW: gl.constexpr, terms, sizes, c):
    """Return the `Line` of one side, and the distance at which it ends."""
    if BELOW:
        return line_below(diagonal, terms, sizes, c), 1 - sizes.queries
    else:
        return line_above(diagonal, terms, sizes, c), sizes.keys - 1


# --- probabilities ---


@gluon.jit
def start_of_words(diagonal, corner, c):
    """Return the initial accumulator of K·Qᵀ of a near subtile."""
    S: gl.constexpr = accumulator(c.BLOCK_N, c.SUBTILE_M, c.WARPS)
    STEP: gl.constexpr = 1 if c.AHEAD else -1  # with AHEAD the first subtile adds words to a product, in this order
    return words(diagonal, corner, gl.zeros([c.BLOCK_N, c.SUBTILE_M], gl.float32, S), True, STEP)


@gluon.jit
def on_line(s, lse, line, corner, terms, c):
    """Return P of a transposed far subtile on a line, of which the LSE has the queries' share."""
    value, slope, at = line[0]
    slope = anew(slope) * terms.exponent
    cols = gl.arange(0, c.BLOCK_N, gl.SliceLayout(1, s.type.layout)).to(gl.float32)
    first = value * terms.exponent + slope * (corner - at).to(gl.float32)
    return gl.exp2(s * terms.exponent + ((first + slope * cols)[:, None] - lse[None, :]))


# --- sums ---


@gluon.jit
def of_thread(ds):
    """Return the sum of each thread's elements of a transposed subtile."""
    return gl.sum(gl.sum(gl.sum(in_words(ds), axis=5), axis=3), axis=1)


@gluon.jit
def no_sums(c):
    S: gl.constexpr = accumulator(c.BLOCK_N, c.SUBTILE_M, c.WARPS)
    none = of_thread(gl.zeros([c.BLOCK_N, c.SUBTILE_M], gl.float32, S))
    if c.TOEPLITZ == "line":
        return FarSums(none, none)
    else:
        return FarSums(none, 0)


@gluon.jit
def _like(x, y):
    return gl.convert_layout(x, y.type.layout, assert_trivial=True)


@gluon.jit
def _halves_of_places(x):
    """Split [w, g, n, t] into even and odd places of n."""
    return x.reshape([x.shape[0], x.shape[1], x.shape[2] // 2, 2, x.shape[3]]).permute((0, 1, 2, 4, 3)).split()


@gluon.jit
def by_places(x):
    """Return the sum of [w, g, 8, t] over axis 2, and that of each times its place: 13 operations, not 16."""
    even, odd = _halves_of_places(x)
    even2, odd2 = _halves_of_places(even + odd)
    even4, odd4 = _halves_of_places(even2 + odd2)
    total, ones = gl.sum(even4 + odd4, axis=2), gl.sum(odd, axis=2)
    twos, fours = _like(gl.sum(odd2, axis=2), ones), _like(gl.sum(odd4, axis=2), ones)
    return total, 4.0 * fours + (2.0 * twos + ones)


@gluon.jit
def of_thread_by_distance(ds):
    """Return `of_thread`, and the sum of each element times its distance from the first of its thread.

    47 operations for 32 elements: of 16 keys and 8 queries a thread has four elements on three diagonals, and adds the
    two of one diagonal first."""
    near, far = in_words(ds).permute((0, 2, 3, 4, 5, 1)).split()
    moved, first = _one_on(far)
    early, late = (near + _like(moved, near)).split()
    before, before_late = first.split()
    total, places = by_places(early + late)
    before = _like(gl.sum(before + before_late, axis=2), total)  # a place before the first
    late = _like(gl.sum(late, axis=2), total) + _like(gl.sum(before_late, axis=2), total)
    return total + before, (before - _like(places, total)) * 8.0 - late


@gluon.jit
def summed(sums, ds, line, corner, c):
    """Return the sums with dS of one more subtile; ``corner``: its first key minus its first query."""
    if c.TOEPLITZ == "line":
        own, within = of_thread_by_distance(ds)
        own = anew(_like(own, sums.total))  # here: the compiler would sink it below the last use of dS
        L: gl.constexpr = own.type.layout
        sixteens = gl.arange(0, c.BLOCK_N // 16, gl.SliceLayout(1, gl.SliceLayout(2, L)))[:, None][:, :, None]
        keys = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(2, L)))[None, :][:, :, None]
        queries = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, :][:, None, :]
        first = (16 * sixteens + keys - 2 * queries + (corner - line[0].at)).to(gl.float32)
        return FarSums(sums.total + own, sums.weighted + (_like(within, own) + own * first))
    else:
        return FarSums(sums.total + anew(of_thread(ds)), 0)


@gluon.jit
def of_warps(x):
    """Return the sum of each warp of a field of `FarSums`."""
    return gl.sum(gl.sum(x, axis=2), axis=1)


@gluon.jit
def add_sums(sums, dvector, b, h, line, sizes, c):
    """Add the sums of one side of a program and head to the two entries that define its line."""
    at = diagonal_of(dvector, b, h, sizes.kv_heads * sizes.group, sizes, c)
    begin, end = line[0].at, line[1]
    total = of_warps(sums.total)
    at += gl.zeros_like(total).to(gl.int32)
    if c.TOEPLITZ == "line":
        span = end - begin
        there = of_warps(sums.weighted) / gl.where(span == 0, 1, span).to(gl.float32)
        gl.atomic_add(at + end, there, sem="relaxed", scope="gpu")
        total -= there
    gl.atomic_add(at + begin, total, sem="relaxed", scope="gpu")


@gluon.jit
def _halves(x):
    """Split [w, g, n, t, b] into even and odd places of n."""
    x = x.reshape([x.shape[0], x.shape[1], x.shape[2] // 2, 2, x.shape[3], x.shape[4]])
    return x.permute((0, 1, 2, 4, 5, 3)).split()


@gluon.jit
def _whole(even, odd):
    """Invert `_halves`."""
    odd = gl.convert_layout(odd, even.type.layout, assert_trivial=True)
    x = gl.join(even, odd).permute((0, 1, 2, 5, 3, 4))
    return x.reshape([x.shape[0], x.shape[1], 2 * x.shape[2], x.shape[4], x.shape[5]])


@gluon.jit
def _one_on(x):
    """Return [w, g, 8, t, b] shifted to the place before, 0 at the last; and the first, [w, g, 1, t, b]."""
    even, odd = _halves(x)
    even2, odd2 = _halves(even)
    even4, odd4 = _halves(even2)
    even2 = _whole(odd4, gl.zeros_like(even4) * -1.0)  # the compiler drops an addition of -0, not of 0
    return _whole(odd, _whole(odd2, even2)), even4


@gluon.jit
def add_diagonals(ds, dvector, b, h, corner, sizes, c):
    """Add dS of a transposed near subtile to the entries of its distances.

    A warp has 16 keys and 64 queries: 1,024 pairs with 79 distances. A thread first sums its elements of a diagonal,
    which leaves two numbers in each of nine blocks of 8 keys and 8 queries. Those of a diagonal then move to the
    threads of the distance modulo 8, four of which share these distances. An atomic addition for each number would be
    six times as many, several to an address."""
    gl.static_assert(ds.shape[1] == 64, "eight times eight queries")
    at = diagonal_of(dvector, b, h, sizes.kv_heads * sizes.group, sizes, c) + corner
    near, far = in_words(ds).permute((0, 2, 3, 4, 5, 1)).split()
    moved, first = _one_on(far)
    L: gl.constexpr = near.type.layout
    near = _turned(near + gl.convert_layout(moved, L, assert_trivial=True))
    first = _turned(first)
    # Distances -8 n and less at place n belong to it, or to the next where they wrapped around.
    later, head = _one_on(near)
    later = gl.where(_goes_around(near), near, gl.convert_layout(later, L, assert_trivial=True))
    around = _goes_around(first)
    head = gl.where(around, first, gl.convert_layout(head, first.type.layout, assert_trivial=True))
    first = gl.where(around, 0.0, first)
    later = _shared(_shared(_of_neighbours(later), 1), 2)
    w, g, n, t = _index(later, 0), _index(later, 1), _index(later, 2), _index(later, 3)
    gl.atomic_add(at + (16 * w + g - 8 * t - 8) + (0 - 32 * n), later, sem="relaxed", scope="gpu")
    ends = _exchanged(_of_neighbours(head), _of_neighbours(first), 1)
    element = 4 * _index(ends, 1) + _index(ends, 3)
    ends += _from_element(ends, (element ^ 2) + gl.zeros_like(ends).to(gl.int32))
    w, g, t = _index(ends, 0), _index(ends, 1), _index(ends, 3)
    places = at + (16 * w + g + 8 * t) + gl.zeros_like(ends).to(gl.int32)
    gl.atomic_add(places, ends, mask=t + gl.zeros_like(ends).to(gl.int32) < 2, sem="relaxed", scope="gpu")


@gluon.jit
def _turned(x):
    """Move distances g - 2 t - b - 8 n of [w, g, n, t, b] that are equal modulo 8 to the same place of g."""
    turn = 2 * _index(x, 3) + _index(x, 4)
    element = (_index(x, 1) + turn) % 8 * 4 + _index(x, 3)
    return _from_element(x, element + gl.zeros_like(x).to(gl.int32))


@gluon.jit
def _goes_around(x):
    """True for elements of `_turned` that wrapped around past the last place."""
    return _index(x, 1) + 2 * _index(x, 3) + _index(x, 4) + gl.zeros_like(x).to(gl.int32) >= 8


@gluon.jit
def _of_neighbours(x):
    """Return the sum over the last axis, of two elements of a thread."""
    even, odd = x.split()
    return even + odd


@gluon.jit
def _shared(x, BIT: gl.constexpr):
    """Halve n of [w, g, n, t]: keep the n with the bit of t, summed over the threads that differ in it."""
    even, odd = x.reshape([x.shape[0], x.shape[1], x.shape[2] // 2, 2, x.shape[3]]).permute((0, 1, 2, 4, 3)).split()
    return _exchanged(even, odd, BIT)


@gluon.jit
def _exchanged(x, y, BIT: gl.constexpr):
    """Return x, or y in threads with this bit of t, summed over the two threads that differ in it."""
    has = (_index(x, 3) & BIT) + gl.zeros_like(x).to(gl.int32) != 0
    element = (4 * _index(x, 1) + _index(x, 3)) ^ BIT
    return gl.where(has, y, x) + _from_element(gl.where(has, x, y), element + gl.zeros_like(x).to(gl.int32))


@gluon.jit
def _from_element(x, element):
    """Return each element of another thread of the warp."""
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;", "=f,f,r", [x, element], dtype=gl.float32, is_pure=False, pack=1
    )


@gluon.jit
def _index(x, AXIS: gl.constexpr):
    """Return the index of each element along an axis."""
    RANK: gl.constexpr = len(x.shape)
    index = gl.arange(0, x.shape[AXIS], _axis(x.type.layout, AXIS, RANK))
    for other in gl.static_range(RANK):
        if other != AXIS:
            index = index.expand_dims(other)
    return index


@gluon.constexpr_function
def _axis(layout, axis, rank):
    for other in reversed(range(rank)):
        if other != axis:
            layout = gl.SliceLayout(other, layout)
    return layout
