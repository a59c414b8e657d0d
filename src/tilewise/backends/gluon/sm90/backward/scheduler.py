"""Work tiles of the backward: the key tile of a program, and the query tiles that see it."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise.backends.gluon.score import mask_of, query_tiles
from tilewise.backends.gluon.varlen import SeqInfo, first_tile_of, listed_tile_and_head


class BackwardSizes(NamedTuple):
    batch: int
    kv_heads: int
    group: int  # query heads that share a key/value head
    queries: int
    keys: int
    row_tiles: int  # query tiles of one head
    key_tiles: int
    broadcast_batch: int  # batch elements that share a bias, and key/value heads
    broadcast_heads: int
    ds_buffer_groups: int  # groups of programs whose dS the buffer of `dbias_reduce` holds
    lag: int  # a group reduces the dBias of the group this much earlier
    # The preprocess zeroes dq_accum of this many key/value heads; head h of the kernel zeroes that of head h + zeroed.
    # Packed batch: work tiles, since heads differ in length.
    zeroed: int
    run: int  # batched CTA: batch elements that share one of several biases; else 1


class Counters(NamedTuple):
    """Pointers to int32 counters, 0 at first."""

    zeroed: Any  # per key/value head: programs that zeroed their part of dq_accum; packed: at the first query tile
    done: Any  # per key/value head: programs that added all of their dQ
    dq_semaphores: Any  # if ORDERED, per query tile: key tiles that added to its dQ
    ended: Any  # if DBIAS is "reduce", per group: programs that stored their dS
    summed: Any  # likewise: programs that reduced their part of dBias
    tile_count_semaphore: Any  # unless "reduce": work tiles taken by persistent programs
    dbias_zeroed: Any  # if ZEROES_DBIAS, per group: programs that zeroed their part of dBias


class KeyTile(NamedTuple):
    """Work tile: a key tile, and the query tiles that see it."""

    b: Any  # batched CTA: one past the last if there is no element at this place
    place: Any  # b, but in the batched CTA where programs end with runs: among the elements of all programs
    hk: Any
    n0: Any  # first key
    begin: Any  # query tiles [begin, end), those in [full_begin, full_end) full
    full_begin: Any
    full_end: Any
    end: Any
    seq: Any
    first_tile: Any  # packed batch: index of its sequence's first query tile; else 0


@gluon.jit
def counters_at(counts, sizes, c):
    """Return the `Counters` in ``counts``, which has `counters` elements."""
    done = done_at(counts, sizes)
    heads = sizes.batch * sizes.kv_heads
    dq_semaphores = done + heads
    ended = dq_semaphores
    if c.ORDERED:
        ended += heads * sizes.group * sizes.row_tiles
    if c.ZEROED_BY_TILE:
        return Counters(ended + 1, done, dq_semaphores, ended, ended, ended, ended)
    else:
        return Counters(counts, done, dq_semaphores, ended, ended + groups(sizes, c), ended, ended + 1)


@gluon.jit
def done_at(counts, sizes):
    """Return `Counters.done`."""
    return counts + sizes.batch * sizes.kv_heads


def counters(
    sizes: BackwardSizes, groups: int, ordered: bool, reduces: bool, zeroes: bool = False, packed: bool = False
) -> int:
    """Return the number of counters."""
    heads = sizes.batch * sizes.kv_heads
    of_groups = 2 * groups if reduces else 1 + zeroes * groups
    if packed:
        of_groups = 1 + sizes.kv_heads * sizes.row_tiles  # and one per head of each sequence
    return 2 * heads + ordered * heads * sizes.group * sizes.row_tiles + of_groups


@gluon.jit
def groups(sizes, c):
    """Return the number of groups of programs."""
    return sizes.key_tiles * (sizes.kv_heads * sizes.batch // c.GROUP_PROGRAMS)


@gluon.jit
def head_and_tile(group, sizes, c):
    """Return the key/value head, counting those of a group as one, and the key tile of a group.

    The order of the groups decides which run together and share the L2 cache.
    """
    tiles = sizes.key_tiles
    if c.HEAD_SWIZZLE == 1:  # programs of a head share its queries
        head = group // tiles
        tile = group % tiles
    else:
        # the first tile of each of several heads, then the second, see `BackwardConfig`
        AT_ONCE: gl.constexpr = c.HEAD_SWIZZLE // c.GROUP_PROGRAMS if c.HEAD_SWIZZLE > c.GROUP_PROGRAMS else 1
        first, width = heads_at_once(group // (AT_ONCE * tiles), AT_ONCE, sizes, c)
        head = first + (group - first * tiles) % width
        tile = (group - first * tiles) // width
    return head, tile


@gluon.jit
def group_of(head, tile, sizes, c):
    """Invert `head_and_tile`."""
    if c.HEAD_SWIZZLE == 1:
        group = head * sizes.key_tiles + tile
    else:
        AT_ONCE: gl.constexpr = c.HEAD_SWIZZLE // c.GROUP_PROGRAMS if c.HEAD_SWIZZLE > c.GROUP_PROGRAMS else 1
        first, width = heads_at_once(head // AT_ONCE, AT_ONCE, sizes, c)
        group = first * sizes.key_tiles + tile * width + head - first
    return group


@gluon.jit
def heads_at_once(n, AT_ONCE: gl.constexpr, sizes, c):
    """Return ``(first, count)`` of the ``n``-th heads that are swizzled together."""
    first = n * AT_ONCE
    return first, gl.minimum(sizes.kv_heads * sizes.batch // c.GROUP_PROGRAMS - first, AT_ONCE)


@gluon.jit
def groups_per_broadcast(sizes, c):
    """Return the number of groups that share a bias and a key tile; their heads follow each other."""
    return sizes.broadcast_batch * sizes.broadcast_heads // c.GROUP_PROGRAMS


@gluon.jit
def key_tile(b, hk, n0, seq, first_tile, terms, c, place=0):
    """Return the work tile of the keys from ``n0`` on."""
    cols = gl.minimum(c.BLOCK_N, seq.keys - n0)
    lo, hi = terms.lo + seq.diagonal, terms.hi + seq.diagonal
    begin, full_begin, full_end, end = query_tiles(n0, cols, seq.queries, lo, hi, c.BLOCK_M)
    if c.RAGGED:  # noqa: SIM102  (one is compile-time)
        if n0 + c.BLOCK_N > seq.keys:  # keys past the end: every tile is partial
            full_begin = end
            full_end = end
    if not terms.HAS_LO:  # rows past the end need no mask: their P is 0
        full_end = end
    return KeyTile(b, place, hk, n0, begin, gl.minimum(full_begin, full_end), full_end, end, seq, first_tile)


@gluon.jit
def listed_head_and_tile(group, parts, tile_list, sizes, c):
    """Like `head_and_tile`, but in the order of `mask_kernels.longest_first_kernel`.

    It is that of the first mask of heads that share a bias. With tiles in their own order (a negative entry) all
    ``parts`` groups of these run side by side."""
    first, nth = group // (parts * sizes.key_tiles), group % (parts * sizes.key_tiles)
    alone = sizes.kv_heads // sizes.broadcast_heads
    RUNS: gl.constexpr = c.BIAS_BATCH > 1
    mask = mask_of(
        first // alone * (sizes.broadcast_batch if RUNS else 1),
        first % alone * sizes.group,
        sizes.kv_heads * sizes.group,
        c,
    )
    width = 2 + sizes.row_tiles
    orders = tile_list + mask * sizes.key_tiles * width + (width - 1)
    if gl.load(orders) < 0:
        head, tile = first * parts + nth % parts, nth // parts
    else:
        head = first * parts + nth // sizes.key_tiles
        tile = gl.load(orders + nth % sizes.key_tiles * width)
    return head, tile


@gluon.jit
def work_tile_of(group, member, terms, sizes, c, tile_list=None):
    """Return the work tile of program ``member`` of a group."""
    parts = groups_per_broadcast(sizes, c)
    if c.LONGEST_FIRST:
        head, tile = listed_head_and_tile(group, parts, tile_list, sizes, c)
    else:
        head, tile = head_and_tile(group, sizes, c)
    if c.ELEMENTS > 1:  # next groups: the other heads of these batch elements, adjacent in a cache line
        place, hk = head // sizes.kv_heads * c.ELEMENTS + member, head % sizes.kv_heads
        b = element_at(place, sizes, c)
    else:
        member = head % parts * c.GROUP_PROGRAMS + member
        alone = sizes.kv_heads // sizes.broadcast_heads
        RUNS: gl.constexpr = c.BIAS_BATCH > 1
        b = member % sizes.broadcast_batch + head // parts // alone * (sizes.broadcast_batch if RUNS else 1)
        place = b
        hk = member // sizes.broadcast_batch + head // parts % alone
    seq = SeqInfo(0, 0, sizes.queries, sizes.keys, 0)
    work_tile = key_tile(b, hk, tile * c.BLOCK_N, seq, 0, terms, c, place)
    if c.UNDERFLOWS:
        work_tile = within_reach(work_tile, tile_list, sizes, c)
    return work_tile


@gluon.jit
def element_at(place, sizes, c):
    """Return the batch element at a place of the batched CTA, whose programs each have elements of one bias.

    Places go up to a multiple of c.ELEMENTS in each run of elements with one bias; one past the last: no element."""
    if c.BIAS_BATCH > 1:
        nth = place % sizes.broadcast_batch
        return gl.where(nth < sizes.run, place // sizes.broadcast_batch * sizes.run + nth, sizes.run * c.BIAS_BATCH)
    else:
        return place


@gluon.jit
def within_reach(work_tile, reaches, sizes, c):
    """Return a work tile, maybe empty, without query tiles beyond its head's reach, see `underflow`."""
    begin, end = work_tile.begin, work_tile.end
    reach = reaches + 2 * (work_tile.b * sizes.kv_heads + work_tile.hk)
    if c.FAR_HI:
        first = gl.maximum(work_tile.n0 - gl.load(reach + 1), 0) // c.BLOCK_M
        begin = gl.minimum(gl.maximum(begin, first), end)
    if c.FAR_LO:
        after = gl.maximum(work_tile.n0 + c.BLOCK_N - gl.load(reach), 0)
        end = gl.maximum(gl.minimum(end, gl.cdiv(after, c.BLOCK_M)), begin)
    full_begin, full_end = work_tile.full_begin, work_tile.full_end
    return KeyTile(
        work_tile.b, work_tile.place, work_tile.hk, work_tile.n0, begin, full_begin, full_end, end, work_tile.seq, 0
    )  # fmt: skip


@gluon.jit
def first_within_reach(first, m0, work_tile, reaches, sizes, c):
    """Return the first key tile that visits a query tile; ``first``: the first that sees it."""
    if c.FAR_LO:
        lo = gl.load(reaches + 2 * (work_tile.b * sizes.kv_heads + work_tile.hk))
        first = gl.maximum(first, gl.maximum(m0 + lo, 0) // c.BLOCK_N)
    return first


@gluon.jit
def packed_work_tile(tile_index, x, terms, sizes, c):
    """Return the ``tile_index``-th listed work tile, see `gluon.varlen.listed_tile_and_head`."""
    seq, tile, hk, n = listed_tile_and_head(x.tile_list, tile_index, sizes.kv_heads, c.BLOCK_N, True)
    return key_tile(0, hk, tile * c.BLOCK_N, seq, first_tile_of(x.tile_list, n, seq, c.BLOCK_M), terms, c)


@gluon.jit
def row_tile(work_tile, h, m, sizes):
    """Return the index of a query tile among those of all heads."""
    return (work_tile.b * sizes.kv_heads * sizes.group + h) * sizes.row_tiles + (work_tile.first_tile + m)


@gluon.jit
def head_of(work_tile, sizes, c):
    """Return the index of a work tile's key/value head in the counters and in dq_accum."""
    if c.ELEMENTS > 1:  # in the order of `work_tile_of`
        place = work_tile.place
        return (place // c.ELEMENTS * sizes.kv_heads + work_tile.hk) * c.ELEMENTS + place % c.ELEMENTS
    else:
        return work_tile.b * sizes.kv_heads + work_tile.hk


@gluon.jit
def tile_of_sum(work_tile, h, m, sizes, c):
    """Return the index of a query tile in dq_accum."""
    if c.ELEMENTS > 1:  # heads take turns in dq_accum
        head = head_of(work_tile, sizes, c) % sizes.zeroed * sizes.group + h - work_tile.hk * sizes.group
        return head * sizes.row_tiles + m
    else:
        return row_tile(work_tile, h, m, sizes)


@gluon.jit
def group_before(group, sizes, c):
    """Return the group before (of a lower number) with the same bias and key tile, or -1."""
    head, tile = head_and_tile(group, sizes, c)
    before = group_of(gl.maximum(head - 1, 0), tile, sizes, c)
    return gl.where(head % groups_per_broadcast(sizes, c) == 0, -1, before)


@gluon.jit
def work_tile_at(tile_index, x, terms, sizes, c):
    """Return the ``tile_index``-th work tile."""
    if c.PACKED:
        return packed_work_tile(tile_index, x, terms, sizes, c)
    else:
        group, member = tile_index // c.GROUP_PROGRAMS, tile_index % c.GROUP_PROGRAMS
        work_tile = work_tile_of(group, member, terms, sizes, c, x.tile_list)
        if c.HIDES_KEYS:
            work_tile = unless_hidden(work_tile, x, sizes, c)
        return work_tile


@gluon.jit
def unless_hidden(work_tile, x, sizes, c):
    """Return an element's work tile, empty if a mask hides its keys from all elements of the program."""
    seen = 0
    for element in gl.static_range(c.ELEMENTS):
        b = element_at(work_tile.place // c.ELEMENTS * c.ELEMENTS + element, sizes, c)
        nth = tile_of_mask(b, work_tile.hk * sizes.group, work_tile.n0, sizes, c)
        # as `tile_list_of`; Triton: 1 + row_tiles would be hoisted to the kernel's start for all roles, and spill
        seen |= gl.load(x.tile_list + nth * sizes.row_tiles + nth, mask=b < x.k.shape[0], other=0)
    end = gl.where(seen != 0, work_tile.end, work_tile.begin)
    return KeyTile(
        work_tile.b, work_tile.place, work_tile.hk, work_tile.n0, work_tile.begin, work_tile.full_begin,
        work_tile.full_end, end, work_tile.seq, work_tile.first_tile,
    )  # fmt: skip


@gluon.jit
def of_element(first, element, sizes, c):
    """Return the work tile of an element; ``first``: that of the program's first."""
    place = first.place + element
    return KeyTile(
        element_at(place, sizes, c), place, first.hk, first.n0, first.begin, first.full_begin, first.full_end,
        first.end, first.seq, first.first_tile,
    )  # fmt: skip


@gluon.jit
def work_tile_count(x, sizes, c):
    if c.PACKED:
        return gl.load(x.tile_list) * sizes.kv_heads
    else:
        return sizes.key_tiles * sizes.kv_heads * sizes.batch


@gluon.jit
def step_of(m, g, work_tile):
    """Return the step in which a program visits a query tile of its ``g``-th head, counting empty tiles."""
    return g * (work_tile.end - work_tile.begin) + work_tile.end - 1 - m


@gluon.jit
def place_of(sizes, c):
    """Return this program's place in the dS buffer; with DBIAS "reduce" it has one work tile."""
    return (
        gl.program_id(0) // c.GROUP_PROGRAMS % sizes.ds_buffer_groups * c.GROUP_PROGRAMS
        + gl.program_id(0) % c.GROUP_PROGRAMS
    )


@gluon.jit
def first_of_sum(work_tile, sizes, c):
    """Return the first batch element of the sum (see `config.dbias_sums`) that a work tile adds dS to.

    With two sums, one half of those that share a bias add to each."""
    if c.DBIAS_SUMS == 1:
        return 0
    else:
        n = work_tile.b % sizes.broadcast_batch + sizes.broadcast_batch * (work_tile.hk % sizes.broadcast_heads)
        second = 2 * n >= sizes.broadcast_batch * sizes.broadcast_heads
        if c.BIAS_BATCH > 1:
            return second.to(gl.int32) * c.BIAS_BATCH
        else:
            return second.to(gl.int32) * (sizes.batch if c.BIAS_BATCH else 1)


@gluon.jit
def bias_of_tile(work_tile, sizes, c):
    """Return the index of the bias of a work tile's batch element."""
    if c.BIAS_BATCH > 1:
        return work_tile.place // sizes.broadcast_batch
    elif c.BIAS_BATCH:
        return work_tile.b
    else:
        return 0


@gluon.jit
def tile_of_mask(b, h, n0, sizes, c):
    """Return the index of a key tile among those of all masks."""
    heads = sizes.kv_heads * sizes.group
    return mask_of(b, h, heads, c) * sizes.key_tiles + n0 // c.BLOCK_N


@gluon.jit
def tile_list_of(tile_list, work_tile, h, sizes, c):
    """Return ``(count, pointer)`` of the tile list of one query head; the pointer is 0 without a mask."""
    if c.MASK:
        PER_TILE: gl.constexpr = 2 if c.ORDERED else 1
        WIDTH: gl.constexpr = 1 + c.LONGEST_FIRST
        at = tile_list + tile_of_mask(work_tile.b, h, work_tile.n0, sizes, c) * (WIDTH + PER_TILE * sizes.row_tiles)
        return gl.load(at), at + 1
    else:
        return work_tile.end - work_tile.begin, 0


@gluon.jit
def steps_of(x, work_tile, sizes, c):
    """Return the number of query tiles that a work tile visits, over all of its query heads."""
    if c.MASK:
        steps = 0
        for g in range(sizes.group):
            count, _ = tile_list_of(x.tile_list, work_tile, work_tile.hk * sizes.group + g, sizes, c)
            steps += count
    else:
        steps = sizes.group * (work_tile.end - work_tile.begin)
    return steps


@gluon.jit
def entry_at(i, listed, work_tile, c):
    """Return the ``i``-th query tile, from the last, and its kind, see `mask_kernels.tile_list_kernel`."""
    if c.MASK:
        entry = gl.load(listed + i)
        return entry >> 2, entry & 3
    else:
        m = work_tile.end - 1 - i
        return m, gl.where((m < work_tile.full_begin) | (m >= work_tile.full_end), 1, 0)
