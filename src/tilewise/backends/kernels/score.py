"""Score terms: jit twins, name by name, of `tilewise.spec.reference` and `tilewise.spec.tiles`.

`score_tile` applies them in order, `score_tile_gradient` differentiates them. Triton kernels use them, also the
small ones of the Hopper backend. Indices are arguments, so that helpers serve [M, N] (forward) and [N, M] tiles
(backward).

The scale needs no separate multiply: it is part of the fused multiply-add that adds the bias or, without bias, of the
one in the exponential. Triton does not pipeline loads that feed an accumulator, so the bias follows the product.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import triton
import triton.language as tl
from triton import knobs

from tilewise.spec import dropout, tiles
from tilewise.spec.score import START, Score

T = TypeVar("T", bound=tuple)

LOG2E = 1.4426950408889634
_LOG2E = tl.constexpr(LOG2E)
INTERPRET = bool(knobs.runtime.interpret)  # TRITON_INTERPRET=1: kernels run as Python, for tests without a GPU
_INTERPRET = tl.constexpr(bool(knobs.runtime.interpret))

# Compiled host functions; the interpreter runs them directly.
key_tiles = tiles.key_tiles if INTERPRET else triton.jit(tiles.key_tiles)
query_tiles = tiles.query_tiles if INTERPRET else triton.jit(tiles.query_tiles)
split_tiles = tiles.split_tiles if INTERPRET else triton.jit(tiles.split_tiles)


class ScoreArgs(NamedTuple):
    """Kernel arguments of a score in Triton: numbers, and switches that compile a term away when off."""

    exponent: float  # from logits to base-2 exponents: log2(e), times the scale if neither bias nor softcap applies it
    scale: float
    cap: float
    lo: int
    hi: int
    HAS_LO: Any
    HAS_HI: Any
    HAS_CAP: Any
    threshold: float | None = None  # of dropout, see `tilewise.spec.dropout`; None compiles dropout away
    weight: float | None = None  # of dropout: factor of a kept probability
    origin: OriginArgs | None = None  # of dropout: offset of query, key and head indices; None is 0
    query: Any = None  # numbers of a relative-position bias, in a form that the backend defines
    key: Any = None
    toeplitz: Any = None


class OriginArgs(NamedTuple):
    """Kernel arguments of `tilewise.spec.dropout.Origin`."""

    query: int  # rounded down to a multiple of 16
    query_rest: int
    key: int  # rounded down to a multiple of 16
    key_rest: int
    head: int
    RESTS: Any  # True if a rest is not 0; without rests a kernel computes the words of a group once

    @classmethod
    def of(cls, score: Score) -> OriginArgs | None:
        if score.origin == START:
            return None
        query, key, head = score.origin
        rests = query % 16, key % 16
        return cls(query - rests[0], rests[0], key - rests[1], rests[1], head, tl.constexpr(any(rests)))


def score_terms(score: Score, *, scaled: bool) -> ScoreArgs:
    """Return a score's kernel arguments. scaled: `score_tile` applies the scale, not the exponent."""
    exponent = LOG2E if scaled else score.scale * LOG2E
    return ScoreArgs(exponent=exponent, **score_numbers(score), **dropout_numbers(score))


def dropout_numbers(score: Score) -> dict[str, Any]:
    """Return the fields of `ScoreArgs` for dropout; none without dropout."""
    if not score.dropout:
        return {}
    # A threshold of 32768 (all dropped) exceeds 15 bits; the weight is then 0.
    threshold = min(score.dropout, dropout.NUMBERS - 1)
    return {"threshold": float(threshold), "weight": dropout.weight(score.dropout), "origin": OriginArgs.of(score)}


def score_numbers(score: Score) -> dict[str, Any]:
    """Return the fields of `ScoreArgs`, in Triton and Gluon, for scale, softcap and window.

    HAS_CAP: True if any transform is applied between product and bias; `score_tile` knows which.
    """
    lo, hi = tiles.limits(score.band)
    return {
        "scale": score.scale,
        "cap": 1.0 if score.softcap is None else score.softcap,
        "lo": lo,
        "hi": hi,
        "HAS_LO": tl.constexpr(score.band.lo is not None),
        "HAS_HI": tl.constexpr(score.band.hi is not None),
        "HAS_CAP": tl.constexpr(score.transformed),
    }


def limited(terms: T, lo: int, hi: int) -> T:
    """Return ``terms`` with other limits, from `tiles.clipped`, for a window with the same limited sides."""
    return terms._replace(lo=lo, hi=hi)  # type: ignore[attr-defined]


def varied_limits(terms: tuple, lo: int, hi: int) -> tuple[int | None, ...]:
    """Return the `launcher.Members` of a `ScoreArgs` with its limits at positions ``lo`` and ``hi``."""
    return tuple([{"lo": lo, "hi": hi}.get(name) for name in terms._fields])  # type: ignore[attr-defined]


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


@triton.jit
def score_tile(products, added, terms, BIAS: tl.constexpr):
    """Return the scores of a tile of raw products (scale, softcap, bias) and the softcap's derivative.

    Without a softcap the second result is meaningless (Triton 3.6: a function cannot return None). added: the bias in
    float32; ignored without BIAS. Without bias and softcap the exponent applies the scale. Masks are applied later.
    """
    s, slope = products, products
    if terms.HAS_CAP:
        s = softcap(s * terms.scale, terms.cap)
        slope = softcap_derivative(s, terms.cap)
        if BIAS:
            s += added
    elif BIAS:
        s = s * terms.scale + added  # one fused multiply-add for scale and bias
    return s, slope


@triton.jit
def product(x, y):
    """Return x · y rounded to float32. A compiler may merge ``x * y - z`` into an operation that rounds once: then the
    difference of two equal products is not 0."""
    if _INTERPRET:
        return x * y
    return tl.inline_asm_elementwise("mul.rn.f32 $0, $1, $2;", "=f,f,f", [x, y], tl.float32, True, 1)


@triton.jit
def with_sink(m_i, l_i, sink, exponent):
    """Return ``(top, l, alpha)`` of finished rows after adding a sink, a score without value.

    The base-2 LSE is top + log2(l). Sums relative to the old maximum must be multiplied by alpha. Sums are relative to
    m_i · exponent, rounded to float32; top is float64, in which differences of large numbers are exact.
    """
    top = m_i * exponent
    top = tl.where(tl.abs(top) < float("inf"), top.to(tl.float64), m_i.to(tl.float64) * exponent)
    more = sink.to(tl.float64) * _LOG2E
    above = tl.where(sink == -float("inf"), sink, (more - top).to(tl.float32))
    alpha = tl.exp2(tl.minimum(-above, 0.0))
    return tl.maximum(top, more), l_i * alpha + tl.exp2(tl.minimum(above, 0.0)), alpha


@triton.jit
def score_tile_gradient(p, dp, delta, slope, terms):
    """Return the gradients with respect to scale·Q Kᵀ and to the biased score."""
    db = softmax_derivative(p, dp, delta)
    ds = db
    if terms.HAS_CAP:
        ds = db * slope
    return ds, db


@triton.jit
def unrounding(base2):
    """Return f = 2^(r - L) for float64 numbers L, which the main kernels of a backward round to float32 numbers r.

    They compute P = 2^(s - r). As f P dO = P (f dO) and f P (dP - D) = P (f dP - f D), f dO and f D in place of dO and
    D make every gradient that of f P, at no cost in their loops.
    """
    return tl.exp2((base2.to(tl.float32).to(tl.float64) - base2).to(tl.float32))
