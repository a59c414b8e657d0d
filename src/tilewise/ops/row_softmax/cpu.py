"""The softmax in torch operators: PyTorch's kernels where they give the right result, pieces where they do not.

PyTorch's kernels read a tensor once and hold float32 statistics, but they know no rows that see nothing and take NaN in
dP along where P is 0. Both leave a trace, a NaN or an infinity in what they return, and only then is a second look
taken. What needs temporary memory, scale, bias and mask above all, runs a piece of the tensor at a time: that memory
does not grow with the tensor, and a piece's stays in the cache.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from tilewise.ops.row_softmax import BiasLike, SoftmaxNeeds, statistics_dtype

AT_ONCE = 1 << 19  # elements of a piece; more where a single row has more
# By this many float32 numbers for each element of a row PyTorch's 16-bit backward widens rows that are not contiguous.
_BESIDE = 64
Piece = tuple[slice, ...]


# --- forward ---


def forward(x: Tensor, scale: float, bias: Tensor | None, mask: Tensor | None, dim: int) -> Tensor:
    plain = scale == 1 and bias is None and mask is None
    if plain and x.is_contiguous() and _rounds_once(x, dim):
        p = torch._softmax(x, dim, False)
        if not _has_nan(p, dim):
            # Axes of size 1 may have any stride, and P has x's.
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
        # Where two 16-bit dtypes are one, their sum would be of it as well.
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
        p.masked_fill_(top == -torch.inf, 0.0)  # a row that sees nothing


def _rounds_once(s: Tensor, dim: int) -> bool:
    """Along any axis but the last, PyTorch's kernel keeps some of the exponentials of a 16-bit tensor in 16 bits."""
    return dim == s.dim() - 1 or s.dtype == statistics_dtype(s.dtype)


def _has_nan(p: Tensor, dim: int) -> bool:
    """A NaN, an infinity or nothing that is visible makes all of a row NaN: one element tells."""
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
    """One call makes dx, without a copy of anything."""
    return p.is_contiguous() and dp.is_contiguous() and dp.dtype == p.dtype and _is_exact(p, scale, dim)


def _backward(dx: Tensor | None, dbias: Tensor | None, dp: Tensor, p: Tensor, scale: float, dim: int) -> None:
    """Writes dx, and writes dbias if it is as large as P; adds to it if not."""
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
    """Whether dS may have p's dtype: if that has 32 bits or more, or nothing rounds again what is of 16."""
    return p.itemsize > 2 or (scale == 1 and (dim == p.dim() - 1 or _BESIDE * p.shape[dim] <= AT_ONCE))


def _softmax_derivative(dp: Tensor, p: Tensor, dim: int, dtype: torch.dtype, out: Tensor | None) -> Tensor:
    """dS = P ∘ (dP - delta), delta = rowsum(dP ∘ P); where P is 0, dP takes no part, NaN or not.

    In out if that serves, else in memory of its own.
    """
    p, dp = p.to(dtype).contiguous(), dp.to(dtype).contiguous()
    ds = out if out is not None and out.dtype == dtype and out.is_contiguous() else torch.empty_like(p)
    _run_derivative(dp, p, ds, dim)
    if not _is_finite(ds):
        hidden = p == 0
        _run_derivative(dp.masked_fill(hidden, 0.0), p, ds, dim)
        ds.masked_fill_(hidden, 0.0)
    return ds


def _is_finite(ds: Tensor) -> bool:
    """Whether all of it is, for certain if the answer is yes; then what stands where P is 0 is 0 as well."""
    return math.isfinite(ds.sum().item())


# --- PyTorch's kernels, which write as if what they write into were contiguous ---


def _run_softmax(s: Tensor, p: Tensor, dim: int) -> None:
    if _is_innermost(p, dim):
        s, p, dim = s.movedim(dim, -1), p.movedim(dim, -1), p.dim() - 1
    torch._softmax(s, dim, False, out=p)


def _run_derivative(dp: Tensor, p: Tensor, ds: Tensor, dim: int) -> None:
    if _is_innermost(p, dim):
        dp, p, ds, dim = dp.movedim(dim, -1), p.movedim(dim, -1), ds.movedim(dim, -1), p.dim() - 1
    torch._softmax_backward_data(dp, p, dim, p.dtype, grad_input=ds)


def _is_innermost(p: Tensor, dim: int) -> bool:
    """Only axes of size 1 follow: moved to the end it is still contiguous, and the kernel is a faster one."""
    return dim != p.dim() - 1 and p.stride(dim) == 1


# --- pieces ---


def _order(x: Tensor) -> list[int]:
    """The axes of a dense tensor from the outermost in memory to the innermost: permuted so, it is contiguous."""
    return sorted(range(x.dim()), key=x.stride, reverse=True)


def _pieces(shape: torch.Size, dim: int) -> Iterator[Piece]:
    """Slices that cut a tensor into whole rows, about `AT_ONCE` elements each, or one row if that is longer.

    None of them if that is all of it, as slicing costs small tensors more than their softmax.
    """
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
    """What of a bias or mask belongs to a piece; an axis of size 1 broadcasts."""
    if operand is None or not piece:
        return operand
    return operand[tuple(slice(None) if n == 1 else s for n, s in zip(operand.shape, piece, strict=True))]
