"""Dropout mask as a function of the seed and of the position of a score, in plain torch.

The generator is Philox (Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011; library
Random123), which maps a counter and a key to words. No mask is stored, and forward and backward get equal masks for all
tile sizes, backends and numbers of GPUs:

    w0, w1, w2, _ = Philox4x32-10(counter = (offset, offset >> 32, sequence, query head), key = (seed, seed >> 32))
    x0, x1        = Philox2x32-7 (counter = (i' xor w1, j' xor w2), key = w0)
    i', j'        = i // 16 * 8 + i % 8,  j // 16 * 4 + j % 8 // 2
    word          = x0 where bit 3 of i is 0, x1 where it is 1
    half          = the low half of the word where j is even, the high half where it is odd
    number        = the half, its two bytes swapped where bit 3 of j is 1, without its highest bit
    dropped       = number < threshold,   threshold = round(32768 p)

All words have 32 bits. i and j are the indices of the query and of the key in their sequence, from 0; sequence is the
index along the batch. Indices and query heads count in the whole call: a shard knows its first ones from `Origin`.

One Philox2x32 call serves eight scores, rows i, i + 8 and columns j, j + 1, j + 8, j + 9 for an even j, which one
thread of an mma or wgmma accumulator owns; a thread of a transposed tile owns four of them. So a score uses eight
random bits: keys j and j + 8 read one half with its bytes in opposite orders. Each number is uniform. The upper bits of
one are the lower bits of the other, which matter only if its own upper bits equal those of the threshold;
`docs/maths.md` bounds the dependence.

Kept probabilities are divided by the exact share that is kept, 1 - threshold / 32768, and not by 1 - p. The jit twins
have the same names (``backends/kernels/dropout.py``).
"""

from __future__ import annotations

import sys
from typing import NamedTuple

import torch
from torch import Tensor

NUMBERS = 1 << 15  # equally likely numbers
WORD = (1 << 32) - 1
LOW, HIGH = (0, 1) if sys.byteorder == "little" else (1, 0)  # which half of an integer comes first in memory


class Origin(NamedTuple):
    """First query, key and query head of a call in the larger call that it is a shard of."""

    query: int = 0
    key: int = 0
    head: int = 0


class Stream(NamedTuple):
    """Words w0, w1 and w2 of a (sequence, query head), int64 tensors of equal shape."""

    key: Tensor
    row: Tensor
    col: Tensor


def threshold(p: float) -> int:
    """Return how many of the `NUMBERS` equally likely numbers drop a probability."""
    return round(p * NUMBERS)


def weight(threshold: int) -> float:
    """Return the factor of a kept probability, 1 / (1 - threshold / NUMBERS); 0 if all are dropped."""
    return NUMBERS / (NUMBERS - threshold) if threshold < NUMBERS else 0.0


def mulhilo(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """Return the high and the low word of a product of two words; int64 wraps but keeps all 64 bits."""
    product = a * b
    return product >> 32 & WORD, product & WORD


def philox4x32(counter: tuple[Tensor, ...], key: tuple[Tensor, ...], rounds: int = 10) -> tuple[Tensor, ...]:
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(rounds):
        hi0, lo0 = mulhilo(c0, 0xD2511F53)
        hi1, lo1 = mulhilo(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0
        k0, k1 = k0 + 0x9E3779B9 & WORD, k1 + 0xBB67AE85 & WORD
    return c0, c1, c2, c3


def philox2x32(c0: Tensor, c1: Tensor, key: Tensor, rounds: int = 7) -> tuple[Tensor, Tensor]:
    for _ in range(rounds):
        hi, lo = mulhilo(c0, 0xD256D193)
        c0, c1 = hi ^ key ^ c1, lo
        key = key + 0x9E3779B9 & WORD
    return c0, c1


def stream(seed: Tensor, sequence: Tensor, head: Tensor) -> Stream:
    """Return the `Stream` of seed (seed, offset), int64 (2,), and of int64 sequences and heads that broadcast."""
    low, high = seed & WORD, seed >> 32 & WORD
    sequence, head = torch.broadcast_tensors(sequence, head)
    w0, w1, w2, _ = philox4x32((low[1], high[1], sequence, head), (low[0], high[0]))
    return Stream(w0, w1, w2)


def pair_of_rows(i: Tensor) -> Tensor:
    """Return i', the index of the pair of queries i and i + 8."""
    return i // 16 * 8 + i % 8


def four_of_columns(j: Tensor) -> Tensor:
    """Return j', the index of the group of keys j, j + 1, j + 8 and j + 9."""
    return j // 16 * 4 + j % 8 // 2


def number_of(word: Tensor, j: Tensor) -> Tensor:
    """Return the number of key ``j``, 0 to `NUMBERS` - 1."""
    half = word >> 16 * (j & 1) & 0xFFFF
    return torch.where(j & 8 == 0, half, half << 8 | half >> 8) & NUMBERS - 1


def kept(stream: Stream, rows: Tensor, cols: Tensor, threshold: int) -> Tensor:
    """Return bool, True where the probability of query ``rows`` and key ``cols`` is kept; shapes broadcast."""
    x0, x1 = philox2x32(pair_of_rows(rows) ^ stream.row, four_of_columns(cols) ^ stream.col, stream.key)
    return number_of(torch.where(rows & 8 == 0, x0, x1), cols) >= threshold


def kept_tile(stream: Stream, rows: slice, cols: slice, threshold: int) -> Tensor:
    """Return `kept` of a tile, (..., rows, cols); the last two axes of the stream are 1.

    Each word is computed once per group. Halves, bytes and groups of eight neighbours are views of memory, because a
    shift takes ten times as long as a product.
    """
    device = stream.key.device
    (row, row_end), (col, col_end) = ((x.start // 16, (x.stop + 15) // 16) for x in (rows, cols))
    i, j = (torch.arange(n * first, n * end, device=device) for n, first, end in ((8, row, row_end), (4, col, col_end)))
    words = _tile_words(i[:, None] ^ stream.row, j ^ stream.col, stream.key)
    eight = torch.int64  # eight bools: keys 0 to 7 of a group, then 8 to 15
    found = words[0].new_empty(*words[0].shape[:-2], row_end - row, 2, 8, col_end - col, 2, dtype=eight)
    for n, word in enumerate(words):  # of rows i and i + 8
        for m, numbers in enumerate(_numbers(word)):
            found[..., n, :, :, m] = numbers.gt(threshold - 1).view(eight).unflatten(-2, (-1, 8))
    whole = found.flatten(-2).view(torch.bool).flatten(-4, -2)
    return whole[..., rows.start - 16 * row : rows.stop - 16 * row, cols.start - 16 * col : cols.stop - 16 * col]


def _tile_words(c0: Tensor, c1: Tensor, key: Tensor, rounds: int = 7) -> tuple[Tensor, Tensor]:
    """Return the words of `philox2x32` for counters (..., rows, 1) and (..., 1, cols), as int32."""
    hi, lo = mulhilo(c0, 0xD256D193)
    word, low = hi ^ key ^ c1, _halves(lo)[..., LOW]
    products = torch.empty_like(word), torch.empty_like(word)  # alternate: the previous low words are still read
    for n in range(1, rounds):
        key = key + 0x9E3779B9 & WORD
        halves = _halves(torch.mul(word, 0xD256D193, out=products[n % 2]))
        torch.bitwise_xor(halves[..., HIGH], low, out=_halves(word)[..., LOW])  # its high half is 0
        word ^= key
        low = halves[..., LOW]
    return _halves(word)[..., LOW].contiguous(), low.contiguous()


def _halves(x: Tensor) -> Tensor:
    """View int64 (...) as int32 (..., 2)."""
    return x.view(torch.int32).unflatten(-1, (-1, 2))


def _numbers(word: Tensor) -> tuple[Tensor, Tensor]:
    """Return `number_of` as two int16: for keys below 8 of a group of 16, and for the others."""
    half = word.view(torch.int16)
    if HIGH == 0:
        half = half.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    upper = half.view(torch.uint8)[..., HIGH::2]
    return half & NUMBERS - 1, (half & 0x7F).mul_(256).add_(upper)
