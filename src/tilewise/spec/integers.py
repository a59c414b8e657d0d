"""Integers that a compiler may not know yet, numbers of a shape: the larger and the smaller of two, and their range."""

from __future__ import annotations

import torch

LARGEST = 2**60  # a position: what sums of a few of them have room for in 64 bits
LARGEST_SIZE = 2**31 - 1  # of an axis, as kernels count it


def larger(a: int, b: int) -> int:
    """torch.sym_max, which Dynamo of torch 2.11 does not trace where it comes to a plain int."""
    return max(a, b) if isinstance(a, int) and isinstance(b, int) else torch.sym_max(a, b)


def smaller(a: int, b: int) -> int:
    """torch.sym_min, as `larger`."""
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else torch.sym_min(a, b)


def check_range(name: str, x: int | torch.SymInt, most: int = LARGEST) -> None:
    """Raise for an integer that is further than ``most`` from 0."""
    if not isinstance(x, torch.SymInt) and not -most <= x <= most:
        raise ValueError(f"{name}: must be {f'{most} or less' if x > 0 else f'{-most} or more'}, got {x}")
