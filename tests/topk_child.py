"""What of test_gather.py and test_dynamic_mask.py runs in the interpreter's process."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.spec.block_mask import TileTensors
from tilewise.spec.score import Band
from tilewise.spec.tiles import limits
from tilewise.topk.gather import Gather


def smallest(order: Tensor, w: int) -> Tensor:
    from tilewise.topk.kernels import running_smallest

    return running_smallest(order, w)


def interval_tiles(begins: Tensor, ends: Tensor, queries: int, block: tuple[int, int]) -> Tensor:
    from tilewise.backends.kernels.interval_tiles import tiles_of_intervals

    return tiles_of_intervals(begins, ends, queries, block)


def intervals(order: Tensor, keep: int, causal: bool, queries: int) -> tuple[Tensor, Tensor]:
    from tilewise.topk.kernels import selected_intervals

    return selected_intervals(order, keep, causal, queries)


def chunks(begins: Tensor, ends: Tensor, band: Band, gather: Gather, batch: int) -> tuple[Tensor, TileTensors | None]:
    from tilewise.topk.kernels import keys_of_chunks

    return keys_of_chunks(begins, ends, limits(band), gather, batch)


def summed(grad: Tensor, keys: Tensor, shape: tuple[int, int, int, int], dtype: torch.dtype, by_heads: bool) -> Tensor:
    from tilewise.topk.kernels import places_of, sum_rows

    return sum_rows(grad, places_of(keys, shape[2]), shape, dtype, by_heads)


def taken(x: Tensor, keys: Tensor) -> Tensor:
    from tilewise.topk.kernels import take_rows

    return take_rows(x, keys)
