"""Descriptions of the tensors of a call: sizes, broadcast dimensions, layouts."""

from __future__ import annotations

from dataclasses import dataclass, make_dataclass
from enum import StrEnum
from typing import Any, Literal, NamedTuple

import torch

from tilewise.spec.bias_components import ROWS


class BiasKind(StrEnum):
    """Axes along which a bias varies; kernels get the value."""

    NONE = "none"  # no bias
    MATRIX = "matrix"  # queries and keys
    ROWS = "rows"  # queries
    COLS = "cols"  # keys
    ONE = "one"  # neither: one number for each head


class Sizes(NamedTuple):
    """Batch, query heads, key/value heads, queries, keys of a call; of the longest sequences if packed."""

    B: int
    H: int
    Hkv: int
    M: int
    N: int


@dataclass(frozen=True)
class TensorSpec:
    """A bias or mask (batch, heads, rows, cols); a size of 1 broadcasts, ``heads`` may be H, Hkv or 1."""

    dtype: torch.dtype
    batch: int
    heads: int
    rows: int
    cols: int

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.heads, self.rows, self.cols

    @property
    def axes(self) -> BiasKind:
        """Return the axes along which the tensor varies: both, the queries, the keys, or neither.

        They follow from the tensor's own sizes: with a single query a bias (.., 1, N) is COLS, since a kernel reads a
        vector. ROWS and ONE are constant along the keys: such a bias changes the LSE but no probability.
        """
        if self.rows == 1:
            return BiasKind.ONE if self.cols == 1 else BiasKind.COLS
        return BiasKind.ROWS if self.cols == 1 else BiasKind.MATRIX

    @property
    def matrix_itemsize(self) -> int:
        """Return the bytes per element of the tile loaded with a tile of scores; 0 unless it is a matrix."""
        return self.dtype.itemsize if self.axes == BiasKind.MATRIX else 0


# Names of the bias components in errors and explanations.
PART_WORDS = {name: row.words for name, row in ROWS.items()}


@dataclass(frozen=True)
class TileOperand:
    """A tile mask: queries and keys of a tile, and the format of partial tiles."""

    block_m: int
    block_n: int
    kind: Literal["bits", "intervals"]
    documents: bool = False  # intervals of packed documents, with their offsets


_Specs: Any = make_dataclass("_Specs", [(name, TensorSpec | None, None) for name in ROWS], frozen=True)


@dataclass(frozen=True)
class PartOperands(_Specs):
    """A `TensorSpec` or None for each of the differentiable `Parts`. Values by distance have ``rows`` rows of ``cols``.

    shifts, buckets: which of "query" and "key" have them.
    grads: which components require a gradient.
    """

    shifts: tuple[str, ...] = ()
    buckets: tuple[str, ...] = ()
    grads: tuple[str, ...] = ()

    def named(self) -> list[tuple[str, TensorSpec]]:
        """Return the components that are present, with their names."""
        return [(name, x) for name in ROWS if (x := getattr(self, name)) is not None]


class BroadcastGroup(NamedTuple):
    """Batch elements, query heads and key/value heads that share elements of a bias or mask."""

    batch: int
    heads: int
    kv_heads: int

    @property
    def single(self) -> bool:
        """True if every (batch element, query head) has its own elements."""
        return self.batch * self.heads == 1
