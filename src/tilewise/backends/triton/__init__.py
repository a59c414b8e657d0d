"""Portable Triton kernels, forward, backward and tangents, for NVIDIA GPUs of compute capability 8.0 and later.

This module imports triton only to run or describe a problem: the plan calls `declines` on machines without triton.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from tilewise.backends import declines_gpu, float32_precision, has_triton
from tilewise.backends.protocol import JVP, Backward, Forward, Inputs, Needs, Outputs, Pass, Tangents
from tilewise.backends.short_sequences import fit_tiles
from tilewise.backends.triton.one_tile.config import tiles as one_tile_tiles
from tilewise.quantities import count, number
from tilewise.spec.operands import PART_WORDS
from tilewise.spec.problem import Problem


def declines(problem: Problem, work: Pass = "forward") -> str | None:
    if not has_triton():
        return "triton is not installed"
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if problem.device != "cuda" and not interpreted:
        return f"needs a CUDA device, the tensors are on {problem.device}"
    reason = declines_gpu(problem.capability)
    if reason is not None:
        return reason
    if problem.dtype == torch.float64:
        return "has no float64 kernels"
    if problem.bias is not None and problem.bias.dtype == torch.float64:
        return "reads a bias in float16, bfloat16 or float32, not float64"
    for name, x in () if problem.parts is None else problem.parts.named():
        if x.dtype == torch.float64:
            return f"reads {PART_WORDS[name]} in float16, bfloat16 or float32, not float64"
    if problem.sink is not None and problem.sink.dtype == torch.float64:
        return "reads a sink in float16, bfloat16 or float32, not float64"
    if interpreted and problem.dtype == torch.bfloat16:
        return "Triton's interpreter computes bfloat16 products wrongly"
    return _declines_tangents(problem) if work == "tangents" else None


def _declines_tangents(problem: Problem) -> str | None:
    if problem.totals is not None:
        return "has no kernel for the tangents of a packed batch yet"
    if problem.score.dropout:
        return "has no kernel for tangents under dropout yet"
    if problem.parts is not None:
        words = [PART_WORDS[name] for name, _ in problem.parts.named()]
        return f"has no kernel for tangents with {' and '.join(words)} yet"
    dim, most = max(problem.head_dim, problem.value_dim), 128 if problem.dtype.itemsize == 4 else 256
    if dim > most:
        return f"computes the tangents of up to {most} dimensions in this dtype, not of {dim}"
    return None


def prefers(problem: Problem) -> str | None:
    return None


def tiles(problem: Problem) -> str:
    if fit_tiles(problem):
        return one_tile_tiles(problem)
    from tilewise.backends.triton.config import by_blocks, columns, forward_config, splits

    c = forward_config(problem, bias_tma=True, tma=True)
    rows = f"{c.block_m} queries"
    if c.pack_gqa and problem.group > 1:
        rows = f"{c.block_m} queries of the {problem.group} heads that share keys"
    words = f"{rows} x {c.block_n} keys, {count(c.num_warps, 'warp')}, {count(c.num_stages, 'pipeline stage')}"
    d, dv = problem.head_dim, problem.value_dim
    if by_blocks(problem):  # S, and in the backward dP, are computed once for each tile of columns
        forward, backward = columns(problem, True).tiles, columns(problem, True, forward=False).tiles
        once, again = (forward * d + dv) / (d + dv), (backward * (d + dv) + 2 * d + dv) / (3 * d + 2 * dv)
        found = [f"{number(once)} times the FLOPs"] if forward > 1 else []
        found += [f"{number(again)} times in the backward"] if backward > 1 else []
        if found:
            words += f"; a program has a part of the columns and computes the scores anew, {', '.join(found)}"
    parts = splits(problem, c)
    return words if parts == 1 else f"{words}; the keys in {parts} splits, merged by their LSE"


def _prepare_forward(problem: Problem, inputs: Inputs) -> Forward:
    from tilewise.backends.triton import launch
    from tilewise.backends.triton.one_tile.launch import OneTileForward

    if problem.dtype == torch.float32:
        return _ByPrecision(lambda inputs: launch.TritonForward(problem, inputs))
    return (OneTileForward if fit_tiles(problem) else launch.TritonForward)(problem, inputs)


def _prepare_backward(
    problem: Problem, inputs: Inputs, outputs: Outputs, cotangents: Outputs, needs: Needs
) -> Backward:
    from tilewise.backends.triton import launch
    from tilewise.backends.triton.one_tile.launch import OneTileBackward

    if problem.dtype == torch.float32:
        return _ByPrecision(lambda inputs, o, do: launch.TritonBackward(problem, inputs, o, do, needs))
    make = OneTileBackward if fit_tiles(problem) else launch.TritonBackward
    return make(problem, inputs, outputs, cotangents, needs)


def _prepare_tangents(
    problem: Problem, inputs: Inputs, outputs: Outputs, given: Tangents
) -> JVP:  # fmt: skip
    from tilewise.backends.triton.tangents.launch import TritonTangents

    if problem.dtype == torch.float32:
        return _ByPrecision(lambda *tensors: TritonTangents(problem, *tensors))
    return TritonTangents(problem, inputs, outputs, given)


prepare = {"forward": _prepare_forward, "backward": _prepare_backward, "tangents": _prepare_tangents}


class _ByPrecision:
    """Prepared passes by float32 precision: torch's setting for matrix products may change between calls."""

    def __init__(self, prepare: Callable[..., Callable[..., Any]]):
        self._prepare = prepare
        self._prepared: dict[str, Callable[..., Any]] = {}

    def __call__(self, *tensors: Any) -> Any:
        precision = float32_precision(torch.float32)
        run = self._prepared.get(precision)
        if run is None:
            run = self._prepared[precision] = self._prepare(*tensors)
        return run(*tensors)
