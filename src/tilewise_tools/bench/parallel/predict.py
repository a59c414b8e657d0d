"""Predict a run's causal cases on other numbers of ranks from its measured speeds, by `scaling`.

The run's own number of ranks is predicted too, next to the measured time, to show the accuracy.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tilewise_tools.bench.parallel.cases import ParallelCase
from tilewise_tools.bench.parallel.results import ONE, ParallelResults
from tilewise_tools.bench.parallel.scaling import Machine, Prediction, predict, predict_two_axes

RANKS = (2, 4, 8, 64)
# The transfer rate of each method. Gradients of gathered keys are assumed to be scattered as fast as keys are gathered.
_RATES = {"all_gather": "all_gather", "ring": "ring", "all_to_all": "all_to_all"}


@dataclass(frozen=True)
class Scaled:
    """A prediction, and ``measured_s``, the run's time of this case, method and number of ranks, if any."""

    case: str
    prediction: Prediction
    measured_s: float | None


def machine_of(results: ParallelResults, case: ParallelCase, across: float | None = None) -> Machine | None:
    """Return the speeds that the run measured, or None without a measurement on one process.

    ``across``: upper limit of the rates in bytes/s, for ranks on different hosts.
    """
    one = results.row(case.name, ONE)
    if one is None or one.forward is None or one.backward is None:
        return None
    rates = {method: getattr(results.transfers, name) for method, name in _RATES.items()}
    if across is not None:
        rates = {method: min(rate, across) for method, rate in rates.items()}
    forward = case.flops * 4 / 14
    return Machine(
        forward / one.forward.median_s, 2.5 * forward / one.backward.median_s, rates, results.transfers.latency_s,
        _efficiency(results, case),
    )  # fmt: skip


def _efficiency(results: ParallelResults, case: ParallelCase) -> float:
    """Return the best method's efficiency without transfers, relative to one process; 1 if not measured."""
    one = results.row(case.name, ONE)
    quiet = [row.silent.median_s for row in results.rows if row.case == case.name and row.silent is not None]
    if one is None or one.both is None or not quiet:
        return 1.0
    return one.both.median_s / (results.ranks * min(quiet))


def scaled(results: ParallelResults, across: float | None = None, within: int = 8) -> list[Scaled]:
    """Return predictions for all causal cases; ``across`` applies beyond ``within`` ranks, one host."""
    found = []
    for case in results.cases:
        if case.kind != "causal":
            continue
        for ranks in sorted({*RANKS, results.ranks}):
            machine = machine_of(results, case, across if ranks > within else None)
            if machine is None or case.length % (2 * ranks):
                continue
            shapes, dtype = case.shapes(), getattr(torch, case.dtype)
            q, k, v = (torch.empty(shapes[name], dtype=dtype, device="meta") for name in "qkv")
            for x in predict(q, k, v, ranks, machine, causal=True, load_balancer="head_tail"):
                row = results.row(case.name, x.method) if ranks == results.ranks else None
                measured = None if row is None or row.both is None else row.both.median_s
                found.append(Scaled(case.name, x, measured))
            inside = min(within, ranks // 2, case.kv_heads)
            if ranks >= 4 and ranks % inside == 0 and case.kv_heads % inside == case.heads % inside == 0:
                near = machine_of(results, case)
                assert near is not None
                x = predict_two_axes(
                    q, k, v, ranks // inside, inside, near, causal=True, load_balancer="head_tail",
                    across_rate=machine.rates["ring"],
                )  # fmt: skip
                row = results.row(case.name, x.method) if ranks == results.ranks else None
                found.append(Scaled(case.name, x, None if row is None or row.both is None else row.both.median_s))
    return found


def table(results: ParallelResults, across: float | None = None) -> str:
    lines = [
        f"predicted from {results.ranks} × {results.devices[0]}, commit {results.commit[:12]}",
        f"{'case':16} {'method':12} {'ranks':>5} {'ms':>9} {'of ideal':>8} {'exposed':>8} {'measured ms':>12}",
    ]
    for x in scaled(results, across):
        p = x.prediction
        measured = "" if x.measured_s is None else f"{1e3 * x.measured_s:12.2f}"
        numbers = f"{1e3 * p.seconds:9.2f} {p.of_ideal:8.3f} {1e3 * p.exposed_s:8.2f}"
        lines.append(f"{x.case:16} {p.method:12} {p.ranks:5} {numbers} {measured}".rstrip())
    return "\n".join(lines)
