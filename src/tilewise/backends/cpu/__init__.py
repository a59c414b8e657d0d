"""Attention on the CPU: PyTorch's fused kernel if it supports the problem, else tiles in torch."""

from __future__ import annotations

from functools import partial

import torch

from tilewise.backends import Gradients, Inputs, Needs, Outputs, runs, sequences, sink_gradient
from tilewise.backends.cpu import fused, tiled
from tilewise.backends.cpu.parts import minus_delta
from tilewise.backends.protocol import Pass, at_once
from tilewise.quantities import count
from tilewise.spec.problem import Problem


def declines(problem: Problem, work: Pass = "forward") -> str | None:
    return None if problem.device == "cpu" else f"it runs on the CPU, and the tensors are on {problem.device}"


def prefers(problem: Problem) -> str | None:
    return None


def tiles(problem: Problem) -> str:
    size = tiled.tiling(problem)
    queries = f"{size.rows} {'query' if size.rows == 1 else 'queries'}"
    words = f"tiles of {queries} x {count(size.cols, 'key')}, {count(size.heads * problem.group, 'head')} at a time"
    forward_reason, backward_reason = fused.declines(problem), fused.declines_backward(problem)
    if forward_reason is not None:
        return f"{words} ({forward_reason})"
    if backward_reason is not None:
        return f"forward: PyTorch's fused kernel; backward: {words} ({backward_reason})"
    return "PyTorch's fused kernel"


def forward(problem: Problem, inputs: Inputs) -> Outputs:
    with torch.autocast("cpu", enabled=False):  # autocast would round the float32 tiles at each product
        outputs = None if fused.declines(problem) else fused.forward(problem, inputs)
        return tiled.forward(problem, inputs) if outputs is None else outputs


def backward(problem: Problem, inputs: Inputs, outputs: Outputs, cotangents: Outputs, needs: Needs) -> Gradients:
    with torch.autocast("cpu", enabled=False):
        gradients = None
        if cotangents.lse is None and fused.declines_backward(problem) is None:
            gradients = fused.backward(problem, inputs, outputs, cotangents, needs)
        if gradients is None:
            gradients = tiled.backward(problem, inputs, outputs, cotangents, needs)
        if needs.sink and inputs.sink is not None:
            assert outputs.lse is not None
            dsink = sink_gradient(inputs.sink, outputs.lse, minus_delta(outputs, cotangents))
            gradients = gradients._replace(sink=dsink)
        return gradients


# A packed batch is computed one run of equal-length sequences at a time, and so are batch elements that share a bias.
prepare = {
    "forward": at_once(partial(sequences.forward, partial(runs.forward, forward))),
    "backward": at_once(partial(sequences.backward, partial(runs.backward, backward))),
}
