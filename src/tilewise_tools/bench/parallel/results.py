"""Results of a run with several processes: dataclasses, their JSON and the table."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from tilewise_tools.bench.parallel.cases import ParallelCase
from tilewise_tools.bench.parallel.measure import Sample, Transfers
from tilewise_tools.bench.parallel.timeline import Timeline
from tilewise_tools.bench.results import Calibration, ResultsError, Timing, write_document
from tilewise_tools.bench.timing import summary

SCHEMA = 1
KIND = "context parallel"
ONE = "one process"


@dataclass(frozen=True)
class ParallelRow:
    """One provider on one case.

    Attributes:
        outcome: "measured"; "failed", also if results are wrong; "declined", not supported; "not run", no time left.
        errors: relative errors (norms) of o and of each gradient, for a short sequence.
        forward, backward, both: time of the slowest rank in each repetition.
        silent: like ``both``, but with transfers that do nothing.
        memory_bytes: largest peak of a rank, with inputs and gradients.
        sent_bytes: bytes sent by each rank in forward and backward, see `explain_context_parallel`.
        first_call_s: time of the first call, for a short sequence, with compilation unless cached on disk.
        communication_s: duration of transfers in one profiled step of rank 0.
        alone_s: the part of ``communication_s`` without concurrent computation.
    """

    case: str
    provider: str
    outcome: Literal["measured", "failed", "declined", "not run"]
    reason: str | None = None
    errors: dict[str, float] = field(default_factory=dict)
    forward: Timing | None = None
    backward: Timing | None = None
    both: Timing | None = None
    silent: Timing | None = None
    memory_bytes: int | None = None
    sent_bytes: tuple[int, int] | None = None
    first_call_s: float | None = None
    communication_s: float | None = None
    alone_s: float | None = None

    @property
    def exposed_s(self) -> float | None:
        """Time with transfers minus the time without, in seconds."""
        return None if self.both is None or self.silent is None else self.both.median_s - self.silent.median_s


@dataclass(frozen=True)
class ParallelResults:
    """One run on one machine; `tilewise_tools.bench.results.Results` defines commit to versions."""

    commit: str
    changed_files: list[str]
    date: str
    device: dict[str, Any]
    versions: dict[str, str]
    settings: dict[str, Any]
    ranks: int
    devices: list[str]
    calibration: Calibration
    transfers: Transfers
    cases: list[ParallelCase]
    rows: list[ParallelRow] = field(default_factory=list)
    timelines: list[Timeline] = field(default_factory=list)

    def row(self, case: str, provider: str) -> ParallelRow | None:
        return next((row for row in self.rows if (row.case, row.provider) == (case, provider)), None)

    def ideal(self, row: ParallelRow) -> float | None:
        """Return one process's time divided by N times the row's time; 1 is linear speedup."""
        one = self.row(row.case, ONE)
        if one is None or one.both is None or row.both is None:
            return None
        return one.both.median_s / (self.ranks * row.both.median_s)

    def memory_share(self, row: ParallelRow) -> float | None:
        one = self.row(row.case, ONE)
        if one is None or not one.memory_bytes or row.memory_bytes is None:
            return None
        return row.memory_bytes / one.memory_bytes


def timings(samples: list[Sample]) -> dict[str, Timing]:
    """Return the timings of forward, backward and both."""
    columns = zip(*samples, strict=True)
    return {name: summary(list(x)) for name, x in zip(("forward", "backward", "both"), columns, strict=True)}


def write(results: ParallelResults, path: Path) -> None:
    document = {"schema": SCHEMA, "kind": KIND, **asdict(results), "transfers": results.transfers._asdict()}
    for row in document["rows"]:  # errors may be NaN, which JSON does not have
        row["errors"] = {name: error if math.isfinite(error) else None for name, error in row["errors"].items()}
    write_document(document, path)


def read(path: Path) -> ParallelResults:
    """Return the results in ``path``, the first if it has several runs. Raise OSError or ResultsError."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ResultsError(f"{path}: not JSON: {error}") from None
    if isinstance(document, dict) and document.get("parts"):
        document = document["parts"][0]
    if not isinstance(document, dict) or (document.pop("schema", None), document.pop("kind", None)) != (SCHEMA, KIND):
        raise ResultsError(f"{path}: not results of tilewise bench --nproc of schema {SCHEMA}")
    try:
        times = ("forward", "backward", "both", "silent")
        rows = [
            ParallelRow(**{**row, **{name: row[name] and Timing(**row[name]) for name in times}})
            for row in document.pop("rows")
        ]
        lines = [
            Timeline(**{**x, "lanes": {lane: [(b, e) for b, e in y] for lane, y in x["lanes"].items()}})
            for x in document.pop("timelines")
        ]
        return ParallelResults(
            **{
                **document,
                "calibration": Calibration(**document["calibration"]),
                "transfers": Transfers(**document["transfers"]),
                "cases": [ParallelCase(**case) for case in document["cases"]],
            },
            rows=rows,
            timelines=lines,
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ResultsError(f"{path}: damaged results: {error}") from None


HEAD = (
    f"{'case':16} {'provider':26} {'forward':>9} {'backward':>9} {'both ms':>9} {'of ideal':>8} {'exposed':>8} "
    f"{'alone':>8} {'sent MiB':>12} {'memory':>7}"
)
FOOT = """
times: ms, medians of the slowest rank. of ideal: one process's time over N times this one's. exposed: time with
transfers minus time without. alone: time of transfers without concurrent kernels, in one profiled step of rank 0.
memory: peak of a rank over the peak of one process."""


def line(results: ParallelResults, row: ParallelRow) -> str:
    """Return one row of the table."""
    start = f"{row.case:16} {row.provider:26}"
    if row.both is None or row.forward is None or row.backward is None:
        return f"{start} {row.outcome}: {row.reason}"

    def number(x: float | None, form: str) -> str:
        return " " * int(form.split(".")[0]) if x is None else format(x, f"{form}f")

    ideal = None if row.provider == ONE else results.ideal(row)
    words = [number(1e3 * x.median_s, "9.2") for x in (row.forward, row.backward, row.both)]
    words += [number(ideal, "8.3")]
    words += [number(None if x is None else 1e3 * x, "8.2") for x in (row.exposed_s, row.alone_s)]
    words += [f"{'' if row.sent_bytes is None else ' + '.join(f'{x / 2**20:.0f}' for x in row.sent_bytes):>12}"]
    words += [number(results.memory_share(row), "7.3")]
    return f"{start} {' '.join(words)}".rstrip()


def table(results: ParallelResults) -> str:
    x = results.transfers
    rates = {"matmul TFLOP/s": max(results.calibration.matmul_flops.values()) / 1e12}
    rates["copy GB/s"] = results.calibration.copy_bytes_per_second / 1e9
    names = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "ring")
    rates |= {f"{name} GB/s": getattr(x, name) / 1e9 for name in names}
    speeds = ", ".join(f"{name} {rate:.4g}" for name, rate in rates.items())
    return "\n".join([
        f"{results.ranks} × {results.devices[0]}, tilewise {results.commit[:12]}, torch {results.versions['torch']}",
        f"{speeds}, latency {1e6 * x.latency_s:.3g} µs",
        "", HEAD, *(line(results, row) for row in results.rows), FOOT,
    ])  # fmt: skip
