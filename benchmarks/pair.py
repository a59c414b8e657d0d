"""The pair bias on Hopper (D=32, 4 heads, B=S, a bias (1,4,S,S), bfloat16), one change at a time, in turns.

    python benchmarks/pair.py [lengths]

Each line: a length, a variant, the time of the kernels of a pass by CUDA graphs, TFLOP/s, and what the pass allocates
beyond its results. Variants are compared to the first one before they are timed.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from tilewise.backends import Inputs, Needs, Outputs
from tilewise.backends.gluon.sm90 import backward_launch, config, launch
from tilewise.problem import Problem
from tilewise.score.terms import Band, Score

ROUNDS = 9


@contextmanager
def patched(module: Any, **changes: Any) -> Iterator[None]:
    before = {name: getattr(module, name) for name in changes}
    for name, value in changes.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)


def calls(length: int) -> tuple[dict[str, Callable[[], Any]], dict[str, Callable[[], Any]], Problem]:
    """The variants of the forward and of the backward."""
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16, generator=generator)

    q, k, v, do = (draw(length, 4, length, 32) for _ in range(4))
    bias = draw(1, 4, length, length)
    inputs = Inputs(q, k, v, bias, None)
    score = Score(32**-0.5, None, Band())
    problem = Problem.of(q, k, v, bias, *(None,) * 6, score, bias_grad=True, deterministic=False)
    forwards, backwards = {}, {}
    for order in ("batch", "tiles"):
        with patched(launch, raster=lambda _, order=order: launch.Raster(order, 0, 0)):
            forwards[f"order of {order}"] = partial(launch.Forward(problem, inputs), inputs)
    outputs = next(iter(forwards.values()))()
    cotangents, needs = Outputs(do, None), Needs(True, True, True, True, False)

    for name, least in (("a batch element in a program", 1 << 30), ("three", 0)):
        with patched(config, LANES_FROM=least):
            made = backward_launch.Backward(problem, inputs, outputs, cotangents, needs)
        backwards[name] = partial(made, inputs, outputs, cotangents)
    return forwards, backwards, problem


def timed(variants: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Milliseconds of each, the median of rounds in turns, by CUDA graphs."""
    graphs = {}
    for name, call in variants.items():
        for _ in range(3):
            call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kept = call()
        graphs[name] = (graph, kept)
    found: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(ROUNDS):
        for name, (graph, _) in graphs.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            graph.replay()
            begin.record()
            for _ in range(4):
                graph.replay()
            end.record()
            end.synchronize()
            found[name].append(begin.elapsed_time(end) / 4)
    return {name: statistics.median(times) for name, times in found.items()}


def working_memory(call: Callable[[], Any]) -> float:
    """MiB that a call allocates at its most, beyond what it returns."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    kept = call()
    peak, after = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
    del kept
    return (peak - before - (after - before)) / 2**20


def main() -> None:
    lengths = [int(x) for x in sys.argv[1:]] or [256, 384, 512, 768]
    print(torch.cuda.get_device_name())
    for length in lengths:
        forwards, backwards, problem = calls(length)
        for what, variants, flops in (
            ("forward", forwards, problem.flops),
            ("backward", backwards, problem.backward_flops),
        ):
            first = None
            for name, call in variants.items():
                found = [x for x in call() if x is not None]
                first = first or found
                worst = max(
                    ((x - y).abs().max() / y.abs().max()).item()
                    for x, y in zip(map(torch.Tensor.float, found), map(torch.Tensor.float, first), strict=True)
                )
                print(f"S={length} {what} {name}: off by {worst:.1e}", flush=True)
            for name, milliseconds in timed(variants).items():
                memory = working_memory(variants[name])
                speed = flops / milliseconds * 1e-9
                print(
                    f"S={length} {what} {name}: {milliseconds:.3f} ms, {speed:.0f} TFLOP/s, {memory:.0f} MiB",
                    flush=True,
                )


if __name__ == "__main__":
    main()
