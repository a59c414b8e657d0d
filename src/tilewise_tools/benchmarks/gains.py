"""The cost of a trainable bias: README's picture and table, generated from a results file.

    python -m tilewise_tools.benchmarks.gains     # after a new run: writes pictures of docs/images and README.md

Both show the time of a forward and backward and their working memory at S=4096, compared with `OTHER` in the same run.
The command also writes the pictures and tables of `figures`. Tests compare all of them with the files.
"""

from __future__ import annotations

from pathlib import Path

from tilewise_tools.bench.results import PASSES, Results, Row, read
from tilewise_tools.benchmarks import figures
from tilewise_tools.benchmarks.bars import Chart, Panel

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
    quantities = (("Forward + backward, ms", milliseconds, "{:.1f}"), ("Working memory, MiB", mebibytes, "{:.0f}"))
    panels = [
        Panel(
            f"{title}; shorter is better",
            form,
            [[value(row(results, case, provider)) for provider in (OURS, OTHER)] for case in names()],
        )
        for title, value, form in quantities
    ]
    groups = []
    for head_dim in HEAD_DIMS:
        case = results.case(CASES["no bias"].format(head_dim))
        groups.append((f"B = {case.batch}, H = {case.heads}, D = {head_dim}", list(CASES)))
    title = f"What a trainable bias costs, {results.device['name']}, S = 4096, {dtype(results)}"
    return Chart(title, ("tilewise", OTHER_NAME), groups, panels).svg()


def names() -> list[str]:
    return [case.format(head_dim) for head_dim in HEAD_DIMS for case in CASES.values()]


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
            ours, other = (row(results, case.format(head_dim), provider) for provider in (OURS, OTHER))
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
    for document, made in ((README, table(found)), (figures.TABLES, figures.tables())):
        document.write_text(insert(document.read_text(encoding="utf-8"), made), encoding="utf-8")
    for name, chart in figures.FIGURES.items():
        (figures.IMAGES / f"{name}.svg").write_text(chart().svg(), encoding="utf-8")
