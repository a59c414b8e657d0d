"""Value and derivative of each score term in plain torch: the truth the kernels are held to.

Every function takes the indices it needs as arguments and computes none, so that it serves a whole matrix as well as
one tile. The jit twins carry the same names (``backends/kernels/score.py``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.spec.score import Band, Score


def transform(s: Tensor, score: Score) -> Tensor:
    """Scaled products as they are before the bias: ``s`` itself, or through each function that the score has."""
    return s if score.softcap is None else softcap(s, score.softcap)


def transform_derivative(transformed: Tensor, score: Score) -> Tensor | None:
    """The derivative, from the value of `transform`; None where that is 1 everywhere."""
    return None if score.softcap is None else softcap_derivative(transformed, score.softcap)


def softcap(s: Tensor, cap: float) -> Tensor:
    """``cap * tanh(s / cap)``: scores bounded by ±cap (Gemma 2, arXiv 2408.00118, section 2)."""
    return torch.tanh(s / cap) * cap


def softcap_derivative(capped: Tensor, cap: float) -> Tensor:
    """``d softcap / d s = 1 - tanh² = 1 - (capped / cap)²``, from the capped value, which is what a backward has."""
    return 1 - (capped / cap).square()


def in_band(rows: Tensor, cols: Tensor, band: Band) -> Tensor:
    """Bool, the broadcast shape of ``rows`` and ``cols`` (int64 indices): ``lo <= col - row <= hi``."""
    distance = cols - rows
    seen = torch.ones_like(distance, dtype=torch.bool)
    if band.lo is not None:
        seen &= distance >= band.lo
    if band.hi is not None:
        seen &= distance <= band.hi
    return seen


def softmax_derivative(p: Tensor, dp: Tensor, delta: Tensor) -> Tensor:
    """``dS = P∘(dP − D)`` with ``D = rowsum(dP∘P) = rowsum(dO∘O)``; docs/maths.md derives it."""
    return p * (dp - delta)


def visible_product(p: Tensor, visible: Tensor, x: Tensor) -> Tensor:
    """``p @ x`` in which a pair outside ``visible`` adds nothing, even where ``x`` is NaN or infinite.

    A plain product has ``0 * nan = nan``. Here ``x`` counts as 0 where it is not finite, and what a visible
    non-finite element does to a sum is added back element by element.
    """
    out = p @ x.nan_to_num(0.0, 0.0, 0.0)
    for value, found in ((torch.nan, x.isnan()), (torch.inf, x == torch.inf), (-torch.inf, x == -torch.inf)):
        touched = (visible.to(x.dtype) @ found.to(x.dtype)) > 0
        out = out + torch.where(touched, value, 0.0).to(out.dtype)
    return out
