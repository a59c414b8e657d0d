"""What came out of a run: dataclasses, their JSON, and the numbers that are derived from them."""

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
    """A file that does not hold results of this schema; says which file and why."""


@dataclass(frozen=True)
class Timing:
    """Seconds of one step: the median, the 20th and the 80th percentile of ``repeats``; of several rounds see
    `timing.over_rounds`."""

    median_s: float
    low_s: float
    high_s: float
    repeats: int


@dataclass(frozen=True)
class Calibration:
    """What the device did in the same run: FLOP/s of a matrix product by dtype, bytes/s of a copy, read and written."""

    matmul_flops: dict[str, float]
    copy_bytes_per_second: float


@dataclass(frozen=True)
class Row:
    """One provider on one case.

    Attributes:
        outcome: "measured"; "failed", also for a wrong answer; "declined", not tried; "not run", for want of time.
        reason: of every outcome but "measured".
        errors: of o and of each gradient, as `reference.errors` defines them; NaN, null in JSON, where not finite.
        memory_bytes: peak of a forward and backward beyond inputs, output and gradients.
        first_call_s: preparation, and the first forward and backward: compilation where caches on disk lack it.
        host_s: seconds that a forward keeps the host busy; of small cases only.
        host_both_s: the same of a forward and backward.
        lists_s: what a forward and backward of a mask by tiles take longer where the mask comes for the first time.
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
        commit: of tilewise, with ``changed_files`` that differ from it.
        date: ISO 8601, UTC, of the start.
        device: type, name, and what else tells it from others (driver, compute capability, memory; threads, cores, and
            the load that other programs were before the run: above zero, a CPU's times say little).
        versions: of Python and of each package that took part.
        settings: of the run.
        unavailable: providers that cannot run on this machine, and why.
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
        """FLOPs (of visible pairs; a backward has 2.5 times a forward's) and the least traffic in bytes."""
        if not isinstance(case, Case):
            return case.work(which)
        problem = case.problem(self.device["type"], None)
        work = forward_work(problem) if which == "forward" else backward_work(problem)
        if case.mask is not None:
            pairs = sparse.pairs(case.mask, case.queries, case.keys, case.causal) * case.batch * case.heads
            work = replace(work, flops=(4 if which == "forward" else 10) * case.head_dim * pairs)
        return work

    def flops(self, row: Row, which: Pass) -> float | None:
        """FLOP/s at the median; None if the pass was not measured."""
        timing = row.timing(which)
        return None if timing is None else self.work(self.case(row.case), which).flops / timing.median_s

    def limits(self, dtype: str) -> Limits:
        """By the fastest product in ``dtype`` or a wider one: a CPU may well convert 16-bit numbers first."""
        size = getattr(torch, dtype).itemsize
        rates = [x for name, x in self.calibration.matmul_flops.items() if getattr(torch, name).itemsize >= size]
        return Limits(max(rates), self.calibration.copy_bytes_per_second, "calibration")

    def share(self, row: Row, which: Pass) -> float | None:
        """The least time that the calibrated device needs, divided by the time taken: 1 is the limit."""
        timing, case = row.timing(which), self.case(row.case)
        return None if timing is None else self.limits(case.dtype).seconds(self.work(case, which)) / timing.median_s

    def best_other(self, row: Row, which: Pass) -> Row | None:
        """The fastest row of the same case by another make; all backends of tilewise are one make."""
        others = [
            other
            for other in self.of(row.case)
            if other.timing(which) is not None
            and other.provider != row.provider
            and not (is_ours(other.provider) and is_ours(row.provider))
        ]
        return min(others, key=lambda other: _median(other, which), default=None)

    def ratio(self, row: Row, which: Pass) -> float | None:
        """How many times as fast as `best_other`; None if one of the two was not measured."""
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
    for row in document["rows"]:  # a wrong answer may be NaN, which JSON has not
        row["errors"] = {name: error if math.isfinite(error) else None for name, error in row["errors"].items()}
    write_document(document, path)


def write_document(document: dict[str, Any], path: Path) -> None:
    """Write JSON to ``path``, in whole: a run that is killed meanwhile leaves the file as it was before."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(part, path)


def read(path: Path) -> Results:
    """The results in ``path``. Raises OSError, and ResultsError if it holds something else."""
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
    """Attention's cases do not name their operator."""
    operator = fields.get("operator", Case.operator)
    if operator == Case.operator:
        return Case(**{**fields, "bias": fields["bias"] and tuple(fields["bias"])})
    known = {
        "softmax": operators.SoftmaxCase, "matmul": operators.MatmulCase, "varlen": packed.PackedCase,
        "windows": windows.WindowCase,
    }  # fmt: skip
    return known[operator](**fields)


def _checked(results: Results) -> Results:
    """Numbers that are numbers, cases that exist: later code divides and looks up without asking."""
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
    """The cases for a reader: families together, by length, in the order in which the run met them."""
    families = list(dict.fromkeys(case.family for case in results.cases))
    return sorted(results.cases, key=lambda case: (families.index(case.family), case.keys))


def left_out(providers: Iterable[str]) -> str:
    """The line for ``providers`` that want a CUDA device where there is none; empty without any."""
    names = list(dict.fromkeys(providers))
    return f"left out, for want of a CUDA device: {', '.join(names)}" if names else ""


def provider_names(rows: Iterable[Row], keep: Callable[[Row], bool] = lambda row: True) -> list[str]:
    return list(dict.fromkeys(row.provider for row in rows if keep(row)))
