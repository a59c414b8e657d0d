"""What tests of the command line and of the bench share."""

from __future__ import annotations

import pytest
import torch

from tilewise_tools.bench import run, timing
from tilewise_tools.bench.results import Calibration


@pytest.fixture
def no_calibration(monkeypatch):
    """The bench takes it that this machine has these rates, and measures none."""
    monkeypatch.setattr(run, "calibrate", lambda clock, dtypes: Calibration(dict.fromkeys(dtypes, 1e11), 1e10))


@pytest.fixture(scope="session", autouse=True)
def few_repetitions():
    """What is measured here is that it is measured."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "_MOST", 5)
        patch.setattr(timing, "_HOST_CALLS", 20)
        yield


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
