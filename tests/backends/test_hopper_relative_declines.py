"""Which biases by distance Hopper's kernels do not take, and the words that say so."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tilewise.spec.operands import PART_WORDS, PartOperands, TensorSpec
from tilewise.spec.score import Band, Distances, Score

pytest.importorskip("triton")

from test_hopper_relative import BRAIN, FLOAT, VALUES, inkling

from tilewise.backends.gluon import sm90 as hopper


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, None),
        ({"dtype": torch.float16}, None),
        ({"head_dim": 40, "value_dim": 64}, None),
        ({"score": Score(0.1, None, Band(), query=Distances("query", 9, 5, True))}, None),
        ({"head_dim": 256}, f"reads {VALUES} up to 128 dimensions"),
        ({"parts": PartOperands(key=TensorSpec(BRAIN, 2, 6, 700, 9))}, f"has no kernel for {PART_WORDS['key']}"),
        ({"parts": PartOperands(query=TensorSpec(BRAIN, 2, 6, 700, 1025), shifts=("query",))},
         f"reads {VALUES} at positions that the host knows, one entry for each distance: not from a start that"),
        ({"parts": PartOperands(query=TensorSpec(BRAIN, 2, 6, 700, 9), buckets=("query",))},
         f"reads {VALUES} at positions that the host knows, one entry for each distance: not through buckets"),
        ({"parts": PartOperands(query=TensorSpec(torch.float64, 2, 6, 700, 1025))},
         f"reads {VALUES} in float16, bfloat16 or float32, not float64"),
        ({"score": Score(0.1, None, Band(), query=Distances("query", 0, 9, outside="clamp"))},
         f"reads {VALUES} that is 0 outside its distances, or masked by the window: not 'clamp'"),
        ({"score": Score(0.1, 2.0, Band(), query=Distances("query", 0, 9)),
          "mask": TensorSpec(torch.bool, 1, 1, 700, 700)},
         f"takes {VALUES} alone: not beside a mask and a softcap"),
        ({"queries": 1}, f"reads {VALUES} for two queries and keys or more"),
    ],
)  # fmt: skip
def test_declines(change, reason):
    found = hopper.declines(replace(inkling(700, 700), **change))
    assert found is None if reason is None else found.startswith(reason)


@pytest.mark.parametrize(
    ("values_of", "grad", "reason"),
    [
        (TensorSpec(BRAIN, 2, 6, 700, 1025), True, None),
        (TensorSpec(BRAIN, 1, 2, 700, 1025), False, None),
        (TensorSpec(BRAIN, 1, 6, 700, 1025), True, "where no two batch elements or heads share them"),
        (TensorSpec(BRAIN, 2, 2, 700, 1025), True, "where no two batch elements or heads share them"),
        (TensorSpec(FLOAT, 2, 6, 700, 1025), True, "in q's dtype torch.bfloat16, not torch.float32"),
        (TensorSpec(FLOAT, 2, 6, 700, 1025), False, "in q's dtype torch.bfloat16, not torch.float32"),
    ],
)
def test_declines_backward(values_of, grad, reason):
    p = replace(inkling(700, 700), parts=PartOperands(query=values_of, grads=("query",) if grad else ()))
    assert hopper.declines(p) is None
    found = hopper.declines(p, "backward")
    words = f"differentiates {VALUES} {reason}"
    assert found == (None if reason is None else words)
