"""Times of a step's kernels: communication and computation."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

LANES = ("communication", "attention", "other")
COLOURS, DPI = {"communication": "#c2410c", "attention": "#2563eb", "other": "#64748b"}, 120
_COMMUNICATION = ("nccl", "gloo:")
# Substrings of the names of PyTorch's and tilewise's kernels; on a CPU, of operators.
_ATTENTION = ("attention", "attn", "flash", "fmha", "sdpa", "forward", "backward", "flex", "tilewise", "process_kernel")
Interval = tuple[float, float]


@dataclass(frozen=True)
class Timeline:
    """Kernel times of one rank's step.

    Attributes:
        lanes: for each of `LANES`, the intervals in which such a kernel ran, in seconds from the first kernel.
    """

    provider: str
    case: str
    lanes: dict[str, list[Interval]]

    @property
    def seconds(self) -> float:
        return max((end for lane in self.lanes.values() for _, end in lane), default=0.0)

    @property
    def communication_s(self) -> float:
        return _length(self.lanes["communication"])

    @property
    def exposed_s(self) -> float:
        """Seconds of communication without concurrent computation."""
        computing = _union([*self.lanes["attention"], *self.lanes["other"]])
        return _length(_union([*self.lanes["communication"], *computing])) - _length(computing)

    @property
    def idle_s(self) -> float:
        return self.seconds - _length(_union([x for lane in self.lanes.values() for x in lane]))


def record(step: Callable[[], object], case: str, provider: str, device: torch.device) -> Timeline:
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (device.type == "cuda")
    with profile(activities=activities) as profiler:
        step()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    return Timeline(provider, case, lanes_of(events, device.type))


def lanes_of(events: Iterable[dict], device: str) -> dict[str, list[Interval]]:
    """Return a Chrome trace's intervals: GPU kernels and copies, or CPU transfers and operators."""
    found: list[tuple[str, float, float]] = []
    for event in events:
        kind, name = event.get("cat", ""), event.get("name", "")
        if event.get("ph") != "X":
            continue
        if device == "cuda":
            if kind not in ("kernel", "gpu_memcpy", "gpu_memset"):
                continue
        elif not name.startswith(("gloo:", "tilewise::")):
            continue
        begin = float(event["ts"]) * 1e-6
        found.append((_lane(name), begin, begin + float(event["dur"]) * 1e-6))
    first = min((begin for _, begin, _ in found), default=0.0)
    return {lane: _union([(b - first, e - first) for name, b, e in found if name == lane]) for lane in LANES}


def _lane(name: str) -> str:
    low = name.lower()
    if low.startswith(_COMMUNICATION):
        return "communication"
    return "attention" if any(word in low for word in _ATTENTION) else "other"


def _union(intervals: Sequence[Interval]) -> list[Interval]:
    """Merge intervals that overlap or touch."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def _length(intervals: Sequence[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)


def draw(timelines: Sequence[Timeline], path: Path, title: str) -> None:
    """Draw the timelines below one another, on a common scale in milliseconds."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    size = (10, 0.8 + 1.3 * len(timelines))
    figure = Figure(figsize=size, dpi=DPI, facecolor="white", layout="constrained")
    all_axes = figure.subplots(len(timelines), 1, sharex=True, squeeze=False)
    for axes, timeline in zip(all_axes[:, 0], timelines, strict=True):
        for row, lane in enumerate(reversed(LANES)):
            bars = [(1e3 * begin, 1e3 * (end - begin)) for begin, end in timeline.lanes[lane]]
            axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=COLOURS[lane])
        axes.set_yticks(range(len(LANES)), list(reversed(LANES)))
        axes.set_ylim(-0.6, len(LANES) - 0.4)
        words = f"communication {1e3 * timeline.communication_s:.3g} ms, alone {1e3 * timeline.exposed_s:.3g} ms"
        axes.set_title(f"{timeline.provider}: {words}", loc="left", fontsize=9)
    all_axes[-1, 0].set_xlabel("ms of a forward and backward on rank 0")
    figure.suptitle(title, x=0.01, ha="left", fontsize=10)
    FigureCanvasAgg(figure).print_png(str(path))
