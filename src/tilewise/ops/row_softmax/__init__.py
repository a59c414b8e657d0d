"""The softmax of a scaled, biased and masked tensor, and its gradients.

    S = scale · x + bias, -inf where the mask hides      P = exp(S - max) / sum(exp(S - max))
    dS = P ∘ (dP - rowsum(dP ∘ P))                        dx = scale · dS      dbias = dS summed over what it broadcasts

api          the public function
checks       its errors
autograd     the operators, and how a call meets autograd
cpu          torch operators
triton       kernels for GPUs
explanation  what a call would do, in words

`cpu` and `triton.launch` have the same two functions, ``forward(x, scale, bias, mask, dim)`` and ``backward(dp, p,
scale, bias, dim, needs)``, for checked arguments, ``dim`` counted from the front, and tensors that are not empty.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class BiasLike(NamedTuple):
    """All that a backward needs to know of a bias."""

    shape: tuple[int, ...]  # of as many axes as x has
    dtype: torch.dtype


class SoftmaxNeeds(NamedTuple):
    """Which inputs want a gradient."""

    x: bool
    bias: bool


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 for every dtype but float64, whose statistics stay float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32
