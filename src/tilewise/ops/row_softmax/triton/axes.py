"""Merging of the axes of several tensors of one shape, with any strides, into few axes for kernels."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

Strides = tuple[int, ...]


class SoftmaxAxes(NamedTuple):
    """Axes other than the softmax's, as few as the strides of several tensors allow, the innermost last."""

    sizes: tuple[int, ...]
    strides: tuple[Strides | None, ...]  # per tensor
    cols: tuple[int, ...]  # stride along a row, per tensor

    @property
    def rows(self) -> int:
        return math.prod(self.sizes)

    @property
    def across(self) -> bool:
        """True if neighbours in a column of the first tensor are closer in memory than neighbours in a row."""
        strides = self.strides[0] or (0,)
        return 0 < strides[-1] < self.cols[0]


def collapse(shape: tuple[int, ...], dim: int, tensors: tuple[Strides | None, ...]) -> SoftmaxAxes:
    """Order the axes by the first tensor's strides, and merge those along which every tensor has one stride."""
    first = tensors[0]
    assert first is not None
    axes = sorted((n for n in range(len(shape)) if n != dim and shape[n] > 1), key=lambda n: -first[n])
    joined: list[tuple[int, list[int | None]]] = []
    for n in axes:
        strides = [None if t is None else t[n] for t in tensors]
        if joined:
            size, outer = joined[-1]
            if all(a is None or b is None or a == b * shape[n] for a, b in zip(outer, strides, strict=True)):
                joined[-1] = (size * shape[n], strides)
                continue
        joined.append((shape[n], strides))
    if not joined:
        joined.append((1, [None if t is None else 0 for t in tensors]))
    sizes = tuple(size for size, _ in joined)
    columns = zip(*(strides for _, strides in joined), strict=True)
    return SoftmaxAxes(
        sizes,
        tuple(None if t is None else tuple(column) for t, column in zip(tensors, columns, strict=True)),
        tuple(0 if t is None or shape[dim] == 1 else t[dim] for t in tensors),
    )


def broadcast_strides(x: Tensor | None) -> Strides | None:
    """Return the strides of ``x``, 0 along axes of size 1."""
    return None if x is None else tuple(0 if n == 1 else s for n, s in zip(x.shape, x.stride(), strict=True))
