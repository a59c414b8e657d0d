"""Attention of blocks of queries in windows of keys, on GPUs: one launch each for forward and backward.

config         supported calls, and tile sizes
forward        kernel of O and row statistics
backward       kernel of all gradients
launch         preparation of launches from tensors
autograd       operators, and eager calls
"""

from __future__ import annotations

from typing import NamedTuple


class Geometry(NamedTuple):
    """Sizes of blocks of queries and of their windows, which begin ``before`` keys before the block.

    shift: windows that exceed the sequence are moved inside.
    """

    q_block: int
    k_block: int
    shift: bool

    @property
    def before(self) -> int:
        return (self.k_block - self.q_block) // 2


class WindowNeeds(NamedTuple):
    """Gradients that a backward computes."""

    q: bool
    k: bool
    v: bool
    bias: bool
