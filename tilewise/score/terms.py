"""The terms of the score pipeline, as small frozen values.

    s = scale * q·k  ->  softcap  ->  + bias  ->  where visible, else -inf  ->  softmax

Tensors (the bias, the mask) are arguments of a call, not terms; a term holds numbers only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import NamedTuple, TypedDict

import torch

Window = tuple[int | None, int | None]  # see `Band.aligned`


class Numbers(TypedDict, total=False):
    """A caller's numbers of the score, by their keywords; one that is None or left out has its default."""

    scale: float | None
    softcap: float | None


# From an LSE beyond it no kernel makes probabilities again: float32 numbers are two and more apart there. Only a bias
# that hides all keys of a row by a large number leads so far.
COARSE_LSE = 2.0**24


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


@dataclass(frozen=True)
class Score:
    """Every number of the score pipeline: ``scale`` (1/score units), ``softcap`` (score units or None), ``band``."""

    scale: float
    softcap: float | None
    band: Band

    @classmethod
    def of(cls, band: Band, head_dim: int, *, scale: float | None = None, softcap: float | None = None) -> Score:
        """Of a caller's numbers, those that `check_numbers` has let pass; without a scale it is 1 / sqrt(head_dim)."""
        if scale is None:
            scale = 1.0 / math.sqrt(head_dim) if head_dim > 0 else 1.0
        return cls(float(scale), None if softcap is None else float(softcap), band)

    @property
    def transformed(self) -> bool:
        """Whether something stands between the scaled product and the bias: `reference.transform`."""
        return self.softcap is not None


class Terms(NamedTuple):
    """A `Score` and the rest of a call but its tensors, flat, as PyTorch's dispatcher can carry them."""

    lo: int | None
    hi: int | None
    scale: float
    softcap: float | None
    deterministic: bool
    exact: bool
    backend: str

    @classmethod
    def of(cls, score: Score, deterministic: bool, backend: str, exact: bool = False) -> Terms:
        band = score.band
        return cls(band.lo, band.hi, score.scale, score.softcap, deterministic, exact, backend)

    @property
    def score(self) -> Score:
        return Score(self.scale, self.softcap, Band(self.lo, self.hi))


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
    for name, number in (("scale", scale), ("softcap", softcap), ("dropout_p", dropout_p)):
        if number is None and name != "dropout_p":
            continue
        if isinstance(number, bool) or not isinstance(number, (Real, torch.SymFloat, torch.SymInt)):
            raise TypeError(f"{name}: expected a float, got {type(number).__name__}")
        if name != "dropout_p" and not 0 < number < math.inf:
            raise ValueError(f"{name}: must be positive and finite, got {number}")
    if not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p: must be a float in [0, 1), got {dropout_p!r}")
    if dropout_p > 0:
        raise NotImplementedError(f"dropout_p: dropout is not implemented yet, got {dropout_p}")
