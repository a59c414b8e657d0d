"""Buckets of T5 and DeBERTa-v2, and ALiBi's slopes. Distances are integer tensors."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tilewise.spec.integers import LARGEST_SIZE
from tilewise.spec.tensors import plain_int


def t5_buckets(distance: Tensor, *, buckets: int, bidirectional: bool, max_distance: int = 128) -> Tensor:
    """Return T5's bucket, int64 from 0 to buckets - 1, of each distance (key minus query position).

    Half of the buckets hold one distance each; the others grow logarithmically up to ``max_distance``, and larger
    distances are in the last one. bidirectional: half of all buckets are for keys after the query; else such keys are
    in bucket 0.

    Source: T5, arXiv 1910.10683, section 2.1. Agrees for all distances with the float32 logarithm in
    T5Attention._relative_position_bucket of transformers.
    """
    buckets = _within("buckets", buckets, 4 if bidirectional else 2)
    max_distance = _within("max_distance", max_distance, buckets // (4 if bidirectional else 2) + 1)
    found = torch.zeros_like(distance, dtype=torch.int64)
    if bidirectional:
        buckets //= 2
        found = torch.where(distance > 0, buckets, 0)
        distance = distance.abs()
    else:
        distance = (-distance).clamp(min=0)
    exact = buckets // 2
    # The logarithm is not used below `exact`; the clamp keeps it finite.
    large = torch.log(distance.clamp(min=1).float() / exact) / math.log(max_distance / exact) * (buckets - exact)
    large = (exact + large.to(torch.int64)).clamp(max=buckets - 1)
    return found + torch.where(distance < exact, distance, large)


def log_buckets(distance: Tensor, *, buckets: int, max_distance: int) -> Tensor:
    """Return DeBERTa-v2's bucket of each distance, int64: linear to ±buckets // 2, then logarithmic; odd.

    It is ±(buckets - 1) at ±(max_distance - 1) and grows beyond. DeBERTa's table has ``2 * buckets`` rows, and a pair
    reads row ``(log_buckets(d, ...) + buckets).clamp(0, 2 * buckets - 1)``, d the query position minus the key
    position. As a `RelativeBias`, c2p or p2c, that is

        d = torch.arange(-max_distance, max_distance)
        entries = log_buckets(d, buckets=buckets, max_distance=max_distance) + buckets
        entries = entries.clamp(0, 2 * buckets - 1)
        RelativeBias(values, lo=-max_distance, reverse=True, outside="clamp", buckets=entries)

    Source: make_log_bucket_position of DeBERTa-v2 in transformers, with which it agrees.
    """
    middle = _within("buckets", buckets, 4) // 2
    max_distance = _within("max_distance", max_distance, middle + 2)
    size = torch.where(distance.abs() < middle, middle - 1, distance.abs())
    # float32 tensors as in transformers: Python floats would round to other buckets.
    most = torch.tensor((max_distance - 1) / middle, device=distance.device)
    large = torch.ceil(torch.log(size / middle) / torch.log(most) * (middle - 1)) + middle
    return torch.where(size <= middle, distance, (large * distance.sign()).to(torch.int64)).to(torch.int64)


def alibi_slopes(heads: int) -> Tensor:
    """Return ALiBi's slopes of each head, (heads,), float32.

    ``2 ** (-8 * h / heads)`` for h = 1 .. heads if heads is a power of two; else the slopes of the power below and
    every other slope of the power above. Source: arXiv 2108.12409, section 3; build_alibi_tensor of Bloom in
    transformers.
    """
    heads = _within("heads", heads, 1)
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * h / power) for h in range(1, power + 1)]
    slopes += [2 ** (-4 * h / power) for h in range(1, 2 * (heads - power) + 1, 2)]
    return torch.tensor(slopes, dtype=torch.float32)


def _within(name: str, x: int, least: int) -> int:
    x = plain_int(x)
    if isinstance(x, bool) or not isinstance(x, (int, torch.SymInt)):
        raise TypeError(f"{name}: expected an int, got {type(x).__name__}")
    if not least <= x <= LARGEST_SIZE:
        raise ValueError(f"{name}: must be between {least} and {LARGEST_SIZE}, got {x}")
    return x
