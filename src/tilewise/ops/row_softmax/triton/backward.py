"""Kernels of dS = P ∘ (dP - delta), delta = rowsum(dP ∘ P), and of dx = scale · dS.

dbias is dS if bias has x's shape.

If P is 0, dS is 0 for any dP, NaN included.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.ops.row_softmax.triton.rows import again, elements, gather, place, publish, row_numbers, row_start


@triton.jit
def _load(dp, p, starts, cols, valid, end, POLICY: tl.constexpr, c):
    """Load tiles of P and dP [ROWS, columns]; 0 outside."""
    inside = valid[:, None] & (cols < end)[None, :]
    p_tile = tl.load(elements(p, starts[1], cols, c), mask=inside, other=0.0, eviction_policy=POLICY)
    dp_tile = tl.load(elements(dp, starts[0], cols, c), mask=inside, other=0.0, eviction_policy=POLICY)
    return p_tile, dp_tile


@triton.jit
def delta_share(p_tile, dp_tile):
    """Return the contribution of a tile to rowsum(dP ∘ P)."""
    p_tile = p_tile.to(tl.float32)
    return tl.sum(tl.where(p_tile != 0, p_tile * dp_tile.to(tl.float32), 0.0), 1)


@triton.jit
def score_gradient(p_tile, dp_tile, delta):
    """Return dS of a tile."""
    p_tile = p_tile.to(tl.float32)
    return tl.where(p_tile != 0, p_tile * (dp_tile.to(tl.float32) - delta[:, None]), 0.0)


@triton.jit
def _store(dx, dbias, starts, ds, cols, valid, end, scale, c):
    inside = valid[:, None] & (cols < end)[None, :]
    if c.DX:
        tile = (ds * scale).to(dx[0].dtype.element_ty)
        tl.store(elements(dx, starts[2], cols, c), tile, mask=inside)
    if c.DBIAS:
        tl.store(elements(dbias, starts[3], cols, c), ds.to(dbias[0].dtype.element_ty), mask=inside)


@triton.jit
def _starts(dp, p, dx, dbias, outer, rows, sizes, c):
    """Return the row addresses of dP, P, dx and dbias; dP's for an absent dx or dbias."""
    start = row_start(dp, outer, rows, sizes, c)
    dx_start = row_start(dx, outer, rows, sizes, c) if c.DX else start
    dbias_start = row_start(dbias, outer, rows, sizes, c) if c.DBIAS else start
    return start, row_start(p, outer, rows, sizes, c), dx_start, dbias_start


@triton.jit
def tile_kernel(dp, p, dx, dbias, row_delta, slots, sizes, length, scale, c):
    """Compute dS of rows that stay on chip, like `forward.tile_kernel`. ``row_delta``: delta of each row, or None."""
    pid = tl.program_id(0)
    outer, rows = place(pid // c.PARTS, sizes, c)
    valid = rows < sizes[c.AXES - 1]
    cols = pid % c.PARTS * c.BLOCK + tl.arange(0, c.BLOCK)
    starts = _starts(dp, p, dx, dbias, outer, rows, sizes, c)
    p_tile, dp_tile = _load(dp, p, starts, cols, valid, length, "", c)
    delta = delta_share(p_tile, dp_tile)
    numbers = row_numbers(outer, rows, sizes, c)
    if c.PARTS > 1:
        publish(slots, numbers, valid, pid % c.PARTS, delta, tl.full([c.ROWS], 1.0, tl.float32), True, c)
        parts, _ = gather(slots, numbers, valid, True, c)
        delta = tl.sum(parts, 1)
    if c.DELTA:
        tl.store(row_delta + numbers, delta, mask=valid)
    ds = score_gradient(again(p_tile, c), again(dp_tile, c), delta)
    _store(dx, dbias, starts, ds, cols, valid, length, scale, c)


@triton.jit
def _walk(dp, p, starts, first, last, valid, c):
    """Return the contribution of columns ``first`` to ``last`` to delta."""
    delta = tl.zeros([c.ROWS], tl.float32)
    for begin in tl.range(first, last, c.BLOCK):
        p_tile, dp_tile = _load(dp, p, starts, begin + tl.arange(0, c.BLOCK), valid, last, "evict_last", c)
        delta += delta_share(p_tile, dp_tile)
    return delta


@triton.jit
def statistics_kernel(dp, p, slots, sizes, length, span, c):
    """Compute the contributions to delta of each of the PARTS of rows, ``span`` columns long."""
    pid = tl.program_id(0)
    outer, rows = place(pid // c.PARTS, sizes, c)
    valid = rows < sizes[c.AXES - 1]
    first = pid % c.PARTS * span
    starts = row_start(dp, outer, rows, sizes, c), row_start(p, outer, rows, sizes, c)
    delta = _walk(dp, p, starts, first, tl.minimum(first + span, length), valid, c)
    publish(slots, row_numbers(outer, rows, sizes, c), valid, pid % c.PARTS, delta, delta, False, c)


@triton.jit
def loop_kernel(dp, p, dx, dbias, row_delta, slots, sizes, length, span, scale, c):
    """Compute dS of a part of rows, one tile at a time, like `forward.loop_kernel`."""
    pid = tl.program_id(0)
    outer, rows = place(pid // c.PARTS, sizes, c)
    valid = rows < sizes[c.AXES - 1]
    first = pid % c.PARTS * span
    last = tl.minimum(first + span, length)
    starts = _starts(dp, p, dx, dbias, outer, rows, sizes, c)
    numbers = row_numbers(outer, rows, sizes, c)
    if c.PARTS == 1:
        delta = _walk(dp, p, starts, first, last, valid, c)
    else:
        parts, _ = gather(slots, numbers, valid, False, c)
        delta = tl.sum(parts, 1)
    if c.DELTA:
        tl.store(row_delta + numbers, delta, mask=valid)
    for begin in tl.range(first, last, c.BLOCK):
        cols = begin + tl.arange(0, c.BLOCK)
        p_tile, dp_tile = _load(dp, p, starts, cols, valid, last, "evict_first", c)
        _store(dx, dbias, starts, score_gradient(p_tile, dp_tile, delta), cols, valid, last, scale, c)
