"""Softmax in torch operators: PyTorch's kernels if they give the right result, else blocks of rows.

PyTorch's kernels read a tensor once and have float32 statistics, but give NaN for fully masked rows, and let NaN in dP
through if P is 0. Both leave a NaN or an infinity in the result, which triggers a second pass. Steps that require
temporary memory (scale, bias, mask) run on one block at a time, so that this memory does not grow with the tensor and a
block stays in the cache.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from tilewise.ops.row_softmax import BiasLike, SoftmaxNeeds, statistics_dtype

AT_ONCE = 1 << 19  # elements of a block; more if a single row has more
# float32 numbers per row element that PyTorch's 16-bit backward allocates for rows that are not contiguous.
_BESIDE = 64
Piece = tuple[slice, ...]


# --- forward ---


def forward(x: Tensor, scale: float, bias: Tensor | None, mask: Tensor | None, dim: int) -> Tensor:
    plain = scale == 1 and bias is None and mask is None
    if plain and x.is_contiguous() and _rounds_once(x, dim):
        p = torch._softmax(x, dim, False)
        if not _has_nan(p, dim):
            # P has x's strides, and axes of size 1 may have any stride.
            return p if p.stride() == x.stride() else p.as_strided(x.shape, x.stride())
    p = torch.empty_like(x)
    into = p
    if not p.is_contiguous():
        order = _order(p)
        into, x = p.permute(order), x.permute(order)
        bias, mask = (None if y is None else y.permute(order) for y in (bias, mask))
        dim = order.index(dim)
        if plain and x.is_contiguous() and _rounds_once(x, dim):
            _run_softmax(x, into, dim)
            if not _has_nan(into, dim):
                return p
    for piece in _pieces(into.shape, dim):
        _softmax(_of(into, piece), _of(x, piece), scale, _part(bias, piece), _part(mask, piece), dim)
    return p


def _softmax(p: Tensor, x: Tensor, scale: float, bias: Tensor | None, mask: Tensor | None, dim: int) -> None:
    wide = statistics_dtype(x.dtype)
    s, top = x, None
    if bias is not None:
        # A sum of two equal 16-bit dtypes would have 16 bits, too.
        s = x if torch.promote_types(x.dtype, bias.dtype) == wide else x.to(wide)
        s = torch.add(bias, s, alpha=scale).to(wide)
    if mask is not None:
        s = torch.where(mask, s, -torch.inf)
    if bias is None and scale != 1:
        s = s.to(wide)
        top = s.amax(dim, keepdim=True)
        s = (s - top).mul_(scale)  # in this order no finite x overflows
    if not _rounds_once(s, dim):
        s = s.to(wide)
    fits = s.dtype == p.dtype and p.is_contiguous()
    into = p if fits else torch.empty(p.shape, dtype=s.dtype, device=p.device)
    _run_softmax(s, into, dim)
    if not fits:
        p.copy_(into)
    if _has_nan(p, dim):
        top = s.amax(dim, keepdim=True) if top is None else top
        p.masked_fill_(top == -torch.inf, 0.0)  # a fully masked row


def _rounds_once(s: Tensor, dim: int) -> bool:
    """True if PyTorch's kernel rounds once. Along any axis but the last it keeps some 16-bit exponentials in 16
    bits."""
    return dim == s.dim() - 1 or s.dtype == statistics_dtype(s.dtype)


def _has_nan(p: Tensor, dim: int) -> bool:
    """True if some row is NaN, as rows with NaN, +inf or no visible element are; one element per row tells."""
    return math.isnan(p.select(dim, 0).sum().item())


# --- backward ---


def backward(
    dp: Tensor, p: Tensor, scale: float, bias: BiasLike | None, dim: int, needs: SoftmaxNeeds
) -> tuple[Tensor | None, Tensor | None]:
    if bias is None or not needs.bias:
        return (_dx(dp, p, scale, dim) if needs.x else None), None
    dx = torch.empty_like(p) if needs.x else None
    if bias.shape == p.shape:  # nothing is summed
        dbias = torch.empty(bias.shape, dtype=bias.dtype, device=p.device)
    else:
        dbias = torch.zeros(bias.shape, dtype=statistics_dtype(p.dtype), device=p.device)
    _backward(dx, dbias, dp, p, scale, dim)
    return dx, dbias.to(bias.dtype)


def _dx(dp: Tensor, p: Tensor, scale: float, dim: int) -> Tensor:
    if _fits_kernel(dp, p, scale, dim):
        dx = torch._softmax_backward_data(dp, p, dim, p.dtype)
        if _is_finite(dx):
            dx = dx if scale == 1 else dx.mul_(scale)
            return dx if dx.stride() == p.stride() else dx.as_strided(p.shape, p.stride())
    dx = torch.empty_like(p)
    _backward(dx, None, dp, p, scale, dim)
    return dx


def _fits_kernel(dp: Tensor, p: Tensor, scale: float, dim: int) -> bool:
    """True if one call of PyTorch's kernel computes dx, without a copy."""
    return p.is_contiguous() and dp.is_contiguous() and dp.dtype == p.dtype and _is_exact(p, scale, dim)


def _backward(dx: Tensor | None, dbias: Tensor | None, dp: Tensor, p: Tensor, scale: float, dim: int) -> None:
    """Write dx, and dbias if it has P's shape; otherwise add to dbias."""
    like = p if dx is None else dx
    if not like.is_contiguous():
        order = _order(like)
        dim = order.index(dim)
        dp, p = dp.permute(order), p.permute(order)
        dx, dbias = (None if y is None else y.permute(order) for y in (dx, dbias))
        if dbias is None and dx is not None and _fits_kernel(dp, p, scale, dim):
            _run_derivative(dp, p, dx, dim)
            if _is_finite(dx):
                if scale != 1:
                    dx.mul_(scale)
                return
    dtype = p.dtype if dbias is None and _is_exact(p, scale, dim) else statistics_dtype(p.dtype)
    summed = dbias is not None and dbias.shape != p.shape
    for piece in _pieces(p.shape, dim):
        into = None if dx is None else _of(dx, piece)
        part = _part(dbias, piece)
        ds = _softmax_derivative(_of(dp, piece), _of(p, piece), dim, dtype, into)
        if part is not None and summed:
            part += ds.sum_to_size(part.shape)
        elif part is not None:
            part.copy_(ds)
        if into is not None and scale != 1:
            torch.mul(ds, scale, out=into)
        elif into is not None and into is not ds:
            into.copy_(ds)


def _is_exact(p: Tensor, scale: float, dim: int) -> bool:
    """True if dS may have p's dtype: 32 bits or more, or 16 bits that nothing rounds again."""
    return p.itemsize > 2 or (scale == 1 and (dim == p.dim() - 1 or _BESIDE * p.shape[dim] <= AT_ONCE))


def _softmax_derivative(dp: Tensor, p: Tensor, dim: int, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    """Return dS = P ∘ (dP - delta), delta = rowsum(dP ∘ P); if P is 0, dS is 0, even for NaN in dP. The result is in
    ``out`` if dtype and strides allow it."""
    p, dp = p.to(dtype).contiguous(), dp.to(dtype).contiguous()
    ds = out if out is not None and out.dtype == dtype and out.is_contiguous() else torch.empty_like(p)
    _run_derivative(dp, p, ds, dim)
    if not _is_finite(ds):
        hidden = p == 0
        _run_derivative(dp.masked_fill(hidden, 0.0), p, ds, dim)
        ds.masked_fill_(hidden, 0.0)
    return ds


def _is_finite(ds: Tensor) -> bool:
    """True if the sum is finite, and so all elements are; then dS is 0 where P is 0."""
    return math.isfinite(ds.sum().item())


# --- PyTorch's kernels, which write to their output as if it were contiguous ---


def _run_softmax(s: Tensor, p: Tensor, dim: int) -> None:
    if _is_innermost(p, dim):
        s, p, dim = s.movedim(dim, -1), p.movedim(dim, -1), p.dim() - 1
    torch._softmax(s, dim, False, out=p)


def _run_derivative(dp: Tensor, p: Tensor, ds: Tensor, dim: int) -> None:
    if _is_innermost(p, dim):
        dp, p, ds, dim = dp.movedim(dim, -1), p.movedim(dim, -1), ds.movedim(dim, -1), p.dim() - 1
    torch._softmax_backward_data(dp, p, dim, p.dtype, grad_input=ds)


def _is_innermost(p: Tensor, dim: int) -> bool:
    """True if only axes of size 1 follow ``dim``. Moved to the end, p stays contiguous and the kernel is faster."""
    return dim != p.dim() - 1 and p.stride(dim) == 1


# --- blocks of rows ---


def _order(x: Tensor) -> list[int]:
    """Return the axes of a dense tensor by decreasing stride; permuted to this order, it is contiguous."""
    return sorted(range(x.dim()), key=x.stride, reverse=True)


def _pieces(shape: torch.Size, dim: int) -> Iterator[Piece]:
    """Yield slices that cut a tensor into whole rows, about `AT_ONCE` elements each, or one longer row. Yield () for a
    tensor that fits, because slicing costs small tensors more than their softmax."""
    if math.prod(shape) <= AT_ONCE:
        yield ()
        return
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


def _of(x: Tensor, piece: Piece) -> Tensor:
    return x[piece] if piece else x


def _part(operand: Tensor | None, piece: Piece) -> Tensor | None:
    """Return the slice of a bias or mask for a block; axes of size 1 broadcast."""
    if operand is None or not piece:
        return operand
    return operand[tuple(slice(None) if n == 1 else s for n, s in zip(operand.shape, piece, strict=True))]
