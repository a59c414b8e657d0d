"""Bias terms of the named cases: trainable tensors, the bias for each provider, and its definition.

inkling     a relative position bias per query, (B, H, M, 1025): entry ``1024 - d`` for the key ``d`` positions before
            the query, 0 beyond; the size and layout of `tilewise.bias.relative_logits` for the model's 1,024 entries
t5          a table (32, H), float32: the buckets of T5's encoder (arXiv 1910.10683), up to distance 128
alibi       slopes (H,), float32: -slope · |i - j| (arXiv 2108.12409)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tilewise import bias
from tilewise.bias.canonical import canonical
from tilewise.spec.score import Distances, Far

ENTRIES = 1025
_BUCKETS, _FAR = 32, 128
NAMES = ("inkling", "t5", "alibi")


def trained(name: str, batch: int, heads: int, queries: int, normal: Callable[..., Tensor]) -> Tensor:
    """Return the trainable tensor: standard normal, except for ALiBi's slopes, which are the paper's."""
    if name == "inkling":
        return normal(batch, heads, queries, ENTRIES)
    table = normal(_BUCKETS, heads)
    table = table.to(torch.promote_types(table.dtype, torch.float32))
    if name == "t5":
        return table
    return torch.exp2(-8.0 / heads * torch.arange(1, heads + 1, device="cpu")).to(table)


def term(name: str, x: Tensor) -> Any:
    """Return the bias argument of `tilewise.attention`."""
    if name == "inkling":
        return bias.RelativeBias(x, lo=1 - ENTRIES)
    return bias.t5_bias(x, True, _FAR) if name == "t5" else bias.alibi(x)


def distances(name: str, queries: int, keys: int) -> Distances | None:
    """Return the distances of a per-query bias for a `Problem`; None for a Toeplitz term."""
    return Distances("query", 1 - ENTRIES + keys - queries, ENTRIES) if name == "inkling" else None


def far(name: str, queries: int, keys: int) -> Far | None:
    """Return the constant far range of a Toeplitz term for a `Problem`; None for a per-query bias."""
    if name == "inkling":
        return None
    x = trained(name, 1, 1, queries, partial(torch.zeros, device="cpu"))
    return canonical(term(name, x), 1, 1, 1, queries, keys).far


def bucket(distance: Tensor) -> Tensor:
    """Return T5's bucket of key position minus query position.

    Each sign has half of the buckets; the first half of those hold one distance each.
    """
    half, exact = _BUCKETS // 2, _BUCKETS // 4
    d = distance.abs()
    far = exact + (torch.log(d.clamp(min=1) / exact) / math.log(_FAR / exact) * (half - exact)).long()
    return torch.where(distance > 0, half, 0) + torch.where(d < exact, d, far.clamp(max=half - 1))


def part(name: str, x: Tensor, distance: Tensor) -> Tensor:
    """Return the bias of some queries and all keys, from x as sliced by `own` and distance (rows, keys)."""
    if name == "inkling":
        inside = (distance > -ENTRIES) & (distance <= 0)
        entry = (distance + ENTRIES - 1).clamp(0, ENTRIES - 1).expand(*x.shape[:-1], distance.shape[-1])
        return torch.where(inside, x.gather(-1, entry), 0.0)
    if name == "t5":
        return x[bucket(distance)].permute(2, 0, 1)
    return -x[:, None, None] * distance.abs()


def own(name: str, b: slice, h: slice, r: slice) -> tuple[slice, ...]:
    """Return the slices of the trainable tensor for slices of batch, heads and queries."""
    return {"inkling": (b, h, r), "t5": (slice(None), h), "alibi": (h,)}[name]


def part_gradient(name: str, like: Tensor, ds: Tensor, distance: Tensor) -> Tensor:
    """Backward of `part`: return the gradient of ``like``, in ds's dtype, from ds (B, heads, rows, keys)."""
    if name == "inkling":
        inside = (distance > -ENTRIES) & (distance <= 0)
        entry = (distance + ENTRIES - 1).clamp(0, ENTRIES - 1).expand_as(ds)
        zeros = torch.zeros(like.shape, dtype=ds.dtype, device=ds.device)
        return zeros.scatter_add_(-1, entry, torch.where(inside, ds, 0.0))
    ds = ds.sum(0)
    if name == "t5":
        found = bucket(distance)
        return torch.stack([torch.where(found == n, ds, 0.0).sum((1, 2)) for n in range(_BUCKETS)])
    return -(ds * distance.abs()).sum((1, 2))


def score_mod(name: str, x: Tensor) -> Callable[..., Tensor]:
    """Return a score_mod for FlexAttention with as many queries as keys."""
    if name == "inkling":

        def relative(s, b, h, i, j):
            d = j - i
            entry = (d + ENTRIES - 1).clamp(0, ENTRIES - 1)
            return s + torch.where((d > -ENTRIES) & (d <= 0), x[b, h, i, entry], 0.0)

        return relative
    if name == "t5":
        return lambda s, b, h, i, j: s + x[bucket(j - i), h]
    return lambda s, b, h, i, j: s - x[h] * (i - j).abs()
