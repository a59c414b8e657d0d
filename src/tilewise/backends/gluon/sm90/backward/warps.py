"""The warps of the backward that load, add, store and zero while others compute the products."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from tilewise.backends.gluon.compat import tma_load, tma_store
from tilewise.backends.gluon.pipeline import (
    count_stored,
    count_up,
    fetch_tile_index,
    fill_at,
    let_next_begin,
    release,
    slot_of,
    use_of,
    wait_full,
)
from tilewise.backends.gluon.relative import CUT, column_of
from tilewise.backends.gluon.scheduler import hand_out_tile_index, next_tile_index
from tilewise.backends.gluon.sm90.backward.dbias_reduce import reduce_earlier_group, zero_later_group
from tilewise.backends.gluon.sm90.backward.dq import add_dq, dv_tile, zero_ahead
from tilewise.backends.gluon.sm90.backward.masks import load_bits
from tilewise.backends.gluon.sm90.backward.relative import corner_of, tile_state
from tilewise.backends.gluon.sm90.backward.scheduler import (
    bias_of_tile,
    counters_at,
    entry_at,
    row_tile,
    tile_list_of,
    work_tile_at,
    work_tile_count,
)
from tilewise.backends.gluon.sm90.backward.toeplitz import near_queries, place_of_lse
from tilewise.backends.gluon.varlen import box_of


@gluon.jit
def load_do(x, counts, tile, at, full, slot, c):
    """Load dO of a query tile, from ``mended`` if it is there. tile: its number, as in stats."""
    if c.MENDS:
        coarse = gl.load(counts - 1 - tile)
        if coarse == 0:
            tma_load(x.do, at, full, slot)
        else:
            tma_load(x.mended, at, full, slot)
    else:
        tma_load(x.do, at, full, slot)


@gluon.jit
def load_queries(tile_index, step, x, rows, counts, terms, sizes, c):
    """Load all query tiles of a work tile; return the steps done and, with DYNAMIC, the next tile index."""
    Q_BYTES: gl.constexpr = x.q.block_type.nbytes + x.stats.block_type.nbytes
    DO_BYTES: gl.constexpr = x.do.block_type.nbytes + x.stats.block_type.nbytes
    BIAS_BYTES: gl.constexpr = x.bias.block_type.nbytes if c.BIAS == "matrix" else 0
    DO_APART: gl.constexpr = c.DO_STAGES != c.STAGES
    work_tile = work_tile_at(tile_index, x, terms, sizes, c)
    seq = work_tile.seq
    near_begin, near_end = near_queries(work_tile, terms, c)
    next_index = -1
    for g in range(sizes.group):
        h = work_tile.hk * sizes.group + g
        bias_b = bias_of_tile(work_tile, sizes, c)
        count, listed = tile_list_of(x.tile_list, work_tile, h, sizes, c)
        for i in range(count):
            if c.DYNAMIC and g == sizes.group - 1 and i == count - 1:  # not earlier: others may be free sooner
                next_index = fetch_tile_index(counters_at(counts, sizes, c).tile_count_semaphore)
            m, kind = entry_at(i, listed, work_tile, c)
            slot = slot_of(rows.pipeline, step)
            full = rows.pipeline.full.index(slot)
            mbarrier.wait(rows.pipeline.empty.index(slot), (use_of(rows.pipeline, step) & 1) ^ 1)
            BYTES: gl.constexpr = Q_BYTES + BIAS_BYTES + (0 if DO_APART else DO_BYTES)
            if c.MASK:
                load_bits(x, kind, full, rows.bits.index(slot), work_tile, h, m, BYTES, sizes, c)
            elif not (c.RANGE_LO or c.RANGE_HI):
                mbarrier.expect(full, BYTES)
            if c.BIAS == "matrix":
                col = column_of(work_tile.n0, seq, terms, c)
                at = box_of(seq.first_query, seq.queries, bias_b, h // c.BIAS_GROUP, m * c.BLOCK_M, c, col)
                if c.RANGE_LO or c.RANGE_HI:
                    reads = tile_state(corner_of(m, work_tile, c), terms, c) >= CUT
                    mbarrier.expect(full, BYTES - BIAS_BYTES, pred=not reads)
                    mbarrier.expect(full, BYTES, pred=reads)
                    tma_load(x.bias, at, full, rows.bias.index(slot), pred=reads)
                else:
                    tma_load(x.bias, at, full, rows.bias.index(slot))
            at_rows = box_of(seq.first_query, seq.queries, work_tile.b, h, m * c.BLOCK_M, c)
            tma_load(x.q, at_rows, full, rows.pipeline.slots.index(slot))
            at_stats = row_tile(work_tile, h, m, sizes) * (2 * c.BLOCK_M)
            at_lse = place_of_lse(at_stats, m, near_begin, near_end, sizes, c)
            tma_load(x.stats, [at_lse], full, rows.stats.index(2 * slot))
            if DO_APART:
                slot = slot_of(rows.do_pipeline, step)
                full = rows.do_pipeline.full.index(slot)
                mbarrier.wait(rows.do_pipeline.empty.index(slot), (use_of(rows.do_pipeline, step) & 1) ^ 1)
                mbarrier.expect(full, DO_BYTES)
            load_do(x, counts, row_tile(work_tile, h, m, sizes), at_rows, full, rows.do.index(slot), c)
            tma_load(x.stats, [at_stats + c.BLOCK_M], full, rows.stats.index(2 * slot + 1))
            step += 1
    if c.DYNAMIC and next_index < 0:  # no tile of the last head is visible
        next_index = fetch_tile_index(counters_at(counts, sizes, c).tile_count_semaphore)
    return step, next_index


@gluon.jit
def load(x, rows, tile_indices, counts, terms, sizes, c):
    """Load query tiles: the role of one warp.

    With DYNAMIC a program takes a work tile only once it runs: running programs wait for lower work tiles
    (`wait_zeroed`, `add_dq`), and a program that has not started may have to wait until these programs end.
    """
    let_next_begin()
    step = gl.to_tensor(0)
    if c.DYNAMIC:
        nth = 0
        tile_index = fetch_tile_index(counters_at(counts, sizes, c).tile_count_semaphore)
        hand_out_tile_index(tile_indices, nth, tile_index)
        while tile_index < work_tile_count(x, sizes, c):
            step, tile_index = load_queries(tile_index, step, x, rows, counts, terms, sizes, c)
            nth += 1
            hand_out_tile_index(tile_indices, nth, tile_index)
    else:
        load_queries(gl.program_id(0), step, x, rows, counts, terms, sizes, c)


@gluon.jit
def fetch_keys(tile_index, nth, x, keys, values, terms, sizes, c):
    """Load K and V of the ``nth`` work tile once dK and dV have left their slots, or a single V is read."""
    fetch_keys_of(work_tile_at(tile_index, x, terms, sizes, c), nth, x, keys, values, c)


@gluon.jit
def fetch_keys_of(work_tile, nth, x, keys, values, c):
    at = box_of(work_tile.seq.first_key, work_tile.seq.keys, work_tile.b, work_tile.hk, work_tile.n0, c)
    fill_at(keys, slot_of(keys, nth), use_of(keys, nth), x.k, at)
    fill_at(values, slot_of(values, nth), use_of(values, nth), x.v, at)


@gluon.jit
def store_keys(tile_index, nth, x, dq_pipeline, shared, terms, sizes, c):
    """Store dK and dV of a program's ``nth`` work tile once they are in shared memory."""
    store_keys_of(work_tile_at(tile_index, x, terms, sizes, c), nth, x, dq_pipeline, shared, c)


@gluon.jit
def store_keys_of(work_tile, nth, x, dq_pipeline, shared, c):
    slot = slot_of(dq_pipeline.stored, nth)
    wait_full(dq_pipeline.stored, slot, use_of(dq_pipeline.stored, nth))
    fence_async_shared()  # generic stores before the reads of TMA
    at = box_of(work_tile.seq.first_key, work_tile.seq.keys, work_tile.b, work_tile.hk, work_tile.n0, c)
    if c.VALUE_STAGES < c.KEY_STAGES:
        tma_store(x.dv, at, dv_tile(x, dq_pipeline, c))
    else:
        tma_store(x.dv, at, shared.v.index(slot))
    tma_store(x.dk, at, shared.k.index(slot))


@gluon.jit
def signal_done(tile_index, x, counts, terms, sizes, c):
    """Count a work tile as done once everything that it stores or adds is visible."""
    work_tile = work_tile_at(tile_index, x, terms, sizes, c)
    counters = counters_at(counts, sizes, c)
    if c.DBIAS == "reduce":
        count_up(counters.ended + tile_index // c.GROUP_PROGRAMS)
    count_stored(counters.done + work_tile.b * sizes.kv_heads + work_tile.hk)


@gluon.jit
def add(x, keys, values, dq_pipeline, shared, tile_indices, counts, terms, sizes, c):
    """Add dQ, store dK and dV, count work tiles as done; without DYNAMIC also load K and V: the role of one warp."""
    step = gl.to_tensor(0)
    if c.DYNAMIC:
        nth = 0
        tile_index = next_tile_index(0, nth, tile_indices, c)
        while tile_index < work_tile_count(x, sizes, c):
            begun = step
            step = add_dq(tile_index, step, x, values, dq_pipeline, counts, terms, sizes, c)
            store_keys(tile_index, nth, x, dq_pipeline, shared, terms, sizes, c)
            tma.store_wait(0)  # dK and dV have left shared memory
            release(keys, slot_of(keys, nth))
            if c.VALUE_STAGES < c.KEY_STAGES:
                mbarrier.arrive(dq_pipeline.empty.index(0), count=1)  # dV has left
                mbarrier.arrive(values.empty.index(0), count=1, pred=step == begun)
            else:
                release(values, slot_of(values, nth))
            if not c.PACKED:  # a packed batch has its postprocess after the kernel
                signal_done(tile_index, x, counts, terms, sizes, c)
            nth += 1
            tile_index = next_tile_index(tile_index, nth, tile_indices, c)
    else:
        tile_index = gl.program_id(0)
        fetch_keys(tile_index, gl.to_tensor(0), x, keys, values, terms, sizes, c)
        add_dq(tile_index, step, x, values, dq_pipeline, counts, terms, sizes, c)
        store_keys(tile_index, gl.to_tensor(0), x, dq_pipeline, shared, terms, sizes, c)
        signal_done(tile_index, x, counts, terms, sizes, c)


@gluon.jit
def background(x, keys, values, dbias_tiles, slots, arrived, tile_indices, counts, terms, sizes, c):
    """Load K and V and zero dQ for later work (DYNAMIC), or reduce dBias of earlier groups: the role of two warps."""
    if c.DBIAS == "reduce":
        reduce_earlier_group(dbias_tiles, slots, arrived, counts, terms, sizes, c)
    elif c.DYNAMIC:
        nth = 0
        tile_index = next_tile_index(0, nth, tile_indices, c)
        while tile_index < work_tile_count(x, sizes, c):
            fetch_keys(tile_index, nth, x, keys, values, terms, sizes, c)
            if c.ZEROES_DBIAS:
                zero_later_group(dbias_tiles, tile_index, counts, terms, sizes, c)
            if c.GROUP_PROGRAMS == 1:  # else heads are not in order, and `preprocess_kernel` zeroes all of dq_accum
                zero_ahead(tile_index, x, dbias_tiles, counts, sizes, c)
            nth += 1
            tile_index = next_tile_index(tile_index, nth, tile_indices, c)
    elif c.GROUP_PROGRAMS == 1:
        zero_ahead(gl.program_id(0), x, dbias_tiles, counts, sizes, c)
