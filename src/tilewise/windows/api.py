"""Windows of keys around blocks of queries, as in the atom attention of AlphaFold 3."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

Edges = Literal["clip", "shift"]


class Windows(NamedTuple):
    """Blocks of queries and their windows of keys.

    Block b has ``q_block`` queries from ``q_block * b`` on. Its window has ``k_block`` keys, equally many before and
    after the block, or one more after it. edges: "clip" hides keys outside the sequence; "shift" moves windows inside,
    and hides keys only if the sequence is shorter than a window.
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
        """Number of keys of a window before its block."""
        return (self.k_block - self.q_block) // 2

    @property
    def after(self) -> int:
        """Number of keys of a window after its block."""
        return self.k_block - self.q_block - self.before

    @property
    def last(self) -> int:
        """Last begin of a shifted window."""
        return max(self.length - self.k_block, 0)

    def begin(self, block: int) -> int:
        begin = block * self.q_block - self.before
        return min(max(begin, 0), self.last) if self.edges == "shift" else begin

    @property
    def centred(self) -> tuple[int, int]:
        """Return [first, end) of the unmoved windows; with "shift" earlier ones begin at 0, later ones at ``last``."""
        if self.edges == "clip":
            return 0, self.blocks
        first = -(-self.before // self.q_block)
        end = (self.last + self.before) // self.q_block + 1
        return min(first, self.blocks), max(min(end, self.blocks), min(first, self.blocks))

    def together(self, count: int) -> Windows:
        """Merge ``count`` blocks into one whose window covers theirs; for "clip"."""
        more = (count - 1) * self.q_block
        return self._replace(q_block=self.q_block + more, k_block=self.k_block + more)

    def visible(self, mask: Tensor | None, device: torch.device) -> Tensor | None:
        """Return bool (B|1, blocks, k_block) of ``mask`` (B, length) or None; None if nothing is hidden."""
        if self.edges == "shift":
            if mask is None:
                if self.length >= self.k_block:
                    return None
                mask = torch.ones(1, self.length, dtype=torch.bool, device=device)
            return self._copied(mask[:, None, :, None])[:, 0, ..., 0]
        blocks = max(self.blocks, 1)
        row = torch.zeros(
            1 if mask is None else mask.shape[0], (blocks - 1) * self.q_block + self.k_block,
            dtype=torch.bool, device=device,
        )  # fmt: skip
        inside = row[:, self.before : self.before + self.length]
        inside.fill_(True) if mask is None else inside.copy_(mask)
        return row.unfold(1, self.k_block, self.q_block)[:, : self.blocks]

    def absent(self, device: torch.device) -> Tensor:
        """Return bool (blocks, q_block, 1), True for padding after the last query."""
        rows = torch.arange(self.blocks * self.q_block, device=device).view(self.blocks, self.q_block, 1)
        return rows >= self.length

    def of(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Return windows (B, H, blocks, k_block, D) of keys or values (B, H, length, D).

        The first three dimensions can be flattened. Elements outside the sequence are finite where x is, or belong to
        another (B, H). With "clip" the result is a view of one copy, in which windows overlap; with "shift" windows are
        copied. Gradients of windows are summed in float32 or float64, deterministically.
        """
        found: tuple[Tensor, ...] = _Windows.apply(self, *tensors)
        return found

    def _copied(self, x: Tensor) -> Tensor:
        """Copy the windows of ``x`` (B, H, length, D), padded with zeros if the sequence is shorter."""
        (B, H, N, D), (first, end), k_block = x.shape, self.centred, self.k_block
        x = pad(x, (0, 0, 0, k_block - N)) if k_block > N else x
        found = x.new_empty(B, H, self.blocks, k_block, D)
        found[:, :, :first] = x[:, :, None, :k_block]
        if end > first:
            found[:, :, first:end] = (
                x[:, :, self.begin(first) :].unfold(2, k_block, self.q_block)[:, :, : end - first].transpose(-1, -2)
            )
        found[:, :, end:] = x[:, :, None, self.last : self.last + k_block]
        return found

    def _overlapping(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return overlapping windows of tensors of one shape as views of one new allocation; for "clip".

        Sequences are concatenated, so that windows have a constant stride; a window beyond one sequence reads hidden
        keys of the next. Zeros are before, between and after the tensors.
        """
        B, H, N, D = tensors[0].shape
        rows, margin, count = self.blocks * self.q_block, self.after, len(tensors)
        step = (B * H * rows + margin) * D
        memory = tensors[0].new_empty(count * step + margin * D)
        memory.as_strided((count + 1, margin * D), (step, 1)).zero_()
        found = []
        for n, x in enumerate(tensors):
            begin = n * step + margin * D
            place = memory[begin : begin + B * H * rows * D].view(B, H, rows, D)
            if rows > N:
                place[:, :, N:].zero_()
            place[:, :, :N].copy_(x)
            strides = (H * rows * D, rows * D, self.q_block * D, D, 1)
            found.append(
                memory.as_strided((B, H, self.blocks, self.k_block, D), strides, begin - self.before * D)
            )  # fmt: skip
        return found

    def _summed(self, grads: Sequence[Tensor]) -> list[Tensor]:
        """Return the gradients of `of`: for each key the sum over its windows; ``grads`` have one shape."""
        grad = grads[0]
        B, H, _, k_block, D = grad.shape
        (first, end), q_block, count = self.centred, self.q_block, len(grads)
        centred, pieces = end - first, -(-k_block // q_block)
        # Split windows into pieces of a block: total[t] sums piece p of window t - p. Windows of zeros before the first
        # and after the last make such a window exist for each t and p.
        padded = grad.new_zeros(count, B, H, centred + 2 * (pieces - 1), pieces * q_block, D)
        for n, x in enumerate(grads):
            padded[n, :, :, pieces - 1 : pieces - 1 + centred, :k_block] = x[:, :, first:end]
        line = q_block * D
        shape = (count, B, H, max(centred + pieces - 1, 0), pieces, q_block, D)
        strides = (*padded.stride()[:3], pieces * line, (pieces - 1) * line, D, 1)
        diagonals = padded.as_strided(shape, strides, (pieces - 1) * line)
        wide = torch.float64 if grad.dtype == torch.float64 else torch.float32
        if self.edges == "clip":
            # torch.sum of 16-bit numbers accumulates in float32 and rounds once
            total = diagonals.sum(4).flatten(3, 4)[:, :, :, self.before : self.before + self.length]
            return list(total.unbind(0))
        found = grad.new_zeros(count, B, H, max(self.length, k_block), D, dtype=wide)
        if centred:
            span = (centred - 1) * q_block + k_block
            begin = self.begin(first)
            found[:, :, :, begin : begin + span] = diagonals.sum(4, dtype=wide).flatten(3, 4)[:, :, :, :span]
        for n, x in enumerate(grads):
            found[n, :, :, :k_block] += x[:, :, :first].sum(2, dtype=wide)
            found[n, :, :, self.last : self.last + k_block] += x[:, :, end:].sum(2, dtype=wide)
        return list(found[:, :, :, : self.length].to(grad.dtype).unbind(0))


class _Windows(torch.autograd.Function):
    @staticmethod
    def forward(windows: Windows, *tensors: Tensor) -> tuple[Tensor, ...]:
        if windows.blocks == 0:
            return tuple(x.new_empty(*x.shape[:2], 0, windows.k_block, x.shape[3]) for x in tensors)
        if windows.edges == "shift":
            return tuple(windows._copied(x) for x in tensors)
        return tuple(y for alike in _alike(tensors) for y in windows._overlapping(alike))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.windows = inputs[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        windows: Windows = ctx.windows
        if windows.blocks == 0:
            return None, *(x.new_zeros(*x.shape[:2], 0, x.shape[4]) for x in grads)
        return None, *(y for alike in _alike(grads) for y in windows._summed(alike))


def _alike(tensors: Sequence[Tensor]) -> list[Sequence[Tensor]]:
    """Group keys and values if shape, dtype and device are equal; the call raises if they must not differ."""
    first = tensors[0]
    if all((x.shape, x.dtype, x.device) == (first.shape, first.dtype, first.device) for x in tensors):
        return [tensors]
    return [[x] for x in tensors]


def banded(bias: Tensor, windows: Windows, count: int, mask: Tensor | None) -> Tensor:
    """Return the bias (B|1, H|1, blocks, q_block, k_block) of ``windows`` for ``windows.together(count)``.

    It is -inf for keys outside a query's own window or the sequence, and where ``mask`` hides them. mask: (1, length),
    or (B, length) for a bias of B. Padding queries see nothing.
    """
    found: Tensor = _Banded.apply(bias, windows.visible(mask, bias.device), windows, count)
    return found


class _Banded(torch.autograd.Function):
    @staticmethod
    def forward(bias: Tensor, seen: Tensor, windows: Windows, count: int) -> Tensor:
        (B, H), q_block = bias.shape[:2], windows.q_block
        wide = windows.together(count)
        # Each block begins q_block rows and columns after the one before, also from one matrix to the next: as many
        # numbers are between them.
        line = -(-wide.k_block // 8) * 8
        matrix = wide.q_block * (line + 1)
        memory = bias.new_full((B, H, wide.blocks * matrix), -torch.inf)
        outer = memory.stride()[:2]
        parts = memory.as_strided(bias.shape, (*outer, q_block * (line + 1), line, 1))
        parts.copy_(torch.where(seen[:, None, :, None], bias, -torch.inf))  # compilers reject out= of such strides
        if windows.blocks and windows.length % q_block:  # padding queries
            parts[:, :, -1, windows.length % q_block :].fill_(-torch.inf)
        return memory.as_strided((B, H, wide.blocks, wide.q_block, wide.k_block), (*outer, matrix, line, 1))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.windows, ctx.count = inputs[2:]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        windows, grad = ctx.windows, grad.contiguous()
        columns, q_block = grad.shape[4], windows.q_block
        shape = (*grad.shape[:3], ctx.count, q_block, windows.k_block)
        parts = grad.as_strided(shape, (*grad.stride()[:3], q_block * (columns + 1), columns, 1))
        return parts.flatten(2, 3)[:, :, : windows.blocks], None, None, None
