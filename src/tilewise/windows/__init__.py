"""Attention in windows of keys around blocks of queries, on GPUs: one launch each way.

config         which calls the kernels take, and their tiles
forward        the kernel of O and the rows' statistics
backward       the kernel of all gradients
launch         from tensors to kernels
autograd       the operators, and how a call meets autograd
"""

from __future__ import annotations

from typing import NamedTuple


class Geometry(NamedTuple):
    """Block b has the queries from ``q_block * b`` on, and its window the ``k_block`` keys from ``before`` keys before
    them on. shift: a window that would reach out of the sequence is moved inside."""

    q_block: int
    k_block: int
    shift: bool

    @property
    def before(self) -> int:
        return (self.k_block - self.q_block) // 2


class WindowNeeds(NamedTuple):
    """Which gradients a backward computes."""

    q: bool
    k: bool
    v: bool
    bias: bool
