"""How a Problem is computed. Each backend is a module (or package) with these functions; one whose backward declines
a problem takes another's, see `tilewise.plan.GRADIENTS`:

    declines(problem) -> str | None        why it cannot run the problem; None if it can
    tiles(problem) -> str                  its tiles in words, for explain()
    forward(problem, inputs) -> Outputs
    backward(problem, inputs, outputs, cotangents, needs) -> Gradients

They get validated, non-empty problems; gradients that nobody needs are None. Under torch.compile strides are promised
before they are known: o has those of `empty_output`, a gradient those of ``torch.empty_like`` of its input. No backend
imports another.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Inputs(NamedTuple):
    """q (B, H, M, D), k (B, Hkv, N, D), v (B, Hkv, N, Dv); bias and mask (B|1, H|Hkv|1, M|1, N|1) or None."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    mask: Tensor | None


class Outputs(NamedTuple):
    """o (B, H, M, Dv) in q's dtype and the natural-log LSE (B, H, M) in `lse_dtype`; or their cotangents."""

    o: Tensor
    lse: Tensor | None


class Needs(NamedTuple):
    """Which inputs want a gradient."""

    q: bool
    k: bool
    v: bool
    bias: bool


class Gradients(NamedTuple):
    """Gradients in the shape and dtype of their inputs; None where `Needs` is False."""

    q: Tensor | None
    k: Tensor | None
    v: Tensor | None
    bias: Tensor | None


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 for every dtype but float64, whose statistics stay float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def empty_output(q: Tensor, value_dim: int) -> Tensor:
    """Uninitialised (B, H, M, Dv) in q's memory order: (B, M, H, D) data that came by transpose goes back by one."""
    B, H, M, _ = q.shape
    if q.stride(1) < q.stride(2):
        return q.new_empty(B, M, H, value_dim).transpose(1, 2)
    return q.new_empty(B, H, M, value_dim)
