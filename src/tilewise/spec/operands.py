"""Descriptions of the tensors of a call: sizes, broadcast dimensions, layouts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from tilewise.spec.bias_components import DIFFERENTIABLE


class Sizes(NamedTuple):
    """Of a call: batch, query heads, key/value heads, queries, keys. Of a packed batch the longest sequences'."""

    B: int
    H: int
    Hkv: int
    M: int
    N: int


@dataclass(frozen=True)
class TensorSpec:
    """A bias or mask of shape ``(batch, heads, rows, cols)``; a size of 1 broadcasts, ``heads`` may be H, Hkv or 1."""

    dtype: torch.dtype
    batch: int
    heads: int
    rows: int
    cols: int

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.heads, self.rows, self.cols

    @property
    def axes(self) -> Literal["matrix", "rows", "cols", "one"]:
        """Which axes of queries and keys it is full along: both, the queries, the keys, or neither.

        By its own sizes: one of a call with a single query is "cols", for a vector is what a kernel reads. "rows" and
        "one" are constant along the keys: as a bias they move the LSE and no probability.
        """
        if self.rows == 1:
            return "one" if self.cols == 1 else "cols"
        return "rows" if self.cols == 1 else "matrix"

    @property
    def matrix_itemsize(self) -> int:
        """Bytes an element of the tile that goes with a tile of scores; 0 for a vector or a number, which have none."""
        return self.dtype.itemsize if self.axes == "matrix" else 0


# What the parts of a bias are called; an error's word and a reader's.
PART_WORDS = {
    "cols": "a bias along the keys",
    "rows": "a bias along the queries",
    "query": "a bias by distance with values per query",
    "key": "a bias by distance with values per key",
    "toeplitz": "a bias by distance alone",
}


@dataclass(frozen=True)
class TileOperand:
    """Of `TileTensors`: queries and keys of a tile, and what says which pairs of a partial one are visible."""

    block_m: int
    block_n: int
    kind: Literal["bits", "intervals"]
    documents: bool = False  # end to end, whose offsets are there


@dataclass(frozen=True)
class PartOperands:
    """Of `Parts`. A bias by distance has ``rows`` of values, and in each ``cols`` entries.

    shifts, buckets: of "query" and "key", those that have them. grads: of all, those that ask for a gradient.
    """

    cols: TensorSpec | None = None
    rows: TensorSpec | None = None
    query: TensorSpec | None = None
    key: TensorSpec | None = None
    toeplitz: TensorSpec | None = None
    shifts: tuple[str, ...] = ()
    buckets: tuple[str, ...] = ()
    grads: tuple[str, ...] = ()

    def named(self) -> list[tuple[str, TensorSpec]]:
        """Those that are there."""
        return [(name, x) for name in DIFFERENTIABLE if (x := getattr(self, name)) is not None]


class BroadcastGroup(NamedTuple):
    """Who reads the same elements of a bias or mask: so many batch elements, and in each so many query heads, of so
    many key/value heads."""

    batch: int
    heads: int
    kv_heads: int

    @property
    def single(self) -> bool:
        """Every (batch element, query head) has its own."""
        return self.batch * self.heads == 1
