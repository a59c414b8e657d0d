"""The softmax in torch operators, a piece of the tensor at a time: temporary memory does not grow with it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from tilewise.blocks.softmax import BiasLike, Needs, statistics_dtype

AT_ONCE = 1 << 19  # elements of a piece; more where a single row has more
Piece = tuple[slice, ...]


def forward(x: Tensor, scale: float, bias: Tensor | None, mask: Tensor | None, dim: int) -> Tensor:
    p = torch.empty_like(x)
    for piece in _pieces(x.shape, dim):
        p[piece] = _softmax(x[piece], scale, _part(bias, piece), _part(mask, piece), dim)
    return p


def _softmax(x: Tensor, scale: float, bias: Tensor | None, mask: Tensor | None, dim: int) -> Tensor:
    s = x.to(statistics_dtype(x.dtype), copy=True)
    if bias is not None:
        s.mul_(scale).add_(bias)
    if mask is not None:
        s.masked_fill_(~mask, -torch.inf)
    top = s.amax(dim, keepdim=True)
    blind = top == -torch.inf  # a row that sees nothing
    if bias is None and scale != 1:
        s.sub_(top.masked_fill(blind, 0.0)).mul_(scale)  # in this order no finite x overflows
    p = torch.softmax(s, dim)
    return p.masked_fill_(blind, 0.0) if bool(blind.any()) else p


def backward(
    dp: Tensor, p: Tensor, scale: float, bias: BiasLike | None, dim: int, needs: Needs
) -> tuple[Tensor | None, Tensor | None]:
    dx = torch.empty_like(p) if needs.x else None
    dbias = None
    if bias is not None and needs.bias:
        dbias = torch.zeros(bias.shape, dtype=statistics_dtype(p.dtype), device=p.device)
    for piece in _pieces(p.shape, dim):
        ds = _softmax_derivative(dp[piece], p[piece], dim)
        if dbias is not None:
            part = _part(dbias, piece)
            assert part is not None
            part += ds.sum_to_size(part.shape)
        if dx is not None:
            dx[piece] = ds.mul_(scale)
    return dx, None if dbias is None or bias is None else dbias.to(bias.dtype)


def _softmax_derivative(dp: Tensor, p: Tensor, dim: int) -> Tensor:
    """dS = P ∘ (dP - delta), delta = rowsum(dP ∘ P); where P is 0, dP takes no part, NaN or not."""
    wide = statistics_dtype(p.dtype)
    p, dp = p.to(wide), dp.to(wide)
    hidden = p == 0
    delta = (dp * p).masked_fill_(hidden, 0.0).sum(dim, keepdim=True)
    return (dp - delta).mul_(p).masked_fill_(hidden, 0.0)


def _pieces(shape: torch.Size, dim: int) -> Iterator[Piece]:
    """Slices that cut a tensor into whole rows, about `AT_ONCE` elements each, or one row if that is longer."""
    left = max(AT_ONCE // max(shape[dim], 1), 1)  # rows
    sizes = list(shape)
    for axis in reversed(range(len(shape))):
        if axis != dim:
            sizes[axis] = min(left, shape[axis])
            left //= max(sizes[axis], 1)
            left = max(left, 1)
    cuts = [range(0, length, max(size, 1)) for length, size in zip(shape, sizes, strict=True)]
    for starts in itertools.product(*cuts):
        yield tuple(slice(a, a + size) for a, size in zip(starts, sizes, strict=True))


def _part(operand: Tensor | None, piece: Piece) -> Tensor | None:
    """What of a bias or mask belongs to a piece; an axis of size 1 broadcasts."""
    if operand is None:
        return None
    return operand[tuple(slice(None) if n == 1 else s for n, s in zip(operand.shape, piece, strict=True))]
