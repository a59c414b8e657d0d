"""Bias over the keys alone: the forward loads it with K, and its gradient is summed in registers."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from tilewise.backends.gluon.compat import warps_barrier
from tilewise.backends.gluon.score import in_units
from tilewise.backends.gluon.sm90.common.softmax import sums_of_rows
from tilewise.backends.gluon.sm90.common.wgmma import accumulator

LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def bias_of_keys(x, b, h, seq, n0, cols, c):
    """Return the bias of a sequence's keys n0 + ``cols`` as stored; 0 past the last key."""
    at = x.bias.pointer + gl.cast(b, gl.int64) * x.bias.stride0
    at += gl.cast(h // c.BIAS_GROUP, gl.int64) * x.bias.stride1
    at += gl.cast(seq.first_key + n0, gl.int64) * x.bias.stride3
    return gl.load(at + cols.to(gl.int64) * x.bias.stride3, mask=cols < seq.keys - n0, other=0.0)


@gluon.jit
def load_bias_of_keys(x, pipelines, slot, tile, n0, terms, c):
    """Store the bias of a tile's keys, in the units of the scores, beside their K; called by the forward's loading
    warp. ``slot`` is free for both, and its barrier is full once both are loaded. Its load overlaps that of K: before K
    it would delay K, whose slots may have been free for long."""
    cols = gl.arange(0, c.BLOCK_N, gl.BlockedLayout([c.BLOCK_N // 32], [32], [1], [0]))
    pipelines.bias.slots.index(slot).store(
        in_units(bias_of_keys(x, tile.b, tile.h, tile.seq, n0, cols, c), terms.inverse)
    )
    mbarrier.arrive(pipelines.k.full.index(slot), count=1)


@gluon.jit
def keep_bias_of_keys(x, shared, work_tile, h, c):
    """Store the bias of this program's keys in base 2 in shared memory, for the backward: registers are full."""
    cols = gl.arange(0, c.BLOCK_N, gl.SliceLayout(1, accumulator(c.BLOCK_N, c.SUBTILE_M, c.WARPS)))
    bias = bias_of_keys(x, work_tile.b, h, work_tile.seq, work_tile.n0, cols, c)
    shared.added.store(bias.to(gl.float32) * LOG2E)
    warps_barrier()  # here, or the compiler moves it into the loop


@gluon.jit
def sums_of(ds, c):
    """Return the sums of dS over the queries: by thread [keys, 4]; ordered [keys]; with shared keys [keys, 2] by
    warpgroup."""
    if c.SHARES_KEYS:
        return gl.sum(ds.reshape([c.BLOCK_N, 2, c.SUBTILE_M // 2]), axis=2)
    else:
        return sums_of_rows(ds, not c.ORDERED)  # ordered code has fewer free registers


@gluon.jit
def store_sums(sums, x, work_tile, h, sizes, c):
    """Store dBias of this program's keys from one head's queries, float32 (B, H, N), or (1, H, T) if packed."""
    L: gl.constexpr = gl.SliceLayout(1, accumulator(c.BLOCK_N, c.SUBTILE_M, c.WARPS))
    if c.SHARES_KEYS or not c.ORDERED:
        sums = gl.convert_layout(gl.sum(sums, axis=1), L, assert_trivial=not c.SHARES_KEYS)
    cols = work_tile.n0 + gl.arange(0, c.BLOCK_N, L)
    head = (work_tile.b * sizes.kv_heads * sizes.group + h).to(gl.int64) * sizes.keys + work_tile.seq.first_key
    gl.store(x.dbias + head + cols, sums, mask=cols < work_tile.seq.keys)
