"""PyTorch's fused CPU kernel, adapted to this library's conventions.

Five differences are handled here; where `forward` or `backward` returns None, the tiles compute the call instead.

- A fully masked row has LSE = 0: set to -inf here.
- NaN and infinity in a hidden key or value reach the output: None.
- A bias with a strided last dimension is copied, an M x N buffer: None.
- The backward computes probabilities from the LSE alone: None if the LSE `is_coarse`.
- 16-bit gradients are accumulated in 16 bits: the backward is used for float32 and float64 only.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.backends import Gradients, Inputs, Needs, Outputs, empty_output, lse_dtype
from tilewise.backends.cpu.parts import band_hides, exp_difference, finite, hide, is_coarse
from tilewise.spec import reference
from tilewise.spec.problem import Problem

_CHECKED_ROWS = 256  # rows of the bias that are checked at a time


def declines(problem: Problem) -> str | None:
    """Return why the kernel does not support this problem; None if it does."""
    bias, mask, band = problem.bias, problem.mask, problem.score.band
    if problem.score.transformed:
        return "PyTorch's fused kernel has no softcap"
    if problem.score.dropout:
        return "PyTorch's fused kernel has no dropout"
    if any(problem.score.statistics):
        return "PyTorch's fused kernel computes no statistics of the scores"
    if problem.head_dim != problem.value_dim:
        return "PyTorch's fused kernel needs values as wide as keys"
    if band_hides(problem) and (band.lo is not None or band.hi != 0):
        return "PyTorch's fused kernel has one window, causal from the top left"
    if problem.group > 1 and torch.torch_version.TorchVersion(torch.__version__) < "2.13":
        return "this PyTorch's fused kernel may not know groups of heads"
    if problem.tile_mask is not None:
        return "PyTorch's fused kernel takes no tile mask"
    if problem.parts is not None:
        return "PyTorch's fused kernel takes a bias in one tensor"
    if bias is not None and mask is not None:
        return "PyTorch's fused kernel takes a bias or a mask, not both"
    if problem.mask_repeats:
        return "PyTorch's fused kernel takes no mask that repeats along the batch"
    if mask is not None and mask.rows > 1:
        return "PyTorch's fused kernel takes a float mask, which would be a buffer of M x N"
    operand = bias or mask
    if operand is not None and operand.heads not in (1, problem.heads):
        return "PyTorch's fused kernel cannot give one bias to each group of heads"
    if bias is not None and bias.rows > 1 and bias.dtype not in _additive_dtypes(problem):
        return f"PyTorch's fused kernel takes no {bias.dtype} bias with {problem.dtype} inputs"
    return None


def declines_backward(problem: Problem) -> str | None:
    """Return why the kernel's backward does not support this problem; None if it does."""
    if problem.bias_grad:
        return "PyTorch's fused kernel has no bias gradient"
    if problem.dtype in (torch.float16, torch.bfloat16):
        return "PyTorch's fused kernel accumulates 16-bit gradients in 16 bits"
    return declines(problem)


def forward(problem: Problem, inputs: Inputs) -> Outputs | None:
    """Compute a forward that `declines` accepts; return None to use the tiles."""
    operand = _operand(problem, inputs)
    if operand is None:
        return None
    q, k, v = (_dense_rows(x) for x in inputs[:3])
    o, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, operand.causal, attn_mask=operand.additive, scale=problem.score.scale
    )
    if operand.hides and not finite(o):
        return None  # NaN or infinity, possibly from a hidden key or value
    lse = lse.contiguous()
    if operand.additive is not None and (lse == 0).any():
        _mark_fully_masked_rows(problem, lse, operand.additive)
    if inputs.sink is not None:
        lse = _share_with_sink(o, lse, inputs.sink)
    expected = empty_output(inputs.q, problem.value_dim)
    return Outputs(o if o.stride() == expected.stride() else expected.copy_(o), lse)


def backward(problem: Problem, inputs: Inputs, outputs: Outputs, cotangents: Outputs, needs: Needs) -> Gradients | None:
    """Compute a backward that `declines_backward` accepts; return None to use the tiles."""
    operand = _operand(problem, inputs)
    if operand is None or (operand.hides and not (finite(inputs.k) and finite(inputs.v))):
        return None
    assert outputs.lse is not None
    if is_coarse(outputs.lse):
        return None
    q, k, v, do = (_dense_rows(x) for x in (*inputs[:3], cotangents.o))
    lse, fully_masked = outputs.lse, outputs.lse == -torch.inf
    if fully_masked.any():
        # exp(s - inf) = 0 for any s; with lse = -inf, exp(-inf - lse) would be NaN.
        lse = lse.masked_fill(fully_masked, torch.inf)
        if operand.hides:  # 0 · NaN = NaN: exclude a fully masked query's values and the gradient of its output
            q, do = (x.masked_fill(fully_masked.unsqueeze(-1), 0.0) for x in (q, do))
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        do, q, k, v, outputs.o, lse, 0.0, operand.causal, attn_mask=operand.additive, scale=problem.score.scale
    )
    wanted = zip(inputs[:3], grads, needs[:3], strict=True)
    dq, dk, dv = (_laid_out_like(x, grad) if need else None for x, grad, need in wanted)
    return Gradients(dq, dk, dv, None)


class _Operand(NamedTuple):
    """Bias, mask and window in the form that the kernel takes."""

    additive: Tensor | None  # (B|1, H|1, M|1, N|1)
    causal: bool  # aligned top-left
    hides: bool  # some pair may be hidden


def _operand(problem: Problem, inputs: Inputs) -> _Operand | None:
    causal = band_hides(problem)
    if inputs.mask is not None:
        mask = _unexpanded(inputs.mask)
        return _Operand(hide(mask.new_zeros(mask.shape, dtype=lse_dtype(problem.dtype)), mask), causal, True)
    if inputs.bias is None:
        return _Operand(None, causal, causal)
    bias = _unexpanded(inputs.bias)
    if bias.dtype not in _additive_dtypes(problem):
        bias = bias.to(lse_dtype(problem.dtype))  # one row: `declines` rejects a matrix of this dtype
    if bias.shape[2] > 1 and bias.shape[3] > 1 and bias.stride(3) != 1:
        return None
    return _Operand(bias, causal, True)


def _additive_dtypes(problem: Problem) -> tuple[torch.dtype, ...]:
    # With float64 inputs the kernel accepts a float32 mask too, but reads it as float64.
    return (problem.dtype,) if problem.dtype == torch.float64 else (problem.dtype, torch.float32)


def _unexpanded(x: Tensor) -> Tensor:
    """Return ``x`` with size 1 in each dimension along which it was expanded."""
    for dim in range(x.dim()):
        if x.stride(dim) == 0:
            x = x.narrow(dim, 0, 1)
    return x


def _mark_fully_masked_rows(problem: Problem, lse: Tensor, additive: Tensor) -> None:
    """Set LSE = -inf in fully masked rows: the kernel sets LSE = 0 there."""
    additive = additive.expand(problem.batch, problem.heads, problem.queries, problem.keys)
    cols = torch.arange(problem.keys, device=lse.device)
    for rows in (lse == 0).nonzero().split(_CHECKED_ROWS):
        visible = reference.in_band(rows[:, 2, None], cols, problem.score.band)
        visible &= additive[rows.unbind(1)] != -torch.inf
        lse[rows[~visible.any(-1)].unbind(1)] = -torch.inf


def _share_with_sink(o: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """Return the LSE including the sink, and scale o in place by the remaining probability of each row.

    A 16-bit o is rounded once more than in the tiles: a smaller error than that of the kernel's 16-bit probabilities.
    """
    exact = lse.double()  # for a difference of two large numbers
    with_sink = torch.logaddexp(exact, sink.double())
    left = exp_difference(exact, with_sink).unsqueeze(-1).to(lse.dtype)
    if o.dtype == lse.dtype:
        o.mul_(left)
    else:  # a product of two dtypes takes four times as long
        for part, share in zip(o, left, strict=True):
            part.copy_(part.to(share.dtype).mul_(share))
    return with_sink.to(lse.dtype)


def _dense_rows(x: Tensor) -> Tensor:
    """Return ``x`` with contiguous rows that do not overlap, as the kernel assumes without a check."""
    dense = (x.stride(3) == 1 or x.shape[3] == 1) and (x.stride(2) >= x.shape[3] or x.shape[2] == 1)
    return x if dense else x.contiguous()


def _laid_out_like(x: Tensor, grad: Tensor) -> Tensor:
    expected = torch.empty_like(x)
    return grad if grad.stride() == expected.stride() else expected.copy_(grad)
