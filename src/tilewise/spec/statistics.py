"""Statistics of the scores of each query, which a forward computes beside its output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Statistics(NamedTuple):
    """The statistics that a call computes; `AuxRequest` says what each one is."""

    max_scores: bool = False
    max_scores_unbiased: bool = False
    entropy: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the statistics, in the order of the last dimension of `Outputs.statistics`."""
        return tuple(name for name, wanted in zip(self._fields, self, strict=True) if wanted)

    @property
    def flags(self) -> int:
        """The statistics as one number, for PyTorch's dispatcher."""
        return sum(wanted << n for n, wanted in enumerate(self))

    @classmethod
    def of_flags(cls, flags: int) -> Statistics:
        return cls(*(bool(flags >> n & 1) for n in range(len(cls._fields))))


NO_STATISTICS = Statistics()


def stacked(statistics: Statistics, found: dict[str, Any]) -> Tensor:
    """Return the statistics, tensors by name, of one shape, side by side in the last dimension."""
    return torch.stack([found[name] for name in statistics.names], -1)


def merged_entropy(entropies: Sequence[Any], surpluses: Sequence[Any]) -> Any:
    """Return the entropy of a softmax of which the parts have these entropies.

    A surplus is the LSE of the whole less that of the part, so the part has the share e^-surplus:
    H = Σ e^-x (H_part + x). A part that sees nothing has an infinite surplus and adds 0.
    """
    return sum((-x).exp() * (h + x.clamp(max=200.0)) for h, x in zip(entropies, surpluses, strict=True))


class AuxRequest(NamedTuple):
    """Results of an attention call besides o, for ``return_aux``. FlexAttention's and varlen_attn's are taken, too.

    Attributes:
        lse: the log-sum-exp of each query's scores, as with ``return_lse``; differentiable.
        max_scores: the largest score that each query sees, after scale, softcap and bias, without a sink. -inf if it
            sees no key. Not differentiable.
        max_scores_unbiased: the same without the bias, over the same keys: what QK-clip (Kimi K2, arXiv 2507.20534)
            compares with its threshold. Not differentiable.
        entropy: -Σ p log p of each query's softmax in nats, sink included, before dropout. 0 if it sees no key. Not
            differentiable.

    Examples:
        >>> q, k, v = (torch.randn(2, 8, 100, 64) for _ in range(3))
        >>> request = tilewise.AuxRequest(max_scores=True, entropy=True)
        >>> o, aux = tilewise.attention(q, k, v, return_aux=request)
        >>> aux.max_scores.shape, aux.entropy.shape, aux.lse
        (torch.Size([2, 8, 100]), torch.Size([2, 8, 100]), None)
    """

    lse: bool = False
    max_scores: bool = False
    max_scores_unbiased: bool = False
    entropy: bool = False

    @property
    def statistics(self) -> Statistics:
        return Statistics(*self[1:])


class AuxOutput(NamedTuple):
    """Results that an `AuxRequest` asks for, None for others.

    Each is (B, H, M), or (H, total_q) of a packed batch, in float32 (float64 for float64 inputs).
    """

    lse: Tensor | None = None
    max_scores: Tensor | None = None
    max_scores_unbiased: Tensor | None = None
    entropy: Tensor | None = None


def read_request(request: Any, return_lse: bool = False) -> AuxRequest:
    """Return the `AuxRequest` of ``return_aux``, which may also be PyTorch's; raise for anything else."""
    names = getattr(request, "_fields", None)
    if names is None or not isinstance(request, tuple) or not set(names) <= set(AuxRequest._fields):
        raise TypeError(
            f"return_aux: expected a tilewise.AuxRequest, or PyTorch's with {', '.join(AuxRequest._fields)}, "
            f"got {request!r}"
        )
    for name, wanted in zip(names, request, strict=True):
        if type(wanted) is not bool:
            raise TypeError(f"return_aux: {name} must be a bool, got {wanted!r}")
    if return_lse:
        raise ValueError("return_lse: with return_aux ask for AuxRequest(lse=True)")
    return AuxRequest(**dict(zip(names, request, strict=True)))


def aux_output(request: AuxRequest, lse: Tensor | None, found: Tensor | None, of: type = AuxOutput) -> Any:
    """Return what was requested, of the LSE and `Outputs.statistics`, as a record of the class ``of``."""
    named = {"lse": lse if request.lse else None}
    for n, name in enumerate(request.statistics.names):
        assert found is not None
        named[name] = found[..., n]
    return of(**named)
