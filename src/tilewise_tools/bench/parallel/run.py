"""The loop over cases and providers, which every rank executes; rank 0 keeps the results.

Rank 0 alone measures one process, while the others wait. Every provider is checked on a short sequence before its
first measurement, and all ranks agree on whether it failed.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tilewise_tools.bench.parallel import measure, timeline
from tilewise_tools.bench.parallel.cases import ParallelCase, cases
from tilewise_tools.bench.parallel.results import ONE, ParallelResults, ParallelRow, line, timings, write
from tilewise_tools.bench.parallel.steps import BALANCER, ParallelProvider, alone, part_of, providers, sent_bytes
from tilewise_tools.bench.run import UsageError, origin, provider_errors
from tilewise_tools.bench.timing import Clock, calibrate, summary

_ROUNDS = {"cuda": 2, "cpu": 1}
_SECONDS = {"cuda": 0.8, "cpu": 0.2}  # of each measurement
# Allowed error: factor times the error of one process plus slack.
_FACTOR, _SLACK = 2.0, {"bfloat16": 1e-3, "float32": 1e-6}


@dataclass(frozen=True)
class ParallelRunOptions:
    """Options of a run.

    Attributes:
        cases, providers: substrings of the names to measure; empty for all.
        budget: seconds after which nothing new starts.
        commit: commit to record if there is no git checkout.
        quick: True for only the shortest sequences.
        json: file for the results, written after every case.
        plot: folder for timelines.
    """

    cases: tuple[str, ...] = ()
    providers: tuple[str, ...] = ()
    budget: float = 220.0
    commit: str = ""
    quick: bool = False
    json: Path | None = None
    plot: Path | None = None


def chosen(options: ParallelRunOptions, device: str, ranks: int) -> tuple[list[ParallelCase], list[ParallelProvider]]:
    """Return the selected cases and providers; raise a UsageError for an unknown name."""

    def choose(option: str, parts: tuple[str, ...], names: list[str]) -> set[str]:
        for part in parts:
            if not any(part in name for name in names):
                raise UsageError(option, f"nothing is called {part!r}; there are: {', '.join(names)}")
        return {name for name in names if not parts or any(part in name for part in parts)}

    known, crew = cases(device, ranks, options.quick), providers()
    wanted = choose("--cases", options.cases, [case.name for case in known])
    who = choose("--providers", options.providers, [provider.name for provider in crew])
    return [case for case in known if case.name in wanted], [x for x in crew if x.name in who]


@dataclass
class _Found:
    """Measurements so far of one provider on one case."""

    row: ParallelRow
    samples: list[measure.Sample] = field(default_factory=list)
    silent: list[measure.Sample] = field(default_factory=list)


def run(options: ParallelRunOptions, mesh: DeviceMesh, say: Callable[[str], None] = print) -> ParallelResults | None:
    """Measure on every rank of ``mesh``; return the results on rank 0, which calls ``say`` with each line."""
    found = _ParallelRun(options, mesh, say)
    found.measure_all()
    return found.results if found.team.rank == 0 else None


class _ParallelRun:
    def __init__(self, options: ParallelRunOptions, mesh: DeviceMesh, say: Callable[[str], None]) -> None:
        self.began = time.monotonic()
        self.options, self.team = options, measure.Team(mesh)
        self.say = say if self.team.rank == 0 else lambda words: None
        self.device, kind = self.team.device, self.team.device.type
        self.todo, self.crew = chosen(options, kind, self.team.size)
        self.own_mesh, self.silent_mesh = measure.quick_lanes(mesh), measure.silent(mesh)
        self.checked: dict[tuple[ParallelCase, str], ParallelRow] = {}
        name = torch.cuda.get_device_name(self.device) if kind == "cuda" else "CPU"
        self.say(f"calibration on {self.team.size} × {name}")
        self.results = ParallelResults(
            **origin(self.device, options.commit),
            settings={"cases": list(options.cases), "providers": list(options.providers), "budget": options.budget,
                      "quick": options.quick, "rounds": _ROUNDS[kind], "load_balancer": BALANCER,
                      "max_ctas": measure.MOST_CTAS if kind == "cuda" else None},
            ranks=self.team.size,
            devices=self.team.all(name),
            calibration=calibrate(Clock(self.device, 0.2), list({case.dtype: 0 for case in self.todo})),
            transfers=measure.transfers(self.team),
            cases=self.todo,
        )  # fmt: skip

    def spent(self) -> bool:
        """True if the budget is spent, by rank 0's clock."""
        return bool(self.team.tell(time.monotonic() - self.began > self.options.budget))

    def measure_all(self) -> None:
        """Measure all stages: tilewise on every case before PyTorch on any, in case the budget ends."""
        one = ParallelProvider(ONE, lambda case, x, mesh: alone(case, x), lambda case, mesh: None)
        for stage in sorted({x.stage for x in self.crew} | {one.stage}):
            crew = [x for x in (one, *self.crew) if x.stage == stage]
            for case in self.todo:
                self._case(case, crew)

    def _case(self, case: ParallelCase, crew: list[ParallelProvider]) -> None:
        found = {x.name: self._prepared(case, x) for x in crew}
        for turn in range(_ROUNDS[self.device.type]):
            for provider in crew:
                now = found[provider.name]
                long = any(both > measure.LONG for _, _, both in now.samples)
                if now.row.outcome != "measured" or (turn > 0 and (provider.once or long)):
                    continue
                if self.spent():
                    if turn == 0:
                        now.row = replace(now.row, outcome="not run", reason="the budget was spent")
                    continue
                self._guarded(now, partial(self._measure, case, provider, now, first=turn == 0))
        self._keep(case, list(found.values()))

    def _keep(self, case: ParallelCase, found: list[_Found]) -> None:
        for now in found:
            row = now.row
            if now.samples and row.outcome == "measured":
                row = replace(row, **timings(now.samples))  # type: ignore[arg-type]
                if now.silent:
                    row = replace(row, silent=summary([both for _, _, both in now.silent]))
            self.results.rows.append(row)
            self.say(line(self.results, row))
        if self.team.rank == 0 and self.options.json is not None:
            write(self.results, self.options.json)
        lines = [x for x in self.results.timelines if x.case == case.name]
        new = {now.row.provider for now in found} & {x.provider for x in lines}
        if self.team.rank == 0 and self.options.plot is not None and new:
            path = self.options.plot / f"timeline_{case.name.replace(' ', '_')}.png"
            title = f"{case.name}, {self.team.size} × {self.results.devices[0]}, a forward and backward"
            timeline.draw(lines, path, title)
            self.say(f"picture: {path}")

    def _guarded(self, now: _Found, work: Callable[[], None]) -> None:
        """Run ``work``; a failure on one rank counts as a failure on all."""
        words: tuple[str, str] | None = None
        try:
            work()
        except NotImplementedError as error:
            words = "declined", str(error)
        except provider_errors() as error:
            words = "failed", _words(error)
        fell = [(rank, *x) for rank, x in enumerate(self.team.all(words)) if x is not None]
        if fell:
            rank, outcome, reason = fell[0]
            now.row = replace(now.row, outcome=outcome, reason=f"rank {rank}: " * (outcome == "failed") + reason)

    # --- one provider on one case ---

    def _mesh(self, provider: ParallelProvider) -> DeviceMesh:
        return self.own_mesh if provider.ours else self.team.mesh

    def _prepared(self, case: ParallelCase, provider: ParallelProvider) -> _Found:
        """Return a row that is declined, or the result of the check on a short sequence."""
        reason = provider.declines(case, self.team.mesh)
        if reason is not None:
            return _Found(ParallelRow(case.name, provider.name, "declined", reason))
        short = case.small(self.team.size)
        known = self.checked.get((short, provider.name))
        if known is not None:  # a case with the same short sequence
            return _Found(replace(known, case=case.name))
        now = _Found(ParallelRow(case.name, provider.name, "measured"))
        if self.spent():
            now.row = replace(now.row, outcome="not run", reason="the budget was spent")
            return now
        self._guarded(now, partial(self._check, short, provider, now))
        self.checked[short, provider.name] = now.row
        return now

    def _check(self, case: ParallelCase, provider: ParallelProvider, now: _Found) -> None:
        whole, do = case.draw(self.device, 0)
        right = _results(measure.step_of(lambda x: alone(case, x, "reference"), _double(whole), do.double()))
        near = _results(measure.step_of(lambda x: alone(case, x), _copies(whole), do))
        begin = time.perf_counter()
        mine, part = self._shards(case, provider, whole), self._part(case, provider, do)
        with provider.context(case, self.team.mesh):
            found = _results(measure.step_of(lambda x: provider.prepare(case, x, self._mesh(provider)), mine, part))
        right, near = ([self._part(case, provider, x) for x in y] for y in (right, near))
        now.row = replace(now.row, errors=measure.errors(case, found, right), first_call_s=time.perf_counter() - begin)
        allowed = measure.errors(case, near, right)
        slack = _SLACK[case.dtype]
        wrong = {name: error for name, error in now.row.errors.items() if not error <= _FACTOR * allowed[name] + slack}
        if wrong:
            raise ValueError("wrong: " + ", ".join(f"{name} {error:.2g}" for name, error in wrong.items()))

    def _part(self, case: ParallelCase, provider: ParallelProvider, x: Tensor) -> Tensor:
        return x.detach() if provider.name == ONE else part_of(case, x.detach(), self.team.mesh)

    def _shards(self, case: ParallelCase, provider: ParallelProvider, x: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: self._part(case, provider, t).clone() for name, t in x.items()}

    def _measure(self, case: ParallelCase, provider: ParallelProvider, now: _Found, first: bool) -> None:
        team, one = self.team, provider.name == ONE
        if one:
            words: str | None = None
            row, taken = now.row, list[measure.Sample]()
            if team.rank == 0:
                try:
                    row, taken = self._alone(case, now.row, first)
                except provider_errors() as error:
                    words = _words(error)
            words, now.row, taken = team.tell((words, row, taken))
            if words is not None:
                raise RuntimeError(words)
            now.samples += taken
            return
        before = measure.held(self.device)
        x, do = case.draw(self.device, 1 + team.rank, team.size)
        step = measure.step_of(lambda x: provider.prepare(case, x, self._mesh(provider)), x, do)
        seconds = _SECONDS[self.device.type]
        with provider.context(case, team.mesh):
            taken = measure.samples(step, self.device, seconds, meet=team.meet, agreed=lambda n: min(team.all(n)))
            now.samples += measure.slowest(team.all(taken))
            if first:
                peak = measure.peak_bytes(step, self.device, before)
                now.row = replace(now.row, memory_bytes=None if peak is None else max(team.all(peak)))
                self._profile(case, provider, step, now)
        if provider.ours:
            quiet = step._replace(forward=provider.prepare(case, x, self.silent_mesh))
            stopped: tuple[type[Exception], ...] = (*provider_errors(), EOFError, pickle.UnpicklingError)
            try:
                taken = measure.samples(
                    quiet, self.device, seconds / 3, meet=team.meet, agreed=lambda n: min(team.all(n))
                )
            except stopped as error:  # without transfers, all ranks stop alike
                self.say(f"{case.name} {provider.name}: no time without transfers: {_words(error)}")
                taken = []
            now.silent += measure.slowest(team.all(taken))
            if first:
                now.row = replace(now.row, sent_bytes=sent_bytes(case, x, team.mesh, provider.name))

    def _alone(self, case: ParallelCase, row: ParallelRow, first: bool) -> tuple[ParallelRow, list[measure.Sample]]:
        before = measure.held(self.device)
        step = measure.step_of(lambda x: alone(case, x), *case.draw(self.device, 1))
        taken = measure.samples(step, self.device, _SECONDS[self.device.type])
        if first:
            row = replace(row, memory_bytes=measure.peak_bytes(step, self.device, before))
        return row, taken

    def _profile(self, case: ParallelCase, provider: ParallelProvider, step: measure.Step, now: _Found) -> None:
        self.team.meet()
        if self.team.rank > 0:
            step()
            return
        seen = timeline.record(lambda: step(), case.name, provider.name, self.device)
        now.row = replace(now.row, communication_s=seen.communication_s, alone_s=seen.exposed_s)
        self.results.timelines.append(seen)


def _results(step: measure.Step) -> list[Tensor]:
    o, grads = step()
    return [o, *grads]


def _double(x: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.double() for name, t in x.items()}


def _copies(x: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.clone() for name, t in x.items()}


def _words(error: Exception) -> str:
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].strip() if lines else ''}"[:300]
