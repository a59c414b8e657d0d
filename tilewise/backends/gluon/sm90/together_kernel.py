"""The forward of small heads beside a bias tile that no band cuts, with fewer instructions and meetings.

There a tile is mostly softmax, and the time of one is the number of its instructions and how often its warps wait for
each other. So K, V and the bias of a tile of keys come together, behind one barrier, and are left together, at a named
barrier where nobody waits but who loads. Warpgroups take no turns: a multiprocessor has four, and while one waits for
its products the others compute. Q is scaled once, in two parts, so that the scores need no scale of their own and the
bias no multiplication. Keys that a mask hides, or that are past the end, are one more step of that product, see
`key_mask`.
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
from tilewise.backends.gluon.packed import box_of
from tilewise.backends.gluon.pipeline import (
    FIRST_NAMED_BARRIER,
    fill_at,
    new_ring,
    new_tiles,
    release,
    slot_of,
    use_of,
    wait_full,
)
from tilewise.backends.gluon.score import widened
from tilewise.backends.gluon.sm90.bias_tiles import bias_box
from tilewise.backends.gluon.sm90.forward_kernel import Operands, finish
from tilewise.backends.gluon.sm90.key_mask import hidden_keys, new_step_tiles, store_ones, store_step
from tilewise.backends.gluon.sm90.softmax import online_softmax, rescaled, rounded, sums_of_rows, times_v
from tilewise.backends.gluon.sm90.wgmma import accumulator
from tilewise.backends.gluon.tile_scheduler import entry_at, work_tile_at

STAGES = gl.constexpr(3)  # of the ring; two programs on a multiprocessor have room for no more


class Shared(NamedTuple):
    """Tiles in shared memory."""

    q: Any  # a ring
    low: Any  # for each warpgroup, see `in_two_parts`
    k: Any  # STAGES tiles of each of these
    v: Any
    bias: Any  # for each warpgroup
    hidden: Any  # keys of these, see `key_mask`, where some may be
    ones: Any
    full: Any  # a barrier for each stage
    o: Any


class Place(NamedTuple):
    """In the ring."""

    slot: Any
    phase: Any  # of the slot's barrier


class Rows(NamedTuple):
    """What a warpgroup hands on from one tile of keys to the next."""

    m: Any  # running maximum of each row
    l: Any  # noqa: E741  (running sum of each thread of a row)
    o: Any  # all but the last tile of keys have been added
    p: Any  # of the last


@gluon.jit
def following(place):
    last = place.slot == STAGES - 1
    return Place(gl.where(last, 0, place.slot + 1), gl.where(last, place.phase ^ 1, place.phase))


@gluon.jit
def leave(slot, c):
    """Give a slot back; a warp does not wait for the others."""
    gl.inline_asm_elementwise(
        "{ .reg .u32 id; fence.proxy.async.shared::cta; "
        f"add.u32 id, $1, {FIRST_NAMED_BARRIER}; bar.arrive id, {128 * c.WARPGROUPS + 32}; mov.b32 $0, 0; }}",
        "=r,r", [slot], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def wait_left(slot, c):
    """Wait, in a role of one warp, until all warpgroups have left a slot."""
    gl.inline_asm_elementwise(
        "{ .reg .u32 id; "
        f"add.u32 id, $1, {FIRST_NAMED_BARRIER}; bar.sync id, {128 * c.WARPGROUPS + 32}; mov.b32 $0, 0; }}",
        "=r,r", [slot], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def load(x, shared, terms, sizes, c):
    """The role of one warp: Q, and the tiles of K, V and the bias."""
    BYTES: gl.constexpr = x.k.block_type.nbytes + x.v.block_type.nbytes + c.WARPGROUPS * x.bias.block_type.nbytes
    CUTS: gl.constexpr = c.MASK or c.RAGGED
    place = Place(gl.to_tensor(0), gl.to_tensor(0))
    step = 0
    t = 0
    tile_index = gl.program_id(0)
    while tile_index < sizes.tiles:
        tile = work_tile_at(tile_index, x, terms, sizes, c)
        hk = tile.h // sizes.group
        b = tile.b if c.BIAS_BATCH else 0
        for w in gl.static_range(c.WARPGROUPS):
            at = box_of(tile.seq.first_query, tile.seq.queries, tile.b, tile.h, tile.row0 + 64 * w, c)
            fill_at(shared.q, slot_of(shared.q, t, w, c.WARPGROUPS), use_of(shared.q, t, c.WARPGROUPS), x.q, at)
        for i in range(tile.count):
            n = entry_at(i, tile, c).n
            n0 = n * c.BLOCK_N
            if CUTS:
                hidden = hidden_keys(x, tile, n, sizes, c)
            if step >= STAGES:
                wait_left(place.slot, c)
            if CUTS:
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
            tma_load(x.v, at, full, shared.v.index(place.slot))
            place = following(place)
            step += 1
        tile_index += gl.num_programs(0)
        t += 1


@gluon.jit
def in_two_parts(q, low, terms, c):
    """Scale Q where it lies; what rounding leaves of it goes to ``low``: the scores take the sum of both products."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [256 // c.BLOCK_D, c.BLOCK_D // 8], [4, 1], [1, 0])
    KIND: gl.constexpr = "f16x2" if gl.float16 == q.dtype else "bf16x2"
    scaled = q.load(L).to(gl.float32) * terms.scale
    high = gl.inline_asm_elementwise(  # two at a time: a single one, which is read again, takes 16 times as long
        f"cvt.rn.{KIND}.f32 $0, $2, $1;", "=r,f,f", [scaled], dtype=q.dtype, is_pure=True, pack=2
    )
    q.store(high)
    low.store((scaled - high.to(gl.float32)).to(q.dtype))
    fence_async_shared()
    warps_barrier()


@gluon.jit
def attend(q, low, rows, x, shared, before, here, more, terms, c, WARPGROUP: gl.constexpr, FIRST: gl.constexpr):
    """P·V of the tile of keys before, unless this is the FIRST, and Q·Kᵀ and softmax of this one, which has come.

    more: whether the next tile is one of the same queries, for which it waits.
    """
    S: gl.constexpr = accumulator(64, c.BLOCK_N)
    if not FIRST:
        v = shared.v.index(before.slot).reshape([c.BLOCK_N, c.BLOCK_DV])
        o_pending = times_v(rows.p, v, rows.o, c)
    start = widened(shared.bias.index(here.slot * c.WARPGROUPS + WARPGROUP).reshape([64, c.BLOCK_N]).load(S))
    k = shared.k.index(here.slot).reshape([c.BLOCK_N, c.BLOCK_D]).permute((1, 0))
    s_pending = warpgroup_mma(q, k, start, is_async=True)
    s_pending = warpgroup_mma(low, k, s_pending, is_async=True)
    if c.MASK or c.RAGGED:
        s_pending = warpgroup_mma(shared.ones, shared.hidden.index(here.slot).permute((1, 0)), s_pending, is_async=True)
    if FIRST:
        s = warpgroup_mma_wait(0, deps=(s_pending,))
        o = rows.o
    else:
        s, o = warpgroup_mma_wait(0, deps=(s_pending, o_pending))
        leave(before.slot, c)
    # Triton has the warps meet before they wait for a barrier in memory: here, where a product has held up all of them.
    after = following(here)
    mbarrier.wait(shared.full.index(after.slot), after.phase, pred=more)
    p, m_i, l_i, alpha = online_softmax(s, rows.m, rows.l, terms.exponent, False, True, lowest=-3.0e38)
    o = rescaled(o, alpha, 0, False)
    return Rows(m_i, l_i, o, rounded(p, None, x.q.dtype, terms, c))


@gluon.jit
def compute(x, shared, lse, terms, sizes, c, WARPGROUP: gl.constexpr):
    """The role of a warpgroup: O and the LSE of its 64 queries of each tile."""
    O: gl.constexpr = accumulator(64, c.BLOCK_DV)  # noqa: E741
    ROWS: gl.constexpr = gl.SliceLayout(1, accumulator(64, c.BLOCK_N))
    low = shared.low.index(WARPGROUP).reshape([64, c.BLOCK_D])
    place = Place(gl.to_tensor(0), gl.to_tensor(0))
    t = 0
    tile_index = gl.program_id(0)
    while tile_index < sizes.tiles:
        tile = work_tile_at(tile_index, x, terms, sizes, c)
        slot = slot_of(shared.q, t, WARPGROUP, c.WARPGROUPS)
        q = shared.q.slots.index(slot).reshape([64, c.BLOCK_D])
        wait_full(shared.q, slot, use_of(shared.q, t, c.WARPGROUPS))
        in_two_parts(q, low, terms, c)
        m_i = gl.full([64], -float("inf"), gl.float32, ROWS)
        none = gl.zeros([64, c.BLOCK_N], gl.float32, accumulator(64, c.BLOCK_N))
        rows = Rows(m_i, sums_of_rows(none, True), gl.zeros([64, c.BLOCK_DV], gl.float32, O), 0)
        mbarrier.wait(shared.full.index(place.slot), place.phase)
        rows = attend(q, low, rows, x, shared, place, place, tile.count > 1, terms, c, WARPGROUP, True)
        for i in range(1, tile.count):
            before = place
            place = following(place)
            more = i + 1 < tile.count
            rows = attend(q, low, rows, x, shared, before, place, more, terms, c, WARPGROUP, False)

        # PV of the first tile of keys
        release(shared.q, slot)
        v = shared.v.index(place.slot).reshape([c.BLOCK_N, c.BLOCK_DV])
        o = warpgroup_mma_wait(0, deps=(times_v(rows.p, v, rows.o, c),))
        leave(place.slot, c)
        place = following(place)
        l_i = gl.convert_layout(gl.sum(rows.l, axis=1), ROWS, assert_trivial=True)
        o = finish(rows.m, l_i, o, x, lse, tile, terms, sizes, c, WARPGROUP)

        # O leaves by TMA, through shared memory
        stage = shared.o.index(WARPGROUP)
        tma.store_wait(0)  # of the tile before
        stage.reshape([64, c.BLOCK_DV]).store(o.to(x.q.dtype))
        fence_async_shared()
        row = tile.row0 + 64 * WARPGROUP
        tma_store(x.o, box_of(tile.seq.first_query, tile.seq.queries, tile.b, tile.h, row, c), stage)
        tile_index += gl.num_programs(0)
        t += 1
    tma.store_wait(0)


@gluon.jit
def together_kernel(q, k, v, bias, sink, seed, bits, tile_list, o, o_low, lse, tile_count_semaphore, terms, sizes, c):
    """O and the LSE; the arguments of `forward_kernel`, some of which are None."""
    x = Operands(q, k, v, bias, sink, seed, bits, tile_list, o, o_low, tile_count_semaphore)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
    hidden, ones = None, None
    if c.MASK or c.RAGGED:
        hidden = new_step_tiles(x.q.dtype, STAGES, c.BLOCK_N)
        ones = new_step_tiles(x.q.dtype, 1, 64).index(0)
        store_ones(ones, 4)
    shared = Shared(
        new_ring(q, c.Q_STAGES * c.WARPGROUPS, 64, c.BLOCK_D, 1),
        new_tiles(q, c.WARPGROUPS, 64, c.BLOCK_D),
        new_tiles(k, STAGES, c.BLOCK_N, c.BLOCK_D),
        new_tiles(v, STAGES, c.BLOCK_N, c.BLOCK_DV),
        new_tiles(bias, STAGES * c.WARPGROUPS, 64, c.BLOCK_N),
        hidden,
        ones,
        full,
        new_tiles(o, c.WARPGROUPS, 64, c.BLOCK_DV),
    )
    fence_async_shared()
    gl.warp_specialize(
        [
            (compute, (x, shared, lse, terms, sizes, c, 0)),
            (compute, (x, shared, lse, terms, sizes, c, 1)),
            (load, (x, shared, terms, sizes, c)),
        ],
        [4, 1],
        [c.COMPUTING_REGISTERS, c.LOADING_REGISTERS],
    )
