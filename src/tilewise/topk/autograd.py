"""Gathered rows of keys and values, with gradients that are added in a fixed order."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from tilewise.backends import has_triton
from tilewise.operator.eager import is_eager, is_eager_backward


def gather_rows(keys: Tensor, chunks: int, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Gather the rows of each tensor (B, H, N, D) that ``keys`` names, (B · chunks, H, cols, D).

    keys: (B|1, H'|1, chunks, cols), N for an arbitrary row. Heads of keys or tensors are shared as in grouped
    attention. Gradients are summed in float32, chunk by chunk, so that they are deterministic.
    """
    if is_compiling():  # Dynamo does not accept a tensor twice, as k and v may be
        return tuple(_GatherRows.apply(keys, chunks, x)[0] for x in tensors)
    found: tuple[Tensor, ...] = _GatherRows.apply(keys, chunks, *tensors)
    return found


class _GatherRows(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(keys: Tensor, chunks: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(_gathered(x, keys) for x in tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        keys, ctx.chunks, *tensors = inputs
        ctx.likes = [_Like(tuple(x.shape), x.dtype, x.transpose(1, 2).is_contiguous()) for x in tensors]
        ctx.save_for_backward(keys)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (keys,) = ctx.saved_tensors
        places: Tensor | None = None
        found: list[Tensor | None] = []
        for grad, like, needed in zip(grads, ctx.likes, ctx.needs_input_grad[2:], strict=True):
            if not needed:
                found.append(None)
            elif grad.is_cuda and like.dtype != torch.float64 and is_eager_backward(grad) and has_triton():
                from tilewise.topk import kernels as topk_kernels

                N = like.shape[2]
                # k and v have equal N, so places are shared.
                places = topk_kernels.places_of(keys, N) if places is None else places
                shape = grad.shape[0] // ctx.chunks, grad.shape[1], N, grad.shape[3]
                alike = like.shape == shape
                total = topk_kernels.sum_rows(
                    grad, places, shape, like.dtype if alike else torch.float32, like.by_heads and alike
                )
                found.append(total.sum_to_size(like.shape).to(like.dtype))
            else:
                found.append(_summed(grad, keys, ctx.chunks, like))
        return None, None, *found


class _Like(NamedTuple):
    """Properties of a tensor (B, H, N, D) for its gradient; by_heads: its memory order is (B, N, H, D)."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    by_heads: bool


def _gathered(x: Tensor, keys: Tensor) -> Tensor:
    if x.is_cuda and is_eager((x, keys)) and has_triton():
        from tilewise.topk.kernels import take_rows

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


def _summed(grad: Tensor, keys: Tensor, chunks: int, like: _Like) -> Tensor:
    """Return the gradient of a tensor from that of its gathered rows."""
    (_, H, cols, D), N = grad.shape, like.shape[2]
    B = grad.shape[0] // chunks
    wide = torch.float64 if like.dtype == torch.float64 else torch.float32
    keys = _spread(keys, H).expand(B, H, chunks, cols)
    first = torch.arange(B * H, device=keys.device).view(B, H, 1, 1) * N
    place = torch.where(keys < N, first + keys, B * H * N).transpose(1, 2)
    total = grad.new_zeros(B * H * N + 1, D, dtype=wide)  # and a row for indices past the last key
    grad = grad.unflatten(0, (B, chunks))
    for c in range(chunks):  # each key occurs once per head and chunk
        total.index_add_(0, place[:, c].flatten(), grad[:, c].flatten(0, 2).to(wide))
    return total[:-1].view(B, H, N, D).sum_to_size(like.shape).to(like.dtype)


def _broadcast(x: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Expand both to equal batch size and heads."""
    B, H = max(x.shape[0], keys.shape[0]), max(x.shape[1], keys.shape[1])
    return _spread(x, H).expand(B, H, -1, -1), _spread(keys, H).expand(B, H, -1, -1)


def _spread(x: Tensor, heads: int) -> Tensor:
    """Repeat each head for its group of the ``heads``."""
    own = x.shape[1]
    return x if own in (1, heads) else x.repeat_interleave(heads // own, 1)
