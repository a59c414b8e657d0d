"""Windows of keys around blocks of queries, as the atom attention of AlphaFold 3 has them."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

Edges = Literal["clip", "shift"]


class Windows(NamedTuple):
    """Which keys each block of queries sees.

    Block b has the queries from ``q_block * b`` on, and its window ``k_block`` keys, as many before the block as after
    it, or one more after it. edges: "clip" leaves it so, and what lies outside the sequence is hidden; "shift" moves it
    inside, and only where the sequence is shorter than the window something is hidden.
    """

    length: int
    q_block: int
    k_block: int
    edges: Edges

    @property
    def blocks(self) -> int:
        return -(-self.length // self.q_block)

    @property
    def before(self) -> int:
        """Keys of a window before its block."""
        return (self.k_block - self.q_block) // 2

    @property
    def last(self) -> int:
        """The last place at which a shifted window may begin."""
        return max(self.length - self.k_block, 0)

    def begin(self, block: int) -> int:
        begin = block * self.q_block - self.before
        return min(max(begin, 0), self.last) if self.edges == "shift" else begin

    @property
    def centred(self) -> tuple[int, int]:
        """The first block whose window is not moved, and the one after the last."""
        if self.edges == "clip":
            return 0, self.blocks
        first = -(-self.before // self.q_block)
        end = (self.last + self.before) // self.q_block + 1
        return min(first, self.blocks), max(min(end, self.blocks), min(first, self.blocks))

    def places(self, device: torch.device) -> Tensor:
        """The key at each place of each window, int64 (blocks, k_block); one outside the sequence too."""
        begins = torch.arange(self.blocks, device=device) * self.q_block - self.before
        if self.edges == "shift":
            begins = begins.clamp(0, self.last)
        return begins[:, None] + torch.arange(self.k_block, device=device)

    def visible(self, mask: Tensor | None, device: torch.device) -> Tensor | None:
        """bool (B, blocks, k_block) of ``mask`` (B, length), or (1, ...) without one; None where nothing is hidden."""
        if mask is None and self.edges == "shift" and self.length >= self.k_block:
            return None
        places = self.places(device)
        inside = (places >= 0) & (places < self.length)
        return inside[None] if mask is None else mask[:, places.clamp(0, max(self.length - 1, 0))] & inside

    def of(self, x: Tensor) -> Tensor:
        """Keys or values (B, H, length, D) by windows, (B, H, blocks, k_block, D), of which the first three dimensions
        merge into one. What lies outside the sequence is finite where x is, or belongs to another (B, H).

        "clip": a view of one copy of x, in which windows overlap; "shift": each window is copied. The gradient sums the
        windows' in float32, or float64.
        """
        return _Windows.apply(x, self)


class _Windows(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, windows: Windows) -> Tensor:
        B, H, N, D = x.shape
        blocks, q_block, k_block = windows.blocks, windows.q_block, windows.k_block
        if windows.edges == "shift":
            x = pad(x, (0, 0, 0, k_block - N)) if k_block > N else x
            return x[:, :, windows.places(x.device)].contiguous()
        # Sequences end to end: a window that reaches out of one reads hidden keys of the next, and all lie evenly.
        rows, before = blocks * q_block, windows.before
        memory = x.new_zeros(B * H * rows + k_block - q_block, D)
        memory[before : before + B * H * rows].view(B, H, rows, D)[:, :, :N] = x
        return memory.as_strided((B, H, blocks, k_block, D), (H * rows * D, rows * D, q_block * D, D, 1))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, ctx.windows = inputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        windows: Windows = ctx.windows
        B, H, blocks, k_block, D = grad.shape
        q_block, before = windows.q_block, windows.before
        wide = torch.float64 if grad.dtype == torch.float64 else torch.float32
        # With room for the windows that reach out, and for whole blocks.
        total = grad.new_zeros(B, H, (blocks + -(-k_block // q_block)) * q_block + k_block, D, dtype=wide)
        first, end = windows.centred
        rows = (end - first) * q_block
        for at in range(0, k_block if rows else 0, q_block):  # pieces of all windows, which do not overlap
            width, begin = min(q_block, k_block - at), first * q_block + at
            piece = total[:, :, begin : begin + rows].unflatten(2, (end - first, q_block))
            piece[:, :, :, :width] += grad[:, :, first:end, at : at + width]
        for block in (*range(first), *range(end, blocks)):
            begin = windows.begin(block) + before
            total[:, :, begin : begin + k_block] += grad[:, :, block]
        return total[:, :, before : before + windows.length].to(grad.dtype), None
