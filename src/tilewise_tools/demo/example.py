"""Shared by the scripts in examples/: training runs beside each other, with losses, times, memory and a picture."""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim import Optimizer

from tilewise_tools.bench.timing import synchronize, working_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silences the profiler, by which memory is measured
NONE = "none"
OUTPUT = Path("demo-output")
COLORS = ("#c2410c", "#9fb8d4")  # of tilewise and of the other, as in the demo's picture
PANELS, DPI = (8.6, 3.6), 110  # inches, dots an inch


@dataclass
class Trial:
    """One way of computing: the loss of each step, the seconds of each step, and the memory of one.

    Attributes:
        losses: or another number of each step.
        seconds: without the step whose memory was measured.
        memory: bytes of a step's forward and backward beyond parameters, optimizer and batch; on a CPU of one thread.
    """

    name: str
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    memory: int | None = None

    def measure(self, step: Callable[[], Tensor], device: torch.device | str) -> Tensor:
        """Return ``step()``; the second call's memory is measured, the time of every other one."""
        place = torch.device(device)
        if len(self.seconds) == 1 and self.memory is None:
            found: list[Tensor] = []

            def kept() -> tuple[Tensor]:
                found.append(step())
                return (found[0],)

            self.memory = working_bytes(kept, place)
            return found[0]
        synchronize(place)
        start = time.perf_counter()
        result = step()
        synchronize(place)
        self.seconds.append(time.perf_counter() - start)
        return result

    @property
    def step_seconds(self) -> float:
        """Median time of a step, without the first one, which prepares."""
        return statistics.median(self.seconds[1:] or self.seconds)


def parse(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None, against: str, dtypes: bool = True
) -> argparse.Namespace:
    """Add --against, --output, --device, --threads and, with ``dtypes``, --dtype; parse, and set PyTorch's threads.

    One thread is the default, because several wait for each other where other programs use the cores.
    """
    parser.add_argument("--against", choices=[against, NONE], default=against, help="what is computed beside tilewise")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder for the picture; made if missing")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch on a CPU; more are faster on idle cores")
    if dtypes:
        parser.add_argument("--dtype", choices=["float32", "float64"], default="float32", help="float64: on a CPU")
    given = parser.parse_args(arguments)
    torch.set_num_threads(given.threads)
    return given


def train(
    name: str,
    loss_of: Callable[..., Tensor],
    optimizer: Optimizer,
    batches: Iterable[Sequence[Tensor]],
    device: torch.device | str,
    *,
    every: int = 20,
    reduce: Callable[[], None] = lambda: None,
) -> Trial:
    """Train on ``batches``, printing the loss of every ``every``-th step.

    Args:
        loss_of: called with the tensors of each batch, on ``device``; returns the loss.
        reduce: called between the backward and the optimizer's step.
    """
    run = Trial(name)
    for step, batch in enumerate(batches):
        placed = [x.to(device) for x in batch]
        optimizer.zero_grad(set_to_none=True)

        def forward_and_backward(placed: list[Tensor] = placed) -> Tensor:
            loss = loss_of(*placed)
            loss.backward()
            return loss.detach()

        loss = run.measure(forward_and_backward, device)
        reduce()
        optimizer.step()
        run.losses.append(loss.item())
        if step % every == 0:
            print(f"{name}, step {step + 1:3d}: loss {run.losses[-1]:.4f}", flush=True)
    print(f"{name}, step {len(run.losses):3d}: loss {run.losses[-1]:.4f}", flush=True)
    return run


def losses_apart(runs: Sequence[Trial]) -> float:
    """Return the largest difference between the first run's losses and another's."""
    return max(abs(a - b) for run in runs[1:] for a, b in zip(runs[0].losses, run.losses, strict=True))


def report(runs: Sequence[Trial], output: Path, name: str, title: str, ylabel: str = "loss") -> None:
    """Print time and memory of a step of each run, how far the losses are apart, and draw the picture."""
    table(runs)
    if len(runs) > 1:
        print(f"losses of {' and '.join(run.name for run in runs)} differ by {losses_apart(runs):.1e} at most")
    draw(output / f"{name}.png", title, {run.name: run.losses for run in runs}, ylabel, runs)


def table(runs: Sequence[Trial]) -> None:
    width = max(len(run.name) for run in runs)
    for run in runs:
        memory = "" if run.memory is None else f", {run.memory / 2**20:.1f} MiB"
        print(f"{run.name:{width}}  a step: {1e3 * run.step_seconds:.1f} ms{memory}")


def draw(path: Path, title: str, curves: dict[str, Sequence[float]], ylabel: str, runs: Sequence[Trial]) -> None:
    """Write a PNG: on the left ``curves`` by steps, on the right time and memory of a step, if matplotlib is there."""

    def left(axes: Axes) -> None:
        for i, (name, values) in reversed(list(enumerate(curves.items()))):
            width = 1.4 if i == 0 else 5.0
            axes.plot(range(1, len(values) + 1), values, color=COLORS[i], linewidth=width, label=name)
        axes.set_xlabel("step", fontsize=9)
        axes.set_ylabel(ylabel, fontsize=9)
        axes.legend(frameon=False, fontsize=9)

    _figure(path, title, runs, left)


def draw_apart(path: Path, title: str, apart: dict[str, float], most: float, runs: Sequence[Trial]) -> None:
    """Write a PNG as `draw` does, on the left with differences and the largest one allowed."""

    def left(axes: Axes) -> None:
        axes.barh(list(apart), list(apart.values()), color=COLORS[0], height=0.6)
        axes.axvline(most, color=COLORS[1], linewidth=3)
        axes.set_xscale("log")
        axes.set_xlabel("relative difference; the line: the largest one allowed", fontsize=9)

    _figure(path, title, runs, left)


def _figure(path: Path, title: str, runs: Sequence[Trial], left: Callable[[Axes], None]) -> None:
    if find_spec("matplotlib") is None:
        print(f"no picture: {path.name} needs matplotlib")
        return
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=PANELS, dpi=DPI, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplot_mosaic([["left", "time"], ["left", "memory"]], width_ratios=(3, 2))
    left(axes["left"])
    numbers = {
        "time": ("ms a step", [1e3 * run.step_seconds for run in runs]),
        "memory": ("MiB a step", [(run.memory or 0) / 2**20 for run in runs]),
    }
    for panel, (label, values) in numbers.items():
        bars = axes[panel].barh([run.name for run in runs], values, color=COLORS[: len(runs)], height=0.6)
        axes[panel].bar_label(bars, fmt="{:.3g}", padding=3, fontsize=9)
        axes[panel].set_xlabel(label, fontsize=9)
        axes[panel].invert_yaxis()
        axes[panel].margins(x=0.2)
    for each in axes.values():
        each.spines[["top", "right"]].set_visible(False)
        each.tick_params(labelsize=9)
    figure.suptitle(title, fontsize=11, fontweight="bold", x=0.01, ha="left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    print(f"picture: {path}")
