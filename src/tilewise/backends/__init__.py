"""How a Problem is computed: what a backend is (`protocol`), and the little that all of them share.

Under torch.compile strides are promised before they are known: o has those of `empty_output`, a gradient those of
``torch.empty_like`` of its input. No backend imports another.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial

import torch
from torch import Tensor

from tilewise.backends.protocol import INPUT_NAMES, Gradients, Inputs, Needs, Outputs
from tilewise.spec.operands import PART_WORDS, PartOperands
from tilewise.spec.problem import Problem
from tilewise.spec.rounding import keeps_low_bits

__all__ = ["INPUT_NAMES", "Gradients", "Inputs", "Needs", "Outputs"]


def storage_and_offset(x: Tensor) -> int:
    """`address` where PyTorch has no const_data_ptr, as 2.11 has not: the address it then tells is the storage's."""
    if x.is_cuda:  # where a launch takes its data_ptr() all the same
        return x.data_ptr()
    storage: int = torch._C._data_address(x)  # type: ignore[attr-defined]
    return storage + int(x.storage_offset()) * x.element_size()


# A tensor's address. Its data_ptr() counts as a write, by which one that is copied on write gets its copy.
address: Callable[[Tensor], int]
address = Tensor.const_data_ptr if hasattr(Tensor, "const_data_ptr") else storage_and_offset  # type: ignore[attr-defined]


def has_triton() -> bool:
    """Whether triton is installed; looked for once, because plans of new shapes ask again and again."""
    return _is_found(importlib.util.find_spec)


@cache
def _is_found(find_spec: Callable[[str], object]) -> bool:
    """By the function that looks, so that a test with another is told what that one finds."""
    return find_spec("triton") is not None


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 for every dtype but float64, whose statistics stay float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def float32_precision(dtype: torch.dtype) -> str:
    """ "tf32" or "ieee": float32 products on a GPU follow torch's own setting; 16-bit ones have no choice."""
    # Set by the older ways too, which in turn raise where it was set by this one.
    return "tf32" if dtype != torch.float32 or torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def no_parts(parts: PartOperands) -> str:
    """Of a backend without kernels for them: why it declines."""
    words = [PART_WORDS[name] for name, _ in parts.named()]
    if set(words) <= {PART_WORDS["cols"], PART_WORDS["rows"]}:
        return f"has no kernel for {' and '.join(words)} beside another bias yet: add them to that one, as one tensor"
    return f"has no kernel for {' and '.join(words)} yet"


def sink_gradient(sink: Tensor, lse: Tensor, minus_delta: Tensor) -> Tensor:
    """dSink = exp(sink − LSE)·(0 − delta) with delta = rowsum(dO∘O) − dLSE: `reference.softmax_derivative` of one more
    score, whose dP is 0, summed over the rows that share it in the dtype of the LSE.

    lse, minus_delta: (B, H, M), float32 or float64. A sink of -inf, as where a row's LSE is, has a probability of 0.
    """
    lowest = torch.finfo(lse.dtype).min
    p = torch.sub(sink, lse.clamp(min=lowest)).exp_()
    return torch.empty_like(sink).copy_((p * minus_delta).sum_to_size(sink.shape))


def empty_output(q: Tensor, value_dim: int, device: str | None = None) -> Tensor:
    """Uninitialised (B, H, M, Dv) in q's memory order: (B, M, H, D) data that came by transpose goes back by one."""
    B, H, M, _ = q.shape
    if q.stride(1) < q.stride(2):
        return q.new_empty((B, M, H, value_dim), device=device).transpose(1, 2)
    return q.new_empty((B, H, M, value_dim), device=device)


def empty_low_bits(o: Tensor, problem: Problem) -> Tensor | None:
    """Uninitialised, for `Outputs.o_low`; None of a call that has none."""
    return torch.empty_like(o, dtype=torch.int16) if keeps_low_bits(problem.dtype, problem.score.dropout) else None


def output_layout(
    q_shape: Sequence[int], q_strides: Sequence[int], value_dim: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:  # fmt: skip
    """Shape and strides of `empty_output`."""
    B, H, M, _ = q_shape
    shape = B, H, M, value_dim
    if q_strides[1] < q_strides[2]:
        return shape, (M * H * value_dim, value_dim, H * value_dim, 1)
    return shape, (H * M * value_dim, M * value_dim, value_dim, 1)


def gradient_strides(shape: Sequence[int], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of ``torch.empty_like`` of a tensor of four axes that lies so."""
    _, H, M, D = shape
    if strides == (H * M * D, M * D, D, 1) or (M > 1 and H > 1 and strides == (M * H * D, D, H * D, 1)):
        return strides  # dense, which it keeps
    return torch.empty_like(torch.empty_strided(shape, strides, device="meta")).stride()


def allocation(x: Tensor, device: torch.device) -> Callable[[], Tensor]:
    """What makes uninitialised tensors of x's shape, strides and dtype on ``device``, quicker than torch.empty."""
    return partial(torch.empty_strided, x.shape, x.stride(), dtype=x.dtype, device=device)


_HERE: AbstractContextManager = nullcontext()
# Where a tensor is on a GPU CUDA has begun: nobody need look whether it has, in two functions more.
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


def is_elsewhere(x: Tensor) -> bool:
    """Whether a tensor is on a GPU that is not the current one, on which Triton launches."""
    index = x.get_device()
    return index >= 0 and index != _current_device()


def device_of(x: Tensor) -> AbstractContextManager:
    """Make the tensor's device the current one, at no cost where it already is."""
    return torch.cuda.device(x.get_device()) if is_elsewhere(x) else _HERE
