"""Philox dropout: jit twins, name by name, of `tilewise.spec.dropout` (formula and source there).

Indices are arguments: [M, 1] and [1, N] for a tile of scores, [1, M] and [N, 1] for a transposed one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton import knobs

_INTERPRET = tl.constexpr(bool(knobs.runtime.interpret))  # Triton's interpreter does not run inline PTX


class StreamArgs(NamedTuple):
    """Philox words of a (sequence, query head), uint32; built inside a kernel."""

    key: Any
    row: Any
    col: Any


@triton.jit
def mulhilo(a, b: tl.constexpr):
    """Return the high and low word of a product of words, in one multiply."""
    product = tl.mul(a.to(tl.uint64), tl.cast(b, tl.uint64), sanitize_overflow=False)
    return (product >> 32).to(tl.uint32), product.to(tl.uint32)


@triton.jit
def philox4x32(c0, c1, c2, c3, k0, k1):
    for _ in tl.static_range(10):
        hi0, lo0 = mulhilo(c0, 0xD2511F53)
        hi1, lo1 = mulhilo(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0
        k0, k1 = tl.add(k0, 0x9E3779B9, sanitize_overflow=False), tl.add(k1, 0xBB67AE85, sanitize_overflow=False)
    return c0, c1, c2, c3


@triton.jit
def philox2x32(c0, c1, key):
    for _ in tl.static_range(7):
        hi, lo = mulhilo(c0, 0xD256D193)
        c0, c1 = hi ^ key ^ c1, lo
        key = tl.add(key, 0x9E3779B9, sanitize_overflow=False)
    return c0, c1


@triton.jit
def stream(seed, sequence, head, terms):
    """Return the `StreamArgs` of a (sequence, head). seed: pointer to (seed, offset), int64."""
    if terms.origin is not None:
        head += terms.origin.head
    low, high = tl.load(seed), tl.load(seed + 1)
    sequence, head = sequence.to(tl.uint32), head.to(tl.uint32)
    w0, w1, w2, _ = philox4x32(
        high.to(tl.uint32), (high >> 32).to(tl.uint32), sequence, head, low.to(tl.uint32), (low >> 32).to(tl.uint32)
    )
    return StreamArgs(w0, w1, w2)


@triton.jit
def pair_of_rows(i):
    return (i >> 4) * 8 + (i & 7)


@triton.jit
def four_of_columns(j):
    return (j >> 4) * 4 + (j >> 1 & 3)


@triton.jit
def number_of(word, j):
    """Return the random number of key j in the upper half of a word.

    LLVM: the shifts become vectors of bswap, which it cannot lower; PTX's prmt is one instruction.
    """
    if _INTERPRET:
        half = tl.where((j & 1) == 0, word << 16, word & 0xFFFF0000)
        return tl.where((j & 8) == 0, half, half << 8 | half >> 8 & 0x00FF0000)
    else:
        selector = 0x1044 + (j & 1) * 0x2200 ^ (j & 8) * 0x220
        return tl.inline_asm_elementwise("prmt.b32 $0, $1, 0, $2;", "=r,r,r", [word, selector], tl.uint32, True, 1)


@triton.jit
def kept(stream, m0, rows, n0, cols, terms):
    """True where dropout keeps query m0 + rows and key n0 + cols. m0, n0: multiples of 16.

    One Philox call serves a group of eight scores. An accumulator's layout gives one thread the whole group, or four of
    it, and the compiler computes their common words once. For this m0 and n0 are separate arguments: it may not know
    that they are multiples of 16.
    """
    if terms.origin is not None:
        m0 += terms.origin.query
        n0 += terms.origin.key
        if terms.origin.RESTS:
            rows += terms.origin.query_rest
            cols += terms.origin.key_rest
    i, j = rows.to(tl.uint32), cols.to(tl.uint32)
    c0 = (m0.to(tl.uint32) // 2 + pair_of_rows(i)) ^ stream.row
    c1 = (n0.to(tl.uint32) // 4 + four_of_columns(j)) ^ stream.col
    x0, x1 = philox2x32(c0, c1, stream.key)
    word = tl.where((i & 8) == 0, x0, x1)
    return (number_of(word, j) & 0x7FFFFFFF) >= tl.cast(terms.threshold, tl.uint32) << 16
