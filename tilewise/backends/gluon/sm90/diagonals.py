"""Of wgmma's results what lies on one diagonal: which elements of a thread, and of which other threads of its warp.

Of every sixteen rows and eight columns a thread has one row and the eighth after it, and two neighbouring columns:
`mask_tiles.in_words`. Without the two rows apart these are tensors [w, g, n, t, b]: sixteen rows, a row of eight, eight
columns, two of these, one of the two. Four threads t share a g; w are warps.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# --- within a thread ---


@gluon.jit
def _halves(x):
    """Those at even and at odd places of n."""
    x = x.reshape([x.shape[0], x.shape[1], x.shape[2] // 2, 2, x.shape[3], x.shape[4]])
    return x.permute((0, 1, 2, 4, 5, 3)).split()


@gluon.jit
def _whole(even, odd):
    """`_halves` backwards."""
    odd = gl.convert_layout(odd, even.type.layout, assert_trivial=True)
    x = gl.join(even, odd).permute((0, 1, 2, 5, 3, 4))
    return x.reshape([x.shape[0], x.shape[1], 2 * x.shape[2], x.shape[4], x.shape[5]])


@gluon.jit
def one_on(x, last):
    """Of 8 or 16 places of n each at the one before, ``last`` at the last; and the first. last: a number, or as the
    first, [w, g, 1, t, b]."""
    even, odd = _halves(x)
    even2, odd2 = _halves(even)
    even4, odd4 = _halves(even2)
    if x.shape[2] == 16:
        first, odd8 = _halves(even4)
        tail = _whole(odd8, gl.convert_layout(last + gl.zeros_like(first), first.type.layout, assert_trivial=True))
    else:
        gl.static_assert(x.shape[2] == 8)
        first = even4
        tail = gl.convert_layout(last + gl.zeros_like(first), first.type.layout, assert_trivial=True)
    return _whole(odd, _whole(odd2, _whole(odd4, tail))), first


@gluon.jit
def of_neighbours(x):
    """The sum over the last axis."""
    even, odd = x.split()
    return even + odd


# --- between the threads of a warp ---


@gluon.jit
def turned(x):
    """Of [w, g, n, t, b], of the distances g - 2 t - b - 8 n, those that are equal modulo 8 in one place of g."""
    turn = 2 * index_of(x, 3) + index_of(x, 4)
    lane = (index_of(x, 1) + turn) % 8 * 4 + index_of(x, 3)
    return from_lane(x, lane + gl.zeros_like(x).to(gl.int32))


@gluon.jit
def goes_around(x):
    """Which elements of `turned` have come from behind the last place."""
    return index_of(x, 1) + 2 * index_of(x, 3) + index_of(x, 4) + gl.zeros_like(x).to(gl.int32) >= 8


@gluon.jit
def shared(x, BIT: gl.constexpr):
    """Of [w, g, n, t] half as many n: of two one, that to which t has the same bit, summed over two threads."""
    even, odd = x.reshape([x.shape[0], x.shape[1], x.shape[2] // 2, 2, x.shape[3]]).permute((0, 1, 2, 4, 3)).split()
    return exchanged(even, odd, BIT)


@gluon.jit
def exchanged(x, y, BIT: gl.constexpr):
    """x, and in threads that have this bit of t y, summed over those that differ in it."""
    has = (index_of(x, 3) & BIT) + gl.zeros_like(x).to(gl.int32) != 0
    lane = (4 * index_of(x, 1) + index_of(x, 3)) ^ BIT
    return gl.where(has, y, x) + from_lane(gl.where(has, x, y), lane + gl.zeros_like(x).to(gl.int32))


@gluon.jit
def from_lane(x, lane):
    """Each element as another thread of the warp has it."""
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;", "=f,f,r", [x, lane], dtype=gl.float32, is_pure=False, pack=1
    )


@gluon.jit
def index_of(x, AXIS: gl.constexpr):
    """The place of each element along an axis."""
    RANK: gl.constexpr = len(x.shape)
    index = gl.arange(0, x.shape[AXIS], _axis(x.type.layout, AXIS, RANK))
    for other in gl.static_range(RANK):
        if other != AXIS:
            index = index.expand_dims(other)
    return index


@gluon.constexpr_function
def _axis(layout, axis, rank):
    for other in reversed(range(rank)):
        if other != axis:
            layout = gl.SliceLayout(other, layout)
    return layout
