"""The terms of the score pipeline, as small frozen values.

    s = scale * q·k  ->  softcap  ->  + bias  ->  where visible, else -inf  ->  softmax

Tensors (the bias, the mask) are arguments of a call, not terms; a term holds numbers only.
"""

from __future__ import annotations

from dataclasses import dataclass

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
    def aligned(cls, causal: bool, window: tuple[int | None, int | None] | None, diagonal: int) -> Band:
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
