"""What `tilewise bench` does not measure: calls in turns with PyTorch's, held to gates, and kernels as they might be.

    python -m tilewise_tools.benchmarks.sweep attention-cpu    # time, and memory in fresh processes
    python -m tilewise_tools.benchmarks.sweep softmax-cpu
    python -m tilewise_tools.benchmarks.sweep host             # what a tiny call on a GPU costs the host
    python -m tilewise_tools.benchmarks.sweep lengths          # and what a new length does, beside an earlier one
    python -m tilewise_tools.benchmarks.sweep matmul           # on a GPU, also with other configurations of the kernel
    python -m tilewise_tools.benchmarks.sweep softmax          # the same; --registers

SWEEP --help says more of each. Results are compared before the clock starts. Who takes turns is compared by medians, so
that a machine that changes its speed changes it for all. A gate is what was aimed at; rows without one are there to
learn from. Ends with status 1 if a gate is missed or a result is wrong, with 2 for a mistake in the call.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import NamedTuple

import torch

from tilewise_tools.bench.__main__ import add_results, check_results, names
from tilewise_tools.bench.results import write_document
from tilewise_tools.bench.run import origin
from tilewise_tools.bench.timing import Clock, calibrate

HOPPER = (9, 0)


class Sweep(NamedTuple):
    """``turns``: by default; 0 where none are taken. ``capability``: of the GPU that it needs; None on a CPU."""

    module: str
    function: str
    text: str
    turns: int
    capability: tuple[int, int] | None = None


SWEEPS = {
    "attention-cpu": Sweep(
        "on_cpu",
        "attention",
        "Attention on a CPU beside SDPA: seconds of a call, and on Linux what a step adds to the peak of the resident "
        "set, measured in a fresh process for each length. A gate: how many of our times SDPA's must be, at least.",
        7,
    ),
    "softmax-cpu": Sweep(
        "on_cpu",
        "softmax",
        "Forward and backward on a CPU beside what a user would write in torch operators, two seconds each; the ratio "
        "is the median of the turns' ratios. With one thread the clock is the processor's time, which a busy machine "
        "stretches less. The gate: how many of torch's times a plain call may take.",
        9,
    ),
    "host": Sweep(
        "on_gpu",
        "host",
        "What a tiny call on a GPU costs the host, beside PyTorch's attention. B=1, H=8, S=128, D=64, bfloat16, "
        "without and with a trainable (1,H,M,N) bias: microseconds of a forward where no gradient is asked for, of one "
        "where it is, and of forward and backward.",
        3,
        HOPPER,
    ),
    "lengths": Sweep(
        "lengths",
        "lengths",
        "What a call with a new length costs a GPU's host after others of its kind, beside one with a length that was "
        "met before and one that comes again at once, the device idle before each; microseconds, medians, in the "
        "calling thread. H=8, D=64, bfloat16, causal. And the backward of a tiny call, B=1, H=8, S=128.",
        3,
        HOPPER,
    ),
    "matmul": Sweep(
        "on_gpu",
        "products",
        "Products in bfloat16 beside torch's, by CUDA events, with the L2 cache flushed before each. A GPU is limited "
        "by its power, so only ratios of times taken in turns mean anything. A gate: how many of our times torch's "
        "must be, at least.",
        40,
        HOPPER,
    ),
    "softmax": Sweep(
        "on_gpu",
        "softmax",
        "The softmax's tiles on a GPU: what config.py chooses and what it might, and torch's, as shares of a copy's "
        "speed, by the clock of `tilewise bench`.",
        0,
        (8, 0),
    ),
}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="sweep", required=True, metavar="SWEEP")
    for name, sweep in SWEEPS.items():
        command = commands.add_parser(name, description=sweep.text)
        command.add_argument("--cases", default="", help="only cases whose name has one of these parts, by commas")
        add_results(command)
        if sweep.turns:
            words = f"of each, at least (default {sweep.turns})"
            command.add_argument("--turns", type=positive, default=sweep.turns, help=words)
        if sweep.capability is None:
            default = [torch.get_num_threads()] if name == "attention-cpu" else [1, 2]
            command.add_argument("--threads", type=positive, nargs="+", default=default, help="one run for each number")
    commands.choices["softmax"].add_argument(
        "--registers",
        action="store_true",
        help="only what falls short, bfloat16 rows of 16k and more, with configurations by which more bytes are on "
        "their way (docs/notebook/softmax.md has what they should gain); less than a minute",
    )
    commands.choices["attention-cpu"].add_argument(
        "--memory", nargs=3, metavar=("CASE", "IMPLEMENTATION", "LENGTH"), help=argparse.SUPPRESS
    )
    return parser


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {text}")
    return number


def lacking(capability: tuple[int, int] | None) -> str:
    """What is needed, in words, where this machine has it not."""
    if capability is None:
        return ""
    found = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
    if found == capability or (found > capability and capability != HOPPER):
        return ""
    later = "" if capability == HOPPER else " or later"
    return f"needs a CUDA device of compute capability {capability[0]}.{capability[1]}{later}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = make_parser()
    options = parser.parse_args(arguments)
    sweep = SWEEPS[options.sweep]
    check_results(parser, options)
    if lack := lacking(sweep.capability):
        parser.error(f"{options.sweep}: {lack}")
    options.parts = names(parser, "--cases", options.cases)
    module = importlib.import_module(f"tilewise_tools.benchmarks.{sweep.module}")  # those of a GPU need Triton
    if getattr(options, "memory", None) is not None:
        print(module.memory_of(*options.memory, *options.threads))
        return 0
    device = torch.device("cpu" if sweep.capability is None else "cuda")
    document = {"sweep": options.sweep, **origin(device, options.commit)}
    print(f"{document['device']['name']}; torch {torch.__version__}", flush=True)
    found = getattr(module, sweep.function)(options)
    rows = found.get("rows", [])
    if not (rows or found.get("cases")):
        parser.error(f"--cases: nothing is called {options.cases!r}")
    if options.json is not None:
        if device.type == "cuda":
            document["calibration"] = asdict(calibrate(Clock(device, 0.3), ["bfloat16"]))
        write_document({**document, **found}, options.json)
    return int(any(row.get("met") is False for row in rows))


if __name__ == "__main__":
    sys.exit(main())
