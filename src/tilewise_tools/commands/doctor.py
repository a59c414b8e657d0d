"""``tilewise doctor``: installed versions, backends that can run here, and a check of their results."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    import torch

    from tilewise_tools.bench.cases import Case
    from tilewise_tools.bench.providers import Provider


def command() -> None:
    """Check that tilewise works on this machine.

    Shows versions and GPUs, which backends can run and why others cannot, and a known hazard of ptxas. Runs a small
    attention with a bias, forward and backward, on every backend that can run, and compares it with float64.

    Ends with status 0 if every device has a backend and all backends that can run are right, otherwise with 1.
    """
    import torch

    from tilewise_tools.bench.run import describe_device, versions

    typer.echo("  ".join(f"{name} {version}" for name, version in versions().items()))
    devices = [torch.device("cpu"), *(torch.device("cuda", n) for n in range(torch.cuda.device_count()))]
    healthy = True
    for device in devices:
        facts = describe_device(device)
        words = ", ".join(f"{name} {value}" for name, value in facts.items() if name not in ("type", "name"))
        typer.echo(f"{device}: {facts['name']} ({words})")
        verdicts = list(check_backends(device))
        for line, _ in verdicts:
            typer.echo(f"  {line}")
        outcomes = [right for _, right in verdicts if right is not None]
        if not outcomes:
            typer.echo("  PROBLEM: no backend can run on this device")
        healthy = healthy and bool(outcomes) and all(outcomes)
    if len(devices) == 1:
        typer.echo("cuda: torch sees no CUDA device")
    typer.echo(ptxas_line([torch.cuda.get_device_capability(device) for device in devices[1:]]))
    typer.echo("tilewise works here" if healthy else "PROBLEM: see above")
    if not healthy:
        raise typer.Exit(1)


def check_backends(device: torch.device) -> Iterator[tuple[str, bool | None]]:
    """Yield (line to print, True if right) for each backend and dtype; None instead if it cannot run here."""
    from tilewise_tools.bench.providers import is_ours, providers

    for provider in providers(device):
        if not is_ours(provider.name) or provider.operator != "attention":
            continue
        name = provider.name.removeprefix("tilewise-")
        for case in filter(provider.applies, _cases(device)):
            reason = provider.declines(case)
            if reason is not None:
                yield f"backend {name}, {case.dtype}: cannot run here: {reason}", None
                continue
            start = time.perf_counter()
            errors, problem = _self_check(provider, case, device)
            seconds = time.perf_counter() - start
            found = ", ".join(f"{key} {value:.0e}" for key, value in errors.items())
            verdict = f"right (off float64's by {found} of its norm)" if problem is None else f"PROBLEM: {problem}"
            yield f"backend {name}, {case.dtype}: {verdict}, {seconds:.1f} s", problem is None


def _cases(device: torch.device) -> list[Case]:
    """Return cases with grouped heads, a shared bias, and causal with fewer queries than keys.

    No tile of a kernel is full. The bias's row size is a multiple of 16 bytes, which every backend can read.
    """
    from tilewise_tools.bench.cases import Case

    dtypes = ["float32"] if device.type == "cpu" else ["float32", "bfloat16"]
    return [
        Case("doctor", 2, 4, 2, 72, 88, 32, causal=True, bias=(1, 4, 72, 88), dtype=dtype) for dtype in dtypes
    ]  # fmt: skip


def _self_check(provider: Provider, case: Case, device: torch.device) -> tuple[dict[str, float], str | None]:
    """Return the errors against float64, and a description of the problem or None."""
    import torch

    from tilewise_tools.bench import reference
    from tilewise_tools.bench.run import provider_errors

    x = case.inputs(device)
    try:
        steps = provider.prepare(case, x)
        o = steps.forward()
        found = dict(zip(("o", "dq", "dk", "dv", "dbias"), (o, *steps.backward(o)), strict=True))
        errors = reference.errors(found, reference.exact(case, x, torch.float64))
    except provider_errors() as error:
        return {}, f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    wrong = reference.wrong(errors, case)
    return errors, f"wrong: {wrong}" if wrong else None


# ptxas and wgmma


def ptxas_line(capabilities: list[tuple[int, int]]) -> str:
    """Describe the ptxas that Triton would use; it matters only for GPUs of compute capability 9.0."""
    path = ptxas_path()
    if path is None:
        return "ptxas: none found: triton is not installed, or has none for NVIDIA GPUs"
    version = ptxas_version(path)
    if version is None:
        return f"ptxas: {path} does not tell its version"
    concerned = "" if (9, 0) in capabilities else " (concerns GPUs of compute capability 9.0, none here)"
    return f"ptxas {version[0]}.{version[1]}: {wgmma_hazard(version)}{concerned}"


def wgmma_hazard(version: tuple[int, int]) -> str:
    """Say if this (major, minor) version of ptxas has the wgmma fault that is known in 12.8 and 12.9."""
    fault = "may reuse the registers of a wgmma's first operand before they are read; fixed in 13.3"
    if version >= (13, 3):
        return "without the known wgmma hazard"
    if version >= (13, 0):
        return f"may have the known wgmma hazard of 12.8 and 12.9: {fault}"
    if version >= (12, 8):
        return f"has the known wgmma hazard: {fault}"
    return "older than the versions with the known wgmma hazard, 12.8 and 12.9; not examined"


def ptxas_path() -> Path | None:
    """Return the ptxas that Triton calls on Hopper: TRITON_PTXAS_PATH or its own. Does not import Triton."""
    named = os.environ.get("TRITON_PTXAS_PATH")
    if named:
        return Path(named)
    spec = importlib.util.find_spec("triton")
    for folder in (spec.submodule_search_locations or []) if spec is not None else []:
        path = Path(folder) / "backends" / "nvidia" / "bin" / "ptxas"
        if path.is_file():
            return path
    return None


def ptxas_version(path: Path) -> tuple[int, int] | None:
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
    except OSError:
        return None
    found = re.search(r"release (\d+)\.(\d+)", done.stdout)
    return (int(found[1]), int(found[2])) if found else None
