"""tests/gpu needs a CUDA device; without one the folder is not collected. Safe to run with pytest-xdist."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # helpers.py, when pytest is given this folder alone

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]


@pytest.fixture(autouse=True)
def give_memory_back() -> Iterator[None]:
    """Several processes may share the device, and some tests need a good part of it."""
    yield
    torch.cuda.empty_cache()
