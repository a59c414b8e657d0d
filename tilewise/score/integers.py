"""The larger and the smaller of two numbers of a shape, which a compiler may not know yet."""

from __future__ import annotations

import torch


def larger(a: int, b: int) -> int:
    """torch.sym_max, which Dynamo of torch 2.11 does not trace where it comes to a plain int."""
    return max(a, b) if isinstance(a, int) and isinstance(b, int) else torch.sym_max(a, b)


def smaller(a: int, b: int) -> int:
    """torch.sym_min, as `larger`."""
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else torch.sym_min(a, b)
