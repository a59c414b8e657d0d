"""Backward on Hopper: FlashAttention-2 (arXiv 2307.08691), Algorithm 2, by key tiles, with dBias.

Score tiles are transposed (rows are keys), so that Pᵀ and dSᵀ feed dV = Pᵀ dO and dK = dSᵀ Q straight from registers.
dS passes once through shared memory for dQ = dS K. dQ is summed over the key tiles by float32 reduce-adds, in no fixed
order unless ORDERED, see `dq`. dBias leaves the shared memory of dS by a TMA store; see `dbias.DBiasMode` if it is
shared.

Two warpgroups (one where a tile has 64 keys) compute 64 keys each and synchronize where dS is complete: at head
dimension 64 once for 128 queries, which they compute in two subtiles. Other warps load, add dQ, and store dK and dV,
see `backward.warps`. A work tile is a key tile with all queries that see it; a program has one, or is persistent. Past
head dimension 128 the registers of both warpgroups hold dK and dV of only 64 keys: they have the same keys and compute
half of the columns of each product. Both then need all of P and dS, which pass through shared memory with a barrier
each.
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
    QueryStages,
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
    bias_of_tile,
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
    """Compile-time parameters of the kernel, each a gl.constexpr; `BackwardConfig` explains most."""

    BLOCK_M: Any
    BLOCK_N: Any
    BLOCK_D: Any
    BLOCK_DV: Any  # columns of V and dO: fewer than BLOCK_D only at 256, see `config.value_width`
    COLS_OF_QK: Any  # columns of tiles that Q·Kᵀ multiplies, see `config.depth`
    COLS_OF_V: Any  # and dO·Vᵀ
    COLS_OF_DQ: Any  # columns of dQ, or of its second part, see `config.columns_of_dq`
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
    WARPS: Any  # computing warps
    ELEMENTS: Any  # batch elements of a program in `batched`, else 1
    SHARES_KEYS: Any  # both warpgroups have the same keys, and half of the columns each
    LOADING_REGISTERS: Any
    COMPUTING_REGISTERS: Any  # of the batched CTA
    BIAS: Any  # "matrix", "cols" if it varies along the keys only, or "none", also if it is constant along the keys
    BIAS_APART: Any  # the bias and dBias have another dtype than dS, which has its own tile
    BIAS_BATCH: Any  # see `Problem.bias_batch`
    BIAS_GROUP: Any  # query heads that share a bias
    RELATIVE: Any  # relative position bias, see `backward.relative`
    RANGE_LO: Any  # some visible pairs have a distance below those with an entry
    RANGE_HI: Any  # or above
    SORTED: Any  # query tiles outside, across and inside the range have a loop each
    TOEPLITZ: Any  # as in the forward, see `backward.toeplitz`
    TOEPLITZ_BATCH: Any
    TOEPLITZ_GROUP: Any
    FAR_LO: Any
    FAR_HI: Any
    UNDERFLOWS: Any
    DTOEPLITZ: Any  # its gradient is required
    DBIAS_SUMS: Any  # sums that "accumulate" adds to, see `config.dbias_sums`
    ZEROES_DBIAS: Any  # programs zero dBias of later groups
    GROUP_BROADCASTS: Any  # query heads of a program share a bias
    DBIAS: Any  # the value of a `DBiasMode`
    MASK: Any  # a mask, preprocessed by `mask_kernels`
    HIDES_KEYS: Any  # batched, instead of MASK: the mask is the same for all queries, see `key_mask`
    MASK_BATCH: Any  # as for the bias
    MASK_GROUP: Any
    LONGEST_FIRST: Any  # work tiles in the order of `mask_kernels.longest_first_kernel`
    MASK_ROWS: Any  # the mask differs between queries
    GROUP_PROGRAMS: Any  # programs that share a bias and run side by side
    SUM_BYTES: Any  # shared memory for the reduction of dBias
    ADDS: Any  # more programs than a group share a bias
    ORDERED: Any  # deterministic: reduce-adds have a fixed order
    DEFERRED_RELEASE: Any  # an added tile of dQ counts one step later
    RAGGED: Any  # the last key tile reaches past the end of the keys
    HIDES_END: Any  # keys past the end need a comparison of their own
    HIDES: Any  # some pairs may be hidden: non-finite K and V may have to be zeroed
    HEAD_SWIZZLE: Any  # see `backward.scheduler.head_and_tile`
    KEY_STAGES: Any
    VALUE_STAGES: Any  # if fewer than KEY_STAGES, dV leaves through dQ's shared memory, see `backward.warps`
    DYNAMIC: Any  # persistent programs take the next free work tile; else one each
    ZEROED_BY_TILE: Any  # packed batch: `BackwardSizes.zeroed` counts work tiles, not heads, see `zero_ahead`
    MENDS: Any  # the LSE is float64: dO of some query tiles is read from ``mended``
    PACKED: Any  # packed batch: work tiles are listed, see `gluon.varlen`


class Given(NamedTuple):
    """Optional pointers: the seed of dropout and a tile list, see `BackwardOperands`."""

    seed: Any
    tile_list: Any


class BackwardOperands(NamedTuple):
    """Operands of the kernel, TMA descriptors unless noted.

    stats: LSE and −delta of each query tile, one after the other.
    dq: dq_accum, a pointer unless dQ leaves by TMA; dQ itself with DQ_STORED.
    bias: None if `BackwardConstants.BIAS` is "none", a `Strided` for "cols".
    dbias: for "cols" a pointer, float32 (B, H, N); if DBIAS is "reduce" the dS buffer of `DbiasTiles`.
    bits: of a mask, see `mask_kernels`; None without one.
    mended: see `gluon.preprocess.preprocess_kernel`; None unless MENDS.
    tile_list: of a mask or a packed batch; with UNDERFLOWS the reach of each key/value head, see `underflow`."""

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
    mended: Any


class TileIndices(NamedTuple):
    """Pipeline of work tile indices for `gluon.scheduler.next_tile_index` and `hand_out_tile_index`."""

    tile_indices: Any


class BackwardShared(NamedTuple):
    """Shared memory of a work tile; ABSENT for what it does without."""

    k: Any
    v: Any
    slot: Any  # of K and V, if there are two
    k_operand: Any  # see `m_subtiles.operand`
    v_operand: Any
    p: Any  # if warpgroups share the keys
    ds: Any  # if dS does not overwrite the bias
    dbias: Any  # if a softcap makes it differ from dS
    added: Any  # a bias that varies along the keys only
    ds_pipeline: Any  # batched: barriers of dS, which other warps read too
    hiding: Any  # batched: keys and queries of the step that hides keys, see `key_mask`


class BackwardState(NamedTuple):
    """State carried from one query tile to the next."""

    dk: Any
    dv: Any
    s: Any  # K·Qᵀ of the next tile, if issued ahead
    start: Any  # of the next tile, see `start_of`
    lse: Any  # of the next tile, if K·Qᵀ is issued ahead
    sums: Any  # of dS over the queries; `FarSums` for a Toeplitz bias


@gluon.jit
def bwd_one_m_block(
    state, x, rows, dq_pipeline, shared, words, step, steps, work_tile, h, m, kind, terms, sizes, c,
    toeplitz=None, NEAR: gl.constexpr = False, RANGE: gl.constexpr = ANY,
):  # fmt: skip
    """Compute one query tile's share of every gradient, and return the `BackwardState` for the next.

    words: the `Stream` of dropout, or None. toeplitz: `diagonal_of` that bias if NEAR, else its `far_line`.
    RANGE: see `backward.relative.part_name`.

    With two subtiles, the softmax of the first overlaps K·Qᵀ of the second, its dV the softmax of the second, and its
    dK dS of the second."""
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
    do = rows.do.index(do_slot).reshape([c.BLOCK_M, c.BLOCK_DV])
    if c.ELEMENTS > 1:
        ds_slot = slot_of(shared.ds_pipeline, step)
        tile = shared.ds.index(ds_slot)
    elif c.BIAS == "matrix" and not c.BIAS_APART:
        tile = rows.bias.index(slot)  # dS overwrites the bias, which has been read
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

    # QK of the first subtile, unless issued ahead, and its dP
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

        # softmax, overlapped with dP
        if c.TOEPLITZ == "line" and not NEAR:
            p, slope = on_line(s, lse, toeplitz, corner, terms, c), 1.0
        else:
            p, slope = probabilities(s, start, lse, shared, terms, c)
        p = visible(p, rows.bits, slot, kind, work_tile, m0 + i * c.SUBTILE_M, terms, sizes, c)
        if words is not None:
            p = signed_by_dropout(p, words, m0 + i * c.SUBTILE_M, work_tile.n0, terms)
        if c.SHARES_KEYS:
            # The last reader of P's memory, dV of the previous step, ended before the last barrier of the warpgroups.
            p_queries = shared.p.index(only_slot(c)).reshape([c.BLOCK_M, c.BLOCK_N])
            p_queries.permute((1, 0)).store(kept_of(p, words, DTYPE))
            warps_barrier()
            fence_async_shared()
            # dV queued behind dP, and overlapped with dS
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
            # dV, overlapped with dS
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
        if i + 1 < c.M_SUBTILES and READS:  # not earlier: registers are full
            s_pending = begin(start_of_words(toeplitz, corner - (i + 1) * c.SUBTILE_M, c), rows, shared, step, i + 1,
                              terms, c, True)  # fmt: skip
            lse = lse_of(rows, step, i + 1, c)
            s, dp_pending = warpgroup_mma_wait(0, deps=(s_pending, dp_pending))
        elif i + 1 < c.M_SUBTILES:
            if words is not None:  # not earlier: registers are full
                next_lse = lse_of(rows, step, i + 1, c)
            start, lse = next_start, next_lse
            s = warpgroup_mma_wait(2, deps=(s_pending,))
    # The async proxy reads dS next; the fence follows the barrier, where there is less left to wait for. It also orders
    # this step's generic loads (LSE, delta, mask bits; the bias or the LSE that the previous step loaded ahead) before
    # the refill of their slot.
    warps_barrier()
    fence_async_shared()
    if c.ELEMENTS > 1:  # dS is stored, and all warps have read the bias
        mbarrier.arrive(shared.ds_pipeline.full.index(ds_slot), count=1)
        release(rows.bias_pipeline, slot_of(rows.bias_pipeline, step))
    bias_b = bias_of_tile(work_tile, sizes, c)
    if c.DBIAS == "store":
        tma_store(x.dbias, [bias_b, h // c.BIAS_GROUP, m0, work_tile.n0], dbias_tile)
    elif c.DBIAS == "accumulate":
        tma_add(x.dbias, [first_of_sum(work_tile, sizes, c) + bias_b, h // c.BIAS_GROUP, m0, work_tile.n0], dbias_tile)
    elif c.DBIAS == "reduce":
        place = step_of(m, h - work_tile.hk * sizes.group, work_tile)
        tma_store(x.dbias, [place_of(sizes, c), place, 0, 0], dbias_tile)
    elif ADDS:
        let_out(x.dbias, rows.bias, slot, bias_b, h // c.BIAS_GROUP, m, work_tile, terms, c, RANGE)

    # dQ, dK and the next QK; of two parts of dQ the first leaves during dK, the second during that QK
    dq_pending = begin_dq(ds_queries, shared, 0, c)
    if c.SHARES_KEYS:
        dk = warpgroup_mma(ds_queries.permute((1, 0)), q, dk, is_async=True)
    else:
        dk = warpgroup_mma(ds_operand, subtile_of(q, c.M_SUBTILES - 1, c), dk, is_async=True)
    if c.DQ_PARTS == 2:
        rest_pending = begin_dq(ds_queries, shared, 1, c)
    elif c.AHEAD:
        start, s_pending, lse = begin_ahead(rows, shared, step + 1, steps, next_corner(m, work_tile, c), terms, c)
    BEHIND: gl.constexpr = 2 if c.AHEAD else 1  # products issued after dQ, or its first part
    if DO_APART:  # the next dO loads during the rest of this step
        dv = warpgroup_mma_wait(BEHIND + 1, deps=(dv,))
        release(rows.do_pipeline, do_slot)
        dq = warpgroup_mma_wait(BEHIND, deps=(dq_pending,))
    else:
        dv, dq = warpgroup_mma_wait(BEHIND, deps=(dv, dq_pending))
    release_part(dq, x, dq_pipeline, tile_of_head, uses_of_slot(step, shared, c), 0, terms, c)
    if c.DQ_PARTS == 2:  # the next QK, now that the registers of the first part are free
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
        elif BIASED:  # the next bias, during dK
            start = first_start_of(rows, step + 1, step + 1 < steps, next_corner(m, work_tile, c), terms, c, RANGE)
            border(steps)
            dk, start = warpgroup_mma_wait(0, deps=(dk, start))
        else:
            dk = warpgroup_mma_wait(0, deps=(dk,))
        if LEAVES:
            tma.store_wait(0)  # dBias has left shared memory
        release(rows.pipeline, slot)  # waits for all warps, so a single tile of dS has been read too
    if not c.AHEAD:
        s, lse = ABSENT, ABSENT
    return BackwardState(dk, dv, s, start, lse, sums)


@gluon.jit
def compute_work_tile(tile_index, nth, step, x, rows, keys, values, dq_pipeline, shared, counts, terms, sizes, c):
    """Compute dK, dV, dBias and the share of dQ of the ``nth`` work tile; return the steps done."""
    DTYPE: gl.constexpr = x.k.dtype
    KEYS: gl.constexpr = accumulator(c.BLOCK_N, c.BLOCK_D, c.WARPS)
    work_tile = work_tile_at(tile_index, x, terms, sizes, c)
    counters = counters_at(counts, sizes, c)
    VALUES: gl.constexpr = accumulator(c.BLOCK_N, c.BLOCK_DV, c.WARPS)
    dk, dv = gl.zeros([c.BLOCK_N, c.BLOCK_D], gl.float32, KEYS), gl.zeros([c.BLOCK_N, c.BLOCK_DV], gl.float32, VALUES)
    slot = slot_of(keys, nth)
    v_slot = slot_of(values, nth)
    k_tile = shared.k.index(slot).reshape([c.BLOCK_N, c.BLOCK_D])
    v_tile = shared.v.index(v_slot).reshape([c.BLOCK_N, c.BLOCK_DV])
    if not c.DQ_BY_TMA and c.ELEMENTS == 1:  # else another warp waits
        wait_zeroed(tile_index, work_tile, x, counters, sizes, c)
    if c.DBIAS == "reduce":
        earlier = tile_index // c.GROUP_PROGRAMS - sizes.ds_buffer_groups
        if earlier >= 0:  # it used this program's place in the dS buffer
            wait_count(counters.summed + earlier, c.GROUP_PROGRAMS)
    elif c.ZEROES_DBIAS:
        wait_dbias_zeroed(tile_index, counters, sizes, c)
    wait_full(keys, slot, use_of(keys, nth))
    wait_full(values, v_slot, use_of(values, nth))
    if c.HIDES:
        drop_what_is_not_finite(k_tile, c.BLOCK_D, c)
        drop_what_is_not_finite(v_tile, c.BLOCK_DV, c)
        hide_keys(x, shared, work_tile, sizes, c)
        fence_async_shared()
    warps_barrier()  # Triton: else it inserts one in the loop, between the setup of barriers and their use
    k_operand, v_operand = operand(k_tile, c.K_IN_REGISTERS, c), operand(v_tile, c.V_IN_REGISTERS, c)
    shared = BackwardShared(
        shared.k, shared.v, slot, k_operand, v_operand, shared.p, shared.ds, shared.dbias, shared.added,
        shared.ds_pipeline, shared.hiding,
    )  # fmt: skip

    steps = step + steps_of(x, work_tile, sizes, c)
    corner = corner_of(work_tile.end - 1, work_tile, c)
    s, start, lse = ABSENT, ABSENT, ABSENT  # unless issued ahead
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
            if c.TOEPLITZ == "number" and (c.FAR_LO or c.FAR_HI) and c.M_SUBTILES > 1:  # only where this does not spill
                prefetch_near(diagonal, c.BLOCK_M, c.WARPS, terms, sizes, c)
            count, listed = tile_list_of(x.tile_list, work_tile, h, sizes, c)
            begin = 0
            for part in gl.static_range(3):  # below, near, above
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
        else:  # a loop each for partial and full tiles
            if terms.HAS_LO:
                for i in range(work_tile.end - work_tile.full_end):
                    m = work_tile.end - 1 - i
                    state = bwd_one_m_block(
                        state, x, rows, dq_pipeline, shared, words, step, steps, work_tile, h, m, 1, terms, sizes, c
                    )
                    step += 1
            end = work_tile.full_end
            if c.SORTED:  # relative position bias: queries beyond all entries first
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

    # dK and dV leave through the shared memory of K and V, or dV through that of dQ once the last dQ has left it
    warps_barrier()  # the other warpgroup may still read K and V
    if c.VALUE_STAGES < c.KEY_STAGES:
        k_tile.store((state.dk * terms.scale).to(DTYPE))
        mbarrier.wait(dq_pipeline.empty.index(0), (uses_of_slot(step, shared, c) & 1) ^ 1)
        dv_tile(x, dq_pipeline, c).reshape([c.BLOCK_N, c.BLOCK_DV]).store(state.dv.to(DTYPE))
    else:
        v_tile.store(state.dv.to(DTYPE))
        k_tile.store((state.dk * terms.scale).to(DTYPE))
    signal_stored(dq_pipeline, slot, c)
    return step


@gluon.jit
def compute(x, rows, keys, values, dq_pipeline, shared, tile_indices, counts, terms, sizes, c):
    """Compute all products: the role of the two warpgroups."""
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
    q, k, v, do, bias, stats, dq, dk, dv, dbias, given, bits, mended, pieces, shared_dbias, counts, lists, terms, sizes,
    c,
):  # fmt: skip
    """Compute dK, dV, dBias and dq_accum = dQ / scale. For the first ten arguments see `BackwardOperands`.

    pieces, shared_dbias, lists: see `DbiasTiles`; unless DBIAS is "reduce", ``pieces`` is a pointer to dq_accum.
    counts: see `backward.scheduler.Counters`."""
    wait_for_previous()
    x = BackwardOperands(q, k, v, do, bias, stats, dq, dk, dv, dbias, given.seed, bits, given.tile_list, mended)
    dbias_tiles = shared_dbias if c.ZEROES_DBIAS else pieces
    if c.DBIAS == "reduce":
        dbias_tiles = dbias_tiles_of(pieces, shared_dbias, lists, c)
    keys = new_pipeline(k, c.KEY_STAGES, c.BLOCK_N, c.BLOCK_D, 1)
    values = new_pipeline(v, c.VALUE_STAGES, c.BLOCK_N, c.BLOCK_DV, 1)
    SCORES: gl.constexpr = tile_layout(c.BLOCK_M, c.BLOCK_N, q.dtype)
    pipeline = new_pipeline(q, c.STAGES, c.BLOCK_M, c.BLOCK_D, 1)
    if c.DO_STAGES != c.STAGES:
        do_pipeline = new_pipeline(do, c.DO_STAGES, c.BLOCK_M, c.BLOCK_DV, 1)
        do_slots = do_pipeline.slots
    else:
        do_pipeline = Pipeline(ABSENT, ABSENT, ABSENT)
        do_slots = new_tiles(do, c.DO_STAGES, c.BLOCK_M, c.BLOCK_DV)
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
    rows = QueryStages(pipeline, do_slots, stats_slots, bias_slots, bits_slots, do_pipeline, ABSENT)
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
    # The roles after the first have four warps together, whose registers are allocated anyway: an idle role costs none.
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
