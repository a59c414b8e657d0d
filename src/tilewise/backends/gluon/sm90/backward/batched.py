"""Batched backward: the CTA computes several batch elements that share a bias.

Each element has a warpgroup, which runs `kernel.compute_work_tile`. The elements of a program have the same key tile
and head and reach the same query tile at about the same time: together they load each bias tile once, and two more
warps sum their dS tiles from shared memory and add one tile to a float32 sum in global memory.

Programs are persistent. One warp loads all tiles; another runs `dq.finish_earlier_heads` and
`backward.warps.store_keys_of`, since dq_accum holds only the heads in progress.

Elements of the last program of a head may have no batch element: TMA reads zeros for them and stores nothing, their
place in dq_accum is not stored to dQ, and their dS is not added."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from tilewise.backends.gluon.compat import reinterpret, tma_load, warps_barrier
from tilewise.backends.gluon.pipeline import (
    ABSENT,
    Pipeline,
    count_up,
    fetch_tile_index,
    let_next_begin,
    new_pipeline,
    new_pipeline_of_numbers,
    new_tiles,
    release,
    slot_of,
    use_of,
    wait_for_previous,
    wait_full,
    with_barriers,
)
from tilewise.backends.gluon.scheduler import hand_out_tile_index, next_tile_index
from tilewise.backends.gluon.score import widened
from tilewise.backends.gluon.sm90.backward.dq import finish_earlier_heads, new_dq_pipeline, wait_zeroed
from tilewise.backends.gluon.sm90.backward.kernel import (
    BackwardOperands,
    BackwardShared,
    TileIndices,
    compute_work_tile,
)
from tilewise.backends.gluon.sm90.backward.m_subtiles import QueryStages
from tilewise.backends.gluon.sm90.backward.scheduler import (
    bias_of_tile,
    counters_at,
    head_of,
    of_element,
    row_tile,
    work_tile_at,
    work_tile_count,
)
from tilewise.backends.gluon.sm90.backward.warps import fetch_keys_of, load_do, store_keys_of
from tilewise.backends.gluon.sm90.common.key_mask import new_step_tiles, store_ones
from tilewise.backends.gluon.sm90.common.wgmma import tile_layout
from tilewise.backends.gluon.varlen import box_of

PIECE_ROWS = gl.constexpr(16)  # rows of dS that are summed at once: enough loads in flight


class Element(NamedTuple):
    """Pipelines and shared memory of one element; all elements share the bias in ``rows``."""

    rows: Any
    k_pipeline: Any
    v_pipeline: Any
    dq_pipeline: Any
    shared: Any


@gluon.jit
def new_element(q, k, v, do, stats, dq_accum, bias_pipeline, ones, c):
    keys = new_pipeline(k, c.KEY_STAGES, c.BLOCK_N, c.BLOCK_D, 1)
    values = new_pipeline(v, c.KEY_STAGES, c.BLOCK_N, c.BLOCK_D, 1)
    pipeline = new_pipeline(q, c.STAGES, c.BLOCK_M, c.BLOCK_D, 1)
    do_slots = new_tiles(do, c.STAGES, c.BLOCK_M, c.BLOCK_D)
    stats_slots = gl.allocate_shared_memory(gl.float32, [2 * c.STAGES, c.BLOCK_M], stats.layout)
    SCORES: gl.constexpr = tile_layout(c.BLOCK_M, c.BLOCK_N, q.dtype)
    ds_slots = gl.allocate_shared_memory(q.dtype, [2, 1, 1, c.BLOCK_M, c.BLOCK_N], SCORES)
    ds_pipeline = with_barriers(ds_slots, 2, 1)
    no_pipeline = Pipeline(ABSENT, ABSENT, ABSENT)
    rows = QueryStages(pipeline, do_slots, stats_slots, bias_pipeline.slots, ABSENT, no_pipeline, bias_pipeline)
    hiding = ABSENT
    if c.HIDES_KEYS:
        hiding = (new_step_tiles(q.dtype, 1, c.BLOCK_N).index(0), ones)
    shared = BackwardShared(keys.slots, values.slots, 0, 0, 0, ABSENT, ds_slots, ABSENT, ABSENT, ds_pipeline, hiding)
    return Element(rows, keys, values, new_dq_pipeline(dq_accum, c), shared)


@gluon.jit
def tile_of_element(tile_index, element, c):
    """Return the index of an element's work tile among those of all elements."""
    return tile_index * c.ELEMENTS + element


@gluon.jit
def compute_element(x, element, tile_indices, counts, terms, sizes, c, ELEMENT: gl.constexpr):
    """Compute all products of an element: the role of its warpgroup."""
    step = gl.to_tensor(0)
    nth = gl.to_tensor(0)
    tile_index = next_tile_index(0, nth, tile_indices, c)
    while tile_index * c.ELEMENTS < work_tile_count(x, sizes, c):
        step = compute_work_tile(
            tile_of_element(tile_index, ELEMENT, c), nth, step, x, element.rows, element.k_pipeline, element.v_pipeline,
            element.dq_pipeline, element.shared, counts, terms, sizes, c,
        )  # fmt: skip
        nth += 1
        tile_index = next_tile_index(tile_index, nth, tile_indices, c)


@gluon.jit
def load_step(x, rows, counts, work_tile, h, m, step, sizes, c):
    """Load Q, dO, the LSE and delta of one element and step."""
    BYTES: gl.constexpr = x.q.block_type.nbytes + x.do.block_type.nbytes + 2 * x.stats.block_type.nbytes
    slot = slot_of(rows.pipeline, step)
    full = rows.pipeline.full.index(slot)
    mbarrier.wait(rows.pipeline.empty.index(slot), (use_of(rows.pipeline, step) & 1) ^ 1)
    mbarrier.expect(full, BYTES)
    at_rows = box_of(0, 0, work_tile.b, h, m * c.BLOCK_M, c)
    at_stats = row_tile(work_tile, h, m, sizes) * (2 * c.BLOCK_M)
    tma_load(x.q, at_rows, full, rows.pipeline.slots.index(slot))
    tma_load(x.stats, [at_stats], full, rows.stats.index(2 * slot))
    load_do(x, counts, row_tile(work_tile, h, m, sizes), at_rows, full, rows.do.index(slot), c)
    tma_load(x.stats, [at_stats + c.BLOCK_M], full, rows.stats.index(2 * slot + 1))


@gluon.jit
def load_elements(x, elements, tile_indices, counts, terms, sizes, c):
    """Load K, V and the query tiles of all elements, and the bias: the role of one warp."""
    let_next_begin()
    step = gl.to_tensor(0)
    nth = gl.to_tensor(0)
    semaphore = counters_at(counts, sizes, c).tile_count_semaphore
    tile_index = fetch_tile_index(semaphore)
    hand_out_tile_index(tile_indices, nth, tile_index)
    while tile_index * c.ELEMENTS < work_tile_count(x, sizes, c):
        first = work_tile_at(tile_of_element(tile_index, 0, c), x, terms, sizes, c)
        bias_b = bias_of_tile(first, sizes, c)
        for element in gl.static_range(c.ELEMENTS):
            fetch_keys_of(
                of_element(first, element, sizes, c),
                nth,
                x,
                elements[element].k_pipeline,
                elements[element].v_pipeline,
                c,
            )
        # Elements add to dQ only after the loads below. If they waited themselves, they would wait for all of their
        # earlier additions too.
        wait_zeroed(tile_index, first, x, counters_at(counts, sizes, c), sizes, c)
        next_index = tile_index
        if c.HIDES_KEYS:  # noqa: SIM102  (one is compile-time, the other is not)
            if first.end == first.begin:
                next_index = fetch_tile_index(semaphore)
        for g in range(sizes.group):
            for i in range(first.end - first.begin):
                m = first.end - 1 - i
                if (g == sizes.group - 1) & (m == first.begin):  # not earlier: others may be free sooner
                    next_index = fetch_tile_index(semaphore)
                h = first.hk * sizes.group + g
                bias_pipeline = elements[0].rows.bias_pipeline
                slot = slot_of(bias_pipeline, step)
                mbarrier.wait(bias_pipeline.empty.index(slot), (use_of(bias_pipeline, step) & 1) ^ 1)
                mbarrier.expect(bias_pipeline.full.index(slot), x.bias.block_type.nbytes)
                at = box_of(0, 0, bias_b, h // c.BIAS_GROUP, m * c.BLOCK_M, c, first.n0)
                tma_load(x.bias, at, bias_pipeline.full.index(slot), bias_pipeline.slots.index(slot))
                for element in gl.static_range(c.ELEMENTS):
                    load_step(
                        x, elements[element].rows, counts, of_element(first, element, sizes, c), h, m, step, sizes, c
                    )
                step += 1
        tile_index = next_index
        nth += 1
        hand_out_tile_index(tile_indices, nth, tile_index)


@gluon.jit
def finish_and_store(x, elements, dq, tile_indices, counts, terms, sizes, c):
    """Finish dQ of earlier heads and store dK and dV: the role of one warp. dq: a `Strided`."""
    nth = 0
    tile_index = next_tile_index(0, nth, tile_indices, c)
    while tile_index * c.ELEMENTS < work_tile_count(x, sizes, c):
        finish_earlier_heads(tile_index, x, dq, counts, terms, sizes, c)
        first = work_tile_at(tile_of_element(tile_index, 0, c), x, terms, sizes, c)
        for element in gl.static_range(c.ELEMENTS):
            store_keys_of(
                of_element(first, element, sizes, c), nth, x, elements[element].dq_pipeline, elements[element].shared, c
            )
        tma.store_wait(0)  # dK and dV have left shared memory
        for element in gl.static_range(c.ELEMENTS):
            of = elements[element]
            release(of.k_pipeline, slot_of(of.k_pipeline, nth))
            release(of.v_pipeline, slot_of(of.v_pipeline, nth))
        # This counts dQ alone: dK and dV are read only after the kernel, so their stores need no wait.
        count_up(counters_at(counts, sizes, c).done + head_of(first, sizes, c))
        nth += 1
        tile_index = next_tile_index(tile_index, nth, tile_indices, c)


@gluon.constexpr_function
def piece_layout(dtype, columns):
    """Return the layout of PIECE_ROWS rows of a tile, after which the swizzle starts again."""
    return gl.NVMMASharedLayout.get_default_for([PIECE_ROWS.value, columns], dtype)


@gluon.jit
def piece_of(element, slot, piece, c):
    """Return the ``piece``-th PIECE_ROWS rows of an element's dS; ``piece`` may be a runtime value."""
    tile = element.shared.ds.index(slot)
    LAYOUT: gl.constexpr = piece_layout(tile.dtype, c.BLOCK_N)
    return reinterpret(tile, tile.dtype, [c.BLOCK_M // PIECE_ROWS, PIECE_ROWS, c.BLOCK_N], LAYOUT).index(piece)


@gluon.jit
def add_pieces(
    to, elements, slot, present, rows, left, inside_cols, stride, L: gl.constexpr, c, FEWER: gl.constexpr
):  # fmt: skip
    """Run one step of `add_elements`; all loads of a piece are issued before the first is used.

    FEWER: only the first ``present`` elements count. rows: of a piece. left: queries from the step's first on."""
    for piece in range(c.BLOCK_M // PIECE_ROWS):
        first = piece_of(elements[0], slot, piece, c).load(L)
        second = piece_of(elements[1], slot, piece, c).load(L)
        third = widened(piece_of(elements[2], slot, piece, c).load(L))
        total = widened(first)
        if FEWER:
            total += gl.where(present > 1, widened(second), 0.0)
            total += gl.where(present > 2, third, 0.0)
        else:
            total = total + widened(second) + third
        inside = (rows < left - piece * PIECE_ROWS)[:, None] & inside_cols
        gl.atomic_add(to, total, mask=inside, sem="relaxed")
        to += PIECE_ROWS * stride


@gluon.jit
def add_elements(x, elements, dbias, tile_indices, terms, sizes, c):
    """Add dS of all elements, in their order, to the float32 sum of dBias: the role of two warps.

    All elements wait for it. An unrolled step would not fit the instruction cache of a multiprocessor beside the loops
    of three elements. dbias: a `Strided`."""
    L: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [2, 1], [1, 0])  # full sectors of 32 bytes at a time
    step = gl.to_tensor(0)
    nth = 0
    rows = gl.arange(0, PIECE_ROWS, gl.SliceLayout(1, L))
    cols = gl.arange(0, c.BLOCK_N, gl.SliceLayout(0, L))
    tile_index = next_tile_index(0, nth, tile_indices, c)
    while tile_index * c.ELEMENTS < work_tile_count(x, sizes, c):
        first = work_tile_at(tile_of_element(tile_index, 0, c), x, terms, sizes, c)
        # Batch elements from the first of this program on, of those that share its bias.
        present = x.k.shape[0] - first.b
        matrices = dbias.pointer
        if c.BIAS_BATCH > 1:
            present = sizes.run - first.place % sizes.broadcast_batch
            matrices += gl.cast(bias_of_tile(first, sizes, c), gl.int64) * (dbias.stride0 // 4 * 4)
        # Rows of dBias are padded to a multiple of eight elements: // 4 * 4 lets the compiler add four at a time. dS is
        # 0 past the last key.
        inside_cols = (cols // 4 < gl.cdiv(sizes.keys - first.n0, 4))[None, :]
        stride = dbias.stride2 // 4 * 4
        for g in range(sizes.group):
            head = (first.hk * sizes.group + g) // c.BIAS_GROUP
            at = matrices + gl.cast(head, gl.int64) * (dbias.stride1 // 4 * 4) + (first.n0 + cols)[None, :]
            for i in range(first.end - first.begin):
                row0 = (first.end - 1 - i) * c.BLOCK_M
                pipeline = elements[0].shared.ds_pipeline
                slot, use = slot_of(pipeline, step), use_of(pipeline, step)
                for element in gl.static_range(c.ELEMENTS):
                    wait_full(elements[element].shared.ds_pipeline, slot, use)
                to = at + (row0 + rows).to(gl.int64)[:, None] * stride
                left = sizes.queries - row0
                if present >= c.ELEMENTS:
                    add_pieces(to, elements, slot, present, rows, left, inside_cols, stride, L, c, False)
                else:
                    add_pieces(to, elements, slot, present, rows, left, inside_cols, stride, L, c, True)
                warps_barrier()
                for element in gl.static_range(c.ELEMENTS):
                    release(elements[element].shared.ds_pipeline, slot)
                step += 1
        nth += 1
        tile_index = next_tile_index(tile_index, nth, tile_indices, c)


@gluon.jit
def batched_kernel(
    q, k, v, do, bias, stats, dq_accum, dk, dv, dq, given, bits, mended, pieces, dbias, counts, lists, terms, sizes, c
):
    """Like `backward_kernel`, but ``dq`` and ``dbias`` (float32) are each a `Strided`."""
    gl.static_assert(c.ELEMENTS == 3, "an element has a partition of its own")
    gl.static_assert(c.DYNAMIC and c.STAGES == c.DO_STAGES and c.M_SUBTILES == 1 and c.WARPS == 4)
    wait_for_previous()
    x = BackwardOperands(
        q, k, v, do, bias, stats, dq_accum, dk, dv, ABSENT, given.seed, bits, given.tile_list, mended
    )  # fmt: skip
    bias_pipeline = new_pipeline(bias, c.STAGES, c.BLOCK_M, c.BLOCK_N, c.ELEMENTS)
    ones = ABSENT
    if c.HIDES_KEYS:
        ones = new_step_tiles(q.dtype, 1, c.BLOCK_M).index(0)
        store_ones(ones)
    element0 = new_element(q, k, v, do, stats, dq_accum, bias_pipeline, ones, c)
    element1 = new_element(q, k, v, do, stats, dq_accum, bias_pipeline, ones, c)
    element2 = new_element(q, k, v, do, stats, dq_accum, bias_pipeline, ones, c)
    elements = (element0, element1, element2)
    tile_indices = TileIndices(new_pipeline_of_numbers(2, c.ELEMENTS + 2))
    FEW: gl.constexpr = c.LOADING_REGISTERS
    MANY: gl.constexpr = c.COMPUTING_REGISTERS
    fence_async_shared()
    gl.warp_specialize(
        [
            (compute_element, (x, element0, tile_indices, counts, terms, sizes, c, 0)),
            (compute_element, (x, element1, tile_indices, counts, terms, sizes, c, 1)),
            (compute_element, (x, element2, tile_indices, counts, terms, sizes, c, 2)),
            (load_elements, (x, elements, tile_indices, counts, terms, sizes, c)),
            (finish_and_store, (x, elements, dq, tile_indices, counts, terms, sizes, c)),
            (add_elements, (x, elements, dbias, tile_indices, terms, sizes, c)),
        ],
        [4, 4, 1, 1, 2],
        [MANY, MANY, FEW, FEW, FEW],
    )
