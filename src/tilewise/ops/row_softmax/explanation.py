"""explain(): kernels, tiles and memory traffic of a softmax, without running it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewise.explanation.shared import Lines, dtype_name
from tilewise.ops.row_softmax import cpu
from tilewise.ops.row_softmax.checks import check_arguments
from tilewise.ops.row_softmax.triton.axes import broadcast_strides, collapse
from tilewise.ops.row_softmax.triton.config import SoftmaxConfig, softmax_config
from tilewise.quantities import count, quantity


@dataclass(frozen=True, repr=False)
class SoftmaxExplanation(Lines):
    """Result of `explain`; ``str()`` and ``repr()`` return it as text.

    Attributes:
        rows, length: number of rows, and elements per row.
        dtype: dtype of x.
        forward, backward: their tiles on a GPU; None on the CPU.
        forward_bytes, backward_bytes: least memory traffic. Forward: x, bias and mask read and P written once.
            Backward: P and dP read, dx and the bias's gradient written once.
    """

    rows: int
    length: int
    dtype: torch.dtype
    forward: SoftmaxConfig | None
    backward: SoftmaxConfig | None
    forward_bytes: int
    backward_bytes: int

    def lines(self) -> Iterator[str]:
        yield f"softmax    {self.rows} rows of {self.length}, {dtype_name(self.dtype)}"
        yield f"forward    {_words(self.forward)}; at least {quantity(self.forward_bytes, 'B')}"
        yield f"backward   {_words(self.backward)}; at least {quantity(self.backward_bytes, 'B')}"


def explain(
    x: Tensor,
    *,
    scale: float = 1.0,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    dim: int = -1,
    multiprocessors: int | None = None,
) -> SoftmaxExplanation:
    """Return the kernels, tiles and memory traffic of a call of `tilewise.softmax`. Nothing is computed.

    Args:
        x, scale, bias, mask, dim: as for `tilewise.softmax`; tensors may be on the meta device.
        multiprocessors: plan for a GPU with this number. Default: the tensors' own device, which may be the CPU.

    Returns:
        SoftmaxExplanation; print it.

    Raises:
        ValueError, TypeError: as for `tilewise.softmax`; fewer than 1 multiprocessors.
    """
    check_arguments(x, scale, bias, mask, dim)
    if multiprocessors is not None and multiprocessors < 1:
        raise ValueError(f"multiprocessors: must be 1 or more, got {multiprocessors}")
    if multiprocessors is None and x.is_cuda:
        multiprocessors = torch.cuda.get_device_properties(x.device).multi_processor_count
    shape, dim = tuple(x.shape), dim % x.dim()
    size, length = x.numel() * x.element_size(), shape[dim]
    rows = math.prod(n for axis, n in enumerate(shape) if axis != dim)
    read = sum(t.numel() * t.element_size() for t in (bias, mask) if t is not None)
    dbias = bias.numel() * bias.element_size() if bias is not None and bias.requires_grad else 0
    forward = backward = None
    if multiprocessors is not None and x.numel():
        like = [t if t is None else t.expand(shape) for t in (bias, mask)]
        axes = collapse(shape, dim, tuple(broadcast_strides(t) for t in (x, *like)))
        forward, backward = (
            softmax_config(rows, axes.sizes[-1], length, axes.across, x.element_size(), which, multiprocessors, plain)
            for which, plain in ((False, bias is None and mask is None), (True, not dbias))
        )
    return SoftmaxExplanation(rows, length, x.dtype, forward, backward, 2 * size + read, 3 * size + dbias)


def _words(config: SoftmaxConfig | None) -> str:
    if config is None:
        return f"PyTorch's kernels; beside them whole rows, about {cpu.AT_ONCE:,} elements at a time"
    warps = count(config.num_warps, "warp")
    programs = "one program" if config.parts == 1 else f"{config.parts} programs"
    if not config.on_chip:
        return f"read twice: {programs} a row, tiles of {config.rows} x {config.block}"
    if config.parts == 1:
        rows = "a row" if config.rows == 1 else f"{config.rows} rows"
        return f"read once: {rows} of up to {config.block} in each program, {warps}"
    words = f"read once: {programs} of {config.block} elements for each row"
    return f"{words}, which wait for each other's statistics, {warps}"
