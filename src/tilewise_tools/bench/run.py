"""The run over all cases and providers; results are checked before they are timed."""

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

# Interleaved rounds of a case's providers. A GPU's clock rate changes by several percent within a second; a CPU's times
# are longer, so one round suffices.
_ROUNDS = {"cuda": 3, "cpu": 1}
# Built-in errors that count as a provider's failure.
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
    """Invalid ``option`` of a run, with a message for the user."""

    def __init__(self, option: str, message: str) -> None:
        super().__init__(f"{option}: {message}")
        self.option, self.message = option, message


class DeviceLost(RuntimeError):
    """The device no longer works after a provider's failure."""


class Progress(Protocol):
    """Receiver of a run's progress: number of rows without `left_out`, current work, each row."""

    def start(self, total: int, left_out: str) -> None: ...
    def working(self, what: str) -> None: ...
    def finished(self, results: Results, row: Row) -> None: ...


@dataclass(frozen=True)
class RunOptions:
    """Options of a run.

    Attributes:
        device: "cuda" or "cpu".
        quick: few cases, and half the time for each measurement.
        cases, providers: substrings of the names to measure; empty for all.
        budget: seconds after which nothing new starts and the rest is "not run".
        commit: commit to record if there is no git checkout.
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
    """Return the cases whose name contains one of ``options.cases``; a full name selects only that case."""
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
    """True if ``part`` is a substring of ``name``; a dtype, in any spelling, must match a whole word."""
    words = [dtype_name(word) or word for word in part.split(" ")]
    return words[0] in name.split() if len(words) == 1 and words[0] in DTYPES else " ".join(words) in name


def run(
    options: RunOptions,
    progress: Progress,
    save: Callable[[Results], None] = lambda results: None,
    todo: Sequence[AnyCase] | None = None,
) -> Results:
    """Measure all cases; call ``save`` with the results so far after every case.

    Args:
        todo: cases to measure instead of those of ``options``.

    Raises:
        UsageError: for options that match nothing, or an absent device.
    """
    started = time.monotonic()
    if options.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device", "torch sees no CUDA device here; use --device cpu")
    chosen = chosen_cases(options) if todo is None else list(todo)
    computed = {case.operator for case in chosen}
    crew = [provider for provider in chosen_providers(options) if provider.operator in computed]
    if not crew:
        raise UsageError("--providers", f"none of those computes the cases, which are {' and '.join(sorted(computed))}")
    here = [provider for provider in crew if provider.unavailable is None]
    ready = {case.name: [p for p in here if p.operator == case.operator and p.applies(case)] for case in chosen}
    device = torch.device(options.device)
    rounds = _ROUNDS[device.type]
    unavailable = {provider.name: provider.unavailable for provider in crew if provider.unavailable is not None}
    absent = [(c.name, p.name) for c in chosen for p in ready[c.name] if wants_cuda(p.declines(c))]
    silent = set(absent)
    wanting = [*(provider for _, provider in absent), *(name for name, why in unavailable.items() if wants_cuda(why))]
    progress.start(sum(len(ready[case.name]) for case in chosen) - len(silent), left_out(wanting))
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
            for provider in ready[case.name]:
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
    """True if no backend of tilewise failed."""
    return not any(is_ours(row.provider) and row.outcome == "failed" for row in results.rows)


class _Measured:
    """Measurements of one case; creates inputs and reference results when the first provider needs them."""

    def __init__(self, case: AnyCase, clock: Clock) -> None:
        self.case, self.clock = case, clock
        self.inputs: AnyInputs | None = None
        self.right: dict[str, torch.Tensor] = {}
        self.rounds: dict[str, list[tuple[Timing, Timing | None]]] = {}  # (forward, backward) of each round

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
        """Return the row with the times of one more round."""
        return self._told(provider, lambda provider, x: self._measure_again(provider, x, row))

    def _told(self, provider: Provider, measure: Callable[[Provider, Any], Row]) -> Row:
        """Return the row by ``measure``, or a row with the reason of its failure."""
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
        """Time another round; return the row with the times of all rounds so far."""
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
            # Other providers draw dropout from their own generators, so there is no reference for them.
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
    """Return the additional seconds that ``both`` takes after each ``renew``."""

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
    """Return the exception classes that count as a provider's failure.

    These are built-in ones, and direct subclasses of Exception in the providers' packages that are loaded.
    """
    own = (cls for cls in Exception.__subclasses__() if cls.__module__.split(".")[0] in _PACKAGES)
    return (*_ERRORS, *own)


def _reason(error: Exception, warned: list[str]) -> str:
    """Return the error on one line, with SDPA's warnings, which contain its reasons."""
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
    """Return the fields commit, changed_files, date, device and versions of `Results`.

    Args:
        commit: commit to record instead of git's, for a copy without git; its files are taken as unchanged.
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
    """Return the version of NVIDIA's driver, or "" if nvidia-smi is absent or fails."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    command = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.splitlines()[0].strip() if done.returncode == 0 and done.stdout else ""


def cpu_name() -> str:
    """Return the CPU's name, family, model and instruction sets for matmul, from /proc/cpuinfo."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return platform.processor() or platform.machine()
    lines = (line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
    fields = {name.strip(): value.strip() for name, value in lines}
    flags = [x for x in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if x in fields.get("flags", "").split()]
    family = [f"family {fields['cpu family']} model {fields['model']}"] if "cpu family" in fields else []
    return " ".join([fields.get("model name", platform.machine()), *family, *flags])


def versions() -> dict[str, str]:
    """Return versions of Python, tilewise, the installed distributions, and torch's CUDA and cuDNN."""
    found = {"python": platform.python_version(), "tilewise": tilewise.__version__}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    found["torch"] = torch.__version__  # with the build tag, which the metadata may lack
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
        found["cudnn"] = str(torch.backends.cudnn.version())
    return found


def _git(*arguments: str) -> str:
    """Run git in tilewise's checkout; return "" if tilewise was not imported from its own checkout."""
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
    """Progress as lines on stdout, used without rich or without a terminal."""

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
