"""A bias that TMA cannot read and many share: what the Hopper kernels get in its place, and what becomes of dBias."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from test_hopper import PROBLEM

from tilewise.backends import Inputs, Needs, Outputs
from tilewise.backends.gluon.sm90 import prepare, tiles
from tilewise.backends.gluon.sm90.backward import dbias
from tilewise.backends.gluon.sm90.backward import launch as backward_launch
from tilewise.backends.gluon.sm90.common import copied_bias
from tilewise.backends.gluon.sm90.common.config import is_batched
from tilewise.backends.gluon.sm90.forward import launch
from tilewise.spec.operands import TensorSpec
from tilewise.spec.tma import tensor_fits_tma

# As a linear layer makes a pair bias, and rows of an odd number of elements.
HEADS_LAST = torch.randn(1, 40, 64, 8).permute(0, 3, 1, 2)
ODD = torch.randn(1, 8, 40, 67)


@pytest.mark.parametrize("bias", [HEADS_LAST, ODD, ODD.bfloat16()], ids=["heads last", "odd", "odd, 16 bits"])
def test_a_copy_is_what_tma_reads(bias):
    found = copied_bias.copied(bias)
    assert torch.equal(found, bias)
    assert not tensor_fits_tma(bias, True)
    assert tensor_fits_tma(found, True)


@pytest.mark.parametrize("shape", [(1, 8), (1, 2), (1, 1), (4, 8), (4, 1)], ids=str)
@pytest.mark.parametrize("batch", [1, 4])
def test_who_shares_it(shape, batch):
    """Query heads of all batch elements that have one matrix, of which there are four or more."""
    if shape[0] > batch:
        return
    problem = replace(PROBLEM, batch=batch, bias=TensorSpec(torch.bfloat16, *shape, 239, 433), keys=433)
    broadcast_size = batch * 8 // (shape[0] * shape[1])
    assert copied_bias.is_shared(problem) == (broadcast_size >= 4) == copied_bias.pads_gradient(problem)
    assert not copied_bias.is_copied(problem)
    assert copied_bias.is_copied(replace(problem, irregular=("bias",))) == (broadcast_size >= 4)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"batch": 8},
        {"batch": 12},
        {"batch": 40},
        {"batch": 256, "heads": 4, "kv_heads": 4, "queries": 520, "keys": 517, "head_dim": 32, "value_dim": 32},
    ],
    ids=["accumulated", "eight", "two sums", "a pipeline", "elements"],
)
def test_rows_of_its_gradient_are_longer_until_it_is_done(changes):
    problem = replace(PROBLEM, **{"batch": 4, "keys": 433, "bias_grad": True, **changes})
    bias = TensorSpec(torch.bfloat16, 1, problem.heads, problem.queries, problem.keys)
    problem = replace(problem, bias=bias)
    leaf = torch.empty(1, bias.heads, bias.rows, bias.cols, dtype=torch.bfloat16)
    allocate = dbias.bias_gradient_allocation(problem, leaf)
    assert allocate is not None
    found = allocate(device="cpu")
    assert tensor_fits_tma(found, True)
    assert found.shape[1:] == leaf.shape[1:]
    found.copy_(torch.arange(433 * 2)[: bias.cols])
    done = dbias.bias_gradient(problem, leaf, found, None, None)
    assert done.is_contiguous()
    assert done.shape == leaf.shape
    assert done.dtype == torch.bfloat16
    assert is_batched(problem) == (problem.head_dim == 32)


def test_the_plan_says_so():
    problem = replace(PROBLEM, batch=4, bias=TensorSpec(torch.bfloat16, 1, 8, 239, 433), keys=433)
    assert "the bias is copied" not in tiles(problem)
    assert "the bias is copied, to rows that begin at multiples of 16 bytes, 1.68 MB" in tiles(
        replace(problem, irregular=("bias",))
    )


@pytest.mark.parametrize("irregular", [(), ("bias",)], ids=["as it lies", "copied"])
def test_each_call_reads_a_copy_of_its_own_bias(monkeypatch, irregular):
    """The forward and the backward, when they are prepared and whenever they run."""
    given = []

    class Spy:
        def __init__(self, problem, inputs, *_):
            given.append(inputs.bias)

        def __call__(self, inputs, *_):
            given.append(inputs.bias)

    monkeypatch.setattr(launch, "HopperForward", Spy)
    monkeypatch.setattr(backward_launch, "HopperBackward", Spy)
    problem = replace(PROBLEM, batch=4, bias=TensorSpec(torch.float32, 1, 8, 40, 67), irregular=irregular)
    x = torch.empty(1)
    first, later = (Inputs(x, x, x, bias, None) for bias in (ODD, ODD + 1))
    rest = Outputs(x, x), Outputs(x, x)
    prepare["forward"](problem, first)(later)
    prepare["backward"](problem, first, *rest, Needs(True, True, True, True))(later, *rest)
    for found, bias in zip(given, (ODD, later.bias) * 2, strict=True):
        assert torch.equal(found, bias)
        assert tensor_fits_tma(found, True) == bool(irregular)
        assert (found is bias) == (not irregular)
