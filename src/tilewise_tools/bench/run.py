"""The run: every case, every provider, the right answer before the clock."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import torch

import tilewise
from tilewise_tools.bench import operators, packed, reference
from tilewise_tools.bench.cases import AnyCase, Case, CaseInputs, cases
from tilewise_tools.bench.providers import Provider, Steps, is_ours, providers, wants_cuda
from tilewise_tools.bench.results import Results, Row, Timing, left_out
from tilewise_tools.bench.timing import Clock, calibrate, host_seconds, over_rounds, synchronize, working_bytes
from tilewise_tools.commands.spelling import DTYPES, dtype_name

# How often the providers of a case take turns. A GPU's clock moves by several per cent within a second; a CPU's times,
# which are longer, are those of one round.
_ROUNDS = {"cuda": 3, "cpu": 1}
# Built-in errors by which a provider says that it cannot.
_ERRORS = (
    RuntimeError,
    ValueError,
    TypeError,
    AssertionError,
    AttributeError,
    LookupError,
    ImportError,
    OSError,
    MemoryError,
)
_PACKAGES = ("torch", "triton", "cudnn", "flash_attn", "cutlass", "quack", "tvm_ffi")
_DISTRIBUTIONS = (
    "torch",
    "triton",
    "flash-attn-4",
    "nvidia-cutlass-dsl",
    "nvidia-cudnn-frontend",
    "cuequivariance-ops-torch-cu13",
)

AnyInputs = CaseInputs | operators.OperatorInputs | packed.PackedInputs


class UsageError(ValueError):
    """A mistake in how the run was asked for, in words for the user; ``option`` is at fault."""

    def __init__(self, option: str, message: str) -> None:
        super().__init__(f"{option}: {message}")
        self.option, self.message = option, message


class DeviceLost(RuntimeError):
    """The device answers no more: a provider's failure took it along."""


class Progress(Protocol):
    """Who is told how far the run is: of how many rows, without those that `left_out` speaks of."""

    def start(self, total: int, left_out: str) -> None: ...
    def working(self, what: str) -> None: ...
    def finished(self, results: Results, row: Row) -> None: ...


@dataclass(frozen=True)
class RunOptions:
    """
    Attributes:
        device: "cuda" or "cpu".
        quick: few cases, and half the time for each measurement.
        cases, providers: substrings of the names to take; empty takes all.
        budget: seconds after which nothing new is begun and the rest is "not run".
        commit: the commit that is measured, where there is no git.
    """

    device: str
    quick: bool = False
    cases: tuple[str, ...] = ()
    providers: tuple[str, ...] = ()
    budget: float = 540.0
    commit: str = ""


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def chosen_cases(options: RunOptions) -> list[AnyCase]:
    """Those whose name contains one of ``options.cases``; an exact name takes that case alone."""
    known = cases(options.device, options.quick)
    return _chosen("--cases", options.cases, {case.name: case for case in known})


def chosen_providers(options: RunOptions) -> list[Provider]:
    known = providers(torch.device(options.device))
    return _chosen("--providers", options.providers, {provider.name: provider for provider in known})


def _chosen(option: str, parts: tuple[str, ...], known: dict[str, Any]) -> list[Any]:
    wanted: set[str] = set()
    for part in parts:
        named = {part} if part in known else {name for name in known if _is_called(name, part)}
        if not named:
            raise UsageError(option, f"nothing is called {part!r}; there are: {', '.join(known)}")
        wanted |= named
    return [value for name, value in known.items() if not parts or name in wanted]


def _is_called(name: str, part: str) -> bool:
    """Whether ``part`` is a part of ``name``; a dtype is one as a whole word, in each of its spellings."""
    words = [dtype_name(word) or word for word in part.split(" ")]
    return words[0] in name.split() if len(words) == 1 and words[0] in DTYPES else " ".join(words) in name


def run(
    options: RunOptions,
    progress: Progress,
    save: Callable[[Results], None] = lambda results: None,
    todo: Sequence[AnyCase] | None = None,
) -> Results:
    """Measure; ``save`` is called with what there is after every case.

    Args:
        todo: other cases than those that ``options`` name.

    Raises:
        UsageError: for options that name nothing, or a device that is not there.
    """
    started = time.monotonic()
    if options.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device", "torch sees no CUDA device here; use --device cpu")
    chosen = chosen_cases(options) if todo is None else list(todo)
    computed = {case.operator for case in chosen}
    crew = [provider for provider in chosen_providers(options) if provider.operator in computed]
    if not crew:
        raise UsageError("--providers", f"none of those computes the cases, which are {' and '.join(sorted(computed))}")
    ready = {name: [p for p in crew if p.unavailable is None and p.operator == name] for name in computed}
    device = torch.device(options.device)
    rounds = _ROUNDS[device.type]
    unavailable = {provider.name: provider.unavailable for provider in crew if provider.unavailable is not None}
    absent = [(c.name, p.name) for c in chosen for p in ready[c.operator] if wants_cuda(p.declines(c))]
    silent = set(absent)
    wanting = [*(provider for _, provider in absent), *(name for name, why in unavailable.items() if wants_cuda(why))]
    progress.start(sum(len(ready[case.operator]) for case in chosen) - len(silent), left_out(wanting))
    progress.working("calibration")
    dtypes = list(dict.fromkeys([*(["float32"] if device.type == "cpu" else []), *(case.dtype for case in chosen)]))
    calibration = calibrate(Clock(device, 0.3), dtypes)
    results = Results(
        **origin(device, options.commit),
        settings={
            **asdict(options),
            "cases": list(options.cases),
            "providers": list(options.providers),
            "rounds": rounds,
        },
        unavailable=unavailable,
        calibration=calibration,
        cases=chosen,
    )
    clock = Clock(device, (0.05 if options.quick else 0.1) * (1 if device.type == "cuda" else 4))
    stopped: str | None = None
    for case in chosen:
        measured = _Measured(case, clock)
        rows: dict[str, Row] = {}
        for turn in range(rounds):
            for provider in ready[case.operator]:
                if (case.name, provider.name) not in silent:
                    progress.working(f"{case.name}: {provider.name}")
                if stopped is None and time.monotonic() - started > options.budget:
                    stopped = f"the budget of {options.budget:g} s was spent"
                try:
                    if turn == 0:
                        row = measured.row(provider) if stopped is None else _not_run(case, provider, stopped)
                    else:
                        row = rows[provider.name]
                        if stopped is None and row.outcome == "measured":
                            row = measured.again(provider, row)
                except DeviceLost as error:
                    stopped = str(error)
                    row = Row(case.name, provider.name, "failed", stopped)
                rows[provider.name] = row
                if turn == rounds - 1 and (case.name, provider.name) not in silent:
                    progress.finished(results, row)
        results.rows.extend(rows.values())
        save(results)
    return results


def _not_run(case: AnyCase, provider: Provider, reason: str) -> Row:
    return Row(case.name, provider.name, "not run", reason)


def ours_are_right(results: Results) -> bool:
    """No backend of tilewise failed."""
    return not any(is_ours(row.provider) and row.outcome == "failed" for row in results.rows)


class _Measured:
    """One case; its inputs and the right answer are made when the first provider needs them."""

    def __init__(self, case: AnyCase, clock: Clock) -> None:
        self.case, self.clock = case, clock
        self.inputs: AnyInputs | None = None
        self.right: dict[str, torch.Tensor] = {}
        self.rounds: dict[str, list[tuple[Timing, Timing | None]]] = {}  # of each provider forward and backward

    def row(self, provider: Provider) -> Row:
        reason = provider.declines(self.case)
        if reason is not None:
            return Row(self.case.name, provider.name, "declined", reason)
        device = self.clock.device
        if self.inputs is None:
            try:
                inputs = self.case.inputs(device)
                self.right = _exact(self.case, inputs)
                self.inputs = inputs
            except torch.OutOfMemoryError:
                self.right = {}
                torch.cuda.empty_cache()
                return _not_run(self.case, provider, "the inputs and the right answer do not fit in memory")
        return self._told(provider, self._measure)

    def again(self, provider: Provider, row: Row) -> Row:
        """The row with the times of one round more."""
        return self._told(provider, lambda provider, x: self._measure_again(provider, x, row))

    def _told(self, provider: Provider, measure: Callable[[Provider, Any], Row]) -> Row:
        """What ``measure`` finds, or why it failed."""
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            try:
                row = measure(provider, self.inputs)
            except provider_errors() as error:
                row = Row(self.case.name, provider.name, "failed", _reason(error, [str(w.message) for w in said]))
        if self.clock.device.type == "cuda":
            if row.outcome == "failed":
                _check_device(row)
            torch.cuda.empty_cache()
        return row

    def _time(self, provider: Provider, steps: Steps, row: Row) -> Row:
        """The row with the times of all rounds so far, after another one."""
        forward = self.clock.time(steps.forward)
        backward = None
        if self.case.backward:
            o = steps.forward()
            backward = self.clock.time(lambda: steps.backward(o))
        rounds = self.rounds.setdefault(provider.name, [])
        rounds.append((forward, backward))
        backwards = [timing for _, timing in rounds if timing is not None]
        return replace(
            row,
            forward=over_rounds([timing for timing, _ in rounds]),
            backward=over_rounds(backwards) if backwards else None,
        )

    def _measure_again(self, provider: Provider, x: AnyInputs, row: Row) -> Row:
        steps = provider.prepare(self.case, x)
        with steps.context():
            return self._time(provider, steps, row)

    def _measure(self, provider: Provider, x: AnyInputs) -> Row:
        case, clock = self.case, self.clock
        start = time.perf_counter()
        steps = provider.prepare(case, x)
        with steps.context():

            def both() -> tuple[torch.Tensor, ...]:
                o = steps.forward()
                return (o.detach(), *steps.backward(o)) if case.backward else (o.detach(),)

            found = both()
            synchronize(clock.device)
            first_call = time.perf_counter() - start
            found = steps.plain(found)
            names = ("o", *(f"d{name}" for name in x.names))
            # What another draws it drops by a generator of its own: nothing here says what is right.
            known = not isinstance(case, Case) or not case.dropout or is_ours(provider.name)
            errors = _errors(case, dict(zip(names, found, strict=False)), self.right) if known else {}
            del found
            row = Row(case.name, provider.name, "measured", errors=errors, first_call_s=first_call)
            wrong = reference.wrong(errors, case)
            if wrong:
                return replace(row, outcome="failed", reason=f"wrong: {wrong}")
            memory = working_bytes(both, clock.device)
            row = replace(self._time(provider, steps, row), memory_bytes=memory)
            if case.host:
                host = host_seconds(steps.forward, clock.device)
                row = replace(row, host_s=host, host_both_s=host_seconds(both, clock.device))
            if steps.renew is not None:
                row = replace(row, lists_s=_new_lists(both, steps.renew, clock))
        return row


def _new_lists(both: Callable[[], object], renew: Callable[[], None], clock: Clock) -> float:
    """Seconds that ``both`` takes longer after each ``renew``."""

    def anew() -> None:
        renew()
        both()

    kept = clock.time(both).median_s
    return clock.time(anew).median_s - kept


def _exact(case: AnyCase, x: Any) -> dict[str, torch.Tensor]:
    if isinstance(case, packed.PackedCase):
        return reference.exact_packed(case, x)
    return reference.exact(case, x) if isinstance(case, Case) else case.exact(x)


def _errors(case: AnyCase, found: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> dict[str, float]:
    if isinstance(case, packed.PackedCase):
        return reference.errors_packed(case, found, right)
    return reference.errors(found, right)


def provider_errors() -> tuple[type[Exception], ...]:
    """The errors of a provider that are reported as its failure.

    Beside built-in ones these are the classes that the providers' packages, as far as they are loaded, derive from
    Exception itself.
    """
    own = (cls for cls in Exception.__subclasses__() if cls.__module__.split(".")[0] in _PACKAGES)
    return (*_ERRORS, *own)


def _reason(error: Exception, warned: list[str]) -> str:
    """One line: the error, and what was warned of on the way, which is where SDPA says why."""
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0].strip() if lines else ''}"
    if "No available kernel" in text:
        causes = [w.split(" (Triggered internally")[0].strip() for w in warned]
        causes = [w for w in causes if not w.endswith(("not used because:", "runtime disabled."))]
        text = "no kernel for this call" + "".join(f"; {cause}" for cause in causes)
    return text[:300]


def _check_device(row: Row) -> None:
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        raise DeviceLost(f"the CUDA device was lost: {row.reason}; {str(error).splitlines()[0]}") from None


def origin(device: torch.device, commit: str = "") -> dict[str, Any]:
    """What numbers have to stand beside: `Results`' commit, changed_files, date, device and versions.

    Args:
        commit: the commit that is measured, where git does not know: of a copy, whose files are then those of the
            commit.
    """
    return {
        "commit": commit or _git("rev-parse", "HEAD"),
        "changed_files": [] if commit else _git("status", "--short").splitlines(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": describe_device(device),
        "versions": versions(),
    }


def describe_device(device: torch.device) -> dict[str, Any]:
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return {
            "type": "cuda",
            "name": properties.name,
            "driver": driver(),
            "capability": f"{properties.major}.{properties.minor}",
            "memory_bytes": properties.total_memory,
        }
    facts = {"type": "cpu", "name": cpu_name(), "threads": torch.get_num_threads(), "cores": os.cpu_count()}
    return facts | ({"load": round(os.getloadavg()[0], 1)} if hasattr(os, "getloadavg") else {})


def driver() -> str:
    """Version of NVIDIA's driver; empty where its tool is not there or does not answer."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    command = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.splitlines()[0].strip() if done.returncode == 0 and done.stdout else ""


def cpu_name() -> str:
    """As the kernel names it, which may not say which, with the instructions that decide a product's speed."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return platform.processor() or platform.machine()
    lines = (line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
    fields = {name.strip(): value.strip() for name, value in lines}
    flags = [x for x in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if x in fields.get("flags", "").split()]
    family = [f"family {fields['cpu family']} model {fields['model']}"] if "cpu family" in fields else []
    return " ".join([fields.get("model name", platform.machine()), *family, *flags])


def versions() -> dict[str, str]:
    """Of Python, tilewise, CUDA and cuDNN as torch was built or finds them, and of the installed distributions."""
    found = {"python": platform.python_version(), "tilewise": tilewise.__version__}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    found["torch"] = torch.__version__  # with the build, which the distribution's metadata may leave out
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
        found["cudnn"] = str(torch.backends.cudnn.version())
    return found


def _git(*arguments: str) -> str:
    """Of the checkout that tilewise is imported from; empty if it is none, or lies in another project's."""
    git, package = shutil.which("git"), Path(tilewise.__file__)
    if git is None:
        return ""
    output = ""
    for command in (("ls-files", "--error-unmatch", package.name), arguments):
        done = subprocess.run([git, *command], cwd=package.parent, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            return ""
        output = done.stdout
    return output.strip("\n")


class PlainProgress:
    """A line for every row, on stdout; where there is no rich, or no terminal."""

    def start(self, total: int, left_out: str) -> None:
        self.total, self.done = total, 0
        if left_out:
            print(left_out, flush=True)

    def working(self, what: str) -> None:
        if self.done == 0 and what == "calibration":
            print("calibration", file=sys.stderr, flush=True)

    def finished(self, results: Results, row: Row) -> None:
        from tilewise_tools.bench.report import one_line

        self.done += 1
        print(f"[{self.done}/{self.total}] {one_line(results, row)}", flush=True)
