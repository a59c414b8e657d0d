"""Terms of the score pipeline as small frozen values.

    s = scale * q·k  ->  softcap  ->  + bias  ->  where visible, else -inf  ->  softmax  ->  dropout

Terms hold numbers only; tensors are arguments of a call. A relative position bias has its `Distances` here and its
values in `bias_components.Parts`.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from numbers import Integral, Rational, Real
from typing import Literal, NamedTuple, TypedDict, cast

import torch

from tilewise.spec import dropout
from tilewise.spec.dropout import Origin
from tilewise.spec.integers import LARGEST, larger, smaller
from tilewise.spec.seqlens import Packed
from tilewise.spec.statistics import NO_STATISTICS, Statistics

Window = tuple[int | None, int | None]  # see `Band.aligned`
Axis = Literal["query", "key", "none"]
Outside = Literal["zero", "hidden", "clamp"]


class Numbers(TypedDict, total=False):
    """Keyword numbers of a caller for the score; None or a missing one is the default."""

    scale: float | None
    softcap: float | None


# Largest |LSE| from which kernels recompute probabilities: beyond it float32 numbers are 2 or more apart. Only a large
# negative bias on all keys of a row leads there.
COARSE_LSE = 2.0**24
START = Origin()


@dataclass(frozen=True)
class Band:
    """Causal or local window: query ``i`` sees key ``j`` if ``lo <= j - i <= hi``; None is no limit."""

    lo: int | None = None
    hi: int | None = None

    @property
    def unlimited(self) -> bool:
        return self.lo is None and self.hi is None

    @classmethod
    def aligned(cls, causal: bool, window: Window | None, diagonal: int) -> Band:
        """Return the band of ``causal`` and ``window`` around key ``i + diagonal`` for query ``i``.

        ``diagonal = N - M`` aligns bottom-right (the last query sees the last key), ``0`` aligns top-left.
        """
        left, right = window if window is not None else (None, None)
        if causal:
            right = 0 if right is None else min(right, 0)
        return cls(
            lo=None if left is None else diagonal - left,
            hi=None if right is None else diagonal + right,
        )

    def shifted(self, diagonal: int) -> Band:
        """Return the band of one sequence of a packed batch, whose limits are relative to its diagonal N - M."""
        return Band(*(None if x is None else x + diagonal for x in (self.lo, self.hi)))

    def both(self, other: Band | None) -> Band:
        """Return the intersection with another band; None does not limit."""
        if other is None:
            return self
        lo = other.lo if self.lo is None else self.lo if other.lo is None else larger(self.lo, other.lo)
        hi = other.hi if self.hi is None else self.hi if other.hi is None else smaller(self.hi, other.hi)
        return Band(lo, hi)


@dataclass(frozen=True)
class Distances:
    """Range of distances that have an entry, ``lo .. lo + count - 1``; part of the key of cached plans.

    reverse: entries descend with the distance.
    outside: value of other distances: 0, -inf ("hidden"), or the entry of the nearest end ("clamp").
    """

    axis: Axis
    lo: int
    count: int
    reverse: bool = False
    outside: Outside = "zero"

    @property
    def hi(self) -> int:
        return self.lo + self.count - 1


@dataclass(frozen=True)
class Far:
    """Distances from ``lo`` down and from ``hi`` up at which a Toeplitz bias need not be read.

    linear: it is a linear function of the distance on either side; else one number on each side.
    """

    lo: int
    hi: int
    linear: bool = False

    def both(self, other: Far) -> Far:
        """Return the far distances of the sum of two Toeplitz biases."""
        return Far(smaller(self.lo, other.lo), larger(self.hi, other.hi), self.linear or other.linear)


@dataclass(frozen=True)
class Score:
    """All numbers of the score pipeline.

    scale, softcap: factor of q·k, and bound of the scaled scores or None.
    query, key: distances with an entry, for relative position values per query and per key. A Toeplitz bias has all M +
    N - 1, see `bias_components.Parts.relatives`.
    dropout: how many of `dropout.NUMBERS` drop a probability; 0 is no dropout.
    packed: of a packed batch, whose band is relative to the diagonal of each sequence, see `Band.shifted`.
    origin: first query, key and head in dropout's coordinates.
    toeplitz: distances at which the Toeplitz bias need not be read; None if unknown. A backward may add the
    gradient of a far distance to another far entry on its side, if the term's parameters get the same gradient.
    statistics: what a forward computes besides o and the LSE.
    """

    scale: float
    softcap: float | None
    band: Band
    query: Distances | None = None
    key: Distances | None = None
    dropout: int = 0
    packed: Packed | None = None
    origin: Origin = START
    toeplitz: Far | None = None
    statistics: Statistics = NO_STATISTICS

    @classmethod
    def of(
        cls, band: Band, head_dim: int, *, dropout_p: float = 0.0, scale: float | None = None,
        softcap: float | None = None, statistics: Statistics = NO_STATISTICS,
    ) -> Score:  # fmt: skip
        """Return the score of numbers checked by `check_numbers`; the default scale is 1 / sqrt(head_dim)."""
        if scale is None:
            scale = 1.0 / math.sqrt(head_dim) if head_dim > 0 else 1.0
        dropped = 0 if dropout_p == 0 else dropout.threshold(float(dropout_p))
        capped = None if softcap is None else float(softcap)
        return cls(float(scale), capped, band, dropout=dropped, statistics=statistics)

    @property
    def transformed(self) -> bool:
        """True if `reference.transform` changes the scaled product."""
        return self.softcap is not None


class ScoreNumbers(NamedTuple):
    """A `Score` and the other non-tensor arguments of a call, flat, for PyTorch's dispatcher."""

    lo: int | None
    hi: int | None
    scale: float
    softcap: float | None
    deterministic: bool
    exact: bool
    backend: str
    query_lo: int | None = None
    query_count: int | None = None
    query_rule: str = ""  # "ascending" or "descending", a space, and `Distances.outside`; "" for None
    key_lo: int | None = None
    key_count: int | None = None
    key_rule: str = ""
    dropout: int = 0
    max_q: int | None = None
    max_k: int | None = None
    packed_forms: str = ""
    first_query: int = 0  # of `dropout.Origin`
    first_key: int = 0
    first_head: int = 0
    toeplitz_lo: int | None = None
    toeplitz_hi: int | None = None
    toeplitz_rule: str = ""  # "number" or "line"; "" for None
    statistics: int = 0  # `Statistics.flags`

    @classmethod
    def of(cls, score: Score, deterministic: bool, backend: str, exact: bool = False) -> ScoreNumbers:
        found = cls._of(score, deterministic, backend, exact)
        return found._replace(statistics=score.statistics.flags) if any(score.statistics) else found

    @classmethod
    def _of(cls, score: Score, deterministic: bool, backend: str, exact: bool) -> ScoreNumbers:
        band = score.band
        numbers = cls(band.lo, band.hi, score.scale, score.softcap, deterministic, exact, backend)
        if score.packed is not None:
            packed = score.packed
            lengths = packed.max_q, packed.max_k, " ".join(packed.forms)
            return cls(*numbers[:7], *_flat(score.query), *_flat(score.key), score.dropout, *lengths, *score.origin)
        if score.toeplitz is not None:
            far = score.toeplitz
            rule = "line" if far.linear else "number"
            numbers = numbers._replace(toeplitz_lo=far.lo, toeplitz_hi=far.hi, toeplitz_rule=rule)
        if score.query is None and score.key is None:
            found = numbers._replace(dropout=score.dropout) if score.dropout else numbers
        else:
            query, key = _flat(score.query), _flat(score.key)
            found = numbers._replace(
                query_lo=query[0], query_count=query[1], query_rule=query[2], key_lo=key[0], key_count=key[1],
                key_rule=key[2], dropout=score.dropout,
            )  # fmt: skip
        if score.origin == START:
            return found
        first_query, first_key, first_head = score.origin
        return found._replace(first_query=first_query, first_key=first_key, first_head=first_head)

    @property
    def score(self) -> Score:
        query = _distances("query", self.query_lo, self.query_count, self.query_rule)
        key = _distances("key", self.key_lo, self.key_count, self.key_rule)
        packed = None
        if self.max_q is not None and self.max_k is not None:
            packed = Packed(self.max_q, self.max_k, tuple(self.packed_forms.split()))
        origin, far = Origin(self.first_query, self.first_key, self.first_head), None
        if self.toeplitz_lo is not None and self.toeplitz_hi is not None:
            far = Far(self.toeplitz_lo, self.toeplitz_hi, self.toeplitz_rule == "line")
        return Score(
            self.scale, self.softcap, Band(self.lo, self.hi), query, key, self.dropout, packed, origin, far,
            Statistics.of_flags(self.statistics),
        )  # fmt: skip


def _flat(distances: Distances | None) -> tuple[int | None, int | None, str]:
    if distances is None:
        return None, None, ""
    order = "descending" if distances.reverse else "ascending"
    return distances.lo, distances.count, f"{order} {distances.outside}"


def _distances(axis: Axis, lo: int | None, count: int | None, rule: str) -> Distances | None:
    """Return the `Distances` of `_flat`."""
    if lo is None or count is None:
        return None
    order, outside = rule.split(" ")
    return Distances(axis, lo, count, order == "descending", cast(Outside, outside))


def is_positive_float(x: float) -> bool:
    """True if a number is positive and finite as a float; an int may exceed the largest float."""
    return 0 < x < math.inf and not (isinstance(x, Rational) and x > sys.float_info.max)


def check_numbers(
    window: Window | None = None, *, dropout_p: float, scale: float | None = None, softcap: float | None = None
) -> None:
    """Raise for a number that no call accepts, whatever its sizes."""
    if window is None and scale is None and softcap is None and type(dropout_p) is float and dropout_p == 0.0:
        return  # fast path for the defaults
    if window is not None:
        if not isinstance(window, (tuple, list)) or len(window) != 2:
            raise TypeError(f"window: expected a pair (left, right) of int or None, got {window!r}")
        for side, width in zip(("left", "right"), window, strict=True):
            if width is None:
                continue
            if isinstance(width, bool) or not isinstance(width, (Integral, torch.SymInt)):
                raise TypeError(f"window: {side} width must be an int or None, got {width!r}")
            if width < 0:
                flash = "; flash-attn's -1 is None here" if width == -1 else ""
                raise ValueError(f"window: {side} width must be 0 or more (None for no limit), got {width}{flash}")
            if not isinstance(width, torch.SymInt) and width > LARGEST:
                raise ValueError(f"window: {side} width must be {LARGEST} or less (None for no limit), got {width}")
    for name, number in (("scale", scale), ("softcap", softcap), ("dropout_p", dropout_p)):
        if number is None and name != "dropout_p":
            continue
        if isinstance(number, bool) or not isinstance(number, (Real, torch.SymFloat, torch.SymInt)):
            raise TypeError(f"{name}: expected a float, got {type(number).__name__}")
        if name != "dropout_p" and not is_positive_float(number):
            raise ValueError(f"{name}: must be positive and finite, got {number}")
    if not 0 <= dropout_p <= 1:
        raise ValueError(f"dropout_p: must be a float in [0, 1], got {dropout_p!r}")
