"""Rings of shared memory between warps, and the order in which warpgroups take the tensor cores."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from tilewise.backends.gluon.compat import tma_load, warps_barrier

# Hardware barriers from here up are free: Triton takes 0, 1 and one for each of at most six partitions.
FIRST_NAMED_BARRIER = gl.constexpr(8)
ABSENT = gl.constexpr(0)  # in the place of what a kernel does without


class Pipeline(NamedTuple):
    """Slots of shared memory that one warp fills and its readers empty, with a pair of barriers for each.

    Numbers are stored there, all else comes by TMA. Whoever uses a pipeline counts its tiles: the n-th one lies in the
    slot that `slot_of` names, and comes there for the `use_of`-th time, which waits for phase ``use & 1`` of `full` to
    read it, and for the opposite of `empty` to fill it. A stage may have a slot for each of several ELEMENTS, as each
    warpgroup has queries of its own."""

    slots: Any
    full: Any
    empty: Any


@gluon.jit
def new_pipeline(
    source, SLOTS: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr, READERS: gl.constexpr,
    WRITERS: gl.constexpr = 1,
):  # fmt: skip
    """A pipeline of tiles [ROWS, COLS] of what ``source`` describes; a slot is free when READERS have left it, and full
    when WRITERS have arrived, of which TMA is one."""
    return with_barriers(new_tiles(source, SLOTS, ROWS, COLS), SLOTS, READERS, WRITERS)


@gluon.jit
def new_tiles(source, SLOTS: gl.constexpr, ROWS: gl.constexpr, COLS: gl.constexpr):
    """Shared memory for tiles of what ``source`` describes, of a `tensors.ragged` one too."""
    if len(source.block_type.shape) == 5:
        return gl.allocate_shared_memory(source.dtype, [SLOTS, 1, 1, 1, ROWS, COLS], source.layout)
    else:
        return gl.allocate_shared_memory(source.dtype, [SLOTS, 1, 1, ROWS, COLS], source.layout)


@gluon.jit
def new_pipeline_of_numbers(SLOTS: gl.constexpr, READERS: gl.constexpr):
    """A pipeline of one int32 in each slot, which one warp stores."""
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
    """Load a tile into a slot for the ``use``-th time, once the readers of the use before have left it."""
    fill_at(pipeline, slot, use, source, [b, h, row, col])


@gluon.jit
def fill_at(pipeline, slot, use, source, at):
    """`fill`, with all coordinates of the tile."""
    mbarrier.wait(pipeline.empty.index(slot), (use & 1) ^ 1)
    mbarrier.expect(pipeline.full.index(slot), source.block_type.nbytes)
    tma_load(source, at, pipeline.full.index(slot), pipeline.slots.index(slot))


@gluon.jit
def wait_full(pipeline, slot, use, needed=True):
    mbarrier.wait(pipeline.full.index(slot), use & 1, pred=needed)


@gluon.jit
def release(pipeline, slot):
    """Give a slot back that only wgmma has read, or that no TMA fills."""
    mbarrier.arrive(pipeline.empty.index(slot), count=1)


@gluon.jit
def release_after_loads(pipeline, slot):
    """Give a slot back that ordinary loads have read.

    They read through the generic proxy and TMA writes through the async proxy: a barrier alone does not order the two.
    """
    fence_async_shared()
    warps_barrier()
    mbarrier.arrive(pipeline.empty.index(slot), count=1)


@gluon.jit
def only_slot(c):
    """Zero. Where warpgroups share the keys, dS has a tile of its own, or queries come in subtiles, no compiler may
    know
    it: it would compute the addresses of all operands before the loops, and registers do not hold them."""
    if c.SHARES_KEYS or c.BIAS_APART or c.M_SUBTILES > 1:
        return gl.inline_asm_elementwise("mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    else:
        return 0


@gluon.jit
def hidden(slot):
    """A slot of which no compiler knows that it does not change, see `only_slot`."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [slot], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def border(count):
    """A border of basic blocks, which keeps ptxas from moving a softmax past the wait for a product.

    ``count``: anything that is never -1, which no compiler knows: without a loop that might run there is no border.
    """
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $1, -1; NEVER: @p bra ON; nanosleep.u32 20; bra NEVER; ON: mov.b32 $0, 0; }",
        "=r,r", [count], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def warp_scheduler_barrier_sync(WARPGROUP: gl.constexpr):
    """Wait until the warpgroup before has issued its products."""
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
    """The next warpgroup may issue its products."""
    NEXT: gl.constexpr = (WARPGROUP + 1) % WARPGROUPS
    gl.inline_asm_elementwise(
        f"bar.arrive {FIRST_NAMED_BARRIER + NEXT}, 256; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


# Counters in global memory, between programs


@gluon.jit
def fetch_tile_index(at):
    """Count one up and return how much it was before, in a role of one warp."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .u32 element; mov.u32 element, %laneid; setp.eq.u32 p, element, 0; mov.b32 $0, 0; "
        "@p atom.global.relaxed.gpu.add.u32 $0, [$1], 1; shfl.sync.idx.b32 $0, $0, 0, 31, 0xffffffff; }",
        "=r,l", [at], dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def wait_count(at, count, PAUSE: gl.constexpr = 0):
    """Wait until a counter has reached ``count``, and see what those that counted have written.

    PAUSE: nanoseconds between two looks.
    """
    seen = 0
    while seen < count:
        seen = gl.inline_asm_elementwise(
            "ld.acquire.gpu.global.s32 $0, [$1];", "=r,l", [at], dtype=gl.int32, is_pure=False, pack=1
        )
        if PAUSE > 0:  # noqa: SIM102  (decided when it is compiled, the other when it runs)
            if seen < count:
                gl.inline_asm_elementwise(
                    f"nanosleep.u32 {PAUSE}; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
                )
    fence_async()


@gluon.jit
def fence_async():
    """Order what this thread has seen or written before its copies by TMA, of global memory too."""
    gl.inline_asm_elementwise(
        "fence.proxy.async; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )  # fmt: skip


@gluon.jit
def count_up(at):
    """Count one up when all warps have come here: what they have written is there to be read."""
    warps_barrier()
    gl.atomic_add(at, 1, sem="release", scope="gpu")


@gluon.jit
def count_stored(at):
    """The same when all that they store by TMA is there, too."""
    wait_stored(0)
    count_up(at)


@gluon.jit
def wait_stored(LATER: gl.constexpr):
    """Wait until all that these warps store by TMA is there, but for the LATER stores that came last."""
    gl.inline_asm_elementwise(
        f"cp.async.bulk.wait_group {LATER}; fence.proxy.async; mov.b32 $0, 0;", "=r", [],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


# Between a kernel and the next of its stream, which `launcher.Launch` starts with launch_pdl


@gluon.jit
def let_next_begin():
    """The next kernel's programs may begin where this kernel's leave room, once all of this one's have come here."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def wait_for_previous():
    """Wait until the kernel before has ended."""
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; mov.b32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )  # fmt: skip
