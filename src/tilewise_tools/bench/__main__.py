"""Run ``tilewise bench`` without typer, by ``python -m tilewise_tools.bench``."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tilewise_tools.bench", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda if torch sees a GPU")
    parser.add_argument("--quick", action="store_true", help="few cases: a minute or two")
    parser.add_argument("--cases", default="", help="only cases whose name has one of these parts, separated by commas")
    parser.add_argument("--providers", default="", help="only providers whose name has one of these parts")
    parser.add_argument("--budget", type=float, help="seconds after which no new case starts (540; with --nproc 220)")
    parser.add_argument("--nproc", type=int, help="split one sequence over this many processes")
    parser.add_argument("--plot", type=Path, help="with --nproc: the folder for pictures of compute and communication")
    parser.add_argument("--predict", type=Path, help="results of a run with --nproc: predict other numbers of GPUs")
    parser.add_argument("--across", type=float, help="with --predict: GB/s of a GPU to another host of 8")
    add_results(parser)
    arguments = parser.parse_args()
    check_results(parser, arguments)
    if arguments.predict is not None:
        from tilewise_tools.bench.parallel import predict
        from tilewise_tools.bench.parallel.results import read

        print(predict.table(read(arguments.predict), None if arguments.across is None else 1e9 * arguments.across))
        return 0
    if arguments.nproc is None and "TORCHELASTIC_RUN_ID" in os.environ:
        arguments.nproc = int(os.environ["WORLD_SIZE"])  # torchrun takes --nproc for its own
    if arguments.budget is None:
        arguments.budget = 540.0 if arguments.nproc is None else 220.0
    if not arguments.budget >= 0:
        parser.error(f"--budget: must be 0 or more, got {arguments.budget:g}")
    if arguments.nproc is None and arguments.plot is not None:
        parser.error("--plot: goes with --nproc")
    if arguments.nproc is not None and arguments.nproc < 2:
        parser.error(f"--nproc: must be 2 or more, got {arguments.nproc}")
    if arguments.plot is not None:
        arguments.plot.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # before torch is imported: silences the profiler
    from tilewise_tools.bench import report, results, run

    if arguments.nproc is not None:
        return _parallel(parser, arguments)
    options = run.RunOptions(
        device=arguments.device or run.default_device(),
        quick=arguments.quick,
        cases=names(parser, "--cases", arguments.cases),
        providers=names(parser, "--providers", arguments.providers),
        budget=arguments.budget,
        commit=arguments.commit,
    )
    try:
        found = run.run(
            options,
            run.PlainProgress(),
            lambda found: None if arguments.json is None else results.write(found, arguments.json),
        )
    except run.UsageError as error:
        parser.error(str(error))
    print(f"\n{report.terminal(found)}")
    return 0 if run.ours_are_right(found) else 1


def _parallel(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    from tilewise_tools.bench import run
    from tilewise_tools.bench.parallel.launch import launch
    from tilewise_tools.bench.parallel.run import ParallelRunOptions

    options = ParallelRunOptions(
        cases=names(parser, "--cases", arguments.cases),
        providers=names(parser, "--providers", arguments.providers),
        budget=arguments.budget,
        commit=arguments.commit,
        quick=arguments.quick,
        json=arguments.json,
        plot=arguments.plot,
    )
    try:
        return launch(arguments.nproc, arguments.device or run.default_device(), options)
    except run.UsageError as error:
        parser.error(str(error))


def add_results(parser: argparse.ArgumentParser) -> None:
    """Add the options --json and --commit."""
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--commit", default="", help="commit to record, if there is no git checkout")


def check_results(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Exit with a usage error if the results cannot be written; called before measuring."""
    if arguments.json is None:
        return
    folder = arguments.json.absolute().parent
    if not folder.is_dir():
        parser.error(f"--json: there is no folder {folder}")
    if arguments.json.is_dir() or not os.access(folder, os.W_OK):
        parser.error(f"--json: cannot write {arguments.json}")


def names(parser: argparse.ArgumentParser, option: str, text: str) -> tuple[str, ...]:
    found = tuple(name.strip() for name in text.split(",") if name.strip())
    if text and not found:
        parser.error(f"{option}: names separated by commas are needed, got {text!r}")
    return found


if __name__ == "__main__":
    sys.exit(main())
