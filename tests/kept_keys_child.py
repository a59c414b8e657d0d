"""What of test_gather.py and test_dynamic_mask.py runs in the interpreter's process."""

from __future__ import annotations

import torch
from torch import Tensor


def smallest(order: Tensor, w: int) -> Tensor:
    from tilewise.backends.kept_keys import running_smallest

    return running_smallest(order, w)


def interval_tiles(begins: Tensor, ends: Tensor, queries: int, block: tuple[int, int]) -> Tensor:
    from tilewise.backends.kept_keys import tiles_of_intervals

    return tiles_of_intervals(begins, ends, queries, block)


def summed(grad: Tensor, keys: Tensor, shape: tuple[int, int, int, int], dtype: torch.dtype, by_heads: bool) -> Tensor:
    from tilewise.backends.kept_keys import sum_rows

    return sum_rows(grad, keys, shape, dtype, by_heads)


def taken(x: Tensor, keys: Tensor) -> Tensor:
    from tilewise.backends.kept_keys import take_rows

    return take_rows(x, keys)
