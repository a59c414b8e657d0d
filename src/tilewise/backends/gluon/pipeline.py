"""Shared-memory pipelines between warps, and the order in which warpgroups use the tensor cores."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from tilewise.backends.gluon.compat import tma_load, warps_barrier

# Named barriers from here up are free: Triton uses 0, 1 and one for each of at most six partitions.
FIRST_NAMED_BARRIER = gl.constexpr(8)
ABSENT = gl.constexpr(0)  # placeholder for a pipeline that a kernel does not have


class Pipeline(NamedTuple):
    """Slots of shared memory that one warp fills and its readers empty, with two barriers per slot.

    TMA fills the slots, but for tile indices, which a warp stores. Producer and consumers count tiles: the n-th tile is
    in slot `slot_of`, which it fills for the `use_of`-th time. To read it, wait for phase ``use & 1`` of `full`; to
    fill it, for the opposite phase of `empty`. A stage may have a slot for each of several ELEMENTS, as each warpgroup
    has its own queries.
    """

    slots: Any
    full: Any
    empty: Any


@gluon.jit
def new_pipeline(
    source, SLOTS: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr, READERS: gl.constexpr,
    WRITERS: gl.constexpr = 1, PANELS: gl.constexpr = 1,
):  # fmt: skip
    """Create a pipeline of tiles [ROWS, COLS] of the tensor that ``source`` describes. A slot is free once READERS have
    released it, and full once WRITERS have arrived, TMA being one of them. A slot has PANELS tiles, side by side in the
    tensor: tile i of a slot is ``slots.index(slot * PANELS + i)``."""
    return with_barriers(new_tiles(source, SLOTS * PANELS, ROWS, COLS), SLOTS, READERS, WRITERS)


@gluon.jit
def new_tiles(source, SLOTS: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr):
    """Allocate shared memory for tiles of the tensor that ``source``, possibly from `tensors.ragged`, describes."""
    if len(source.block_type.shape) == 5:
        return gl.allocate_shared_memory(source.dtype, [SLOTS, 1, 1, 1, ROWS, COLS], source.layout)
    else:
        return gl.allocate_shared_memory(source.dtype, [SLOTS, 1, 1, ROWS, COLS], source.layout)


@gluon.jit
def new_pipeline_of_numbers(SLOTS: gl.constexpr, READERS: gl.constexpr):
    """Create a pipeline with one int32 per slot, which one warp stores."""
    LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return with_barriers(gl.allocate_shared_memory(gl.int32, [SLOTS, 1], LAYOUT), SLOTS, READERS)


@gluon.jit
def with_barriers(slots, SLOTS: gl.constexpr, READERS: gl.constexpr, WRITERS: gl.constexpr = 1):
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full.index(slot), count=WRITERS)
        mbarrier.init(empty.index(slot), count=READERS)
    return Pipeline(slots, full, empty)


@gluon.jit
def slot_of(pipeline, n, element=0, ELEMENTS: gl.constexpr = 1):
    STAGES: gl.constexpr = pipeline.full.shape[0] // ELEMENTS
    return n % STAGES * ELEMENTS + element


@gluon.jit
def use_of(pipeline, n, ELEMENTS: gl.constexpr = 1):
    STAGES: gl.constexpr = pipeline.full.shape[0] // ELEMENTS
    return n // STAGES


@gluon.jit
def fill(pipeline, slot, use, source, b, h, row, col):
    """Load a tile into a slot for the ``use``-th time, once the readers of its previous use have released it."""
    fill_at(pipeline, slot, use, source, [b, h, row, col])


@gluon.jit
def fill_at(pipeline, slot, use, source, at):
    """Like `fill`, with all coordinates of the tile in ``at``."""
    mbarrier.wait(pipeline.empty.index(slot), (use & 1) ^ 1)
    mbarrier.expect(pipeline.full.index(slot), source.block_type.nbytes)
    tma_load(source, at, pipeline.full.index(slot), pipeline.slots.index(slot))


@gluon.jit
def fill_panels(pipeline, slot, use, source, at, PANELS: gl.constexpr):
    """Like `fill_at`, for a slot with PANELS tiles, the first of which begins ``at`` column 0."""
    if PANELS == 1:
        fill_at(pipeline, slot, use, source, at)
    else:
        COLS: gl.constexpr = source.block_type.shape[-1]
        mbarrier.wait(pipeline.empty.index(slot), (use & 1) ^ 1)
        mbarrier.expect(pipeline.full.index(slot), PANELS * source.block_type.nbytes)
        for i in gl.static_range(PANELS):
            panel = [at[0], at[1], at[2], at[3], COLS * i] if len(at) == 5 else [at[0], at[1], at[2], COLS * i]
            tma_load(source, panel, pipeline.full.index(slot), pipeline.slots.index(slot * PANELS + i))


@gluon.jit
def wait_full(pipeline, slot, use, needed=True):
    mbarrier.wait(pipeline.full.index(slot), use & 1, pred=needed)


@gluon.jit
def release(pipeline, slot):
    """Release a slot that only wgmma has read, or that TMA does not fill."""
    mbarrier.arrive(pipeline.empty.index(slot), count=1)


@gluon.jit
def release_after_loads(pipeline, slot):
    """Release a slot that ordinary loads have read.

    They read through the generic proxy and TMA writes through the async proxy: a barrier alone does not order the two.
    """
    fence_async_shared()
    warps_barrier()
    mbarrier.arrive(pipeline.empty.index(slot), count=1)


@gluon.jit
def only_slot(c):
    """Return 0; opaque to the compiler if warpgroups share keys, dS has its own tile, or queries come in subtiles. A
    known 0 would let the compiler compute the addresses of all operands before the loops, more than registers hold."""
    if c.SHARES_KEYS or c.BIAS_APART or c.M_SUBTILES > 1:
        return gl.inline_asm_elementwise("mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    else:
        return 0


@gluon.jit
def hidden(slot):
    """Return ``slot``, opaque to the compiler, so that it cannot see that the slot never changes; see `only_slot`."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [slot], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def border(count):
    """Insert a basic-block boundary, which keeps ptxas from moving a softmax past the wait for a product.

    ``count``: a value that is never -1, unknown to the compiler: only a loop that might run makes a boundary.
    """
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $1, -1; NEVER: @p bra ON; nanosleep.u32 20; bra NEVER; ON: mov.b32 $0, 0; }",
        "=r,r", [count], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def warp_scheduler_barrier_sync(WARPGROUP: gl.constexpr):
    """Wait until the previous warpgroup has issued its products."""
    gl.inline_asm_elementwise(
        f"bar.sync {FIRST_NAMED_BARRIER + WARPGROUP}, 256; mov.b32 $0, 0;",
        "=r",
        [],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def warp_scheduler_barrier_arrive(WARPGROUP: gl.constexpr, WARPGROUPS: gl.constexpr):
    """Let the next warpgroup issue its products."""
    NEXT: gl.constexpr = (WARPGROUP + 1) % WARPGROUPS
    gl.inline_asm_elementwise(
        f"bar.arrive {FIRST_NAMED_BARRIER + NEXT}, 256; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


# Counters in global memory, between programs


@gluon.jit
def fetch_tile_index(at):
    """Increment a counter and return its old value; called by a role of one warp."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .u32 lane; mov.u32 lane, %laneid; setp.eq.u32 p, lane, 0; mov.b32 $0, 0; "
        "@p atom.global.relaxed.gpu.add.u32 $0, [$1], 1; shfl.sync.idx.b32 $0, $0, 0, 31, 0xffffffff; }",
        "=r,l", [at], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def wait_count(at, count, PAUSE: gl.constexpr = 0):
    """Wait until a counter has reached ``count``; the writes of the programs that counted are then visible.

    PAUSE: nanoseconds between two reads.
    """
    seen = 0
    while seen < count:
        seen = gl.inline_asm_elementwise(
            "ld.acquire.gpu.global.s32 $0, [$1];", "=r,l", [at], dtype=gl.int32, is_pure=False, pack=1
        )
        if PAUSE > 0:  # noqa: SIM102  (the outer condition is compile-time, the inner one run-time)
            if seen < count:
                gl.inline_asm_elementwise(
                    f"nanosleep.u32 {PAUSE}; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
                )
    fence_async()


@gluon.jit
def fence_async():
    """Order this thread's earlier reads and writes before its TMA copies, for global memory too."""
    gl.inline_asm_elementwise(
        "fence.proxy.async; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )  # fmt: skip


@gluon.jit
def count_up(at):
    """Increment a counter once all warps have arrived, with release semantics for their writes."""
    warps_barrier()
    gl.atomic_add(at, 1, sem="release", scope="gpu")


@gluon.jit
def count_stored(at):
    """Like `count_up`, but also wait for the TMA stores of these warps."""
    wait_stored(0)
    count_up(at)


@gluon.jit
def wait_stored(LATER: gl.constexpr):
    """Wait until the TMA stores of these warps are complete, except for the last LATER."""
    gl.inline_asm_elementwise(
        f"cp.async.bulk.wait_group {LATER}; fence.proxy.async; mov.b32 $0, 0;", "=r", [],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


# Programmatic dependent launch: `launcher.Launch` starts the next kernel of the stream with launch_pdl


@gluon.jit
def let_next_begin():
    """Let programs of the next kernel start on free resources once all programs of this kernel have called this."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def wait_for_previous():
    """Wait until the previous kernel has ended."""
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )  # fmt: skip
