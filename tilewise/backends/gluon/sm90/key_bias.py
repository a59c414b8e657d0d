"""A bias over the keys alone in the backward, whose gradient is a sum in registers."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise.backends.gluon.compat import warps_barrier
from tilewise.backends.gluon.sm90.softmax import sums_of_rows
from tilewise.backends.gluon.sm90.wgmma import accumulator

LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def keep_bias_of_keys(x, shared, work_tile, h, sizes, c):
    """The bias of this program's keys, where all queries share it, in base 2 into shared memory: registers are full."""
    cols = gl.arange(0, c.BLOCK_N, gl.SliceLayout(1, accumulator(c.BLOCK_N, c.SUBTILE_M, c.WARPS)))
    seq, n0 = work_tile.seq, work_tile.n0
    at = x.bias.pointer + gl.cast(work_tile.b, gl.int64) * x.bias.stride0
    at += gl.cast(h // c.BIAS_GROUP, gl.int64) * x.bias.stride1
    at += gl.cast(seq.first_key + n0, gl.int64) * x.bias.stride3
    at = at + cols.to(gl.int64) * x.bias.stride3
    bias = gl.load(at, mask=cols < seq.keys - n0, other=0.0)
    shared.added.store(bias.to(gl.float32) * LOG2E)
    warps_barrier()  # here, or the compiler puts it into the loop


@gluon.jit
def sums_of(ds, c):
    """The sum of dS over the queries by thread, [keys, 4], which meet at the end; where warpgroups share the keys
    [keys, 2], one for each."""
    if c.SHARES_KEYS:
        return gl.sum(ds.reshape([c.BLOCK_N, 2, c.SUBTILE_M // 2]), axis=2)
    else:
        return sums_of_rows(ds, True)


@gluon.jit
def store_sums(sums, x, work_tile, h, sizes, c):
    """dBias of this program's keys by one head's queries, float32 (B, H, N), or (1, H, T) of a packed batch."""
    L: gl.constexpr = gl.SliceLayout(1, accumulator(c.BLOCK_N, c.SUBTILE_M, c.WARPS))
    sums = gl.convert_layout(gl.sum(sums, axis=1), L, assert_trivial=not c.SHARES_KEYS)
    cols = work_tile.n0 + gl.arange(0, c.BLOCK_N, L)
    head = (work_tile.b * sizes.kv_heads * sizes.group + h).to(gl.int64) * sizes.keys + work_tile.seq.first_key
    gl.store(x.dbias + head + cols, sums, mask=cols < work_tile.seq.keys)
