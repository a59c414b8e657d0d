"""The terms of the score pipeline, as small frozen values.

    s = scale * q·k  ->  softcap  ->  + bias  ->  where visible, else -inf  ->  softmax  ->  dropout

Tensors (the bias, the mask) are arguments of a call, not terms; a term holds numbers only. So of a bias by distance
the `Distances` stand here, and its values among the `bias_components.Parts`.
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

Window = tuple[int | None, int | None]  # see `Band.aligned`
Axis = Literal["query", "key", "none"]
Outside = Literal["zero", "hidden", "clamp"]


class Numbers(TypedDict, total=False):
    """A caller's numbers of the score, by their keywords; one that is None or left out has its default."""

    scale: float | None
    softcap: float | None


# From an LSE beyond it no kernel makes probabilities again: float32 numbers are two and more apart there. Only a bias
# that hides all keys of a row by a large number leads so far.
COARSE_LSE = 2.0**24
START = Origin()


@dataclass(frozen=True)
class Band:
    """Query ``i`` sees key ``j`` when ``lo <= j - i <= hi``; ``None`` is no limit.

    Causal attention and a sliding window are both bands, so that every backend knows one geometry only.
    """

    lo: int | None = None
    hi: int | None = None

    @property
    def unlimited(self) -> bool:
        return self.lo is None and self.hi is None

    @classmethod
    def aligned(cls, causal: bool, window: Window | None, diagonal: int) -> Band:
        """The band of ``causal`` and ``window``, whose centre for query ``i`` is key ``i + diagonal``.

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
        """The band of a sequence of a packed batch, whose own is counted from its last query and key: N - M."""
        return Band(*(None if x is None else x + diagonal for x in (self.lo, self.hi)))

    def both(self, other: Band | None) -> Band:
        """What the two leave visible together; None hides nothing."""
        if other is None:
            return self
        lo = other.lo if self.lo is None else self.lo if other.lo is None else larger(self.lo, other.lo)
        hi = other.hi if self.hi is None else self.hi if other.hi is None else smaller(self.hi, other.hi)
        return Band(lo, hi)


@dataclass(frozen=True)
class Distances:
    """Which distances have an entry: ``lo .. lo + count - 1``. Numbers alone, so that plans can be kept by them.

    reverse: entries descend with the distance. outside: any other distance has 0, is hidden (-inf), or has the entry of
    the nearest end.
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
    """Where a Toeplitz bias needs no values: from ``lo`` down and from ``hi`` up it is one number each, or on a line.

    lo, hi: of ``j - i``; lo <= hi. linear: on a line; a number is one, too.
    """

    lo: int
    hi: int
    linear: bool = False

    def both(self, other: Far) -> Far:
        """Of the sum of two."""
        return Far(smaller(self.lo, other.lo), larger(self.hi, other.hi), self.linear or other.linear)


@dataclass(frozen=True)
class Score:
    """Every number of the score pipeline: ``scale`` (1/score units), ``softcap`` (score units or None), ``band``.

    query, key: of a bias by distance with values per query, and of one per key, which distances have an entry. One for
    all, a Toeplitz bias, has one for each of M + N - 1: `bias_components.Parts.relatives`.
    toeplitz: of such a one, where its entries need not be read; None where nothing is known. The gradient of those may
    then come at any of them that leads to the same gradient of a number or a line.
    dropout: how many of `dropout.NUMBERS` drop a probability; 0 is no dropout. origin: from where on it counts places.
    packed: of a packed batch; its band is then counted from the last query and key of each sequence, `Band.shifted`.
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

    @classmethod
    def of(
        cls, band: Band, head_dim: int, *, dropout_p: float = 0.0, scale: float | None = None,
        softcap: float | None = None,
    ) -> Score:  # fmt: skip
        """Of a caller's numbers, those that `check_numbers` has let pass; without a scale it is 1 / sqrt(head_dim)."""
        if scale is None:
            scale = 1.0 / math.sqrt(head_dim) if head_dim > 0 else 1.0
        dropped = 0 if dropout_p == 0 else dropout.threshold(float(dropout_p))
        return cls(float(scale), None if softcap is None else float(softcap), band, dropout=dropped)

    @property
    def transformed(self) -> bool:
        """Whether something stands between the scaled product and the bias: `reference.transform`."""
        return self.softcap is not None


class ScoreNumbers(NamedTuple):
    """A `Score` and the rest of a call but its tensors, flat, as PyTorch's dispatcher can carry them."""

    lo: int | None
    hi: int | None
    scale: float
    softcap: float | None
    deterministic: bool
    exact: bool
    backend: str
    query_lo: int | None = None
    query_count: int | None = None
    query_rule: str = ""  # "ascending" or "descending", a space, and what is outside; "" where there is none
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
    toeplitz_rule: str = ""  # "number" or "line"; "" where nothing is known

    @classmethod
    def of(cls, score: Score, deterministic: bool, backend: str, exact: bool = False) -> ScoreNumbers:
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
            self.scale, self.softcap, Band(self.lo, self.hi), query, key, self.dropout, packed, origin, far
        )  # fmt: skip


def _flat(distances: Distances | None) -> tuple[int | None, int | None, str]:
    if distances is None:
        return None, None, ""
    order = "descending" if distances.reverse else "ascending"
    return distances.lo, distances.count, f"{order} {distances.outside}"


def _distances(axis: Axis, lo: int | None, count: int | None, rule: str) -> Distances | None:
    """`_flat` backwards."""
    if lo is None or count is None:
        return None
    order, outside = rule.split(" ")
    return Distances(axis, lo, count, order == "descending", cast(Outside, outside))


def is_positive_float(x: float) -> bool:
    """Whether a number is positive and finite; an int may be larger than any float."""
    return 0 < x < math.inf and not (isinstance(x, Rational) and x > sys.float_info.max)


def check_numbers(
    window: Window | None = None, *, dropout_p: float, scale: float | None = None, softcap: float | None = None
) -> None:
    """Raise for a number that no call accepts; sizes play no part here."""
    if window is None and scale is None and softcap is None and type(dropout_p) is float and dropout_p == 0.0:
        return  # the defaults, without a loop over them
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
