"""dQ, dBias and the like of bias terms for `deterministic=True`: every sum runs inside one program, in one order,
without atomics.

All recompute the score tiles with the helper of `backward_kernel`; that is what determinism costs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.backends.dropout import stream
from tilewise.backends.score import key_tiles
from tilewise.backends.triton.backward_kernel import load_stats, tile_gradients
from tilewise.backends.triton.packed import query_tile, rows_from
from tilewise.backends.triton.relative import limits_of, origins, store_by_distance
from tilewise.backends.triton.tensors import QueryRows, Reads, dot, load_rows, program_tile, store_rows
from tilewise.backends.triton.visibility import Walk, cut_count, cut_place, listed_walk, state_of, tile_at


@triton.jit
def _load_queries(x, b, h, m0, sizes, c):
    q_tile = load_rows(x.q, b, h, m0, c.BLOCK_M, sizes.queries, "head", c.TMA, True, sizes, c)
    do_tile = load_rows(x.do, b, h, m0, c.BLOCK_M, sizes.queries, "value", c.TMA, True, sizes, c)
    return q_tile, do_tile, load_stats(x.lse2, b, h, m0, sizes, c), load_stats(x.delta, b, h, m0, sizes, c)


@triton.jit
def _clean(tile, HIDES: tl.constexpr):
    """0 where not finite: see `backward_kernel._load_keys`."""
    if HIDES:
        tile = tl.where(tl.abs(tile) < float("inf"), tile, 0.0).to(tile.dtype)
    return tile


@triton.jit
def _score_gradients(rows, x, words, terms, sizes, b, h, m0, n, MASKED: tl.constexpr, PARTIAL: tl.constexpr,
                     c):  # fmt: skip
    """The tile of keys, dSᵀ with respect to scale·Q Kᵀ, and to the biased score; ``rows`` come from `_load_queries`."""
    n0 = tl.cast(n, tl.int32) * c.BLOCK_N
    hk = h // sizes.group
    k_tile = load_rows(x.k, b, hk, n0, c.BLOCK_N, sizes.keys, "head", c.TMA, PARTIAL, sizes, c)
    v_tile = load_rows(x.v, b, hk, n0, c.BLOCK_N, sizes.keys, "value", c.TMA, PARTIAL, sizes, c)
    k_tile = _clean(k_tile, c.HIDES)
    _, ds, db = tile_gradients(
        k_tile, _clean(v_tile, c.HIDES), rows[0], rows[1], rows[2], rows[3], x, words, terms, sizes, b, h, m0, n0,
        True, MASKED, PARTIAL, True, c,
    )  # fmt: skip
    return k_tile, ds, db


@triton.jit
def query_gradient_kernel(q, k, v, do, lse2, delta, bias, mask, seed, parts, lists, lengths, dq, terms, sizes, c):
    """dQ of one tile of queries; walks the key tiles that it sees."""
    # As in the backward: without a band mixed tiles go with those that are cut.
    APART: tl.constexpr = terms.HAS_LO or terms.HAS_HI or not c.LISTS
    CUT: tl.constexpr = APART or c.RAGGED_M or c.RAGGED_N
    tiles = tl.cdiv(sizes.queries, c.BLOCK_M)
    start = 0
    if c.PACKED:
        tile, h, b = program_tile(sizes.total_queries // c.BLOCK_M + sizes.batch, sizes.heads, 1, c.ORDER)
        b, tile, start, sizes = query_tile(lengths, tile, sizes, c)
        tiles = tl.maximum(tl.cdiv(sizes.queries, c.BLOCK_M), tile + 1)
        q, do, dq = rows_from(q, start.query), rows_from(do, start.query), rows_from(dq, start.query)
        lse2, delta = lse2 + start.padded, delta + start.padded
        k, v = rows_from(k, start.key), rows_from(v, start.key)
    else:
        tile, h, b = program_tile(tiles, sizes.heads, sizes.batch, c.ORDER)
    if terms.HAS_HI:
        tile = tiles - 1 - tile
    m0 = tile * c.BLOCK_M
    words = None
    if seed is not None:
        words = stream(seed, b, h, terms)
    query_origin, key_origin = origins(parts, terms, b, c)
    x = Reads(q, k, v, do, lse2, delta, bias, mask, parts, query_origin, key_origin, start)
    rows = _load_queries(x, b, h, m0, sizes, c)
    if c.LISTS:
        walk = listed_walk(lists, tile, b, h, False, True, APART, sizes, c)
    else:
        lo, hi = limits_of(x, terms, c)
        begin, full_begin, full_end, end = key_tiles(
            m0, tl.minimum(c.BLOCK_M, sizes.queries - m0), sizes.keys, lo, hi, c.BLOCK_N
        )
        if m0 + c.BLOCK_M > sizes.queries:  # queries past the end: a bias or mask tile reaches past its tensor
            full_begin = begin
            full_end = begin
        walk = Walk(begin, full_begin, full_end, end, full_begin, 0, 0)
    acc = tl.zeros([c.BLOCK_M, c.BLOCK_D], tl.float32)
    listed = walk.first
    if c.LISTS:
        for i in tl.range(0, walk.full):
            n, listed = tile_at(walk, i, listed, c.LISTS)
            k_tile, ds, _db = _score_gradients(rows, x, words, terms, sizes, b, h, m0, n, False, False, c)
            acc = dot(tl.trans(ds.to(k_tile.dtype)), k_tile, acc, c)
    if APART:
        for i in tl.range(walk.full, walk.whole_end):
            n, listed = tile_at(walk, i, listed, c.LISTS)
            k_tile, ds, _db = _score_gradients(rows, x, words, terms, sizes, b, h, m0, n, c.MASK, False, c)
            acc = dot(tl.trans(ds.to(k_tile.dtype)), k_tile, acc, c)
    for i in tl.range(0, cut_count(walk)):
        n, listed = tile_at(walk, cut_place(walk, i), listed, c.LISTS)
        k_tile, ds, _db = _score_gradients(rows, x, words, terms, sizes, b, h, m0, n, c.MASK, CUT, c)
        acc = dot(tl.trans(ds.to(k_tile.dtype)), k_tile, acc, c)
    m = m0 + tl.arange(0, c.BLOCK_M)
    store_rows(dq, acc * terms.scale, b, h, m, sizes.queries, sizes.head_dim, c.BLOCK_D)


@triton.jit
def _tile_gradient(rows, x, words, states, terms, sizes, b, h, tm, n, c):
    """The gradient of the biased scores of one tile, transposed; 0 where the mask hides it."""
    db = tl.zeros([c.BLOCK_N, c.BLOCK_M], tl.float32)
    m0 = tm * c.BLOCK_M
    if c.LISTS:
        state = state_of(states, b, h, tm, n, sizes, c)
        if state > 0:
            _k_tile, _ds, db = _score_gradients(rows, x, words, terms, sizes, b, h, m0, n, c.MASK, True, c)
    else:
        _k_tile, _ds, db = _score_gradients(rows, x, words, terms, sizes, b, h, m0, n, c.MASK, True, c)
    return db


@triton.jit
def _visited(x, m0, terms, sizes, c):
    """The tiles of keys, ``begin .. end - 1``, that a tile of queries sees."""
    lo, hi = limits_of(x, terms, c)
    begin, _full_begin, _full_end, end = key_tiles(
        m0, tl.minimum(c.BLOCK_M, sizes.queries - m0), sizes.keys, lo, hi, c.BLOCK_N
    )
    return begin, end


@triton.jit
def bias_gradient_kernel(q, k, v, do, lse2, delta, bias, mask, seed, parts, states, dbias, how, KIND: tl.constexpr,
                         terms, sizes, c):  # fmt: skip
    """One tile of a broadcast dBias; walks every batch element, head, query and key tile that shares it.

    how: `Broadcast` of the bias. KIND: "bias", which a vector of a call's parts is too; or "query" or "key", values by
    distance, whose entries in one tile of scores no other tile has.
    """
    m_tiles = tl.cdiv(sizes.queries, c.BLOCK_M)
    n_tiles = tl.cdiv(sizes.keys, c.BLOCK_N)
    own_m = m_tiles if how.ROWS else 1
    own_n = n_tiles if how.COLS else 1
    pid = tl.program_id(0)
    tm = pid % own_m
    tn = (pid // own_m) % own_n
    matrix = pid // own_m // own_n
    matrices = sizes.heads // how.GROUP
    mh = matrix % matrices
    mb = matrix // matrices

    acc = tl.zeros([c.BLOCK_N, c.BLOCK_M], tl.float32)
    for jb in range(0, 1 if how.BATCH else sizes.batch):
        for jh in range(0, how.GROUP):
            b = mb + jb
            h = mh * how.GROUP + jh
            words = None
            if seed is not None:
                words = stream(seed, b, h, terms)
            query_origin, key_origin = origins(parts, terms, b, c)
            x = Reads(q, k, v, do, lse2, delta, bias, mask, parts, query_origin, key_origin)
            for i in range(0, 1 if how.ROWS else m_tiles):
                m0 = (tm + i) * c.BLOCK_M
                rows = _load_queries(x, b, h, m0, sizes, c)
                begin, end = _visited(x, m0, terms, sizes, c)
                if how.COLS:
                    begin = tl.maximum(begin, tn)
                    end = tl.minimum(end, tn + 1)
                for n in range(begin, end):
                    acc += _tile_gradient(rows, x, words, states, terms, sizes, b, h, tm + i, n, c)
    m = tm * c.BLOCK_M + tl.arange(0, c.BLOCK_M)
    n = tn * c.BLOCK_N + tl.arange(0, c.BLOCK_N)
    if KIND != "bias":
        query_origin, key_origin = origins(parts, terms, mb, c)
        h = mh * how.GROUP
        at = QueryRows(mb, None, h, h, tm * c.BLOCK_M, tl.arange(0, c.BLOCK_M)[None, :])
        n0, cols = tn * c.BLOCK_N, tl.arange(0, c.BLOCK_N)[:, None]
        if KIND == "query":
            store_by_distance(dbias, terms.query, query_origin, c.PARTS.query, acc, at, n0, cols, sizes)
        else:
            store_by_distance(dbias, terms.key, key_origin, c.PARTS.key, acc, at, n0, cols, sizes)
    else:
        base = dbias.pointer + tl.cast(mb, tl.int64) * dbias.stride0 + tl.cast(mh, tl.int64) * dbias.stride1
        if how.ROWS and how.COLS:
            at = base + m.to(tl.int64)[None, :] * dbias.stride2 + n.to(tl.int64)[:, None] * dbias.stride3
            tl.store(at, acc, mask=(m < sizes.queries)[None, :] & (n < sizes.keys)[:, None])
        elif how.ROWS:
            tl.store(base + m.to(tl.int64) * dbias.stride2, tl.sum(acc, 0), mask=m < sizes.queries)
        elif how.COLS:
            tl.store(base + n.to(tl.int64) * dbias.stride3, tl.sum(acc, 1), mask=n < sizes.keys)
        else:
            tl.store(base, tl.sum(tl.sum(acc, 1), 0))


@triton.jit
def diagonal_gradient_kernel(q, k, v, do, lse2, delta, bias, mask, seed, parts, states, dvalues, how, terms, sizes,
                             c):  # fmt: skip
    """BLOCK_N neighbouring entries of a Toeplitz bias; walks every tile that their diagonals cross, in every batch
    element and head that shares them. how: `Broadcast`."""
    entries = sizes.queries + sizes.keys - 1
    blocks = tl.cdiv(entries, c.BLOCK_N)
    pid = tl.program_id(0)
    e0 = (pid % blocks) * c.BLOCK_N
    matrix = pid // blocks
    matrices = sizes.heads // how.GROUP
    mh = matrix % matrices
    mb = matrix // matrices
    r = tl.arange(0, c.BLOCK_N)[:, None]
    m = tl.arange(0, c.BLOCK_M)[None, :]

    acc = tl.zeros([c.BLOCK_N, c.BLOCK_M], tl.float32)
    for jb in range(0, 1 if how.BATCH else sizes.batch):
        for jh in range(0, how.GROUP):
            b = mb + jb
            h = mh * how.GROUP + jh
            words = None
            if seed is not None:
                words = stream(seed, b, h, terms)
            query_origin, key_origin = origins(parts, terms, b, c)
            x = Reads(q, k, v, do, lse2, delta, bias, mask, parts, query_origin, key_origin)
            for tm in range(0, tl.cdiv(sizes.queries, c.BLOCK_M)):
                m0 = tm * c.BLOCK_M
                first = m0 + e0 - (sizes.queries - 1)  # the key at which the first query has the first entry
                last = first + c.BLOCK_M + c.BLOCK_N - 2
                begin, end = _visited(x, m0, terms, sizes, c)
                begin = tl.maximum(begin, tl.maximum(first, 0) // c.BLOCK_N)
                end = tl.minimum(end, tl.maximum(last + c.BLOCK_N, 0) // c.BLOCK_N)
                if begin < end:
                    rows = _load_queries(x, b, h, m0, sizes, c)
                    for n in range(begin, end):
                        db = _tile_gradient(rows, x, words, states, terms, sizes, b, h, tm, n, c)
                        place = first - n * c.BLOCK_N + r + m
                        found = tl.gather(db, tl.minimum(tl.maximum(place, 0), c.BLOCK_N - 1), 0)
                        acc += tl.where((place >= 0) & (place < c.BLOCK_N), found, 0.0)
    e = e0 + tl.arange(0, c.BLOCK_N)
    at = dvalues.pointer + tl.cast(mb, tl.int64) * dvalues.stride0 + tl.cast(mh, tl.int64) * dvalues.stride1
    tl.store(at + e.to(tl.int64) * dvalues.stride3, tl.sum(acc, 1), mask=e < entries)
