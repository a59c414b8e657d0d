"""Shared by the demo's parts: comparisons, times, attention with a bias by tilewise and SDPA."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import tilewise

Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""``attend(q, k, v, bias) -> o`` with q, k, v, o (B, H, S, D) and bias (1, H, S, S)."""

Advance = Callable[[float], None]
"""``advance(fraction)`` reports that this fraction of the part's work has been done since the last report."""


@dataclass(frozen=True)
class Comparison:
    """Largest difference between tilewise and the reference, and the tolerance for rounding."""

    what: str
    difference: float
    tolerance: float

    @property
    def passed(self) -> bool:
        return self.difference <= self.tolerance  # a NaN fails

    def __str__(self) -> str:
        verdict = "equal" if self.passed else "DIFFERENT"
        allowed = f": {self.difference:.2g} apart, {self.tolerance:.2g} is allowed" if self.tolerance else ""
        return f"{verdict}: {self.what}{allowed}"


@dataclass(frozen=True)
class Spread:
    """Least, median and quartiles of repeated times of one step, in seconds."""

    median: float
    low: float
    high: float
    least: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Spread:
        low, median, high = (
            statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else 3 * list(seconds)
        )
        return cls(median, low, high, min(seconds))

    def __str__(self) -> str:
        return f"{1e3 * self.median:.1f} ms ({1e3 * self.low:.1f} to {1e3 * self.high:.1f})"

    def beside(self, other: Spread) -> str:
        """Return the speedup over ``other`` as text, or "within noise" if the middle halves overlap."""
        if self.low <= other.high and other.low <= self.high:
            return "within noise"
        return f"{other.median / self.median:.2f} x"


def tilewise_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return tilewise.attention(q, k, v, bias=bias)


def sdpa_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def tilewise_causal_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return tilewise.attention(q, k, v, bias=bias, causal=True)


def sdpa_causal_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """Compute causal attention with a bias by SDPA.

    SDPA accepts a bias or is_causal, not both, so the causal mask is written into the bias as -inf.
    """
    future = torch.ones(bias.shape[-2:], dtype=torch.bool, device=bias.device).triu(1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias.masked_fill(future, -torch.inf))


def relative_difference(x: Tensor, reference: Tensor) -> float:
    """Return max|x - reference| / max|reference|, in float32 or wider; NaN if either tensor holds a NaN."""
    wide = torch.promote_types(reference.dtype, torch.float32)
    return ((x.to(wide) - reference.to(wide)).abs().max() / reference.abs().max().to(wide)).item()


def worst(differences: Iterable[float]) -> float:
    """Return the largest difference; NaN if one is NaN (Python's max may ignore a NaN)."""
    return torch.tensor(list(differences), dtype=torch.float64, device="cpu").max().item()
