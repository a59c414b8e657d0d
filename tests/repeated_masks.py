"""Calls with a mask that repeats along the batch, beside the same mask of each batch element."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tilewise import attention


class RepeatedCase(NamedTuple):
    """q (images, windows, H, M, D); bias, mask: their sizes along (windows, H, M, N), a letter or 1 for each."""

    mask: str
    bias: str | None = None
    images: int = 3
    windows: int = 2
    H: int = 2
    Hkv: int = 2
    M: int = 70
    N: int = 150
    D: int = 32
    dtype: torch.dtype = torch.float16
    causal: bool = False
    deterministic: bool = False
    planted: bool = False  # NaN in keys and values that no query sees

    def sizes(self, axes: str) -> tuple[int, ...]:
        full = {"w": self.windows, "h": self.H, "m": self.M, "n": self.N}
        return tuple([full.get(axis, 1) for axis in axes])


def hold_repeated(case: RepeatedCase, backend: str, device: str = "cpu") -> None:
    """One launch gives what the same call with a mask of each batch element gives."""
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, case.dtype)

    lead = case.images, case.windows
    q = randn(*lead, case.H, case.M, case.D)
    k, v = (randn(*lead, case.Hkv, case.N, case.D) for _ in range(2))
    mask = (torch.rand((1, *case.sizes(case.mask)), generator=generator) < 0.7).to(device)
    if case.planted:
        mask[..., 5] = False
        k[..., 5, :], v[..., 5, :] = torch.nan, torch.nan
    inputs = [q, k, v]
    if case.bias is not None:
        inputs.append(randn(case.images if "w" in case.bias else 1, *case.sizes(case.bias)))
    do = randn(*lead, case.H, case.M, case.D)
    whole = mask.expand(case.images, *mask.shape[1:]).contiguous()
    found = []
    for x in (mask, whole):
        given = [y.clone().requires_grad_() for y in inputs]
        o, lse = attention(
            *given[:3], bias=given[3] if case.bias else None, mask=x, causal=case.causal, backend=backend,
            deterministic=case.deterministic, return_lse=True,
        )  # fmt: skip
        grads = torch.autograd.grad((o, lse), given, (do, torch.ones_like(lse)))
        found.append((o.detach(), lse.detach(), *grads))
    for n, (x, y) in enumerate(zip(*found, strict=True)):
        if n < 2 or case.deterministic:
            assert torch.equal(x.nan_to_num(nan=7.0), y.nan_to_num(nan=7.0)), n
        largest = float(y.abs().nan_to_num(posinf=0.0).max())
        # Two sums of up to eight bfloat16 numbers, in any order: seven roundings each, of at most 2⁻⁹.
        torch.testing.assert_close(x, y, rtol=0, atol=2**-5 * largest, equal_nan=True)
