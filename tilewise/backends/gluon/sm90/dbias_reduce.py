"""dBias of a bias that batch elements or heads share: their tiles of dS meet in memory, and spare warps add them up.

The programs of up to eight sharers run side by side: a group. Each stores its tiles of dS, rounded like those that dK
and dQ are made of, or in the dtype of a bias that has another, in a ring of such groups. When a group has ended, idle
warps of a later one add up its tiles in float32, in a fixed order, and write dBias; `add_up_kernel` does so for the
last groups. This moves half the bytes of float32 reduce-adds, needs no sum to be zeroed and cast, and keeps it all out
of the way of the products. A tile that a mask hides from one sharer is not stored by it, and left out of the sum.

A program waits only for programs of a lower number, which the hardware starts first.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from tilewise.backends.gluon.compat import tma_load, warps_barrier
from tilewise.backends.gluon.pipeline import count_up, wait_count
from tilewise.backends.gluon.sm90.backward_scheduler import counters_at, sharers_before, tile_of_mask, work_at

ROWS = gl.constexpr(8)  # of the pieces that are added up at once
COLS = gl.constexpr(64)


class Shares(NamedTuple):
    """Where tiles of dS meet.

    tiles: a descriptor of the ring (slots · sharers, steps, BLOCK_M, BLOCK_N) in boxes [sharers, 1, ROWS, COLS].
    dbias: `Strided`, stride 0 along what shares; float32 sums if more sharers than a group has add to an element.
    states: of the tiles of a mask, see `mask_kernels`.
    """

    tiles: Any
    dbias: Any
    states: Any


@gluon.jit
def shares_of(pieces, dbias, states, c):
    """`Shares`, which are no argument of a kernel: Triton 3.6 takes no descriptor inside a tuple."""
    if not c.MASK:
        states = 0  # of no use
    return Shares(pieces, dbias, states)


@gluon.constexpr_function
def pieces_of_tile(block_m, block_n):
    """How many pieces a tile has."""
    return block_m // ROWS.value * (block_n // COLS.value)


@gluon.jit
def _piece(u, work, sizes, EACH: gl.constexpr, c):
    """``(step of the tile, which of a part's pieces)`` of a part's ``u``-th piece, see `work.step_of`. Query heads of a
    program that share its bias follow each other, as they are added up."""
    if c.GROUP_SHARES:
        rows = work.end - work.begin
        return u % sizes.group * rows + u // sizes.group // EACH, u // sizes.group % EACH
    else:
        return u // EACH, u % EACH


@gluon.jit
def _place_in_tile(j, part, EACH: gl.constexpr, c):
    """``(row, column)`` of a part's ``j``-th piece in its tile."""
    n = part * EACH + j
    return n // (c.BLOCK_N // COLS) * ROWS, n % (c.BLOCK_N // COLS) * COLS


@gluon.jit
def _fetch(shares, u, slots, full, place, work, part, sizes, EACH: gl.constexpr, c):
    SLOTS: gl.constexpr = slots.shape[0]
    step, j = _piece(u, work, sizes, EACH, c)
    row, col = _place_in_tile(j, part, EACH, c)
    slot = u % SLOTS
    barrier = full.index(slot)
    mbarrier.expect(barrier, shares.tiles.block_type.nbytes)
    tma_load(shares.tiles, [place, step, row, col], barrier, slots.index(slot))


@gluon.jit
def _tile_after(u, m, g, work, sizes, EACH: gl.constexpr, c):
    """``(tile of queries, query head)`` of the piece after the ``u``-th. Two warps have little time for each: no
    division where every query head has a bias."""
    if c.GROUP_SHARES:
        return work.end - 1 - (u + 1) // sizes.group // EACH, (u + 1) % sizes.group
    else:
        m = gl.where((u + 1) % EACH == 0, m - 1, m)
        g = gl.where(m < work.begin, g + 1, g)
        return gl.where(m < work.begin, work.end - 1, m), g


@gluon.jit
def stored_by(shares, group, m, g, terms, sizes, c):
    """A bit for each sharer: whether it has stored the tile. If not, the ring still holds what was there before."""
    if c.MASK:
        member = gl.arange(0, c.SHARERS, gl.BlockedLayout([1], [32], [2], [0]))
        work = work_at(group, member, terms, sizes, c)
        tile = tile_of_mask(work.b, work.hk * sizes.group + g, work.n0, sizes, c)
        if c.MASK_ROWS:
            tile = tile * sizes.row_tiles + m
        return gl.sum((gl.load(shares.states + tile) != 0).to(gl.int32) << member, 0)
    else:
        return -1


@gluon.jit
def add_up(shares, slots, full, group, part, PARTS: gl.constexpr, terms, sizes, c):
    """One of PARTS parts of a group's dBias: of each tile the same pieces."""
    SLOTS: gl.constexpr = slots.shape[0]
    EACH: gl.constexpr = pieces_of_tile(c.BLOCK_M, c.BLOCK_N) // PARTS
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [2, 1], [1, 0])
    work = work_at(group, 0, terms, sizes, c)
    place = group % sizes.ring * c.SHARERS
    count = sizes.group * (work.end - work.begin) * EACH
    for u in range(gl.minimum(count, SLOTS)):
        _fetch(shares, u, slots, full, place, work, part, sizes, EACH, c)
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, L))
    cols = gl.arange(0, COLS, gl.SliceLayout(0, L))
    at = shares.dbias.pointer + gl.cast(work.b, gl.int64) * shares.dbias.stride0 + work.n0
    at = at + rows.to(gl.int64)[:, None] * shares.dbias.stride2 + cols[None, :]
    total = gl.zeros([ROWS, COLS], gl.float32, L)
    m, g = work.end - 1, 0
    for u in range(count):
        slot = u % SLOTS
        if c.MASK:
            stored = stored_by(shares, group, m, g, terms, sizes, c)
        mbarrier.wait(full.index(slot), (u // SLOTS) & 1)
        tiles = slots.index(slot).reshape([c.SHARERS * ROWS, COLS])
        for sharer in gl.static_range(c.SHARERS):
            found = tiles.slice(sharer * ROWS, ROWS).load(L).to(gl.float32)
            if c.MASK:
                found = gl.where((stored >> sharer) & 1 != 0, found, 0.0)
            total += found
        fence_async_shared()
        warps_barrier()
        if u + SLOTS < count:
            _fetch(shares, u + SLOTS, slots, full, place, work, part, sizes, EACH, c)
        if not c.GROUP_SHARES or g == sizes.group - 1:
            _, j = _piece(u, work, sizes, EACH, c)
            row, col = _place_in_tile(j, part, EACH, c)
            row += m * c.BLOCK_M
            head = gl.cast((work.hk * sizes.group + g) // c.BIAS_GROUP, gl.int64)
            to = at + (head * shares.dbias.stride1 + gl.cast(row, gl.int64) * shares.dbias.stride2 + col)
            inside = (rows < sizes.queries - row)[:, None] & (cols < sizes.keys - work.n0 - col)[None, :]
            if c.ADDS:
                gl.atomic_add(to, total, mask=inside, sem="relaxed")
            else:
                gl.store(to, total.to(shares.dbias.pointer.dtype.element_ty), mask=inside)
            total = gl.zeros([ROWS, COLS], gl.float32, L)
        m, g = _tile_after(u, m, g, work, sizes, EACH, c)


@gluon.jit
def new_slots(shares, c):
    """Shared memory for pieces on their way in, with a barrier each."""
    BOX: gl.constexpr = shares.tiles.block_type.nbytes
    SLOTS: gl.constexpr = c.SUM_BYTES // BOX
    slots = gl.allocate_shared_memory(shares.tiles.dtype, [SLOTS, c.SHARERS, 1, ROWS, COLS], shares.tiles.layout)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full.index(slot), count=1)
    return slots, full


@gluon.jit
def add_up_earlier(shares, slots, full, counts, terms, sizes, c):
    """The role of two warps: a part of a group that ended before this one began, or nearly."""
    group = gl.program_id(0) // c.SHARERS - sizes.lag
    if group >= 0:
        counters = counters_at(counts, sizes, c)
        wait_count(counters.ended + group, c.SHARERS)
        if c.ORDERED and c.ADDS:
            before = sharers_before(group, sizes, c)
            if before >= 0:
                wait_count(counters.summed + before, c.SHARERS)
        add_up(shares, slots, full, group, gl.program_id(0) % c.SHARERS, c.SHARERS, terms, sizes, c)
        count_up(counters.summed + group)


@gluon.jit
def add_up_kernel(pieces, dbias, counts, states, first, PARTS: gl.constexpr, terms, sizes, c):
    """The groups that no later one has added up."""
    shares = shares_of(pieces, dbias, states, c)
    counters = counters_at(counts, sizes, c)
    slots, full = new_slots(shares, c)
    fence_async_shared()
    warps_barrier()
    group = first + gl.program_id(0) // PARTS
    if c.ORDERED and c.ADDS:
        before = sharers_before(group, sizes, c)
        if before >= first:
            wait_count(counters.summed + before, PARTS)
    add_up(shares, slots, full, group, gl.program_id(0) % PARTS, PARTS, terms, sizes, c)
    if c.ORDERED and c.ADDS:
        count_up(counters.summed + group)
