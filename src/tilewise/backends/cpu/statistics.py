"""Statistics of the scores of some rows, summed up tile by tile beside the online softmax."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.spec.statistics import Statistics, merged_entropy, stacked


class RowStatistics:
    """Statistics of rows, from ``like``, a column (T, R, 1) of -inf; one `add` for each tile of scores."""

    def __init__(self, wanted: Statistics, like: Tensor) -> None:
        self._wanted = wanted
        self._unbiased = like.clone()
        self._total, self._excess = torch.zeros_like(like), torch.zeros_like(like)

    def add(self, s: Tensor, unbiased: Tensor | None, m: Tensor, m_new: Tensor) -> None:
        """Add a tile of scores, -inf where hidden. m, m_new: the row's maximum without and with it.

        unbiased: the scores without the bias; None if there is none. The total is Σ exp(s - m), the excess Σ exp(s - m)
        (s - m): the online softmax rounds its own sum by a factor that a logarithm would show.
        """
        if self._wanted.max_scores_unbiased:
            plain = s if unbiased is None else unbiased.masked_fill(s == -torch.inf, -torch.inf)
            self._unbiased = torch.maximum(self._unbiased, plain.amax(-1, keepdim=True))
        if self._wanted.entropy:
            base = m_new.masked_fill(m_new == -torch.inf, 0.0)
            fall, x = (m - base).clamp_(min=-200.0), (s - base).clamp_(min=-200.0)  # exp(-200) = 0, and -inf · 0 is NaN
            p, alpha = x.exp(), fall.exp()
            self._excess = alpha * (self._excess + self._total * fall) + (p * x).sum(-1, keepdim=True)
            self._total = alpha * self._total + p.sum(-1, keepdim=True)

    def found(self, m: Tensor, sink: Tensor | None) -> Tensor:
        """Return the statistics (T, R, count) of rows with this maximum of the keys."""
        named = {"max_scores": m, "max_scores_unbiased": self._unbiased}
        if self._wanted.entropy:
            total = self._total.masked_fill(m == -torch.inf, 1.0)
            entropy = total.log() - self._excess / total
            if sink is not None:
                own = m.double() + total.double().log(), sink.double()
                whole = torch.logaddexp(*own).masked_fill(m.maximum(sink) == -torch.inf, 0.0)
                entropy = merged_entropy((entropy, 0.0), [whole - x for x in own])
            named["entropy"] = entropy
        return stacked(self._wanted, {name: named[name].squeeze(-1).to(m.dtype) for name in self._wanted.names})
