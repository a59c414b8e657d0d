"""Clock, memory measurement, and calibration of the device's limits."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from tilewise_tools.bench.results import Calibration, Timing

_FEWEST, _MOST = 3, 200  # repetitions
_HOST_CALLS = 200


class Clock(NamedTuple):
    """Timer for steps on ``device``, about ``seconds`` for each, without warm-up."""

    device: torch.device
    seconds: float

    def time(self, step: Callable[[], object]) -> Timing:
        """Return the median and the 20th and 80th percentile.

        On a GPU by CUDA events, with the L2 cache flushed before each step.
        """
        synchronize(self.device)
        start = time.perf_counter()
        step()
        synchronize(self.device)
        estimate = max(time.perf_counter() - start, 1e-6)
        repeats = min(max(int(self.seconds / estimate), _FEWEST), _MOST)
        for _ in range(repeats // 4):
            step()
        return summary(self._gpu(step, repeats) if self.device.type == "cuda" else _cpu(step, repeats))

    def _gpu(self, step: Callable[[], object], repeats: int) -> list[float]:
        l2 = torch.cuda.get_device_properties(self.device).L2_cache_size
        flush = torch.empty(max(4 * l2, 256 << 20), dtype=torch.uint8, device=self.device)
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
        for start, end in events:
            flush.zero_()  # also keeps the GPU busy while the host prepares the step
            start.record()
            step()
            end.record()
        torch.cuda.synchronize(self.device)
        return [start.elapsed_time(end) / 1e3 for start, end in events]


def _cpu(step: Callable[[], object], repeats: int) -> list[float]:
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return seconds


def summary(seconds: list[float]) -> Timing:
    ordered = sorted(seconds)
    low, high = ordered[len(ordered) // 5], ordered[len(ordered) - 1 - len(ordered) // 5]
    return Timing(statistics.median(ordered), low, high, len(ordered))


def over_rounds(rounds: Sequence[Timing]) -> Timing:
    """Combine interleaved timings of one step: the median of the medians, the lowest and the highest."""
    return Timing(
        statistics.median(timing.median_s for timing in rounds),
        min(timing.low_s for timing in rounds),
        max(timing.high_s for timing in rounds),
        sum(timing.repeats for timing in rounds),
    )


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def host_seconds(step: Callable[[], object], device: torch.device) -> float:
    """Return the host time of a call in seconds: the median of ten loops without synchronization."""
    loops = []
    for _ in range(10):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(_HOST_CALLS // 10):
            step()
        loops.append((time.perf_counter() - start) / (_HOST_CALLS // 10))
    synchronize(device)
    return statistics.median(loops)


def calibrate(clock: Clock, dtypes: list[str]) -> Calibration:
    """Time a matrix product in each dtype and a copy.

    On a GPU 8192³ and 2 GiB; on a CPU 2048³ (16-bit: 1024³) and 256 MiB.
    """
    device = clock.device
    flops = {}
    for name in dtypes:
        dtype = getattr(torch, name)
        n = 8192 if device.type == "cuda" else 1024 if dtype.itemsize == 2 else 2048
        a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
        flops[name] = 2 * n**3 / clock.time(lambda a=a, b=b: a @ b).median_s  # type: ignore[misc]
    x = torch.zeros((2 << 30) if device.type == "cuda" else (256 << 20), device=device, dtype=torch.uint8)
    y = torch.empty_like(x)
    return Calibration(flops, 2 * x.numel() / clock.time(lambda: y.copy_(x)).median_s)


Step = Callable[[], tuple[Tensor, ...]]


def working_bytes(step: Step, device: torch.device) -> int:
    """Return ``step``'s peak memory in bytes, on a CPU of one thread, minus memory allocated before and its results."""
    peak, results = _cuda_peak(step, device) if device.type == "cuda" else _cpu_peak(step)
    return peak - sum(x.numel() * x.itemsize for x in results)


def _cuda_peak(step: Step, device: torch.device) -> tuple[int, tuple[Tensor, ...]]:
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    results = step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before, results


def _cpu_peak(step: Step) -> tuple[int, tuple[Tensor, ...]]:
    """Return the peak of one thread by the profiler, which records its allocations, also within fused kernels.

    The profiler sees no other thread, and tilewise divides a call among several: so the step runs in this one alone.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiler:
            results = step()
    finally:
        torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        with trace.open(encoding="utf-8") as file:
            events = json.load(file)["traceEvents"]
    changes = [event["args"] for event in events if event["name"] == "[memory]" and event["args"]["Device Type"] == 0]
    held = peak = 0
    for change in sorted(changes, key=lambda change: change["Ev Idx"]):
        held += change["Bytes"]
        peak = max(peak, held)
    return peak, results
