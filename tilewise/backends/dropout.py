"""Which probabilities dropout keeps, in Triton: jit twins, name by name, of `tilewise.score.dropout`, which has the
formula and its source.

Indices are arguments, as everywhere: [M, 1] and [1, N] of a tile of scores, [1, M] and [N, 1] of a transposed one.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Stream(NamedTuple):
    """The words of a (sequence, query head), uint32; built inside a kernel."""

    key: Any
    row: Any
    col: Any


@triton.jit
def mulhilo(a, b: tl.constexpr):
    """The high and the low word of the product of two words."""
    return tl.umulhi(a, tl.full([], b, tl.uint32)), tl.mul(a, b, sanitize_overflow=False)


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
    """seed: where the two numbers are. terms: `score.Terms`."""
    if terms.first_head is not None:
        head += terms.first_head
    low, high = tl.load(seed), tl.load(seed + 1)
    sequence, head = sequence.to(tl.uint32), head.to(tl.uint32)
    w0, w1, w2, _ = philox4x32(
        high.to(tl.uint32), (high >> 32).to(tl.uint32), sequence, head, low.to(tl.uint32), (low >> 32).to(tl.uint32)
    )
    return Stream(w0, w1, w2)


@triton.jit
def half(i):
    return (i >> 4) * 8 + (i & 7)


@triton.jit
def kept(stream, m0, rows, n0, cols, terms):
    """Of query m0 + rows and key n0 + cols. m0, n0: multiples of 16. terms: `score.Terms`, of which it takes the
    threshold, a float, so that its value compiles no other kernel, and where places begin.

    Written for each score alone. Of the four of a group the layout of an accumulator gives one thread all, and the
    compiler makes their words once, for it sees that they are the same: hence m0 and n0 apart, of which it may not know
    that they are multiples of 16.
    """
    if terms.first_query is not None:
        m0 += terms.first_query
    if terms.query_rest is not None:
        rows += terms.query_rest
    if terms.first_key is not None:
        n0 += terms.first_key
    if terms.key_rest is not None:
        cols += terms.key_rest
    i, j = rows.to(tl.uint32), cols.to(tl.uint32)
    c0 = (m0.to(tl.uint32) // 2 + half(i)) ^ stream.row
    c1 = (n0.to(tl.uint32) // 2 + half(j)) ^ stream.col
    x0, x1 = philox2x32(c0, c1, stream.key)
    word = tl.where((i & 8) == 0, x0, x1)
    # By the high half of 32 bits, whatever the low one is: a half that is there already is compared as it stands.
    return tl.where((j & 8) == 0, word << 16, word) >= tl.cast(terms.threshold, tl.uint32) << 16
