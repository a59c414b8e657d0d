"""The cost of a trainable bias: README's picture and table, generated from a results file.

    python -m tilewise_tools.benchmarks.gains     # after a new run: writes docs/images/gains.svg and README.md

Both show the time of a forward and backward and their working memory at S=4096, compared with `OTHER` in the same run.
The picture consists of rectangles and text, so that equal results give equal bytes; a test compares it with the file.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tilewise_tools.bench.results import PASSES, Results, Row, read

ROOT = Path(__file__).parents[3]
FILE = ROOT / "benchmarks" / "results" / "h200_slots_bias.json"
PICTURE = ROOT / "docs" / "images" / "gains.svg"
README = ROOT / "README.md"
BEGIN, END = "<!-- tilewise_tools.benchmarks.gains: begin -->", "<!-- tilewise_tools.benchmarks.gains: end -->"
OURS, OTHER, OTHER_NAME = "tilewise-hopper", "flex", "FlexAttention"
# Label of each case, and its name with the head dimension.
CASES = {
    "no bias": "dense D{} full S4096",
    "bias (1, H, S, S)": "bias 1HMN D{} S4096",
    "bias (B, H, S, S)": "bias BHMN D{} S4096",
}
HEAD_DIMS = (128, 64)

INK, FAINT, LINE = "#1f2937", "#6b7280", "#e5e7eb"
COLOURS = {OURS: "#c2410c", OTHER: "#9fb8d4"}
WIDTH, LABELS, PANEL, GAP = 720, 140, 220, 80  # px: total, labels of cases, bars of a panel, space for numbers
TOP, BAR, CASE, GROUP = 86, 12, 36, 22  # px: above the bars, a bar, a case, between head dimensions


def row(results: Results, case: str, provider: str) -> Row:
    (found,) = [row for row in results.of(case) if row.provider == provider and row.outcome == "measured"]
    return found


def milliseconds(row: Row) -> float:
    """Return the sum of the median times of forward and backward."""
    seconds = [timing.median_s for which in PASSES if (timing := row.timing(which)) is not None]
    assert len(seconds) == len(PASSES), row.case
    return 1e3 * sum(seconds)


def mebibytes(row: Row) -> float:
    assert row.memory_bytes is not None, row.case
    return row.memory_bytes / 2**20


def picture(results: Results) -> str:
    """Return an SVG with two panels of bars."""
    panels = (("Forward + backward, ms", milliseconds, "{:.1f}"), ("Working memory, MiB", mebibytes, "{:.0f}"))
    height = TOP + len(HEAD_DIMS) * (len(CASES) * CASE + GROUP) + 4
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        'font-family="Helvetica, Arial, sans-serif">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        text(
            12, 24, f"What a trainable bias costs, {results.device['name']}, S = 4096, {dtype(results)}", 15, weight=700
        ),
        *legend(),
    ]
    for name, y in places():
        parts.append(text(LABELS - 8, y + BAR + 5, name, 13, anchor="end"))
    for group, head_dim in enumerate(HEAD_DIMS):
        case = results.case(CASES["no bias"].format(head_dim))
        y = TOP + group * (len(CASES) * CASE + GROUP) - 8
        parts.append(text(12, y, f"B = {case.batch}, H = {case.heads}, D = {head_dim}", 13, FAINT))
    for panel, (title, value, form) in enumerate(panels):
        x = LABELS + panel * (PANEL + GAP)
        most = max(value(row(results, case, which)) for case in names() for which in COLOURS)
        parts.append(text(x, TOP - 30, f"{title}; shorter is better", 13, FAINT))
        for (_, y), case in zip(places(), names(), strict=True):
            for i, (provider, colour) in enumerate(COLOURS.items()):
                found = value(row(results, case, provider))
                length = max(1.0, PANEL * found / most)
                parts.append(
                    f'<rect x="{x}" y="{y + i * (BAR + 2)}" width="{length:.1f}" height="{BAR}" fill="{colour}"/>'
                )
                parts.append(text(x + length + 5, y + i * (BAR + 2) + BAR - 2, form.format(found), 12))
    return "\n".join([*parts, "</svg>"]) + "\n"


def names() -> list[str]:
    return [case.format(head_dim) for head_dim in HEAD_DIMS for case in CASES.values()]


def places() -> Iterator[tuple[str, int]]:
    """Yield the label of each case and the y coordinate of its bars, in px from the top."""
    for group in range(len(HEAD_DIMS)):
        for n, name in enumerate(CASES):
            yield name, TOP + group * (len(CASES) * CASE + GROUP) + n * CASE


def legend() -> Iterator[str]:
    for i, (colour, name) in enumerate(zip(COLOURS.values(), ("tilewise", OTHER_NAME), strict=True)):
        yield f'<rect x="12" y="{33 + 16 * i}" width="12" height="12" fill="{colour}"/>'
        yield text(30, 44 + 16 * i, name, 12)


def text(x: float, y: float, words: str, size: int, colour: str = INK, anchor: str = "start", weight: int = 400) -> str:
    return (
        f'<text x="{x:.1f}" y="{y}" font-size="{size}" font-weight="{weight}" fill="{colour}" text-anchor="{anchor}">'
        f"{words}</text>"
    )


def dtype(results: Results) -> str:
    (only,) = {results.case(case).dtype for case in names()}
    return only


def table(results: Results) -> str:
    """Return README's table of speedups and working memory."""
    head = " | ".join(f"D={d}: forward, backward | MiB, tilewise and {OTHER_NAME}" for d in HEAD_DIMS)
    lines = [f"| S=4096 | {head} |", f"|---|{2 * len(HEAD_DIMS) * '---|'}"]
    for name, case in CASES.items():
        cells = []
        for head_dim in HEAD_DIMS:
            ours, other = (row(results, case.format(head_dim), provider) for provider in COLOURS)
            ratios = [
                b.median_s / a.median_s
                for which in PASSES
                if (a := ours.timing(which)) is not None and (b := other.timing(which)) is not None
            ]
            cells += [
                ", ".join(f"{x:.2f}" for x in ratios),
                " and ".join(f"{mebibytes(x):,.0f}" for x in (ours, other)),
            ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def insert(document: str, made: str) -> str:
    """Return the document with ``made`` between its markers."""
    before, rest = document.split(BEGIN)
    return f"{before}{BEGIN}\n\n{made}\n\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    found = read(FILE)
    PICTURE.write_text(picture(found), encoding="utf-8")
    README.write_text(insert(README.read_text(encoding="utf-8"), table(found)), encoding="utf-8")
