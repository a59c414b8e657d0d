"""The score pipeline in registers: jit twins of `tilewise.spec.reference` and `tilewise.spec.tiles`.

Scores stay in units of 1/scale, in which Q·Kᵀ comes out of the tensor cores: the scale rides on the multiply-add that
the exponential needs anyway, and a bias is brought into these units. A softcap applies the scale first: units of 1.
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
INFINITY = 0x7C00  # the bits of float16's; those of more are NaN
key_tiles = gluon.jit(tiles.key_tiles)
query_tiles = gluon.jit(tiles.query_tiles)


class GluonScoreArgs(NamedTuple):
    """The numbers of the score pipeline; fields in capitals are gl.constexpr."""

    exponent: float  # of 2: log2(e), times the scale where no softcap applies it
    inverse: float  # 1 / scale, or 1 with a softcap: brings a bias into the units of the scores
    scale: float
    cap: float
    lo: int
    hi: int
    HAS_LO: Any
    HAS_HI: Any
    HAS_CAP: Any
    threshold: float | None = None  # of dropout, as in Triton's `GluonScoreArgs`
    weight: float | None = None
    origin: Any = None
    bound: Any = None  # of two numbers at once, see `dropout_bounds`
    MOSTLY: Any = None
    IN_GROUPS: Any = None  # rows i and i + 8 of a tile are of a group of dropout, and so are columns
    column: Any = gl.constexpr(0)  # of a bias by distance: where key 0 stands in its values, see `relative`
    first: Any = gl.constexpr(0)  # the least distance with an entry
    range_lo: Any = gl.constexpr(0)  # and which have one
    range_hi: Any = gl.constexpr(0)
    entries: Any = gl.constexpr(0)  # how many of them
    inner_lo: Any = gl.constexpr(0)  # and of which distances pairs are visible, too
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
    """By which a kernel compares the two numbers of 15 bits in a word to the threshold T, from 1 to 32768: as those of
    float16, whose order is that of their bits, up to infinity. `bound` has in its bits T twice, or, MOSTLY, where T is
    beyond that, what is left to 32768, for the complement of a number. Nothing where there is no dropout.
    """
    threshold, at = score.dropout, score.origin
    if not threshold:
        return {}
    mostly = threshold > INFINITY
    bound = dropout.NUMBERS - threshold if mostly else threshold
    return {"bound": _as_float(bound << 16 | bound), "MOSTLY": gl.constexpr(mostly),
            "IN_GROUPS": gl.constexpr(at.query % 16 == at.key % 16 == 0)}  # fmt: skip


def _as_float(word: int) -> float:
    """A float32 of these bits: Triton compiles anew for an int that 16 divides, and for no float."""
    return struct.unpack("<f", struct.pack("<I", word))[0]


def kept_weight(problem: Problem) -> float | None:
    """What probabilities have in a backward with dropout beside what they are; None without. Where nothing is kept any
    will do, and 1 divides."""
    return dropout.weight(problem.score.dropout) or 1.0 if problem.score.dropout else None


@gluon.jit
def in_units(bias, inverse):
    """The bias in the units of the scores, rounded towards zero: the largest finite bias (a mask in some models) stays
    finite, and -inf stays -inf."""
    if bias.dtype == gl.bfloat16:  # two at a time: a shift and a mask make them float32
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
    """The bias as float32, where the units of the scores are 1."""
    if bias.dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [bias], dtype=gl.float32, is_pure=True, pack=2
        )  # fmt: skip
    else:
        return bias.to(gl.float32)


@gluon.jit
def score_tile(products, bias, terms, ADDS: gl.constexpr, STORED: gl.constexpr):
    """Scores of a tile of products of Q and K, of which nothing is hidden yet: softcap, bias. Also the softcap's
    derivative, of which only a backward makes use; 1 without a softcap.

    ADDS: the bias comes here; not where the accumulator has started from it, where the softmax's exponent takes it in,
    or where there is none. STORED: as it is stored, else in the units of the scores.
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
    """From dS with respect to the biased score to that with respect to scale·Q Kᵀ."""
    if terms.HAS_CAP:
        ds = ds * slope
    return ds


@gluon.jit
def mask_of(b, h, heads, c):
    """Which mask a head has, counted over its batch elements and heads."""
    if c.MASK_BATCH:
        h = b * heads + h
    return gl.cast(h // c.MASK_GROUP, gl.int64)


@gluon.jit
def in_band(rows, cols, keys, terms):
    """Which scores are visible, from indices that broadcast to the tile: one comparison for each limit."""
    last = keys - 1
    if terms.HAS_HI:
        last = gl.minimum(rows + terms.hi, last)
    seen = cols <= last
    if terms.HAS_LO:
        seen &= cols >= rows + terms.lo
    return seen
