"""Dropout of probabilities in registers: which are kept is a function of their place, see `tilewise.spec.dropout`.

A thread of wgmma's result owns all eight scores of a group, of a transposed tile four: rows i, i + 8 and columns j,
j + 8, by a half of both words. In a forward a half has the numbers of two neighbours of a row each, in the places that
they have in a packed pair of P: `set` compares two at once, as float16's, and its result is the mask of such a pair.

Nothing of this needs the scores: a forward asks for words before it waits for Q·Kᵀ, and ptxas mixes it with
exponentials; or, with WORDS_LAST, once P·V has ended, whose registers are then free, and other warpgroups have
exponentials. In the backward a probability that is dropped has its sign turned: P is needed with dropout for dV, where
rounding takes what is negative to 0, and without for dS; a sign costs no register.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise.backends.gluon.sm90.common.wgmma import accumulator
from tilewise.backends.kernels.dropout import four_of_columns, kept, pair_of_rows, philox2x32


@gluon.jit
def of_groups(x, TRANSPOSED: gl.constexpr):
    """[queries, keys] as [queries / 16, 8, keys / 16, 4, keys j and j + 1, keys j and j + 8, queries i and i + 8], and
    [keys, queries] as [keys / 16, 8, queries / 16, 8, keys j and j + 8, queries i and i + 8]."""
    if TRANSPOSED:
        x = x.reshape([x.shape[0] // 16, 2, 8, x.shape[1] // 16, 2, 8])
        return x.permute((0, 2, 3, 5, 1, 4))
    else:
        x = x.reshape([x.shape[0] // 16, 2, 8, x.shape[1] // 16, 2, 4, 2])
        return x.permute((0, 2, 3, 5, 6, 4, 1))


@gluon.jit
def first_of_groups(x, TRANSPOSED: gl.constexpr):
    """What the first query and key of each group have."""
    x, _ = of_groups(x, TRANSPOSED).split()
    x, _ = x.split()
    if not TRANSPOSED:
        x, _ = x.split()
    return x


@gluon.jit
def counter(first, within, KNOWN: gl.constexpr, word, HAS_ORIGIN: gl.constexpr):
    """A counter of Philox for each of ``within``, counted from that of a tile's begin, ``first``. Without an origin a
    tile begins at a multiple of its size: nothing carries, and what a thread knows when it is compiled, all but the
    bits that KNOWN has not, comes last, apart."""
    if HAS_ORIGIN:
        return (first + within) ^ word
    else:
        return first ^ word ^ (within & (0xFFFFFFFF - KNOWN)) ^ (within & KNOWN)


@gluon.jit
def first_places(none, TRANSPOSED: gl.constexpr):
    """Of each group the first query and key in a tile. ``none``: a tile of zeros."""
    A: gl.constexpr = 0 if TRANSPOSED else 1  # the axis of keys
    LAYOUT: gl.constexpr = none.type.layout
    rows = gl.expand_dims(gl.arange(0, none.shape[1 - A], gl.SliceLayout(A, LAYOUT)), A).to(gl.uint32)
    cols = gl.expand_dims(gl.arange(0, none.shape[A], gl.SliceLayout(1 - A, LAYOUT)), 1 - A).to(gl.uint32)
    return first_of_groups(none + rows, TRANSPOSED), first_of_groups(none + cols, TRANSPOSED)


@gluon.jit
def group_words(rows, cols, words, m0, n0, KNOWN: gl.constexpr, terms):
    """The two words of each group, whose first query and key are those. KNOWN: of a query's counter, see `counter`."""
    HAS_ORIGIN: gl.constexpr = terms.origin is not None
    if HAS_ORIGIN:
        m0 += terms.origin.query
        n0 += terms.origin.key
    c0 = counter(gl.cast(m0, gl.uint32) // 2, pair_of_rows(rows), KNOWN, words.row, HAS_ORIGIN)
    c1 = counter(gl.cast(n0, gl.uint32) // 4, four_of_columns(cols), 0xFFFFFFFC, words.col, HAS_ORIGIN)
    return philox2x32(c0, c1, words.key)


@gluon.jit
def _dropped_halves(word, terms):
    """0xffff where the number of a half is less than the threshold, see `dropout_bounds`."""
    OTHER: gl.constexpr = "xor.b32 x, x, 0x7fff7fff;" if terms.MOSTLY else ""
    TEST: gl.constexpr = "geu" if terms.MOSTLY else "lt"
    return gl.inline_asm_elementwise(
        f"{{ .reg .b32 x, y; mov.b32 x, $1; mov.b32 y, $2; {OTHER} abs.f16x2 x, x; set.{TEST}.u32.f16x2 $0, x, y; }}",
        "=r,r,f",
        [word, terms.bound], dtype=gl.uint32, is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _bytes_of(word, SELECTOR: gl.constexpr):
    """Four bytes of a word, ``prmt``; 8 in a selector: a byte's sign, in all bits."""
    return gl.inline_asm_elementwise(
        f"prmt.b32 $0, $1, 0, {SELECTOR};", "=r,r", [word], dtype=gl.uint32, is_pure=True, pack=1
    )


@gluon.jit
def dropout_words(words, m0, n0, terms, c):
    """By which `dropped_pairs` drops probabilities of a tile of 64 queries from ``m0`` on and the keys from ``n0`` on:
    of queries i and i + 8 of each group one, [4, 8, BLOCK_N / 16, 4]. ``words``: a `Stream`."""
    LAYOUT: gl.constexpr = accumulator(64, c.BLOCK_N)
    none = gl.zeros([64, c.BLOCK_N], gl.uint32, LAYOUT)
    if terms.IN_GROUPS:
        rows, cols = first_places(none, False)
        x0, x1 = group_words(rows, cols, words, m0, n0, 0xFFFFFFF9, terms)
    else:  # outcomes, in the signs of bytes
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
    """Of keys j, j + 1 and of j + 8, j + 9: 0xffff in the half of a probability that is dropped."""
    if terms.IN_GROUPS:
        near, far = _dropped_halves(word, terms), _dropped_halves(_bytes_of(word, 0x2301), terms)
    else:
        near, far = _bytes_of(word, 0xAA88), _bytes_of(word, 0xBB99)
    return gl.join(near, far)


@gluon.jit
def dropped_pairs(dropped, like, terms, c):
    """`dropout_words` as masks of two neighbours of a row each, as ``like``, [64, BLOCK_N / 2]."""
    found = gl.join(_pairs(dropped[0], terms), _pairs(dropped[1], terms))
    found = found.permute((0, 5, 1, 2, 4, 3)).reshape([64, c.BLOCK_N // 2])
    return gl.convert_layout(found, like.type.layout, assert_trivial=True)


@gluon.jit
def _halves(low, high, SELECTOR: gl.constexpr):
    """Of two words both low halves, 0x5410, or both high ones, 0x7632."""
    return gl.inline_asm_elementwise(
        f"prmt.b32 $0, $1, $2, {SELECTOR};", "=r,r,r", [low, high], dtype=gl.uint32, is_pure=True, pack=1
    )


@gluon.jit
def _of_next_row(x):
    """What the thread four further or before has, of the odd row beside an even one or the other way round."""
    return gl.inline_asm_elementwise(
        "shfl.sync.bfly.b32 $0, $1, 4, 31, 0xffffffff;", "=r,r", [x], dtype=gl.uint32, is_pure=False, pack=1
    )


@gluon.jit
def shared_halves(none, words, m0, n0, terms):
    """Of each group of a transposed tile the halves that are the key's, of queries i and i + 8 in a word:
    [keys / 16, 8, queries / 16, 8]. The threads of keys j and j + 1 need two halves each of the same words: of queries
    i and i + 1 either makes those of one, and they trade."""
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
    """P of a transposed subtile, [keys, queries], negative where it is dropped."""
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
    """P as dV takes it, in the dtype of V. ``p``: of `signed_by_dropout`."""
    if words is not None:  # NaN stays
        KIND: gl.constexpr = "f16x2" if gl.float16 == DTYPE else "bf16x2"
        p = gl.inline_asm_elementwise(
            f"cvt.rn.relu.{KIND}.f32 $0, $2, $1;", "=r,f,f", [p], dtype=gl.int16, is_pure=True, pack=2
        )
        return p.to(DTYPE, bitcast=True)
    else:
        return p.to(DTYPE)
