"""Kernel launches for tensors."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewise.backends import declines_gpu
from tilewise.cache import prepared_once
from tilewise.ops.row_softmax import BiasLike, SoftmaxNeeds
from tilewise.ops.row_softmax.triton import backward as backward_kernels
from tilewise.ops.row_softmax.triton import bias_gradient
from tilewise.ops.row_softmax.triton import forward as forward_kernels
from tilewise.ops.row_softmax.triton.axes import SoftmaxAxes, Strides, broadcast_strides, collapse
from tilewise.ops.row_softmax.triton.config import LOOP_TILE, SoftmaxConfig, power_of_two, softmax_config
from tilewise.ops.row_softmax.triton.rows import SoftmaxConstants

LOG2E = math.log2(math.e)


def _strided(x: Tensor | None, axes: SoftmaxAxes, n: int) -> tuple:
    """Return collapsed tensor ``n`` as a kernel argument, see `rows`."""
    return (x, axes.cols[n], *(axes.strides[n] or [0] * len(axes.sizes)))


@prepared_once
def _prepare(
    shape: tuple[int, ...],
    dim: int,
    tensors: tuple[Strides | None, ...],
    itemsize: int,
    backward: bool,
    processors: int,
    plain: bool,
) -> tuple[SoftmaxAxes, SoftmaxConfig, bool]:
    """Return the axes, the tiles, and if offsets along a row need 64 bits; the first of ``tensors`` is x or P."""
    axes = collapse(shape, dim, tensors)
    config = softmax_config(axes.rows, axes.sizes[-1], shape[dim], axes.across, itemsize, backward, processors, plain)
    wide = any((shape[dim] + config.block) * col >= 2**31 for col in axes.cols)
    return axes, config, wide


def _processors(x: Tensor) -> int:
    """Return the multiprocessors that run programs concurrently: 0 in Triton's interpreter."""
    if not x.is_cuda:
        return 0
    device = torch.cuda.get_device_properties(x.device)
    reason = declines_gpu((device.major, device.minor), device.name)
    if reason is not None:
        raise ValueError(f"x: {reason}")
    return device.multi_processor_count


def _compiled(axes: SoftmaxAxes, config: SoftmaxConfig, wide: bool, **switches: bool) -> SoftmaxConstants:
    values = {"BIAS": False, "MASK": False, **switches}
    pack = config.pack and not values["BIAS"] and not values["MASK"]
    c = SoftmaxConstants(len(axes.sizes), config.rows, config.block, config.parts, WIDE=wide, PACK=pack, **values)
    return SoftmaxConstants(*(tl.constexpr(value) for value in c))


def _programs(axes: SoftmaxAxes, config: SoftmaxConfig) -> tuple[int]:
    return (math.prod(axes.sizes[:-1]) * triton.cdiv(axes.sizes[-1], config.rows) * config.parts,)


def _options(config: SoftmaxConfig, c: SoftmaxConstants) -> dict[str, int | None]:
    # a tile that is not packed needs more registers than the limit for packed tiles
    registers = config.registers if c.PACK.value else None
    # Triton 3.9 fuses multiply and add only if asked
    return {"num_warps": config.num_warps, "maxnreg": registers, "enable_fp_fusion": True}


def _slots(x: Tensor, axes: SoftmaxAxes, config: SoftmaxConfig) -> Tensor | None:
    """Return memory for the statistics of the parts of rows, see `rows.publish`; None if rows have one part."""
    if config.parts == 1:
        return None
    make = torch.zeros if config.on_chip else torch.empty
    return make(axes.rows * config.parts, dtype=torch.int64, device=x.device)


def forward(x: Tensor, scale: float, bias: Tensor | None, mask: Tensor | None, dim: int) -> Tensor:
    p = torch.empty_like(x)
    layouts = tuple(broadcast_strides(t) for t in (x, bias, mask, p))
    with torch.cuda.device_of(x):
        plain = bias is None and mask is None
        axes, config, wide = _prepare(tuple(x.shape), dim, layouts, x.itemsize, False, _processors(x), plain)
        c = _compiled(axes, config, wide, BIAS=bias is not None, MASK=mask is not None)
        reads = _strided(x, axes, 0), _strided(bias, axes, 1), _strided(mask, axes, 2)
        p_rows, slots = _strided(p, axes, 3), _slots(x, axes, config)
        grid, options = _programs(axes, config), _options(config, c)
        # Without a bias, the scale is applied together with the change of base.
        numbers = (scale, LOG2E if bias is not None else scale * LOG2E)
        sizes, length = axes.sizes, x.shape[dim]
        if config.on_chip:
            forward_kernels.tile_kernel[grid](*reads, p_rows, slots, sizes, length, *numbers, c, **options)
            return p
        if config.parts > 1:
            forward_kernels.statistics_kernel[grid](*reads, slots, sizes, length, config.span, *numbers, c, **options)
        forward_kernels.loop_kernel[grid](*reads, p_rows, slots, sizes, length, config.span, *numbers, c, **options)
    return p


def backward(
    dp: Tensor, p: Tensor, scale: float, bias: BiasLike | None, dim: int, needs: SoftmaxNeeds
) -> tuple[Tensor | None, Tensor | None]:
    shape = tuple(p.shape)
    dx = torch.empty_like(p) if needs.x else None
    dbias, summed = None, False
    if bias is not None and needs.bias:
        summed = tuple(bias.shape) != shape
        dbias = None if summed else torch.empty(shape, dtype=bias.dtype, device=p.device)
    layouts = tuple(broadcast_strides(t) for t in (p, dp, dx, dbias))
    with torch.cuda.device_of(p):
        plain = bias is None or not needs.bias
        axes, config, wide = _prepare(shape, dim, layouts, p.itemsize, True, _processors(p), plain)
        c = _compiled(axes, config, wide, DX=dx is not None, DBIAS=dbias is not None, DELTA=summed)
        delta = torch.empty(axes.rows, dtype=torch.float32, device=p.device) if summed else None
        reads = _strided(dp, axes, 1), _strided(p, axes, 0)
        writes = _strided(dx, axes, 2), _strided(dbias, axes, 3), delta
        slots, grid, options = (
            _slots(p, axes, config),
            _programs(axes, config),
            _options(config, c),
        )
        sizes, length = axes.sizes, shape[dim]
        if config.on_chip:
            backward_kernels.tile_kernel[grid](*reads, *writes, slots, sizes, length, scale, c, **options)
        else:
            if config.parts > 1:
                backward_kernels.statistics_kernel[grid](*reads, slots, sizes, length, config.span, c, **options)
            backward_kernels.loop_kernel[grid](*reads, *writes, slots, sizes, length, config.span, scale, c, **options)
        if summed and bias is not None and delta is not None:
            dbias = _summed_bias_gradient(dp, p, delta, bias, dim)
    return dx, dbias


def _summed_bias_gradient(dp: Tensor, p: Tensor, delta: Tensor, bias: BiasLike, dim: int) -> Tensor:
    """Return dbias of a bias that broadcasts; ``delta`` has the rows in the order of p's strides."""
    shape, length = tuple(p.shape), p.shape[dim]
    has_cols = bias.shape[dim] > 1 or length == 1
    target = torch.empty(bias.shape, device="meta")
    strides = (broadcast_strides(p), broadcast_strides(dp), _delta_strides(p, dim), broadcast_strides(target))
    kept = collapse(tuple(n if bias.shape[i] > 1 or i == dim else 1 for i, n in enumerate(shape)), dim, strides)
    rest = collapse(tuple(n if bias.shape[i] == 1 or i == dim else 1 for i, n in enumerate(shape)), dim, strides)
    sizes = kept.sizes + rest.sizes
    inner_kept = (kept.strides[0] or (0,))[-1], (rest.strides[0] or (0,))[-1]
    unit = kept.cols[0] == 1 or length == 1
    kept_rows = (
        kept.sizes[-1] >= 16 if unit else kept.sizes[-1] > 1 and (rest.sizes[-1] == 1 or inner_kept[0] < inner_kept[1])
    )
    block = min(power_of_two(length), LOOP_TILE // 2)
    rows = max(min(power_of_two((kept if kept_rows else rest).sizes[-1]), LOOP_TILE // block, 32), 1)
    places = math.prod(kept.sizes[:-1]) * (triton.cdiv(kept.sizes[-1], rows) if kept_rows else kept.sizes[-1])
    steps = math.prod(rest.sizes[:-1]) * (rest.sizes[-1] if kept_rows else triton.cdiv(rest.sizes[-1], rows))
    tiles = triton.cdiv(length, block)
    splits = max(min(8 * max(_processors(p), 1) // (places * tiles), steps // 4, 1024), 1)
    copies = splits if has_cols else splits * tiles
    partial = torch.empty((copies, *bias.shape), dtype=torch.float32, device=p.device)
    args = [
        (x, col, *(a or ()), *(b or ()))
        for x, a, b, col in zip((p, dp, delta, partial), kept.strides, rest.strides, kept.cols, strict=True)
    ]
    wide = any((length + block) * col >= 2**31 for col in kept.cols)
    c = bias_gradient.BiasGradientConstants(
        *map(tl.constexpr, (len(kept.sizes), len(sizes), rows, kept_rows, block, splits, has_cols, wide))
    )
    bias_gradient.bias_gradient_kernel[(places * splits * tiles,)](
        args[1], args[0], args[2], args[3], sizes, length, steps, places,
        math.prod(bias.shape), c, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip
    return (partial[0] if copies == 1 else partial.sum(0)).to(bias.dtype)


def _delta_strides(p: Tensor, dim: int) -> Strides:
    """Return the strides of the row statistics: rows are numbered by p's strides, the innermost axis fastest."""
    axes = sorted((n for n in range(p.dim()) if n != dim and p.shape[n] > 1), key=lambda n: -p.stride()[n])
    strides, step = [0] * p.dim(), 1
    for n in reversed(axes):
        strides[n] = step
        step *= p.shape[n]
    return tuple(strides)
