"""Pictures of results: TFLOP/s against sequence length, and a roofline."""

from __future__ import annotations

import math
from pathlib import Path

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from tilewise.explanation.work import Limits
from tilewise_tools.bench.cases import Case
from tilewise_tools.bench.providers import is_ours
from tilewise_tools.bench.report import picture_names
from tilewise_tools.bench.results import PASSES, Pass, Results, provider_names

INK, FAINT = "#1f2937", "#6b7280"
OURS = ("#c2410c", "#f59e0b", "#7c2d12")
OTHERS = ("#2563eb", "#16a34a", "#7c3aed", "#0891b2", "#64748b", "#db2777", "#84cc16")
COLUMNS, DPI = 4, 150


def draw_all(results: Results, results_path: Path, folder: Path) -> list[Path]:
    """Write the pictures of ``report.picture_names`` into ``folder``; return their paths."""
    paths = [folder / name for _, name in picture_names(results_path)]
    forward, backward, roofline = paths
    draw_throughput(results, "forward", forward)
    draw_throughput(results, "backward", backward)
    draw_roofline(results, roofline)
    return paths


def draw_throughput(results: Results, which: Pass, path: Path) -> None:
    """Draw TFLOP/s of every provider against sequence length, a panel for each family with this pass."""
    families: dict[str, list[Case]] = {}
    for case in results.cases:
        if isinstance(case, Case) and not case.host and any(row.timing(which) for row in results.of(case.name)):
            families.setdefault(case.family, []).append(case)
    columns = min(COLUMNS, max(len(families), 1))
    lines = max(math.ceil(len(families) / columns), 1)
    figure = _figure(3.1 * columns + 0.4, 2.6 * lines + 1.0)
    colours = _colours(results)
    drawn: dict[str, Artist] = {}
    for n, (family, cases) in enumerate(families.items()):
        axes = figure.add_subplot(lines, columns, n + 1)
        _family(axes, results, which, sorted(cases, key=lambda case: case.keys), colours, drawn)
        axes.set_title(family, fontsize=10, color=INK, loc="left")
        if n % columns == 0:
            axes.set_ylabel("TFLOP/s", fontsize=9, color=FAINT)
    _finish(figure, f"{which.capitalize()} on {results.device['name']}", drawn, colours, path)


def _family(
    axes: Axes, results: Results, which: Pass, cases: list[Case], colours: dict[str, str], drawn: dict[str, Artist]
) -> None:
    for provider, colour in colours.items():
        points = []
        for case in cases:
            for row in results.of(case.name):
                flops = results.flops(row, which)
                if row.provider == provider and flops is not None:
                    points.append((case.keys, flops / 1e12))
        if points:
            ours = is_ours(provider)
            (drawn[provider],) = axes.plot(
                *zip(*points, strict=True),
                color=colour,
                marker="o",
                markersize=5 if ours else 3,
                linewidth=2.4 if ours else 1.2,
                zorder=3 if ours else 2,
            )
    lengths = [case.keys for case in cases]
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{n // 1024}k" if n % 1024 == 0 else str(n) for n in lengths])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlim(min(lengths) / 1.3, max(lengths) * 1.3)
    axes.set_ylim(0, 1.05 * axes.get_ylim()[1])  # whole markers at the top
    _plain(axes)


def draw_roofline(results: Results, path: Path) -> None:
    """Draw a roofline with the calibrated limits: tilewise's best backend and the best other provider."""
    figure = _figure(11, 4.8)
    drawn: dict[str, Artist] = {}
    colours = {"tilewise, best backend": OURS[0], "best other provider": OTHERS[0]}
    for n, which in enumerate(PASSES):
        axes = figure.add_subplot(1, 2, n + 1)
        for case in results.cases:
            ours = results.best_of_ours(case.name, which)
            if not isinstance(case, Case) or case.host or ours is None:
                continue
            for label, row in zip(colours, (ours, results.best_other(ours, which)), strict=True):
                flops = None if row is None else results.flops(row, which)
                if flops is not None:
                    x = results.work(case, which).intensity
                    drawn[label] = axes.scatter([x], [flops / 1e12], s=18, color=colours[label], zorder=3, alpha=0.8)
        roofs: dict[Limits, list[str]] = {}
        for dtype in dict.fromkeys(case.dtype for case in results.cases):
            roofs.setdefault(results.limits(dtype), []).append(dtype)
        for limits, dtypes in roofs.items():
            edge = limits.break_even
            xs = [edge / 200, edge, edge * 100]
            axes.plot(xs, [min(x * limits.bytes_per_second, limits.flops) / 1e12 for x in xs], color=INK, linewidth=1)
            axes.annotate(
                f"{', '.join(dtypes)}: {limits.flops / 1e12:.3g} TFLOP/s, {limits.bytes_per_second / 1e12:.3g} TB/s",
                (edge * 100, limits.flops / 1e12),
                xytext=(0, 4), textcoords="offset points", ha="right", fontsize=8, color=FAINT,
            )  # fmt: skip
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_title(which, fontsize=10, color=INK, loc="left")
        axes.set_xlabel("FLOP/byte", fontsize=9, color=FAINT)
        axes.set_ylabel("TFLOP/s", fontsize=9, color=FAINT)
        _plain(axes)
    _finish(figure, f"Roofline of {results.device['name']}, as calibrated in the same run", drawn, colours, path)


def _colours(results: Results) -> dict[str, str]:
    """Return a colour for every measured provider: warm colours for tilewise's backends."""
    names = provider_names(results.rows, lambda row: row.outcome == "measured")
    ours, others = [n for n in names if is_ours(n)], [n for n in names if not is_ours(n)]
    return {
        **{name: OURS[n % len(OURS)] for n, name in enumerate(ours)},
        **{name: OTHERS[n % len(OTHERS)] for n, name in enumerate(others)},
    }


def _figure(width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), dpi=DPI, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _finish(figure: Figure, title: str, drawn: dict[str, Artist], colours: dict[str, str], path: Path) -> None:
    figure.suptitle(title, fontsize=12, fontweight="bold", color=INK)
    names = [name for name in colours if name in drawn]
    if names:
        handles = [drawn[name] for name in names]
        figure.legend(handles, names, loc="outside lower center", ncols=min(len(names), 8), frameon=False, fontsize=9)
    figure.savefig(path)


def _plain(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#d1d5db")
    axes.tick_params(labelsize=8, colors=FAINT, which="both")
    axes.grid(axis="y", color="#e5e7eb", linewidth=0.6)
    axes.set_axisbelow(True)
