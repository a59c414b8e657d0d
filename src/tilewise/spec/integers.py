"""Integers of shapes that a compiler may not know yet (SymInt): maximum, minimum and range check."""

from __future__ import annotations

import torch

LARGEST = 2**60  # of a position, so that sums of a few fit in 64 bits
LARGEST_SIZE = 2**31 - 1  # of an axis; kernels use 32-bit indices


def larger(a: int, b: int) -> int:
    """Return torch.sym_max; Dynamo of torch 2.11 does not trace that one for plain ints."""
    return max(a, b) if isinstance(a, int) and isinstance(b, int) else torch.sym_max(a, b)


def smaller(a: int, b: int) -> int:
    """Return torch.sym_min; see `larger`."""
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else torch.sym_min(a, b)


def check_range(name: str, x: int | torch.SymInt, most: int = LARGEST) -> None:
    """Raise if the absolute value of ``x`` exceeds ``most``."""
    if not isinstance(x, torch.SymInt) and not -most <= x <= most:
        raise ValueError(f"{name}: must be {f'{most} or less' if x > 0 else f'{-most} or more'}, got {x}")
