"""Kernels of P, by the online softmax: maxima and sums of a row's parts are merged to those of the row."""

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.ops.row_softmax.triton.rows import again, elements, gather, place, publish, row_numbers, row_start


@triton.jit
def _starts(x, bias, mask, outer, rows, sizes, c):
    """Return the row addresses of x, bias and mask; x's for an absent bias or mask."""
    start = row_start(x, outer, rows, sizes, c)
    bias_start = row_start(bias, outer, rows, sizes, c) if c.BIAS else start
    mask_start = row_start(mask, outer, rows, sizes, c) if c.MASK else start
    return start, bias_start, mask_start


@triton.jit
def _scores(x, bias, mask, starts, cols, valid, end, scale, POLICY: tl.constexpr, c):
    """Return a tile of scores [ROWS, columns], -inf if masked or outside; scaled only if there is a bias."""
    inside = valid[:, None] & (cols < end)[None, :]
    at = elements(x, starts[0], cols, c)
    s = tl.load(at, mask=inside, other=-float("inf"), eviction_policy=POLICY).to(tl.float32)
    if c.BIAS:
        s = s * scale + tl.load(elements(bias, starts[1], cols, c), mask=inside, other=0.0).to(tl.float32)
    if c.MASK:
        visible = tl.load(elements(mask, starts[2], cols, c), mask=inside, other=0)
        s = tl.where(visible != 0, s, -float("inf"))
    return s


@triton.jit
def _base(m):
    """Return the number to subtract from scores with maximum ``m``: 0 if the row is fully masked."""
    return tl.where(m == -float("inf"), 0.0, m)


@triton.jit
def _join(m_parts, l_parts, factor):
    """Return (m, l) [ROWS] of rows, merged from their parts [ROWS, PARTS]."""
    m = tl.max(m_parts, 1)
    # Subtracting before scaling, here and below, prevents an overflow for every finite score.
    return m, tl.sum(l_parts * tl.exp2((m_parts - _base(m)[:, None]) * factor), 1)


@triton.jit
def _store(p, start, cols, valid, end, tile, c):
    inside = valid[:, None] & (cols < end)[None, :]
    at = elements(p, start, cols, c)
    tl.store(at, tile.to(p[0].dtype.element_ty), mask=inside)


@triton.jit
def tile_kernel(x, bias, mask, p, slots, sizes, length, scale, factor, c):
    """Compute P of rows that stay on chip, in one program or in PARTS that wait for each other's statistics.
    ``factor``: log2(e), times the scale if there is no bias. ``slots``: zeros, see `rows.publish`."""
    pid = tl.program_id(0)
    outer, rows = place(pid // c.PARTS, sizes, c)
    valid = rows < sizes[c.AXES - 1]
    cols = pid % c.PARTS * c.BLOCK + tl.arange(0, c.BLOCK)
    starts = _starts(x, bias, mask, outer, rows, sizes, c)
    if c.PACK:
        inside = valid[:, None] & (cols < length)[None, :]
        raw = tl.load(elements(x, starts[0], cols, c), mask=inside, other=-float("inf"))
        s = raw.to(tl.float32)
    else:
        s = _scores(x, bias, mask, starts, cols, valid, length, scale, "", c)
    m = tl.max(s, 1)
    if c.PACK:
        s = again(raw, c).to(tl.float32)
    e = tl.exp2((s - _base(m)[:, None]) * factor)
    m_row, l_row = m, tl.sum(e, 1)
    if c.PARTS > 1:
        numbers = row_numbers(outer, rows, sizes, c)
        publish(slots, numbers, valid, pid % c.PARTS, m, l_row, True, c)
        m_parts, l_parts = gather(slots, numbers, valid, True, c)
        m_row, l_row = _join(m_parts, l_parts, factor)
    share = 1.0 / tl.where(l_row == 0, 1.0, l_row)  # a fully masked row is 0
    if c.PACK:
        e = tl.exp2((again(raw, c).to(tl.float32) - _base(m_row)[:, None]) * factor)
    else:
        share *= tl.exp2((m - _base(m_row)) * factor)
    _store(p, row_start(p, outer, rows, sizes, c), cols, valid, length, e * share[:, None], c)


@triton.jit
def _walk(x, bias, mask, starts, first, last, valid, scale, factor, c):
    """Return (m, l) [ROWS] of columns ``first`` to ``last``, one tile at a time."""
    m = tl.full([c.ROWS], -float("inf"), tl.float32)
    l = tl.zeros([c.ROWS], tl.float32)  # noqa: E741
    for begin in tl.range(first, last, c.BLOCK):
        s = _scores(x, bias, mask, starts, begin + tl.arange(0, c.BLOCK), valid, last, scale, "evict_last", c)
        m_new = tl.maximum(m, tl.max(s, 1))
        base = _base(m_new)
        # NaN does not propagate through a maximum, but through the sum
        l = l * tl.exp2((m - base) * factor) + tl.sum(tl.exp2((s - base[:, None]) * factor), 1)  # noqa: E741
        m = m_new
    return m, l


@triton.jit
def statistics_kernel(x, bias, mask, slots, sizes, length, span, scale, factor, c):
    """Compute (m, l) of each of the PARTS of rows, ``span`` columns long."""
    pid = tl.program_id(0)
    outer, rows = place(pid // c.PARTS, sizes, c)
    valid = rows < sizes[c.AXES - 1]
    first = pid % c.PARTS * span
    starts = _starts(x, bias, mask, outer, rows, sizes, c)
    m, l = _walk(x, bias, mask, starts, first, tl.minimum(first + span, length), valid, scale, factor, c)  # noqa: E741
    publish(slots, row_numbers(outer, rows, sizes, c), valid, pid % c.PARTS, m, l, False, c)


@triton.jit
def loop_kernel(x, bias, mask, p, slots, sizes, length, span, scale, factor, c):
    """Compute P of a part of rows, one tile at a time, from the statistics in ``slots``. With one part, the row is read
    twice here, the second time from the L2 cache."""
    pid = tl.program_id(0)
    outer, rows = place(pid // c.PARTS, sizes, c)
    valid = rows < sizes[c.AXES - 1]
    first = pid % c.PARTS * span
    last = tl.minimum(first + span, length)
    starts = _starts(x, bias, mask, outer, rows, sizes, c)
    if c.PARTS == 1:
        m, l = _walk(x, bias, mask, starts, first, last, valid, scale, factor, c)  # noqa: E741
    else:
        m_parts, l_parts = gather(slots, row_numbers(outer, rows, sizes, c), valid, False, c)
        m, l = _join(m_parts, l_parts, factor)  # noqa: E741
    base = _base(m)
    share = 1.0 / tl.where(l == 0, 1.0, l)
    p_start = row_start(p, outer, rows, sizes, c)
    for begin in tl.range(first, last, c.BLOCK):
        cols = begin + tl.arange(0, c.BLOCK)
        s = _scores(x, bias, mask, starts, cols, valid, last, scale, "evict_first", c)
        _store(p, p_start, cols, valid, last, tl.exp2((s - base[:, None]) * factor) * share[:, None], c)
