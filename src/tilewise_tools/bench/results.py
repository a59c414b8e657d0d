"""Results of a run: dataclasses, their JSON, and derived numbers."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from tilewise.explanation.work import Limits, Work, backward_work, forward_work
from tilewise_tools.bench import operators, packed, sparse, windows
from tilewise_tools.bench.cases import AnyCase, Case
from tilewise_tools.bench.providers import is_ours

SCHEMA = 1
Pass = Literal["forward", "backward"]
_DTYPES = ("float16", "bfloat16", "float32", "float64")
PASSES: tuple[Pass, ...] = ("forward", "backward")


class ResultsError(ValueError):
    """A file does not contain results of this schema; the message names the file and the reason."""


@dataclass(frozen=True)
class Timing:
    """Time of one step in seconds: median, 20th and 80th percentile of ``repeats``.

    `timing.over_rounds` defines the fields for several rounds.
    """

    median_s: float
    low_s: float
    high_s: float
    repeats: int


@dataclass(frozen=True)
class Calibration:
    """Limits measured in the run: FLOP/s of a matmul per dtype; bytes/s of a copy, read + written."""

    matmul_flops: dict[str, float]
    copy_bytes_per_second: float


@dataclass(frozen=True)
class Row:
    """One provider on one case.

    Attributes:
        outcome: "measured"; "failed", also if results are wrong; "declined", not supported; "not run", no time left.
        reason: the reason of any outcome except "measured".
        errors: of o and of each gradient, see `reference.errors`; NaN (null in JSON) if not finite.
        memory_bytes: peak of a forward and backward beyond inputs, output and gradients.
        first_call_s: preparation, first forward and first backward, with compilation unless cached on disk.
        host_s: host time of a forward; only for small cases.
        host_both_s: host time of a forward and backward.
        lists_s: additional time of a forward and backward with a new tile mask.
    """

    case: str
    provider: str
    outcome: Literal["measured", "failed", "declined", "not run"]
    reason: str | None = None
    errors: dict[str, float] = field(default_factory=dict)
    forward: Timing | None = None
    backward: Timing | None = None
    memory_bytes: int | None = None
    first_call_s: float | None = None
    host_s: float | None = None
    host_both_s: float | None = None
    lists_s: float | None = None

    def timing(self, which: Pass) -> Timing | None:
        return self.forward if which == "forward" else self.backward


@dataclass(frozen=True)
class Results:
    """One run on one machine.

    Attributes:
        commit: commit of tilewise; ``changed_files`` differ from it.
        date: start of the run, ISO 8601, UTC.
        device: type and name; of a GPU driver, compute capability and memory; of a CPU threads, cores and the load
            before the run (with a load above zero, times are unreliable).
        versions: of Python and of each package in use.
        settings: options of the run.
        unavailable: providers that cannot run on this machine, with reasons.
    """

    commit: str
    changed_files: list[str]
    date: str
    device: dict[str, Any]
    versions: dict[str, str]
    settings: dict[str, Any]
    unavailable: dict[str, str]
    calibration: Calibration
    cases: list[AnyCase]
    rows: list[Row] = field(default_factory=list)

    def case(self, name: str) -> AnyCase:
        return next(case for case in self.cases if case.name == name)

    def of(self, case: str) -> list[Row]:
        return [row for row in self.rows if row.case == case]

    def work(self, case: AnyCase, which: Pass) -> Work:
        """Return FLOPs (of visible pairs; backward = 2.5 × forward) and the minimum memory traffic in bytes."""
        if not isinstance(case, Case):
            return case.work(which)
        problem = case.problem(self.device["type"], None)
        work = forward_work(problem) if which == "forward" else backward_work(problem)
        if case.mask is not None:
            pairs = sparse.pairs(case.mask, case.queries, case.keys, case.causal) * case.batch * case.heads
            work = replace(work, flops=(4 if which == "forward" else 10) * case.head_dim * pairs)
        return work

    def flops(self, row: Row, which: Pass) -> float | None:
        """Return FLOP/s at the median time; None if the pass was not measured."""
        timing = row.timing(which)
        return None if timing is None else self.work(self.case(row.case), which).flops / timing.median_s

    def limits(self, dtype: str) -> Limits:
        """Return the limits for ``dtype``, by the fastest product in it or a wider dtype.

        A CPU may be faster in a wider dtype, since it may convert 16-bit numbers first.
        """
        size = getattr(torch, dtype).itemsize
        rates = [x for name, x in self.calibration.matmul_flops.items() if getattr(torch, name).itemsize >= size]
        return Limits(max(rates), self.calibration.copy_bytes_per_second, "calibration")

    def share(self, row: Row, which: Pass) -> float | None:
        """Return the minimum time of the calibrated device divided by the measured time; 1 is the limit."""
        timing, case = row.timing(which), self.case(row.case)
        return None if timing is None else self.limits(case.dtype).seconds(self.work(case, which)) / timing.median_s

    def best_other(self, row: Row, which: Pass) -> Row | None:
        """Return the case's fastest row by another library; tilewise's backends count as one library."""
        others = [
            other
            for other in self.of(row.case)
            if other.timing(which) is not None
            and other.provider != row.provider
            and not (is_ours(other.provider) and is_ours(row.provider))
        ]
        return min(others, key=lambda other: _median(other, which), default=None)

    def ratio(self, row: Row, which: Pass) -> float | None:
        """Return the speedup over `best_other`; None if either was not measured."""
        other = self.best_other(row, which)
        if other is None or row.timing(which) is None:
            return None
        return _median(other, which) / _median(row, which)

    def best_of_ours(self, case: str, which: Pass) -> Row | None:
        rows = (row for row in self.of(case) if is_ours(row.provider) and row.timing(which) is not None)
        return min(rows, key=lambda row: _median(row, which), default=None)


def _median(row: Row, which: Pass) -> float:
    timing = row.timing(which)
    assert timing is not None
    return timing.median_s


def write(results: Results, path: Path) -> None:
    document = {"schema": SCHEMA, **asdict(results)}
    for row in document["rows"]:  # errors may be NaN, which JSON does not have
        row["errors"] = {name: error if math.isfinite(error) else None for name, error in row["errors"].items()}
    write_document(document, path)


def write_document(document: dict[str, Any], path: Path) -> None:
    """Write JSON to ``path`` atomically: a killed run leaves the old file intact."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(part, path)


def read(path: Path) -> Results:
    """Return the results in ``path``. Raise OSError, or ResultsError if it contains something else."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ResultsError(f"{path}: not JSON: {error}") from None
    schema = document.pop("schema", None) if isinstance(document, dict) else None
    if schema != SCHEMA:
        found = "none" if schema is None else repr(schema)
        raise ResultsError(f"{path}: not results of tilewise bench: schema {SCHEMA} is needed, found {found}")
    try:
        results = _results(document)
        return _checked(results)
    except KeyError as error:
        raise ResultsError(f"{path}: damaged results: {error} is missing") from None
    except (TypeError, AttributeError, ValueError) as error:
        raise ResultsError(f"{path}: damaged results: {error}") from None


def _results(document: dict[str, Any]) -> Results:
    cases = [_case(case) for case in document.pop("cases")]
    rows = [
        Row(**{**row, **{which: row[which] and Timing(**row[which]) for which in PASSES}, "errors": _errors(row)})
        for row in document.pop("rows")
    ]
    return Results(**{**document, "calibration": Calibration(**document["calibration"])}, cases=cases, rows=rows)


def _errors(row: dict[str, Any]) -> dict[str, float]:
    return {name: math.nan if error is None else error for name, error in row["errors"].items()}


def _case(fields: dict[str, Any]) -> AnyCase:
    """Return the case of JSON fields; cases of attention have no field "operator"."""
    operator = fields.get("operator", Case.operator)
    if operator == Case.operator:
        return Case(**{**fields, "bias": fields["bias"] and tuple(fields["bias"])})
    known = {
        "softmax": operators.SoftmaxCase, "matmul": operators.MatmulCase, "varlen": packed.PackedCase,
        "windows": windows.WindowCase,
    }  # fmt: skip
    return known[operator](**fields)


def _checked(results: Results) -> Results:
    """Raise ValueError unless numbers are positive and all named cases exist; later code relies on it."""
    names = {case.name for case in results.cases}
    numbers: list[tuple[str, float]] = [("copy_bytes_per_second", results.calibration.copy_bytes_per_second)]
    numbers += [(f"matmul_flops of {name}", x) for name, x in results.calibration.matmul_flops.items()]
    for row in results.rows:
        if row.case not in names:
            raise ValueError(f"a row names the case {row.case!r}, which is not among the cases")
        numbers += [
            (f"{row.case}, {row.provider}, {which}", timing.median_s)
            for which in PASSES
            if (timing := row.timing(which)) is not None
        ]
    for case in results.cases:
        if case.dtype not in results.calibration.matmul_flops:
            raise ValueError(f"there is no calibration for {case.dtype}")
    for name in results.calibration.matmul_flops:
        if name not in _DTYPES:
            raise ValueError(f"a calibration is for {name!r}, which is not a dtype")
    for name, number in numbers:
        if isinstance(number, bool) or not isinstance(number, (int, float)) or not number > 0:
            raise ValueError(f"{name}: not a positive number: {number!r}")
    return results


def in_order(results: Results) -> list[AnyCase]:
    """Return the cases grouped by family, in the order of the run, and sorted by length within a family."""
    families = list(dict.fromkeys(case.family for case in results.cases))
    return sorted(results.cases, key=lambda case: (families.index(case.family), case.keys))


def left_out(providers: Iterable[str]) -> str:
    """Return the line for ``providers`` that need a CUDA device where there is none; "" without any."""
    names = list(dict.fromkeys(providers))
    return f"left out, for want of a CUDA device: {', '.join(names)}" if names else ""


def provider_names(rows: Iterable[Row], keep: Callable[[Row], bool] = lambda row: True) -> list[str]:
    return list(dict.fromkeys(row.provider for row in rows if keep(row)))
