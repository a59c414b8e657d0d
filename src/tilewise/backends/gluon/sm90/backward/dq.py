"""dQ = dS K: from the products of a key tile to dq_accum (float32), and from there to dQ.

dq_accum keeps each query tile in the order in which threads hold wgmma's result, as FlashAttention-3 does: four
registers of one thread, then four of the next, so that a warp adds 512 contiguous bytes in one instruction. On the way
through shared memory to TMA, stores are 16 bytes without bank conflicts; row-major, 8 bytes with 2-way ones.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma

from tilewise.backends.gluon.compat import async_load, reinterpret, tma_add, tma_store, warps_barrier
from tilewise.backends.gluon.pipeline import (
    ABSENT,
    Pipeline,
    count_stored,
    count_up,
    new_pipeline,
    wait_count,
    wait_for_previous,
    wait_full,
    wait_stored,
    with_barriers,
)
from tilewise.backends.gluon.score import key_tiles
from tilewise.backends.gluon.sm90.backward.m_subtiles import slot_of_keys
from tilewise.backends.gluon.sm90.backward.scheduler import (
    counters_at,
    done_at,
    element_at,
    entry_at,
    first_within_reach,
    head_and_tile,
    head_of,
    row_tile,
    steps_of,
    tile_list_of,
    work_tile_at,
    work_tile_count,
)
from tilewise.backends.gluon.sm90.common.wgmma import accumulator
from tilewise.backends.gluon.varlen import box_of, first_tile_of, listed_tile, sum_of_head

CAST_ROWS = gl.constexpr(8)  # piece of dBias that one warp casts
CAST_COLS = gl.constexpr(128)
DQ_COLS = gl.constexpr(32)  # columns of dq_accum: a row of swizzled shared memory, 128 bytes


class DqPipeline(NamedTuple):
    """`Pipeline` of one slot, if dQ leaves by TMA, and barriers for other stores.

    stored: a barrier for each slot of K and V, on which the computing warps arrive once a work tile, when they have
    stored all that counts. A barrier of the pipeline cannot serve: the warp that waits may be some phases behind."""

    slots: Any
    full: Any
    empty: Any
    stored: Any


@gluon.jit
def new_dq_pipeline(dq, c):
    """Create a `DqPipeline`; ``dq``: see `BackwardOperands`."""
    pipeline = Pipeline(ABSENT, ABSENT, ABSENT)
    if c.DQ_STORED:
        pipeline = new_pipeline(dq, 1, c.BLOCK_M, c.BLOCK_D, 1)
    elif c.DQ_BY_TMA:
        rows: gl.constexpr = c.BLOCK_M * c.BLOCK_D // c.DQ_PARTS // DQ_COLS
        slots = gl.allocate_shared_memory(dq.dtype, [1, rows, DQ_COLS], dq.layout)
        pipeline = with_barriers(slots, 1, 1)
    stored = gl.allocate_shared_memory(gl.int64, [c.KEY_STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(c.KEY_STAGES):
        mbarrier.init(stored.index(slot), count=1)
    return DqPipeline(pipeline.slots, pipeline.full, pipeline.empty, Pipeline(ABSENT, stored, ABSENT))


@gluon.constexpr_function
def in_order(warps):
    """Return the layout of dq_accum: contiguous within a thread, then across threads, then across warps."""
    return gl.BlockedLayout([1, 4], [4, 8], [warps, 1], [1, 0])


@gluon.jit
def as_threads_hold_it(dq, WARPS: gl.constexpr):
    """Reorder a tile [rows, columns] of wgmma to [.., DQ_COLS] in dq_accum's order; no register moves."""
    ROWS: gl.constexpr = dq.shape[0]
    WIDTH: gl.constexpr = dq.shape[1]
    HALVES: gl.constexpr = 16 * WARPS // ROWS  # of the columns, one for each warpgroup
    # 16 rows of a warp, half of them, row; half of the columns, 8 columns, 2 of them, column
    parts = dq.reshape([ROWS // 16, 2, 8, HALVES, WIDTH // (8 * HALVES), 4, 2])
    flat = parts.permute((4, 3, 0, 2, 5, 1, 6)).reshape([ROWS * WIDTH // DQ_COLS, DQ_COLS])
    return gl.convert_layout(flat, in_order(WARPS), assert_trivial=True)


@gluon.jit
def as_rows(flat, ROWS: gl.constexpr, WARPS: gl.constexpr):
    """Invert `as_threads_hold_it`."""
    WIDTH: gl.constexpr = flat.shape[0] * DQ_COLS // ROWS
    HALVES: gl.constexpr = 16 * WARPS // ROWS
    parts = flat.reshape([WIDTH // (8 * HALVES), HALVES, ROWS // 16, 8, 4, 2, 2])
    dq = parts.permute((2, 5, 3, 1, 0, 4, 6)).reshape([ROWS, WIDTH])
    return gl.convert_layout(dq, accumulator(ROWS, WIDTH, WARPS), assert_trivial=True)


@gluon.jit
def places(ROWS: gl.constexpr, WARPS: gl.constexpr):
    """Return the offsets of the elements of a flat tile."""
    IN: gl.constexpr = in_order(WARPS)
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, IN))
    return rows[:, None] * DQ_COLS + gl.arange(0, DQ_COLS, gl.SliceLayout(0, IN))[None, :]


@gluon.jit
def zero_ahead(tile_index, x, dq_accum, counts, sizes, c):
    """Zero a work tile's share of dq_accum of the key/value head that comes `BackwardSizes.zeroed` later.

    Packed batch: of the head of the work tile that comes so much later; that head's work tiles have a share each."""
    UNIT: gl.constexpr = 1024
    IN: gl.constexpr = gl.BlockedLayout([4], [32], [2], [0])
    UNITS: gl.constexpr = c.BLOCK_M * c.BLOCK_D // UNIT
    if not c.ZEROED_BY_TILE:
        head, tile = head_and_tile(tile_index, sizes, c)
        later = head + sizes.zeroed
        if later < sizes.batch * sizes.kv_heads:
            units = sizes.group * sizes.row_tiles * UNITS
            at = dq_accum + gl.cast(later, gl.int64) * units * UNIT + gl.arange(0, UNIT, IN)
            for unit in range(tile, units, sizes.key_tiles):
                gl.store(at + gl.cast(unit, gl.int64) * UNIT, gl.zeros([UNIT], gl.float32, IN))
            count_up(counters_at(counts, sizes, c).zeroed + later)
    else:
        later, count = tile_index + sizes.zeroed, work_tile_count(x, sizes, c)
        if later < count:
            of = sum_of_head(x.tile_list, later, count, sizes.kv_heads, c.BLOCK_M, c.BLOCK_N)
            if of.first >= sizes.zeroed:
                for g in range(sizes.group):
                    tile = (of.hk * sizes.group + g) * sizes.row_tiles + of.place
                    at = dq_accum + gl.cast(tile, gl.int64) * (UNITS * UNIT) + gl.arange(0, UNIT, IN)
                    for unit in range(of.part, of.tiles * UNITS, of.parts):
                        gl.store(at + unit * UNIT, gl.zeros([UNIT], gl.float32, IN))
                count_up(counters_at(counts, sizes, c).zeroed + of.hk * sizes.row_tiles + of.place)


@gluon.jit
def in_rows(strips):
    """Reorder adjacent strips of 16 rows and 8 columns, see `as_rows`, to [16, columns]."""
    parts = strips.reshape([strips.shape[0], 8, 4, 2, 2])  # columns, then row, columns, half of the rows, column
    return parts.permute((3, 1, 0, 2, 4)).reshape([16, 8 * strips.shape[0]])


@gluon.jit
def finish_heads(
    head, HEADS: gl.constexpr, part, parts, dq_accum, dq, batch, dim, ZEROES: gl.constexpr, terms, sizes, c
):
    """Store one of ``parts`` shares of dQ = scale · dq_accum of HEADS key/value heads, by one warp.

    head: the first of these, see `backward.scheduler.head_of`. ZEROES: zero their places for the next heads.
    dq: `Strided` of ``batch`` batch elements; nothing is stored past these."""
    gl.static_assert(16 * c.WARPS == c.BLOCK_M, "a warp has 16 rows, and all of their columns")
    STRIP: gl.constexpr = 128  # contiguous elements of one warp: 16 rows and 8 columns
    IN: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [1, 1], [1, 0])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8])  # one warp of wgmma's result
    STRIPS: gl.constexpr = c.BLOCK_D // 8
    group = head // c.ELEMENTS
    first_place, hk = group // sizes.kv_heads * c.ELEMENTS + head % c.ELEMENTS, group % sizes.kv_heads
    b0 = element_at(first_place, sizes, c)
    if c.BIAS_BATCH > 1:  # no element follows the last of its run
        batch = (first_place // sizes.broadcast_batch + 1) * sizes.run
    nth = gl.arange(0, STRIPS, gl.SliceLayout(1, IN))[:, None]
    within = nth * (c.WARPS * STRIP) + gl.arange(0, STRIP, gl.SliceLayout(0, IN))[None, :]
    row = gl.arange(0, 16, gl.SliceLayout(1, OUT))[:, None]
    col = gl.arange(0, c.BLOCK_D, gl.SliceLayout(0, OUT))[None, :]
    place = head % sizes.zeroed  # heads of a group have adjacent places
    last = sizes.row_tiles * c.WARPS - 1
    # 16 rows of each head at a time, all columns; each thread copies what it reads (cp.async). The warp must finish
    # while a work tile is computed: it has no time to wait for loads, nor registers for loads in flight.
    AHEAD: gl.constexpr = 2  # copies of 16 rows of each head in flight
    gl.static_assert(AHEAD == 2, "slots take turns by two")
    slots = gl.allocate_shared_memory(
        gl.float32, [AHEAD * HEADS, STRIPS, STRIP], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )
    for g in range(sizes.group):
        apart = gl.cast(sizes.group * sizes.row_tiles, gl.int64) * (c.BLOCK_M * c.BLOCK_D)
        for i in gl.static_range(AHEAD):
            at = dq_accum + strips_at(place, g, gl.minimum(part + i * parts, last), STRIPS, sizes, c) * STRIP + within
            for element in gl.static_range(HEADS):
                async_load(slots.index(i * HEADS + element), at + element * apart)
                async_copy.commit_group()
        # Batched calls have rows of a multiple of eight elements: // 8 * 8 lets the compiler store two at a time.
        to = dq.pointer + gl.cast(b0, gl.int64) * (dq.stride0 // 8 * 8)
        to += gl.cast(hk * sizes.group + g, gl.int64) * (dq.stride1 // 8 * 8)
        first_slot = 0
        for rows in range(part, last + 1, parts):
            here = dq_accum + strips_at(place, g, rows, STRIPS, sizes, c) * STRIP + within
            later = gl.minimum(rows + AHEAD * parts, last)
            ahead = dq_accum + strips_at(place, g, later, STRIPS, sizes, c) * STRIP + within
            to_rows = to + (row + rows * 16).to(gl.int64) * (dq.stride2 // 8 * 8) + col
            inside = (row < sizes.queries - rows * 16) & (col // 8 < dim // 8)
            for element in gl.static_range(HEADS):
                slot = slots.index(first_slot + element)
                async_copy.wait_group(AHEAD * HEADS - 1)
                found = slot.load(IN)
                if ZEROES:
                    gl.store(here + element * apart, gl.zeros([STRIPS, STRIP], gl.float32, IN))
                async_load(slot, ahead + element * apart)
                async_copy.commit_group()
                value = in_rows((found * terms.scale).to(dq.pointer.dtype.element_ty))
                value = gl.convert_layout(value, OUT, assert_trivial=True)
                gl.store(to_rows + element * (dq.stride0 // 8 * 8), value, mask=inside & (b0 + element < batch))
            first_slot = AHEAD * HEADS - HEADS - first_slot
        async_copy.wait_group(0)


@gluon.jit
def strips_at(place, g, rows, STRIPS: gl.constexpr, sizes, c):
    """Return the index of the first strip of the ``rows``-th 16 rows of the head at ``place`` in dq_accum."""
    tile = (place * sizes.group + g) * sizes.row_tiles + rows // c.WARPS
    return gl.cast(tile * (STRIPS * c.WARPS) + rows % c.WARPS, gl.int64)


@gluon.jit
def finish_earlier_heads(tile_index, x, dq, counts, terms, sizes, c):
    """Store a share of dQ of the heads of an earlier group that has (nearly) ended, and zero their places.

    For the batched CTA, whose heads take turns in dq_accum: half of its heads are between the two groups, and the other
    half is the time in which to finish. Heads of a group share the counters of the first."""
    head, tile = head_and_tile(tile_index, sizes, c)
    earlier = head * c.ELEMENTS - sizes.zeroed // 2
    if earlier >= 0:
        counters = counters_at(counts, sizes, c)
        wait_count(counters.done + earlier, sizes.key_tiles)
        finish_heads(
            earlier, c.ELEMENTS, tile, sizes.key_tiles, x.dq, dq, x.k.shape[0], x.k.shape[3], True, terms, sizes, c
        )
        if earlier + sizes.zeroed < sizes.batch * sizes.kv_heads:
            count_up(counters.zeroed + earlier + sizes.zeroed)


@gluon.jit
def last_heads_kernel(dq_accum, dq, total, dbias, batch, dim, terms, sizes, c):
    """Store dQ of the heads that `finish_earlier_heads` leaves, and cast dBias.

    One program for each query tile of these heads, then one for each piece. total: dBias in float32, a `Strided`.
    dbias: (1, H, M, N), contiguous."""
    tiles = sizes.group * sizes.row_tiles
    nth = gl.program_id(0) // tiles
    if nth < sizes.zeroed // 2:
        head = sizes.batch * sizes.kv_heads - sizes.zeroed // 2 + nth
        finish_heads(head, 1, gl.program_id(0) % tiles, tiles, dq_accum, dq, batch, dim, False, terms, sizes, c)
    else:
        cast_piece(gl.program_id(0) - sizes.zeroed // 2 * tiles, total, dbias, sizes)


@gluon.jit
def cast_piece(piece, total, dbias, sizes):
    """Cast a piece of dBias, by one warp."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [1, 1], [1, 0])
    across, down = gl.cdiv(sizes.keys, CAST_COLS), gl.cdiv(sizes.queries, CAST_ROWS)
    head, rest = piece // (across * down), piece % (across * down)
    row = rest // across * CAST_ROWS + gl.arange(0, CAST_ROWS, gl.SliceLayout(1, L))
    col = rest % across * CAST_COLS + gl.arange(0, CAST_COLS, gl.SliceLayout(0, L))
    there = (row < sizes.queries)[:, None]
    row = row.to(gl.int64)[:, None]
    # Rows of the sum are padded to a multiple of eight elements: // 4 * 4 lets the compiler load four at a time.
    at = total.pointer + gl.cast(head, gl.int64) * (total.stride1 // 4 * 4)
    at = at + row * (total.stride2 // 4 * 4) + col[None, :]
    found = gl.load(at, mask=there & (col // 4 < gl.cdiv(sizes.keys, 4))[None, :], other=0.0)
    to = dbias + gl.cast(head, gl.int64) * sizes.queries * sizes.keys
    to = to + row * sizes.keys + col[None, :]
    gl.store(to, found.to(dbias.dtype.element_ty), mask=there & (col < sizes.keys)[None, :])


@gluon.jit
def wait_zeroed(tile_index, work_tile, x, counters, sizes, c):
    """Wait until earlier work tiles have zeroed the part of dq_accum that this one adds to."""
    if not c.ZEROED_BY_TILE:
        head = head_of(work_tile, sizes, c)
        if head >= sizes.zeroed:
            wait_count(counters.zeroed + head, sizes.key_tiles)
    else:
        first = tile_index - work_tile.n0 // c.BLOCK_N
        if first >= sizes.zeroed:
            listed = work_tile_count(x, sizes, c) - first  # fewer than it has if lengths are invalid
            tiles = gl.minimum(gl.cdiv(work_tile.seq.keys, c.BLOCK_N), listed)
            wait_count(counters.zeroed + work_tile.hk * sizes.row_tiles + work_tile.first_tile, tiles)


@gluon.constexpr_function
def width_of_part(part, parts, block_d, last):
    """Return the columns of a part of dQ: an equal share, or for the ``last`` part as many."""
    return last if part == parts - 1 else block_d // parts


@gluon.jit
def begin_dq(ds, shared, PART: gl.constexpr, c):
    """Issue a part of the columns of dQ = dS K."""
    FIRST: gl.constexpr = PART * (c.BLOCK_D // c.DQ_PARTS)
    WIDTH: gl.constexpr = width_of_part(PART, c.DQ_PARTS, c.BLOCK_D, c.COLS_OF_DQ)
    k = shared.k.index(slot_of_keys(shared, c)).reshape([c.BLOCK_N, c.BLOCK_D])
    if WIDTH < c.BLOCK_D:
        k = k.slice(FIRST, WIDTH, 1)
    zero = gl.zeros([c.BLOCK_M, WIDTH], gl.float32, accumulator(c.BLOCK_M, WIDTH, c.WARPS))
    return warpgroup_mma(ds, k, zero, use_acc=False, is_async=True)


@gluon.jit
def place_of_part(tile_of_head, part, c):
    """Return the first row of a part of a tile in dq_accum, whose tiles are those of all heads."""
    return (tile_of_head * c.DQ_PARTS + part) * (c.BLOCK_M * c.BLOCK_D // c.DQ_PARTS // DQ_COLS)


@gluon.jit
def dv_tile(x, dq_pipeline, c):
    """Return the shared memory of dQ as a tile of dV."""
    gl.static_assert(c.DQ_BY_TMA and c.DQ_PARTS == 1 and not c.DQ_STORED, "dQ has no memory of the size of dV")
    return reinterpret(dq_pipeline.slots.index(0), x.dv.dtype, x.dv.block_type.shape, x.dv.layout)


@gluon.jit
def uses_of_slot(step, shared, c):
    """Return a number with the parity of the earlier uses of dQ's shared memory.

    dQ uses it in each step and, if dV leaves that way, dV in each work tile, which the slot of K counts."""
    if c.VALUE_STAGES < c.KEY_STAGES:
        gl.static_assert(c.KEY_STAGES == 2, "the slot does not say whether an odd number of work tiles came before")
        return step + shared.slot
    else:
        return step


@gluon.jit
def release_part(dq, x, dq_pipeline, tile_of_head, step, PART: gl.constexpr, terms, c):
    """Move a part of dQ to shared memory, once the previous part has been read, or to dq_accum."""
    if c.DQ_STORED:
        mbarrier.wait(dq_pipeline.empty.index(0), (step & 1) ^ 1)
        dq_pipeline.slots.index(0).reshape([c.BLOCK_M, c.BLOCK_D]).store((dq * terms.scale).to(x.dq.dtype))
    elif c.DQ_BY_TMA:
        flat = as_threads_hold_it(dq, c.WARPS)
        mbarrier.wait(dq_pipeline.empty.index(0), ((step * c.DQ_PARTS + PART) & 1) ^ 1)
        slot = dq_pipeline.slots.index(0)
        WIDTH: gl.constexpr = width_of_part(PART, c.DQ_PARTS, c.BLOCK_D, c.COLS_OF_DQ)
        if c.DQ_PARTS * WIDTH < c.BLOCK_D:
            slot = slot.slice(0, c.BLOCK_M * WIDTH // DQ_COLS, 0)
        slot.store(flat)
    else:
        flat = as_threads_hold_it(dq, c.WARPS)
        part = gl.cast(place_of_part(tile_of_head, PART, c), gl.int64)
        gl.atomic_add(x.dq + part * DQ_COLS + places(flat.shape[0], c.WARPS), flat, sem="relaxed", scope="gpu")


@gluon.jit
def send_part(dq_pipeline, c):
    """Signal the warp that adds the part in shared memory; a fence here would stall all computing warps."""
    if c.DQ_BY_TMA:
        warps_barrier()
        mbarrier.arrive(dq_pipeline.full.index(0), count=1)


@gluon.jit
def signal_stored(dq_pipeline, slot, c):
    """Signal the warp that adds dQ that dK and dV are in a slot, and dS and dQ of this role stored."""
    if c.DBIAS == "reduce":
        wait_stored(0)
    warps_barrier()
    mbarrier.arrive(dq_pipeline.stored.full.index(slot), count=1)


@gluon.jit
def add_part(x, slot, place, PART: gl.constexpr, c):
    """Add a part of dQ to dq_accum by TMA, in boxes of the smallest part."""
    BOX: gl.constexpr = x.dq.block_type.shape[0]
    WIDTH: gl.constexpr = width_of_part(PART, c.DQ_PARTS, c.BLOCK_D, c.COLS_OF_DQ)
    BOXES: gl.constexpr = c.BLOCK_M * WIDTH // DQ_COLS // BOX
    if slot.shape[0] == BOX:
        tma_add(x.dq, [place, 0], slot)
    else:
        for i in gl.static_range(BOXES):
            tma_add(x.dq, [place + i * BOX, 0], slot.slice(i * BOX, BOX, 0))


@gluon.jit
def add_dq(tile_index, step, x, values, dq_pipeline, counts, terms, sizes, c):
    """Add dQ of one work tile to dq_accum by TMA, or store it; return the steps done.

    ORDERED: a query tile is added after the earlier key tiles have added theirs; all programs walk from the last query
    to the first, so that each waits about a step for the one before it.
    With one slot of V beside two of K, V is released here, as dQ of the last step implies that V has been read; without
    any step `backward.warps.add` releases it."""
    begun, before = step, step  # before: the query tile of the previous step
    if c.DQ_BY_TMA:
        work_tile = work_tile_at(tile_index, x, terms, sizes, c)
        if c.VALUE_STAGES < c.KEY_STAGES:
            end = begun + steps_of(x, work_tile, sizes, c)
        counters = counters_at(counts, sizes, c)
        wait_zeroed(tile_index, work_tile, x, counters, sizes, c)
        for g in range(sizes.group):
            h = work_tile.hk * sizes.group + g
            head = row_tile(work_tile, h, 0, sizes)
            tile_list, listed = tile_list_of(x.tile_list, work_tile, h, sizes, c)
            for i in range(tile_list):
                m, _ = entry_at(i, listed, work_tile, c)
                if c.ORDERED:
                    m0 = m * c.BLOCK_M
                    if c.MASK:
                        dq_order = gl.load(listed + sizes.row_tiles + i)
                    else:
                        seq = work_tile.seq
                        lo, hi = terms.lo + seq.diagonal, terms.hi + seq.diagonal
                        count = gl.minimum(c.BLOCK_M, seq.queries - m0)
                        first, _, _, _ = key_tiles(m0, count, seq.keys, lo, hi, c.BLOCK_N)
                        if c.UNDERFLOWS:
                            first = first_within_reach(first, m0, work_tile, x.tile_list, sizes, c)
                        dq_order = work_tile.n0 // c.BLOCK_N - first
                    wait_count(counters.dq_semaphores + head + m, dq_order)
                for part in gl.static_range(c.DQ_PARTS):
                    wait_full(dq_pipeline, 0, step * c.DQ_PARTS + part)
                    if c.VALUE_STAGES < c.KEY_STAGES:
                        mbarrier.arrive(values.empty.index(0), count=1, pred=step + 1 == end)
                    fence_async_shared()  # generic stores before the reads of TMA
                    if c.DQ_STORED:
                        seq = work_tile.seq
                        at = box_of(seq.first_query, seq.queries, work_tile.b, h, m * c.BLOCK_M, c)
                        tma_store(x.dq, at, dq_pipeline.slots.index(0))
                    else:
                        add_part(x, dq_pipeline.slots.index(0), place_of_part(head + m, part, c), part, c)
                    tma.store_wait(0)
                    mbarrier.arrive(dq_pipeline.empty.index(0), count=1)
                if c.DEFERRED_RELEASE:
                    if step > begun:  # the addition of a step ago has ended by now; this one has just begun
                        wait_stored(c.DQ_PARTS)
                        count_up(counters.dq_semaphores + before)
                    before = head + m
                elif c.ORDERED:
                    count_stored(counters.dq_semaphores + head + m)
                step += 1
        if c.DEFERRED_RELEASE and step > begun:
            count_stored(counters.dq_semaphores + before)
    return step


@gluon.jit
def packed_postprocess_kernel(dq_accum, dq, tile_list, dim, scale, sizes, PARTS: gl.constexpr, BLOCK_M: gl.constexpr,
                  BLOCK_D: gl.constexpr, LAST: gl.constexpr):  # fmt: skip
    """Like `postprocess_kernel`, but for a packed batch: one program for each listed tile and head."""
    wait_for_previous()
    n, h = gl.program_id(0) % sizes.row_tiles, gl.program_id(0) // sizes.row_tiles
    if n < gl.load(tile_list):
        seq, tile = listed_tile(tile_list, n)
        pid = h * sizes.row_tiles + first_tile_of(tile_list, n, seq, BLOCK_M) + tile
        to = dq.pointer + gl.cast(h, gl.int64) * dq.stride1 + gl.cast(seq.first_query, gl.int64) * dq.stride2
        store_dq(dq_accum, to, dq, pid, tile * BLOCK_M, seq.queries, dim, scale, PARTS, BLOCK_M, BLOCK_D, LAST)


@gluon.jit
def store_dq(dq_accum, to, dq, pid, row0, queries, dim, scale, PARTS: gl.constexpr, BLOCK_M: gl.constexpr,
             BLOCK_D: gl.constexpr, LAST: gl.constexpr):  # fmt: skip
    """Store the ``pid``-th tile of dq_accum, scaled, as the rows from ``row0`` on of the matrix at ``to``."""
    SHARE: gl.constexpr = BLOCK_D // PARTS
    to += gl.cast(row0, gl.int64) * dq.stride2
    for part in gl.static_range(PARTS):
        accum = dq_accum + (gl.cast(pid, gl.int64) * PARTS + part) * (BLOCK_M * SHARE)
        _store_part(
            accum, to + part * SHARE, dq, queries - row0, dim - part * SHARE, scale, BLOCK_M,
            width_of_part(part, PARTS, BLOCK_D, LAST),
        )  # fmt: skip


@gluon.jit
def _store_part(dq_accum, to, dq, rows_left, cols_left, scale, BLOCK_M: gl.constexpr, WIDTH: gl.constexpr):
    WARPS: gl.constexpr = gl.num_warps()
    OUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [WARPS, 1], [1, 0])
    rows = gl.arange(0, BLOCK_M, gl.SliceLayout(1, OUT))[:, None]
    cols = gl.arange(0, WIDTH, gl.SliceLayout(0, OUT))[None, :]
    found = gl.load(dq_accum + places(BLOCK_M * WIDTH // DQ_COLS, WARPS))
    value = (as_rows(found, BLOCK_M, WARPS) * scale).to(dq.pointer.dtype.element_ty)
    inside = (rows < rows_left) & (cols < cols_left)
    gl.store(to + rows.to(gl.int64) * dq.stride2 + cols, gl.convert_layout(value, OUT), mask=inside)


@gluon.jit
def postprocess_kernel(dq_accum, dq, counts, dim, scale, sizes, PARTS: gl.constexpr, BLOCK_M: gl.constexpr,
                  BLOCK_D: gl.constexpr, LAST: gl.constexpr):  # fmt: skip
    """Store dQ = scale · dq_accum in dQ's dtype, for one query tile, by as many warps as have computed it.

    It may run beside the last programs of the backward, where these leave multiprocessors idle.
    dq: `Strided`. dq_accum: float32 (B·H·tiles · PARTS · rows of a part, DQ_COLS). counts: see
    `backward.scheduler.counters_at`.
    """
    pid = gl.program_id(0)
    heads = sizes.kv_heads * sizes.group
    bh = pid // sizes.row_tiles
    row0 = pid % sizes.row_tiles * BLOCK_M
    to = dq.pointer + gl.cast(bh // heads, gl.int64) * dq.stride0 + gl.cast(bh % heads, gl.int64) * dq.stride1
    wait_count(done_at(counts, sizes) + bh // sizes.group, sizes.key_tiles, PAUSE=500)
    store_dq(dq_accum, to, dq, pid, row0, sizes.queries, dim, scale, PARTS, BLOCK_M, BLOCK_D, LAST)
    if pid == gl.num_programs(0) - 1:  # so that this kernel does not end before the backward
        wait_for_previous()
