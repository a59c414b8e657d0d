"""The backward where batch elements share a bias: a program has several side by side, in lanes.

A lane is a warpgroup with a batch element of its own, and what it computes is `backward_kernel.differentiate`. The
lanes of a program have the same tile of keys, of one head, and come to the same tile of queries at about the same time:
they read one tile of the bias, and two other warps add their tiles of dS up where they lie, in shared memory, before
they leave for a float32 sum in memory. So a tile of the bias comes, and one of dS leaves, once for all lanes.

A program stays and takes the next work tile that is left. One warp loads K, V, Q and dO of all lanes and the bias,
one runs `dq.finish_earlier_heads` and `backward.warps.store_keys_of`: heads take turns in the sum of dQ, which has room
for the heads at work.

Of the last program of a head some lanes may have no batch element: TMA reads zeros for them and stores nothing, their
dQ has a place in the ring of the sum which nobody reads, and their dS is not added.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from tilewise.backends.gluon.compat import reinterpret, tma_load, warps_barrier
from tilewise.backends.gluon.pipeline import (
    ABSENT,
    Ring,
    count_up,
    fetch_tile_index,
    let_next_begin,
    new_ring,
    new_ring_of_numbers,
    new_tiles,
    release,
    slot_of,
    use_of,
    wait_for_previous,
    wait_full,
    with_barriers,
)
from tilewise.backends.gluon.scheduler import hand_out_tile_index, next_tile_index
from tilewise.backends.gluon.score import widened
from tilewise.backends.gluon.sm90.backward.dq import finish_earlier_heads, new_dq_ring, wait_zeroed
from tilewise.backends.gluon.sm90.backward.kernel import BackwardOperands, BackwardShared, TileIndices, differentiate
from tilewise.backends.gluon.sm90.backward.m_subtiles import QueryRows
from tilewise.backends.gluon.sm90.backward.scheduler import (
    counters_at,
    head_of,
    of_lane,
    row_tile,
    work_tile_at,
    work_tile_count,
)
from tilewise.backends.gluon.sm90.backward.warps import fetch_keys_of, store_keys_of
from tilewise.backends.gluon.sm90.common.key_mask import new_step_tiles, store_ones
from tilewise.backends.gluon.sm90.common.wgmma import tile_layout
from tilewise.backends.gluon.varlen import box_of

PIECE_ROWS = gl.constexpr(16)  # of dS that are added up at once: enough loads on their way


class Lane(NamedTuple):
    """What a lane has of its own, but for the bias in ``rows``."""

    rows: Any
    k_ring: Any
    v_ring: Any
    dq_ring: Any
    shared: Any


@gluon.jit
def new_lane(q, k, v, do, stats, dq_accum, bias_ring, ones, c):
    keys = new_ring(k, c.KEY_STAGES, c.BLOCK_N, c.BLOCK_D, 1)
    values = new_ring(v, c.KEY_STAGES, c.BLOCK_N, c.BLOCK_D, 1)
    ring = new_ring(q, c.STAGES, c.BLOCK_M, c.BLOCK_D, 1)
    do_slots = new_tiles(do, c.STAGES, c.BLOCK_M, c.BLOCK_D)
    stats_slots = gl.allocate_shared_memory(gl.float32, [2 * c.STAGES, c.BLOCK_M], stats.layout)
    SCORES: gl.constexpr = tile_layout(c.BLOCK_M, c.BLOCK_N, q.dtype)
    ds_slots = gl.allocate_shared_memory(q.dtype, [2, 1, 1, c.BLOCK_M, c.BLOCK_N], SCORES)
    ds_ring = with_barriers(ds_slots, 2, 1)
    no_ring = Ring(ABSENT, ABSENT, ABSENT)
    rows = QueryRows(ring, do_slots, stats_slots, bias_ring.slots, ABSENT, no_ring, bias_ring)
    hiding = ABSENT
    if c.HIDES_KEYS:
        hiding = (new_step_tiles(q.dtype, 1, c.BLOCK_N).index(0), ones)
    shared = BackwardShared(keys.slots, values.slots, 0, 0, 0, ABSENT, ds_slots, ABSENT, ABSENT, ds_ring, hiding)
    return Lane(rows, keys, values, new_dq_ring(dq_accum, c), shared)


@gluon.jit
def tile_of_lane(tile_index, lane, c):
    """The number of a lane's work tile among those of all lanes."""
    return tile_index * c.LANES + lane


@gluon.jit
def compute_lane(x, lane, tile_indices, counts, terms, sizes, c, LANE: gl.constexpr):
    """The role of a lane's warpgroup: all products."""
    step = gl.to_tensor(0)
    nth = gl.to_tensor(0)
    tile_index = next_tile_index(0, nth, tile_indices, c)
    while tile_index * c.LANES < work_tile_count(x, sizes, c):
        step = differentiate(
            tile_of_lane(tile_index, LANE, c), nth, step, x, lane.rows, lane.k_ring, lane.v_ring, lane.dq_ring,
            lane.shared, counts, terms, sizes, c,
        )  # fmt: skip
        nth += 1
        tile_index = next_tile_index(tile_index, nth, tile_indices, c)


@gluon.jit
def load_step(x, rows, work_tile, h, m, step, sizes, c):
    """Q, dO, the LSE and delta of one lane and step."""
    BYTES: gl.constexpr = x.q.block_type.nbytes + x.do.block_type.nbytes + 2 * x.stats.block_type.nbytes
    slot = slot_of(rows.ring, step)
    full = rows.ring.full.index(slot)
    mbarrier.wait(rows.ring.empty.index(slot), (use_of(rows.ring, step) & 1) ^ 1)
    mbarrier.expect(full, BYTES)
    at_rows = box_of(0, 0, work_tile.b, h, m * c.BLOCK_M, c)
    at_stats = row_tile(work_tile, h, m, sizes) * (2 * c.BLOCK_M)
    tma_load(x.q, at_rows, full, rows.ring.slots.index(slot))
    tma_load(x.stats, [at_stats], full, rows.stats.index(2 * slot))
    tma_load(x.do, at_rows, full, rows.do.index(slot))
    tma_load(x.stats, [at_stats + c.BLOCK_M], full, rows.stats.index(2 * slot + 1))


@gluon.jit
def load_lanes(x, lanes, tile_indices, counts, terms, sizes, c):
    """The role of one warp: what tiles of queries bring, and the bias."""
    let_next_begin()
    step = gl.to_tensor(0)
    nth = gl.to_tensor(0)
    semaphore = counters_at(counts, sizes, c).tile_count_semaphore
    tile_index = fetch_tile_index(semaphore)
    hand_out_tile_index(tile_indices, nth, tile_index)
    while tile_index * c.LANES < work_tile_count(x, sizes, c):
        first = work_tile_at(tile_of_lane(tile_index, 0, c), x, terms, sizes, c)
        for lane in gl.static_range(c.LANES):
            fetch_keys_of(of_lane(first, lane), nth, x, lanes[lane].k_ring, lanes[lane].v_ring, c)
        # Lanes add to dQ after they have seen what comes behind this. They would wait here for all that they have
        # added before.
        wait_zeroed(tile_index, first, x, counters_at(counts, sizes, c), sizes, c)
        next_index = tile_index
        if c.HIDES_KEYS:  # noqa: SIM102  (decided when it is compiled, the other when it runs)
            if first.end == first.begin:
                next_index = fetch_tile_index(semaphore)
        for g in range(sizes.group):
            for i in range(first.end - first.begin):
                m = first.end - 1 - i
                if (g == sizes.group - 1) & (m == first.begin):  # not before: others may be done sooner
                    next_index = fetch_tile_index(semaphore)
                h = first.hk * sizes.group + g
                bias_ring = lanes[0].rows.bias_ring
                slot = slot_of(bias_ring, step)
                mbarrier.wait(bias_ring.empty.index(slot), (use_of(bias_ring, step) & 1) ^ 1)
                mbarrier.expect(bias_ring.full.index(slot), x.bias.block_type.nbytes)
                at = box_of(0, 0, 0, h // c.BIAS_GROUP, m * c.BLOCK_M, c, first.n0)
                tma_load(x.bias, at, bias_ring.full.index(slot), bias_ring.slots.index(slot))
                for lane in gl.static_range(c.LANES):
                    load_step(x, lanes[lane].rows, of_lane(first, lane), h, m, step, sizes, c)
                step += 1
        tile_index = next_index
        nth += 1
        hand_out_tile_index(tile_indices, nth, tile_index)


@gluon.jit
def finish_and_store(x, lanes, dq, tile_indices, counts, terms, sizes, c):
    """The role of one warp: dQ of heads that have ended, dK and dV of this work tile. dq: a `Strided`."""
    nth = 0
    tile_index = next_tile_index(0, nth, tile_indices, c)
    while tile_index * c.LANES < work_tile_count(x, sizes, c):
        finish_earlier_heads(tile_index, x, dq, counts, terms, sizes, c)
        first = work_tile_at(tile_of_lane(tile_index, 0, c), x, terms, sizes, c)
        for lane in gl.static_range(c.LANES):
            store_keys_of(of_lane(first, lane), nth, x, lanes[lane].dq_ring, lanes[lane].shared, c)
        tma.store_wait(0)  # they have left shared memory
        for lane in gl.static_range(c.LANES):
            of = lanes[lane]
            release(of.k_ring, slot_of(of.k_ring, nth))
            release(of.v_ring, slot_of(of.v_ring, nth))
        # dQ is all there. dK and dV nobody reads before the kernel has ended, so nobody waits until they are.
        count_up(counters_at(counts, sizes, c).done + head_of(first, sizes, c))
        nth += 1
        tile_index = next_tile_index(tile_index, nth, tile_indices, c)


@gluon.constexpr_function
def piece_layout(dtype, columns):
    """Of PIECE_ROWS rows of a tile in shared memory: the swizzle begins anew after so many."""
    return gl.NVMMASharedLayout.get_default_for([PIECE_ROWS.value, columns], dtype)


@gluon.jit
def piece_of(lane, slot, piece, c):
    """The ``piece``-th PIECE_ROWS rows, no constant, of a lane's dS."""
    tile = lane.shared.ds.index(slot)
    LAYOUT: gl.constexpr = piece_layout(tile.dtype, c.BLOCK_N)
    return reinterpret(tile, tile.dtype, [c.BLOCK_M // PIECE_ROWS, PIECE_ROWS, c.BLOCK_N], LAYOUT).index(piece)


@gluon.jit
def add_pieces(
    to, lanes, slot, present, rows, left, inside_cols, stride, L: gl.constexpr, c, FEWER: gl.constexpr
):  # fmt: skip
    """A step of `add_lanes`, with all loads of a piece on their way before one is waited for. FEWER: of the lanes those
    that have a batch element count; rows: of a piece; left: from the step's first query on."""
    for piece in range(c.BLOCK_M // PIECE_ROWS):
        first = piece_of(lanes[0], slot, piece, c).load(L)
        second = piece_of(lanes[1], slot, piece, c).load(L)
        third = widened(piece_of(lanes[2], slot, piece, c).load(L))
        total = widened(first)
        if FEWER:
            total += gl.where(present > 1, widened(second), 0.0)
            total += gl.where(present > 2, third, 0.0)
        else:
            total = total + widened(second) + third
        inside = (rows < left - piece * PIECE_ROWS)[:, None] & inside_cols
        gl.atomic_add(to, total, mask=inside, sem="relaxed")
        to += PIECE_ROWS * stride


@gluon.jit
def add_lanes(x, lanes, dbias, tile_indices, terms, sizes, c):
    """The role of two warps: dS of all lanes, added up in their order, onto the float32 sum of dBias, a `Strided`.

    All lanes wait for it. Its loop is short, in instructions too: those of a step, one after the other, are more than
    the cache of a multiprocessor holds beside the loops of three lanes.
    """
    L: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [2, 1], [1, 0])  # whole sectors of 32 bytes at a time
    step = gl.to_tensor(0)
    nth = 0
    rows = gl.arange(0, PIECE_ROWS, gl.SliceLayout(1, L))
    cols = gl.arange(0, c.BLOCK_N, gl.SliceLayout(0, L))
    tile_index = next_tile_index(0, nth, tile_indices, c)
    while tile_index * c.LANES < work_tile_count(x, sizes, c):
        first = work_tile_at(tile_of_lane(tile_index, 0, c), x, terms, sizes, c)
        present = x.k.shape[0] - first.b  # lanes that have a batch element, if they are so many
        # A row of dBias has room for a multiple of eight elements: said, to add four at a time. Past the last key is 0.
        inside_cols = (cols // 4 < gl.cdiv(sizes.keys - first.n0, 4))[None, :]
        stride = dbias.stride2 // 4 * 4
        for g in range(sizes.group):
            head = (first.hk * sizes.group + g) // c.BIAS_GROUP
            at = dbias.pointer + gl.cast(head, gl.int64) * (dbias.stride1 // 4 * 4) + (first.n0 + cols)[None, :]
            for i in range(first.end - first.begin):
                row0 = (first.end - 1 - i) * c.BLOCK_M
                ring = lanes[0].shared.ds_ring
                slot, use = slot_of(ring, step), use_of(ring, step)
                for lane in gl.static_range(c.LANES):
                    wait_full(lanes[lane].shared.ds_ring, slot, use)
                to = at + (row0 + rows).to(gl.int64)[:, None] * stride
                left = sizes.queries - row0
                if present >= c.LANES:
                    add_pieces(to, lanes, slot, present, rows, left, inside_cols, stride, L, c, False)
                else:
                    add_pieces(to, lanes, slot, present, rows, left, inside_cols, stride, L, c, True)
                warps_barrier()
                for lane in gl.static_range(c.LANES):
                    release(lanes[lane].shared.ds_ring, slot)
                step += 1
        nth += 1
        tile_index = next_tile_index(tile_index, nth, tile_indices, c)


@gluon.jit
def lanes_kernel(
    q, k, v, do, bias, stats, dq_accum, dk, dv, dq, given, bits, pieces, dbias, counts, lists, terms, sizes, c
):
    """As `backward_kernel.backward_kernel`, of which it has the arguments, but for ``dq`` and ``dbias``: each a
    `Strided`, dBias of float32."""
    gl.static_assert(c.LANES == 3, "a lane has a partition of its own")
    gl.static_assert(c.DYNAMIC and c.STAGES == c.DO_STAGES and c.M_SUBTILES == 1 and c.WARPS == 4)
    wait_for_previous()
    x = BackwardOperands(q, k, v, do, bias, stats, dq_accum, dk, dv, ABSENT, given.seed, bits, given.tile_list)
    bias_ring = new_ring(bias, c.STAGES, c.BLOCK_M, c.BLOCK_N, c.LANES)
    ones = ABSENT
    if c.HIDES_KEYS:
        ones = new_step_tiles(q.dtype, 1, c.BLOCK_M).index(0)
        store_ones(ones)
    lane0 = new_lane(q, k, v, do, stats, dq_accum, bias_ring, ones, c)
    lane1 = new_lane(q, k, v, do, stats, dq_accum, bias_ring, ones, c)
    lane2 = new_lane(q, k, v, do, stats, dq_accum, bias_ring, ones, c)
    lanes = (lane0, lane1, lane2)
    tile_indices = TileIndices(new_ring_of_numbers(2, c.LANES + 2))
    FEW: gl.constexpr = c.LOADING_REGISTERS
    MANY: gl.constexpr = c.COMPUTING_REGISTERS
    fence_async_shared()
    gl.warp_specialize(
        [
            (compute_lane, (x, lane0, tile_indices, counts, terms, sizes, c, 0)),
            (compute_lane, (x, lane1, tile_indices, counts, terms, sizes, c, 1)),
            (compute_lane, (x, lane2, tile_indices, counts, terms, sizes, c, 2)),
            (load_lanes, (x, lanes, tile_indices, counts, terms, sizes, c)),
            (finish_and_store, (x, lanes, dq, tile_indices, counts, terms, sizes, c)),
            (add_lanes, (x, lanes, dbias, tile_indices, terms, sizes, c)),
        ],
        [4, 4, 1, 1, 2],
        [MANY, MANY, FEW, FEW, FEW],
    )
