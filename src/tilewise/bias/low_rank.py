"""Low-rank bias ``u @ w.mT``: more columns of q and k, no bias tensor (FlashBias, arXiv 2505.12044)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from tilewise.bias.terms import (
    Sizes,
    Term,
    check_device,
    check_float,
    check_sizes,
    name_of,
    pytree_node,
    summary,
)

FEW_COLUMNS = 256  # GPUs read a head of more columns in blocks, which is slower


@pytree_node
@dataclass(frozen=True, eq=False, repr=False)
class LowRankBias(Term):
    """Low-rank bias, made by `low_rank_bias`."""

    kind: ClassVar[str] = "low_rank"

    u: Tensor
    w: Tensor

    def __post_init__(self) -> None:
        check_float(name_of(self, "u"), self.u, (4,), "(B|1, H|1, M, r)")
        check_float(name_of(self, "w"), self.w, (4,), "(B|1, Hkv|1, N, r)")
        if self.w.dtype != self.u.dtype:
            raise TypeError(f"LowRankBias.w: dtype must equal u's {self.u.dtype}, got {self.w.dtype}")
        if self.u.shape[3] != self.w.shape[3] or self.u.shape[3] == 0:
            raise ValueError(
                f"LowRankBias.u, w: expected the same rank r, 1 or more, got {self.u.shape[3]} and {self.w.shape[3]}"
            )
        check_device(self, None)

    @property
    def rank(self) -> int:
        return self.u.shape[3]

    def check(self, sizes: Sizes, device: torch.device | None = None) -> None:
        B, H, Hkv, M, N = sizes
        check_sizes(name_of(self, "u"), self.u, {"B|1": (B, 1), "H|1": (H, 1), "M": (M,), "r": (self.rank,)})
        check_sizes(name_of(self, "w"), self.w, {"B|1": (B, 1), "Hkv|1": (Hkv, 1), "N": (N,), "r": (self.rank,)})
        check_device(self, device)

    def dense(self, sizes: Sizes) -> Tensor:
        """Return ``u @ w.mT``, without gradient where it is not finite: 0 times inf would make NaN at hidden pairs."""
        u, w = self.u.double(), self.w.double()
        if w.shape[1] not in (1, sizes.H):
            w = w.repeat_interleave(sizes.H // sizes.Hkv, 1)
        found = (u @ w.mT).detach()
        u, w = (torch.where(x.isfinite(), x, 0.0) for x in (u, w))
        return torch.where(found.isfinite(), u @ w.mT, found)

    def check_call(self, q: Tensor, capped: bool) -> None:
        """Raise for a call that the columns cannot be added to.

        Raises:
            ValueError: a softcap (``capped``), which must not apply to the bias.
            TypeError: another dtype than q's.
        """
        if capped:
            raise ValueError("LowRankBias: becomes part of q @ k.mT, and a bias does not pass through softcap=")
        if self.u.dtype != q.dtype:
            raise TypeError(f"LowRankBias.u, w: dtype must be q's {q.dtype}, got {self.u.dtype}")

    def extended(self, q: Tensor, k: Tensor, scale: float) -> tuple[Tensor, Tensor, float]:
        """Return ``[q * a, u / rest]``, ``[k * b, w]`` and ``rest``, which scales their product.

        ``rest * product = scale * q @ k.mT + u @ w.mT`` with ``rest = scale / (a * b)``, 1 <= rest < 2 and powers of
        two a and b: u / scale could overflow float16. r more columns hold the rounding error of u / rest, which would
        show where terms cancel, unless they alone exceed `FEW_COLUMNS`. Columns are padded with zeros to rows of 16
        bytes for TMA.
        """
        rest, exponent = math.frexp(scale)
        rest, exponent = 2 * rest, exponent - 1
        u, w = self.u, self.w
        if rest != 1.0:
            quotient = u.double() / rest
            u = quotient.to(q.dtype)
            width = q.shape[3] + self.rank
            if u.dtype != torch.float64 and not width <= FEW_COLUMNS < width + self.rank:
                # Detached: the first columns carry the gradient of u / rest. 0 where u is not finite.
                lost = (quotient - u).detach().nan_to_num(0.0).to(u.dtype)
                u, w = torch.cat([u, lost], -1), torch.cat([w, w.nan_to_num(0.0, 0.0, 0.0)], -1)
        width, step = q.shape[3] + u.shape[3], max(16 // q.element_size(), 1)
        fill = -width % step
        u = functional.pad(u, (0, fill)).expand(*q.shape[:3], -1)
        w = functional.pad(w, (0, fill)).expand(*k.shape[:3], -1)
        q, k = _times_power(q, exponent // 2), _times_power(k, exponent - exponent // 2)
        return torch.cat([q, u], -1), torch.cat([k, w], -1), rest

    def __repr__(self) -> str:
        return f"LowRankBias({summary(self.u)}, {summary(self.w)})"


def low_rank_bias(u: Tensor, w: Tensor) -> LowRankBias:
    """Return the bias ``u @ w.mT``, computed by additional columns of q and k.

    Args:
        u: (B|1, H|1, M, r), in q's dtype.
        w: (B|1, Hkv|1, N, r), in q's dtype. With grouped heads w belongs to the key heads, as k does.

    q and k are copied. If the scale is no power of two there are 2 r more columns, for the rounding error of u / scale;
    if the second r alone make them exceed 256, which is slower on a GPU, there are r, and u is rounded.

    Raises:
        ValueError, TypeError: naming the argument, what was passed and what is allowed; with a softcap, raised by the
            call.

    Source: FlashBias, arXiv 2505.12044.
    """
    return LowRankBias(u, w)


def _times_power(x: Tensor, exponent: int) -> Tensor:
    return x if exponent == 0 else x * 2.0**exponent
