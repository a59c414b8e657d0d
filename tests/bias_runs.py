"""Calls whose batch elements share a bias in runs, beside the same bias of each batch element."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise import attention


class RunsCase(NamedTuple):
    """q (runs, rows, H, M, D), bias (runs, 1, ...). bias, mask: axes of (rows, H, M, N), a letter or 1 for each."""

    bias: str = "hmn"
    mask: str | None = None  # with "r" first a mask (runs, rows, ...), with "1" (1, rows, ...)
    runs: int = 3
    rows: int = 4
    H: int = 2
    Hkv: int = 2
    M: int = 70
    N: int = 150
    D: int = 32
    dtype: torch.dtype = torch.float16
    bias_dtype: torch.dtype | None = None
    deterministic: bool = False
    planted: bool = False  # NaN in keys and values that no query sees
    keys: bool = False  # and a bias along the keys
    trained: bool = True  # the bias
    options: tuple[tuple[str, Any], ...] = ()

    def sizes(self, axes: str) -> tuple[int, ...]:
        full = {"h": self.H, "k": self.Hkv, "m": self.M, "n": self.N}
        return tuple([full.get(axis, 1) for axis in axes])


def hold_runs(case: RunsCase, backend: str | None, device: str = "cpu") -> None:
    """One call is as near to the reference as the same call with a bias of each batch element, or nearer."""
    c = case
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int, dtype: torch.dtype = c.dtype) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    lead = c.runs, c.rows
    q, do = (randn(*lead, c.H, c.M, c.D) for _ in range(2))
    k, v = (randn(*lead, c.Hkv, c.N, c.D) for _ in range(2))
    bias = randn(c.runs, 1, *c.sizes(c.bias), dtype=c.bias_dtype or c.dtype)
    keys = [randn(*lead, 1, 1, c.N)] if c.keys else []
    dlse, mask = randn(*lead, c.H, c.M, dtype=torch.float32), None
    if c.mask is not None:
        shape = (c.runs if c.mask[0] == "r" else 1, c.rows, *c.sizes(c.mask[1:]))
        mask = (torch.rand(shape, generator=generator) < 0.7).to(device)
    if c.planted:
        assert mask is not None
        mask[..., 5] = False
        k[..., 5, :], v[..., 5, :] = torch.nan, torch.nan

    def results(tensors: list[Tensor], how: str | None, whole: bool) -> list[Tensor]:
        given = [x.clone().requires_grad_(c.trained or n != 3) for n, x in enumerate(tensors)]
        matrix = given[3].expand(-1, c.rows, -1, -1, -1).contiguous() if whole else given[3]
        o, lse = attention(
            *given[:3], bias=(matrix, given[4]) if c.keys else matrix, mask=mask, backend=how,
            deterministic=c.deterministic, return_lse=True, **dict(c.options),
        )  # fmt: skip
        wanted = [x for x in given if x.requires_grad]
        grads = torch.autograd.grad((o, lse), wanted, (do.to(o.dtype), dlse.to(lse.dtype)))
        return [o.detach(), lse.detach(), *grads]

    tensors = [q, k, v, bias, *keys]
    ours, whole = results(tensors, backend, False), results(tensors, None if device == "cuda" else backend, True)
    exact = results([x.double() for x in tensors], "reference", True)
    for n, (x, y, z) in enumerate(zip(ours, whole, exact, strict=True)):
        assert x.shape == z.shape, n
        assert torch.equal(x.isfinite(), z.isfinite()), n
        # a sum of few numbers may be exact in one call and not in the other: a rounding of the largest is allowed
        one, other = (float((t.double() - z).nan_to_num(0.0, 0.0, 0.0).abs().max()) for t in (x, y))
        unit = torch.finfo(x.dtype).eps * float(z.nan_to_num(0.0, 0.0, 0.0).abs().max())
        assert one <= 2 * other + unit, (n, one, other, unit)
