"""A Toeplitz bias in the backward: what transposed tiles take from it, and where their dS goes.

A program has one tile of keys; its tiles of queries, from the last to the first, lie below the near distances, then
among them, then above (`tilewise.score.terms.Far`). Of a far tile the bias is in the LSE, which the loading warp takes
from another place (`begin_kernel`); a line's share of the keys is added to it. dS of far tiles is summed by the tensor
cores, as one more product of the operand of dK, with `new_factors`: an addition for each element would take registers
that the next K·Qᵀ and K have. Once for each side of a program the sums are added to the two entries between which the
line runs: a number's gradient is their sum, and a line's is the same from there as from all of its entries. dS of a
near tile is added along its diagonals, those of a thread first.

The gradient is float32, with `PAD` places before the first entry and behind the last, to which 0 is added.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from tilewise.backends.gluon.score import kept_weight
from tilewise.backends.gluon.sm90.backward_scheduler import BackwardSizes
from tilewise.backends.gluon.sm90.diagonals import (
    exchanged,
    from_lane,
    goes_around,
    index_of,
    of_neighbours,
    one_on,
    shared,
    turned,
)
from tilewise.backends.gluon.sm90.mask_tiles import in_words
from tilewise.backends.gluon.sm90.toeplitz_tiles import (
    PAD,
    Pairs,
    anew,
    diagonal_of,
    line_above,
    line_below,
    scaled_entry,
    words,
    write_pairs,
)
from tilewise.backends.gluon.sm90.wgmma import accumulator
from tilewise.backends.launcher import POINTER, Launch, strided
from tilewise.problem import Problem
from tilewise.score.terms import COARSE_LSE

LOG2E = tl.constexpr(1.4426950408889634)
COARSE = tl.constexpr(COARSE_LSE)


FACTORS = tl.constexpr(8)  # columns, of which the smallest product has so many


# --- before the kernel ---


@triton.jit
def begin_kernel(vector, lse, pairs, gradient, stats, count, inverse, heads, pair_programs, sizes, terms, exponent,
                 weight, c, BLOCK: tl.constexpr):  # fmt: skip
    """`write_pairs`, with the zeros of a gradient or None; then, for each tile of queries, the LSE in base 2 that far
    tiles take, first below the near distances, then above, as `preprocess_kernel` has it. Of a number that is the LSE
    less the number; of a line less what it changes from the tile's first query on. lse: (B, H, M)."""
    pid = tl.program_id(0)
    if pid < pair_programs:
        write_pairs(pid, vector, pairs, gradient, count, inverse, heads)
    elif c.FAR_LO or c.FAR_HI:
        _far_stats(pid - pair_programs, vector, lse, stats, inverse, heads, sizes, terms, exponent, weight, c, BLOCK)


@triton.jit
def _far_stats(tile, vector, lse, stats, inverse, vector_heads, sizes, terms, exponent, weight, c, BLOCK: tl.constexpr):
    heads = sizes.kv_heads * sizes.group
    bh, within = tile // sizes.row_tiles, tl.arange(0, BLOCK)
    rows = tile % sizes.row_tiles * BLOCK + within
    natural = tl.load(lse + tl.cast(bh, tl.int64) * sizes.queries + rows, mask=rows < sizes.queries, other=float("inf"))
    row = bh % heads // c.TOEPLITZ_GROUP
    if c.TOEPLITZ_BATCH:
        row += bh // heads * (heads // c.TOEPLITZ_GROUP)
    at = stats + tl.cast(tile, tl.int64) * (2 * BLOCK) + within
    left_out = tl.abs(natural) > COARSE
    base2 = natural * LOG2E
    if weight is not None:
        base2 -= tl.log2(weight)
    if c.FAR_LO:
        less = _of_queries(vector, row, within, terms.far_lo, 1 - sizes.queries, inverse, vector_heads, sizes, c)
        tl.store(at, tl.where(left_out, float("inf"), base2 - less * exponent))
    if c.FAR_HI:
        less = _of_queries(vector, row, within, terms.far_hi, sizes.keys - 1, inverse, vector_heads, sizes, c)
        tl.store(at + BLOCK, tl.where(left_out, float("inf"), base2 - less * exponent))


@triton.jit
def _of_queries(vector, row, within, at, end, inverse, heads, sizes, c):
    """What the bias of far distances, which lie between ``at`` and ``end``, has for the queries of a tile alone; the
    slope is that of `toeplitz_tiles.line_of`."""
    value = scaled_entry(vector, row, at + (sizes.queries - 1) + 0 * within, within >= 0, inverse, heads)
    if c.TOEPLITZ == "line":
        last = scaled_entry(vector, row, end + (sizes.queries - 1) + 0 * within, within >= 0, inverse, heads)
        span = end - at
        rise = (last - value) / tl.where(span == 0, 1, span).to(tl.float32)
        slope = tl.where((span == 0) | (tl.abs(value) == float("inf")), 0.0, rise)
        return -slope * within.to(tl.float32)
    else:
        return value


class ToeplitzGradient:
    """Where the gradient of a vector comes together, and what comes before."""

    def __init__(
        self, problem: Problem, vector: Tensor, inverse: float, sizes: BackwardSizes, terms: Any, c: Any, tiles: int
    ):
        B, H, _, self.count = vector.shape
        self.shape = B, H, 1, self.count + 2 * PAD.value
        self.dtype, self.wanted = vector.dtype, c.DTOEPLITZ.value
        self.pairs = Pairs(problem, vector, inverse)
        far, weight = c.FAR_LO.value or c.FAR_HI.value, kept_weight(problem)
        self.launch = Launch(
            begin_kernel,
            self.pairs.programs + (tiles if far else 0),
            (strided(vector), POINTER, POINTER, POINTER, POINTER),
            (*self.pairs.numbers, self.pairs.programs, sizes, terms, terms.exponent, weight, c, c.BLOCK_M.value),
            num_warps=4,
        )

    def begin(self, vector: Tensor, lse: Tensor, stats: Tensor) -> tuple[Tensor, Tensor | None]:
        """The words of the vector and the gradient, all 0; and of far tiles the LSE behind the others in ``stats``."""
        found = torch.empty(self.shape, dtype=torch.float32, device=lse.device) if self.wanted else None
        pairs = self.pairs.empty()
        self.launch(vector, lse, pairs, found, stats[stats.shape[0] // 2 :])
        return pairs, found

    def end(self, found: Tensor) -> Tensor:
        """A view where the vector is of float32."""
        return found[..., PAD.value : PAD.value + self.count].to(self.dtype)


# --- which tiles ---


@gluon.jit
def near_queries(work_tile, terms, c):
    """Of a work tile's tiles of queries those that read entries, an interval: from its end on they lie below the near
    distances, before its begin above."""
    begin, end = work_tile.begin, work_tile.end
    if c.FAR_HI:
        begin = gl.minimum(gl.maximum(gl.maximum(work_tile.n0 + 1 - terms.far_hi, 0) // c.BLOCK_M, begin), end)
    if c.FAR_LO:
        after = gl.cdiv(gl.maximum(work_tile.n0 + c.BLOCK_N - 1 - terms.far_lo, 0), c.BLOCK_M)
        end = gl.minimum(gl.maximum(after, begin), end)
    return begin, end


@gluon.jit
def end_of_part(PART: gl.constexpr, count, work_tile, near_begin, near_end, c):
    """Up to which of the ``count`` tiles of queries of a work tile, from the last to the first, what lies below goes,
    PART 0, what is near, 1, and what lies above, 2."""
    if PART == 0:
        return work_tile.end - near_end
    elif PART == 1 and (c.FAR_LO or c.FAR_HI):
        return work_tile.end - near_begin
    else:
        return count


@gluon.jit
def place_of_lse(at_stats, m, near_begin, near_end, sizes, c):
    """Where the loading warp finds the LSE of a tile of queries; ``at_stats``: of a near one."""
    if c.FAR_LO or c.FAR_HI:
        tiles = sizes.batch * sizes.kv_heads * sizes.group * sizes.row_tiles
        far = gl.where(m >= near_end, tiles * (2 * c.BLOCK_M), tiles * (2 * c.BLOCK_M) + c.BLOCK_M)
        at_stats += gl.where((m >= near_end) | (m < near_begin), far, 0)
    return at_stats


@gluon.jit
def far_line(diagonal, BELOW: gl.constexpr, terms, sizes, c):
    """The `Line` of one side, and the distance at which it ends."""
    if BELOW:
        return line_below(diagonal, terms, sizes, c), 1 - sizes.queries
    else:
        return line_above(diagonal, terms, sizes, c), sizes.keys - 1


# --- probabilities ---


@gluon.jit
def start_of_words(diagonal, corner, c):
    """What the accumulator of K·Qᵀ of a near subtile starts from."""
    S: gl.constexpr = accumulator(c.BLOCK_N, c.SUBTILE_M, c.WARPS)
    return words(diagonal, corner, gl.zeros([c.BLOCK_N, c.SUBTILE_M], gl.float32, S), True)


@gluon.jit
def on_line(s, lse, line, corner, terms, c):
    """P of a transposed far subtile whose bias lies on a line, of which the LSE has what belongs to queries;
    ``corner``: the first key of its tile minus the first query."""
    value, slope, at = line[0]
    slope = anew(slope) * terms.exponent
    cols = gl.arange(0, c.BLOCK_N, gl.SliceLayout(1, s.type.layout)).to(gl.float32)
    first = value * terms.exponent + slope * (corner - at).to(gl.float32)
    return gl.exp2(s * terms.exponent + ((first + slope * cols)[:, None] - lse[None, :]))


# --- sums ---


@gluon.jit
def new_factors(DTYPE: gl.constexpr, c):
    """What dS of each far subtile is multiplied with, transposed [1, FACTORS, queries]: 1 in even columns, and in odd
    ones, of which a line makes use, the place of a query in its tile."""
    S: gl.constexpr = gl.NVMMASharedLayout.get_default_for([FACTORS, c.SUBTILE_M], DTYPE)
    L: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [c.WARPS, 1], [1, 0])
    factors = gl.allocate_shared_memory(DTYPE, [c.M_SUBTILES, FACTORS, c.SUBTILE_M], S)
    column = gl.arange(0, FACTORS, gl.SliceLayout(1, L))[:, None]
    query = gl.arange(0, c.SUBTILE_M, gl.SliceLayout(0, L))[None, :]
    for i in gl.static_range(c.M_SUBTILES):
        factors.index(i).store(gl.where(column % 2 == 0, 1, query + i * c.SUBTILE_M).to(DTYPE))
    return factors


@gluon.jit
def no_sums(c):
    """Of one side of a program and head, of each of its keys: what `FACTORS` columns of products come to."""
    return gl.zeros([c.BLOCK_N, FACTORS], gl.float32, accumulator(c.BLOCK_N, FACTORS, c.WARPS))


@gluon.jit
def moved(sums, c):
    """Places of queries are counted from the tile at hand, and the next is the one before: those of what is there are
    a tile further on."""
    if c.TOEPLITZ == "line":
        total, weighted = sums.reshape([c.BLOCK_N, FACTORS // 2, 2]).split()
        weighted += total * c.BLOCK_M
        joined = gl.join(total, weighted).reshape([c.BLOCK_N, FACTORS])
        return gl.convert_layout(joined, sums.type.layout, assert_trivial=True)
    else:
        return sums


@gluon.jit
def summed(sums, ds, factors, SUBTILE: gl.constexpr, c):
    """Issue the product that adds a far subtile's dS, an operand."""
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, accumulator(c.BLOCK_N, FACTORS, c.WARPS), 2)
    ds = gl.convert_layout(ds, OPERAND, assert_trivial=True)
    return warpgroup_mma(ds, factors.index(SUBTILE).permute((1, 0)), sums, is_async=True)


@gluon.jit
def of_warps(x, c):
    """Of a number for each key, which all columns have, what each sixteen of them come to."""
    x = x.reshape([c.BLOCK_N // 16, 16, x.shape[1]])
    return gl.sum(gl.sum(x, axis=2), axis=1) * (1.0 / x.shape[2])


@gluon.jit
def add_sums(sums, dvector, b, h, line, corner, sizes, c):
    """Those of one side of a program and head to the entries between which its line runs. ``corner``: the first key
    minus the first query of the tile that came last."""
    at = diagonal_of(dvector, b, h, sizes.kv_heads * sizes.group, sizes, c)
    begin, end = line[0].at, line[1]
    total, weighted = sums.reshape([c.BLOCK_N, FACTORS // 2, 2]).split()
    if c.TOEPLITZ == "line":
        keys = gl.arange(0, c.BLOCK_N, gl.SliceLayout(1, total.type.layout))[:, None]
        there = of_warps(total * (keys + (corner - begin)).to(gl.float32) - weighted, c)
        span = end - begin
        there = there / gl.where(span == 0, 1, span).to(gl.float32)
        total = of_warps(total, c) - there
        at += gl.zeros_like(total).to(gl.int32)
        gl.atomic_add(at + end, there, sem="relaxed", scope="gpu")
    else:
        total = of_warps(total, c)
        at += gl.zeros_like(total).to(gl.int32)
    gl.atomic_add(at + begin, total, sem="relaxed", scope="gpu")


@gluon.jit
def add_diagonals(ds, dvector, b, h, corner, sizes, c):
    """dS of a transposed near subtile to the entries of its distances.

    A warp has sixteen keys and 64 queries, of which 1,024 pairs meet 79 distances. A thread adds up first what it has
    of a diagonal, which leaves it two numbers in each of nine blocks of eight keys and eight queries. What lies on one
    diagonal then comes to the threads of the distance modulo 8, and of these four share the distances between them: an
    addition to memory for each number would be six times as many, several to a place.
    """
    gl.static_assert(ds.shape[1] == 64, "eight times eight queries")
    at = diagonal_of(dvector, b, h, sizes.kv_heads * sizes.group, sizes, c) + corner
    near, far = in_words(ds).permute((0, 2, 3, 4, 5, 1)).split()
    L: gl.constexpr = near.type.layout
    moved, first = one_on(far, 0.0)
    near = turned(near + gl.convert_layout(moved, L, assert_trivial=True))
    first = turned(first)
    # Of the place n distances -8 n and less belong to it, or, where they went once around, to the next.
    later, head = one_on(near, 0.0)
    later = gl.where(goes_around(near), near, gl.convert_layout(later, L, assert_trivial=True))
    around = goes_around(first)
    head = gl.where(around, first, gl.convert_layout(head, first.type.layout, assert_trivial=True))
    first = gl.where(around, 0.0, first)
    later = shared(shared(of_neighbours(later), 1), 2)
    w, g, n, t = index_of(later, 0), index_of(later, 1), index_of(later, 2), index_of(later, 3)
    gl.atomic_add(at + (16 * w + g - 8 * t - 8) + (0 - 32 * n), later, sem="relaxed", scope="gpu")
    ends = exchanged(of_neighbours(head), of_neighbours(first), 1)
    lane = 4 * index_of(ends, 1) + index_of(ends, 3)
    ends += from_lane(ends, (lane ^ 2) + gl.zeros_like(ends).to(gl.int32))
    w, g, t = index_of(ends, 0), index_of(ends, 1), index_of(ends, 3)
    places = at + (16 * w + g + 8 * t) + gl.zeros_like(ends).to(gl.int32)
    gl.atomic_add(places, ends, mask=t + gl.zeros_like(ends).to(gl.int32) < 2, sem="relaxed", scope="gpu")
