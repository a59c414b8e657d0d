"""Softmax of a scaled, biased and masked tensor, and its gradients.

    S = scale · x + bias, -inf where masked           P = exp(S - max) / sum(exp(S - max))
    dS = P ∘ (dP - rowsum(dP ∘ P))                    dx = scale · dS      dbias = dS summed over broadcast axes

api          the public function
checks       its errors
autograd     the operators and their autograd
cpu          torch operators
triton       kernels for GPUs
explanation  description of a call

`cpu` and `triton.launch` have two functions each, ``forward(x, scale, bias, mask, dim)`` and ``backward(dp, p, scale,
bias, dim, needs)``, for checked arguments, ``dim`` counted from the front, and tensors that are not empty.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class BiasLike(NamedTuple):
    """Shape and dtype of a bias, for a backward."""

    shape: tuple[int, ...]  # with all axes of x
    dtype: torch.dtype


class SoftmaxNeeds(NamedTuple):
    """Inputs with required gradients."""

    x: bool
    bias: bool


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32
