"""Rows of keys and values, gathered, and their gradients, added up in one order."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewise.backends import has_triton
from tilewise.ops.runtime.eager import is_eager, is_eager_backward


def gather_rows(x: Tensor, keys: Tensor, chunks: int) -> Tensor:
    """(B · chunks, H, cols, D) of x (B, H, N, D): of each chunk the rows that ``keys`` (B|1, H'|1, chunks, cols) names,
    and for N some row. Heads of one kind serve several of the other, as in grouped attention.

    Its gradient is summed in float32, chunk after chunk: equal inputs give equal bits.
    """
    found: Tensor = _GatherRows.apply(x, keys, chunks)
    return found


class _GatherRows(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, keys: Tensor, chunks: int) -> Tensor:
        if x.is_cuda and is_eager((x, keys)) and has_triton():
            from tilewise.backends.kept_keys import take_rows

            return take_rows(_broadcast(x, keys)[0], keys)
        whole, keys = _broadcast(x, keys)
        B, H, N, D = whole.shape
        b, h = (torch.arange(n, device=x.device) for n in (B, H))
        at = keys.clamp(max=N - 1).transpose(1, 2)  # (B, chunks, H, cols)
        by_heads = whole.transpose(1, 2)
        if by_heads.is_contiguous():
            rows, place = by_heads.view(-1, D), (b[:, None, None, None] * N + at) * H + h[:, None]
        else:
            rows, place = whole.reshape(-1, D), (b[:, None, None] * H + h)[..., None] * N + at
        return rows[place.reshape(-1)].view(-1, H, keys.shape[3], D)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: Tensor) -> None:
        x, keys, ctx.chunks = inputs
        ctx.shape, ctx.dtype, ctx.by_heads = x.shape, x.dtype, x.transpose(1, 2).is_contiguous()
        ctx.save_for_backward(keys)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (keys,) = ctx.saved_tensors
        chunks, (_, H, cols, D), N = ctx.chunks, grad.shape, ctx.shape[2]
        B = grad.shape[0] // chunks
        wide = torch.float64 if ctx.dtype == torch.float64 else torch.float32
        if grad.is_cuda and wide == torch.float32 and is_eager_backward(grad) and has_triton():
            from tilewise.backends.kept_keys import sum_rows

            alike = tuple(ctx.shape) == (B, H, N, D)
            total = sum_rows(grad, keys, (B, H, N, D), ctx.dtype if alike else wide, ctx.by_heads and alike)
            return total.sum_to_size(ctx.shape).to(ctx.dtype), None, None
        keys = _spread(keys, H).expand(B, H, chunks, cols)
        first = torch.arange(B * H, device=keys.device).view(B, H, 1, 1) * N
        place = torch.where(keys < N, first + keys, B * H * N).transpose(1, 2)
        total = grad.new_zeros(B * H * N + 1, D, dtype=wide)  # a row more, for what is past the last key
        grad = grad.unflatten(0, (B, chunks))
        for c in range(chunks):  # of each head a key comes once
            total.index_add_(0, place[:, c].flatten(), grad[:, c].flatten(0, 2).to(wide))
        return total[:-1].view(B, H, N, D).sum_to_size(ctx.shape).to(ctx.dtype), None, None


def _broadcast(x: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Of as many batch elements and heads."""
    B, H = max(x.shape[0], keys.shape[0]), max(x.shape[1], keys.shape[1])
    return _spread(x, H).expand(B, H, -1, -1), _spread(keys, H).expand(B, H, -1, -1)


def _spread(x: Tensor, heads: int) -> Tensor:
    """Each head for as many of the ``heads``."""
    own = x.shape[1]
    return x if own in (1, heads) else x.repeat_interleave(heads // own, 1)
