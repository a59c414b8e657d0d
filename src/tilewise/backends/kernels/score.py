"""The terms of the score in Triton, jit twins, name by name, of `tilewise.spec.reference` and `tilewise.spec.tiles`;
and the order in which a tile takes them, `score_tile`, and back `score_tile_gradient`. Every kernel written in Triton
calls these, those of the Hopper backend too.

Indices are arguments of every helper, so that one helper serves [M, N] tiles (forward) and [N, M] tiles (backward).
The scale costs no multiply of its own and rounds no operand: it rides on the fused multiply-add that adds the bias or,
without a bias, on the one that the exponential needs anyway. (An accumulator that starts from the bias would cost the
same number of instructions, but Triton pipelines no load that feeds an accumulator.)
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
INTERPRET = bool(knobs.runtime.interpret)  # TRITON_INTERPRET=1: kernels run as Python, for tests without a GPU

# The host's own functions, compiled; the interpreter runs them as they are.
key_tiles = tiles.key_tiles if INTERPRET else triton.jit(tiles.key_tiles)
query_tiles = tiles.query_tiles if INTERPRET else triton.jit(tiles.query_tiles)
split_tiles = tiles.split_tiles if INTERPRET else triton.jit(tiles.split_tiles)


class ScoreArgs(NamedTuple):
    """What kernels in Triton are told of a score: numbers and switches; one that is off compiles its term away."""

    exponent: float  # logits to base-2 exponents: log2(e), times the scale where neither bias nor softcap applies it
    scale: float
    cap: float
    lo: int
    hi: int
    HAS_LO: Any
    HAS_HI: Any
    HAS_CAP: Any
    threshold: float | None = None  # of dropout, see `tilewise.spec.dropout`; None compiles it away
    weight: float | None = None
    origin: OriginArgs | None = None  # of dropout's places; None where they are counted from 0
    query: Any = None  # numbers of a bias by distance: how a backend has them is its own
    key: Any = None
    toeplitz: Any = None


class OriginArgs(NamedTuple):
    """Kernel arguments of `tilewise.spec.dropout.Origin`: of queries and keys the last multiple of 16 and the rest.
    RESTS: True if a rest is not 0; without rests a kernel makes the words of a group once."""

    query: int
    query_rest: int
    key: int
    key_rest: int
    head: int
    RESTS: Any

    @classmethod
    def of(cls, score: Score) -> OriginArgs | None:
        if score.origin == START:
            return None
        query, key, head = score.origin
        rests = query % 16, key % 16
        return cls(query - rests[0], rests[0], key - rests[1], rests[1], head, tl.constexpr(any(rests)))


def score_terms(score: Score, *, scaled: bool) -> ScoreArgs:
    """scaled: `score_tile` applies the scale, which otherwise waits for the exponent."""
    exponent = LOG2E if scaled else score.scale * LOG2E
    return ScoreArgs(exponent=exponent, **score_numbers(score), **dropout_numbers(score))


def dropout_numbers(score: Score) -> dict[str, Any]:
    """What kernels are told of dropout: fields of their `ScoreArgs`; nothing where there is none."""
    if not score.dropout:
        return {}
    # All dropped, they are told by their weight, 0: a threshold of 32768 is more than 15 bits.
    threshold = min(score.dropout, dropout.NUMBERS - 1)
    return {"threshold": float(threshold), "weight": dropout.weight(score.dropout), "origin": OriginArgs.of(score)}


def score_numbers(score: Score) -> dict[str, Any]:
    """What kernels are told of a score, in Triton and in Gluon: fields of their `ScoreArgs`, beside their exponents. A
    switch that is off compiles its term away. By HAS_CAP kernels ask whether anything stands between the product and
    the bias; `score_tile` knows what."""
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
    """Return ``terms`` with other limits, from `tiles.clipped`, of a band that has the same ends."""
    return terms._replace(lo=lo, hi=hi)  # type: ignore[attr-defined]


def varied_limits(terms: tuple, lo: int, hi: int) -> tuple[int | None, ...]:
    """`launcher.Members` of the `ScoreArgs` of a backend whose limits stand at ``lo`` and ``hi``."""
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
    """Scores of a tile of raw products: scale, softcap, bias. Also the softcap's derivative, of which only a backward
    makes use; where there is no softcap something else, for Triton 3.6 returns no None.

    added: the bias in float32, anything where there is none. Without bias and softcap the scale waits for the exponent.
    What is hidden is hidden later.
    """
    s, slope = products, products
    if terms.HAS_CAP:
        s = softcap(s * terms.scale, terms.cap)
        slope = softcap_derivative(s, terms.cap)
        if BIAS:
            s += added
    elif BIAS:
        s = s * terms.scale + added  # one fused multiply-add: the scale rides on the bias
    return s, slope


@triton.jit
def with_sink(m_i, l_i, sink, exponent):
    """``(m, l, alpha)`` of rows that have seen all of their keys, and now one more score without a value, in the units
    of m: what was summed relative to the old maximum is to be multiplied by alpha.

    Subtracted before it is scaled, as in the online softmax: a sink beyond or below all scores overflows nothing.
    """
    m_new = tl.maximum(m_i, sink)
    base = tl.where(m_new == -float("inf"), 0.0, m_new)
    alpha = tl.exp2((m_i - base) * exponent)
    return m_new, l_i * alpha + tl.exp2((sink - base) * exponent), alpha


@triton.jit
def score_tile_gradient(p, dp, delta, slope, terms):
    """`score_tile` backwards, the softmax first: dS with respect to scale·Q Kᵀ, and to the biased score."""
    db = softmax_derivative(p, dp, delta)
    ds = db
    if terms.HAS_CAP:
        ds = db * slope
    return ds, db
