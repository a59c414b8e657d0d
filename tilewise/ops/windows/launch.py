"""From tensors to kernel launches, prepared once for all tensors of one layout."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import triton
from torch import Tensor

from tilewise.backends import allocation, device_of, float32_precision, gradient_strides, output_layout
from tilewise.backends.launcher import POINTER, Launch, Strided, constants, strided
from tilewise.ops.windows import Geometry, Needs
from tilewise.ops.windows.backward import backward_kernel
from tilewise.ops.windows.config import PROGRAMS, rows_merge, tiles_of
from tilewise.ops.windows.forward import Compiled, Sizes, forward_kernel

Maybe = Tensor | None
Gradients = tuple[Maybe, Maybe, Maybe, Maybe]  # as `Needs` names them


def _of_rows(bias: Tensor | None, strides: tuple[int, ...]) -> Strided:
    """A bias (B|1, H|1, blocks, q_block, k_block), or what lies in its shape with other strides, without its blocks."""
    if bias is None:
        return strided(None)
    B, H, _, q_block, k_block = bias.shape
    batch, head, block, row, place = strides
    rows = block if q_block == 1 else row
    return Strided(None, 0 if B == 1 else batch, 0 if H == 1 else head, rows, 0 if k_block == 1 else place)


class Windowed:
    """Forwards and backwards of calls whose tensors lie as these do.

    Args: q, k (B, H, N, D), v (B, H, N, Dv), bias (B|1, H|1, blocks, q_block, k_block) whose rows merge, mask (B|1, N).
    """

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Maybe, mask: Maybe, geometry: Geometry, scale: float
    ) -> None:
        B, H, N, D = q.shape
        Dv = v.shape[3]
        blocks = triton.cdiv(N, geometry.q_block)
        self._tiles = tiles = tiles_of(geometry, D, Dv)
        self._scale, self._layouts = scale, (strided(q), strided(k), strided(v))
        self._bias = _of_rows(bias, () if bias is None else bias.stride())
        shape, strides = output_layout(q, Dv)
        self._o_layout = Strided(None, *(0 if n == 1 else s for n, s in zip(shape, strides, strict=True)))
        self._new_o = partial(torch.empty_strided, shape, strides, dtype=q.dtype, device=q.device)
        self._new_stats = partial(torch.empty, (2, B, H, N), dtype=torch.float32, device=q.device)
        batch, heads = (B, H) if bias is None else bias.shape[:2]
        self._readers = (B // batch) * (H // heads)
        self._matrices = batch * heads * blocks
        last = max(N - geometry.k_block, 0)
        by_mask = (0, 0) if mask is None else (0 if mask.shape[0] == 1 else mask.stride(0), mask.stride(1))
        self._sizes = Sizes(B, H, N, blocks, last, batch, heads, self._readers, 1, *by_mask)
        self._known = Compiled(
            geometry.q_block, geometry.k_block, tiles.block_q, tiles.block_k, geometry.before, geometry.shift, D, Dv,
            tiles.block_d, tiles.block_dv, bias is not None, mask is not None, float32_precision(q.dtype),
        )  # fmt: skip
        strides_of = [gradient_strides(x) for x in (q, k, v)]
        self._gradients = [
            partial(torch.empty_strided, x.shape, s, dtype=x.dtype, device=q.device)
            for x, s in zip((q, k, v), strides_of, strict=True)
        ]
        self._gradient_layouts = [
            Strided(None, *(0 if n == 1 else y for n, y in zip(x.shape, s, strict=True)))
            for x, s in zip((q, k, v), strides_of, strict=True)
        ]
        self._bias_like: Tensor | None = None if bias is None else torch.empty_like(bias, device="meta")
        if self._bias_like is not None and not rows_merge(self._bias_like):
            self._bias_like = torch.empty(bias.shape, dtype=bias.dtype, device="meta")  # type: ignore[union-attr]
        if self._bias_like is not None:
            self._gradients.append(allocation(self._bias_like, q.device))
            self._gradient_layouts.append(_of_rows(self._bias_like, self._bias_like.stride()))
        self._forwards = {stats: self._forward(stats) for stats in (False, True)}
        self._backwards: dict[tuple, Callable[..., Gradients]] = {}

    def _forward(self, stats: bool) -> Launch:
        share = max(self._readers * self._matrices // PROGRAMS, 1)
        share = min(share, self._readers)
        shares = triton.cdiv(self._readers, share)
        sizes = self._sizes._replace(share=share, shares=shares)
        c = constants(self._known._replace(STATS=stats))
        layouts = (*self._layouts, self._bias, POINTER, self._o_layout, POINTER)
        return Launch(
            forward_kernel, self._matrices * shares, layouts, (self._scale, sizes, c),
            num_warps=self._tiles.forward_warps, num_stages=1,
        )  # fmt: skip

    def forward(self, q: Tensor, k: Tensor, v: Tensor, bias: Maybe, mask: Maybe, keep: bool) -> tuple[Tensor, Maybe]:
        """O (B, H, N, Dv), and the rows' statistics where a backward is to follow."""
        o, stats = self._new_o(), self._new_stats() if keep else None
        with device_of(q):
            self._forwards[keep](q, k, v, bias, mask, o, stats)
        return o, stats

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Maybe, mask: Maybe, o: Tensor, stats: Tensor, do: Tensor,
        needs: Needs,
    ) -> Gradients:  # fmt: skip
        found = [new() if need else None for new, need in zip(self._gradients, needs, strict=False)]
        dq, dk, dv, dbias = found if len(found) == 4 else (*found, None)
        key = (do.stride(), o.stride(), needs)
        launch = self._backwards.get(key)
        if launch is None:
            launch = self._backwards[key] = self._backward(o, do, needs)
        with device_of(q):
            launch(q, k, v, bias, mask, o, stats, do, dq, dk, dv, dbias)
        return dq, dk, dv, dbias

    def _backward(self, o: Tensor, do: Tensor, needs: Needs) -> Launch:
        tiles, sizes = self._tiles, self._sizes
        queries, keys = needs.q or needs.bias, needs.k or needs.v
        count = triton.cdiv(sizes.length + tiles.offset, tiles.block_n)
        sizes = sizes._replace(query_programs=self._matrices if queries else 0, tiles=count if keys else 0)
        c = constants(
            self._known._replace(
                QUERIES=queries, KEYS=keys, DQ=needs.q, DK=needs.k, DV=needs.v, DBIAS=needs.bias,
                BLOCK_N=tiles.block_n, OFFSET=tiles.offset, BLOCK_M=tiles.block_m,
            )
        )  # fmt: skip
        wanted = zip(self._gradient_layouts, needs, strict=False)
        written = [layout if need else strided(None) for layout, need in wanted]
        written += [strided(None)] * (4 - len(written))
        layouts = (
            *self._layouts, self._bias, POINTER, strided(o), POINTER, strided(do), *written,
        )  # fmt: skip
        programs = sizes.query_programs + sizes.batch * sizes.heads * sizes.tiles
        return Launch(
            backward_kernel, programs, layouts, (self._scale, sizes, c), num_warps=tiles.backward_warps, num_stages=1
        )
