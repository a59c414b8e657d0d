"""The order in which a tile of scores takes its terms: `score_tile`, `visible_tile`, and back `score_tile_gradient`.

The scale costs no multiply of its own and rounds no operand: it rides on the fused multiply-add that adds the bias or,
without a bias, on the one that the exponential needs anyway. (An accumulator that starts from the bias would cost the
same number of instructions, but Triton pipelines no load that feeds an accumulator.)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tilewise.backends.score import in_band, softcap, softcap_derivative, softmax_derivative
from tilewise.backends.triton.tensors import load_operand


class Terms(NamedTuple):
    """Numbers and switches of the score pipeline; a switch that is off compiles its term away."""

    exponent: float  # logits to base-2 exponents: log2(e), times the scale where neither bias nor softcap applies it
    scale: float
    cap: float
    lo: int
    hi: int
    HAS_LO: Any
    HAS_HI: Any
    HAS_CAP: Any


@triton.jit
def score_tile(products, x, at, n0, cols, terms, sizes, TAIL: tl.constexpr, c):
    """Scores of a tile of raw products: scale, softcap, bias. Also the softcap's derivative, of which only a backward
    makes use, and the bias; where there is no such term something else, for Triton 3.6 returns no None.

    Without bias and softcap the scale waits for `Terms.exponent`. at, n0, cols, TAIL: see `load_operand`. What is
    hidden is hidden later, by `visible_tile`.
    """
    s, slope, added = products, products, products
    if c.BIAS:
        added = load_operand(x.bias, c.BIAS_HOW, at, n0, cols, TAIL, sizes, c).to(tl.float32)
    if terms.HAS_CAP:
        s = softcap(s * terms.scale, terms.cap)
        slope = softcap_derivative(s, terms.cap)
        if c.BIAS:
            s += added
    elif c.BIAS:
        s = s * terms.scale + added  # one fused multiply-add: the scale rides on the bias
    return s, slope, added


@triton.jit
def visible_tile(x, at, n0, cols, mixed, terms, sizes, PARTIAL: tl.constexpr, TAIL: tl.constexpr, c):
    """Which pairs of a tile are visible: inside the keys, in the band, by the mask.

    PARTIAL: the band may cut it. mixed: where there are lists of tiles, whether the mask has to be read.
    """
    visible = (n0 + cols < sizes.keys) & (at.rows >= 0)
    if PARTIAL:
        visible &= in_band(at.m0 + at.rows, n0 + cols, terms)
    if c.LISTS:
        wanted = mixed != 0
        visible &= (load_operand(x.mask, c.MASK_HOW, at, n0, cols, True, sizes, c, wanted) != 0) | (mixed == 0)
    elif c.MASK:
        visible &= load_operand(x.mask, c.MASK_HOW, at, n0, cols, TAIL, sizes, c) != 0
    return visible


@triton.jit
def score_tile_gradient(p, dp, delta, slope, terms):
    """`score_tile` backwards, the softmax first: dS with respect to scale·Q Kᵀ, and to the biased score."""
    db = softmax_derivative(p, dp, delta)
    ds = db
    if terms.HAS_CAP:
        ds = db * slope
    return ds, db
