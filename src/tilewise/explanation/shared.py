"""Helpers of the explanations of attention, matmul and softmax."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from typing import Any, TypeVar

import torch

P = TypeVar("P")


class Lines:
    """Base class whose ``str()`` joins its lines."""

    def lines(self) -> Iterator[str]:
        raise NotImplementedError

    def __str__(self) -> str:
        return "\n".join(self.lines())


def on_device(problem: P, device: str) -> P:
    """Return ``problem``, a dataclass with ``device`` and ``capability``, for another device. device: "cpu", or a CUDA
    compute capability such as "sm_90"."""
    values: dict[str, Any] = {"device": "cpu", "capability": None}
    if device != "cpu":
        values = {"device": "cuda", "capability": compute_capability(device)}
        if values["capability"] is None:
            raise ValueError(f"device: must be 'cpu' or a compute capability such as 'sm_90', got {device!r}")
    return dataclasses.replace(problem, **values)  # type: ignore[type-var]


def compute_capability(device: str) -> tuple[int, int] | None:
    """Return (9, 0) for "sm_90", (12, 1) for "sm_121", None for other texts."""
    found = re.fullmatch(r"sm_([0-9]{1,2})([0-9])", device) if isinstance(device, str) else None
    return None if found is None else (int(found[1]), int(found[2]))


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
