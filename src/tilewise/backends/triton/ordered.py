"""Deterministic dQ, dBias and gradients of bias components: one program per sum, in fixed order.

The kernels recompute the score tiles with the helper of `backward_kernel`, which is the cost of determinism. In a
packed batch each sequence has as many programs as the longest one needs; programs without a tile do nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tilewise.backends.kernels.dropout import stream
from tilewise.backends.kernels.score import key_tiles, query_tiles
from tilewise.backends.triton.backward import load_stats, tile_gradients
from tilewise.backends.triton.blocks import add_product, clean, read_rows, store_sums, zero_sums
from tilewise.backends.triton.relative import counts_of, limits_of, origins
from tilewise.backends.triton.tensors import Reads, column_tile, operand_place, program_tile
from tilewise.backends.triton.varlen import own_sizes, query_tile, rows_from
from tilewise.backends.triton.visibility import Walk, cut_count, cut_place, listed_walk, state_of, tile_at


@triton.jit
def _load_queries(x, b, h, m0, sizes, c):
    q_tile = read_rows(x.q, b, h, m0, c.BLOCK_M, sizes.queries, "head", c.TMA, True, sizes, c)
    do_tile = read_rows(x.do, b, h, m0, c.BLOCK_M, sizes.queries, "value", c.TMA, True, sizes, c)
    return q_tile, do_tile, load_stats(x.lse2, b, h, m0, sizes, c), load_stats(x.delta, b, h, m0, sizes, c)


@triton.jit
def _score_gradients(rows, x, words, terms, sizes, b, h, m0, n, MASKED: tl.constexpr, PARTIAL: tl.constexpr,
                     c):  # fmt: skip
    """Return the keys, dSᵀ with respect to scale·Q Kᵀ and to the biased score. rows: `_load_queries`."""
    n0 = tl.cast(n, tl.int32) * c.BLOCK_N
    hk = h // sizes.group
    k_tile = read_rows(x.k, b, hk, n0, c.BLOCK_N, sizes.keys, "head", c.TMA, PARTIAL, sizes, c)
    v_tile = read_rows(x.v, b, hk, n0, c.BLOCK_N, sizes.keys, "value", c.TMA, PARTIAL, sizes, c)
    if not c.BY_BLOCKS:
        k_tile = clean(k_tile, c.HIDES)
        v_tile = clean(v_tile, c.HIDES)
    _, ds, db = tile_gradients(
        k_tile, v_tile, rows[0], rows[1], rows[2], rows[3], x, words, terms, sizes, b, h, m0, n0, True, MASKED,
        PARTIAL, True, c, c.HIDES,
    )  # fmt: skip
    return k_tile, ds, db


@triton.jit
def query_gradient_kernel(q, k, v, do, lse2, delta, bias, mask, seed, parts, lists, lengths, dq, terms, sizes, c):
    """Compute dQ, or a tile of its columns, of one tile of queries over the key tiles that it sees."""
    # As in `backward_kernel`: without a window partial and cut tiles share one loop.
    APART: tl.constexpr = terms.HAS_LO or terms.HAS_HI or not c.LISTS
    CUT: tl.constexpr = APART or c.RAGGED_M or c.RAGGED_N
    DTYPE: tl.constexpr = k.dtype if c.TMA else k.pointer.dtype.element_ty
    tiles = tl.cdiv(sizes.queries, c.BLOCK_M)
    start = 0
    if c.PACKED:
        tile, h, b = program_tile(
            sizes.total_queries // c.BLOCK_M + sizes.batch, sizes.heads, 1, c.ORDER, c.COLUMN_TILES
        )
        b, tile, start, sizes = query_tile(lengths, tile, sizes, c)
        tiles = tl.maximum(tl.cdiv(sizes.queries, c.BLOCK_M), tile + 1)
        q, do, dq = rows_from(q, start.query), rows_from(do, start.query), rows_from(dq, start.query)
        lse2, delta = lse2 + start.padded, delta + start.padded
        k, v = rows_from(k, start.key), rows_from(v, start.key)
    else:
        tile, h, b = program_tile(tiles, sizes.heads, sizes.batch, c.ORDER, c.COLUMN_TILES)
    column = column_tile(c)
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
        if m0 + c.BLOCK_M > sizes.queries:  # queries past the end: every tile is cut
            full_begin = begin
            full_end = begin
        walk = Walk(begin, full_begin, full_end, end, full_begin, 0, 0)
    acc = zero_sums(c.BLOCK_M, "head", c)
    listed = walk.first
    if c.LISTS:
        for i in tl.range(0, walk.full):
            n, listed = tile_at(walk, i, listed, c.LISTS)
            k_tile, ds, _db = _score_gradients(rows, x, words, terms, sizes, b, h, m0, n, False, False, c)
            acc = add_product(acc, tl.trans(ds.to(DTYPE)), k_tile, column, "head", c.HIDES, sizes, c)
    if APART:
        for i in tl.range(walk.full, walk.whole_end):
            n, listed = tile_at(walk, i, listed, c.LISTS)
            k_tile, ds, _db = _score_gradients(rows, x, words, terms, sizes, b, h, m0, n, c.MASK, False, c)
            acc = add_product(acc, tl.trans(ds.to(DTYPE)), k_tile, column, "head", c.HIDES, sizes, c)
    for i in tl.range(0, cut_count(walk)):
        n, listed = tile_at(walk, cut_place(walk, i), listed, c.LISTS)
        k_tile, ds, _db = _score_gradients(rows, x, words, terms, sizes, b, h, m0, n, c.MASK, CUT, c)
        acc = add_product(acc, tl.trans(ds.to(DTYPE)), k_tile, column, "head", c.HIDES, sizes, c)
    m = m0 + tl.arange(0, c.BLOCK_M)
    store_sums(dq, acc, terms.scale, b, h, m, sizes.queries, column, "head", sizes, c)


@triton.jit
def _tile_gradient(rows, x, words, states, terms, sizes, b, h, tm, n, c):
    """Return the gradient of the biased scores of one tile, transposed; 0 if the tile is empty."""
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
    """Return the tiles of keys, ``begin .. end - 1``, that a tile of queries sees."""
    lo, hi = limits_of(x, terms, c)
    begin, _full_begin, _full_end, end = key_tiles(
        m0, tl.minimum(c.BLOCK_M, sizes.queries - m0), sizes.keys, lo, hi, c.BLOCK_N
    )
    return begin, end


@triton.jit
def _visiting(x, n0, terms, sizes, c):
    """Return the tiles of queries, ``begin .. end - 1``, that see a tile of keys."""
    lo, hi = limits_of(x, terms, c)
    begin, _full_begin, _full_end, end = query_tiles(
        n0, tl.minimum(c.BLOCK_N, sizes.keys - n0), sizes.queries, lo, hi, c.BLOCK_M
    )
    return begin, end


@triton.jit
def _sum_over_broadcast(acc, call, seed, states, lengths, mb, mh, place, how, KIND: tl.constexpr, terms, sizes, c):
    """Return ``acc`` plus the gradients of all batch elements and heads that share a matrix, in order.

    call: `Reads` of all batch elements. place, KIND: elements of the matrix, see `_add_bias`, `_add_diagonals` and
    `_add_distances`. how: `Broadcast`.
    """
    ONE: tl.constexpr = how.BATCH and not how.RUNS
    for jb in range(0, 1 if ONE else sizes.batch // max(how.BATCH, 1)):
        for jh in range(0, how.GROUP):
            b = mb + jb
            h = mh * how.GROUP + jh
            words = None
            if seed is not None:
                words = stream(seed, b, h, terms)
            query_origin, key_origin = origins(call.parts, terms, b, c)
            if c.PACKED:
                start, own = own_sizes(lengths, b, sizes, c)
                x = Reads(
                    rows_from(call.q, start.query), rows_from(call.k, start.key), rows_from(call.v, start.key),
                    rows_from(call.do, start.query), call.lse2 + start.padded, call.delta + start.padded, call.bias,
                    call.mask, call.parts, query_origin, key_origin, start,
                )  # fmt: skip
            else:
                own = sizes
                x = Reads(
                    call.q, call.k, call.v, call.do, call.lse2, call.delta, call.bias, call.mask, call.parts,
                    query_origin, key_origin,
                )  # fmt: skip
            if KIND == "bias":
                acc = _add_bias(acc, x, words, states, b, h, place, how, terms, own, c)
            elif KIND == "toeplitz":
                acc = _add_diagonals(acc, x, words, states, b, h, place, terms, own, c)
            else:
                acc = _add_distances(acc, x, words, states, b, h, place, KIND == "key", terms, own, c)
    return acc


@triton.jit
def _add_bias(acc, x, words, states, b, h, place, how, terms, sizes, c):
    """Add the transposed gradients of all score tiles that share the dBias tile at ``place``."""
    tm, tn = place
    m_tiles = tl.cdiv(sizes.queries, c.BLOCK_M)
    count = 1 if how.ROWS else m_tiles
    if c.PACKED and how.ROWS:  # the sequence may be shorter than the longest one
        count = tl.where(tm < m_tiles, 1, 0)
    for i in range(0, count):
        m0 = (tm + i) * c.BLOCK_M
        rows = _load_queries(x, b, h, m0, sizes, c)
        begin, end = _visited(x, m0, terms, sizes, c)
        if how.COLS:
            begin = tl.maximum(begin, tn)
            end = tl.minimum(end, tn + 1)
        for n in range(begin, end):
            acc += _tile_gradient(rows, x, words, states, terms, sizes, b, h, tm + i, n, c)
    return acc


@triton.jit
def bias_gradient_kernel(q, k, v, do, lse2, delta, bias, mask, seed, parts, states, lengths, dbias, how, terms, sizes,
                         c):  # fmt: skip
    """Compute one tile of dBias over all that share it. how: `Broadcast` of bias or vector component."""
    own_m = tl.cdiv(sizes.queries, c.BLOCK_M) if how.ROWS else 1
    own_n = tl.cdiv(sizes.keys, c.BLOCK_N) if how.COLS else 1
    pid = tl.program_id(0)
    tm = pid % own_m
    tn = (pid // own_m) % own_n
    mb, mh = _matrix_of(pid // own_m // own_n, how, sizes)
    acc = tl.zeros([c.BLOCK_N, c.BLOCK_M], tl.float32)
    call = Reads(q, k, v, do, lse2, delta, bias, mask, parts)
    acc = _sum_over_broadcast(acc, call, seed, states, lengths, mb, mh, (tm, tn), how, "bias", terms, sizes, c)
    start, own = 0, sizes
    if how.LAYOUT != "padded":
        start, own = own_sizes(lengths, mb, sizes, c)
    m = tm * c.BLOCK_M + tl.arange(0, c.BLOCK_M)
    n = tn * c.BLOCK_N + tl.arange(0, c.BLOCK_N)
    base, stride2, stride3 = operand_place(dbias, how, start, mb, mh * how.GROUP, own)
    if how.ROWS and how.COLS:
        at = base + m.to(tl.int64)[None, :] * stride2 + n.to(tl.int64)[:, None] * stride3
        tl.store(at, acc, mask=(m < own.queries)[None, :] & (n < own.keys)[:, None])
    elif how.ROWS:
        tl.store(base + m.to(tl.int64) * stride2, tl.sum(acc, 0), mask=m < own.queries)
    elif how.COLS:
        tl.store(base + n.to(tl.int64) * stride3, tl.sum(acc, 1), mask=n < own.keys)
    else:
        tl.store(base, tl.sum(tl.sum(acc, 1), 0))


@triton.jit
def _matrix_of(number, how, sizes):
    """Return the first batch element and the head of a matrix from its number."""
    matrices = sizes.heads // how.GROUP
    b = number // matrices
    if how.RUNS:
        b = b * (sizes.batch // how.BATCH)
    return b, number % matrices


@triton.jit
def _rows_at(tile, place):
    """Gather the rows ``place`` in each column of a tile; 0 outside the tile."""
    ROWS: tl.constexpr = tile.shape[0]
    found = tl.gather(tile, tl.minimum(tl.maximum(place, 0), ROWS - 1), 0)
    return tl.where((place >= 0) & (place < ROWS), found, 0.0)


@triton.jit
def _add_diagonals(acc, x, words, states, b, h, e0, terms, sizes, c):
    """Add score gradients to a Toeplitz bias's entries ``e0, ...``; acc: [entries, queries of a tile]."""
    r = tl.arange(0, c.BLOCK_N)[:, None]
    m = tl.arange(0, c.BLOCK_M)[None, :]
    for tm in range(0, tl.cdiv(sizes.queries, c.BLOCK_M)):
        m0 = tm * c.BLOCK_M
        first = m0 + e0 - (sizes.queries - 1)  # key at which query m0 has entry e0
        if c.PACKED:
            first -= x.start.skew
        last = first + c.BLOCK_M + c.BLOCK_N - 2
        begin, end = _visited(x, m0, terms, sizes, c)
        begin = tl.maximum(begin, tl.maximum(first, 0) // c.BLOCK_N)
        end = tl.minimum(end, tl.maximum(last + c.BLOCK_N, 0) // c.BLOCK_N)
        if begin < end:
            rows = _load_queries(x, b, h, m0, sizes, c)
            for n in range(begin, end):
                db = _tile_gradient(rows, x, words, states, terms, sizes, b, h, tm, n, c)
                acc += _rows_at(db, first - n * c.BLOCK_N + r + m)
    return acc


@triton.jit
def diagonal_gradient_kernel(q, k, v, do, lse2, delta, bias, mask, seed, parts, states, lengths, dvalues, how, terms,
                             sizes, c):  # fmt: skip
    """Compute BLOCK_N entries of a Toeplitz gradient from all tiles that their diagonals cross."""
    entries = sizes.queries + sizes.keys - 1
    blocks = tl.cdiv(entries, c.BLOCK_N)
    pid = tl.program_id(0)
    e0 = (pid % blocks) * c.BLOCK_N
    mb, mh = _matrix_of(pid // blocks, how, sizes)
    acc = tl.zeros([c.BLOCK_N, c.BLOCK_M], tl.float32)
    call = Reads(q, k, v, do, lse2, delta, bias, mask, parts)
    acc = _sum_over_broadcast(acc, call, seed, states, lengths, mb, mh, e0, how, "toeplitz", terms, sizes, c)
    e = e0 + tl.arange(0, c.BLOCK_N)
    at = dvalues.pointer + tl.cast(mb, tl.int64) * dvalues.stride0 + tl.cast(mh, tl.int64) * dvalues.stride1
    tl.store(at + e.to(tl.int64) * dvalues.stride3, tl.sum(acc, 1), mask=e < entries)


@triton.jit
def _add_distances(acc, x, words, states, b, h, place, BY_KEYS: tl.constexpr, terms, sizes, c):
    """Add score gradients to the sums by relative position of a tile of rows; acc: [distances, rows].

    place: (tile of keys if BY_KEYS, else of queries; first distance, where 0 is the first with an entry; number of
    distances with an entry). With clamped ends other distances are added to the first or last one.
    """
    CLAMP: tl.constexpr = c.PARTS.key.OUTSIDE == "clamp" if BY_KEYS else c.PARTS.query.OUTSIDE == "clamp"
    tile, d0, count = place
    if BY_KEYS:
        origin, row0, rows_end, across_end = x.key_origin, tile * c.BLOCK_N, sizes.keys, sizes.queries
        begin, end = _visiting(x, row0, terms, sizes, c)
    else:
        origin, row0, rows_end, across_end = x.query_origin, tile * c.BLOCK_M, sizes.queries, sizes.keys
        begin, end = _visited(x, row0, terms, sizes, c)
    ACROSS: tl.constexpr = acc.shape[0]
    ROWS: tl.constexpr = acc.shape[1]
    # Query i and key j have distance j - i + origin. Find the keys, or queries, that have these distances to the rows.
    has_first, has_last = d0 == 0, d0 + ACROSS >= count
    if BY_KEYS:
        first, last = row0 + origin - d0 - (ACROSS - 1), row0 + origin - d0 + ROWS - 1
        has_first, has_last = has_last, has_first
    else:
        first, last = row0 - origin + d0, row0 - origin + d0 + (ROWS - 1) + (ACROSS - 1)
    if CLAMP:
        first, last = tl.where(has_first, 0, first), tl.where(has_last, across_end - 1, last)
    begin = tl.maximum(begin, tl.maximum(first, 0) // ACROSS)
    end = tl.minimum(end, tl.maximum(last + ACROSS, 0) // ACROSS)
    end = tl.where(row0 < rows_end, end, begin)  # the sequence may be shorter than the longest one
    across = tl.arange(0, ACROSS)[:, None]
    row = tl.arange(0, ROWS)[None, :]
    for t in range(begin, end):
        tm, tn = tile, tl.cast(t, tl.int32)
        if BY_KEYS:
            tm, tn = tn, tm
        rows = _load_queries(x, b, h, tm * c.BLOCK_M, sizes, c)
        db = _tile_gradient(rows, x, words, states, terms, sizes, b, h, tm, tn, c)
        distance = origin + tn * c.BLOCK_N - tm * c.BLOCK_M
        if BY_KEYS:
            db = tl.trans(db)
            acc += _rows_at(db, distance - d0 + row - across)
            distance = distance + row - across
        else:
            acc += _rows_at(db, d0 - distance + row + across)
            distance = distance + across - row
        if CLAMP:
            below = tl.sum(tl.where(distance < 0, db, 0.0), 0)[None, :]
            above = tl.sum(tl.where(distance >= count, db, 0.0), 0)[None, :]
            acc += tl.where(d0 + across == 0, below, 0.0) + tl.where(d0 + across == count - 1, above, 0.0)
    return acc


@triton.jit
def distance_gradient_kernel(q, k, v, do, lse2, delta, bias, mask, seed, parts, states, lengths, dvalues, how,
                             AXIS: tl.constexpr, terms, sizes, c):  # fmt: skip
    """Compute some entries of a tile of rows of a relative-position gradient. AXIS: "query" or "key"."""
    call = Reads(q, k, v, do, lse2, delta, bias, mask, parts)
    if AXIS == "key":
        _sum_distances(
            call, seed, states, lengths, dvalues, how, c.PARTS.key, terms.key, parts.key_buckets, sizes.keys, c.BLOCK_N,
            c.BLOCK_M, terms, sizes, c,
        )  # fmt: skip
    else:
        _sum_distances(
            call, seed, states, lengths, dvalues, how, c.PARTS.query, terms.query, parts.query_buckets, sizes.queries,
            c.BLOCK_M, c.BLOCK_N, terms, sizes, c,
        )  # fmt: skip


@triton.jit
def _sum_distances(call, seed, states, lengths, dvalues, how, rule, numbers, buckets, length, ROWS: tl.constexpr,
                   ENTRIES: tl.constexpr, terms, sizes, c):  # fmt: skip
    """Compute ENTRIES entries of ROWS of ``length`` rows. rule: `ByDistance`; numbers: `Range`."""
    count, entries = counts_of(numbers)
    tiles, blocks = tl.cdiv(length, ROWS), tl.cdiv(entries, ENTRIES)
    pid = tl.program_id(0)
    tile = pid % tiles
    e0 = (pid // tiles) % blocks * ENTRIES
    mb, mh = _matrix_of(pid // tiles // blocks, how, sizes)
    total = tl.zeros([ENTRIES, ROWS], tl.float32)
    if rule.BUCKETS:
        for i in range(0, tl.cdiv(count, ENTRIES)):
            d0 = tl.cast(i, tl.int32) * ENTRIES
            found = _sum_over_broadcast(
                tl.zeros([ENTRIES, ROWS], tl.float32), call, seed, states, lengths, mb, mh, (tile, d0, count), how,
                rule.AXIS, terms, sizes, c,
            )  # fmt: skip
            total = _add_to_entries(total, found, buckets, d0, count, e0, entries, rule.REVERSE)
    else:
        total = _sum_over_broadcast(
            total, call, seed, states, lengths, mb, mh, (tile, e0, count), how, rule.AXIS, terms, sizes, c
        )  # fmt: skip
    at = dvalues.pointer + tl.cast(mb, tl.int64) * dvalues.stride0 + tl.cast(mh, tl.int64) * dvalues.stride1
    if c.PACKED:
        start, own = own_sizes(lengths, mb, sizes, c)
        if rule.AXIS == "key":
            first, length = start.key, own.keys
        else:
            first, length = start.query, own.queries
        at += tl.cast(first, tl.int64) * dvalues.stride2
    row = tile * ROWS + tl.arange(0, ROWS)
    e = e0 + tl.arange(0, ENTRIES)
    entry = e
    if rule.REVERSE and not rule.BUCKETS:
        entry = count - 1 - e
    at = at + row.to(tl.int64)[None, :] * dvalues.stride2 + entry.to(tl.int64)[:, None] * dvalues.stride3
    tl.store(at, total, mask=(e < entries)[:, None] & (row < length)[None, :])


@triton.jit
def _add_to_entries(total, found, buckets, d0, count, e0, entries, REVERSE: tl.constexpr):
    """Add sums ``found`` by distance, from ``d0`` on, to ``total`` [entries from ``e0`` on, rows]."""
    r = tl.arange(0, found.shape[0])
    d = d0 + r
    at = count - 1 - d if REVERSE else d
    entry = tl.load(buckets + at, mask=d < count, other=0)
    entry = tl.where(d < count, tl.minimum(tl.maximum(entry, 0), entries - 1), -1)
    for e in range(0, tl.minimum(found.shape[0], entries - e0)):
        own = tl.sum(tl.where((entry == e0 + e)[:, None], found, 0.0), 0)
        total += tl.where((r == e)[:, None], own[None, :], 0.0)
    return total
