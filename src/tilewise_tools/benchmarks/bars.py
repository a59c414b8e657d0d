"""Bar charts as SVG, of rectangles and text alone, so that equal results give equal bytes for a test to compare."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

INK, FAINT = "#1f2937", "#6b7280"
COLOURS = ("#c2410c", "#9fb8d4", "#64748b")  # tilewise first
WIDTH, GAP, END = 720, 80, 60  # px: total, space for numbers between panels, and after the last
BAR, PITCH, CASE, GROUP = 12, 14, 8, 22  # px: a bar, from bar to bar, between cases, between groups


@dataclass(frozen=True)
class Panel:
    """One measured quantity: its title, the format of its numbers, and for each case one value of each series."""

    title: str
    form: str
    values: Sequence[Sequence[float | None]]  # None where nothing was measured: no bar


@dataclass(frozen=True)
class Chart:
    """Panels side by side.

    Attributes:
        title: what is shown, and on which machine.
        series: names of what is compared, at most three, tilewise first.
        groups: a heading, which may be empty, and the labels of the cases below it.
        panels: with as many values as there are labels in all groups.
    """

    title: str
    series: Sequence[str]
    groups: Sequence[tuple[str, Sequence[str]]]
    panels: Sequence[Panel]

    @property
    def labels(self) -> int:
        """Return the width of the labels' column, px, for a wide font."""
        return 20 + 8 * max(len(name) for _, names in self.groups for name in names)

    def svg(self) -> str:
        top, case = 78 + 16 * len(self.series), PITCH * len(self.series) + CASE
        headings, places, y = [], [], top
        for heading, names in self.groups:
            headings.append((heading, y - 8))
            places += [(name, y + n * case) for n, name in enumerate(names)]
            y += len(names) * case + GROUP
        height = y + 4
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
            'font-family="Helvetica, Arial, sans-serif">',
            f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
            text(12, 24, self.title, 14, weight=700),
            *_legend(self.series),
        ]
        middle = PITCH * len(self.series) // 2 + 3
        parts += [text(self.labels - 8, y + middle, name, 13, anchor="end") for name, y in places]
        parts += [text(12, y, heading, 13, FAINT) for heading, y in headings if heading]
        width = (WIDTH - self.labels - END - GAP * (len(self.panels) - 1)) // len(self.panels)
        for n, panel in enumerate(self.panels):
            x = self.labels + n * (width + GAP)
            parts.append(text(x, top - 24, panel.title, 12, FAINT))
            scale = width / max(value for row in panel.values for value in row if value is not None)
            for (_, y), row in zip(places, panel.values, strict=True):
                parts += _bars(x, y, scale, row, panel.form)
        return "\n".join([*parts, "</svg>"]) + "\n"

    def table(self) -> str:
        """Return the same numbers in Markdown, a column for each panel and series."""
        heads = [f"{panel.title.partition(';')[0]}: {name}" for panel in self.panels for name in self.series]
        lines = ["| | " + " | ".join(heads) + " |", "|---" * (1 + len(heads)) + "|"]
        for n, name in enumerate(name for _, names in self.groups for name in names):
            cells = [
                "–" if value is None else panel.form.format(value) for panel in self.panels for value in panel.values[n]
            ]
            lines.append(f"| {name} | {' | '.join(cells)} |")
        return "\n".join(lines)


def _bars(x: int, y: int, scale: float, row: Sequence[float | None], form: str) -> Iterator[str]:
    for i, (value, colour) in enumerate(zip(row, COLOURS, strict=False)):
        if value is not None:
            length = max(1.0, scale * value)
            yield f'<rect x="{x}" y="{y + i * PITCH}" width="{length:.1f}" height="{BAR}" fill="{colour}"/>'
            yield text(x + length + 5, y + i * PITCH + BAR - 2, form.format(value), 12)


def _legend(series: Sequence[str]) -> Iterator[str]:
    for i, (colour, name) in enumerate(zip(COLOURS, series, strict=False)):
        yield f'<rect x="12" y="{33 + 16 * i}" width="12" height="12" fill="{colour}"/>'
        yield text(30, 44 + 16 * i, name, 12)


def text(x: float, y: int, words: str, size: int, colour: str = INK, anchor: str = "start", weight: int = 400) -> str:
    return (
        f'<text x="{x:.1f}" y="{y}" font-size="{size}" font-weight="{weight}" fill="{colour}" text-anchor="{anchor}">'
        f"{words}</text>"
    )
