"""The terms of the score in Triton: jit twins, name by name, of `tilewise.score.reference` and `tilewise.score.tiles`.

Indices are arguments of every helper, so that one helper serves [M, N] tiles (forward) and [N, M] tiles (backward).
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton import knobs

from tilewise.score import tiles

INTERPRET = bool(knobs.runtime.interpret)  # TRITON_INTERPRET=1: kernels run as Python, for tests without a GPU

# The host's own functions, compiled; the interpreter runs them as they are.
key_tiles = tiles.key_tiles if INTERPRET else triton.jit(tiles.key_tiles)
query_tiles = tiles.query_tiles if INTERPRET else triton.jit(tiles.query_tiles)
split_tiles = tiles.split_tiles if INTERPRET else triton.jit(tiles.split_tiles)


@triton.jit
def softcap(s, cap):
    x = s / cap
    u = tl.exp2(-2.8853900817779268 * tl.abs(x))  # e^(-2|x|): no overflow, and tanh is odd
    far = (1 - u) / (1 + u)
    x2 = x * x
    near = tl.abs(x) * (1 - x2 * (0.33333333 - x2 * (0.13333333 - x2 * 0.05396825)))  # 1 - u cancels near 0
    t = tl.where(x2 < 0.01, near, far)
    return tl.where(x < 0, -t, t) * cap


@triton.jit
def softcap_derivative(capped, cap):
    t = capped / cap
    return 1 - t * t


@triton.jit
def in_band(rows, cols, terms):
    seen = (rows >= 0) & (cols >= 0)
    if terms.HAS_LO:
        seen &= cols - rows >= terms.lo
    if terms.HAS_HI:
        seen &= cols - rows <= terms.hi
    return seen


@triton.jit
def softmax_derivative(p, dp, delta):
    return p * (dp - delta)
