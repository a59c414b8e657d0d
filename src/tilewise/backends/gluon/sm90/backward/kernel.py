"""Backward on Hopper: FlashAttention-2 (arXiv 2307.08691), Algorithm 2, tile of keys by tile of keys, dBias on the way.

Score tiles are transposed, rows are keys: Pᵀ and dSᵀ then feed dV = Pᵀ dO and dK = dSᵀ Q straight from registers. dS
passes once through shared memory for dQ = dS K. dQ is summed over the key tiles by float32 reduce-adds, in an order
that nothing fixes, see `dq_accum`; dBias leaves the shared memory of dS by a TMA store, see `dbias_reduce` for
one that is shared.

Two warpgroups compute, 64 keys each, and meet where dS is complete: at 64 dimensions once for 128 queries, which are
computed in two subtiles. Other warps load, add dQ, and store dK and dV, see `backward.warps`. A work tile is a tile of
keys with all queries that see it; a program has one, or stays and takes the next that is left. Past 128 dimensions dK
and dV of 64 keys are all that their registers hold: both warpgroups have the same keys, and each half of the columns of
whatever is computed. Each then needs all of P and dS, which both pass through shared memory, and they meet for either.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tilewise.backends.gluon.compat import tma_add, tma_store, warps_barrier
from tilewise.backends.gluon.pipeline import (
    ABSENT,
    Pipeline,
    border,
    new_pipeline,
    new_pipeline_of_numbers,
    new_tiles,
    only_slot,
    release,
    slot_of,
    use_of,
    wait_count,
    wait_for_previous,
    wait_full,
)
from tilewise.backends.gluon.scheduler import next_tile_index
from tilewise.backends.gluon.score import score_tile_gradient
from tilewise.backends.gluon.sm90.backward.dbias_reduce import (
    dbias_tiles_of,
    leaves_as_tiles,
    new_slots,
    wait_dbias_zeroed,
)
from tilewise.backends.gluon.sm90.backward.dq import (
    begin_dq,
    dv_tile,
    new_dq_pipeline,
    release_part,
    send_part,
    signal_stored,
    uses_of_slot,
    wait_zeroed,
)
from tilewise.backends.gluon.sm90.backward.m_subtiles import (
    QueryRows,
    begin,
    begin_ahead,
    begin_dp,
    first_start_of,
    lse_of,
    operand,
    probabilities,
    softmax_gradient,
    start_of,
    subtile_of,
)
from tilewise.backends.gluon.sm90.backward.masks import drop_what_is_not_finite, visible
from tilewise.backends.gluon.sm90.backward.relative import (
    ANY,
    begin_of_part,
    corner_of,
    keep_entries,
    let_out,
    next_corner,
    part_name,
)
from tilewise.backends.gluon.sm90.backward.scheduler import (
    counters_at,
    entry_at,
    first_of_sum,
    place_of,
    step_of,
    steps_of,
    tile_list_of,
    tile_of_sum,
    work_tile_at,
    work_tile_count,
)
from tilewise.backends.gluon.sm90.backward.toeplitz import (
    add_diagonals,
    add_sums,
    end_of_part,
    far_line,
    near_queries,
    no_sums,
    on_line,
    start_of_words,
    summed,
)
from tilewise.backends.gluon.sm90.backward.warps import add, background, load
from tilewise.backends.gluon.sm90.common.dropout import kept_of, signed_by_dropout
from tilewise.backends.gluon.sm90.common.key_bias import keep_bias_of_keys, store_sums, sums_of
from tilewise.backends.gluon.sm90.common.key_mask import hide_keys
from tilewise.backends.gluon.sm90.common.toeplitz import diagonal_of, prefetch_near
from tilewise.backends.gluon.sm90.common.toeplitz import words as toeplitz_words
from tilewise.backends.gluon.sm90.common.wgmma import accumulator, tile_layout
from tilewise.backends.kernels.dropout import stream


class BackwardConstants(NamedTuple):
    """What the kernel knows when it is compiled; every field is a gl.constexpr. See config.BackwardConfig for most."""

    BLOCK_M: Any
    BLOCK_N: Any
    BLOCK_D: Any
    M_SUBTILES: Any
    SUBTILE_M: Any  # queries of a subtile
    STAGES: Any
    DO_STAGES: Any
    PEELED: Any
    DQ_PARTS: Any
    DQ_BY_TMA: Any
    DQ_STORED: Any
    AHEAD: Any
    K_IN_REGISTERS: Any
    V_IN_REGISTERS: Any
    WARPS: Any  # that compute
    ELEMENTS: Any  # batch elements of a program, see batched; else 1
    SHARES_KEYS: Any  # both warpgroups have the same keys
    LOADING_REGISTERS: Any
    COMPUTING_REGISTERS: Any  # of elements
    BIAS: Any  # "matrix", "cols" where it is full along the keys only, or "none", also where it is full along neither
    BIAS_APART: Any  # dS has a tile of its own: the bias, and dBias in its place, are of another dtype
    BIAS_BATCH: Any  # a bias for each batch element, or one for all
    BIAS_GROUP: Any  # query heads that share a bias
    RELATIVE: Any  # it is a bias by distance, see `backward.relative`
    RANGE_LO: Any  # some visible pairs lie below the distances with an entry
    RANGE_HI: Any  # or above
    SORTED: Any  # tiles below the range, those that its end cuts, and those inside have a loop each
    TOEPLITZ: Any  # as of the forward, see toeplitz_gradient
    TOEPLITZ_BATCH: Any
    TOEPLITZ_GROUP: Any
    FAR_LO: Any
    FAR_HI: Any
    UNDERFLOWS: Any
    DTOEPLITZ: Any  # its gradient is wanted
    DBIAS_SUMS: Any  # to which tiles of dS are added with "accumulate", see config.dbias_sums
    ZEROES_DBIAS: Any  # programs do, for groups to come
    GROUP_BROADCASTS: Any  # those of one program do
    DBIAS: Any  # "none"; of a matrix "store", "accumulate", "reduce" or "elements"; of cols "sum"; by distance "add"
    MASK: Any  # there is a bool mask: `mask_kernels` has read it
    HIDES_KEYS: Any  # of elements, in the place of MASK: it is the same for all queries, see `key_mask`
    MASK_BATCH: Any  # as of the bias
    MASK_GROUP: Any
    LONGEST_FIRST: Any  # work tiles come in the order that `mask_kernels.longest_first_kernel` finds
    MASK_ROWS: Any  # the mask differs between queries
    GROUP_PROGRAMS: Any  # programs that share a bias and run side by side
    SUM_BYTES: Any  # of shared memory, for what is added up
    ADDS: Any  # more of them share a bias
    ORDERED: Any  # what is summed by reduce-adds is summed in a fixed order
    DEFERRED_RELEASE: Any  # what has been added counts a step later
    RAGGED: Any  # the last tile of keys reaches past their end
    HIDES_END: Any  # what is past it has to be hidden: a band that ends with the last key does so anyway
    HIDES: Any  # some pair may be hidden, so that a key or value that is not finite may have to stay out
    HEAD_SWIZZLE: Any  # see backward_scheduler.head_and_tile
    KEY_STAGES: Any
    VALUE_STAGES: Any  # fewer than KEY_STAGES: dV leaves through dQ's shared memory, see `backward.warps`
    DYNAMIC: Any  # a program stays, and takes the next work tile that is left; else it has one
    # Of a packed batch: which sums of dQ are zeroed before counts in work tiles, not in heads, see `zero_ahead`.
    ZEROED_BY_TILE: Any
    PACKED: Any  # a packed batch: work tiles are listed, see packed


class Given(NamedTuple):
    """Pointers that a call may have or not: of dropout's seed, and of a list of tiles, see `BackwardOperands`."""

    seed: Any
    tile_list: Any


class BackwardOperands(NamedTuple):
    """Descriptors; `stats` holds the LSE and −delta of each tile of queries, one after the other.

    dq: of its sum, see `dq_accum`; a pointer unless it leaves by TMA. With DQ_STORED of dQ itself.
    bias: None where `BackwardConstants.BIAS` is "none", a `Strided` for "cols"; dbias is then float32 (B, H, N), and
    where DBIAS is "reduce" the pipeline of `DbiasTiles`. bits: of a mask, see mask_kernels; None without one.
    tile_list: likewise, or of a packed batch, see packed; with UNDERFLOWS the reach of each key/value head, see
    underflow."""

    q: Any
    k: Any
    v: Any
    do: Any
    bias: Any
    stats: Any
    dq: Any
    dk: Any
    dv: Any
    dbias: Any
    seed: Any
    bits: Any
    tile_list: Any


class TileIndices(NamedTuple):
    """As `gluon.scheduler.next_tile_index` and `hand_out_tile_index` take them."""

    tile_indices: Any


class BackwardShared(NamedTuple):
    """K, V and a bias of the keys; and what leaves: P where warpgroups share the keys, dS where it has no slot of the
    bias to leave from, and dBias where a softcap makes it differ from dS."""

    k: Any
    v: Any
    slot: Any  # of K and V, where there are two
    k_operand: Any  # see `m_subtiles.operand`
    v_operand: Any
    p: Any
    ds: Any
    dbias: Any
    added: Any
    ds_pipeline: Any  # barriers of dS of an element, which others read too
    hiding: Any  # of an element, keys and queries of the step that hides keys, see `key_mask`


class BackwardState(NamedTuple):
    """What the tiles of queries hand on from one to the next."""

    dk: Any
    dv: Any
    s: Any  # K·Qᵀ of the next tile, if it comes ahead
    start: Any  # of the next tile, see `start_of`
    lse: Any  # of the next tile, if K·Qᵀ comes ahead
    sums: Any  # of dS over the queries; of a Toeplitz bias see `FarSums`


@gluon.jit
def bwd_one_m_block(
    state, x, rows, dq_pipeline, shared, words, step, steps, work_tile, h, m, kind, terms, sizes, c,
    toeplitz=None, NEAR: gl.constexpr = False, RANGE: gl.constexpr = ANY,
):  # fmt: skip
    """One tile of queries: every gradient that it takes part in. Returns the `BackwardState` for the next.

    words: the `Stream` of dropout, or None. toeplitz: of such a bias, NEAR its `diagonal_of`, else its `far_line`.
    RANGE: see `backward.relative.part_name`.

    Of two subtiles the softmax of the first runs under K·Qᵀ of the second, its dV under the softmax of the second, its
    dK under dS of the second.
    """
    DTYPE: gl.constexpr = x.q.dtype
    KEYS: gl.constexpr = accumulator(c.BLOCK_N, c.BLOCK_D, c.WARPS)
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, KEYS, 2)
    DO_APART: gl.constexpr = c.DO_STAGES != c.STAGES
    gl.static_assert(c.AHEAD or c.DQ_PARTS == 1, "two parts of dQ leave around the next QK")
    gl.static_assert(c.DQ_BY_TMA or not c.ORDERED, "additions from registers have no order")
    gl.static_assert(c.M_SUBTILES == 1 or not (c.SHARES_KEYS or c.MASK), "one subtile has their P, or its bits")
    slot = slot_of(rows.pipeline, step)
    if not DO_APART:
        do_slot = slot
    elif c.DO_STAGES == 1:
        do_slot = only_slot(c)
    else:
        do_slot = slot_of(rows.do_pipeline, step)
    m0 = m * c.BLOCK_M
    tile_of_head = tile_of_sum(work_tile, h, m, sizes, c)
    q = rows.pipeline.slots.index(slot).reshape([c.BLOCK_M, c.BLOCK_D])
    do = rows.do.index(do_slot).reshape([c.BLOCK_M, c.BLOCK_D])
    if c.ELEMENTS > 1:
        ds_slot = slot_of(shared.ds_pipeline, step)
        tile = shared.ds.index(ds_slot)
    elif c.BIAS == "matrix" and not c.BIAS_APART:
        tile = rows.bias.index(slot)  # the bias has been read: dS takes its place
    else:
        tile = shared.ds.index(0)
    ds_queries = tile.reshape([c.BLOCK_M, c.BLOCK_N])
    SAME: gl.constexpr = not terms.HAS_CAP and not c.BIAS_APART
    dbias_tile = rows.bias.index(slot) if c.BIAS_APART else tile if SAME else shared.dbias

    s, start, lse, dk, dv, sums = state.s, state.start, state.lse, state.dk, state.dv, state.sums
    ds_operand = ABSENT
    corner = corner_of(m, work_tile, c)
    BIASED: gl.constexpr = c.BIAS == "matrix" and RANGE != "outside"
    ADDS: gl.constexpr = c.DBIAS == "add" and RANGE != "outside"
    LEAVES: gl.constexpr = leaves_as_tiles(c.DBIAS) or ADDS

    # QK of the first subtile, unless it came ahead, and its dP
    READS: gl.constexpr = NEAR and c.TOEPLITZ != "none"
    if READS and c.AHEAD:
        s += toeplitz_words(toeplitz, corner, s, True, 1)
        border(steps)
    if not c.AHEAD:
        if not BIASED:
            start = first_start_of(rows, step, True, corner, terms, c, RANGE)
        first_start = start_of_words(toeplitz, corner, c) if READS else start
        s_pending = begin(first_start, rows, shared, step, 0, terms, c, READS or (BIASED and not terms.HAS_CAP))
    if DO_APART:
        wait_full(rows.do_pipeline, do_slot, use_of(rows.do_pipeline, step))
    dp_pending = begin_dp(rows, shared, do_slot, 0, terms, c)
    if not c.AHEAD:
        lse = lse_of(rows, step, 0, c)
        s = warpgroup_mma_wait(1, deps=(s_pending,))

    for i in gl.static_range(c.M_SUBTILES):
        if i + 1 < c.M_SUBTILES and not READS:
            next_start = start_of(rows, step, corner, i + 1, terms, c, RANGE)
            s_pending = begin(next_start, rows, shared, step, i + 1, terms, c, BIASED and not terms.HAS_CAP)
            if words is None:
                next_lse = lse_of(rows, step, i + 1, c)
            border(steps)

        # softmax, under dP
        if c.TOEPLITZ == "line" and not NEAR:
            p, slope = on_line(s, lse, toeplitz, corner, terms, c), 1.0
        else:
            p, slope = probabilities(s, start, lse, shared, terms, c)
        p = visible(p, rows.bits, slot, kind, work_tile, m0 + i * c.SUBTILE_M, terms, sizes, c)
        if words is not None:
            p = signed_by_dropout(p, words, m0 + i * c.SUBTILE_M, work_tile.n0, terms)
        if c.SHARES_KEYS:
            # Both warpgroups have waited for the last to read P's memory, dV of the step before, when they last met.
            p_queries = shared.p.index(only_slot(c)).reshape([c.BLOCK_M, c.BLOCK_N])
            p_queries.permute((1, 0)).store(kept_of(p, words, DTYPE))
            warps_barrier()
            fence_async_shared()
            # dV behind dP, and under it dS
            dv = warpgroup_mma(p_queries.permute((1, 0)), do, dv, is_async=True)
            dp = warpgroup_mma_wait(1, deps=(dp_pending,))
        else:
            p_operand = gl.convert_layout(kept_of(p, words, DTYPE), OPERAND, assert_trivial=True)
            border(steps)
            if i + 1 < c.M_SUBTILES and not READS:
                dp, p = warpgroup_mma_wait(1, deps=(dp_pending, p))
            elif i > 0:
                dp, p, dv = warpgroup_mma_wait(0, deps=(dp_pending, p, dv))
            else:
                dp, p = warpgroup_mma_wait(0, deps=(dp_pending, p))
            # dV, and under it dS
            dv = warpgroup_mma(p_operand, subtile_of(do, i, c), dv, is_async=True)
        if i + 1 < c.M_SUBTILES:
            dp_pending = begin_dp(rows, shared, do_slot, i + 1, terms, c)
        if i > 0:
            dk = warpgroup_mma(ds_operand, subtile_of(q, i - 1, c), dk, is_async=True)
        ds = softmax_gradient(p, dp, words, rows, do_slot, i, terms, c)
        if c.DBIAS == "sum":
            sums += sums_of(ds, c)
        if c.DTOEPLITZ and NEAR:
            add_diagonals(ds, x.dbias, work_tile.b, h, corner - i * c.SUBTILE_M, sizes, c)
        elif c.DTOEPLITZ:
            sums = summed(sums, ds, toeplitz, corner - i * c.SUBTILE_M, c)
            border(steps)
        if leaves_as_tiles(c.DBIAS) and not SAME:
            to = subtile_of(dbias_tile.reshape([c.BLOCK_M, c.BLOCK_N]), i, c)
            to.permute((1, 0)).store(ds.to(dbias_tile.dtype))
        if ADDS and RANGE != "inside":
            keep_entries(ds, rows.bias, corner, i, terms, c)
        ds_rounded = score_tile_gradient(ds, slope, terms).to(DTYPE)
        if c.ELEMENTS > 1:
            mbarrier.wait(shared.ds_pipeline.empty.index(ds_slot), (use_of(shared.ds_pipeline, step) & 1) ^ 1)
        subtile_of(ds_queries, i, c).permute((1, 0)).store(ds_rounded)
        if not c.SHARES_KEYS:
            ds_operand = gl.convert_layout(ds_rounded, OPERAND, assert_trivial=True)
        if i + 1 < c.M_SUBTILES and READS:  # not before: registers are full
            s_pending = begin(start_of_words(toeplitz, corner - (i + 1) * c.SUBTILE_M, c), rows, shared, step, i + 1,
                              terms, c, True)  # fmt: skip
            lse = lse_of(rows, step, i + 1, c)
            s, dp_pending = warpgroup_mma_wait(0, deps=(s_pending, dp_pending))
        elif i + 1 < c.M_SUBTILES:
            if words is not None:  # not before: registers are full
                next_lse = lse_of(rows, step, i + 1, c)
            start, lse = next_start, next_lse
            s = warpgroup_mma_wait(2, deps=(s_pending,))
    # dS is about to be read through the async proxy; after the barrier, where there is less left to wait for. The fence
    # also orders this step's ordinary loads (LSE, delta, the mask's bits; the bias, or the LSE that comes ahead, in the
    # step before) before the refill of their slot.
    warps_barrier()
    fence_async_shared()
    if c.ELEMENTS > 1:  # dS is there, and all warps have read the bias
        mbarrier.arrive(shared.ds_pipeline.full.index(ds_slot), count=1)
        release(rows.bias_pipeline, slot_of(rows.bias_pipeline, step))
    bias_b = work_tile.b if c.BIAS_BATCH else 0
    if c.DBIAS == "store":
        tma_store(x.dbias, [bias_b, h // c.BIAS_GROUP, m0, work_tile.n0], dbias_tile)
    elif c.DBIAS == "accumulate":
        tma_add(x.dbias, [first_of_sum(work_tile, sizes, c) + bias_b, h // c.BIAS_GROUP, m0, work_tile.n0], dbias_tile)
    elif c.DBIAS == "reduce":
        place = step_of(m, h - work_tile.hk * sizes.group, work_tile)
        tma_store(x.dbias, [place_of(sizes, c), place, 0, 0], dbias_tile)
    elif ADDS:
        let_out(x.dbias, rows.bias, slot, bias_b, h // c.BIAS_GROUP, m, work_tile, terms, c, RANGE)

    # dQ and dK, and the next QK; of two parts of dQ the first leaves under dK, the second under that QK
    dq_pending = begin_dq(ds_queries, shared, 0, c)
    if c.SHARES_KEYS:
        dk = warpgroup_mma(ds_queries.permute((1, 0)), q, dk, is_async=True)
    else:
        dk = warpgroup_mma(ds_operand, subtile_of(q, c.M_SUBTILES - 1, c), dk, is_async=True)
    if c.DQ_PARTS == 2:
        rest_pending = begin_dq(ds_queries, shared, 1, c)
    elif c.AHEAD:
        start, s_pending, lse = begin_ahead(rows, shared, step + 1, steps, next_corner(m, work_tile, c), terms, c)
    BEHIND: gl.constexpr = 2 if c.AHEAD else 1  # products begun after dQ, or its first part
    if DO_APART:  # the next dO is to come under what is left of this step
        dv = warpgroup_mma_wait(BEHIND + 1, deps=(dv,))
        release(rows.do_pipeline, do_slot)
        dq = warpgroup_mma_wait(BEHIND, deps=(dq_pending,))
    else:
        dv, dq = warpgroup_mma_wait(BEHIND, deps=(dv, dq_pending))
    release_part(dq, x, dq_pipeline, tile_of_head, uses_of_slot(step, shared, c), 0, terms, c)
    if c.DQ_PARTS == 2:  # the next QK here, where the registers of the first part are free again
        start, s_pending, lse = begin_ahead(rows, shared, step + 1, steps, next_corner(m, work_tile, c), terms, c)
    send_part(dq_pipeline, c)
    if c.DQ_PARTS == 2:
        dk, dq = warpgroup_mma_wait(1, deps=(dk, rest_pending))
        if LEAVES:
            tma.store_wait(0)  # dBias has left shared memory
        release(rows.pipeline, slot)
        release_part(dq, x, dq_pipeline, tile_of_head, step, 1, terms, c)
        send_part(dq_pipeline, c)
        s = warpgroup_mma_wait(0, deps=(s_pending,))
    else:
        if c.AHEAD:
            dk, s = warpgroup_mma_wait(0, deps=(dk, s_pending))
        elif BIASED:  # the next bias, under dK
            start = first_start_of(rows, step + 1, step + 1 < steps, next_corner(m, work_tile, c), terms, c, RANGE)
            border(steps)
            dk, start = warpgroup_mma_wait(0, deps=(dk, start))
        else:
            dk = warpgroup_mma_wait(0, deps=(dk,))
        if LEAVES:
            tma.store_wait(0)  # dBias has left
        release(rows.pipeline, slot)  # all warps come here first: dS's tile has been read, too, where only one is
    if not c.AHEAD:
        s, lse = ABSENT, ABSENT
    return BackwardState(dk, dv, s, start, lse, sums)


@gluon.jit
def compute_work_tile(tile_index, nth, step, x, rows, keys, values, dq_pipeline, shared, counts, terms, sizes, c):
    """The program's ``nth`` work tile: dK and dV of a tile of keys, its share of dQ, and dBias. Returns the steps
    done."""
    DTYPE: gl.constexpr = x.k.dtype
    KEYS: gl.constexpr = accumulator(c.BLOCK_N, c.BLOCK_D, c.WARPS)
    work_tile = work_tile_at(tile_index, x, terms, sizes, c)
    counters = counters_at(counts, sizes, c)
    dk, dv = gl.zeros([c.BLOCK_N, c.BLOCK_D], gl.float32, KEYS), gl.zeros([c.BLOCK_N, c.BLOCK_D], gl.float32, KEYS)
    slot = slot_of(keys, nth)
    v_slot = slot_of(values, nth)
    k_tile = shared.k.index(slot).reshape([c.BLOCK_N, c.BLOCK_D])
    v_tile = shared.v.index(v_slot).reshape([c.BLOCK_N, c.BLOCK_D])
    if not c.DQ_BY_TMA and c.ELEMENTS == 1:  # else who loads has waited
        wait_zeroed(tile_index, work_tile, x, counters, sizes, c)
    if c.DBIAS == "reduce":
        earlier = tile_index // c.GROUP_PROGRAMS - sizes.ds_slots
        if earlier >= 0:  # it had this program's place
            wait_count(counters.summed + earlier, c.GROUP_PROGRAMS)
    elif c.ZEROES_DBIAS:
        wait_dbias_zeroed(tile_index, counters, sizes, c)
    wait_full(keys, slot, use_of(keys, nth))
    wait_full(values, v_slot, use_of(values, nth))
    if c.HIDES:
        drop_what_is_not_finite(k_tile, c)
        drop_what_is_not_finite(v_tile, c)
        hide_keys(x, shared, work_tile, sizes, c)
        fence_async_shared()
    warps_barrier()  # here, or the compiler puts it into the loop, between the setting up of barriers and their use
    k_operand, v_operand = operand(k_tile, c.K_IN_REGISTERS, c), operand(v_tile, c.V_IN_REGISTERS, c)
    shared = BackwardShared(
        shared.k, shared.v, slot, k_operand, v_operand, shared.p, shared.ds, shared.dbias, shared.added,
        shared.ds_pipeline, shared.hiding,
    )  # fmt: skip

    steps = step + steps_of(x, work_tile, sizes, c)
    corner = corner_of(work_tile.end - 1, work_tile, c)
    s, start, lse = ABSENT, ABSENT, ABSENT  # where nothing comes ahead
    if c.AHEAD:
        start, s_pending, lse = begin_ahead(rows, shared, step, steps, corner, terms, c)
        s = warpgroup_mma_wait(0, deps=(s_pending,))
    elif c.BIAS == "matrix":
        start = first_start_of(rows, step, step < steps, corner, terms, c)
    S: gl.constexpr = accumulator(c.BLOCK_N, c.SUBTILE_M, c.WARPS)
    if c.SHARES_KEYS or c.DBIAS == "sum":
        none = sums_of(gl.zeros([c.BLOCK_N, c.SUBTILE_M], gl.float32, S), c)
    elif c.DTOEPLITZ:
        none = no_sums(c)
    else:
        none = gl.zeros([c.BLOCK_N], gl.float32, gl.SliceLayout(1, S))
    state = BackwardState(dk, dv, s, start, lse, none)
    for g in range(sizes.group):
        h = work_tile.hk * sizes.group + g
        if c.BIAS == "cols":
            keep_bias_of_keys(x, shared, work_tile, h, c)
        words = None
        if x.seed is not None:
            words = stream(x.seed, work_tile.b, h, terms)
        if c.TOEPLITZ != "none":
            near_begin, near_end = near_queries(work_tile, terms, c)
            diagonal = diagonal_of(x.bias, work_tile.b, h, sizes.kv_heads * sizes.group, sizes, c)
            if c.TOEPLITZ == "number" and (c.FAR_LO or c.FAR_HI) and c.M_SUBTILES > 1:  # where it spills nothing
                prefetch_near(diagonal, c.BLOCK_M, c.WARPS, terms, sizes, c)
            count, listed = tile_list_of(x.tile_list, work_tile, h, sizes, c)
            begin = 0
            for part in gl.static_range(3):  # what lies below, then near, then above
                if part == 1 or (part == 0 and c.FAR_LO) or (part == 2 and c.FAR_HI):
                    at = diagonal if part == 1 else far_line(diagonal, part == 0, terms, sizes, c)
                    end = end_of_part(part, count, work_tile, near_begin, near_end, c)
                    for i in range(begin, end):
                        m, kind = entry_at(i, listed, work_tile, c)
                        state = bwd_one_m_block(
                            state, x, rows, dq_pipeline, shared, words, step, steps, work_tile, h, m, kind, terms,
                            sizes, c, at, part == 1,
                        )  # fmt: skip
                        step += 1
                    if c.DTOEPLITZ and part != 1:
                        add_sums(state.sums, x.dbias, work_tile.b, h, at, sizes, c)
                        state = BackwardState(state.dk, state.dv, state.s, state.start, state.lse, none)
                    begin = end
        elif not c.PEELED:
            count, listed = tile_list_of(x.tile_list, work_tile, h, sizes, c)
            for i in range(count):
                m, kind = entry_at(i, listed, work_tile, c)
                state = bwd_one_m_block(
                    state, x, rows, dq_pipeline, shared, words, step, steps, work_tile, h, m, kind, terms, sizes, c
                )
                step += 1
        else:  # what cuts a tile is known when it is compiled
            if terms.HAS_LO:
                for i in range(work_tile.end - work_tile.full_end):
                    m = work_tile.end - 1 - i
                    state = bwd_one_m_block(
                        state, x, rows, dq_pipeline, shared, words, step, steps, work_tile, h, m, 1, terms, sizes, c
                    )
                    step += 1
            end = work_tile.full_end
            if c.SORTED:  # beside a bias by distance: the queries that are beyond all entries come first
                state = BackwardState(state.dk, state.dv, s, ABSENT, lse, state.sums)
            for part in gl.static_range(3):
                if part == 1 or c.SORTED:
                    begin = begin_of_part(part, work_tile, end, terms, c)
                    for i in range(end - begin):
                        m = end - 1 - i
                        state = bwd_one_m_block(
                            state, x, rows, dq_pipeline, shared, words, step, steps, work_tile, h, m, 0, terms, sizes,
                            c, RANGE=part_name(part, c.SORTED),
                        )  # fmt: skip
                        step += 1
                    end = begin
                if part == 0 and c.SORTED:
                    corner = next_corner(end, work_tile, c)
                    start = first_start_of(rows, step, step < steps, corner, terms, c)
                    state = BackwardState(state.dk, state.dv, s, start, lse, state.sums)
            if terms.HAS_HI or terms.HAS_LO or c.RAGGED:
                for i in range(work_tile.full_begin - work_tile.begin):
                    m = work_tile.full_begin - 1 - i
                    state = bwd_one_m_block(
                        state, x, rows, dq_pipeline, shared, words, step, steps, work_tile, h, m, 1, terms, sizes, c
                    )
                    step += 1
        if c.DBIAS == "sum":
            store_sums(state.sums, x, work_tile, h, sizes, c)
            state = BackwardState(state.dk, state.dv, state.s, state.start, state.lse, none)

    # dK and dV leave through the shared memory of K and V, or dV through that of dQ, when the last dQ has left it
    warps_barrier()  # the other warpgroup may still read them
    if c.VALUE_STAGES < c.KEY_STAGES:
        k_tile.store((state.dk * terms.scale).to(DTYPE))
        mbarrier.wait(dq_pipeline.empty.index(0), (uses_of_slot(step, shared, c) & 1) ^ 1)
        dv_tile(x, dq_pipeline, c).reshape([c.BLOCK_N, c.BLOCK_D]).store(state.dv.to(DTYPE))
    else:
        v_tile.store(state.dv.to(DTYPE))
        k_tile.store((state.dk * terms.scale).to(DTYPE))
    signal_stored(dq_pipeline, slot, c)
    return step


@gluon.jit
def compute(x, rows, keys, values, dq_pipeline, shared, tile_indices, counts, terms, sizes, c):
    """The role of the two warpgroups: all products."""
    step, nth = gl.to_tensor(0), gl.to_tensor(0)
    if c.DYNAMIC:
        tile_index = next_tile_index(0, nth, tile_indices, c)
        while tile_index < work_tile_count(x, sizes, c):
            step = compute_work_tile(
                tile_index, nth, step, x, rows, keys, values, dq_pipeline, shared, counts, terms, sizes, c
            )
            nth += 1
            tile_index = next_tile_index(tile_index, nth, tile_indices, c)
    else:
        tile_index = gl.program_id(0)
        compute_work_tile(tile_index, nth, step, x, rows, keys, values, dq_pipeline, shared, counts, terms, sizes, c)


@gluon.jit
def backward_kernel(
    q, k, v, do, bias, stats, dq, dk, dv, dbias, given, bits, pieces, shared_dbias, counts, lists, terms, sizes, c
):
    """dK, dV and dBias, and the sum of dQ / scale. The first ten are descriptors of tiles, see `BackwardOperands`.

    pieces, shared_dbias, lists: see `DbiasTiles`; where no dBias is shared, `pieces` is a pointer to the sum of dQ.
    counts: see `backward.scheduler.Counters`.
    """
    wait_for_previous()
    x = BackwardOperands(q, k, v, do, bias, stats, dq, dk, dv, dbias, given.seed, bits, given.tile_list)
    dbias_tiles = shared_dbias if c.ZEROES_DBIAS else pieces
    if c.DBIAS == "reduce":
        dbias_tiles = dbias_tiles_of(pieces, shared_dbias, lists, c)
    keys = new_pipeline(k, c.KEY_STAGES, c.BLOCK_N, c.BLOCK_D, 1)
    values = new_pipeline(v, c.VALUE_STAGES, c.BLOCK_N, c.BLOCK_D, 1)
    SCORES: gl.constexpr = tile_layout(c.BLOCK_M, c.BLOCK_N, q.dtype)
    pipeline = new_pipeline(q, c.STAGES, c.BLOCK_M, c.BLOCK_D, 1)
    if c.DO_STAGES != c.STAGES:
        do_pipeline = new_pipeline(do, c.DO_STAGES, c.BLOCK_M, c.BLOCK_D, 1)
        do_slots = do_pipeline.slots
    else:
        do_pipeline = Pipeline(ABSENT, ABSENT, ABSENT)
        do_slots = new_tiles(do, c.DO_STAGES, c.BLOCK_M, c.BLOCK_D)
    stats_slots = gl.allocate_shared_memory(gl.float32, [2 * c.STAGES, c.BLOCK_M], stats.layout)
    dq_pipeline = new_dq_pipeline(dq, c)
    BEHIND: gl.constexpr = 1 if c.DBIAS == "add" else 0  # see `backward.relative`
    DS_SLOTS: gl.constexpr = c.STAGES + BEHIND if c.BIAS == "matrix" and not c.BIAS_APART else 1
    if c.BIAS == "matrix" and not c.BIAS_APART:
        ds_slots = new_tiles(bias, DS_SLOTS, c.BLOCK_M, c.BLOCK_N)
    else:
        ds_slots = gl.allocate_shared_memory(q.dtype, [DS_SLOTS, 1, 1, c.BLOCK_M, c.BLOCK_N], SCORES)
    bias_slots = ds_slots
    if c.BIAS_APART:
        BIAS_TILE: gl.constexpr = tile_layout(c.BLOCK_M, c.BLOCK_N, bias.dtype)
        bias_slots = gl.allocate_shared_memory(bias.dtype, [c.STAGES, 1, 1, c.BLOCK_M, c.BLOCK_N], BIAS_TILE)
    p_slots = ABSENT
    if c.SHARES_KEYS:
        p_slots = gl.allocate_shared_memory(q.dtype, [1, 1, 1, c.BLOCK_M, c.BLOCK_N], SCORES)
    dbias_tile = ABSENT
    if leaves_as_tiles(c.DBIAS) and terms.HAS_CAP and not c.BIAS_APART:
        dbias_tile = gl.allocate_shared_memory(q.dtype, [1, 1, c.BLOCK_M, c.BLOCK_N], SCORES)
    added = ABSENT
    if c.BIAS == "cols":
        added = gl.allocate_shared_memory(gl.float32, [c.BLOCK_N], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    bits_slots = ABSENT
    if c.MASK:
        bits_slots = gl.allocate_shared_memory(gl.int32, [c.STAGES, 2 * c.BLOCK_N], bits.layout)
    rows = QueryRows(pipeline, do_slots, stats_slots, bias_slots, bits_slots, do_pipeline, ABSENT)
    shared = BackwardShared(keys.slots, values.slots, 0, 0, 0, p_slots, ds_slots, dbias_tile, added, ABSENT, ABSENT)
    index_pipeline = Pipeline(ABSENT, ABSENT, ABSENT)
    if c.DYNAMIC:
        index_pipeline = new_pipeline_of_numbers(2, 3)
    tile_indices = TileIndices(index_pipeline)
    FEW: gl.constexpr = c.LOADING_REGISTERS
    if c.DBIAS == "reduce":
        slots, arrived = new_slots(dbias_tiles, c)
    else:
        slots, arrived = ABSENT, ABSENT
    fence_async_shared()
    # All roles but the first have four warps, for which registers are set aside anyway: one without anything to do
    # costs none.
    gl.warp_specialize(
        [
            (compute, (x, rows, keys, values, dq_pipeline, shared, tile_indices, counts, terms, sizes, c)),
            (load, (x, rows, tile_indices, counts, terms, sizes, c)),
            (add, (x, keys, values, dq_pipeline, shared, tile_indices, counts, terms, sizes, c)),
            (background, (x, keys, values, dbias_tiles, slots, arrived, tile_indices, counts, terms, sizes, c)),
        ],
        [1, 1, 2],
        [FEW, FEW, FEW],
    )
