"""dBias of a bias that batch elements or heads share: their tiles of dS meet in memory, and spare warps add them up.

The programs of up to eight that share a bias run side by side: a group. Each stores its tiles of dS, rounded like those
that dK and dQ are made of, or in the dtype of a bias that has another, in a ring of such groups. When a group has
ended, idle warps of a later one add up its tiles in float32, in a fixed order, and write dBias; `dbias_reduce_kernel`
does so for the last groups. This moves half the bytes of float32 reduce-adds, needs no sum to be zeroed and cast, and
keeps it all out of the way of the products. A tile that a mask hides from one of them is not stored by it, and left out
of the sum.

A program waits only for programs of a lower number, which the hardware starts first.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from tilewise.backends.gluon.compat import tma_load, warps_barrier
from tilewise.backends.gluon.pipeline import ABSENT, count_up, wait_count
from tilewise.backends.gluon.sm90.backward_scheduler import counters_at, group_before, tile_of_mask, work_tile_of

ROWS = gl.constexpr(8)  # of the pieces that are added up at once
COLS = gl.constexpr(64)


class DbiasTiles(NamedTuple):
    """Where tiles of dS meet.

    tiles: a descriptor of the ring (slots · programs of a group, steps, BLOCK_M, BLOCK_N) in boxes [these, 1, ROWS,
    COLS].
    dbias: `Strided`, stride 0 along what broadcasts; float32 sums if more programs than a group has add to an element.
    states: of the tiles of a mask, see `mask_kernels`.
    """

    tiles: Any
    dbias: Any
    states: Any


@gluon.jit
def dbias_tiles_of(pieces, dbias, states, c):
    """`DbiasTiles`, which are no argument of a kernel: Triton 3.6 takes no descriptor inside a tuple."""
    if not c.MASK:
        states = ABSENT
    return DbiasTiles(pieces, dbias, states)


@gluon.constexpr_function
def pieces_of_tile(block_m, block_n):
    """How many pieces a tile has."""
    return block_m // ROWS.value * (block_n // COLS.value)


@gluon.jit
def _piece(u, work_tile, sizes, EACH: gl.constexpr, c):
    """``(step of the tile, which of a part's pieces)`` of a part's ``u``-th piece, see `backward_scheduler.step_of`.
    Query heads of a program that share its bias follow each other, as they are added up."""
    if c.GROUP_BROADCASTS:
        rows = work_tile.end - work_tile.begin
        return u % sizes.group * rows + u // sizes.group // EACH, u // sizes.group % EACH
    else:
        return u // EACH, u % EACH


@gluon.jit
def _place_in_tile(j, part, EACH: gl.constexpr, c):
    """``(row, column)`` of a part's ``j``-th piece in its tile."""
    n = part * EACH + j
    return n // (c.BLOCK_N // COLS) * ROWS, n % (c.BLOCK_N // COLS) * COLS


@gluon.jit
def _fetch(dbias_tiles, u, slots, full, place, work_tile, part, sizes, EACH: gl.constexpr, c):
    SLOTS: gl.constexpr = slots.shape[0]
    step, j = _piece(u, work_tile, sizes, EACH, c)
    row, col = _place_in_tile(j, part, EACH, c)
    slot = u % SLOTS
    barrier = full.index(slot)
    mbarrier.expect(barrier, dbias_tiles.tiles.block_type.nbytes)
    tma_load(dbias_tiles.tiles, [place, step, row, col], barrier, slots.index(slot))


@gluon.jit
def _tile_after(u, m, g, work_tile, sizes, EACH: gl.constexpr, c):
    """``(tile of queries, query head)`` of the piece after the ``u``-th. Two warps have little time for each: no
    division where every query head has a bias."""
    if c.GROUP_BROADCASTS:
        return work_tile.end - 1 - (u + 1) // sizes.group // EACH, (u + 1) % sizes.group
    else:
        m = gl.where((u + 1) % EACH == 0, m - 1, m)
        g = gl.where(m < work_tile.begin, g + 1, g)
        return gl.where(m < work_tile.begin, work_tile.end - 1, m), g


@gluon.jit
def stored_by(dbias_tiles, group, m, g, terms, sizes, c):
    """A bit for each program of a group: whether it has stored the tile. If not, the ring still holds what was there
    before."""
    if c.MASK:
        member = gl.arange(0, c.GROUP_PROGRAMS, gl.BlockedLayout([1], [32], [2], [0]))
        work_tile = work_tile_of(group, member, terms, sizes, c)
        tile = tile_of_mask(work_tile.b, work_tile.hk * sizes.group + g, work_tile.n0, sizes, c)
        if c.MASK_ROWS:
            tile = tile * sizes.row_tiles + m
        return gl.sum((gl.load(dbias_tiles.states + tile) != 0).to(gl.int32) << member, 0)
    else:
        return -1


@gluon.jit
def reduce_group(dbias_tiles, slots, full, group, part, PARTS: gl.constexpr, terms, sizes, c):
    """One of PARTS parts of a group's dBias: of each tile the same pieces."""
    SLOTS: gl.constexpr = slots.shape[0]
    EACH: gl.constexpr = pieces_of_tile(c.BLOCK_M, c.BLOCK_N) // PARTS
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [2, 1], [1, 0])
    work_tile = work_tile_of(group, 0, terms, sizes, c)
    place = group % sizes.ring * c.GROUP_PROGRAMS
    count = sizes.group * (work_tile.end - work_tile.begin) * EACH
    for u in range(gl.minimum(count, SLOTS)):
        _fetch(dbias_tiles, u, slots, full, place, work_tile, part, sizes, EACH, c)
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, L))
    cols = gl.arange(0, COLS, gl.SliceLayout(0, L))
    at = dbias_tiles.dbias.pointer + gl.cast(work_tile.b, gl.int64) * dbias_tiles.dbias.stride0 + work_tile.n0
    at = at + rows.to(gl.int64)[:, None] * dbias_tiles.dbias.stride2 + cols[None, :]
    total = gl.zeros([ROWS, COLS], gl.float32, L)
    m, g = work_tile.end - 1, 0
    for u in range(count):
        slot = u % SLOTS
        if c.MASK:
            stored = stored_by(dbias_tiles, group, m, g, terms, sizes, c)
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
            _fetch(dbias_tiles, u + SLOTS, slots, full, place, work_tile, part, sizes, EACH, c)
        if not c.GROUP_BROADCASTS or g == sizes.group - 1:
            _, j = _piece(u, work_tile, sizes, EACH, c)
            row, col = _place_in_tile(j, part, EACH, c)
            row += m * c.BLOCK_M
            head = gl.cast((work_tile.hk * sizes.group + g) // c.BIAS_GROUP, gl.int64)
            to = at + (head * dbias_tiles.dbias.stride1 + gl.cast(row, gl.int64) * dbias_tiles.dbias.stride2 + col)
            inside = (rows < sizes.queries - row)[:, None] & (cols < sizes.keys - work_tile.n0 - col)[None, :]
            if c.ADDS:
                gl.atomic_add(to, total, mask=inside, sem="relaxed")
            else:
                gl.store(to, total.to(dbias_tiles.dbias.pointer.dtype.element_ty), mask=inside)
            total = gl.zeros([ROWS, COLS], gl.float32, L)
        m, g = _tile_after(u, m, g, work_tile, sizes, EACH, c)


@gluon.jit
def new_slots(dbias_tiles, c):
    """Shared memory for pieces on their way in, with a barrier each."""
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
    """The role of two warps: a part of a group that ended before this one began, or nearly."""
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
def dbias_reduce_kernel(pieces, dbias, counts, states, first, PARTS: gl.constexpr, terms, sizes, c):
    """The groups that no later one has added up."""
    dbias_tiles = dbias_tiles_of(pieces, dbias, states, c)
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
