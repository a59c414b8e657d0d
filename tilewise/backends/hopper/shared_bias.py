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

from tilewise.backends.hopper.pipeline import count_up, tma_load, wait_count, warps_barrier
from tilewise.backends.hopper.work import groups, sharers_before, tile_of_mask, work_at

ROWS = gl.constexpr(8)  # of the pieces that are added up at once
COLS = gl.constexpr(64)


class Shares(NamedTuple):
    """Where tiles of dS meet.

    tiles: a descriptor of the ring (slots · sharers, steps, BLOCK_M, BLOCK_N) in boxes [sharers, 1, ROWS, COLS].
    dbias: `Strided`, stride 0 along what shares; float32 sums if more sharers than a group has add to an element.
    ended, summed: int32, of each group how many of its programs have stored their dS, and have been added up.
    states: of the tiles of a mask, see `mask_kernels`.
    """

    tiles: Any
    dbias: Any
    ended: Any
    summed: Any
    states: Any


@gluon.jit
def shares_of(pieces, dbias, counts, states, sizes, c):
    """`Shares`, which are no argument of a kernel: Triton 3.6 takes no descriptor inside a tuple."""
    if not c.MASK:
        states = counts  # of no use
    return Shares(pieces, dbias, counts, counts + groups(sizes, c), states)


@gluon.jit
def _piece(u, work, part, parts, sizes, c):
    """``(tile of queries, head within the key/value head, row, column, step)`` of load ``u`` of a part."""
    inner = 1 if c.BIAS_GROUP == 1 else sizes.group  # each query head of a program has a bias, or they share it
    piece = part + u // inner * parts
    PER_TILE: gl.constexpr = (c.BLOCK_M // ROWS) * (c.BLOCK_N // COLS)
    tile = piece // PER_TILE
    place = piece % PER_TILE
    m = work.begin + tile % (work.end - work.begin)
    g = tile // (work.end - work.begin) + u % inner
    row = place // (c.BLOCK_N // COLS) * ROWS
    col = place % (c.BLOCK_N // COLS) * COLS
    return m, g, row, col, g * sizes.row_tiles + m


@gluon.jit
def _fetch(shares, u, slots, full, group, work, part, parts, sizes, c):
    SLOTS: gl.constexpr = slots.shape[0]
    _, _, row, col, step = _piece(u, work, part, parts, sizes, c)
    barrier = full.index(u % SLOTS)
    mbarrier.expect(barrier, shares.tiles.block_type.nbytes)
    tma_load(shares.tiles, [group % sizes.ring * c.SHARERS, step, row, col], barrier, slots.index(u % SLOTS))


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
def add_up(shares, slots, full, group, part, parts, terms, sizes, c):
    """One of ``parts`` parts of a group's dBias."""
    SLOTS: gl.constexpr = slots.shape[0]
    L: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [2, 1], [1, 0])
    work = work_at(group, 0, terms, sizes, c)
    if c.BIAS_GROUP == 1:
        inner, outer = 1, sizes.group
    else:
        inner, outer = sizes.group, 1
    pieces = outer * (work.end - work.begin) * ((c.BLOCK_M // ROWS) * (c.BLOCK_N // COLS))
    count = gl.maximum(pieces - part + parts - 1, 0) // parts * inner
    for u in range(gl.minimum(count, SLOTS)):
        _fetch(shares, u, slots, full, group, work, part, parts, sizes, c)
    total = gl.zeros([ROWS, COLS], gl.float32, L)
    for u in range(count):
        slot = u % SLOTS
        if c.MASK:
            m, g, _, _, _ = _piece(u, work, part, parts, sizes, c)
            stored = stored_by(shares, group, m, g, terms, sizes, c)
        mbarrier.wait(full.index(slot), (u // SLOTS) & 1)
        tiles = slots.index(slot).reshape([c.SHARERS * ROWS, COLS])
        for sharer in gl.static_range(c.SHARERS):
            piece = tiles.slice(sharer * ROWS, ROWS).load(L).to(gl.float32)
            if c.MASK:
                piece = gl.where((stored >> sharer) & 1 != 0, piece, 0.0)
            total += piece
        fence_async_shared()
        warps_barrier()
        if u + SLOTS < count:
            _fetch(shares, u + SLOTS, slots, full, group, work, part, parts, sizes, c)
        if u % inner == inner - 1:
            m, g, row, col, _ = _piece(u, work, part, parts, sizes, c)
            rows = m * c.BLOCK_M + row + gl.arange(0, ROWS, gl.SliceLayout(1, L))
            cols = work.n0 + col + gl.arange(0, COLS, gl.SliceLayout(0, L))
            head = (work.hk * sizes.group + g) // c.BIAS_GROUP
            at = shares.dbias.pointer + gl.cast(work.b, gl.int64) * shares.dbias.stride0
            at += gl.cast(head, gl.int64) * shares.dbias.stride1
            at = at + rows.to(gl.int64)[:, None] * shares.dbias.stride2 + cols[None, :]
            inside = (rows < sizes.queries)[:, None] & (cols < sizes.keys)[None, :]
            if c.ADDS:
                gl.atomic_add(at, total, mask=inside, sem="relaxed")
            else:
                gl.store(at, total.to(shares.dbias.pointer.dtype.element_ty), mask=inside)
            total = gl.zeros([ROWS, COLS], gl.float32, L)


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
def add_up_earlier(shares, slots, full, terms, sizes, c):
    """The role of two warps: a part of a group that ended before this one began, or nearly."""
    if c.DBIAS == "share":
        group = gl.program_id(0) // c.SHARERS - sizes.lag
        if group >= 0:
            wait_count(shares.ended + group, c.SHARERS)
            if c.ORDERED and c.ADDS:
                before = sharers_before(group, sizes, c)
                if before >= 0:
                    wait_count(shares.summed + before, c.SHARERS)
            add_up(shares, slots, full, group, gl.program_id(0) % c.SHARERS, c.SHARERS, terms, sizes, c)
            count_up(shares.summed + group)


@gluon.jit
def add_up_kernel(pieces, dbias, counts, states, first, parts, terms, sizes, c):
    """The groups that no later one has added up."""
    shares = shares_of(pieces, dbias, counts, states, sizes, c)
    slots, full = new_slots(shares, c)
    fence_async_shared()
    warps_barrier()
    group = first + gl.program_id(0) // parts
    if c.ORDERED and c.ADDS:
        before = sharers_before(group, sizes, c)
        if before >= first:
            wait_count(shares.summed + before, parts)
    add_up(shares, slots, full, group, gl.program_id(0) % parts, parts, terms, sizes, c)
    if c.ORDERED and c.ADDS:
        count_up(shares.summed + group)
