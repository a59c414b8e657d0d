"""Dropout of probabilities in registers; a probability's place decides if it is kept, see `tilewise.spec.dropout`.

A thread of wgmma's result has all eight scores of a dropout group, in a transposed tile four: rows i, i + 8 and columns
j, j + 8, with one half of both words. In a forward each half has the numbers of two neighbours of a row, at their
positions in a packed pair of P: `set` compares two at once, as float16 numbers, and returns the mask of such a pair.

The words do not depend on the scores. A forward computes them before it waits for Q·Kᵀ, and ptxas mixes them with
exponentials; or, with WORDS_LAST, after P·V, when its registers are free and other warpgroups compute exponentials. The
backward negates a dropped probability: dV needs P with dropout, where rounding sets negative numbers to 0, and dS needs
P without; a sign costs no register.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise.backends.gluon.sm90.common.wgmma import accumulator
from tilewise.backends.kernels.dropout import four_of_columns, kept, pair_of_rows, philox2x32


@gluon.jit
def of_groups(x, TRANSPOSED: gl.constexpr):
    """Reshape a tile so that the last axes are within a dropout group. [queries, keys] becomes [queries / 16, 8, keys /
    16, 4, keys j and j + 1, keys j and j + 8, queries i and i + 8]; TRANSPOSED, [keys, queries] becomes [keys / 16, 8,
    queries / 16, 8, keys j and j + 8, queries i and i + 8]."""
    if TRANSPOSED:
        x = x.reshape([x.shape[0] // 16, 2, 8, x.shape[1] // 16, 2, 8])
        return x.permute((0, 2, 3, 5, 1, 4))
    else:
        x = x.reshape([x.shape[0] // 16, 2, 8, x.shape[1] // 16, 2, 4, 2])
        return x.permute((0, 2, 3, 5, 6, 4, 1))


@gluon.jit
def first_of_groups(x, TRANSPOSED: gl.constexpr):
    """Return the element of each group's first query and key."""
    x, _ = of_groups(x, TRANSPOSED).split()
    x, _ = x.split()
    if not TRANSPOSED:
        x, _ = x.split()
    return x


@gluon.jit
def counter(first, within, KNOWN: gl.constexpr, word, HAS_ORIGIN: gl.constexpr):
    """Return the Philox counter of each of ``within``, relative to the tile's counter ``first``. Without an origin a
    tile begins at a multiple of its size, so that XOR needs no carry; the bits KNOWN at compile time in each thread are
    applied last, separately."""
    if HAS_ORIGIN:
        return (first + within) ^ word
    else:
        return first ^ word ^ (within & (0xFFFFFFFF - KNOWN)) ^ (within & KNOWN)


@gluon.jit
def first_places(none, TRANSPOSED: gl.constexpr):
    """Return the first query and the first key of each group within a tile. ``none``: a tile of zeros."""
    A: gl.constexpr = 0 if TRANSPOSED else 1  # the axis of keys
    LAYOUT: gl.constexpr = none.type.layout
    rows = gl.expand_dims(gl.arange(0, none.shape[1 - A], gl.SliceLayout(A, LAYOUT)), A).to(gl.uint32)
    cols = gl.expand_dims(gl.arange(0, none.shape[A], gl.SliceLayout(1 - A, LAYOUT)), 1 - A).to(gl.uint32)
    return first_of_groups(none + rows, TRANSPOSED), first_of_groups(none + cols, TRANSPOSED)


@gluon.jit
def group_words(rows, cols, words, m0, n0, KNOWN: gl.constexpr, terms):
    """Return the two words of each group, given its first query and key. KNOWN: as in `counter`, for queries."""
    HAS_ORIGIN: gl.constexpr = terms.origin is not None
    if HAS_ORIGIN:
        m0 += terms.origin.query
        n0 += terms.origin.key
    c0 = counter(gl.cast(m0, gl.uint32) // 2, pair_of_rows(rows), KNOWN, words.row, HAS_ORIGIN)
    c1 = counter(gl.cast(n0, gl.uint32) // 4, four_of_columns(cols), 0xFFFFFFFC, words.col, HAS_ORIGIN)
    return philox2x32(c0, c1, words.key)


@gluon.jit
def _dropped_halves(word, terms):
    """Return 0xffff in each half whose number is less than the threshold, see `dropout_bounds`."""
    OTHER: gl.constexpr = "xor.b32 x, x, 0x7fff7fff;" if terms.MOSTLY else ""
    TEST: gl.constexpr = "geu" if terms.MOSTLY else "lt"
    return gl.inline_asm_elementwise(
        f"{{ .reg .b32 x, y; mov.b32 x, $1; mov.b32 y, $2; {OTHER} abs.f16x2 x, x; set.{TEST}.u32.f16x2 $0, x, y; }}",
        "=r,r,f",
        [word, terms.bound], dtype=gl.uint32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _bytes_of(word, SELECTOR: gl.constexpr):
    """Permute the bytes of a word (``prmt``); a selector digit with bit 3 set replicates the byte's sign."""
    return gl.inline_asm_elementwise(
        f"prmt.b32 $0, $1, 0, {SELECTOR};", "=r,r", [word], dtype=gl.uint32, is_pure=True, pack=1
    )


@gluon.jit
def dropout_words(words, m0, n0, terms, c):
    """Return the words by which `dropped_pairs` drops probabilities of 64 queries from ``m0`` and keys from ``n0`` on.
    Two words, for queries i and i + 8 of each group, each [4, 8, BLOCK_N / 16, 4]. ``words``: a `Stream`."""
    LAYOUT: gl.constexpr = accumulator(64, c.BLOCK_N)
    none = gl.zeros([64, c.BLOCK_N], gl.uint32, LAYOUT)
    if terms.IN_GROUPS:
        rows, cols = first_places(none, False)
        x0, x1 = group_words(rows, cols, words, m0, n0, 0xFFFFFFF9, terms)
    else:  # outcomes in the signs of bytes
        rows = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))[:, None]
        cols = gl.arange(0, c.BLOCK_N, gl.SliceLayout(0, LAYOUT))[None, :]
        found = of_groups(gl.where(kept(words, m0, rows, n0, cols, terms), none, none + 0x80), False)
        first, second = found.split()
        x0, x1 = _in_bytes(first), _in_bytes(second)
    return x0, x1


@gluon.jit
def _in_bytes(x):
    near, far = x.split()  # keys j, j + 8
    a, b = near.split()  # and j + 1, j + 9
    d, e = far.split()
    return a | d << 8 | b << 16 | e << 24


@gluon.jit
def _pairs(word, terms):
    """Return masks for keys j, j + 1 and for j + 8, j + 9: 0xffff in the half of a dropped probability."""
    if terms.IN_GROUPS:
        near, far = _dropped_halves(word, terms), _dropped_halves(_bytes_of(word, 0x2301), terms)
    else:
        near, far = _bytes_of(word, 0xAA88), _bytes_of(word, 0xBB99)
    return gl.join(near, far)


@gluon.jit
def dropped_pairs(dropped, like, terms, c):
    """Return `dropout_words` as masks of two neighbours of a row, in the layout of ``like``, [64, BLOCK_N / 2]."""
    found = gl.join(_pairs(dropped[0], terms), _pairs(dropped[1], terms))
    found = found.permute((0, 5, 1, 2, 4, 3)).reshape([64, c.BLOCK_N // 2])
    return gl.convert_layout(found, like.type.layout, assert_trivial=True)


@gluon.jit
def _halves(low, high, SELECTOR: gl.constexpr):
    """Return both low halves (SELECTOR 0x5410) or both high halves (0x7632) of two words."""
    return gl.inline_asm_elementwise(
        f"prmt.b32 $0, $1, $2, {SELECTOR};", "=r,r,r", [low, high], dtype=gl.uint32, is_pure=True, pack=1
    )


@gluon.jit
def _of_next_row(x):
    """Exchange with the thread whose index differs by 4, which has the neighbouring row."""
    return gl.inline_asm_elementwise(
        "shfl.sync.bfly.b32 $0, $1, 4, 31, 0xffffffff;", "=r,r", [x], dtype=gl.uint32, is_pure=False, pack=1
    )


@gluon.jit
def shared_halves(none, words, m0, n0, terms):
    """Return the key's halves of each group of a transposed tile: [keys / 16, 8, queries / 16, 8]. Each word has the
    halves for queries i and i + 8. The threads of keys j and j + 1 need two halves each of the same words: of queries i
    and i + 1 each computes the words of one, and they exchange halves."""
    rows, cols = first_places(none, True)
    G: gl.constexpr = rows.shape[2]
    rows, _ = rows.reshape([rows.shape[0], 8, G, 4, 2]).split()
    cols, _ = cols.reshape([cols.shape[0], 8, G, 4, 2]).split()
    odd = cols & 1
    x0, x1 = group_words(rows + odd, cols, words, m0, n0, 0xFFFFFFF8, terms)
    low, high = _halves(x0, x1, 0x5410), _halves(x0, x1, 0x7632)
    other = _of_next_row(gl.where(odd == 0, high, low))
    both = gl.join(gl.where(odd == 0, low, other), gl.where(odd == 0, other, high))
    return both.reshape([none.shape[0] // 16, 8, G, 8])


@gluon.jit
def signed_by_dropout(p, words, m0, n0, terms):
    """Return P of a transposed subtile [keys, queries], negated where it is dropped."""
    LAYOUT: gl.constexpr = p.type.layout
    none = gl.zeros([p.shape[0], p.shape[1]], gl.uint32, LAYOUT)
    if not terms.IN_GROUPS:
        rows = gl.arange(0, p.shape[1], gl.SliceLayout(0, LAYOUT))[None, :]
        cols = gl.arange(0, p.shape[0], gl.SliceLayout(1, LAYOUT))[:, None]
        bits = gl.where(kept(words, m0, rows, n0, cols, terms), none, none + 0x80000000)
    else:
        x = shared_halves(none, words, m0, n0, terms)
        near, far = _dropped_halves(x, terms), _dropped_halves(_bytes_of(x, 0x2301), terms)
        bits = gl.join(gl.join(near << 16, near), gl.join(far << 16, far))  # ..., queries i and i + 8, keys j and j + 8
        bits = bits.permute((0, 5, 1, 2, 4, 3)).reshape([p.shape[0], p.shape[1]])
        bits = gl.convert_layout(bits, LAYOUT, assert_trivial=True)
    return (p.to(gl.uint32, bitcast=True) | bits & 0x80000000).to(gl.float32, bitcast=True)


@gluon.jit
def kept_of(p, words, DTYPE: gl.constexpr):
    """Return P with dropout, for dV, in the dtype of V. ``p``: from `signed_by_dropout`."""
    if words is not None:  # NaN stays NaN
        KIND: gl.constexpr = "f16x2" if gl.float16 == DTYPE else "bf16x2"
        p = gl.inline_asm_elementwise(
            f"cvt.rn.relu.{KIND}.f32 $0, $2, $1;", "=r,f,f", [p], dtype=gl.int16, is_pure=True, pack=2
        )
        return p.to(DTYPE, bitcast=True)
    else:
        return p.to(DTYPE)
