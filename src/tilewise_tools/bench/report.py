"""Results as text: for the terminal, and in Markdown between two markers of a document."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from tilewise.quantities import number
from tilewise_tools.bench.packed import PackedCase
from tilewise_tools.bench.providers import is_ours, wants_cuda
from tilewise_tools.bench.results import PASSES, Pass, Results, Row, in_order, left_out, provider_names

ABSENT = "–"
NAME_WIDTH = len("torch-softmax-compiled")  # the longest name of a provider


def one_line(results: Results, row: Row) -> str:
    """Return one line for one provider on one case."""
    width = max(len(case.name) for case in results.cases)
    words = f"{row.case:{width}} {row.provider:{NAME_WIDTH}} "
    if row.outcome != "measured":
        return f"{words}{row.outcome}: {row.reason}"
    for which in PASSES:
        timing, flops, share = row.timing(which), results.flops(row, which), results.share(row, which)
        if timing is not None and flops is not None and share is not None:
            words += f"{which} {1e3 * timing.median_s:9.3f} ms {_speed_in(results, flops):>15} {share:4.0%}   "
    return f"{words}first call {row.first_call_s:.1f} s"


def heading(results: Results) -> str:
    """Return device, date, versions, commit and calibration, as a sentence."""
    device, calibration = results.device, results.calibration
    extra = [f"{name} {device[name]}" for name in ("driver", "threads", "cores", "load") if name in device]
    packages = ", ".join(f"{name} {version}" for name, version in results.versions.items())
    products = ", ".join(f"{_speed_in(results, x)} in {name}" for name, x in calibration.matmul_flops.items())
    copy = _speed_in(results, calibration.copy_bytes_per_second, "B/s")
    commit = results.commit[:12] or "unknown"
    changed = f" with {len(results.changed_files)} changed files" if results.changed_files else ""
    return (
        f"{device['name']} ({', '.join(extra)}), {results.date}; {packages}; commit {commit}{changed}. "
        f"Calibration in the same run: matrix product {products}; copy {copy}."
    )


def terminal(results: Results) -> str:
    """Return the table of a run with every provider, and what was not measured."""
    header, unit = ["case", "provider"], f"{_prefix(results)}FLOP/s"
    for which in PASSES:
        header += [f"{which} ms", unit, "limit", "x other"]
    header += ["MiB", "first s"]
    rows = []
    for case in in_order(results):
        for row in results.of(case.name):
            if row.outcome == "measured":
                cells = [cell for which in PASSES for cell in _speed(results, row, which)]
                rows.append([row.case, row.provider, *cells, _mebibytes(row), f"{row.first_call_s:.1f}"])
    lines = [heading(results), "", *(_aligned(header, rows) if rows else ["Nothing was measured."])]
    if rows:
        lines.append("limit: share of the calibrated device's limit.")
        lines.append("x other: speedup over the best other library.")
    host = [f"{row.provider} {1e6 * row.host_s:.0f} µs ({row.case})" for row in results.rows if row.host_s is not None]
    if host:
        lines.append("host time of a forward call: " + ", ".join(host))
    lists = [
        f"{row.provider} {1e3 * row.lists_s:.3f} ms ({row.case})" for row in results.rows if row.lists_s is not None
    ]
    if lists:
        lines.append("lists of visible tiles of a new mask, forward and backward: " + ", ".join(lists))
    lines += [f"share of the speed without bias: {words}" for words in _of_no_bias(results)]
    missing = not_measured(results)
    return "\n".join([*lines, *(["", "Not measured:"] if missing else []), *(f"  {line}" for line in missing)])


def _of_no_bias(results: Results) -> Iterator[str]:
    """Yield the speed of each packed case with a bias, relative to tilewise's fastest without it."""
    for row in results.rows:
        case = results.case(row.case)
        other = case.without_bias if isinstance(case, PackedCase) else None
        if other is None or not is_ours(row.provider) or other not in [x.name for x in results.cases]:
            continue
        shares = []
        for which in PASSES:
            mine, best = results.flops(row, which), results.best_of_ours(other, which)
            fastest = None if best is None else results.flops(best, which)
            if mine is not None and fastest is not None:
                shares.append(f"{which} {mine / fastest:.2f}")
        if shares:
            yield f"{row.provider} {', '.join(shares)} ({row.case})"


def not_measured(results: Results) -> list[str]:
    """Return a line for each provider and reason with its cases, and one for all that need a CUDA device."""
    wanting = [row.provider for row in results.rows if row.outcome == "declined" and wants_cuda(row.reason)]
    wanting += [name for name, reason in results.unavailable.items() if wants_cuda(reason)]
    lines = [left_out(wanting)] if wanting else []
    lines += [f"{name}: {reason}" for name, reason in results.unavailable.items() if name not in wanting]
    grouped: dict[tuple[str, str, str], list[str]] = {}
    for row in results.rows:
        if row.outcome != "measured" and not (row.provider in wanting and row.outcome in ("declined", "not run")):
            grouped.setdefault((row.provider, row.outcome, row.reason or ""), []).append(row.case)
    for (provider, outcome, reason), names in grouped.items():
        every = "every case" if len(names) == len(results.cases) else ", ".join(names)
        lines.append(f"{provider} {outcome}: {reason} ({every})")
    return lines


def markdown(results: Results, source: str, pictures: list[tuple[str, str]], brief: bool = False) -> str:
    """Return the measured part of a document.

    Args:
        source: the results' file, as named in the document.
        pictures: (text, path) of each picture, relative to the document.
        brief: only the first table, of tilewise beside the best other provider.
    """
    unit = f"{_prefix(results)}FLOP/s"
    parts = [f"`{source}`: {heading(results)}"]
    parts += [f"![{text}]({path})" for text, path in pictures]
    parts.append(
        f"{unit} count the pairs that causal leaves visible, 4·D for each in a forward and 2.5 times that in a "
        "backward. Limit: the least time that a device with this calibration needs for these FLOPs and for reading "
        "each input and writing each result once, divided by the time taken. ×: times as fast as the best other "
        "provider."
    )
    parts += ["### tilewise beside the best other provider", _ours(results)]
    slower = _slower(results)
    if slower:
        parts.append("Slower than the best other provider: " + "; ".join(slower) + ".")
    if brief:
        return "\n\n".join([*parts, f"`tilewise bench report {source}` prints the other tables."])
    parts += [f"### Every provider, {unit}, forward / backward", _matrix(results, lambda row: _both(results, row))]
    shares = _matrix(results, lambda row: _shares(results, row), ("softmax",))
    if shares:
        parts += ["### Softmax, share of the limit, forward / backward", shares]
    parts += ["### Working memory of a forward and backward, MiB", _matrix(results, _mebibytes)]
    parts += ["### Host time of a call, and time of the first call", _host(results)]
    missing = not_measured(results)
    if missing:
        parts += ["### Not measured", "\n".join(f"- {line}" for line in missing)]
    return "\n\n".join(parts)


def insert(document: str, name: str, text: str) -> str:
    """Return ``document`` with ``text`` between the markers of ``name``; ValueError without them."""
    begin, end = markers(name)
    if document.count(begin) != 1 or document.count(end) != 1 or document.index(begin) > document.index(end):
        raise ValueError(f"needs one line {begin!r} and, below it, one line {end!r}")
    before, rest = document.split(begin)
    return f"{before}{begin}\n\n{text}\n\n{end}{rest.split(end)[1]}"


def markers(name: str) -> tuple[str, str]:
    return f"<!-- tilewise bench report {name}: begin -->", f"<!-- tilewise bench report {name}: end -->"


def between(document: str, name: str) -> str:
    """Return the text between the markers of ``name``."""
    begin, end = markers(name)
    return document.split(begin)[1].split(end)[0].strip("\n")


def picture_names(results_path: Path) -> list[tuple[str, str]]:
    """Return (text, file name) of each picture of a results file, in the order of `plot.draw_all`."""
    stem = results_path.stem
    return [
        ("Forward: TFLOP/s against sequence length", f"{stem}-forward.png"),
        ("Backward: TFLOP/s against sequence length", f"{stem}-backward.png"),
        ("Roofline", f"{stem}-roofline.png"),
    ]


def _ours(results: Results) -> str:
    header, unit = ["case", "backend"], f"{_prefix(results)}FLOP/s"
    for which in PASSES:
        header += [f"{which}, ms", unit, "limit", "×", "best other"]
    rows = []
    for case in in_order(results):
        for row in results.of(case.name):
            if is_ours(row.provider) and row.outcome == "measured":
                cells = []
                for which in PASSES:
                    other = results.best_other(row, which) if row.timing(which) else None
                    cells += [*_speed(results, row, which), ABSENT if other is None else other.provider]
                rows.append([case.name, row.provider.removeprefix("tilewise-"), *cells])
    return _markdown_table(header, rows)


def _slower(results: Results) -> list[str]:
    found = []
    for case in in_order(results):
        for which in PASSES:
            row = results.best_of_ours(case.name, which)
            ratio = None if row is None else results.ratio(row, which)
            if row is not None and ratio is not None and ratio < 1:
                other = results.best_other(row, which)
                assert other is not None
                found.append(f"{case.name} {which} ({ratio:.2f} of {other.provider})")
    return found


def _matrix(
    results: Results,
    cell: Callable[[Row], str],
    operators: tuple[str, ...] = ("attention", "matmul", "windows", "varlen"),
) -> str:
    """Return a table for each operator: a row per case with a cell, a column per measured provider."""
    tables = []
    for operator in operators:
        cases = [case for case in in_order(results) if case.operator == operator]
        of_operator = {case.name for case in cases}
        rows = {(row.case, row.provider): row for row in results.rows if row.case in of_operator}
        names = provider_names(rows.values(), lambda row: row.outcome == "measured")
        lines = []
        for case in cases:
            found = [rows.get((case.name, name)) for name in names]
            cells = [ABSENT if row is None else cell(row) for row in found]
            if any(text != ABSENT for text in cells):
                lines.append([case.name, *cells])
        if lines:
            tables.append(_markdown_table(["case", *names], lines))
    return "\n\n".join(tables)


def _both(results: Results, row: Row) -> str:
    if row.outcome != "measured":
        return ABSENT if row.outcome == "declined" else row.outcome
    speeds = (results.flops(row, which) for which in PASSES)
    return " / ".join(ABSENT if x is None else _scaled(results, x) for x in speeds)


def _shares(results: Results, row: Row) -> str:
    if row.outcome != "measured":
        return ABSENT if row.outcome == "declined" else row.outcome
    shares = (results.share(row, which) for which in PASSES)
    return " / ".join(ABSENT if x is None else f"{x:.0%}" for x in shares)


def _host(results: Results) -> str:
    names = [case.name for case in results.cases if case.host]
    header = ["provider", *(f"{name}: forward / both, µs" for name in names), "first call, s: median / most"]
    lines = []
    for provider in provider_names(results.rows, lambda row: row.outcome == "measured"):
        rows = {row.case: row for row in results.rows if row.provider == provider and row.outcome == "measured"}
        cells = [ABSENT] * len(names)
        for n, name in enumerate(names):
            if name in rows and rows[name].host_s is not None and rows[name].host_both_s is not None:
                cells[n] = f"{1e6 * (rows[name].host_s or 0):.0f} / {1e6 * (rows[name].host_both_s or 0):.0f}"
        first = sorted(row.first_call_s or 0.0 for row in rows.values())
        lines.append([provider, *cells, f"{first[len(first) // 2]:.1f} / {first[-1]:.1f}"])
    return _markdown_table(header, lines)


def _speed(results: Results, row: Row, which: Pass) -> list[str]:
    """Return cells: milliseconds, FLOP/s, share of the limit, ratio to the best other provider."""
    timing, flops = row.timing(which), results.flops(row, which)
    share, ratio = results.share(row, which), results.ratio(row, which)
    if timing is None or flops is None or share is None:
        return [ABSENT] * 4
    return [
        number(1e3 * timing.median_s),
        _scaled(results, flops),
        f"{share:.0%}",
        ABSENT if ratio is None else f"{ratio:.2f}",
    ]


def _prefix(results: Results) -> str:
    """Return the unit prefix of FLOP/s: T for a GPU, G for a CPU."""
    return "G" if results.device["type"] == "cpu" else "T"


def _scaled(results: Results, x: float) -> str:
    x /= {"G": 1e9, "T": 1e12}[_prefix(results)]
    return f"{x:.0f}" if x >= 100 else number(x)


def _speed_in(results: Results, x: float, unit: str = "FLOP/s") -> str:
    return f"{_scaled(results, x)} {_prefix(results)}{unit}"


def _mebibytes(row: Row) -> str:
    return ABSENT if row.memory_bytes is None else str(round(row.memory_bytes / 2**20))


def _aligned(header: list[str], rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[n]) for row in [header, *rows]) for n in range(len(header))]
    return [
        "  ".join(cell.ljust(width) if n < 2 else cell.rjust(width) for n, (cell, width) in enumerate(zipped))
        for zipped in (list(zip(row, widths, strict=True)) for row in [header, *rows])
    ]


def _markdown_table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
