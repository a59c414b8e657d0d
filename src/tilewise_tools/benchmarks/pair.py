"""The pair bias on Hopper (D=32, 4 heads, B=S, bias (1,4,S,S), bfloat16): variants, interleaved.

    python -m tilewise_tools.benchmarks.pair [forward|backward] [flex] [lengths]

Each line has a length, a variant, the kernel time of a pass by CUDA graphs, TFLOP/s, and the memory that the pass
allocates beyond its results. Before timing, variants are compared with the first one, and forwards with float64, on one
head of three batch elements, next to unfused torch in bfloat16. flex: include FlexAttention's forward.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from tilewise.backends import Inputs, Needs, Outputs
from tilewise.backends.gluon.sm90.backward import launch as backward_launch
from tilewise.backends.gluon.sm90.common import config
from tilewise.backends.gluon.sm90.forward import launch
from tilewise.spec.problem import Problem
from tilewise.spec.score import Band, Score

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


def calls(
    length: int, passes: Sequence[str]
) -> tuple[dict[str, Callable[[], Any]], dict[str, Callable[[], Any]], Problem, Inputs]:
    """Return the variants of the forward and of the backward, the problem and the inputs."""
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16, generator=generator)

    q, k, v, do = (draw(length, 4, length, 32) for _ in range(4))
    bias = draw(1, 4, length, length)
    inputs = Inputs(q, k, v, bias, None)
    score = Score(32**-0.5, None, Band())
    problem = Problem.of(q, k, v, bias, *(None,) * 6, score, bias_grad=True, deterministic=False)
    forwards: dict[str, Callable[[], Any]] = {}
    backwards: dict[str, Callable[[], Any]] = {}
    for name, together in (
        ("separate pipelines of K, V and the bias", lambda _: False),
        ("together", launch.has_small_heads),
    ):
        with patched(launch, has_small_heads=together):
            forwards[name] = partial(launch.HopperForward(problem, inputs), inputs)
    with patched(launch, raster=lambda _: launch.Raster("batch", 0, 0)):
        forwards["together, order of the batch"] = partial(launch.HopperForward(problem, inputs), inputs)
    if "backward" not in passes:
        return forwards, backwards, problem, inputs
    outputs = next(iter(forwards.values()))()
    cotangents, needs = Outputs(do, None), Needs(True, True, True, True, False)

    for name, least in (("a batch element in a program", 1 << 30), ("three", 0)):
        with patched(config, BATCHED_FROM=least):
            made = backward_launch.HopperBackward(problem, inputs, outputs, cotangents, needs)
        backwards[name] = partial(made, inputs, outputs, cotangents)
    return forwards, backwards, problem, inputs


def flex(inputs: Inputs) -> Callable[[], Any]:
    """Return FlexAttention's forward; creates a block mask of a key mask outside the timed call."""
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

    shared, seen, blocks = inputs.bias[0], inputs.mask, None
    if seen is not None:
        sizes = len(seen), None, inputs.q.shape[2], inputs.k.shape[2]
        blocks = create_block_mask(lambda b, h, i, j: seen[b, 0, 0, j], *sizes, device="cuda")
    torch._dynamo.reset()
    compiled = torch.compile(flex_attention, dynamic=False)

    def call() -> Any:
        with torch.no_grad():
            return compiled(
                inputs.q, inputs.k, inputs.v, score_mod=lambda s, b, h, i, j: s + shared[h, i, j], block_mask=blocks,
                return_aux=AuxRequest(lse=True),
            )  # fmt: skip

    return call


def errors(found: Any, inputs: Inputs) -> str:
    """Describe the last head's largest errors of O and LSE against float64, and torch's in bfloat16."""
    lines = []
    at = torch.tensor([0, inputs.q.shape[0] // 2, inputs.q.shape[0] - 1], device="cuda")
    q, k, v = (x[at, -1] for x in inputs[:3])
    bias, scale = inputs.bias[0, -1], q.shape[-1] ** -0.5
    s = q.double() @ k.double().mT * scale + bias.double()
    right = s.softmax(-1) @ v.double(), s.logsumexp(-1)
    rough = q @ k.mT * scale + bias
    for name, x, y, z in (
        ("O", found[0], right[0], rough.softmax(-1) @ v),
        ("LSE", found[1], right[1], rough.logsumexp(-1)),
    ):
        mine, torchs = (x[at, -1].double() - y).abs().max().item(), (z.double() - y).abs().max().item()
        lines.append(
            f"{name} {mine:.1e} (torch in bfloat16 {torchs:.1e}){'' if mine <= 2 * torchs + 1e-5 else ' WRONG'}"
        )
    return ", ".join(lines)


def timed(variants: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Return milliseconds of each variant by CUDA graphs: the median of interleaved rounds."""
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
    """Return the peak allocation of a call beyond its results, in MiB."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    kept = call()
    peak, after = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
    del kept
    return (peak - before - (after - before)) / 2**20


def main() -> None:
    words = sys.argv[1:]
    lengths = [int(x) for x in words if x.isdigit()] or [256, 384, 512, 768]
    passes = [x for x in words if x in ("forward", "backward")] or ["forward", "backward"]
    print(torch.cuda.get_device_name())
    for length in lengths:
        forwards, backwards, problem, inputs = calls(length, passes)
        for what, variants, flops in (
            ("forward", forwards, problem.flops),
            ("backward", backwards, problem.backward_flops),
        ):
            if what not in passes:
                continue
            first = None
            for name, call in variants.items():
                found = [x for x in call() if x is not None]
                first = first or found
                worst = max(
                    ((x - y).abs().max() / y.abs().max()).item()
                    for x, y in zip(map(torch.Tensor.float, found), map(torch.Tensor.float, first), strict=True)
                )
                beside = errors(found, inputs) if what == "forward" else ""
                print(f"S={length} {what} {name}: off by {worst:.1e} {beside}", flush=True)
            if what == "forward" and "flex" in words:
                variants = variants | {"FlexAttention": flex(inputs)}
            times = timed(variants)
            for name, milliseconds in times.items():
                memory = working_memory(variants[name])
                speed = flops / milliseconds * 1e-9
                share = f", {times['FlexAttention'] / milliseconds:.2f} of Flex" if "FlexAttention" in times else ""
                print(
                    f"S={length} {what} {name}: {milliseconds:.3f} ms, {speed:.0f} TFLOP/s{share}, {memory:.0f} MiB",
                    flush=True,
                )


if __name__ == "__main__":
    main()
