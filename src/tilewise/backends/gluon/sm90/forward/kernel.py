"""Forward on Hopper: FlashAttention-3 (arXiv 2407.08608), Algorithms 1 and 2, with a pipeline of bias tiles.

One warp loads Q, K and V by TMA; one warp per computing warpgroup loads its bias. A computing warpgroup has 64 queries:
it issues Q·Kᵀ of one key tile together with P·V of the previous one. Within a warpgroup the softmax of a tile overlaps
P·V of the tile before; across warpgroups one computes its softmax while another uses the tensor cores. Every role
iterates over the same tiles, from the last key to the first.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tilewise.backends.gluon.compat import reinterpret, tma_store
from tilewise.backends.gluon.pipeline import (
    ABSENT,
    Pipeline,
    fetch_tile_index,
    fill_at,
    fill_panels,
    new_pipeline,
    new_pipeline_of_numbers,
    new_tiles,
    release,
    release_after_loads,
    slot_of,
    use_of,
    wait_full,
    warp_scheduler_barrier_arrive,
    warp_scheduler_barrier_sync,
)
from tilewise.backends.gluon.scheduler import (
    entry_at,
    first_entry,
    first_full,
    hand_out_tile_index,
    next_tile_index,
    work_tile_at,
    work_tile_count,
)
from tilewise.backends.gluon.score import score_tile
from tilewise.backends.gluon.sm90.common.dropout import dropout_words
from tilewise.backends.gluon.sm90.common.key_bias import load_bias_of_keys
from tilewise.backends.gluon.sm90.common.softmax import (
    changed_rows,
    changed_rows_once_summed,
    online_softmax,
    rescaled,
    rounded,
    sums_of_rows,
    times_v,
)
from tilewise.backends.gluon.sm90.common.toeplitz import (
    diagonal_of,
    far_shift,
    far_start,
    first_below,
    first_not_above,
    line_above,
    line_below,
    near_start,
    new_columns,
    prefetch_near,
)
from tilewise.backends.gluon.sm90.common.wgmma import accumulator, columns_of, times_transposed
from tilewise.backends.gluon.sm90.forward.bias import (
    bias_scores,
    first_below_range,
    first_not_inside,
    load_bias,
    release_bias,
    release_o,
    skip_bias,
    slot_for_o,
    start_in_range,
    start_of,
)
from tilewise.backends.gluon.sm90.forward.masks import banded, mask_words, masked
from tilewise.backends.gluon.varlen import box_of
from tilewise.backends.kernels.dropout import stream
from tilewise.backends.kernels.rounding import low_bits
from tilewise.backends.kernels.score import with_sink
from tilewise.backends.kernels.statistics import entropy_of, store_statistics

LN2 = gl.constexpr(0.6931471805599453)
LARGEST = gl.constexpr(3.0e38)


class ForwardConstants(NamedTuple):
    """Compile-time constants of the kernel; every field is a gl.constexpr. For most see `config.ForwardConfig`."""

    BLOCK_N: Any
    BLOCK_D: Any  # columns of a panel of Q and K
    BLOCK_DV: Any
    COLS_OF_QK: Any  # columns of a tile that Q·Kᵀ multiplies, see `config.depth`
    PANELS: Any  # tiles of Q and K side by side, see `config.panels`
    WARPGROUPS: Any
    Q_STAGES: Any
    STAGES: Any
    BIAS_STAGES: Any
    BIAS_FIRST: Any
    LAZY: Any
    SUMS_BY_THREAD: Any
    PEELED: Any
    SKIPS_HIDDEN: Any
    PAIRS: Any  # P passes from tile to tile as words of two neighbours, see `rounded`
    WORDS_LAST: Any
    O_IN_Q: Any
    O_IN_BIAS: Any
    Q_IN_REGISTERS: Any
    SCALE_IN_Q: Any
    LOADING_REGISTERS: Any
    COMPUTING_REGISTERS: Any
    BIAS: Any  # "none", "matrix", "cols" or "rows": the axes along which it varies
    BIAS_BATCH: Any  # see `Problem.bias_batch`
    BIAS_GROUP: Any  # query heads per bias head
    RELATIVE: Any  # the bias is by relative position, see `relative`
    RANGE_LO: Any  # some visible pairs are below the distances with an entry
    RANGE_HI: Any  # or above
    SORTED: Any  # tiles within the distances with an entry have a loop of their own
    TOEPLITZ: Any  # "none", or what the bias is beyond `Far`: "number" or "line"; see common.toeplitz
    TOEPLITZ_BATCH: Any  # as for the bias
    TOEPLITZ_GROUP: Any
    FAR_LO: Any  # some tiles are entirely below the near distances
    FAR_HI: Any  # or above
    UNDERFLOWS: Any  # some of these may be skipped, see underflow
    MASK: Any  # there is a bool mask, summarised by `mask_kernels`
    HIDES_KEYS: Any  # keys are masked by a step of the product, see `key_mask`
    MASK_BATCH: Any  # as for the bias
    MASK_GROUP: Any
    MASK_ROWS: Any  # the mask differs between queries
    RAGGED: Any  # the last key tile extends past the end of the keys
    HIDES: Any  # some pairs may be masked, so that non-finite values there need the NaN fix-up
    ORDER: Any  # see `work_tile_at`
    DYNAMIC: Any  # a program fetches the next tile, instead of tiles at a fixed stride
    PACKED: Any  # packed batch with listed work tiles, see varlen
    DOCUMENTS: Any  # the mask is of documents, and a packed batch may replace it, see documents
    STATISTICS: Any  # `StatisticsHow`


class ForwardOperands(NamedTuple):
    """Descriptors, built inside the kernel because they can only be kernel arguments; the bias may be a `Strided`."""

    q: Any
    k: Any
    v: Any
    bias: Any
    sink: Any  # a `Strided` or None
    seed: Any  # of dropout, or None
    bits: Any  # of the mask, see mask_kernels
    tile_list: Any  # with UNDERFLOWS the reach of each head instead
    o: Any
    o_low: Any  # or None, see `low_bits`
    tile_count_semaphore: Any  # counter of the tiles that programs have fetched after their first


class ForwardPipelines(NamedTuple):
    q: Any
    k: Any
    v: Any
    bias: Any
    o: Any
    tile_indices: Any
    columns: Any  # see `common.toeplitz.new_columns`


class ForwardState(NamedTuple):
    """State of a warpgroup between key tiles."""

    m: Any  # running maximum of each row, of unscaled scores
    l: Any  # noqa: E741  (running sum of each row, or of each thread of a row)
    o: Any  # without the last key tile
    p: Any  # P of the last key tile
    taken: Any  # bias slots that the program has used, if not every tile uses one
    most: Any  # with LAZY the greatest score of each row, if it is asked for, else 0
    excess: Any  # see `online_softmax`


@gluon.jit
def load(x, pipelines, terms, sizes, c):
    """Load Q, and the tiles of K and V; the role of one warp."""
    step = 0
    t = 0
    tile_index = gl.program_id(0)
    while tile_index < work_tile_count(x, sizes, c):
        next_index = tile_index + gl.num_programs(0)
        tile = work_tile_at(tile_index, x, terms, sizes, c)
        hk = tile.h // sizes.group
        for w in gl.static_range(c.WARPGROUPS):
            at = box_of(tile.seq.first_query, tile.seq.queries, tile.b, tile.h, tile.row0 + 64 * w, c)
            slot = slot_of(pipelines.q, t, w, c.WARPGROUPS)
            fill_panels(pipelines.q, slot, use_of(pipelines.q, t, c.WARPGROUPS), x.q, at, c.PANELS)
        for i in range(tile.count):
            if c.DYNAMIC and i == tile.count - 1:  # not earlier: others may be done sooner
                next_index = gl.num_programs(0) + fetch_tile_index(x.tile_count_semaphore)
            n0 = entry_at(i, tile, c).n * c.BLOCK_N
            at = box_of(tile.seq.first_key, tile.seq.keys, tile.b, hk, n0, c)
            fill_panels(pipelines.k, slot_of(pipelines.k, step), use_of(pipelines.k, step), x.k, at, c.PANELS)
            if c.BIAS == "cols":
                load_bias_of_keys(x, pipelines, slot_of(pipelines.k, step), tile, n0, terms, c)
            fill_at(pipelines.v, slot_of(pipelines.v, step), use_of(pipelines.v, step), x.v, at)
            step += 1
        if c.DYNAMIC:
            hand_out_tile_index(pipelines, t, next_index)
        tile_index = next_index
        t += 1


@gluon.jit
def scores(s, bias, words, entry, x, tile, terms, sizes, c, WARPGROUP: gl.constexpr, BAND: gl.constexpr):
    """Apply softcap and bias to a product, then the mask and the window, if they cut the tile.

    ``words``: from `mask_words`. BAND: tiles may be partial. The branch stays even if all tiles are partial: without it
    ptxas compares before the product is there, and packs the outcomes into words.
    """
    ADDS: gl.constexpr = (c.BIAS == "matrix" or c.BIAS == "cols") and not c.BIAS_FIRST
    s, _ = score_tile(s, bias, terms, ADDS, c.BIAS == "matrix")
    if BAND:  # noqa: SIM102  (the outer condition is compile-time, the inner one run-time)
        if entry.cut:
            n0 = entry.n * c.BLOCK_N
            row0 = tile.row0 + tile.seq.diagonal + 64 * WARPGROUP
            s = banded(s, row0 - n0, tile.seq.keys - n0, terms, c)
    if c.MASK:  # noqa: SIM102
        if entry.partial:
            s = masked(s, words, c)
    return s


@gluon.jit
def times_k(q, slots, slot, start, STARTS: gl.constexpr, c):
    """Issue Q·Kᵀ, added to ``start`` with STARTS. q: see `parts_of_q`."""
    if c.PANELS == 1:
        k = slots.index(slot).reshape([c.BLOCK_N, c.BLOCK_D])
        return times_transposed(q, columns_of(k, c.COLS_OF_QK), start, STARTS)
    else:
        s = start
        for i in gl.static_range(c.PANELS):
            k = slots.index(slot * c.PANELS + i).reshape([c.BLOCK_N, c.BLOCK_D])
            s = warpgroup_mma(q[i], k.permute((1, 0)), s, use_acc=STARTS or i > 0, is_async=True)
        return s


@gluon.jit
def parts_of_q(slots, slot, c):
    """Return a warpgroup's queries in shared memory as a tuple of tiles: panels, or the first COLS_OF_QK columns."""
    if c.PANELS == 1:
        return columns_of(slots.index(slot).reshape([64, c.BLOCK_D]), c.COLS_OF_QK)
    else:
        found = ()
        for i in gl.static_range(c.PANELS):
            found = found + (slots.index(slot * c.PANELS + i).reshape([64, c.BLOCK_D]),)  # type: ignore[assignment]  # noqa: RUF005
        return found


@gluon.jit
def in_registers(shared, x, terms, c):
    """Load the parts of a warpgroup's queries, with SCALE_IN_Q scaled."""
    found = ()
    for i in gl.static_range(len(shared)):
        q = shared[i].load(gl.DotOperandLayout(0, accumulator(64, c.BLOCK_N), 2))
        if c.SCALE_IN_Q:
            q = (q.to(gl.float32) * terms.scale).to(x.q.dtype)
        found = found + (q,)  # type: ignore[assignment]  # noqa: RUF005
    return found


@gluon.jit
def mma_one_n_block(
    q, state, x, pipelines, words, step, tile, i, terms, sizes, c,
    WARPGROUP: gl.constexpr, FIRST: gl.constexpr, BAND: gl.constexpr, RANGE: gl.constexpr, toeplitz,
):  # fmt: skip
    """Compute Q·Kᵀ and softmax of the ``i``-th key tile, overlapping P·V of the previous one; return the new
    `ForwardState`.

    words: the `Stream` of dropout, or None. FIRST: the first key tile in the loop, of the last keys. BAND: see
    `scores`. RANGE: the tile relative to the distances with an entry, if the loop fixes it: "inside", or "outside",
    without a bias; else "any". toeplitz: for a Toeplitz bias its `diagonal_of`, or if "outside" the `Line` of the tile.
    """
    BIASED: gl.constexpr = RANGE != "outside"
    ASKS: gl.constexpr = RANGE == "any" and (c.RANGE_LO or c.RANGE_HI)
    TOEPLITZ: gl.constexpr = c.TOEPLITZ != "none"
    STARTS: gl.constexpr = (BIASED and (c.BIAS_FIRST or TOEPLITZ)) or (not BIASED and c.TOEPLITZ == "line")
    k_slot, v_slot = slot_of(pipelines.k, step), slot_of(pipelines.v, step - 1)
    entry = entry_at(i, tile, c)
    bits = mask_words(x, entry, tile, sizes, c, WARPGROUP)
    taken = state.taken
    COUNTED: gl.constexpr = c.RANGE_LO or c.RANGE_HI or c.O_IN_BIAS
    nth = taken if COUNTED else step
    shift = None
    if FIRST and c.BIAS == "cols":
        wait_full(pipelines.k, k_slot, use_of(pipelines.k, step))
    if TOEPLITZ and BIASED:
        start = near_start(toeplitz, tile.row0 + 64 * WARPGROUP, entry.n * c.BLOCK_N, c)
    elif TOEPLITZ:
        shift = far_shift(toeplitz, tile.row0 + 64 * WARPGROUP, entry.n * c.BLOCK_N, c)
    elif STARTS and ASKS:
        start, takes = start_in_range(x, pipelines, nth, tile, entry, terms, sizes, c, WARPGROUP)
    elif STARTS:
        bias = bias_scores(x, pipelines, nth, tile, entry, terms, sizes, c, WARPGROUP)
        start = start_of(bias, terms, c)
    if not STARTS:
        start = gl.zeros([64, c.BLOCK_N], gl.float32, accumulator(64, c.BLOCK_N))
    if FIRST and c.BIAS != "cols":
        wait_full(pipelines.k, k_slot, use_of(pipelines.k, step))

    # QK, and PV of the previous tile
    warp_scheduler_barrier_sync(WARPGROUP)
    if c.TOEPLITZ == "line" and not BIASED:
        start = far_start(toeplitz, pipelines.columns, c)
    s_pending = times_k(q, pipelines.k.slots, k_slot, start, STARTS, c)
    if not FIRST:
        wait_full(pipelines.v, v_slot, use_of(pipelines.v, step - 1))
        v = pipelines.v.slots.index(v_slot).reshape([c.BLOCK_N, c.BLOCK_DV])
        o_pending = times_v(state.p, v, state.o, c)
    warp_scheduler_barrier_arrive(WARPGROUP, c.WARPGROUPS)
    if not c.BIAS_FIRST:
        bias = bias_scores(x, pipelines, step, tile, entry, terms, sizes, c, WARPGROUP)
    # its fence and barrier cost least where the warpgroup waits anyway
    if STARTS and ASKS:
        if takes:
            release_bias(pipelines, nth, c, WARPGROUP)
            taken += 1
    elif BIASED:
        release_bias(pipelines, nth, c, WARPGROUP)
        if COUNTED:
            taken += 1
    if FIRST and c.O_IN_BIAS:
        release_o(pipelines, nth - 1, c, WARPGROUP)
    dropped = None
    if words is not None and not c.WORDS_LAST:  # ptxas mixes most of it with the exponentials: no boundary follows
        dropped = dropout_words(words, tile.row0 + 64 * WARPGROUP, entry.n * c.BLOCK_N, terms, c)
    s = warpgroup_mma_wait(0 if FIRST else 1, deps=(s_pending,))
    release(pipelines.k, k_slot)

    # softmax
    HIDES: gl.constexpr = BAND or c.MASK or (c.BIAS == "matrix" and BIASED) or c.BIAS == "cols" or TOEPLITZ
    s = scores(s, start if c.BIAS_FIRST else bias, bits, entry, x, tile, terms, sizes, c, WARPGROUP, BAND)
    p_next, m_i, l_i, alpha, most, excess = online_softmax(
        s, state.m, state.l, terms.exponent, c.LAZY, FIRST or HIDES, shift, None, state.excess, c.STATISTICS.ENTROPY
    )
    most = gl.maximum(most, state.most) if c.LAZY and (c.STATISTICS.MAXIMUM or c.STATISTICS.UNBIASED) else 0
    changed = 0
    if c.SUMS_BY_THREAD:
        changed = changed_rows_once_summed(alpha, l_i)
    # Two things keep the softmax above the wait for PV, so that they overlap: its results pass through that wait, which
    # LLVM respects, and the wait for the next K is before it, a basic-block boundary, which ptxas respects.
    wait_full(pipelines.k, slot_of(pipelines.k, step + 1), use_of(pipelines.k, step + 1), i + 1 < tile.count)

    # the end of PV
    o = state.o
    if not FIRST:
        o, p_next, l_i = warpgroup_mma_wait(0, deps=(o_pending, p_next, l_i))
        release(pipelines.v, v_slot)
        if c.LAZY and not c.SUMS_BY_THREAD:
            changed = changed_rows(alpha)
        o = rescaled(o, alpha, changed, c.LAZY)
    if words is not None and c.WORDS_LAST:
        dropped = dropout_words(words, tile.row0 + 64 * WARPGROUP, entry.n * c.BLOCK_N, terms, c)
    # rounded after PV has read the old P: one set of registers for both, and no copies
    return ForwardState(m_i, l_i, o, rounded(p_next, dropped, x.q.dtype, terms, c), taken, most, excess)


@gluon.jit
def skip_tile(pipelines, step, c, WARPGROUP: gl.constexpr):
    """Skip a key tile that other warpgroups compute."""
    warp_scheduler_barrier_sync(WARPGROUP)
    warp_scheduler_barrier_arrive(WARPGROUP, c.WARPGROUPS)
    wait_full(pipelines.k, slot_of(pipelines.k, step), use_of(pipelines.k, step))
    release(pipelines.k, slot_of(pipelines.k, step))
    wait_full(pipelines.v, slot_of(pipelines.v, step), use_of(pipelines.v, step))
    release(pipelines.v, slot_of(pipelines.v, step))
    skip_bias(pipelines, step, c, WARPGROUP)


@gluon.jit
def load_sink(x, tile, sizes, c, WARPGROUP: gl.constexpr):
    """Load the sink of a warpgroup's queries as float32."""
    rows = tile.row0 + 64 * WARPGROUP + gl.arange(0, 64, gl.SliceLayout(1, accumulator(64, c.BLOCK_N)))
    at = x.sink.pointer + gl.cast(tile.b, gl.int64) * x.sink.stride0 + gl.cast(tile.h, gl.int64) * x.sink.stride1
    at += (tile.seq.first_query + rows).to(gl.int64) * x.sink.stride2
    return gl.load(at, mask=rows < tile.seq.queries, other=0.0).to(gl.float32)


@gluon.jit
def special(x, NAME: gl.constexpr):
    """Return an approximation from the special-function unit."""
    ASM: gl.constexpr = f"{NAME}.approx.f32 $0, $1;"
    return gl.inline_asm_elementwise(ASM, "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def finish(
    m_i, l_i, o, x, lse, tile, terms, sizes, c, WARPGROUP: gl.constexpr,
    MOST: gl.constexpr = LARGEST, APPROXIMATE: gl.constexpr = False, top=None,
):  # fmt: skip
    """Normalise O and store the LSE; return O.

    MOST: bound of a row maximum's magnitude, beyond which scores exceed their units. APPROXIMATE: log2 within 2^-22 and
    1 / l within one unit in the last place, by one instruction each, for query tiles with few key tiles. top: with a
    sink what `with_sink` returns.
    """
    ROWS: gl.constexpr = gl.SliceLayout(1, accumulator(64, c.BLOCK_N))
    ROWS_OF_O: gl.constexpr = gl.SliceLayout(1, accumulator(64, c.BLOCK_DV))
    rows = tile.row0 + 64 * WARPGROUP + gl.arange(0, 64, ROWS)
    inside = rows < tile.seq.queries
    if x.sink is not None:
        value = top
    else:
        value = m_i * terms.exponent  # a fully masked row has m = -inf, l = 0
        value = value.to(lse.dtype.element_ty)  # rounded to float32, as the softmax has subtracted it; its sums are not
    value = (value + (special(l_i, "lg2") if APPROXIMATE else gl.log2(l_i))) * LN2
    if c.HIDES:
        # NaN marks rows for the NaN fix-up: 0 · NaN has reached O, or the bias exceeds the units of s.
        spoilt = gl.convert_layout(gl.sum(o * 0.0, axis=1), ROWS, assert_trivial=True)
        beyond = (gl.abs(m_i) > MOST) & (m_i != -float("inf"))
        value = gl.where(beyond, float("nan"), value + spoilt)
    share = 1.0 if terms.weight is None else terms.weight  # dropout weight of kept probabilities
    if APPROXIMATE:
        share *= special(gl.where(l_i == 0, 1.0, l_i), "rcp")
    else:
        share /= gl.where(l_i == 0, 1.0, l_i)
    o = o * gl.convert_layout(share, ROWS_OF_O, assert_trivial=True)[:, None]
    if c.BIAS == "rows":  # constant along the keys: it changes the LSE and not the softmax
        bias = bias_of_rows(x, tile, rows, inside, c)
        hidden = bias == -float("inf")
        value = gl.where(hidden, bias, value + bias)
        o += gl.convert_layout(gl.where(hidden, 0.0, bias - bias), ROWS_OF_O, assert_trivial=True)[:, None]
        o = gl.where(gl.convert_layout(hidden, ROWS_OF_O, assert_trivial=True)[:, None], 0.0, o)
    row = (gl.cast(tile.b, gl.int64) * sizes.heads + tile.h) * sizes.queries + (tile.seq.first_query + rows)
    gl.store(lse + row, value, mask=inside)
    return o


@gluon.jit
def bias_of_rows(x, tile, rows, inside, c):
    """Load a bias that is constant along the keys, as float32."""
    at = x.bias.pointer + gl.cast(tile.b, gl.int64) * x.bias.stride0
    at += gl.cast(tile.h // c.BIAS_GROUP, gl.int64) * x.bias.stride1
    at += (tile.seq.first_query + rows).to(gl.int64) * x.bias.stride2
    return gl.load(at, mask=inside, other=0.0).to(gl.float32)


@gluon.jit
def finish_statistics(state, l_i, lse2, sink, x, statistics, tile, terms, sizes, c, WARPGROUP: gl.constexpr):
    """Store the statistics of a warpgroup's rows. l_i: their sums without the sink; lse2: with a sink their base-2 LSE,
    which includes it."""
    ROWS: gl.constexpr = gl.SliceLayout(1, accumulator(64, c.BLOCK_N))
    rows = tile.row0 + 64 * WARPGROUP + gl.arange(0, 64, ROWS)
    inside = rows < tile.seq.queries
    most, entropy = 0.0, 0.0
    if c.STATISTICS.MAXIMUM or c.STATISTICS.UNBIASED:
        most = state.most if c.LAZY else state.m
        most *= 1.0 if terms.HAS_CAP or c.SCALE_IN_Q else terms.scale
    if c.STATISTICS.ENTROPY:
        excess = state.excess
        if c.SUMS_BY_THREAD:
            excess = gl.convert_layout(gl.sum(excess, axis=1), ROWS, assert_trivial=True)
        entropy = entropy_of(state.m * terms.exponent, l_i, excess, lse2, sink)
    unbiased = most
    if c.BIAS == "rows":
        bias = bias_of_rows(x, tile, rows, inside, c)
        hidden = bias == -float("inf")
        most = gl.where(hidden, bias, most + bias)
        unbiased, entropy = gl.where(hidden, bias, unbiased), gl.where(hidden, 0.0, entropy)
    row = (gl.cast(tile.b, gl.int64) * sizes.heads + tile.h) * sizes.queries + (tile.seq.first_query + rows)
    store_statistics(statistics, row, inside, most, unbiased, entropy, c.STATISTICS)


@gluon.jit
def compute(x, pipelines, results, terms, sizes, c, WARPGROUP: gl.constexpr):
    """Compute O and the LSE of one warpgroup's 64 queries of each tile; the role of a warpgroup."""
    O: gl.constexpr = accumulator(64, c.BLOCK_DV)  # noqa: E741
    ROWS: gl.constexpr = gl.SliceLayout(1, accumulator(64, c.BLOCK_N))
    step = 0
    taken = gl.to_tensor(0)
    if WARPGROUP == c.WARPGROUPS - 1:
        warp_scheduler_barrier_arrive(WARPGROUP, c.WARPGROUPS)  # lets the first warpgroup begin
    t = 0
    tile_index = gl.program_id(0)
    while tile_index < work_tile_count(x, sizes, c):
        tile = work_tile_at(tile_index, x, terms, sizes, c)
        slot = slot_of(pipelines.q, t, WARPGROUP, c.WARPGROUPS)
        q = parts_of_q(pipelines.q.slots, slot, c)
        wait_full(pipelines.q, slot, use_of(pipelines.q, t, c.WARPGROUPS))
        if c.Q_IN_REGISTERS:
            q = in_registers(q, x, terms, c)
            if not c.O_IN_Q:
                release_after_loads(pipelines.q, slot)
        m_i = gl.full([64], -float("inf"), gl.float32, ROWS)
        none = gl.zeros([64, c.BLOCK_N], gl.float32, accumulator(64, c.BLOCK_N))
        l_i = sums_of_rows(none, c.SUMS_BY_THREAD)
        most, excess = 0, 0
        if c.LAZY and (c.STATISTICS.MAXIMUM or c.STATISTICS.UNBIASED):
            most = m_i
        if c.STATISTICS.ENTROPY:
            excess = l_i
        state = ForwardState(m_i, l_i, gl.zeros([64, c.BLOCK_DV], gl.float32, O), 0, taken, most, excess)
        words = None
        if x.seed is not None:
            words = stream(x.seed, tile.b, tile.h, terms)
        first = first_entry(tile, terms, c, WARPGROUP)
        for _ in range(first):
            skip_tile(pipelines, step, c, WARPGROUP)
            step += 1
        HAS_BAND: gl.constexpr = terms.HAS_LO or terms.HAS_HI
        ENDS: gl.constexpr = HAS_BAND or c.RAGGED
        near, above, below = 0, 0, 0
        if c.TOEPLITZ != "none":
            near = diagonal_of(x.bias, tile.b, tile.h, sizes.heads, sizes, c)
        if c.TOEPLITZ == "number" and (c.FAR_LO or c.FAR_HI) and not HAS_BAND:  # where it does not spill
            prefetch_near(near, 64, 4, terms, sizes, c)
        state = mma_one_n_block(
            q, state, x, pipelines, words, step, tile, first, terms, sizes, c, WARPGROUP, True, ENDS, "any", near
        )
        step += 1
        rest = first + 1
        if c.PEELED:
            rest = first_full(tile, first)
            for i in range(first + 1, rest):
                state = mma_one_n_block(
                    q, state, x, pipelines, words, step, tile, i, terms, sizes, c, WARPGROUP, False, True, "any", near
                )
                step += 1
        REST: gl.constexpr = HAS_BAND and not c.PEELED
        begin, end = rest, tile.count
        if c.FAR_LO or c.FAR_HI:
            above, below = line_above(near, terms, sizes, c), line_below(near, terms, sizes, c)
        if c.FAR_HI:
            begin = first_not_above(tile, rest, terms, c, WARPGROUP)
            for i in range(rest, begin):
                state = mma_one_n_block(
                    q,
                    state,
                    x,
                    pipelines,
                    words,
                    step,
                    tile,
                    i,
                    terms,
                    sizes,
                    c,
                    WARPGROUP,
                    False,
                    REST,
                    "outside",
                    above,
                )
                step += 1
        if c.RANGE_LO:
            end = first_below_range(tile, rest, terms, c, WARPGROUP)
        elif c.FAR_LO:
            end = first_below(tile, begin, terms, c, WARPGROUP)
        if c.SORTED:
            begin = first_not_inside(tile, rest, end, terms, c, WARPGROUP)
            for i in range(rest, begin):
                state = mma_one_n_block(
                    q,
                    state,
                    x,
                    pipelines,
                    words,
                    step,
                    tile,
                    i,
                    terms,
                    sizes,
                    c,
                    WARPGROUP,
                    False,
                    REST,
                    "inside",
                    near,
                )
                step += 1
        for i in range(begin, end):
            state = mma_one_n_block(
                q, state, x, pipelines, words, step, tile, i, terms, sizes, c, WARPGROUP, False, REST, "any", near
            )
            step += 1
        if c.RANGE_LO or c.FAR_LO:  # their own loop, without the bias
            for i in range(end, tile.count):
                state = mma_one_n_block(
                    q,
                    state,
                    x,
                    pipelines,
                    words,
                    step,
                    tile,
                    i,
                    terms,
                    sizes,
                    c,
                    WARPGROUP,
                    False,
                    REST,
                    "outside",
                    below,
                )
                step += 1
        taken = state.taken

        # PV of the last tile in the loop
        if not c.O_IN_Q and not c.Q_IN_REGISTERS:
            release(pipelines.q, slot)
        v_slot = slot_of(pipelines.v, step - 1)
        wait_full(pipelines.v, v_slot, use_of(pipelines.v, step - 1))
        v = pipelines.v.slots.index(v_slot).reshape([c.BLOCK_N, c.BLOCK_DV])
        o_pending = times_v(state.p, v, state.o, c)
        tile_index = next_tile_index(tile_index, t, pipelines, c)
        if x.sink is not None:  # its load overlaps the product
            sink = load_sink(x, tile, sizes, c, WARPGROUP)
        o = warpgroup_mma_wait(0, deps=(o_pending,))
        release(pipelines.v, v_slot)
        m_i, l_i = state.m, state.l
        if c.SUMS_BY_THREAD:
            l_i = gl.convert_layout(gl.sum(l_i, axis=1), ROWS, assert_trivial=True)
        top, lse2, logit, of_keys = None, None, None, l_i
        if x.sink is not None:
            top, l_i, alpha = with_sink(m_i, l_i, sink, terms.exponent)
            o *= gl.convert_layout(alpha, gl.SliceLayout(1, O), assert_trivial=True)[:, None]
            lse2, logit = top + gl.log2(l_i), sink
        if results.statistics is not None:
            finish_statistics(state, of_keys, lse2, logit, x, results.statistics, tile, terms, sizes, c, WARPGROUP)
        o = finish(m_i, l_i, o, x, results.lse, tile, terms, sizes, c, WARPGROUP, top=top)

        # Store O by TMA, through shared memory
        if c.O_IN_BIAS:
            stage = slot_for_o(pipelines, taken, c, WARPGROUP)
            taken += 1
        elif c.O_IN_Q and c.PANELS > 1:
            panel = pipelines.o.index(slot * c.PANELS)
            stage = reinterpret(panel, x.o.dtype, x.o.block_type.shape, x.o.layout)
        else:
            stage = pipelines.o.index(slot if c.O_IN_Q else WARPGROUP)
        if not (c.O_IN_Q or c.O_IN_BIAS):
            tma.store_wait(0)  # of the previous tile
        leaving = o.to(x.q.dtype)
        stage.reshape([64, c.BLOCK_DV]).store(leaving)
        fence_async_shared()
        row = tile.row0 + 64 * WARPGROUP
        box = box_of(tile.seq.first_query, tile.seq.queries, tile.b, tile.h, row, c)
        tma_store(x.o, box, stage)
        if x.o_low is not None:  # likewise, once O is stored
            low_stage = reinterpret(stage, gl.int16, stage.shape, x.o_low.layout)
            tma.store_wait(0)
            low_stage.reshape([64, c.BLOCK_DV]).store(low_bits(o, leaving))
            fence_async_shared()
            tma_store(x.o_low, box, low_stage)
        if c.O_IN_Q:
            tma.store_wait(0)
            release(pipelines.q, slot)
        t += 1
    tma.store_wait(0)


@gluon.jit
def forward_kernel(
    q, k, v, bias, sink, seed, bits, tile_list, o, o_low, results, tile_count_semaphore, terms, sizes, c
):
    """Compute O and the LSE.

    q, k, v, o: descriptors. bias: a descriptor or a `Strided`. sink: a `Strided` or None. seed: of dropout, two
    numbers, or None. bits, tile_list: see mask_kernels; packed, see varlen; with UNDERFLOWS see underflow. o_low: with
    dropout a descriptor. results: `RowResults`. tile_count_semaphore: with DYNAMIC an int32 that is 0; with DOCUMENTS
    followed by the number of tiles.
    """
    x = ForwardOperands(q, k, v, bias, sink, seed, bits, tile_list, o, o_low, tile_count_semaphore)
    q_pipeline = new_pipeline(q, c.Q_STAGES * c.WARPGROUPS, 64, c.BLOCK_D, 1, PANELS=c.PANELS)
    OF_KEYS: gl.constexpr = c.BIAS == "cols"
    k_pipeline = new_pipeline(k, c.STAGES, c.BLOCK_N, c.BLOCK_D, c.WARPGROUPS, 2 if OF_KEYS else 1, c.PANELS)
    v_pipeline = new_pipeline(v, c.STAGES, c.BLOCK_N, c.BLOCK_DV, c.WARPGROUPS)
    bias_pipeline = Pipeline(ABSENT, ABSENT, ABSENT)
    if c.BIAS == "matrix":
        bias_pipeline = new_pipeline(bias, c.WARPGROUPS * c.BIAS_STAGES, 64, c.BLOCK_N, 1)
    elif OF_KEYS:
        BIAS_LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        of_keys = gl.allocate_shared_memory(gl.float32, [c.STAGES, c.BLOCK_N], BIAS_LAYOUT)
        bias_pipeline = Pipeline(of_keys, ABSENT, ABSENT)
    if c.O_IN_Q:
        stage = q_pipeline.slots
    elif c.O_IN_BIAS:
        stage = bias_pipeline.slots
    else:
        stage = new_tiles(o, c.WARPGROUPS, 64, c.BLOCK_DV)
    index_pipeline = Pipeline(ABSENT, ABSENT, ABSENT)
    if c.DYNAMIC:
        READERS: gl.constexpr = c.WARPGROUPS * (2 if c.BIAS == "matrix" else 1)
        index_pipeline = new_pipeline_of_numbers(2, READERS)
    columns = ABSENT
    if c.TOEPLITZ == "line" and (c.FAR_LO or c.FAR_HI):
        columns = new_columns(c)
    pipelines = ForwardPipelines(q_pipeline, k_pipeline, v_pipeline, bias_pipeline, stage, index_pipeline, columns)
    fence_async_shared()
    FEW: gl.constexpr = c.LOADING_REGISTERS
    MANY: gl.constexpr = c.COMPUTING_REGISTERS
    if c.WARPGROUPS == 2 and c.BIAS != "matrix":
        gl.warp_specialize(
            [
                (compute, (x, pipelines, results, terms, sizes, c, 0)),
                (compute, (x, pipelines, results, terms, sizes, c, 1)),
                (load, (x, pipelines, terms, sizes, c)),
            ],
            [4, 1],
            [MANY, FEW],
        )
    elif c.WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (compute, (x, pipelines, results, terms, sizes, c, 0)),
                (compute, (x, pipelines, results, terms, sizes, c, 1)),
                (load, (x, pipelines, terms, sizes, c)),
                (load_bias, (x, pipelines, terms, sizes, c, 0)),
                (load_bias, (x, pipelines, terms, sizes, c, 1)),
            ],
            [4, 1, 1, 1],
            [MANY, FEW, FEW, FEW],
        )
    else:
        gl.warp_specialize(
            [
                (compute, (x, pipelines, results, terms, sizes, c, 0)),
                (compute, (x, pipelines, results, terms, sizes, c, 1)),
                (compute, (x, pipelines, results, terms, sizes, c, 2)),
                (load, (x, pipelines, terms, sizes, c)),
            ],
            [4, 4, 1],
            [MANY, MANY, FEW],
        )
