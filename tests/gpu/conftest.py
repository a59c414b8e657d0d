"""tests/gpu needs a CUDA device; without one the folder is not collected. Safe to run with pytest-xdist."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # helpers.py, when pytest is given this folder alone

torch.set_num_threads(1)  # the CPU's part is small, and processes side by side take each other's cores

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]


@pytest.fixture(scope="session", autouse=True)
def a_context_for_autograd() -> None:
    """PyTorch warns where a product is the first thing that autograd's thread does on the device."""
    x = torch.ones(2, 2, device="cuda", requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.autograd.grad((x @ x).sum(), x)


@pytest.fixture(autouse=True)
def give_memory_back() -> Iterator[None]:
    """Several processes may share the device, and some tests need a good part of it."""
    yield
    torch.cuda.empty_cache()


@pytest.fixture
def hopper_backwards(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The backwards that have run on Hopper: each `HopperBackward`, and the origin of each `ResizedBackward`."""
    from tilewise.backends.gluon.sm90.backward.launch import HopperBackward
    from tilewise.backends.gluon.sm90.backward.resized import ResizedBackward

    log: list[Any] = []

    def watch(kind: type, made: Callable[[Any], Any]) -> None:
        before = kind.__call__

        def watched(self: Any, *arguments: Any) -> Any:
            log.append(made(self))
            return before(self, *arguments)

        monkeypatch.setattr(kind, "__call__", watched)

    watch(HopperBackward, lambda run: run)
    watch(ResizedBackward, lambda run: run.of)
    return log
