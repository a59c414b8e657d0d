"""Score pipeline in registers: Gluon versions of `tilewise.spec.reference` and `tilewise.spec.tiles`.

Scores stay unscaled, as the tensor cores return Q·Kᵀ: the multiply-add before the exponential applies the scale, and a
bias is divided by it to match. A softcap applies the scale first.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewise.backends.gluon.toeplitz import far_numbers
from tilewise.backends.gluon.values import range_numbers
from tilewise.backends.kernels.score import dropout_numbers, score_numbers, softcap, softcap_derivative
from tilewise.spec import dropout, tiles
from tilewise.spec.problem import Problem
from tilewise.spec.score import Score

LOG2E = 1.4426950408889634
INFINITY = 0x7C00  # bits of infinity in float16; larger ones are NaN
key_tiles = gluon.jit(tiles.key_tiles)
query_tiles = gluon.jit(tiles.query_tiles)


class GluonScoreArgs(NamedTuple):
    """Arguments of the score pipeline; fields in capitals are gl.constexpr."""

    exponent: float  # factor of scores in exp2: log2(e), times the scale unless a softcap applies it
    inverse: float  # 1 / scale, or 1 with a softcap: converts a bias to the units of the scores
    scale: float
    cap: float
    lo: int
    hi: int
    HAS_LO: Any
    HAS_HI: Any
    HAS_CAP: Any
    threshold: float | None = None  # of dropout, as in `backends.kernels.score.ScoreArgs`
    weight: float | None = None
    origin: Any = None
    bound: Any = None  # threshold of two numbers at once, see `dropout_bounds`
    MOSTLY: Any = None
    IN_GROUPS: Any = None  # rows i and i + 8 of a tile share a dropout group, and so do columns j and j + 8
    column: Any = gl.constexpr(0)  # column of key 0 in a bias by relative position, see `relative`
    first: Any = gl.constexpr(0)  # the least distance with an entry
    range_lo: Any = gl.constexpr(0)  # distances from range_lo to range_hi have an entry
    range_hi: Any = gl.constexpr(0)
    entries: Any = gl.constexpr(0)  # number of distances with an entry
    inner_lo: Any = gl.constexpr(0)  # distances from inner_lo to inner_hi have an entry and are visible
    inner_hi: Any = gl.constexpr(0)
    far_lo: Any = gl.constexpr(0)  # of a Toeplitz bias, see `tilewise.spec.score.Far`
    far_hi: Any = gl.constexpr(0)


def score_terms(problem: Problem) -> GluonScoreArgs:
    score, capped = problem.score, problem.score.transformed
    return GluonScoreArgs(
        exponent=LOG2E if capped else score.scale * LOG2E,
        inverse=1.0 if capped else 1.0 / score.scale,
        **score_numbers(score),
        **dropout_numbers(score),
        **dropout_bounds(score),
        **range_numbers(problem),
        **far_numbers(problem),
    )


def dropout_bounds(score: Score) -> dict[str, Any]:
    """Return the fields by which a kernel compares both 15-bit numbers of a word to the dropout threshold T (1 to
    32768). The numbers are compared as float16 values, whose order is that of their bits, up to infinity. `bound` holds
    T twice. With MOSTLY, where T is above infinity, it holds 32768 - T twice, for the complement of a number. Without
    dropout, return no fields."""
    threshold, at = score.dropout, score.origin
    if not threshold:
        return {}
    mostly = threshold > INFINITY
    bound = dropout.NUMBERS - threshold if mostly else threshold
    return {"bound": _as_float(bound << 16 | bound), "MOSTLY": gl.constexpr(mostly),
            "IN_GROUPS": gl.constexpr(at.query % 16 == at.key % 16 == 0)}  # fmt: skip


def _as_float(word: int) -> float:
    """Return the float32 with these bits: Triton recompiles for an int divisible by 16, but not for a float."""
    return struct.unpack("<f", struct.pack("<I", word))[0]


def kept_weight(problem: Problem) -> float | None:
    """Return the dropout weight of kept probabilities in a backward; None without dropout, 1 if all are dropped."""
    return dropout.weight(problem.score.dropout) or 1.0 if problem.score.dropout else None


@gluon.jit
def in_units(bias, inverse):
    """Convert the bias to the units of the scores, rounding towards zero: the largest finite bias stays finite."""
    if bias.dtype == gl.bfloat16:  # two at a time: a shift and a mask convert them to float32
        return gl.inline_asm_elementwise(
            "{ .reg .b32 x; shl.b32 x, $2, 16; mul.rz.f32 $0, x, $3; "
            "and.b32 x, $2, 0xffff0000; mul.rz.f32 $1, x, $4; }",
            "=f,=f,r,f,f", [bias, inverse], dtype=gl.float32, is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return gl.inline_asm_elementwise(
            "mul.rz.f32 $0, $1, $2;", "=f,f,f", [bias.to(gl.float32), inverse], dtype=gl.float32, is_pure=True, pack=1
        )


@gluon.jit
def widened(bias):
    """Return the bias as float32, for scores in units of 1."""
    if bias.dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [bias], dtype=gl.float32, is_pure=True, pack=2
        )  # fmt: skip
    else:
        return bias.to(gl.float32)


@gluon.jit
def score_tile(products, bias, terms, ADDS: gl.constexpr, STORED: gl.constexpr):
    """Apply softcap and bias to a tile of products Q·Kᵀ, before masking; return (scores, softcap's derivative or 1).

    ADDS: add the bias here; false where the accumulator starts from it, where the softmax's exponent adds it, or
    without a bias. STORED: the bias is as stored, else in the units of the scores.
    """
    s, slope = products, 1.0
    if terms.HAS_CAP:
        s = softcap(s * terms.scale, terms.cap)
        slope = softcap_derivative(s, terms.cap)
    if ADDS and STORED:
        s += in_units(bias, terms.inverse)
    elif ADDS:
        s += bias
    return s, slope


@gluon.jit
def score_tile_gradient(ds, slope, terms):
    """Convert dS with respect to the biased score to dS with respect to scale·Q Kᵀ."""
    if terms.HAS_CAP:
        ds = ds * slope
    return ds


@gluon.jit
def bias_of(b, batch, c):
    """Return the index of a batch element's bias; ``batch``: the number of elements."""
    if c.BIAS_BATCH > 1:  # as many biases, each for a run of elements
        b = b // (batch // c.BIAS_BATCH)
    elif not c.BIAS_BATCH:
        b = 0
    return b


@gluon.jit
def mask_of(b, h, heads, c):
    """Return the index of a head's mask, counted over the mask's batch elements and heads."""
    if c.MASK_BATCH > 1:  # as many masks, which repeat along the batch
        h = b % c.MASK_BATCH * heads + h
    elif c.MASK_BATCH:
        h = b * heads + h
    return gl.cast(h // c.MASK_GROUP, gl.int64)


@gluon.jit
def in_band(rows, cols, keys, terms):
    """True for visible scores, with one comparison per limit; the indices broadcast to the tile."""
    last = keys - 1
    if terms.HAS_HI:
        last = gl.minimum(rows + terms.hi, last)
    seen = cols <= last
    if terms.HAS_LO:
        seen &= cols >= rows + terms.lo
    return seen
