"""Portable Triton kernels, forward and backward, for NVIDIA GPUs of compute capability 8.0 and later.

Nothing here imports triton until a problem is run: the plan asks `declines` on machines that have none.
"""

from __future__ import annotations

import importlib.util
import os
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from tilewise.backends import Gradients, Inputs, Needs, Outputs
from tilewise.problem import Problem


def declines(problem: Problem) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if problem.device != "cuda" and not interpreted:
        return f"needs a CUDA device, the tensors are on {problem.device}"
    if problem.capability is not None and problem.capability < (8, 0):
        return f"needs compute capability 8.0 or later, this GPU has {'.'.join(map(str, problem.capability))}"
    if problem.dtype == torch.float64:
        return "has no float64 kernels"
    if problem.bias is not None and problem.bias.dtype == torch.float64:
        return "reads a bias in float16, bfloat16 or float32, not float64"
    if interpreted and problem.dtype == torch.bfloat16:
        return "Triton's interpreter computes bfloat16 products wrongly"
    return None


def tiles(problem: Problem) -> str:
    from tilewise.backends.triton.config import forward_config

    c = forward_config(problem, bias_tma=True)
    return f"{c.block_m} queries x {c.block_n} keys, {c.num_warps} warps, {c.num_stages} pipeline stages"


def forward(problem: Problem, inputs: Inputs) -> Outputs:
    from tilewise.backends.triton import launch

    with _device_of(inputs.q):
        return launch.forward(problem, inputs)


def backward(problem: Problem, inputs: Inputs, outputs: Outputs, cotangents: Outputs, needs: Needs) -> Gradients:
    from tilewise.backends.triton import launch

    with _device_of(inputs.q):
        return launch.backward(problem, inputs, outputs, cotangents, needs)


def _device_of(q: Tensor) -> AbstractContextManager:
    """Triton launches on the current device: make it the tensors' own, at no cost where it already is."""
    if q.device.type != "cuda" or q.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(q.device)
