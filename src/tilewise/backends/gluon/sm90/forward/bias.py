"""Bias in the forward: the warps that load its tiles, and how the scores of a tile use them.

Key tiles without an entry of a bias by relative position are not loaded, so that its tiles are counted separately.
Producers and consumers find these tiles by the same arithmetic.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from tilewise.backends.gluon.pipeline import fill_at, release, release_after_loads, slot_of, use_of, wait_full
from tilewise.backends.gluon.relative import CUT, column_of, in_range, range_state
from tilewise.backends.gluon.scheduler import entry_at, first_entry, next_tile_index, work_tile_at, work_tile_count
from tilewise.backends.gluon.score import bias_of, in_units, widened
from tilewise.backends.gluon.sm90.common.wgmma import accumulator
from tilewise.backends.gluon.varlen import box_of


@gluon.jit
def load_bias(x, pipelines, terms, sizes, c, WARPGROUP: gl.constexpr):
    """Load the bias tiles of one warpgroup; the role of one warp."""
    step = 0
    t = 0
    tile_index = gl.program_id(0)
    while tile_index < work_tile_count(x, sizes, c):
        tile = work_tile_at(tile_index, x, terms, sizes, c)
        b = bias_of(tile.b, sizes.batch, c)
        if c.RANGE_LO or c.RANGE_HI:
            for i in range(first_entry(tile, terms, c, WARPGROUP), tile.count):
                n0 = entry_at(i, tile, c).n * c.BLOCK_N
                row = tile.row0 + 64 * WARPGROUP
                if range_state(row + tile.seq.diagonal, 64, n0, c.BLOCK_N, terms) >= CUT:
                    slot = slot_of(pipelines.bias, step, WARPGROUP, c.WARPGROUPS)
                    use = use_of(pipelines.bias, step, c.WARPGROUPS)
                    fill_at(pipelines.bias, slot, use, x.bias, bias_box(tile, b, row, n0, terms, c))
                    step += 1
        else:
            for i in range(tile.count):
                slot = slot_of(pipelines.bias, step, WARPGROUP, c.WARPGROUPS)
                n0 = entry_at(i, tile, c).n * c.BLOCK_N
                row = tile.row0 + 64 * WARPGROUP
                use = use_of(pipelines.bias, step, c.WARPGROUPS)
                fill_at(pipelines.bias, slot, use, x.bias, bias_box(tile, b, row, n0, terms, c))
                step += 1
        if c.O_IN_BIAS:
            hand_out_slot(pipelines.bias, step, c, WARPGROUP)
            step += 1
        tile_index = next_tile_index(tile_index, t, pipelines, c)
        t += 1


@gluon.jit
def bias_box(tile, b, row, n0, terms, c):
    """Return the TMA coordinates of the bias of 64 queries from ``row`` on and the keys from ``n0`` on."""
    seq = tile.seq
    return box_of(seq.first_query, seq.queries, b, tile.h // c.BIAS_GROUP, row, c, column_of(n0, seq, terms, c))


@gluon.jit
def hand_out_slot(pipeline, n, c, WARPGROUP: gl.constexpr):
    """Give a warpgroup its ``n``-th slot without a bias tile, once it is free: O uses it in turn after the bias."""
    slot = slot_of(pipeline, n, WARPGROUP, c.WARPGROUPS)
    mbarrier.wait(pipeline.empty.index(slot), (use_of(pipeline, n, c.WARPGROUPS) & 1) ^ 1)
    mbarrier.arrive(pipeline.full.index(slot), count=1)


@gluon.jit
def slot_for_o(pipelines, n, c, WARPGROUP: gl.constexpr):
    """Wait for the ``n``-th slot of the warpgroup, and return it for the store of O."""
    gl.static_assert(
        c.BIAS_STAGES > 1, "the first bias of a query tile is loaded while O of the previous one is stored"
    )
    slot = slot_of(pipelines.bias, n, WARPGROUP, c.WARPGROUPS)
    wait_full(pipelines.bias, slot, use_of(pipelines.bias, n, c.WARPGROUPS))
    return pipelines.bias.slots.index(slot)


@gluon.jit
def release_o(pipelines, n, c, WARPGROUP: gl.constexpr):
    """Release the slot of the previous query tile's O, if there was one, once O is stored."""
    if n >= 0:
        tma.store_wait(0)
        release(pipelines.bias, slot_of(pipelines.bias, n, WARPGROUP, c.WARPGROUPS))


@gluon.jit
def bias_scores(x, pipelines, step, tile, entry, terms, sizes, c, WARPGROUP: gl.constexpr):
    """Return the bias of a tile, in a shape that broadcasts to [64, BLOCK_N]; 0 without a bias. A matrix bias is as
    stored; a bias of keys, available with their K, is in the units of the scores."""
    S: gl.constexpr = accumulator(64, c.BLOCK_N)
    if c.BIAS == "matrix":
        slot = slot_of(pipelines.bias, step, WARPGROUP, c.WARPGROUPS)
        wait_full(pipelines.bias, slot, use_of(pipelines.bias, step, c.WARPGROUPS))
        bias = pipelines.bias.slots.index(slot).reshape([64, c.BLOCK_N]).load(S)
    elif c.BIAS == "cols":
        bias = pipelines.bias.slots.index(slot_of(pipelines.k, step)).load(gl.SliceLayout(0, S))[None, :]
    else:
        bias = gl.zeros([1, c.BLOCK_N], gl.float32, S)
    return bias


@gluon.jit
def release_bias(pipelines, step, c, WARPGROUP: gl.constexpr):
    if c.BIAS == "matrix":
        release_after_loads(pipelines.bias, slot_of(pipelines.bias, step, WARPGROUP, c.WARPGROUPS))


@gluon.jit
def skip_bias(pipelines, step, c, WARPGROUP: gl.constexpr):
    """Skip the bias of a key tile that the warpgroup skips."""
    if c.BIAS == "matrix" and not (c.RANGE_LO or c.RANGE_HI):
        slot = slot_of(pipelines.bias, step, WARPGROUP, c.WARPGROUPS)
        wait_full(pipelines.bias, slot, use_of(pipelines.bias, step, c.WARPGROUPS))
        release(pipelines.bias, slot)


@gluon.jit
def start_of(bias, terms, c):
    """Return the initial accumulator of Q·Kᵀ."""
    S: gl.constexpr = accumulator(64, c.BLOCK_N)
    if c.BIAS_FIRST and c.BIAS == "cols":
        start, _ = gl.broadcast(bias, gl.zeros([64, c.BLOCK_N], gl.float32, S))
        return start
    elif c.BIAS_FIRST and c.SCALE_IN_Q:
        return widened(bias)
    elif c.BIAS_FIRST:
        return in_units(bias, terms.inverse)
    else:
        return gl.zeros([64, c.BLOCK_N], gl.float32, S)


@gluon.jit
def start_in_range(x, pipelines, taken, tile, entry, terms, sizes, c, WARPGROUP: gl.constexpr):
    """Like `start_of`, but for a bias by relative position, whose tile may have some entries or none. Also return True
    if the tile took a slot of the pipeline, its ``taken``-th."""
    start = gl.zeros([64, c.BLOCK_N], gl.float32, accumulator(64, c.BLOCK_N))
    row, n0 = tile.row0 + tile.seq.diagonal + 64 * WARPGROUP, entry.n * c.BLOCK_N
    found = range_state(row, 64, n0, c.BLOCK_N, terms)
    if found >= CUT:
        start = start_of(bias_scores(x, pipelines, taken, tile, entry, terms, sizes, c, WARPGROUP), terms, c)
        if found == CUT:
            start = without_range(start, row - n0, terms, c)
    return start, found >= CUT


@gluon.jit
def without_range(start, row0, terms, c):
    """Zero ``start`` where a pair has no entry, like `forward.masks.banded`; ``row0`` is relative to the tile's first
    key."""
    parts = start.reshape([64, c.BLOCK_N // 8, 8])
    L: gl.constexpr = parts.type.layout
    rows = gl.arange(0, 64, gl.SliceLayout(1, gl.SliceLayout(2, L)))[:, None][:, :, None]
    eights = gl.arange(0, c.BLOCK_N // 8, gl.SliceLayout(0, gl.SliceLayout(2, L)))[None, :][:, :, None]
    within = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, L)))[None, :][:, None, :]
    parts = gl.where(in_range(rows + row0 - within, 8 * eights, terms, c), parts, 0.0)
    return gl.convert_layout(parts.reshape(start.shape), start.type.layout, assert_trivial=True)


@gluon.jit
def first_below_range(tile, first, terms, c, WARPGROUP: gl.constexpr):
    """Return the first entry from ``first`` on from which all key tiles are below the range."""
    lowest = gl.maximum(tile.row0 + tile.seq.diagonal + 64 * WARPGROUP + terms.range_lo, 0) // c.BLOCK_N
    return gl.minimum(gl.maximum(tile.last + 1 - lowest, first), tile.count)


@gluon.jit
def first_not_inside(tile, first, end, terms, c, WARPGROUP: gl.constexpr):
    """Return the first entry from ``first`` on whose tile has pairs without a bias, if the range has no upper end.

    ``end``: from `first_below_range`.
    """
    least = gl.maximum(tile.row0 + tile.seq.diagonal + 64 * WARPGROUP + 63 + terms.range_lo, 0)
    return gl.minimum(gl.maximum(tile.last + 1 - gl.cdiv(least, c.BLOCK_N), first), end)
