"""dQ = dS K in the backward: from the products of a tile of keys to a float32 sum, and from the sum to dQ.

The sum of a tile of queries lies in the order in which threads hold wgmma's result. Four neighbours are four registers
of one thread, the next four are the next thread's: a warp adds 512 neighbouring bytes by one instruction. Where dQ goes
through shared memory and TMA, stores of 16 bytes find each bank once, where rows and columns in their own order are
stored 8 bytes at a time and find it twice. (FlashAttention-3 keeps its sum in such an order too.)
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

CAST_ROWS = gl.constexpr(8)  # of a piece of dBias that one warp casts
CAST_COLS = gl.constexpr(128)
DQ_COLS = gl.constexpr(32)  # the sum is a matrix of so many columns, a row of swizzled shared memory


class DqPipeline(NamedTuple):
    """How dQ leaves: a `Pipeline` of one slot, if it does by TMA. And a barrier for each slot of K and V which says,
    once a work tile, that the program's other warps have stored all that counts; not one of the pipeline's, whose warp
    may be some phases behind."""

    slots: Any
    full: Any
    empty: Any
    stored: Any


@gluon.jit
def new_dq_pipeline(dq, c):
    """``dq``: as of `BackwardOperands`."""
    pipeline = Pipeline(ABSENT, ABSENT, ABSENT)
    if c.DQ_STORED:
        pipeline = new_pipeline(dq, 1, c.BLOCK_M, c.BLOCK_D, 1)
    elif c.DQ_BY_TMA:
        slots = gl.allocate_shared_memory(dq.dtype, [1, dq.block_type.shape[0], dq.block_type.shape[1]], dq.layout)
        pipeline = with_barriers(slots, 1, 1)
    stored = gl.allocate_shared_memory(gl.int64, [c.KEY_STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(c.KEY_STAGES):
        mbarrier.init(stored.index(slot), count=1)
    return DqPipeline(pipeline.slots, pipeline.full, pipeline.empty, Pipeline(ABSENT, stored, ABSENT))


@gluon.constexpr_function
def in_order(warps):
    """The layout in which neighbours are neighbours in a thread, then of threads, then of warps."""
    return gl.BlockedLayout([1, 4], [4, 8], [warps, 1], [1, 0])


@gluon.jit
def as_threads_hold_it(dq, WARPS: gl.constexpr):
    """A tile [rows, columns] in wgmma's layout as [.., DQ_COLS] in the order of the sum; no register moves."""
    ROWS: gl.constexpr = dq.shape[0]
    WIDTH: gl.constexpr = dq.shape[1]
    HALVES: gl.constexpr = 16 * WARPS // ROWS  # of the columns, one for each warpgroup
    # sixteen rows of a warp, half of them, row; half of the columns, eight columns, two of them, column
    parts = dq.reshape([ROWS // 16, 2, 8, HALVES, WIDTH // (8 * HALVES), 4, 2])
    flat = parts.permute((4, 3, 0, 2, 5, 1, 6)).reshape([ROWS * WIDTH // DQ_COLS, DQ_COLS])
    return gl.convert_layout(flat, in_order(WARPS), assert_trivial=True)


@gluon.jit
def as_rows(flat, ROWS: gl.constexpr, WARPS: gl.constexpr):
    """The inverse of `as_threads_hold_it`."""
    WIDTH: gl.constexpr = flat.shape[0] * DQ_COLS // ROWS
    HALVES: gl.constexpr = 16 * WARPS // ROWS
    parts = flat.reshape([WIDTH // (8 * HALVES), HALVES, ROWS // 16, 8, 4, 2, 2])
    dq = parts.permute((2, 5, 3, 1, 0, 4, 6)).reshape([ROWS, WIDTH])
    return gl.convert_layout(dq, accumulator(ROWS, WIDTH, WARPS), assert_trivial=True)


@gluon.jit
def places(ROWS: gl.constexpr, WARPS: gl.constexpr):
    """Where the elements of a flat tile lie."""
    IN: gl.constexpr = in_order(WARPS)
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, IN))
    return rows[:, None] * DQ_COLS + gl.arange(0, DQ_COLS, gl.SliceLayout(0, IN))[None, :]


@gluon.jit
def zero_ahead(tile_index, x, dq_accum, counts, sizes, c):
    """Zero the part of the sum of a key/value head that comes later which a work tile has to zero; of a packed batch
    the head of the work tile that is `BackwardSizes.zeroed` later, of which all work tiles zero a part each."""
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
    """Strips of 16 rows and 8 columns, next to each other, each as the sum has it, see `as_rows`, as [16, columns]."""
    parts = strips.reshape([strips.shape[0], 8, 4, 2, 2])  # columns, then row, columns, half of the rows, column
    return parts.permute((3, 1, 0, 2, 4)).reshape([16, 8 * strips.shape[0]])


@gluon.jit
def finish_heads(
    head, HEADS: gl.constexpr, part, parts, dq_accum, dq, batch, dim, ZEROES: gl.constexpr, terms, sizes, c
):
    """One of some parts of dQ = scale · sum, of HEADS key/value heads from ``head`` on, see
    `backward.scheduler.head_of`, by one warp.

    ZEROES: their places for the heads that have them next. dq: `Strided`; elements past its ``batch`` elements have
    none."""
    gl.static_assert(16 * c.WARPS == c.BLOCK_M, "a warp has 16 rows, and all of their columns")
    STRIP: gl.constexpr = 128  # elements that one warp has next to each other: 16 rows and 8 columns
    IN: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [1, 1], [1, 0])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8])  # what a warp has of wgmma's result
    STRIPS: gl.constexpr = c.BLOCK_D // 8
    group = head // c.ELEMENTS
    b0, hk = group // sizes.kv_heads * c.ELEMENTS + head % c.ELEMENTS, group % sizes.kv_heads
    nth = gl.arange(0, STRIPS, gl.SliceLayout(1, IN))[:, None]
    within = nth * (c.WARPS * STRIP) + gl.arange(0, STRIP, gl.SliceLayout(0, IN))[None, :]
    row = gl.arange(0, 16, gl.SliceLayout(1, OUT))[:, None]
    col = gl.arange(0, c.BLOCK_D, gl.SliceLayout(0, OUT))[None, :]
    place = head % sizes.zeroed  # those of a group have theirs next to each other
    last = sizes.row_tiles * c.WARPS - 1
    # Sixteen rows of each head at a time, all of their columns, which each thread has copied for itself: one warp has
    # all of it to do while a work tile is computed, and no time to wait, nor registers for what is on its way.
    AHEAD: gl.constexpr = 2  # times sixteen rows of each head
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
        # Rows of dQ are of a multiple of eight elements, or there are no elements: said, to store two at a time.
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
    """The first strip of the ``rows``-th sixteen rows of the head that has a place in the sum; as of `tile_of_sum`."""
    tile = (place * sizes.group + g) * sizes.row_tiles + rows // c.WARPS
    return gl.cast(tile * (STRIPS * c.WARPS) + rows % c.WARPS, gl.int64)


@gluon.jit
def finish_earlier_heads(tile_index, x, dq, counts, terms, sizes, c):
    """Where heads take turns in the sum of dQ, as those of elements: a program's part of dQ of the heads of a group
    whose programs have ended, or nearly, and zeros in their places. Half of the pipeline's heads are between the two,
    and half have that time to be finished in. Of the heads of a group, which programs have together, the first has
    counters."""
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
    """After elements: dQ of the heads that no later program has finished, one program for each tile of queries; and
    dBias from its float32 sum ``total``, a `Strided`, one for each piece. dbias: (1, H, M, N), contiguous."""
    tiles = sizes.group * sizes.row_tiles
    nth = gl.program_id(0) // tiles
    if nth < sizes.zeroed // 2:
        head = sizes.batch * sizes.kv_heads - sizes.zeroed // 2 + nth
        finish_heads(head, 1, gl.program_id(0) % tiles, tiles, dq_accum, dq, batch, dim, False, terms, sizes, c)
    else:
        cast_piece(gl.program_id(0) - sizes.zeroed // 2 * tiles, total, dbias, sizes)


@gluon.jit
def cast_piece(piece, total, dbias, sizes):
    """A piece of dBias, by one warp."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [1, 1], [1, 0])
    across, down = gl.cdiv(sizes.keys, CAST_COLS), gl.cdiv(sizes.queries, CAST_ROWS)
    head, rest = piece // (across * down), piece % (across * down)
    row = rest // across * CAST_ROWS + gl.arange(0, CAST_ROWS, gl.SliceLayout(1, L))
    col = rest % across * CAST_COLS + gl.arange(0, CAST_COLS, gl.SliceLayout(0, L))
    there = (row < sizes.queries)[:, None]
    row = row.to(gl.int64)[:, None]
    # A row of the sum has room for a multiple of eight elements: said, to load four at a time.
    at = total.pointer + gl.cast(head, gl.int64) * (total.stride1 // 4 * 4)
    at = at + row * (total.stride2 // 4 * 4) + col[None, :]
    found = gl.load(at, mask=there & (col // 4 < gl.cdiv(sizes.keys, 4))[None, :], other=0.0)
    to = dbias + gl.cast(head, gl.int64) * sizes.queries * sizes.keys
    to = to + row * sizes.keys + col[None, :]
    gl.store(to, found.to(dbias.dtype.element_ty), mask=there & (col < sizes.keys)[None, :])


@gluon.jit
def wait_zeroed(tile_index, work_tile, x, counters, sizes, c):
    """Wait until work tiles of lower numbers have zeroed the sum that this one adds to."""
    if not c.ZEROED_BY_TILE:
        head = head_of(work_tile, sizes, c)
        if head >= sizes.zeroed:
            wait_count(counters.zeroed + head, sizes.key_tiles)
    else:
        first = tile_index - work_tile.n0 // c.BLOCK_N
        if first >= sizes.zeroed:
            listed = work_tile_count(x, sizes, c) - first  # fewer than it has, if lengths are none
            tiles = gl.minimum(gl.cdiv(work_tile.seq.keys, c.BLOCK_N), listed)
            wait_count(counters.zeroed + work_tile.hk * sizes.row_tiles + work_tile.first_tile, tiles)


@gluon.jit
def begin_dq(ds, shared, PART: gl.constexpr, c):
    """Issue a part of the columns of dQ = dS K."""
    WIDTH: gl.constexpr = c.BLOCK_D // c.DQ_PARTS
    k = shared.k.index(slot_of_keys(shared, c)).reshape([c.BLOCK_N, c.BLOCK_D])
    if c.DQ_PARTS > 1:
        k = k.slice(PART * WIDTH, WIDTH, 1)
    zero = gl.zeros([c.BLOCK_M, WIDTH], gl.float32, accumulator(c.BLOCK_M, WIDTH, c.WARPS))
    return warpgroup_mma(ds, k, zero, use_acc=False, is_async=True)


@gluon.jit
def place_of_part(tile_of_head, part, c):
    """The first row of a part of a tile's sum; tiles are counted over all heads and batch elements."""
    return (tile_of_head * c.DQ_PARTS + part) * (c.BLOCK_M * c.BLOCK_D // c.DQ_PARTS // DQ_COLS)


@gluon.jit
def dv_tile(x, dq_pipeline, c):
    """The memory of dQ as a tile of dV."""
    gl.static_assert(c.DQ_BY_TMA and c.DQ_PARTS == 1 and not c.DQ_STORED, "dQ has no memory of the size of dV")
    return reinterpret(dq_pipeline.slots.index(0), x.dv.dtype, x.dv.block_type.shape, x.dv.layout)


@gluon.jit
def uses_of_slot(step, shared, c):
    """A number that is odd when dQ's memory has been used an odd number of times before: by dQ of each step, and where
    it leaves that way by dV of each work tile, which the slot of K counts."""
    if c.VALUE_STAGES < c.KEY_STAGES:
        gl.static_assert(c.KEY_STAGES == 2, "the slot does not say whether an odd number of work tiles came before")
        return step + shared.slot
    else:
        return step


@gluon.jit
def release_part(dq, x, dq_pipeline, tile_of_head, step, PART: gl.constexpr, terms, c):
    """A part of dQ out of its registers: into shared memory, where the part before has been read; or straight onto the
    sum, 512 neighbouring bytes a warp and instruction."""
    if c.DQ_STORED:
        mbarrier.wait(dq_pipeline.empty.index(0), (step & 1) ^ 1)
        dq_pipeline.slots.index(0).reshape([c.BLOCK_M, c.BLOCK_D]).store((dq * terms.scale).to(x.dq.dtype))
    elif c.DQ_BY_TMA:
        flat = as_threads_hold_it(dq, c.WARPS)
        mbarrier.wait(dq_pipeline.empty.index(0), ((step * c.DQ_PARTS + PART) & 1) ^ 1)
        dq_pipeline.slots.index(0).store(flat)
    else:
        flat = as_threads_hold_it(dq, c.WARPS)
        part = gl.cast(place_of_part(tile_of_head, PART, c), gl.int64)
        gl.atomic_add(x.dq + part * DQ_COLS + places(flat.shape[0], c.WARPS), flat, sem="relaxed", scope="gpu")


@gluon.jit
def send_part(dq_pipeline, c):
    """What is in shared memory to the warp that adds it; with the fence here all of these warps would wait for it."""
    if c.DQ_BY_TMA:
        warps_barrier()
        mbarrier.arrive(dq_pipeline.full.index(0), count=1)


@gluon.jit
def signal_stored(dq_pipeline, slot, c):
    """Tell the warp that adds dQ that dK and dV are in a slot of K and V, and dS and dQ stored and added, if not by
    it."""
    if c.DBIAS == "reduce":
        wait_stored(0)
    warps_barrier()
    mbarrier.arrive(dq_pipeline.stored.full.index(slot), count=1)


@gluon.jit
def add_dq(tile_index, step, x, values, dq_pipeline, counts, terms, sizes, c):
    """Add dQ of one work tile to its sum by TMA, or store it; returns the steps done. Where order matters, each tile is
    added when the tiles of keys before have added theirs.

    All programs walk from the last query to the first, so that each waits about a step for the one before it.
    With a single slot of V beside two of K that slot is given back here: who has dQ of the last step has read V. If
    there is no step it is `backward.warps.add` that does it.
    """
    begun, before = step, step  # before: the tile of queries of the step before
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
                    fence_async_shared()  # warps have stored, TMA reads
                    if c.DQ_STORED:
                        seq = work_tile.seq
                        at = box_of(seq.first_query, seq.queries, work_tile.b, h, m * c.BLOCK_M, c)
                        tma_store(x.dq, at, dq_pipeline.slots.index(0))
                    else:
                        tma_add(x.dq, [place_of_part(head + m, part, c), 0], dq_pipeline.slots.index(0))
                    tma.store_wait(0)
                    mbarrier.arrive(dq_pipeline.empty.index(0), count=1)
                if c.DEFERRED_RELEASE:
                    if step > begun:  # what was added a step ago is there by now: no wait for what has just begun
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
                  BLOCK_D: gl.constexpr):  # fmt: skip
    """`postprocess_kernel` of a packed batch, after the backward: one program for each tile of the list and head. They
    are launched while the last programs of the backward run."""
    wait_for_previous()
    n, h = gl.program_id(0) % sizes.row_tiles, gl.program_id(0) // sizes.row_tiles
    if n < gl.load(tile_list):
        seq, tile = listed_tile(tile_list, n)
        pid = h * sizes.row_tiles + first_tile_of(tile_list, n, seq, BLOCK_M) + tile
        to = dq.pointer + gl.cast(h, gl.int64) * dq.stride1 + gl.cast(seq.first_query, gl.int64) * dq.stride2
        store_dq(dq_accum, to, dq, pid, tile * BLOCK_M, seq.queries, dim, scale, PARTS, BLOCK_M, BLOCK_D)


@gluon.jit
def store_dq(dq_accum, to, dq, pid, row0, queries, dim, scale, PARTS: gl.constexpr, BLOCK_M: gl.constexpr,
             BLOCK_D: gl.constexpr):  # fmt: skip
    """The ``pid``-th tile of the sum, scaled, as the rows from ``row0`` on of what begins at ``to``."""
    WARPS: gl.constexpr = gl.num_warps()
    WIDTH: gl.constexpr = BLOCK_D // PARTS
    OUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDTH, WIDTH // 8], [WARPS, 1], [1, 0])
    at = places(BLOCK_M * WIDTH // DQ_COLS, WARPS)
    rows = gl.arange(0, BLOCK_M, gl.SliceLayout(1, OUT))[:, None]
    cols = gl.arange(0, WIDTH, gl.SliceLayout(0, OUT))[None, :]
    to += gl.cast(row0, gl.int64) * dq.stride2
    for part in gl.static_range(PARTS):
        found = gl.load(dq_accum + (gl.cast(pid, gl.int64) * PARTS + part) * (BLOCK_M * WIDTH) + at)
        value = (as_rows(found, BLOCK_M, WARPS) * scale).to(dq.pointer.dtype.element_ty)
        inside = (rows < queries - row0) & (cols < dim - part * WIDTH)
        to_part = to + rows.to(gl.int64) * dq.stride2 + (cols + part * WIDTH)
        gl.store(to_part, gl.convert_layout(value, OUT), mask=inside)


@gluon.jit
def postprocess_kernel(dq_accum, dq, counts, dim, scale, sizes, PARTS: gl.constexpr, BLOCK_M: gl.constexpr,
                  BLOCK_D: gl.constexpr):  # fmt: skip
    """dQ = scale · sum in dQ's dtype, for one tile of queries, by as many warps as have computed it.

    It runs while the last programs of the backward do, where these leave multiprocessors idle.
    dq: `Strided`. dq_accum: float32 (B·H·tiles · PARTS · rows of a part, DQ_COLS). counts: see
    `backward.scheduler.counters_at`.
    """
    pid = gl.program_id(0)
    heads = sizes.kv_heads * sizes.group
    bh = pid // sizes.row_tiles
    row0 = pid % sizes.row_tiles * BLOCK_M
    to = dq.pointer + gl.cast(bh // heads, gl.int64) * dq.stride0 + gl.cast(bh % heads, gl.int64) * dq.stride1
    wait_count(done_at(counts, sizes) + bh // sizes.group, sizes.key_tiles, PAUSE=500)
    store_dq(dq_accum, to, dq, pid, row0, sizes.queries, dim, scale, PARTS, BLOCK_M, BLOCK_D)
    if pid == gl.num_programs(0) - 1:  # so that this kernel has not ended before that one has
        wait_for_previous()
