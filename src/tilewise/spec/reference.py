"""Value and derivative of each score term in plain torch: the reference for the kernels.

Functions take indices as arguments and compute none, so that they work for a whole matrix and for a tile. The jit twins
have the same names (``backends/kernels/score.py``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.spec.score import Band, Score


def transform(s: Tensor, score: Score) -> Tensor:
    """Apply the softcap, if there is one, to scaled products before the bias is added."""
    return s if score.softcap is None else softcap(s, score.softcap)


def transform_derivative(transformed: Tensor, score: Score) -> Tensor | None:
    """Return the derivative from the value of `transform`; None if it is 1 everywhere."""
    return None if score.softcap is None else softcap_derivative(transformed, score.softcap)


def softcap(s: Tensor, cap: float) -> Tensor:
    """Return ``cap * tanh(s / cap)``: scores bounded by ±cap (Gemma 2, arXiv 2408.00118, section 2)."""
    return torch.tanh(s / cap) * cap


def softcap_derivative(capped: Tensor, cap: float) -> Tensor:
    """Return ``d softcap / d s = 1 - tanh² = 1 - (capped / cap)²`` from the capped value."""
    return 1 - (capped / cap).square()


def in_band(rows: Tensor, cols: Tensor, band: Band) -> Tensor:
    """Return bool, ``lo <= col - row <= hi``, for int64 indices that broadcast."""
    distance = cols - rows
    seen = torch.ones_like(distance, dtype=torch.bool)
    if band.lo is not None:
        seen &= distance >= band.lo
    if band.hi is not None:
        seen &= distance <= band.hi
    return seen


def softmax_derivative(p: Tensor, dp: Tensor, delta: Tensor) -> Tensor:
    """Return ``dS = P∘(dP − D)`` with ``D = rowsum(dP∘P) = rowsum(dO∘O)``; docs/maths.md derives it."""
    return p * (dp - delta)


def visible_product(p: Tensor, visible: Tensor, x: Tensor) -> Tensor:
    """Return ``p @ x`` such that pairs outside ``visible`` add nothing, even where ``x`` is NaN or infinite.

    A plain product has ``0 * nan = nan``. The product uses 0 for elements of ``x`` that are not finite, and the effect
    of the visible ones on a sum is added back.
    """
    out = p @ x.nan_to_num(0.0, 0.0, 0.0)
    for value, found in ((torch.nan, x.isnan()), (torch.inf, x == torch.inf), (-torch.inf, x == -torch.inf)):
        touched = (visible.to(x.dtype) @ found.to(x.dtype)) > 0
        out = out + torch.where(touched, value, 0.0).to(out.dtype)
    return out
