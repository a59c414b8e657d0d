"""Products K·Qᵀ and dP and the softmax between them, by subtiles: a query tile or half of one."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma

from tilewise.backends.gluon.pipeline import ABSENT, hidden, only_slot, slot_of, use_of, wait_full
from tilewise.backends.gluon.relative import CUT
from tilewise.backends.gluon.score import in_units, score_tile
from tilewise.backends.gluon.sm90.backward.relative import ANY, tile_state, without_range
from tilewise.backends.gluon.sm90.common.key_mask import without_nan
from tilewise.backends.gluon.sm90.common.wgmma import accumulator, columns_of, times_transposed


class QueryStages(NamedTuple):
    """Pipeline of query tiles; each slot has one pair of barriers, and dO its own if it has fewer slots."""

    pipeline: Any  # Q, and the barriers of all
    do: Any
    stats: Any
    bias: Any
    bits: Any
    do_pipeline: Any  # barriers of dO and delta
    bias_pipeline: Any  # batched: barriers of the shared bias


@gluon.jit
def subtile_of(tile, SUBTILE: gl.constexpr, c):
    """Return the rows of a tile in shared memory that belong to one subtile of the queries."""
    if c.M_SUBTILES == 1:
        return tile
    else:
        return tile.slice(SUBTILE * c.SUBTILE_M, c.SUBTILE_M, 0)


@gluon.jit
def start_of(rows, step, corner, SUBTILE: gl.constexpr, terms, c, RANGE: gl.constexpr = ANY):
    """Return the transposed bias of a subtile in score units; corner, RANGE: see `backward.relative`."""
    if RANGE == "outside":
        return ABSENT
    elif c.BIAS == "matrix" and (c.RANGE_LO or c.RANGE_HI) and RANGE == "any":
        start = gl.zeros([c.BLOCK_N, c.SUBTILE_M], gl.float32, accumulator(c.BLOCK_N, c.SUBTILE_M, c.WARPS))
        found = tile_state(corner, terms, c)
        if found >= CUT:
            tile = subtile_of(rows.bias.index(slot_of(rows.pipeline, step)).reshape([c.BLOCK_M, c.BLOCK_N]), SUBTILE, c)
            bias = tile.permute((1, 0)).load(accumulator(c.BLOCK_N, c.SUBTILE_M, c.WARPS))
            start = in_units(bias, terms.inverse)
            if found == CUT:
                start = without_range(start, corner, SUBTILE, terms, c)
        return start
    elif c.BIAS == "matrix":
        tile = subtile_of(rows.bias.index(slot_of(rows.pipeline, step)).reshape([c.BLOCK_M, c.BLOCK_N]), SUBTILE, c)
        bias = tile.permute((1, 0)).load(accumulator(c.BLOCK_N, c.SUBTILE_M, c.WARPS))
        if c.HIDES_KEYS:
            bias = without_nan(bias)
        start = in_units(bias, terms.inverse)
        if RANGE == "near":  # noqa: SIM102  (one is compile-time, the other is not)
            if tile_state(corner, terms, c) == CUT:
                start = without_range(start, corner, SUBTILE, terms, c)
        return start
    else:
        return ABSENT


@gluon.jit
def first_start_of(rows, step, needed, corner, terms, c, RANGE: gl.constexpr = ANY):
    """Wait for the tiles of a step and return `start_of` its first subtile."""
    wait_full(rows.pipeline, slot_of(rows.pipeline, step), use_of(rows.pipeline, step), needed)
    if c.ELEMENTS > 1:
        wait_full(rows.bias_pipeline, slot_of(rows.bias_pipeline, step), use_of(rows.bias_pipeline, step), needed)
    return start_of(rows, step, corner, 0, terms, c, RANGE)


@gluon.jit
def statistics(stats, SUBTILE: gl.constexpr, c):
    """Return the LSE in base 2, or −delta, of a subtile's queries."""
    return subtile_of(stats, SUBTILE, c).load(gl.SliceLayout(0, accumulator(c.BLOCK_N, c.SUBTILE_M, c.WARPS)))


@gluon.jit
def lse_of(rows, step, SUBTILE: gl.constexpr, c):
    return statistics(rows.stats.index(2 * (slot_of(rows.pipeline, step))), SUBTILE, c)


@gluon.jit
def probabilities(s, start, lse, shared, terms, c):
    """Return P of a transposed subtile, before masking, and the derivative of the softcap."""
    s, slope = score_tile(s, start, terms, c.BIAS == "matrix" and terms.HAS_CAP, False)
    if c.BIAS == "cols":
        added = shared.added.load(gl.SliceLayout(1, s.type.layout))
        p = gl.exp2(s * terms.exponent + (added[:, None] - lse[None, :]))
    else:
        p = gl.exp2(s * terms.exponent - lse[None, :])
    return p, slope


@gluon.jit
def operand(tile, IN_REGISTERS: gl.constexpr, c):
    """Return K or V as the first operand of K·Qᵀ or dP if it is kept in registers, else ABSENT."""
    if IN_REGISTERS:
        return tile.load(gl.DotOperandLayout(0, accumulator(c.BLOCK_N, c.SUBTILE_M, c.WARPS), 2))
    else:
        return ABSENT


@gluon.jit
def slot_of_keys(shared, c):
    """Return the slot of K."""
    if c.KEY_STAGES > 1:
        return hidden(shared.slot)
    else:
        return only_slot(c)


@gluon.jit
def slot_of_values(shared, c):
    """Return the slot of V."""
    if c.VALUE_STAGES < c.KEY_STAGES:
        return only_slot(c)
    else:
        return slot_of_keys(shared, c)


@gluon.jit
def times(first, tile, slot, rows, start, STARTS: gl.constexpr, IN_REGISTERS: gl.constexpr, COLS: gl.constexpr, c):
    """Issue the product of K or V with a subtile of Q or dO, transposed. ``first``: see `operand`. COLS: the columns
    that it multiplies."""
    if IN_REGISTERS:
        return warpgroup_mma(first, rows.permute((1, 0)), start, use_acc=STARTS, is_async=True)
    else:
        keys = columns_of(tile.index(slot).reshape([c.BLOCK_N, rows.shape[1]]), COLS)
        return times_transposed(keys, columns_of(rows, COLS), start, STARTS)


@gluon.jit
def begin(start, rows, shared, step, SUBTILE: gl.constexpr, terms, c, STARTS: gl.constexpr):
    """Issue K·Qᵀ of a subtile of a loaded step (past the last: of stale tiles). STARTS: from ``start``."""
    q = subtile_of(rows.pipeline.slots.index(slot_of(rows.pipeline, step)).reshape([c.BLOCK_M, c.BLOCK_D]), SUBTILE, c)
    if not STARTS:
        start = gl.zeros([c.BLOCK_N, c.SUBTILE_M], gl.float32, accumulator(c.BLOCK_N, c.SUBTILE_M, c.WARPS))
    s = times(shared.k_operand, shared.k, slot_of_keys(shared, c), q, start, STARTS, c.K_IN_REGISTERS, c.COLS_OF_QK, c)
    if c.HIDES_KEYS:
        s = warpgroup_mma(shared.hiding[0], shared.hiding[1].permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def begin_ahead(rows, shared, step, steps, corner, terms, c):
    """Issue K·Qᵀ of a step's first subtile ahead; return its `start_of`, the product and its LSE."""
    start = first_start_of(rows, step, step < steps, corner, terms, c)
    STARTS: gl.constexpr = c.BIAS == "matrix" and not terms.HAS_CAP
    return start, begin(start, rows, shared, step, 0, terms, c, STARTS), lse_of(rows, step, 0, c)


@gluon.jit
def minus_delta_of(rows, slot, SUBTILE: gl.constexpr, c):
    return statistics(rows.stats.index(2 * slot + 1), SUBTILE, c)


@gluon.jit
def begin_dp(rows, shared, slot, SUBTILE: gl.constexpr, terms, c):
    """Issue dP - delta of a subtile, transposed; dP alone with dropout."""
    S: gl.constexpr = accumulator(c.BLOCK_N, c.SUBTILE_M, c.WARPS)
    STARTS: gl.constexpr = terms.threshold is None
    start = gl.zeros([c.BLOCK_N, c.SUBTILE_M], gl.float32, S)
    if STARTS:
        start, _ = gl.broadcast(minus_delta_of(rows, slot, SUBTILE, c)[None, :], start)
    do = subtile_of(rows.do.index(slot).reshape([c.BLOCK_M, c.BLOCK_DV]), SUBTILE, c)
    return times(
        shared.v_operand, shared.v, slot_of_values(shared, c), do, start, STARTS, c.V_IN_REGISTERS, c.COLS_OF_V, c
    )


@gluon.jit
def softmax_gradient(p, dp, words, rows, slot, SUBTILE: gl.constexpr, terms, c):
    """Return dS = P (dP - delta) of a transposed subtile; with dropout dP counts only where P is kept.

    p: with dropout it includes the weight, by which delta has been divided. dp: of `begin_dp`."""
    if words is not None:
        minus_delta = minus_delta_of(rows, slot, SUBTILE, c)[None, :]
        return gl.maximum(p, 0.0) * dp + gl.abs(p) * minus_delta
    else:
        return p * dp
