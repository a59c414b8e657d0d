"""Tile masks in the Triton kernels: states of kernel tiles, visible pairs of partial tiles."""

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.backends.kernels.block_mask import PARTIAL_TILE, pairs
from tilewise.backends.triton.tensors import matrix_of


@triton.jit
def listed_pairs(x, how, at, n0, cols, sizes):
    """Return the visible pairs of a tile; indices past an end are clamped. at: `QueryRows`."""
    head = at.first_head if how.GROUP > 1 else at.head
    mb, mh = matrix_of(how, at.b, head, sizes.batch)
    matrix = tl.cast(mb, tl.int64) * (sizes.heads // how.GROUP) + mh
    m = tl.minimum(at.m0 + at.rows, sizes.queries - 1)
    n = tl.minimum(n0 + cols, sizes.keys - 1)
    return pairs(x, how, matrix, m, n, at.m0, n0, sizes.queries, sizes.keys)


@triton.jit
def tile_summary_kernel(x, states, queries, keys, how, c):
    """Store the state of one tile, like `visibility.summary_kernel`; read pairs only if necessary."""
    m_count, n_count = tl.cdiv(queries, c.BLOCK_M), tl.cdiv(keys, c.BLOCK_N)
    pid = tl.program_id(0)
    n0, m0 = pid % n_count * c.BLOCK_N, pid // n_count % m_count * c.BLOCK_M
    matrix = tl.cast(pid // n_count // m_count, tl.int64)
    m_end, n_end = tl.minimum(m0 + c.BLOCK_M, queries), tl.minimum(n0 + c.BLOCK_N, keys)
    tile_m = m0 // how.TILE_M + tl.arange(0, how.SPAN_M)
    tile_n = n0 // how.TILE_N + tl.arange(0, how.SPAN_N)
    met = (tile_m * how.TILE_M < m_end)[:, None] & (tile_n * how.TILE_N < n_end)[None, :]
    row = matrix * tl.cdiv(queries, how.TILE_M) + tile_m
    numbers = tl.load(x.tiles + row[:, None] * tl.cdiv(keys, how.TILE_N) + tile_n[None, :], mask=met, other=0)
    most = tl.max(tl.max(numbers, 1), 0)
    least = tl.min(tl.min(tl.where(met, numbers, most), 1), 0)
    some = (most > 0).to(tl.int32)
    every = (least == most).to(tl.int32)
    if (most >= PARTIAL_TILE) | (least != most):
        r, s = m0 + tl.arange(0, c.BLOCK_M)[:, None], n0 + tl.arange(0, c.BLOCK_N)[None, :]
        m, n = tl.minimum(r, queries - 1), tl.minimum(s, keys - 1)
        inside = (r < queries) & (s < keys)
        seen = inside & pairs(x, how, matrix, m, n, m0, n0, queries, keys)
        some = tl.max(tl.max(seen.to(tl.int32), 1), 0)
        every = tl.min(tl.min(tl.where(inside, seen.to(tl.int32), 1), 1), 0)
    tl.store(states + pid, (some + some * every).to(tl.int8))
