"""300 steps of training on the device follow the loss curve of the CPU, which tests/unit/test_training.py holds to the
reference."""

from __future__ import annotations

import functools

import pytest
import torch
import training
from torch import Tensor

BRAIN, HALF, FLOAT = torch.bfloat16, torch.float16, torch.float32
HOPPER = pytest.param(
    "hopper",
    marks=pytest.mark.skipif(torch.cuda.get_device_capability() != (9, 0), reason="needs compute capability 9.0"),
)


@functools.cache
def on_the_cpu(kind: str) -> Tensor:
    return training.losses(kind, training.through("cpu"))


@functools.cache
def distance_of_torch(kind: str, dtype: torch.dtype) -> float:
    return distance(kind, training.losses(kind, training.unfused(dtype), device="cuda"))


def distance(kind: str, losses: Tensor) -> float:
    """Root mean square over the steps: where rounding leads a curve is chance in one step, not in 300."""
    return (losses - on_the_cpu(kind)).square().mean().sqrt().item()


@pytest.mark.parametrize(("kind", "dtype"), [("shared", BRAIN), ("shared", HALF), ("each", BRAIN)], ids=str)
@pytest.mark.parametrize("backend", ["triton", HOPPER])
def test_training_follows_the_cpu(kind, backend, dtype):
    """At most twice as far off as unfused attention of the same dtype, and what the device's float32 is off by.

    A dBias wrong by 3% is 20 times as far off, a dV wrong by 3% ten times.
    """
    losses = training.losses(kind, training.through(backend, dtype), device="cuda")
    assert losses[-20:].mean() < losses[0] - 1.5
    allowed = 2 * distance_of_torch(kind, dtype) + distance_of_torch(kind, FLOAT)
    assert distance(kind, losses) <= allowed
