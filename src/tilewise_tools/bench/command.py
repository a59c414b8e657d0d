"""``tilewise bench``: measure, and make tables and pictures from the results."""

from __future__ import annotations

import importlib.util
import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tilewise_tools.commands.arguments import (
    Device,
    check_writable,
    choice,
    make_folder,
    missing_packages,
    mistake,
    names,
)
from tilewise_tools.commands.arguments import number as parse_number

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.progress import Progress as RichBar
    from rich.progress import TaskID

    from tilewise_tools.bench.results import Results, Row
    from tilewise_tools.bench.run import Progress

command = typer.Typer(add_completion=False, rich_markup_mode=None)
ResultsFile = Annotated[Path, typer.Argument(help="JSON that `tilewise bench --json` wrote.", metavar="RESULTS.json")]


@command.callback(invoke_without_command=True)
def bench(
    context: typer.Context,
    device: Annotated[
        str | None,
        typer.Option(help="Where to run. Default: cuda if torch sees a GPU, else cpu.", metavar="cpu|cuda"),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Few cases: a minute or two.")] = False,
    cases: Annotated[
        str,
        typer.Option(
            help="Only cases whose name has one of these parts, separated by commas.",
            metavar="NAMES",
        ),
    ] = "",
    providers: Annotated[
        str, typer.Option(help="Only providers whose name has one of these parts.", metavar="NAMES")
    ] = "",
    budget: Annotated[
        str,
        typer.Option(
            help="Seconds after which no new case starts; the rest is listed. Default: 540, with --nproc 220.",
            metavar="SECONDS",
        ),
    ] = "",
    json: Annotated[
        Path | None, typer.Option(help="Write results to this file after each case.", metavar="FILE")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Folder to draw the pictures into; made if missing.", metavar="FOLDER")
    ] = None,
    commit: Annotated[str, typer.Option(help="Commit to record, if there is no git checkout.", metavar="NAME")] = "",
    nproc: Annotated[
        int | None,
        typer.Option(
            help="Split one sequence over this many processes; see docs/distributed.md.",
            metavar="N",
            min=2,
        ),
    ] = None,
) -> None:
    """Compare tilewise with other kernels on this machine.

    Attention against SDPA, FlexAttention, FlashAttention-4 and cuDNN; softmax and matmul against PyTorch.

    Every provider gets the same inputs, and its results are checked before it is timed: forward, backward, working
    memory, first call. Speeds are shown relative to the device's limits, calibrated in the same run, and to the best
    other provider. `tilewise bench list` names cases and providers.

    Ends with status 1 if tilewise failed or was wrong in a case, with 2 for a usage error, otherwise with 0.
    """
    if context.invoked_subcommand is not None:
        return
    where = None if device is None else choice(device, "--device", Device).value
    seconds = parse_number(budget or ("540" if nproc is None else "220"), "--budget", 0)
    only = {"cases": names(cases, "--cases"), "providers": names(providers, "--providers")}
    if json is not None:
        check_writable(json, "--json")
    if plot is not None:
        _need_matplotlib()
        make_folder(plot, "--plot")
    # Silences the profiler's start and stop messages on stderr; must be set before torch is imported.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    from tilewise_tools.bench import report, results, run

    if nproc is not None:
        from tilewise_tools.bench.parallel.launch import launch
        from tilewise_tools.bench.parallel.run import ParallelRunOptions as ParallelOptions

        more = ParallelOptions(budget=seconds, commit=commit, quick=quick, json=json, plot=plot, **only)
        try:
            raise typer.Exit(launch(nproc, run.default_device() if where is None else where, more))
        except run.UsageError as error:
            raise mistake(error.option, error.message) from None
    options = run.RunOptions(
        device=run.default_device() if where is None else where, quick=quick, budget=seconds, commit=commit, **only
    )

    def save(found: Results) -> None:
        if json is not None:
            results.write(found, json)

    try:
        with _progress() as progress:
            found = run.run(options, progress, save)
    except run.UsageError as error:
        raise mistake(error.option, error.message) from None
    typer.echo(f"\n{report.terminal(found)}")
    if plot is not None:
        _draw(found, json or Path("bench.json"), plot)
    if not run.ours_are_right(found):
        raise typer.Exit(1)


@command.command("list")
def list_names(
    device: Annotated[
        str | None, typer.Option(help="Device. Default: cuda if torch sees a GPU, else cpu.", metavar="cpu|cuda")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="The cases of --quick.")] = False,
) -> None:
    """List cases and providers.

    A provider that cannot run here is listed with the reason.
    """
    asked = None if device is None else choice(device, "--device", Device).value
    import torch

    from tilewise_tools.bench import run
    from tilewise_tools.bench.cases import cases
    from tilewise_tools.bench.providers import providers
    from tilewise_tools.bench.report import NAME_WIDTH

    where = run.default_device() if asked is None else asked
    if where == "cuda" and not torch.cuda.is_available():
        raise mistake("--device", "torch sees no CUDA device here; use --device cpu")
    known = cases(where, quick)
    typer.echo(f"cases on {where}:")
    for case in known:
        typer.echo(f"  {case.name}")
    typer.echo("providers:")
    for provider in providers(torch.device(where)):
        reasons = {
            provider.declines(case) for case in known if case.operator == provider.operator and provider.applies(case)
        }
        reason = provider.unavailable or (reasons.pop() if len(reasons) == 1 else None)
        typer.echo(f"  {provider.name:{NAME_WIDTH}} {reason or ''}".rstrip())


@command.command()
def plot(
    results_file: ResultsFile,
    into: Annotated[Path, typer.Option(help="Folder for the pictures; made if missing.", metavar="FOLDER")] = Path("."),
) -> None:
    """Draw pictures of the results.

    TFLOP/s against sequence length, forward and backward, and a roofline.
    """
    _need_matplotlib()
    found = _read(results_file)
    make_folder(into, "--into")
    _draw(found, results_file, into)


@command.command()
def predict(
    results_file: Annotated[
        Path, typer.Argument(help="JSON that `tilewise bench --nproc N --json` wrote.", metavar="RESULTS.json")
    ],
    across: Annotated[
        str, typer.Option(help="Rate of a GPU to another host of 8. Default: the rate within a host.", metavar="GB/s")
    ] = "",
) -> None:
    """Predict the time of a run with --nproc on 2, 4, 8 and 64 GPUs.

    Computed from the speeds that the run measured; see docs/distributed.md.
    """
    from tilewise_tools.bench.parallel import predict, results
    from tilewise_tools.bench.results import ResultsError

    rate = 1e9 * parse_number(across, "--across", 0) if across else None
    try:
        typer.echo(predict.table(results.read(results_file), rate))
    except OSError as error:
        raise mistake("RESULTS.json", f"cannot read {results_file}: {error.strerror}") from None
    except ResultsError as error:
        raise mistake("RESULTS.json", str(error)) from None


@command.command("report")
def write_report(
    results_file: ResultsFile,
    into: Annotated[
        Path | None,
        typer.Option(
            help="Markdown file with the two markers of these results. Default: print.",
            metavar="FILE.md",
            exists=True,
            dir_okay=False,
            writable=True,
        ),
    ] = None,
    images: Annotated[
        Path | None,
        typer.Option(help="Folder for the pictures. Default: images, next to the document.", metavar="FOLDER"),
    ] = None,
    brief: Annotated[bool, typer.Option("--brief", help="The first table alone, without pictures.")] = False,
) -> None:
    """Write tables and pictures into a document.

    The tables go between the lines `<!-- tilewise bench report NAME: begin -->` and `<!-- tilewise bench report NAME:
    end -->`, where NAME is the name of the results' file without its suffix; other text does not change.
    """
    from tilewise_tools.bench.report import insert, markdown, picture_names

    found = _read(results_file)
    if into is None:
        typer.echo(markdown(found, results_file.name, [], brief))
        return
    if not brief:
        _need_matplotlib()
    folder = images if images is not None else into.parent / "images"
    relative = os.path.relpath(folder, into.parent)
    pictures = [] if brief else [(text, f"{relative}/{name}") for text, name in picture_names(results_file)]
    source = os.path.relpath(results_file, into.parent.parent).replace(os.sep, "/")
    try:
        text = insert(into.read_text(encoding="utf-8"), results_file.stem, markdown(found, source, pictures, brief))
    except ValueError as error:
        raise mistake("--into", f"{into}: {error}") from None
    if not brief:
        make_folder(folder, "--images")
        _draw(found, results_file, folder)
    into.write_text(text, encoding="utf-8")
    typer.echo(f"tables: {into}")


def _read(path: Path) -> Results:
    from tilewise_tools.bench.results import ResultsError, read

    try:
        return read(path)
    except OSError as error:
        raise mistake("RESULTS.json", f"cannot read {path}: {error.strerror}") from None
    except ResultsError as error:
        raise mistake("RESULTS.json", str(error)) from None


def _draw(found: Results, results_file: Path, folder: Path) -> None:
    from tilewise_tools.bench.plot import draw_all

    for path in draw_all(found, results_file, folder):
        typer.echo(f"picture: {path}")


def _need_matplotlib() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        typer.echo(missing_packages("tilewise bench", ["matplotlib"], "cli"), err=True)
        raise typer.Exit(2)


@contextmanager
def _progress() -> Iterator[Progress]:
    """Yield a progress bar if rich is installed and stdout is a terminal, else a printer of lines."""
    from tilewise_tools.bench.run import PlainProgress

    if importlib.util.find_spec("rich") is None:
        yield PlainProgress()
        return
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        yield PlainProgress()
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Bar(*columns, console=console) as bar:
        yield _RichProgress(bar, bar.add_task("", total=None))


class _RichProgress:
    def __init__(self, bar: RichBar, task: TaskID) -> None:
        self.bar, self.task = bar, task

    def start(self, total: int, left_out: str) -> None:
        self.bar.update(self.task, total=total)
        if left_out:
            self.bar.console.print(left_out, markup=False)

    def working(self, what: str) -> None:
        self.bar.update(self.task, description=what)

    def finished(self, results: Results, row: Row) -> None:
        from tilewise_tools.bench.report import one_line

        self.bar.advance(self.task)
        self.bar.console.print(one_line(results, row), markup=False)
