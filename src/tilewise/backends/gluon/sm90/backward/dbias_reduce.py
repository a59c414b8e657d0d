"""dBias of a bias that batch elements or heads share.

Up to eight programs that share a bias run side by side: a group. If few programs share it (see `config.dbias_sums`),
each adds its dS tiles to dBias by TMA while these are in the L2 cache; persistent programs zero dBias for later groups.
This module is for a bias that many share, and for sums in a fixed order.

Each program stores its dS tiles, rounded as for dK and dQ or in the bias's own dtype, to a buffer in global memory that
holds `BackwardSizes.ds_buffer_groups` groups. When a group has ended, idle warps of a later one sum its tiles in
float32, in a fixed order, and write dBias; `dbias_reduce_kernel` does so for the last groups. This moves half the bytes
of float32 reduce-adds, needs no sum to be zeroed and cast, and stays out of the way of the products. A program does not
store tiles that a mask hides from it; `group_list_kernel` lists the stored ones, and only these are loaded.

A program waits only for programs of a lower number, which the hardware starts first.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from tilewise.backends.gluon.compat import tma_load, warps_barrier
from tilewise.backends.gluon.pipeline import ABSENT, count_up, wait_count
from tilewise.backends.gluon.sm90.backward.scheduler import (
    bias_of_tile,
    counters_at,
    group_before,
    groups,
    step_of,
    tile_of_mask,
    work_tile_of,
)

ROWS = gl.constexpr(8)  # piece of a dS tile that is summed at once
COLS = gl.constexpr(64)
LISTED = gl.constexpr(128)  # query tiles that are examined at once


class DbiasTiles(NamedTuple):
    """dS buffer, and dBias made from it.

    tiles: descriptor of (ds_buffer_groups · programs of a group, steps, BLOCK_M, BLOCK_N), in boxes [programs, 1, ROWS,
    COLS]. dbias: `Strided`, stride 0 along broadcast dims; float32 sums with ADDS. lists: of `group_list_kernel`;
    ABSENT without a mask."""

    tiles: Any
    dbias: Any
    lists: Any


@gluon.constexpr_function
def leaves_as_tiles(way):
    """True if dS leaves from its tile in shared memory; ``way``: `BackwardConstants.DBIAS`."""
    return way in ("store", "accumulate", "reduce")


@gluon.jit
def dbias_tiles_of(pieces, dbias, lists, c):
    """Return `DbiasTiles`. Triton 3.6: a kernel argument cannot be a tuple with a descriptor."""
    if not c.MASK:
        lists = ABSENT
    return DbiasTiles(pieces, dbias, lists)


@gluon.jit
def group_list_kernel(states, lists, terms, sizes, c):
    """List the dS tiles that one group of programs stores, in the order in which they are summed.

    states: of the tiles of a mask, see `mask_kernels`. lists: (groups, 1 + query heads of a key/value head · query
    tiles) int32: the count, then for each tile its step · 256 and a bit for each of up to eight programs that stores
    it. If query heads of a program share its bias, all are listed if one is stored, since they are one sum.
    """
    L: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    group = gl.program_id(0)
    work_tile = work_tile_of(group, 0, terms, sizes, c)
    at = list_of_group(lists, group, sizes)
    total = 0
    if c.GROUP_BROADCASTS:
        for n in range(0, work_tile.end - work_tile.begin, LISTED):
            m = work_tile.end - 1 - n - gl.arange(0, LISTED, L)
            some = gl.zeros([LISTED], gl.int32, L)
            for g in range(sizes.group):
                some |= _stored_by(states, group, m, g, work_tile.begin, terms, sizes, c)
            listed = (some != 0).to(gl.int32)
            place = total + (gl.associative_scan(listed, 0, _plus) - 1) * sizes.group
            for g in range(sizes.group):
                stored = _stored_by(states, group, m, g, work_tile.begin, terms, sizes, c)
                gl.store(at + 1 + place + g, step_of(m, g, work_tile) * 256 + stored, mask=listed != 0)
            total += gl.sum(listed, 0) * sizes.group
    else:
        for g in range(sizes.group):
            for n in range(0, work_tile.end - work_tile.begin, LISTED):
                m = work_tile.end - 1 - n - gl.arange(0, LISTED, L)
                stored = _stored_by(states, group, m, g, work_tile.begin, terms, sizes, c)
                listed = (stored != 0).to(gl.int32)
                place = total + gl.associative_scan(listed, 0, _plus) - 1
                gl.store(at + 1 + place, step_of(m, g, work_tile) * 256 + stored, mask=listed != 0)
                total += gl.sum(listed, 0)
    gl.store(at, total)


@gluon.jit
def _plus(x, y):
    return x + y


@gluon.jit
def _stored_by(states, group, m, g, begin, terms, sizes, c):
    """Return bits of the programs that store query tiles ``m`` of head ``g``; none before ``begin``."""
    stored = m * 0
    for member in gl.static_range(c.GROUP_PROGRAMS):
        work_tile = work_tile_of(group, member, terms, sizes, c)
        tile = tile_of_mask(work_tile.b, work_tile.hk * sizes.group + g, work_tile.n0, sizes, c)
        at = states + (gl.cast(tile, gl.int64) * sizes.row_tiles + m if c.MASK_ROWS else tile + m * 0)
        stored |= (gl.load(at, mask=m >= begin, other=0) != 0).to(gl.int32) << member
    return stored


@gluon.jit
def list_of_group(lists, group, sizes):
    """Return the pointer to a group's list."""
    return lists + gl.cast(group, gl.int64) * (1 + sizes.group * sizes.row_tiles)


@gluon.constexpr_function
def pieces_of_tile(block_m, block_n):
    """Return the number of pieces of a tile."""
    return block_m // ROWS.value * (block_n // COLS.value)


@gluon.jit
def _piece(u, work_tile, listed, sizes, EACH: gl.constexpr, c):
    """Return (step of its tile, index in the tile, bits of the programs that stored it) of a part's piece.

    Query heads of a program that share its bias follow each other, as they are summed. step: see `step_of`."""
    if c.GROUP_BROADCASTS:
        g, row, j = u % sizes.group, u // sizes.group // EACH, u // sizes.group % EACH
    else:
        g, row, j = 0, u // EACH, u % EACH
    if c.MASK:
        entry = gl.load(listed + (row * sizes.group + g if c.GROUP_BROADCASTS else row))
        return entry >> 8, j, entry & 255
    else:
        return g * (work_tile.end - work_tile.begin) + row, j, -1


@gluon.jit
def _place_in_tile(j, part, EACH: gl.constexpr, c):
    """Return ``(row, column)`` of a part's ``j``-th piece in its tile."""
    n = part * EACH + j
    return n // (c.BLOCK_N // COLS) * ROWS, n % (c.BLOCK_N // COLS) * COLS


@gluon.jit
def _fetch(dbias_tiles, u, slots, full, place, work_tile, listed, part, sizes, EACH: gl.constexpr, c):
    SLOTS: gl.constexpr = slots.shape[0]
    step, j, _ = _piece(u, work_tile, listed, sizes, EACH, c)
    row, col = _place_in_tile(j, part, EACH, c)
    slot = u % SLOTS
    barrier = full.index(slot)
    mbarrier.expect(barrier, dbias_tiles.tiles.block_type.nbytes)
    tma_load(dbias_tiles.tiles, [place, step, row, col], barrier, slots.index(slot))


@gluon.jit
def _tile_after(u, m, g, work_tile, sizes, EACH: gl.constexpr, c):
    """Return ``(query tile, query head)`` of the next piece; divide only if query heads share a bias."""
    if c.GROUP_BROADCASTS:
        return work_tile.end - 1 - (u + 1) // sizes.group // EACH, (u + 1) % sizes.group
    else:
        m = gl.where((u + 1) % EACH == 0, m - 1, m)
        g = gl.where(m < work_tile.begin, g + 1, g)
        return gl.where(m < work_tile.begin, work_tile.end - 1, m), g


@gluon.jit
def _tile_of_step(step, work_tile, sizes, c):
    """Invert `step_of`: return ``(query tile, query head)``, the last of the heads that share a bias."""
    rows = work_tile.end - work_tile.begin
    g = sizes.group - 1
    if not c.GROUP_BROADCASTS:
        g = 0
        for before in range(1, sizes.group):  # a division needs too many registers
            g += (step >= before * rows).to(gl.int32)
    return work_tile.end - 1 - (step - g * rows), g


@gluon.jit
def reduce_group(dbias_tiles, slots, full, group, part, PARTS: gl.constexpr, terms, sizes, c):
    """Reduce one of PARTS parts of a group's dBias: the same pieces of each tile."""
    SLOTS: gl.constexpr = slots.shape[0]
    EACH: gl.constexpr = pieces_of_tile(c.BLOCK_M, c.BLOCK_N) // PARTS
    # float32 sums: 16 contiguous bytes a thread, so that a warp's instruction adds to full sectors of 32 bytes.
    WIDTH: gl.constexpr = 4 if c.ADDS else 8
    L: gl.constexpr = gl.BlockedLayout([8 // WIDTH, WIDTH], [32 * WIDTH // COLS, COLS // WIDTH], [2, 1], [1, 0])
    work_tile = work_tile_of(group, 0, terms, sizes, c)
    place = group % sizes.ds_buffer_groups * c.GROUP_PROGRAMS
    if c.MASK:
        listed = list_of_group(dbias_tiles.lists, group, sizes)
        count = gl.load(listed) * EACH
        listed += 1
    else:
        listed = ABSENT
        count = sizes.group * (work_tile.end - work_tile.begin) * EACH
    for u in range(gl.minimum(count, SLOTS)):
        _fetch(dbias_tiles, u, slots, full, place, work_tile, listed, part, sizes, EACH, c)
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, L))
    cols = gl.arange(0, COLS, gl.SliceLayout(0, L))
    b = bias_of_tile(work_tile, sizes, c) if c.BIAS_BATCH > 1 else work_tile.b
    at = dbias_tiles.dbias.pointer + gl.cast(b, gl.int64) * dbias_tiles.dbias.stride0 + work_tile.n0
    total = gl.zeros([ROWS, COLS], gl.float32, L)
    m, g = work_tile.end - 1, 0
    for u in range(count):
        slot = u % SLOTS
        step, j, stored = _piece(u, work_tile, listed, sizes, EACH, c)
        mbarrier.wait(full.index(slot), (u // SLOTS) & 1)
        tiles = slots.index(slot).reshape([c.GROUP_PROGRAMS * ROWS, COLS])
        for member in gl.static_range(c.GROUP_PROGRAMS):
            found = tiles.slice(member * ROWS, ROWS).load(L).to(gl.float32)
            if c.MASK:
                found = gl.where((stored >> member) & 1 != 0, found, 0.0)
            total += found
        fence_async_shared()
        warps_barrier()
        if u + SLOTS < count:
            _fetch(dbias_tiles, u + SLOTS, slots, full, place, work_tile, listed, part, sizes, EACH, c)
        if not c.GROUP_BROADCASTS or u % sizes.group == sizes.group - 1:
            if c.MASK:
                m, g = _tile_of_step(step, work_tile, sizes, c)
            row, col = _place_in_tile(j, part, EACH, c)
            row += m * c.BLOCK_M
            head = gl.cast((work_tile.hk * sizes.group + g) // c.BIAS_GROUP, gl.int64)
            to = at + head * dbias_tiles.dbias.stride1 + col
            to = to + (row + rows).to(gl.int64)[:, None] * dbias_tiles.dbias.stride2 + cols[None, :]
            inside = (rows < sizes.queries - row)[:, None] & (cols < sizes.keys - work_tile.n0 - col)[None, :]
            if c.ADDS:  # rows of dBias are supported in multiples of 16 bytes only: four are added at a time
                inside = gl.max_constancy(inside, [1, WIDTH])
                gl.atomic_add(gl.multiple_of(to, [1, 16]), total, mask=inside, sem="relaxed")
            else:
                gl.store(to, total.to(dbias_tiles.dbias.pointer.dtype.element_ty), mask=inside)
            total = gl.zeros([ROWS, COLS], gl.float32, L)
        if not c.MASK:
            m, g = _tile_after(u, m, g, work_tile, sizes, EACH, c)


@gluon.jit
def zero_later_group(dbias, tile_index, counts, terms, sizes, c):
    """Zero one of c.GROUP_PROGRAMS parts of dBias, a `Strided`, of the group ``lag`` later, by two warps."""
    WIDTH: gl.constexpr = 128 // dbias.pointer.dtype.element_ty.primitive_bitwidth
    STEP: gl.constexpr = 64 * WIDTH // c.BLOCK_N  # rows
    L: gl.constexpr = gl.BlockedLayout([1, WIDTH], [32 * WIDTH // c.BLOCK_N, c.BLOCK_N // WIDTH], [2, 1], [1, 0])
    group = tile_index // c.GROUP_PROGRAMS + sizes.lag
    if group < groups(sizes, c):
        work_tile = work_tile_of(group, 0, terms, sizes, c)
        rows = gl.arange(0, STEP, gl.SliceLayout(1, L))
        cols = gl.arange(0, c.BLOCK_N, gl.SliceLayout(0, L))
        at = dbias.pointer + gl.cast(bias_of_tile(work_tile, sizes, c), gl.int64) * dbias.stride0
        at += work_tile.n0
        inside = gl.max_constancy((cols < sizes.keys - work_tile.n0)[None, :] & (rows >= 0)[:, None], [1, WIDTH])
        for g in range(1 if c.GROUP_BROADCASTS else sizes.group):
            head = gl.cast((work_tile.hk * sizes.group + g) // c.BIAS_GROUP, gl.int64)
            for row in range(tile_index % c.GROUP_PROGRAMS * STEP, sizes.queries, c.GROUP_PROGRAMS * STEP):
                to = at + head * dbias.stride1 + (row + rows).to(gl.int64)[:, None] * dbias.stride2 + cols[None, :]
                there = inside & (rows < sizes.queries - row)[:, None]
                zeros = gl.zeros([STEP, c.BLOCK_N], dbias.pointer.dtype.element_ty, L)
                gl.store(gl.multiple_of(to, [1, 16]), zeros, mask=gl.max_constancy(there, [1, WIDTH]))
        count_up(counters_at(counts, sizes, c).dbias_zeroed + group)


@gluon.jit
def wait_dbias_zeroed(tile_index, counters, sizes, c):
    """Wait until the dBias that a work tile adds to is zeroed; that of the first groups is from the start."""
    group = tile_index // c.GROUP_PROGRAMS
    if group >= sizes.lag:
        wait_count(counters.dbias_zeroed + group, c.GROUP_PROGRAMS)


@gluon.jit
def new_slots(dbias_tiles, c):
    """Allocate shared memory for pieces in flight, with a barrier each."""
    BOX: gl.constexpr = dbias_tiles.tiles.block_type.nbytes
    SLOTS: gl.constexpr = c.SUM_BYTES // BOX
    slots = gl.allocate_shared_memory(
        dbias_tiles.tiles.dtype, [SLOTS, c.GROUP_PROGRAMS, 1, ROWS, COLS], dbias_tiles.tiles.layout
    )
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full.index(slot), count=1)
    return slots, full


@gluon.jit
def reduce_earlier_group(dbias_tiles, slots, full, counts, terms, sizes, c):
    """Reduce a part of a group that has (nearly) ended: the role of two warps."""
    group = gl.program_id(0) // c.GROUP_PROGRAMS - sizes.lag
    if group >= 0:
        counters = counters_at(counts, sizes, c)
        wait_count(counters.ended + group, c.GROUP_PROGRAMS)
        if c.ORDERED and c.ADDS:
            before = group_before(group, sizes, c)
            if before >= 0:
                wait_count(counters.summed + before, c.GROUP_PROGRAMS)
        reduce_group(
            dbias_tiles, slots, full, group, gl.program_id(0) % c.GROUP_PROGRAMS, c.GROUP_PROGRAMS, terms, sizes, c
        )
        count_up(counters.summed + group)


@gluon.jit
def dbias_reduce_kernel(pieces, dbias, counts, lists, first, PARTS: gl.constexpr, terms, sizes, c):
    """Reduce the last groups, which no later one reduces."""
    dbias_tiles = dbias_tiles_of(pieces, dbias, lists, c)
    counters = counters_at(counts, sizes, c)
    slots, full = new_slots(dbias_tiles, c)
    fence_async_shared()
    warps_barrier()
    group = first + gl.program_id(0) // PARTS
    if c.ORDERED and c.ADDS:
        before = group_before(group, sizes, c)
        if before >= first:
            wait_count(counters.summed + before, PARTS)
    reduce_group(dbias_tiles, slots, full, group, gl.program_id(0) % PARTS, PARTS, terms, sizes, c)
    if c.ORDERED and c.ADDS:
        count_up(counters.summed + group)
