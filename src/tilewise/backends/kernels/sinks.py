"""Sink gradient in one Triton kernel for the dense calls of all GPU backends; twin of `backends.sink_gradient`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewise.backends.launch.launcher import POINTER, Launch, sink_layout

LOG2E = tl.constexpr(1.4426950408889634)


class SinkGradient:
    """Launch for dSink = -sum of exp(sink - LSE)·delta over the rows of a sink, in a fixed order.

    LSE and delta are those that the backward's preprocess stores for its main kernel, tile after tile of each head. The
    LSE is base 2 and rounded, and delta makes up for its rounding, see `kernels.score.unrounding`.

    Args:
        sink: (B|1, H|1, M|1), read for its layout only.
        shape: B, H and M of the call.
        tile: queries per tile.
        between: elements between the starts of two tiles.
        first: element of delta at which the first tile starts.
        negated: True if -delta is stored.
    """

    def __init__(
        self, sink: Tensor, shape: Sequence[int], tile: int, between: int, first: int, *, negated: bool
    ) -> None:
        B, H, M = shape
        batch, heads, queries = sink.shape
        self.block = min(triton.next_power_of_2(M), 1024 if queries > 1 else 4096)
        programs = batch * heads * (triton.cdiv(M, self.block) if queries > 1 else 1)
        found = torch.empty_like(sink, device="meta")
        padded = triton.cdiv(M, tile) * between
        self._launch = Launch(
            sink_gradient_kernel,
            programs,
            (sink_layout(sink), POINTER, POINTER, sink_layout(found)),
            (B, H, M, batch, heads, tile, between, first, padded, 1.0 if negated else -1.0, queries > 1, self.block),
            num_warps=max(1, self.block // 512),
        )

    def __call__(self, sink: Tensor, lse2: Tensor, delta: Tensor) -> Tensor:
        found = torch.empty_like(sink)
        self._launch(sink, lse2, delta, found)
        return found


@triton.jit
def sink_gradient_kernel(sink, lse2, delta, dsink, batch, heads, queries, sinks_batch, sinks_heads, tile, between,
                         first, padded, sign, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Sum the rows of one sink per program or, with ROWS, compute the sinks of a block of queries.

    A row that sees nothing has a stored LSE of +inf and adds nothing.
    """
    pid = tl.program_id(0)
    blocks = tl.cdiv(queries, BLOCK)
    own = 0
    if ROWS:
        own, pid = pid % blocks, pid // blocks
    sb, sh = pid // sinks_heads, pid % sinks_heads
    at_sink = tl.cast(sb, tl.int64) * sink.stride0 + tl.cast(sh, tl.int64) * sink.stride1
    at_dsink = tl.cast(sb, tl.int64) * dsink.stride0 + tl.cast(sh, tl.int64) * dsink.stride1
    total = tl.zeros([BLOCK], tl.float32)
    for i in range(0, (batch // sinks_batch) * (heads // sinks_heads)):
        b, h = sb + i // (heads // sinks_heads), sh + i % (heads // sinks_heads)
        row = tl.cast(b, tl.int64) * heads + h
        for block in range(own, own + 1 if ROWS else blocks):
            m = block * BLOCK + tl.arange(0, BLOCK)
            inside = m < queries
            value = tl.load(sink.pointer + at_sink + m.to(tl.int64) * sink.stride2, mask=inside, other=0.0)
            at = row * padded + (m // tile) * between + m % tile
            found = tl.load(lse2 + at, mask=inside, other=float("inf"))
            p = tl.exp2((value.to(tl.float64) * LOG2E - found).to(tl.float32))
            total += sign * p * tl.load(delta + first + at, mask=inside, other=0.0)
    if ROWS:
        m = own * BLOCK + tl.arange(0, BLOCK)
        at = dsink.pointer + at_dsink + m.to(tl.int64) * dsink.stride2
        tl.store(at, total.to(dsink.pointer.dtype.element_ty), mask=m < queries)
    else:
        tl.store(dsink.pointer + at_dsink, tl.sum(total, 0).to(dsink.pointer.dtype.element_ty))
