"""Skip far tiles of a linear bias such as ALiBi whose probabilities are exactly 0, proved from norms of q and k.

Every query i sees the key at distance d* = `toeplitz.sure_distance`. Let A = scale · max|q| · max|k| of a head: before
the bias w all scores are within ±A, so that a row's maximum, and its LSE, are at least w(d*) - A; a sink raises them.
So a probability at distance d is at most exp(w(d) - w(d*) + 2A). Where that is less than exp(-`MARGIN`) it is 0 in
float32, and so is its contribution, as 0 times a finite number is 0. On a falling line this holds for all distances
beyond some: a head's reach is the least and the greatest distance that count.

The margin covers, in powers of two: 150 for a float32 of 0; 8 by which a lazy maximum may lag; 12, and v's norm, for
sums of the first tiles, before the maximum is known, or 15 for the dropout weight. With norms that are not finite, also
of v and dO, nothing is skipped: 0 · inf is NaN.

The result is bitwise that of a call without skipping, with one exception: above the near distances, where tiles start,
a lazy maximum starts from another tile, and if the line is so flat that it does not pass `softmax.SLACK` from one tile
to the next, it may lag by another number of powers of two, from which P is rounded.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewise.backends import Inputs, allocation
from tilewise.backends.gluon.sm90.common.config import backward_width
from tilewise.backends.gluon.sm90.common.toeplitz import PAD
from tilewise.backends.gluon.toeplitz import far_of, sure_distance
from tilewise.backends.launch.launcher import POINTER, Launch, strided_if_any, strided_rows
from tilewise.spec.problem import Problem

MARGIN = tl.constexpr(120.0)  # in units of the LSE: 173 powers of two
ROUNDING = tl.constexpr(1.01)  # for rounding of norms, and of tensor-core sums
CANCELS = tl.constexpr(4e-6)  # relative error of differences of large entries
FARTHEST = tl.constexpr(1 << 29)  # beyond any distance, and far from overflow when indices are added
ELEMENTS = 8192  # of a tensor that one program reads
NORMS_AT_ONCE = tl.constexpr(128)


class Extents(NamedTuple):
    """Sizes of a call, and the assignment of its rows to programs of `norms_kernel`."""

    heads: int
    group: int
    queries: int
    keys: int
    head_dim: int
    value_dim: int
    query_blocks: int  # blocks per head
    key_blocks: int
    of_keys: int  # the first program with keys
    scale: float
    far_lo: int
    far_hi: int
    sure: int  # d* of the module docstring


@triton.jit
def norms_kernel(q, k, v, do, norms, e, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Write the greatest squared norms of each block of rows, of q and do, then of k and v: two numbers per program,
    inf for NaN.

    q, k, v, do: `Strided`; do may be None, which counts as 0.
    """
    pid = tl.program_id(0)
    if pid < e.of_keys:
        row0, bh = pid % e.query_blocks * ROWS, pid // e.query_blocks
        first = _greatest_norm(q, bh // e.heads, bh % e.heads, row0, e.queries, e.head_dim, ROWS, WIDTH)
        second = 0.0
        if do is not None:
            second = _greatest_norm(do, bh // e.heads, bh % e.heads, row0, e.queries, e.value_dim, ROWS, WIDTH)
        tl.store(norms + 2 * pid, first)
        tl.store(norms + 2 * pid + 1, second)
    else:
        kv_heads = e.heads // e.group
        row0, bh = (pid - e.of_keys) % e.key_blocks * ROWS, (pid - e.of_keys) // e.key_blocks
        first = _greatest_norm(k, bh // kv_heads, bh % kv_heads, row0, e.keys, e.head_dim, ROWS, WIDTH)
        second = _greatest_norm(v, bh // kv_heads, bh % kv_heads, row0, e.keys, e.value_dim, ROWS, WIDTH)
        tl.store(norms + 2 * pid, first)
        tl.store(norms + 2 * pid + 1, second)


@triton.jit
def _greatest_norm(x, b, h, row0, count, dim, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    rows, cols = row0 + tl.arange(0, ROWS), tl.arange(0, WIDTH)
    at = x.pointer + tl.cast(b, tl.int64) * x.stride0 + tl.cast(h, tl.int64) * x.stride1
    at = at + rows.to(tl.int64)[:, None] * x.stride2 + cols[None, :]
    found = tl.load(at, mask=(rows < count)[:, None] & (cols < dim)[None, :], other=0.0).to(tl.float32)
    squared = tl.sum(found * found, axis=1)
    return tl.max(tl.where(squared < float("inf"), squared, float("inf")), axis=0)


@triton.jit
def reach_kernel(norms, pairs, reach, e, c, HEADS: tl.constexpr):
    """Write the least and greatest distance that count, two int32 per group of HEADS query heads (1, or those of a kv
    head).

    norms: from `norms_kernel`. pairs: from `common.toeplitz.pairs_kernel`.
    """
    pid = tl.program_id(0)
    least, most = e.far_lo, e.far_hi
    for n in range(HEADS):
        bh = pid * HEADS + n
        b, h = bh // e.heads, bh % e.heads
        of_queries, of_gradient = _of_blocks(norms, bh * e.query_blocks, e.query_blocks)
        of_keys, of_values = _of_blocks(norms, e.of_keys + bh // e.group * e.key_blocks, e.key_blocks)
        score = ROUNDING * e.scale * tl.sqrt(of_queries) * tl.sqrt(of_keys)
        needed = 2 * score + MARGIN + 0.5 * tl.log(tl.maximum(of_values, 1.0))
        needed = tl.where(of_gradient < float("inf"), needed, float("inf"))
        head = h // c.TOEPLITZ_GROUP
        if c.TOEPLITZ_BATCH:
            head += b * (e.heads // c.TOEPLITZ_GROUP)
        width = e.queries + e.keys - 1 + 2 * PAD
        diagonal = pairs + tl.cast(head, tl.int64) * width + (e.queries - 1 + PAD)
        if c.FAR_LO:
            least = tl.minimum(least, e.far_lo - _beyond(diagonal, e.far_lo, 1 - e.queries, needed, e))
        if c.FAR_HI:
            most = tl.maximum(most, e.far_hi + _beyond(diagonal, e.far_hi, e.keys - 1, needed, e))
    tl.store(reach + 2 * pid, least if c.FAR_LO else -FARTHEST)
    tl.store(reach + 2 * pid + 1, most if c.FAR_HI else FARTHEST)


@triton.jit
def _of_blocks(norms, first, count):
    """Return the maxima of both numbers over ``count`` programs of `norms_kernel`."""
    one, two = tl.zeros([NORMS_AT_ONCE], tl.float32), tl.zeros([NORMS_AT_ONCE], tl.float32)
    for n in range(0, count, NORMS_AT_ONCE):
        place = n + tl.arange(0, NORMS_AT_ONCE)
        at = norms + 2 * (first + place)
        one = tl.maximum(one, tl.load(at, mask=place < count, other=0.0))
        two = tl.maximum(two, tl.load(at + 1, mask=place < count, other=0.0))
    return tl.max(one, axis=0), tl.max(two, axis=0)


@triton.jit
def _beyond(diagonal, at, end, needed, e):
    """Return how far beyond ``at``, towards ``end``, the line of `common.toeplitz.line_of` counts. Returns `FARTHEST`
    where the line does not fall, or this is not known."""
    value, last, sure = _entry(diagonal, at), _entry(diagonal, end), _entry(diagonal, e.sure)
    span = tl.abs(end - at)
    fall = (value - last) * e.scale / tl.where(span == 0, 1, span).to(tl.float32)
    value, sure = value * e.scale, sure * e.scale
    # The third condition: on a GPU the maximum of NaN and a number is the number.
    known = (fall > 0.0) & (fall < float("inf")) & (tl.abs(sure) < float("inf"))
    least = sure - needed - CANCELS * (tl.abs(value) + tl.abs(sure))
    far = tl.maximum(value - least, 0.0) / tl.where(known, fall, 1.0) * 1.00001 + 3.0
    known &= (needed < float("inf")) & (far < FARTHEST)
    return tl.where(known, tl.where(known, far, 0.0).to(tl.int32), FARTHEST)


@triton.jit
def _entry(diagonal, distance):
    return tl.load(diagonal + distance).to(tl.int32).to(tl.float32, bitcast=True)


class Reach:
    """Launches that compute the reach of each query head, (B, H, 2), for a forward. With ``do``, for a backward, the
    reach covers all query heads of a key/value head, (B, Hkv, 2)."""

    def __init__(self, problem: Problem, inputs: Inputs, c: Any, do: Tensor | None = None):
        p, far, sure, width = problem, far_of(problem), sure_distance(problem), backward_width(problem)
        assert far is not None
        assert sure is not None
        rows = ELEMENTS // width
        query_blocks, key_blocks = triton.cdiv(p.queries, rows), triton.cdiv(p.keys, rows)
        of_keys, together = p.batch * p.heads * query_blocks, 1 if do is None else p.group
        programs = of_keys + p.batch * p.kv_heads * key_blocks
        e = Extents(
            p.heads, p.group, p.queries, p.keys, p.head_dim, p.value_dim, query_blocks, key_blocks, of_keys,
            p.score.scale, far.lo, far.hi, sure,
        )  # fmt: skip
        device = inputs.q.device
        heads = p.heads // together
        self.empty_norms = allocation(torch.empty(programs, 2, dtype=torch.float32, device="meta"), device)
        self.empty = allocation(torch.empty(p.batch, heads, 2, dtype=torch.int32, device="meta"), device)
        rows_of = (strided_rows(inputs.q), strided_rows(inputs.k), strided_rows(inputs.v))
        layouts = *rows_of, strided_if_any(do), POINTER
        self.norms = Launch(norms_kernel, programs, layouts, (e, rows, width), num_warps=4)
        numbers = e, c, together
        self.reach = Launch(reach_kernel, p.batch * heads, (POINTER, POINTER, POINTER), numbers, num_warps=4)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, pairs: Tensor, do: Tensor | None = None) -> Tensor:
        """pairs: the bias as `common.toeplitz.Pairs` returns it."""
        norms, reach = self.empty_norms(), self.empty()
        self.norms(q, k, v, do, norms)
        self.reach(norms, pairs, reach)
        return reach
