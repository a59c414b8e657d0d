"""The demo's figure: one panel for each part that ran."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.gridspec import SubplotSpec
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator
from matplotlib.transforms import ScaledTranslation, Transform

from tilewise_tools.demo.comparison import worst
from tilewise_tools.demo.memory import MemoryResult
from tilewise_tools.demo.sentences import QUERY, SentencesResult, ranking
from tilewise_tools.demo.training import TrainingResult

TILEWISE, SDPA, INK, FAINT = "#c2410c", "#9fb8d4", "#1f2937", "#6b7280"
PANEL_WIDTH, PANEL_HEIGHT, DPI = 4.6, 4.1, 200  # inches, inches, dots an inch
LEFT, LEFT_OF_TICKS, RIGHT = 0.3, 0.7, 0.2  # margins, inches


def draw(
    path: Path,
    sentences: SentencesResult | None,
    training: TrainingResult | None,
    memory: MemoryResult | None,
) -> None:
    """Write the PNG ``path`` with a panel for each result that is not None."""
    panels: list[Callable[[Figure, SubplotSpec], None]] = []
    if sentences is not None:
        panels.append(partial(_draw_sentences, result=sentences))
    if training is not None:
        panels.append(partial(_draw_training, result=training))
    if memory is not None:
        panels.append(partial(_draw_memory, result=memory))
    width = PANEL_WIDTH * len(panels)
    figure = Figure(figsize=(width, PANEL_HEIGHT), dpi=DPI, facecolor="white")
    FigureCanvasAgg(figure)
    left = (LEFT_OF_TICKS if sentences is None else LEFT) / width
    right = 1 - RIGHT / width
    grid = figure.add_gridspec(1, len(panels), left=left, right=right, top=0.82, bottom=0.125, wspace=0.25)
    for column, panel in enumerate(panels):
        panel(figure, grid[0, column])
    figure.savefig(path)


def _heading(axes: Axes, title: str, subtitle: str) -> None:
    axes.text(0, 1.0, title, transform=_above(axes, 23), fontsize=11.5, fontweight="bold", color=INK)
    axes.text(0, 1.0, subtitle, transform=_above(axes, 9), fontsize=9, color=FAINT)


def _above(axes: Axes, points: float) -> Transform:
    return axes.transAxes + ScaledTranslation(0, points / 72, axes.figure.dpi_scale_trans)


def _stacked(figure: Figure, cell: SubplotSpec, height_ratios: tuple[float, float]) -> tuple[Axes, Axes]:
    """Return two stacked axes that share the horizontal axis, labelled on the lower one."""
    grid = cell.subgridspec(2, 1, height_ratios=height_ratios, hspace=0.12)
    upper = figure.add_subplot(grid[0, 0])
    lower = figure.add_subplot(grid[1, 0], sharex=upper)
    upper.tick_params(labelbottom=False)
    return upper, lower


def _plain(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#d1d5db")
    axes.tick_params(labelsize=9, colors=FAINT, which="both")


def _draw_sentences(figure: Figure, cell: SubplotSpec, result: SentencesResult) -> None:
    grid = cell.subgridspec(1, 2, width_ratios=(2.2, 1), wspace=0.0)
    names = figure.add_subplot(grid[0, 0])
    axes = figure.add_subplot(grid[0, 1], sharey=names)
    rows = ranking(result)
    positions = range(len(rows))
    for position, (_, _, sentence) in zip(positions, rows, strict=True):
        names.text(0, position, sentence, fontsize=7.6, color=INK, va="center")
    names.set_axis_off()
    axes.barh(positions, [stock for _, stock, _ in rows], height=0.62, color=SDPA, label="stock")
    axes.plot([ours for ours, _, _ in rows], positions, "o", color=TILEWISE, markersize=4.5, label="tilewise")
    axes.invert_yaxis()
    axes.set_xlabel("cosine similarity", fontsize=9, color=FAINT)
    _plain(axes)
    axes.tick_params(left=False, labelleft=False)
    axes.legend(loc="lower right", fontsize=9, frameon=False, labelcolor=INK)
    _heading(names, "A pretrained model, attention replaced", f"MiniLM, similarity to “{QUERY}”")


def _draw_training(figure: Figure, cell: SubplotSpec, result: TrainingResult) -> None:
    upper, lower = _stacked(figure, cell, height_ratios=(3, 1))
    steps = range(1, 1 + len(result.sdpa_losses))
    upper.plot(steps, result.sdpa_losses, color=SDPA, linewidth=5, solid_capstyle="round", label="SDPA")
    upper.plot(steps, result.tilewise_losses, color=TILEWISE, linewidth=1.3, label="tilewise")
    upper.set_ylabel("loss, nats a character", fontsize=9, color=FAINT)
    upper.legend(fontsize=9, frameon=False, labelcolor=INK)
    floor = 1e-8
    lower.semilogy(steps, [max(d, floor) for d in result.loss_differences], ".", color=INK, markersize=3)
    lower.set_ylim(floor / 2, max(1e-2, 2 * worst(result.loss_differences)))
    lower.set_yticks([1e-8, 1e-5, 1e-2], labels=["0", "$10^{-5}$", "$10^{-2}$"])
    lower.yaxis.set_minor_locator(NullLocator())
    lower.set_ylabel("losses differ by", fontsize=9, color=FAINT)
    lower.set_xlabel("step", fontsize=9, color=FAINT)
    for axes in (upper, lower):
        _plain(axes)
        axes.set_xlim(0, len(steps) + 1)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    s = result.settings
    _heading(
        upper,
        "Training with a trainable bias",
        f"{s.layers}-layer character model, bias (1, {s.heads}, {s.length}, {s.length}); below: float32 rounding",
    )


def _draw_memory(figure: Figure, cell: SubplotSpec, result: MemoryResult) -> None:
    upper, lower = _stacked(figure, cell, height_ratios=(1, 1))
    most = max(m.working_bytes or 0 for m in (*result.sdpa, *result.tilewise))
    unit, size = ("GiB", 2**30) if most > 2**33 else ("MiB", 2**20)
    for measurements, color, name in ((result.sdpa, SDPA, "SDPA"), (result.tilewise, TILEWISE, "tilewise")):
        width = 3 if name == "SDPA" else 1.6
        memory = [(m.length, m.working_bytes / size) for m in measurements if m.working_bytes is not None]
        spreads = [(m.length, m.seconds) for m in measurements if m.seconds is not None]
        times = [(length, 1e3 * seconds.least) for length, seconds in spreads]
        for axes, points in ((upper, memory), (lower, times)):
            if not points:
                continue
            axes.loglog(*zip(*points, strict=True), "o-", color=color, linewidth=width, markersize=5, label=name)
        if 0 < len(memory) < len(measurements):
            x, y = memory[-1]
            upper.annotate(
                "then out of memory",
                (x, y),
                (14, -14),
                textcoords="offset points",
                ha="center",
                fontsize=8,
                color=FAINT,
            )
    upper.set_ylabel(f"working memory, {unit}", fontsize=9, color=FAINT)
    lower.set_ylabel("time, ms", fontsize=9, color=FAINT)
    lower.set_xlabel("sequence length", fontsize=9, color=FAINT)
    lower.legend(loc="upper left", fontsize=9, frameon=False, labelcolor=INK)
    for axes in (upper, lower):
        _plain(axes)
        axes.set_xticks(result.settings.lengths)
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0f}"))
        axes.yaxis.set_major_locator(LogLocator(numticks=12))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        axes.set_ylim(*_whole_decades(*axes.get_ylim()))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.grid(axis="y", color="#e5e7eb", linewidth=0.6)
    s = result.settings
    dtype = str(s.dtype).removeprefix("torch.")
    _heading(
        upper,
        "Memory and time, forward + backward",
        f"{dtype}, q ({s.batch}, {s.heads}, S, {s.head_dim}), trainable bias (1, {s.heads}, S, S)",
    )


def _whole_decades(low: float, high: float) -> tuple[float, float]:
    """Return the powers of ten around an interval, so that flat curves look flat and two ticks show."""
    return 10.0 ** math.floor(math.log10(low)), 10.0 ** math.ceil(math.log10(high))
