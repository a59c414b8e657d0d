"""Hopper kernel of the product: TMA loads, wgmma, persistent programs, one producer warp.

Two warpgroups compute one tile of Y, one above the other, and share B. The producer warp runs ahead of them, across
tiles, by the stages of the pipeline of A and B. C is loaded into its own buffer while the previous tile is computed,
and the accumulator starts from it. Y is stored by TMA while the next tile is computed.
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

from tilewise.backends.gluon.compat import tma_load, tma_store
from tilewise.backends.gluon.pipeline import (
    ABSENT,
    Pipeline,
    fill,
    new_pipeline,
    release,
    release_after_loads,
    slot_of,
    use_of,
    wait_full,
    warp_scheduler_barrier_arrive,
    warp_scheduler_barrier_sync,
    with_barriers,
)
from tilewise.backends.gluon.sm90.common.wgmma import accumulator

WARPGROUPS = gl.constexpr(2)


class HopperGemmSizes(NamedTuple):
    rows: int  # M
    cols: int  # N
    m_tiles: int
    n_tiles: int
    tiles: int  # of all batch elements of Y
    k_tiles: int
    kept1: int  # size of the second batch axis of Y
    summed0: int  # sizes of the batch axes that are summed
    summed1: int


class TileSpread(NamedTuple):
    """Flags per operand and batch axis: 1 if it has the axis, 0 if it has one matrix for the whole axis."""

    a0: int
    a1: int
    b0: int
    b1: int
    c0: int
    c1: int


class HopperGemmConstants(NamedTuple):
    """Compile-time constants of the kernel; every field is a gl.constexpr. See config.HopperConfig for most."""

    ROWS: Any  # rows per warpgroup
    BLOCK_N: Any
    BLOCK_K: Any
    STAGES: Any
    STORE_COLS: Any
    STORE_BUFFERS: Any
    TURNS: Any
    GROUP_M: Any
    COMPUTING_REGISTERS: Any
    LOADING_REGISTERS: Any
    A_BY_ROWS: Any  # A is contiguous along rows, else along columns
    B_BY_ROWS: Any
    C: Any  # axes of Y that C is full along: "matrix", "row", "column", "one"; "none" without C
    C_FIRST: Any  # the accumulator starts from C; otherwise C is added to the product


class Sources(NamedTuple):
    """Descriptors of a, b and y; c is a descriptor or a `Strided`. Built in the kernel: descriptors must be
    arguments."""

    a: Any
    b: Any
    c: Any
    y: Any


class GemmPipelines(NamedTuple):
    """Shared memory and barriers: a and b share b's barriers, c has a buffer per warpgroup, y holds stores."""

    a: Any  # shared memory
    b: Any
    c: Any
    y: Any


class Tile(NamedTuple):
    g0: Any
    g1: Any
    m0: Any
    n0: Any


@gluon.jit
def tile_at(i, sizes, k):
    """Return this program's tile ``i``. Groups of GROUP_M tile rows share A and B in L2."""
    t = gl.program_id(0) + i * gl.num_programs(0)
    count = sizes.m_tiles * sizes.n_tiles
    g = t // count
    t = t % count
    first = t // (k.GROUP_M * sizes.n_tiles) * k.GROUP_M
    height = gl.minimum(sizes.m_tiles - first, k.GROUP_M)
    t = t - first * sizes.n_tiles
    m0 = (first + t % height) * (WARPGROUPS * k.ROWS)
    return Tile(g // sizes.kept1, g % sizes.kept1, m0, t // height * k.BLOCK_N)


@gluon.jit
def work_count(sizes):
    """Return the number of tiles of this program."""
    return gl.cdiv(sizes.tiles - gl.program_id(0), gl.num_programs(0))


@gluon.jit
def load(x, pipelines, sizes, spread, k):
    """Run the producer warp: load C of each tile when the previous one was read, and the steps of A and B."""
    BYTES: gl.constexpr = WARPGROUPS * x.a.block_type.nbytes + x.b.block_type.nbytes
    step = 0
    for t in range(work_count(sizes)):
        tile = tile_at(t, sizes, k)
        if k.C == "matrix":
            for w in gl.static_range(WARPGROUPS):
                fill(pipelines.c, w, t, x.c, tile.g0 * spread.c0, tile.g1 * spread.c1, tile.m0 + w * k.ROWS, tile.n0)
        for r in range(sizes.summed0 * sizes.summed1):
            b0 = tile.g0 + r // sizes.summed1
            b1 = tile.g1 + r % sizes.summed1
            for i in range(sizes.k_tiles):
                slot = slot_of(pipelines.b, step)
                k0 = i * k.BLOCK_K
                full = pipelines.b.full.index(slot)
                mbarrier.wait(pipelines.b.empty.index(slot), (use_of(pipelines.b, step) & 1) ^ 1)
                mbarrier.expect(full, BYTES)
                for w in gl.static_range(WARPGROUPS):
                    m0 = tile.m0 + w * k.ROWS
                    at = [b0 * spread.a0, b1 * spread.a1, m0, k0]
                    if not k.A_BY_ROWS:
                        at = [b0 * spread.a0, b1 * spread.a1, k0, m0]
                    tma_load(x.a, at, full, pipelines.a.index(WARPGROUPS * slot + w))
                at = [b0 * spread.b0, b1 * spread.b1, k0, tile.n0]
                if not k.B_BY_ROWS:
                    at = [b0 * spread.b0, b1 * spread.b1, tile.n0, k0]
                tma_load(x.b, at, full, pipelines.b.slots.index(slot))
                step += 1


@gluon.jit
def issue(acc, pipelines, step, k, USE_ACC: gl.constexpr, WARPGROUP: gl.constexpr):
    """Start the product of one step."""
    slot = slot_of(pipelines.b, step)
    wait_full(pipelines.b, slot, use_of(pipelines.b, step))
    if k.A_BY_ROWS:
        a = pipelines.a.index(WARPGROUPS * slot + WARPGROUP).reshape([k.ROWS, k.BLOCK_K])
    else:
        a = pipelines.a.index(WARPGROUPS * slot + WARPGROUP).reshape([k.BLOCK_K, k.ROWS]).permute((1, 0))
    if k.B_BY_ROWS:
        b = pipelines.b.slots.index(slot).reshape([k.BLOCK_K, k.BLOCK_N])
    else:
        b = pipelines.b.slots.index(slot).reshape([k.BLOCK_N, k.BLOCK_K]).permute((1, 0))
    return warpgroup_mma(a, b, acc, use_acc=USE_ACC, is_async=True)


@gluon.jit
def addend(x, pipelines, tile, sizes, spread, k, COL0: gl.constexpr, COLS: gl.constexpr, WARPGROUP: gl.constexpr):
    """Return COLS columns of C from the tile's column COL0 on, float32, broadcastable to [ROWS, COLS]."""
    ACC: gl.constexpr = accumulator(64, COLS)
    if k.C == "matrix":
        slot = pipelines.c.slots.index(WARPGROUP).reshape([k.ROWS, k.BLOCK_N])
        added = slot.slice(COL0, COLS, dim=1).load(ACC)
    else:
        at = x.c.pointer + gl.cast(tile.g0, gl.int64) * x.c.stride0 + gl.cast(tile.g1, gl.int64) * x.c.stride1
        rows = tile.m0 + WARPGROUP * k.ROWS + gl.arange(0, k.ROWS, gl.SliceLayout(1, ACC))
        cols = tile.n0 + COL0 + gl.arange(0, COLS, gl.SliceLayout(0, ACC))
        if k.C == "row":
            added = gl.load(at + cols.to(gl.int64) * x.c.stride3, mask=cols < sizes.cols, other=0.0)[None, :]
        elif k.C == "column":
            added = gl.load(at + rows.to(gl.int64) * x.c.stride2, mask=rows < sizes.rows, other=0.0)[:, None]
        else:
            added = gl.load(at)
    return added.to(gl.float32)


@gluon.jit
def halves(x):
    """Return the left and right half of an accumulator; the halves are other registers of the same threads."""
    ROWS: gl.constexpr = x.shape[0]
    COLS: gl.constexpr = x.shape[1] // 2
    left, right = x.reshape([ROWS, 2, COLS]).permute((0, 2, 1)).split()
    HALF: gl.constexpr = accumulator(64, COLS)
    return gl.convert_layout(left, HALF, assert_trivial=True), gl.convert_layout(right, HALF, assert_trivial=True)


@gluon.jit
def store(acc, x, pipelines, tile, alpha, beta, sizes, spread, k, COL0: gl.constexpr, COLS: gl.constexpr,
          WARPGROUP: gl.constexpr):  # fmt: skip
    """Store COLS columns of Y from column COL0 on, STORE_COLS at a time, through shared memory by TMA."""
    if COLS > k.STORE_COLS:
        left, right = halves(acc)
        store(left, x, pipelines, tile, alpha, beta, sizes, spread, k, COL0, COLS // 2, WARPGROUP)
        store(right, x, pipelines, tile, alpha, beta, sizes, spread, k, COL0 + COLS // 2, COLS // 2, WARPGROUP)
    else:
        y = acc * alpha
        if k.C != "none" and not k.C_FIRST:
            y += addend(x, pipelines, tile, sizes, spread, k, COL0, COLS, WARPGROUP) * beta
        stage = pipelines.y.index(WARPGROUP * k.STORE_BUFFERS + COL0 // COLS % k.STORE_BUFFERS)
        tma.store_wait(k.STORE_BUFFERS - 1)  # the last store from this buffer has read it
        stage.reshape([k.ROWS, COLS]).store(y.to(x.y.dtype))
        fence_async_shared()
        tma_store(x.y, [tile.g0, tile.g1, tile.m0 + WARPGROUP * k.ROWS, tile.n0 + COL0], stage)


@gluon.jit
def compute(x, pipelines, alpha, beta, sizes, spread, k, WARPGROUP: gl.constexpr):
    """Run a warpgroup: ROWS rows of each tile of Y. ``beta`` is beta / alpha if the accumulator starts from C."""
    FIRST: gl.constexpr = k.C != "none" and k.C_FIRST
    ACC: gl.constexpr = accumulator(64, k.BLOCK_N)
    steps = sizes.summed0 * sizes.summed1 * sizes.k_tiles
    step = 0
    if k.TURNS and WARPGROUP == WARPGROUPS - 1:
        warp_scheduler_barrier_arrive(WARPGROUP, WARPGROUPS)  # the first warpgroup starts
    for t in range(work_count(sizes)):
        tile = tile_at(t, sizes, k)
        acc = gl.zeros([k.ROWS, k.BLOCK_N], gl.float32, ACC)
        if FIRST:
            if k.C == "matrix":
                wait_full(pipelines.c, WARPGROUP, t)
            acc += addend(x, pipelines, tile, sizes, spread, k, 0, k.BLOCK_N, WARPGROUP) * beta
            if k.C == "matrix":
                release_after_loads(pipelines.c, WARPGROUP)

        # Y += A B, with one step always in flight
        pending = issue(acc, pipelines, step, k, FIRST, WARPGROUP)
        acc = warpgroup_mma_wait(1, deps=(pending,))
        for _ in range(1, steps):
            step += 1
            pending = issue(acc, pipelines, step, k, True, WARPGROUP)
            acc = warpgroup_mma_wait(1, deps=(pending,))
            release(pipelines.b, slot_of(pipelines.b, step - 1))
        acc = warpgroup_mma_wait(0, deps=(acc,))
        release(pipelines.b, slot_of(pipelines.b, step))
        step += 1

        # Warpgroups store in turns: after the first turn, one stores while the other multiplies.
        if k.TURNS:
            warp_scheduler_barrier_sync(WARPGROUP)
        if k.C == "matrix" and not FIRST:
            wait_full(pipelines.c, WARPGROUP, t)
        store(acc, x, pipelines, tile, alpha, beta, sizes, spread, k, 0, k.BLOCK_N, WARPGROUP)
        if k.C == "matrix" and not FIRST:
            release_after_loads(pipelines.c, WARPGROUP)
        if k.TURNS:
            warp_scheduler_barrier_arrive(WARPGROUP, WARPGROUPS)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["sizes", "spread"])  # one kernel for all sizes
def matmul_kernel(a, b, c, y, alpha, beta, sizes, spread, k):
    """Compute Y = alpha · Σ A B + beta · C. a, b, y: descriptors of tiles; c: a descriptor or a `Strided`."""
    x = Sources(a, b, c, y)
    a_slots = gl.allocate_shared_memory(
        a.dtype, [WARPGROUPS * k.STAGES, 1, 1, a.block_type.shape[2], a.block_type.shape[3]], a.layout
    )
    b_slots = gl.allocate_shared_memory(
        b.dtype, [k.STAGES, 1, 1, b.block_type.shape[2], b.block_type.shape[3]], b.layout
    )
    b_pipeline = with_barriers(b_slots, k.STAGES, WARPGROUPS)
    c_pipeline = Pipeline(ABSENT, ABSENT, ABSENT)
    if k.C == "matrix":
        c_pipeline = new_pipeline(c, WARPGROUPS, k.ROWS, k.BLOCK_N, 1)
    stage = gl.allocate_shared_memory(y.dtype, [WARPGROUPS * k.STORE_BUFFERS, 1, 1, k.ROWS, k.STORE_COLS], y.layout)
    pipelines = GemmPipelines(a_slots, b_pipeline, c_pipeline, stage)
    fence_async_shared()
    gl.warp_specialize(
        [
            (compute, (x, pipelines, alpha, beta, sizes, spread, k, 0)),
            (compute, (x, pipelines, alpha, beta, sizes, spread, k, 1)),
            (load, (x, pipelines, sizes, spread, k)),
        ],
        [4, 1],
        [k.COMPUTING_REGISTERS, k.LOADING_REGISTERS],
    )
