"""Dropout of probabilities in registers: which are kept is a function of their place, see `tilewise.score.dropout`.

A thread of wgmma's result owns all four scores of a group, in a tile as in a transposed one: rows i, i + 8 and columns
j, j + 8. Its two words are made once, and the two numbers of 16 bits that each has are compared at once: the result of
a subtraction has a bit for each, 15 and 31, set where a probability is dropped.

Nothing of this needs the scores: a forward asks for it before it waits for Q·Kᵀ, and ptxas mixes it with exponentials.
What is left to do is a mask and an AND for two probabilities, rounded and packed. In the backward a probability that is
dropped has its sign turned: P is needed with dropout for dV, where rounding takes what is negative to 0, and without
for dS; a sign costs no register.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise.backends.dropout import half, kept, philox2x32
from tilewise.backends.gluon.sm90.m_subtiles import minus_delta_of
from tilewise.backends.gluon.sm90.wgmma import accumulator


@gluon.jit
def of_groups(x):
    """[rows, columns] as [rows / 16, 8, columns / 16, 8, columns j and j + 8, rows i and i + 8]."""
    return x.reshape([x.shape[0] // 16, 2, 8, x.shape[1] // 16, 2, 8]).permute((0, 2, 3, 5, 4, 1))


@gluon.jit
def first_of_groups(x):
    """What the first row and column of each group have."""
    x, _ = of_groups(x).split()
    x, _ = x.split()
    return x


@gluon.jit
def counter(first, within, word, HAS_ORIGIN: gl.constexpr):
    """A counter of Philox for each of ``within``, places in a tile from ``first`` on. Without an origin a tile begins
    at a multiple of its size: nothing carries, and what a thread knows when it is compiled comes last, apart."""
    within = half(within)
    if HAS_ORIGIN:
        return (gl.cast(first, gl.uint32) // 2 + within) ^ word
    else:
        return gl.cast(first, gl.uint32) // 2 ^ word ^ (within & 6) ^ (within & 0xFFFFFFF9)


@gluon.jit
def counters(none, words, m0, n0, TRANSPOSED: gl.constexpr, terms):
    """Of each group those of its query and of its key. ``none``: a tile of zeros."""
    A: gl.constexpr = 0 if TRANSPOSED else 1  # the axis of keys
    LAYOUT: gl.constexpr = none.type.layout
    HAS_ORIGIN: gl.constexpr = terms.origin is not None
    rows = gl.expand_dims(gl.arange(0, none.shape[1 - A], gl.SliceLayout(A, LAYOUT)), A).to(gl.uint32)
    cols = gl.expand_dims(gl.arange(0, none.shape[A], gl.SliceLayout(1 - A, LAYOUT)), 1 - A).to(gl.uint32)
    if HAS_ORIGIN:
        m0 += terms.origin.query
        n0 += terms.origin.key
    c0 = counter(m0, first_of_groups(none + rows), words.row, HAS_ORIGIN)
    c1 = counter(n0, first_of_groups(none + cols), words.col, HAS_ORIGIN)
    return c0, c1


@gluon.jit
def _dropped_bits(word, terms):
    """Bits 15 and 31: whether the number in the half below is less than the threshold, see `dropout_bounds`."""
    EXTREME: gl.constexpr = "max" if terms.MOSTLY else "min"
    return gl.inline_asm_elementwise(
        f"{{ .reg .b32 x; {EXTREME}.u16x2 x, $1, $2; sub.u32 $0, $3, x; }}",
        "=r,r,r,r", [word, terms.bound, terms.minuend], dtype=gl.uint32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def dropped_bits(none, words, m0, n0, TRANSPOSED: gl.constexpr, terms):
    """`_dropped_bits` of the two words of each group, [rows / 16, 8, columns / 16, 8]: of query i, of query i + 8; the
    lower bit is of key j, the higher of key j + 8."""
    c0, c1 = counters(none, words, m0, n0, TRANSPOSED, terms)
    x0, x1 = philox2x32(c0, c1, words.key)
    return _dropped_bits(x0, terms), _dropped_bits(x1, terms)


@gluon.jit
def dropped_groups(words, m0, n0, terms, c):
    """Which probabilities are dropped of a tile of 64 queries from ``m0`` on and the keys from ``n0`` on, a word a
    group, [4, 8, BLOCK_N / 16, 8]: the signs of its bytes, of query i + 8 the even ones. ``words``: a `Stream`."""
    LAYOUT: gl.constexpr = accumulator(64, c.BLOCK_N)
    none = gl.zeros([64, c.BLOCK_N], gl.uint32, LAYOUT)
    if terms.IN_GROUPS:
        x0, x1 = dropped_bits(none, words, m0, n0, False, terms)
    else:
        rows = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))[:, None]
        cols = gl.arange(0, c.BLOCK_N, gl.SliceLayout(0, LAYOUT))[None, :]
        first, second = of_groups(gl.where(kept(words, m0, rows, n0, cols, terms), none, none + 0x8000)).split()
        low0, high0 = first.split()
        low1, high1 = second.split()
        x0, x1 = low0 | high0 << 16, low1 | high1 << 16
    return gl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, 0x3715;", "=r,r,r", [x0, x1], dtype=gl.uint32, is_pure=True, pack=1
    )


@gluon.jit
def _masks(even, odd, SELECTOR: gl.constexpr):
    """0xffff where a byte of `dropped_groups` has its sign, of two neighbouring columns in one word."""
    return gl.inline_asm_elementwise(
        f"prmt.b32 $0, $1, $2, {SELECTOR};", "=r,r,r", [even, odd], dtype=gl.uint32, is_pure=True, pack=1
    )


@gluon.jit
def dropped_pairs(groups, like, c):
    """`dropped_groups` as masks of two neighbours of a row each, as ``like``, [64, BLOCK_N / 2]."""
    even, odd = groups.reshape([4, 8, c.BLOCK_N // 16, 4, 2]).split()
    first = gl.join(_masks(even, odd, 0xDD99), _masks(even, odd, 0xFFBB))  # a selector's 8: the sign, in all bits
    second = gl.join(_masks(even, odd, 0xCC88), _masks(even, odd, 0xEEAA))
    found = gl.join(first, second).permute((0, 5, 1, 2, 4, 3)).reshape([64, c.BLOCK_N // 2])
    return gl.convert_layout(found, like.type.layout, assert_trivial=True)


@gluon.jit
def signed_by_dropout(p, words, m0, n0, terms):
    """P of a transposed subtile, [keys, queries], negative where it is dropped."""
    LAYOUT: gl.constexpr = p.type.layout
    none = gl.zeros([p.shape[0], p.shape[1]], gl.uint32, LAYOUT)
    if not terms.IN_GROUPS:
        rows = gl.arange(0, p.shape[1], gl.SliceLayout(0, LAYOUT))[None, :]
        cols = gl.arange(0, p.shape[0], gl.SliceLayout(1, LAYOUT))[:, None]
        bits = gl.where(kept(words, m0, rows, n0, cols, terms), none, none + 0x80000000)
    else:
        x0, x1 = dropped_bits(none, words, m0, n0, True, terms)
        bits = gl.join(gl.join(x0 << 16, x1 << 16), gl.join(x0, x1))  # ..., queries i and i + 8, keys j and j + 8
        bits = bits.permute((0, 5, 1, 2, 4, 3)).reshape([p.shape[0], p.shape[1]])
        bits = gl.convert_layout(bits, LAYOUT, assert_trivial=True)
    return (p.to(gl.uint32, bitcast=True) | bits & 0x80000000).to(gl.float32, bitcast=True)


@gluon.jit
def kept_of(p, words, DTYPE: gl.constexpr):
    """P as dV takes it, in the dtype of V. ``p``: of `signed_by_dropout`."""
    if words is not None:  # NaN stays
        KIND: gl.constexpr = "f16x2" if gl.float16 == DTYPE else "bf16x2"
        p = gl.inline_asm_elementwise(
            f"cvt.rn.relu.{KIND}.f32 $0, $2, $1;", "=r,f,f", [p], dtype=gl.int16, is_pure=True, pack=2
        )
        return p.to(DTYPE, bitcast=True)
    else:
        return p.to(DTYPE)


@gluon.jit
def softmax_gradient(p, dp, words, rows, slot, SUBTILE: gl.constexpr, terms, c):
    """dS = P (dP - delta) of a transposed subtile; with dropout dP counts, by its weight, where P is kept.

    ``p``, with dropout, has that weight, of which delta has been rid; ``dp``: of `m_subtiles.begin_dp`, which has delta
    in it where nothing is dropped."""
    if words is not None:
        minus_delta = minus_delta_of(rows, slot, SUBTILE, c)[None, :]
        return gl.maximum(p, 0.0) * dp + gl.abs(p) * minus_delta
    else:
        return p * dp
