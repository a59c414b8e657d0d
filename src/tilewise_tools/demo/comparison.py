"""What the parts of the demo share: a comparison that can fail, and the two ways to compute attention with a bias."""

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
"""``advance(fraction)``: this fraction of the part's work is done now, for the progress display."""


@dataclass(frozen=True)
class Comparison:
    """The largest difference found between tilewise and the reference, and the largest that rounding explains."""

    what: str
    difference: float
    tolerance: float

    @property
    def passed(self) -> bool:
        return self.difference <= self.tolerance  # a NaN fails

    def __str__(self) -> str:
        verdict = "equal" if self.passed else "DIFFERENT"
        return f"{verdict}: {self.what}, off by {self.difference:.2g} of {self.tolerance:.2g} allowed"


@dataclass(frozen=True)
class Spread:
    """Of times of the same thing, in seconds: the median, and between what the middle half of them lies."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Spread:
        low, median, high = (
            statistics.quantiles(seconds, n=4, method="inclusive") if len(seconds) > 1 else 3 * list(seconds)
        )
        return cls(median, low, high)

    def __str__(self) -> str:
        return f"{1e3 * self.median:.1f} ms ({1e3 * self.low:.1f} to {1e3 * self.high:.1f})"

    def beside(self, other: Spread) -> str:
        """How many times as fast as the other, where noise leaves that to be said."""
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
    """SDPA takes a bias or is_causal, not both: the future is written into the bias as -inf."""
    future = torch.ones(bias.shape[-2:], dtype=torch.bool, device=bias.device).triu(1)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias.masked_fill(future, -torch.inf))


def relative_difference(x: Tensor, reference: Tensor) -> float:
    """max|x - reference| / max|reference|, at least in float32; NaN if either holds one."""
    wide = torch.promote_types(reference.dtype, torch.float32)
    return ((x.to(wide) - reference.to(wide)).abs().max() / reference.abs().max().to(wide)).item()


def worst(differences: Iterable[float]) -> float:
    """The largest difference; a NaN anywhere is the worst of all (Python's max may pass over it)."""
    return torch.tensor(list(differences), dtype=torch.float64, device="cpu").max().item()
