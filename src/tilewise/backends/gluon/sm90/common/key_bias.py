"""A bias over the keys alone: it comes beside K in the forward, and its gradient is a sum in registers."""

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
    """The bias of the keys n0 + ``cols`` of a sequence as it is stored; 0 past the last."""
    at = x.bias.pointer + gl.cast(b, gl.int64) * x.bias.stride0
    at += gl.cast(h // c.BIAS_GROUP, gl.int64) * x.bias.stride1
    at += gl.cast(seq.first_key + n0, gl.int64) * x.bias.stride3
    return gl.load(at + cols.to(gl.int64) * x.bias.stride3, mask=cols < seq.keys - n0, other=0.0)


@gluon.jit
def load_bias_of_keys(x, pipelines, slot, tile, n0, terms, c):
    """In the forward, by the warp that loads K: the bias of a tile's keys, in the units of the scores, beside their K
    in ``slot``, which is free for both, and whose barrier is full when both are there.

    Its way from memory is under that of K: before K it would delay it, where the slots of K have been free for long.
    """
    cols = gl.arange(0, c.BLOCK_N, gl.BlockedLayout([c.BLOCK_N // 32], [32], [1], [0]))
    pipelines.bias.slots.index(slot).store(
        in_units(bias_of_keys(x, tile.b, tile.h, tile.seq, n0, cols, c), terms.inverse)
    )
    mbarrier.arrive(pipelines.k.full.index(slot), count=1)


@gluon.jit
def keep_bias_of_keys(x, shared, work_tile, h, c):
    """In the backward: the bias of this program's keys, where all queries share it, in base 2 into shared memory:
    registers are full."""
    cols = gl.arange(0, c.BLOCK_N, gl.SliceLayout(1, accumulator(c.BLOCK_N, c.SUBTILE_M, c.WARPS)))
    bias = bias_of_keys(x, work_tile.b, h, work_tile.seq, work_tile.n0, cols, c)
    shared.added.store(bias.to(gl.float32) * LOG2E)
    warps_barrier()  # here, or the compiler puts it into the loop


@gluon.jit
def sums_of(ds, c):
    """The sum of dS over the queries by thread, [keys, 4], which meet at the end; [keys] where order matters; where
    warpgroups share the keys [keys, 2], one for each."""
    if c.SHARES_KEYS:
        return gl.sum(ds.reshape([c.BLOCK_N, 2, c.SUBTILE_M // 2]), axis=2)
    else:
        return sums_of_rows(ds, not c.ORDERED)  # where order matters registers are fuller


@gluon.jit
def store_sums(sums, x, work_tile, h, sizes, c):
    """dBias of this program's keys by one head's queries, float32 (B, H, N), or (1, H, T) of a packed batch."""
    L: gl.constexpr = gl.SliceLayout(1, accumulator(c.BLOCK_N, c.SUBTILE_M, c.WARPS))
    if c.SHARES_KEYS or not c.ORDERED:
        sums = gl.convert_layout(gl.sum(sums, axis=1), L, assert_trivial=not c.SHARES_KEYS)
    cols = work_tile.n0 + gl.arange(0, c.BLOCK_N, L)
    head = (work_tile.b * sizes.kv_heads * sizes.group + h).to(gl.int64) * sizes.keys + work_tile.seq.first_key
    gl.store(x.dbias + head + cols, sums, mask=cols < work_tile.seq.keys)
