"""Backends, which compute a Problem: their interface (`protocol`) and shared helpers.

The fake kernels of torch.compile promise strides: o has those of `empty_output`, a gradient those of
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
from tilewise.spec.statistics import Statistics

__all__ = ["INPUT_NAMES", "Gradients", "Inputs", "Needs", "Outputs"]


def storage_and_offset(x: Tensor) -> int:
    """Return a tensor's address without const_data_ptr, which PyTorch 2.11 lacks."""
    if x.is_cuda:  # a launch calls data_ptr() in any case
        return x.data_ptr()
    storage: int = torch._C._data_address(x)  # type: ignore[attr-defined]
    return storage + int(x.storage_offset()) * x.element_size()


# A tensor's address. data_ptr() counts as a write and would materialize a copy-on-write tensor.
address: Callable[[Tensor], int]
address = Tensor.const_data_ptr if hasattr(Tensor, "const_data_ptr") else storage_and_offset  # type: ignore[attr-defined]


def has_triton() -> bool:
    """True if triton is installed. The answer is cached, because each plan of a new shape asks."""
    return _is_found(importlib.util.find_spec)


@cache
def _is_found(find_spec: Callable[[str], object]) -> bool:
    """True if ``find_spec`` finds triton; cached by that function, so that a test can replace it."""
    return find_spec("triton") is not None


def declines_gpu(capability: tuple[int, int] | None, name: str = "this GPU") -> str | None:
    """Return why no kernel runs on a GPU of this compute capability; None if one may, or if there is no GPU.

    PyTorch for ROCm gives AMD's GPUs capabilities, too, which mean something else.
    """
    if capability is None:
        return None
    if torch.version.hip is not None:
        return "needs an NVIDIA GPU, this PyTorch is built for ROCm"
    if capability < (8, 0):
        return f"needs compute capability 8.0 or later, {name} has {'.'.join(map(str, capability))}"
    return None


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the LSE and of all sums: float64 for float64 inputs, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def saved_lse_dtype(dtype: torch.dtype, call: Problem | Inputs) -> torch.dtype:
    """Return the dtype of the LSE that the kernels of a GPU hand to their backward; callers get `lse_dtype`.

    A bias or a sink can make the LSE large: at 10,000 float32 numbers are 1e-3 apart, and exp(s - LSE) has that error.
    """
    return torch.float64 if call.bias is not None or call.sink is not None else lse_dtype(dtype)


def float32_precision(dtype: torch.dtype) -> str:
    """Return torch's setting for float32 matrix products, "tf32" or "ieee"; "tf32" for 16 bits."""
    # The older settings write fp32_precision too; reading them raises where fp32_precision was set.
    return "tf32" if dtype != torch.float32 or torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def no_parts(parts: PartOperands) -> str:
    """Return why a backend without kernels for these bias components does not support the problem."""
    words = [PART_WORDS[name] for name, _ in parts.named()]
    if set(words) <= {PART_WORDS["cols"], PART_WORDS["rows"]}:
        return f"has no kernel for {' and '.join(words)} beside another bias yet: add them to that one, as one tensor"
    return f"has no kernel for {' and '.join(words)} yet"


def sink_gradient(sink: Tensor, lse: Tensor, minus_delta: Tensor) -> Tensor:
    """Return dSink = exp(sink − LSE)·(0 − delta) with delta = rowsum(dO∘O) − dLSE.

    This is `reference.softmax_derivative` of one more score with dP = 0, summed in the LSE's dtype over the rows that
    share a sink. lse, minus_delta: (B, H, M), float32 or float64. A sink of -inf has a probability of 0, also in a
    row whose LSE is -inf.
    """
    lowest = torch.finfo(lse.dtype).min
    p = torch.sub(sink, lse.clamp(min=lowest)).exp_()
    return torch.empty_like(sink).copy_((p * minus_delta).sum_to_size(sink.shape))


def empty_output(q: Tensor, value_dim: int, device: str | None = None) -> Tensor:
    """Return an uninitialised o (B, H, M, Dv) in q's memory order, (B, H, M) or (B, M, H)."""
    B, H, M, _ = q.shape
    if q.stride(1) < q.stride(2):
        return q.new_empty((B, M, H, value_dim), device=device).transpose(1, 2)
    return q.new_empty((B, H, M, value_dim), device=device)


def heads_first(x: Tensor) -> Tensor:
    """Return the view (1, H, total, D) of rows (total, H, D)."""
    return x.transpose(0, 1).unsqueeze(0)


def rows_first(x: Tensor) -> Tensor:
    """Return the view (total, H, D) of (1, H, total, D)."""
    return x.squeeze(0).transpose(0, 1)  # an index would copy the cotangent


def empty_low_bits(o: Tensor, problem: Problem) -> Tensor | None:
    """Return an uninitialised `Outputs.o_low`; None if the call has none."""
    return torch.empty_like(o, dtype=torch.int16) if keeps_low_bits(problem.dtype, problem.score.dropout) else None


def empty_statistics(o: Tensor, problem: Problem) -> Tensor | None:
    """Return an uninitialised `Outputs.statistics` for o (B, H, M, Dv); None if the call computes none."""
    count = len(problem.score.statistics.names)
    return o.new_empty((*o.shape[:3], count), dtype=lse_dtype(o.dtype)) if count else None


def clear_statistics(x: Tensor, statistics: Statistics) -> Tensor:
    """Set statistics to those of queries that see nothing: maxima -inf, entropy 0."""
    for n, name in enumerate(statistics.names):
        x[..., n].fill_(0.0 if name == "entropy" else -torch.inf)
    return x


def blank_statistics(o: Tensor, problem: Problem) -> Tensor | None:
    """Return `Outputs.statistics` of queries that see nothing; None if the call computes none."""
    found = empty_statistics(o, problem)
    return None if found is None else clear_statistics(found, problem.score.statistics)


def empty_mended(outputs: Outputs, do: Tensor) -> Tensor | None:
    """Return an uninitialised buffer for the dO that makes up for a rounded LSE; None unless the LSE is float64."""
    if outputs.lse is None or outputs.lse.dtype != torch.float64:
        return None
    return torch.empty(do.shape, dtype=do.dtype, device="meta")


def output_layout(
    q_shape: Sequence[int], q_strides: Sequence[int], value_dim: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:  # fmt: skip
    """Return the shape and strides of `empty_output`."""
    B, H, M, _ = q_shape
    shape = B, H, M, value_dim
    if q_strides[1] < q_strides[2]:
        return shape, (M * H * value_dim, value_dim, H * value_dim, 1)
    return shape, (H * M * value_dim, M * value_dim, value_dim, 1)


def gradient_strides(shape: Sequence[int], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of ``torch.empty_like`` of a tensor with four axes and these strides."""
    _, H, M, D = shape
    if strides == (H * M * D, M * D, D, 1) or (M > 1 and H > 1 and strides == (M * H * D, D, H * D, 1)):
        return strides  # empty_like keeps dense strides
    return torch.empty_like(torch.empty_strided(shape, strides, device="meta")).stride()


def allocation(x: Tensor, device: torch.device) -> Callable[[], Tensor]:
    """Return a function that allocates tensors of x's shape, strides and dtype, faster than torch.empty."""
    return partial(torch.empty_strided, x.shape, x.stride(), dtype=x.dtype, device=device)


_HERE: AbstractContextManager = nullcontext()
# A tensor on a GPU implies that CUDA is initialised; _cuda_getDevice skips that check, two function calls.
_current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


def is_elsewhere(x: Tensor) -> bool:
    """True if a tensor is on another GPU than the current one, on which Triton launches."""
    index = x.get_device()
    return index >= 0 and index != _current_device()


def device_of(x: Tensor) -> AbstractContextManager:
    """Return a context in which the tensor's device is the current one; a shared no-op if it already is."""
    return torch.cuda.device(x.get_device()) if is_elsewhere(x) else _HERE
