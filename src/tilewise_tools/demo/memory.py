"""Part 3: memory and time of forward plus backward against sequence length, with a trainable bias.

Working memory is the peak during the step (on a CPU, of one thread), minus what was allocated before it, minus the
output and the gradients, which every implementation must return.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tilewise_tools.bench.timing import Step, working_bytes
from tilewise_tools.demo.comparison import (
    Advance,
    Attend,
    Comparison,
    Spread,
    relative_difference,
    sdpa_attention,
    tilewise_attention,
    worst,
)

# Relative to the largest element; for two implementations in the same dtype that round in different orders.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
SEED = 20


@dataclass(frozen=True)
class MemorySettings:
    """Sizes of q, k, v (batch, heads, S, head_dim) and bias (1, heads, S, S) for each S in ``lengths``."""

    batch: int
    heads: int
    head_dim: int
    lengths: tuple[int, ...]
    dtype: torch.dtype
    rounds: int

    def bias_bytes(self, length: int) -> int:
        return self.heads * length * length * self.dtype.itemsize


CPU = MemorySettings(2, 4, 64, lengths=(256, 512, 1024, 2048), dtype=torch.float32, rounds=9)
CUDA = MemorySettings(4, 8, 64, lengths=(1024, 2048, 4096, 8192, 16384, 32768), dtype=torch.bfloat16, rounds=11)
# Rounds of a length stop after ENOUGH seconds, but not before FEWEST_ROUNDS, which the quartiles need.
ENOUGH, FEWEST_ROUNDS = 6.0, 4
# Share of a GPU's memory that the bias and its gradient may take; longer sequences are left out.
BIAS_SHARE = 0.4


def quick(settings: MemorySettings) -> MemorySettings:
    return replace(settings, lengths=settings.lengths[:3])


@dataclass(frozen=True)
class Measurement:
    """Working memory in bytes and time of one step; None if the device ran out of memory."""

    length: int
    working_bytes: int | None
    seconds: Spread | None


@dataclass(frozen=True)
class MemoryResult:
    settings: MemorySettings
    tilewise: list[Measurement]
    sdpa: list[Measurement]
    comparisons: list[Comparison]
    one_thread: bool = True  # of the memory: on a CPU


def random_inputs(settings: MemorySettings, length: int, device: torch.device) -> list[Tensor]:
    """Return q, k, v and bias, which require gradients, and the gradient of the output."""
    generator = torch.Generator(device).manual_seed(SEED)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=settings.dtype)

    shape = (settings.batch, settings.heads, length, settings.head_dim)
    q, k, v = (random(*shape).requires_grad_() for _ in range(3))
    bias = random(1, settings.heads, length, length).requires_grad_()
    return [q, k, v, bias, random(*shape)]


def attention_step(attend: Attend, inputs: list[Tensor]) -> Step:
    """Return a function that runs one forward and backward and returns (o, dq, dk, dv, dbias)."""
    *leaves, do = inputs

    def step() -> tuple[Tensor, ...]:
        o = attend(*leaves)
        return o.detach(), *torch.autograd.grad(o, leaves, do)

    return step


def _seconds(step: Step, device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def lengths_that_fit(settings: MemorySettings, device: torch.device) -> tuple[int, ...]:
    if device.type != "cuda":
        return settings.lengths
    capacity = BIAS_SHARE * torch.cuda.get_device_properties(device).total_memory
    return tuple(length for length in settings.lengths if 2 * settings.bias_bytes(length) <= capacity)


def measure(
    attends: dict[str, Attend], settings: MemorySettings, length: int, device: torch.device
) -> dict[str, Measurement]:
    """Measure each implementation at one length.

    Rounds are interleaved, and the first implementation alternates, so that a busy machine slows all of them.
    """
    inputs = random_inputs(settings, length, device)
    steps = {name: attention_step(attend, inputs) for name, attend in attends.items()}
    results: dict[str, Measurement] = {}
    for name, step in steps.items():
        try:
            step()  # excludes compilation and first-use buffers
            results[name] = Measurement(length, working_bytes(step, device), None)
        except torch.OutOfMemoryError:
            results[name] = Measurement(length, None, None)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    steps = {name: step for name, step in steps.items() if results[name].working_bytes is not None}
    times: dict[str, list[float]] = {name: [] for name in steps}
    begin = time.perf_counter()
    for turn in range(settings.rounds):
        if turn >= FEWEST_ROUNDS and time.perf_counter() - begin > ENOUGH:
            break
        for name in list(steps)[:: 1 if turn % 2 == 0 else -1]:
            times[name].append(_seconds(steps[name], device))
    for name, seconds in times.items():
        results[name] = replace(results[name], seconds=Spread.of(seconds))
    return results


def compare(attend: Attend, settings: MemorySettings, length: int, device: torch.device) -> list[Comparison]:
    """Compare the output and gradients of ``attend`` with SDPA's on the same random inputs."""
    inputs = random_inputs(settings, length, device)
    ours, theirs = attention_step(attend, inputs)(), attention_step(sdpa_attention, inputs)()
    difference = worst(relative_difference(a, b) for a, b in zip(ours, theirs, strict=True))
    return [Comparison(f"o, dq, dk, dv, dbias at S = {length}, relative", difference, TOLERANCES[settings.dtype])]


def run(
    settings: MemorySettings,
    device: torch.device,
    advance: Advance = lambda fraction: None,
    attend: Attend = tilewise_attention,
) -> MemoryResult:
    """Measure every length and call ``advance`` after each; compare results at the shortest length."""
    lengths = lengths_that_fit(settings, device)
    work = sum(lengths)
    comparisons = compare(attend, settings, lengths[0], device)
    measured = []
    for length in lengths:
        measured.append(measure({"tilewise": attend, "sdpa": sdpa_attention}, settings, length, device))
        advance(length / work)
    return MemoryResult(
        replace(settings, lengths=lengths),
        tilewise=[m["tilewise"] for m in measured],
        sdpa=[m["sdpa"] for m in measured],
        comparisons=comparisons,
        one_thread=device.type == "cpu",
    )


def describe(result: MemoryResult) -> list[str]:
    """Return the printed summary, as lines."""
    s = result.settings
    dtype = str(s.dtype).removeprefix("torch.")
    pairs = list(zip(result.tilewise, result.sdpa, strict=True))
    thread = ", on one thread" if result.one_thread else ""
    return [
        f"Forward and backward, q, k, v ({s.batch}, {s.heads}, S, {s.head_dim}) in {dtype}, trainable bias "
        f"(1, {s.heads}, S, S). Working memory: what the step needs beyond inputs, output and gradients{thread}. "
        f"Time: the fastest of {FEWEST_ROUNDS} to {s.rounds} interleaved rounds, which other programs delay least.",
        f"{'':>6} {'MiB, tilewise':>13} {'SDPA':>8}",
        *(f"{m.length:>6} {_mebibytes(m):>13} {_mebibytes(n):>8}" for m, n in pairs),
        f"{'':>6} {'time, tilewise':>14} {'SDPA':>13}  times as fast",
        *(f"{m.length:>6} {_time(m):>14} {_time(n):>13}  {_beside(m, n)}".rstrip() for m, n in pairs),
    ]


def _mebibytes(m: Measurement) -> str:
    return "none left" if m.working_bytes is None else f"{m.working_bytes / 2**20:.1f}"


def _time(m: Measurement) -> str:
    return "out of memory" if m.seconds is None else f"{1e3 * m.seconds.least:.1f} ms"


def _beside(ours: Measurement, theirs: Measurement) -> str:
    return (
        "" if ours.seconds is None or theirs.seconds is None else f"{theirs.seconds.least / ours.seconds.least:.2f} x"
    )
