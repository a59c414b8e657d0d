"""Forward for small heads with a bias tile and no window, with fewer instructions and barriers.

At small heads a tile is mostly softmax: its time depends on the number of instructions and on how often warps wait for
each other. So K, V and the bias of a key tile are loaded together, behind one barrier, and released together, at a
named barrier where only the loading warp waits. Warpgroups do not take turns: a multiprocessor has four, and while one
waits for its products the others compute.

The number subtracted from scores need not be a row's maximum, only large enough that no exponential overflows. It stays
a maximum of the first key tile until a sum of exponentials shows that scores have grown by more than ten; other tiles
compute no maxima and do not rescale O. One multiply-add each, hidden by the exponentials, applies scale and bias. Keys
that a mask or the end of the keys hides are one more step of the product, see `key_mask`.
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

from tilewise.backends.gluon.compat import tma_load, tma_store, warps_barrier
from tilewise.backends.gluon.pipeline import (
    FIRST_NAMED_BARRIER,
    fill_at,
    new_pipeline,
    new_tiles,
    release,
    slot_of,
    use_of,
    wait_full,
)
from tilewise.backends.gluon.scheduler import entry_at, work_tile_at
from tilewise.backends.gluon.score import bias_of, widened
from tilewise.backends.gluon.sm90.common.key_mask import hidden_keys, new_step_tiles, store_ones, store_step
from tilewise.backends.gluon.sm90.common.softmax import (
    declare_exceeds,
    exceeds,
    online_softmax,
    rescaled,
    rounded,
    sums_of_rows,
    times_v,
)
from tilewise.backends.gluon.sm90.common.wgmma import accumulator
from tilewise.backends.gluon.sm90.forward.bias import bias_box
from tilewise.backends.gluon.sm90.forward.kernel import ForwardOperands, finish
from tilewise.backends.gluon.varlen import box_of

STAGES = gl.constexpr(3)  # of K and the bias; with two programs per multiprocessor no more fit
# One more, because P·V is a tile later: K and the bias of a tile are released with V of the previous tile. A power of
# two.
V_STAGES = gl.constexpr(4)
LOWEST_BASE = gl.constexpr(-3.0e38)  # of `online_softmax`
MOST_MAXIMUM = gl.constexpr(2.0e38)  # of `finish`: times log2(e) it is above LOWEST_BASE


class SmallHeadShared(NamedTuple):
    """Tiles in shared memory."""

    q: Any  # a pipeline
    k: Any  # STAGES tiles
    v: Any  # V_STAGES tiles
    bias: Any  # STAGES tiles per warpgroup
    hidden: Any  # masked keys of STAGES tiles, see `key_mask`, if there may be some
    ones: Any
    full: Any  # a barrier per stage
    o: Any


class StagePlace(NamedTuple):
    """Position of a tile in the pipelines."""

    slot: Any
    phase: Any  # of the slot's barrier
    v: Any  # the slot of V


class HeadRows(NamedTuple):
    """State of a warpgroup between key tiles."""

    m: Any  # subtracted from each row's scores: a maximum of some of them
    base: Any  # m in powers of two
    l: Any  # noqa: E741  (running sum of each thread of a row)
    o: Any  # without the last key tile
    p: Any  # P of the last key tile


@gluon.jit
def following(place):
    last = place.slot == STAGES - 1
    v = (place.v + 1) & (V_STAGES - 1)
    return StagePlace(gl.where(last, 0, place.slot + 1), gl.where(last, place.phase ^ 1, place.phase), v)


@gluon.jit
def leave(slot, c):
    """Release a slot, and that of V of the previous tile; a warp does not wait for the others."""
    gl.inline_asm_elementwise(
        "{ .reg .u32 id; fence.proxy.async.shared::cta; "
        f"add.u32 id, $1, {FIRST_NAMED_BARRIER}; bar.arrive id, {128 * c.WARPGROUPS + 32}; mov.b32 $0, 0; }}",
        "=r,r", [slot], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def wait_left(slot, c):
    """Wait until all warpgroups have released a slot; called by a role of one warp."""
    gl.inline_asm_elementwise(
        "{ .reg .u32 id; "
        f"add.u32 id, $1, {FIRST_NAMED_BARRIER}; bar.sync id, {128 * c.WARPGROUPS + 32}; mov.b32 $0, 0; }}",
        "=r,r", [slot], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def load(x, shared, terms, sizes, c):
    """Load Q, and the tiles of K, V and the bias; the role of one warp."""
    BYTES: gl.constexpr = x.k.block_type.nbytes + x.v.block_type.nbytes + c.WARPGROUPS * x.bias.block_type.nbytes
    place = StagePlace(gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0))
    step = 0
    t = 0
    tile_index = gl.program_id(0)
    while tile_index < sizes.tiles:
        tile = work_tile_at(tile_index, x, terms, sizes, c)
        hk = tile.h // sizes.group
        b = bias_of(tile.b, sizes.batch, c)
        for w in gl.static_range(c.WARPGROUPS):
            at = box_of(tile.seq.first_query, tile.seq.queries, tile.b, tile.h, tile.row0 + 64 * w, c)
            fill_at(shared.q, slot_of(shared.q, t, w, c.WARPGROUPS), use_of(shared.q, t, c.WARPGROUPS), x.q, at)
        for i in range(tile.count):
            n = entry_at(i, tile, c).n
            n0 = n * c.BLOCK_N
            if c.HIDES_KEYS:
                hidden = hidden_keys(x, tile, n, sizes, c)
            if step >= STAGES:
                wait_left(place.slot, c)
            if c.HIDES_KEYS:
                store_step(shared.hidden.index(place.slot), hidden)
                fence_async_shared()
                warps_barrier()
            full = shared.full.index(place.slot)
            mbarrier.expect(full, BYTES)
            at = box_of(tile.seq.first_key, tile.seq.keys, tile.b, hk, n0, c)
            tma_load(x.k, at, full, shared.k.index(place.slot))
            for w in gl.static_range(c.WARPGROUPS):
                at_bias = bias_box(tile, b, tile.row0 + 64 * w, n0, terms, c)
                tma_load(x.bias, at_bias, full, shared.bias.index(place.slot * c.WARPGROUPS + w))
            tma_load(x.v, at, full, shared.v.index(place.v))
            place = following(place)
            step += 1
        tile_index += gl.num_programs(0)
        t += 1


@gluon.jit
def with_maxima(s, rows, o, x, terms, c, FIRST: gl.constexpr):
    """Compute the softmax of a key tile with its maxima, which are subtracted from scores from here on."""
    p, m_i, l_i, alpha, _, _ = online_softmax(s, rows.m, rows.l, terms.exponent, False, True, lowest=LOWEST_BASE)
    if not FIRST:
        o = rescaled(o, alpha, 0, False)
    # -inf where a row has seen nothing so far: any score exceeds it.
    base = gl.where(m_i == -float("inf"), m_i, gl.maximum(m_i * terms.exponent, LOWEST_BASE))
    return HeadRows(m_i, base, l_i, o, rounded(p, None, x.q.dtype, terms, c))


@gluon.jit
def mma_one_n_block(q, rows, x, shared, before, here, more, terms, c, WARPGROUP: gl.constexpr, FIRST: gl.constexpr):
    """Compute P·V of the previous key tile, unless FIRST, and Q·Kᵀ and softmax of this one, which is loaded.

    more: the next tile has the same queries; wait for it.
    """
    S: gl.constexpr = accumulator(64, c.BLOCK_N)
    if not FIRST:
        v = shared.v.index(before.v).reshape([c.BLOCK_N, c.BLOCK_DV])
        o_pending = times_v(rows.p, v, rows.o, c)
    k = shared.k.index(here.slot).reshape([c.BLOCK_N, c.BLOCK_D]).permute((1, 0))
    start = gl.zeros([64, c.BLOCK_N], gl.float32, S)
    s_pending = warpgroup_mma(q, k, start, use_acc=False, is_async=True)
    if c.HIDES_KEYS:
        s_pending = warpgroup_mma(shared.ones, shared.hidden.index(here.slot).permute((1, 0)), s_pending, is_async=True)
    bias = shared.bias.index(here.slot * c.WARPGROUPS + WARPGROUP).reshape([64, c.BLOCK_N]).load(S)
    if FIRST:
        s = warpgroup_mma_wait(0, deps=(s_pending,))
        o = rows.o
    else:
        s, o = warpgroup_mma_wait(0, deps=(s_pending, o_pending))
    leave(here.slot, c)
    # Triton synchronizes the warps before they wait for a barrier in memory: do it here, after a product has delayed
    # all.
    after = following(here)
    mbarrier.wait(shared.full.index(after.slot), after.phase, pred=more)
    s = s * terms.scale + widened(bias)
    if FIRST:
        return with_maxima(s, rows, o, x, terms, c, True)
    p = gl.exp2(s * terms.exponent - rows.base[:, None])
    sums = sums_of_rows(p, True)
    found = HeadRows(rows.m, rows.base, rows.l + sums, o, rounded(p, None, x.q.dtype, terms, c))
    if exceeds(sums) != 0:
        found = with_maxima(s, rows, o, x, terms, c, False)
    return found


@gluon.jit
def compute(x, shared, results, terms, sizes, c, WARPGROUP: gl.constexpr):
    """Compute O and the LSE of one warpgroup's 64 queries of each tile; the role of a warpgroup."""
    O: gl.constexpr = accumulator(64, c.BLOCK_DV)  # noqa: E741
    ROWS: gl.constexpr = gl.SliceLayout(1, accumulator(64, c.BLOCK_N))
    place = StagePlace(gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0))
    t = 0
    tile_index = gl.program_id(0)
    while tile_index < sizes.tiles:
        tile = work_tile_at(tile_index, x, terms, sizes, c)
        slot = slot_of(shared.q, t, WARPGROUP, c.WARPGROUPS)
        q = shared.q.slots.index(slot).reshape([64, c.BLOCK_D])
        wait_full(shared.q, slot, use_of(shared.q, t, c.WARPGROUPS))
        m_i = gl.full([64], -float("inf"), gl.float32, ROWS)
        none = gl.zeros([64, c.BLOCK_N], gl.float32, accumulator(64, c.BLOCK_N))
        rows = HeadRows(m_i, m_i, sums_of_rows(none, True), gl.zeros([64, c.BLOCK_DV], gl.float32, O), 0)
        mbarrier.wait(shared.full.index(place.slot), place.phase)
        rows = mma_one_n_block(q, rows, x, shared, place, place, tile.count > 1, terms, c, WARPGROUP, True)
        for i in range(1, tile.count):
            before = place
            place = following(place)
            more = i + 1 < tile.count
            rows = mma_one_n_block(q, rows, x, shared, before, place, more, terms, c, WARPGROUP, False)

        # PV of the first tile of keys
        release(shared.q, slot)
        v = shared.v.index(place.v).reshape([c.BLOCK_N, c.BLOCK_DV])
        o = warpgroup_mma_wait(0, deps=(times_v(rows.p, v, rows.o, c),))
        place = following(place)
        l_i = gl.convert_layout(gl.sum(rows.l, axis=1), ROWS, assert_trivial=True)
        o = finish(rows.m, l_i, o, x, results.lse, tile, terms, sizes, c, WARPGROUP, MOST_MAXIMUM, True)

        # Store O by TMA, through shared memory
        stage = shared.o.index(WARPGROUP)
        tma.store_wait(0)  # of the previous tile
        stage.reshape([64, c.BLOCK_DV]).store(o.to(x.q.dtype))
        fence_async_shared()
        row = tile.row0 + 64 * WARPGROUP
        tma_store(x.o, box_of(tile.seq.first_query, tile.seq.queries, tile.b, tile.h, row, c), stage)
        tile_index += gl.num_programs(0)
        t += 1
    tma.store_wait(0)


@gluon.jit
def small_heads_kernel(
    q, k, v, bias, sink, seed, bits, tile_list, o, o_low, results, tile_count_semaphore, terms, sizes, c
):
    """Compute O and the LSE; the arguments are those of `forward_kernel`, some of them None."""
    x = ForwardOperands(q, k, v, bias, sink, seed, bits, tile_list, o, o_low, tile_count_semaphore)
    declare_exceeds()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
    hidden, ones = None, None
    if c.HIDES_KEYS:
        hidden = new_step_tiles(x.q.dtype, STAGES, c.BLOCK_N)
        ones = new_step_tiles(x.q.dtype, 1, 64).index(0)
        store_ones(ones)
    shared = SmallHeadShared(
        new_pipeline(q, c.Q_STAGES * c.WARPGROUPS, 64, c.BLOCK_D, 1),
        new_tiles(k, STAGES, c.BLOCK_N, c.BLOCK_D),
        new_tiles(v, V_STAGES, c.BLOCK_N, c.BLOCK_DV),
        new_tiles(bias, STAGES * c.WARPGROUPS, 64, c.BLOCK_N),
        hidden,
        ones,
        full,
        new_tiles(o, c.WARPGROUPS, 64, c.BLOCK_DV),
    )
    fence_async_shared()
    gl.warp_specialize(
        [
            (compute, (x, shared, results, terms, sizes, c, 0)),
            (compute, (x, shared, results, terms, sizes, c, 1)),
            (load, (x, shared, terms, sizes, c)),
        ],
        [4, 1],
        [c.COMPUTING_REGISTERS, c.LOADING_REGISTERS],
    )
