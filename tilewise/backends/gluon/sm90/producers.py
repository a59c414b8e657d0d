"""The warps of the backward that compute nothing: what they load, add, store and zero beside the products."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from tilewise.backends.gluon.compat import tma_load, tma_store
from tilewise.backends.gluon.pipeline import (
    count_stored,
    count_up,
    fill,
    leave,
    let_next_begin,
    take_ticket,
)
from tilewise.backends.gluon.sm90.backward_scheduler import all_works, counters_at, visit_at, visits_of, work_of
from tilewise.backends.gluon.sm90.dbias_reduce import add_up_earlier
from tilewise.backends.gluon.sm90.dq_accum import add_queries, zero_ahead
from tilewise.backends.gluon.sm90.mask_tiles import load_bits
from tilewise.backends.gluon.tile_scheduler import hand_out, next_ticket


@gluon.jit
def load_queries(ticket, step, x, rows, counts, terms, sizes, c):
    """For each tile of queries of a work Q, dO, the LSE, delta and the bias. Returns the steps done and, with DYNAMIC,
    the work to come."""
    Q_BYTES: gl.constexpr = x.q.block_type.nbytes + x.stats.block_type.nbytes
    DO_BYTES: gl.constexpr = x.do.block_type.nbytes + x.stats.block_type.nbytes
    BIAS_BYTES: gl.constexpr = x.bias.block_type.nbytes if c.BIAS == "matrix" else 0
    DO_APART: gl.constexpr = c.DO_STAGES != c.STAGES
    work = work_of(ticket, terms, sizes, c)
    following = -1
    for g in range(sizes.group):
        h = work.hk * sizes.group + g
        bias_b = work.b if c.BIAS_BATCH else 0
        first_tile = (work.b * sizes.kv_heads * sizes.group + h) * sizes.row_tiles
        count, listed = visits_of(x.visits, work, h, sizes, c)
        for i in range(count):
            if c.DYNAMIC and g == sizes.group - 1 and i == count - 1:  # not before: others may be done sooner
                following = take_ticket(counters_at(counts, sizes, c).tickets)
            m, cut = visit_at(i, listed, work, c)
            slot = step % c.STAGES
            full = rows.ring.full.index(slot)
            mbarrier.wait(rows.ring.empty.index(slot), ((step // c.STAGES) & 1) ^ 1)
            BYTES: gl.constexpr = Q_BYTES + BIAS_BYTES + (0 if DO_APART else DO_BYTES)
            if c.MASK:
                load_bits(x, cut, full, rows.bits.index(slot), work, h, m, BYTES, sizes, c)
            else:
                mbarrier.expect(full, BYTES)
            if c.BIAS == "matrix":
                at = [bias_b, h // c.BIAS_GROUP, m * c.BLOCK_M, work.n0]
                tma_load(x.bias, at, full, rows.bias.index(slot))
            tma_load(x.q, [work.b, h, m * c.BLOCK_M, 0], full, rows.ring.slots.index(slot))
            at_stats = (first_tile + m) * (2 * c.BLOCK_M)
            tma_load(x.stats, [at_stats], full, rows.stats.index(2 * slot))
            if DO_APART:
                slot = step % c.DO_STAGES
                full = rows.do_ring.full.index(slot)
                mbarrier.wait(rows.do_ring.empty.index(slot), ((step // c.DO_STAGES) & 1) ^ 1)
                mbarrier.expect(full, DO_BYTES)
            tma_load(x.do, [work.b, h, m * c.BLOCK_M, 0], full, rows.do.index(slot))
            tma_load(x.stats, [at_stats + c.BLOCK_M], full, rows.stats.index(2 * slot + 1))
            step += 1
    if c.DYNAMIC and following < 0:  # no tile of the last head is visible
        following = take_ticket(counters_at(counts, sizes, c).tickets)
    return step, following


@gluon.jit
def load(x, rows, tickets, counts, terms, sizes, c):
    """The role of one warp: what tiles of queries bring.

    With DYNAMIC a program has no work before it runs: others wait for works before their own (`wait_zeroed`,
    `add_queries`), and a program that has not begun may have to wait for them to end.
    """
    let_next_begin()
    step = gl.to_tensor(0)
    if c.DYNAMIC:
        nth = 0
        ticket = take_ticket(counters_at(counts, sizes, c).tickets)
        hand_out(tickets, nth, ticket)
        while ticket < all_works(sizes):
            step, ticket = load_queries(ticket, step, x, rows, counts, terms, sizes, c)
            nth += 1
            hand_out(tickets, nth, ticket)
    else:
        load_queries(gl.program_id(0), step, x, rows, counts, terms, sizes, c)


@gluon.jit
def fetch_keys(ticket, nth, x, keys, values, terms, sizes, c):
    """K and V of a program's ``nth`` work, when dK and dV have left that had their place."""
    work = work_of(ticket, terms, sizes, c)
    slot = nth % c.KEY_STAGES
    fill(keys, slot, nth // c.KEY_STAGES, x.k, work.b, work.hk, work.n0, 0)
    fill(values, slot, nth // c.KEY_STAGES, x.v, work.b, work.hk, work.n0, 0)


@gluon.jit
def store_keys(ticket, nth, x, queries, shared, terms, sizes, c):
    """dK and dV of a program's ``nth`` work, when they are in shared memory."""
    work = work_of(ticket, terms, sizes, c)
    slot = nth % c.KEY_STAGES
    mbarrier.wait(queries.stored.index(slot), (nth // c.KEY_STAGES) & 1)
    fence_async_shared()  # warps have stored, TMA reads
    tma_store(x.dv, [work.b, work.hk, work.n0, 0], shared.v.index(slot))
    tma_store(x.dk, [work.b, work.hk, work.n0, 0], shared.k.index(slot))


@gluon.jit
def say_done(ticket, counts, terms, sizes, c):
    """All that a work stores or adds is there."""
    work = work_of(ticket, terms, sizes, c)
    counters = counters_at(counts, sizes, c)
    if c.DBIAS == "share":
        count_up(counters.ended + ticket // c.SHARERS)
    count_stored(counters.done + work.b * sizes.kv_heads + work.hk)


@gluon.jit
def add(x, keys, values, queries, shared, tickets, counts, terms, sizes, c):
    """The role of one warp: adds dQ, stores dK and dV, and says when all of it is there."""
    step = gl.to_tensor(0)
    if c.DYNAMIC:
        nth = 0
        ticket = next_ticket(0, nth, tickets, c)
        while ticket < all_works(sizes):
            step = add_queries(ticket, step, x, queries, counts, terms, sizes, c)
            store_keys(ticket, nth, x, queries, shared, terms, sizes, c)
            tma.store_wait(0)  # they have left shared memory
            leave(keys, nth % c.KEY_STAGES)
            leave(values, nth % c.KEY_STAGES)
            say_done(ticket, counts, terms, sizes, c)
            nth += 1
            ticket = next_ticket(ticket, nth, tickets, c)
    else:
        ticket = gl.program_id(0)
        fetch_keys(ticket, gl.to_tensor(0), x, keys, values, terms, sizes, c)
        add_queries(ticket, step, x, queries, counts, terms, sizes, c)
        store_keys(ticket, gl.to_tensor(0), x, queries, shared, terms, sizes, c)
        say_done(ticket, counts, terms, sizes, c)


@gluon.jit
def background(x, keys, values, shares, slots, arrived, tickets, counts, terms, sizes, c):
    """The role of two warps beside the products: K and V of works to come and zeros for dQ of heads to come, or dBias
    of groups that have ended."""
    if c.DBIAS == "share":
        add_up_earlier(shares, slots, arrived, counts, terms, sizes, c)
    elif c.DYNAMIC:
        nth = 0
        ticket = next_ticket(0, nth, tickets, c)
        while ticket < all_works(sizes):
            fetch_keys(ticket, nth, x, keys, values, terms, sizes, c)
            if c.SHARERS == 1:  # else heads are not in their order, and `prepare_kernel` has zeroed all sums
                zero_ahead(ticket, shares, counts, sizes, c)
            nth += 1
            ticket = next_ticket(ticket, nth, tickets, c)
    elif c.SHARERS == 1:
        zero_ahead(gl.program_id(0), shares, counts, sizes, c)
