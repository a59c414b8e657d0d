"""Preparation of kernel launches, once for all tensors of one layout."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewise.backends import allocation, declines_gpu, device_of, float32_precision, gradient_strides, output_layout
from tilewise.backends.kernels.score import INTERPRET
from tilewise.backends.launch.launcher import POINTER, Launch, Strided, constants, strided
from tilewise.windows import Geometry, WindowNeeds
from tilewise.windows.backward import backward_kernel
from tilewise.windows.config import PROGRAMS, rows_merge, tiles_of
from tilewise.windows.forward import WindowConstants, WindowSizes, forward_kernel

MARK = tl.float32 if INTERPRET else tl.bfloat16  # Triton's interpreter computes wrong bfloat16 products
Maybe = Tensor | None
Gradients = tuple[Maybe, Maybe, Maybe, Maybe]  # in the order of `WindowNeeds`


def _of_rows(bias: Tensor | None, strides: tuple[int, ...]) -> Strided:
    """Return a bias (B|1, H|1, blocks, q_block, k_block) with these strides as a `Strided` with merged rows."""
    if bias is None:
        return strided(None)
    B, H, _, q_block, k_block = bias.shape
    batch, head, block, row, place = strides
    rows = block if q_block == 1 else row
    return Strided(None, 0 if B == 1 else batch, 0 if H == 1 else head, rows, 0 if k_block == 1 else place)


def _layout(shape: Sequence[int], strides: Sequence[int]) -> Strided:
    return Strided(None, *(0 if n == 1 else x for n, x in zip(shape, strides, strict=True)))


def _is_wide(x: Tensor | None) -> bool:
    """True if offsets of the rows of one head, or of what a tile reads past them, need 64 bits."""
    if x is None:
        return False
    (*_, row, place), count = x.stride(), x.shape[2]
    if x.dim() == 5:  # see `_of_rows`
        row, count = (x.stride(2), count) if x.shape[3] == 1 else (row, count * x.shape[3])
    return (count + 256) * row + (x.shape[-1] + 256) * place >= 2**31


def _check_device(q: Tensor) -> None:
    if q.is_cuda:
        device = torch.cuda.get_device_properties(q.device)
        reason = declines_gpu((device.major, device.minor), device.name)
        if reason is not None:
            raise ValueError(f"q: {reason}")


def _options(warps: int, registers: int | None) -> dict[str, int]:
    options = {"num_warps": warps, "num_stages": 1}
    return options if registers is None else options | {"maxnreg": registers}


class Windowed:
    """Prepared forwards and backwards for tensors of one layout.

    Args: q, k (B, H, N, D), v (B, H, N, Dv), bias (B|1, H|1, blocks, q_block, k_block) whose rows merge, mask (B|1, N).
    """

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Maybe, mask: Maybe, geometry: Geometry, scale: float
    ) -> None:
        _check_device(q)
        (B, H, N, D), Dv = q.shape, v.shape[3]
        self._scale, self._tiles = scale, tiles_of(geometry, D, Dv, q.dtype)
        self._reads = (strided(q), strided(k), strided(v), _of_rows(bias, () if bias is None else bias.stride()))
        batch, heads = (B, H) if bias is None else bias.shape[:2]
        blocks = triton.cdiv(N, geometry.q_block)
        self._readers, self._matrices = (B // batch) * (H // heads), batch * heads * blocks
        by_mask = (0, 0) if mask is None else (0 if mask.shape[0] == 1 else mask.stride(0), mask.stride(1))
        last = max(N - geometry.k_block, 0)
        self._sizes = WindowSizes(B, H, N, blocks, last, batch, heads, self._readers, 1, *by_mask)
        device = q.device
        shape, strides = output_layout(q.shape, q.stride(), Dv)
        self._o = _layout(shape, strides)
        self._new_o = partial(torch.empty_strided, shape, strides, dtype=q.dtype, device=device)
        self._new_stats = partial(torch.empty, (2, B, H, N), dtype=torch.float32, device=device)
        like = [
            torch.empty_strided(x.shape, gradient_strides(x.shape, x.stride()), dtype=x.dtype, device="meta")
            for x in (q, k, v)
        ]
        self._gradients = [_layout(x.shape, x.stride()) for x in like]
        if bias is not None:
            like.append(torch.empty_like(bias, device="meta"))
            if not rows_merge(like[-1]):
                like[-1] = torch.empty(bias.shape, dtype=bias.dtype, device="meta")
            self._gradients.append(_of_rows(like[-1], like[-1].stride()))
        o = torch.empty_strided(shape, strides, device="meta")
        self._known = WindowConstants(
            geometry.q_block, geometry.k_block, self._tiles.block_q, self._tiles.block_k, geometry.before,
            geometry.shift, D, Dv, self._tiles.block_d, self._tiles.block_dv, bias is not None, mask is not None,
            float32_precision(q.dtype), MARK, any(map(_is_wide, (q, k, v, bias, o, *like))),
        )  # fmt: skip
        self._new_gradients = [allocation(x, device) for x in like]
        self._forwards = {keep: self._forward(keep) for keep in (False, True)}
        self._backwards: dict[tuple, Launch] = {}

    def _forward(self, keep: bool) -> Launch:
        share = min(max(self._readers * self._matrices // PROGRAMS, 1), self._readers)
        shares = triton.cdiv(self._readers, share)
        sizes = self._sizes._replace(share=share, shares=shares)
        c = constants(self._known._replace(STATS=keep, ALONE=share == 1))
        layouts = (*self._reads, POINTER, self._o, POINTER)
        options = _options(self._tiles.forward_warps, self._tiles.forward_registers)
        return Launch(forward_kernel, self._matrices * shares, layouts, (self._scale, sizes, c), **options)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, bias: Maybe, mask: Maybe, keep: bool) -> tuple[Tensor, Maybe]:
        """Return O (B, H, N, Dv), and the row statistics if ``keep`` is set for a backward."""
        o, stats = self._new_o(), self._new_stats() if keep else None
        with device_of(q):
            self._forwards[keep](q, k, v, bias, mask, o, stats)
        return o, stats

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Maybe, mask: Maybe, o: Tensor, stats: Tensor, do: Tensor,
        needs: WindowNeeds,
    ) -> Gradients:  # fmt: skip
        found: list[Maybe] = [new() if need else None for new, need in zip(self._new_gradients, needs, strict=False)]
        dq, dk, dv, dbias = found if len(found) == 4 else (*found, None)
        key = (do.stride(), o.stride(), needs)
        launch = self._backwards.get(key)
        if launch is None:
            launch = self._backwards[key] = self._backward(o, do, needs)
        with device_of(q):
            launch(q, k, v, bias, mask, o, stats, do, dq, dk, dv, dbias)
        return dq, dk, dv, dbias

    def _backward(self, o: Tensor, do: Tensor, needs: WindowNeeds) -> Launch:
        tiles, sizes = self._tiles, self._sizes
        queries, keys = needs.q or needs.bias, needs.k or needs.v
        count = triton.cdiv(sizes.length + tiles.offset, tiles.block_n)
        sizes = sizes._replace(query_programs=self._matrices if queries else 0, tiles=count if keys else 0)
        c = self._known._replace(
            WIDE=self._known.WIDE or _is_wide(o) or _is_wide(do), ALONE=self._readers == 1, QUERIES=queries, KEYS=keys,
            DQ=needs.q, DK=needs.k, DV=needs.v, DBIAS=needs.bias, BLOCK_N=tiles.block_n, OFFSET=tiles.offset,
            BLOCK_M=tiles.block_m,
        )  # fmt: skip
        written = [x if need else strided(None) for x, need in zip(self._gradients, needs, strict=False)]
        written += [strided(None)] * (4 - len(written))
        layouts = (*self._reads, POINTER, strided(o), POINTER, strided(do), *written)
        programs = sizes.query_programs + sizes.batch * sizes.heads * sizes.tiles
        options = _options(tiles.backward_warps, tiles.backward_registers)
        return Launch(backward_kernel, programs, layouts, (self._scale, sizes, constants(c)), **options)
