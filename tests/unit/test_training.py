"""Training on the CPU follows the float64 reference step by step; tests/gpu/test_training.py follows the CPU."""

from __future__ import annotations

import pytest
import training


@pytest.mark.parametrize("kind", training.MODELS)
def test_the_cpu_follows_the_reference(kind):
    """Both models are float32 outside the attention: their losses differ by little more than their own rounding."""
    ours, exact = (training.losses(kind, training.through(backend), steps=20) for backend in ("cpu", "reference"))
    assert exact[-1] < exact[0] - 0.6
    assert (ours - exact).abs().max() < 5e-6
