"""Relative position bias in the backward: its values for transposed score tiles, and their gradient.

dS is written through the view through which the bias was read, `spec.relative.skewed`. If all pairs of a tile are
visible and have an entry, its dS is stored. If only some do, its dS is added from a copy, in a slot behind those of the
bias, in which all other pairs have -0: in the view these are at the places of other entries, and -0 changes no number,
not even the sign of a zero. So each entry gets one number, in any order; for entries that get none see `zero_kernel`.

``corner`` is the first key of a tile minus its first query, on which alone its distances depend; in a packed batch both
are counted from the sequence's last.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise.backends.gluon.compat import tma_add, tma_store, warps_barrier
from tilewise.backends.gluon.relative import CUT, INSIDE, column_of, in_range, range_state, reach, state
from tilewise.backends.gluon.varlen import box_of

ANY = gl.constexpr("any")  # tiles at unknown places relative to the range; else see `part_name`


@gluon.jit
def corner_of(m, work_tile, c):
    """Return the corner of the ``m``-th query tile."""
    return work_tile.n0 - work_tile.seq.diagonal - m * c.BLOCK_M


@gluon.jit
def tile_state(corner, terms, c):
    """Return `spec.relative.state` of a tile of the backward."""
    return range_state(0, c.BLOCK_M, corner, c.BLOCK_N, terms)


@gluon.jit
def next_corner(m, work_tile, c):
    """Return the corner of the query tile after the ``m``-th, of this query head or the next."""
    following = gl.where(m > work_tile.begin, m - 1, work_tile.end - 1)
    return corner_of(following, work_tile, c)


@gluon.constexpr_function
def part_name(part, known):
    """Return where a part's unmasked query tiles, and the next of their head, are relative to the range.

    "outside": no pair has an entry; "near": each tile has some; "inside": all pairs have one."""
    return ("outside", "near", "inside")[part] if known else "any"


@gluon.jit
def begin_of_part(part: gl.constexpr, work_tile, end, terms, c):
    """Return the first query tile of a part that ends before ``end``; unless SORTED, of the only part."""
    first = work_tile.n0 - work_tile.seq.diagonal - terms.range_lo  # from this query on the first key has no entry
    begin = work_tile.full_begin
    if c.SORTED and part == 0:
        begin = gl.maximum(begin, gl.maximum(first + c.BLOCK_N - 1 + c.BLOCK_M, 0) // c.BLOCK_M)
    elif c.SORTED and part == 1:
        begin = gl.maximum(begin, gl.maximum(first + 1, 0) // c.BLOCK_M)
    return gl.minimum(begin, end)


@gluon.jit
def places(x, corner, SUBTILE: gl.constexpr, c):
    """Return ``(row, column)`` of a transposed subtile's elements, whose distance is column - row.

    The part of an index that differs within a thread is a constant of each comparison, as in `backward.masks`."""
    S: gl.constexpr = x.type.layout
    rows = gl.arange(0, c.SUBTILE_M, gl.SliceLayout(0, S))[None, :]
    cols = gl.arange(0, c.BLOCK_N, gl.SliceLayout(1, S))[:, None]
    row, col = rows // 8 * 8 + rows % 2, cols // 8 % 2 * 8
    return (SUBTILE * c.SUBTILE_M - corner) + (rows - row) - (cols - col), col - row


@gluon.jit
def without_range(x, corner, SUBTILE: gl.constexpr, terms, c):
    """Return a transposed subtile with 0 where a pair has no entry."""
    row, col = places(x, corner, SUBTILE, c)
    return gl.where(in_range(row, col, terms, c), x, 0.0)


@gluon.jit
def gradient_state(corner, terms, c):
    """Return `spec.relative.state` of a tile for the distances that are visible and have an entry."""
    least, most = reach(0, c.BLOCK_M, corner, c.BLOCK_N)
    return state(least, most, terms.inner_lo, terms.inner_hi)


@gluon.jit
def minus_zero():
    """Return -0.0; Triton compiles the literal to 0.0."""
    return gl.to_tensor(-2147483648).to(gl.float32, bitcast=True)


@gluon.jit
def of_entries(ds, corner, SUBTILE: gl.constexpr, terms, c):
    """Return dS of a transposed subtile with -0 where a pair is hidden or has no entry."""
    row, col = places(ds, corner, SUBTILE, c)
    return gl.where((col >= row + terms.inner_lo) & (col <= row + terms.inner_hi), ds, minus_zero())


@gluon.jit
def keep_entries(ds, tiles, corner, SUBTILE: gl.constexpr, terms, c):
    """Store dS of a subtile, [keys, queries], in the slot behind the pipeline if its tile is CUT."""
    if gradient_state(corner, terms, c) == CUT:
        if SUBTILE == 0:
            warps_barrier()  # includes the warp that has waited for TMA to read the slot
        to = tiles.index(c.STAGES).reshape([c.BLOCK_M, c.BLOCK_N])
        if c.M_SUBTILES > 1:
            to = to.slice(SUBTILE * c.SUBTILE_M, c.SUBTILE_M, 0)
        to.permute((1, 0)).store(of_entries(ds, corner, SUBTILE, terms, c).to(tiles.dtype))


@gluon.jit
def let_out(dvalues, tiles, slot, b, h, m, work_tile, terms, c, RANGE: gl.constexpr = ANY):
    """Store or add dS of a tile to the gradient of the values; ``slot``: of the dS for dQ and dK."""
    found = INSIDE
    if RANGE != "inside":
        found = gradient_state(corner_of(m, work_tile, c), terms, c)
    if found >= CUT:
        seq = work_tile.seq
        col = column_of(work_tile.n0, seq, terms, c)
        at = box_of(seq.first_query, seq.queries, b, h, m * c.BLOCK_M, c, col)
        if found == INSIDE:
            tma_store(dvalues, at, tiles.index(slot))
        else:
            tma_add(dvalues, at, tiles.index(c.STAGES))
