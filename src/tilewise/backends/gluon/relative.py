"""Bias by relative position with values per query: a tile of it is a tile of `spec.relative.skewed`.

Key ``lo`` is in column 0 of that view, or after some padding columns: the tile of queries ``row0 ..`` and keys ``col0
..`` is the box at ``(row0, col0 - lo)``, which TMA reads, and to which it adds a gradient. For pairs whose distance has
no entry the box has values of other rows, or memory between two rows: where an end of the range cuts a tile they are
replaced by 0, and a tile without any entry is not read. `values` describes the memory layout, and `varlen_values` that
of a packed batch, whose distances count from each sequence's last query and key.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise.backends.gluon.varlen_values import first_column
from tilewise.spec import relative

reach = gluon.jit(relative.reach)
state = gluon.jit(relative.state)
CUT, INSIDE = gl.constexpr(relative.CUT), gl.constexpr(relative.INSIDE)


@gluon.jit
def range_state(row0, rows, col0, cols, terms):
    """Return `spec.relative.state` of a tile; tiles from CUT up read values."""
    least, most = reach(row0, rows, col0, cols)
    return state(least, most, terms.range_lo, terms.range_hi)


@gluon.jit
def column_of(col0, seq, terms, c):
    """Return the first column, in a bias or in `skewed` values, of the tile of keys from ``col0`` on."""
    if c.RELATIVE and c.PACKED:
        return gl.maximum(col0 + first_column(seq, terms.first), 0)  # negative where a tile has no visible pair
    elif c.RELATIVE:
        return col0 + terms.column
    else:
        return col0


@gluon.jit
def in_range(rows, cols, terms, c):
    """True for pairs that have an entry; the indices broadcast to the tile."""
    if c.RANGE_LO and c.RANGE_HI:
        return (cols >= rows + terms.range_lo) & (cols <= rows + terms.range_hi)
    elif c.RANGE_LO:
        return cols >= rows + terms.range_lo
    else:
        return cols <= rows + terms.range_hi
