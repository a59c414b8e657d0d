"""Measurements beyond `tilewise bench`: required ratios to PyTorch, other kernel configurations.

    python -m tilewise_tools.benchmarks.sweep attention-cpu    # time, and memory in fresh processes
    python -m tilewise_tools.benchmarks.sweep softmax-cpu
    python -m tilewise_tools.benchmarks.sweep host             # host time of a tiny call on a GPU
    python -m tilewise_tools.benchmarks.sweep lengths          # host time of a call with a new length
    python -m tilewise_tools.benchmarks.sweep matmul           # on a GPU, also with other configurations of the kernel
    python -m tilewise_tools.benchmarks.sweep softmax          # on a GPU, with other configurations; --registers

SWEEP --help describes each. Results are compared before timing. Runs are interleaved and compared by medians, so that
changes of the machine's speed affect all of them. A gate is a required ratio; rows without one are for information.
Ends with status 1 if a gate is missed or a result is wrong, with 2 for a usage error.
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
    """One measurement.

    Attributes:
        turns: default number of interleaved rounds; 0 without rounds.
        capability: compute capability of the required GPU; None for a CPU.
    """

    module: str
    function: str
    text: str
    turns: int
    capability: tuple[int, int] | None = None


SWEEPS = {
    "attention-cpu": Sweep(
        "on_cpu",
        "attention",
        "Attention on a CPU against SDPA: seconds of a call, and on Linux the increase of the peak resident set by a "
        "step, measured in a fresh process for each length. Gate: required speedup over SDPA.",
        7,
    ),
    "softmax-cpu": Sweep(
        "on_cpu",
        "softmax",
        "Forward and backward on a CPU against torch operators, two seconds each; the ratio is the median over rounds. "
        "With one thread, CPU time is measured, which a busy machine affects less. Gate: largest allowed ratio of a "
        "plain call's time to torch's.",
        9,
    ),
    "host": Sweep(
        "on_gpu",
        "host",
        "Host time of a tiny call on a GPU against PyTorch's attention. B=1, H=8, S=128, D=64, bfloat16, without and "
        "with a trainable (1,H,M,N) bias: microseconds of a forward without gradients, of a forward with gradients, "
        "and of forward and backward.",
        3,
        HOPPER,
    ),
    "lengths": Sweep(
        "lengths",
        "lengths",
        "Host time of a call with a new length, with an earlier length, and with the previous call's length, on an "
        "idle GPU; microseconds, medians, in the calling thread. H=8, D=64, bfloat16, causal. Also the backward of a "
        "tiny call, B=1, H=8, S=128.",
        3,
        HOPPER,
    ),
    "matmul": Sweep(
        "on_gpu",
        "products",
        "Matrix products in bfloat16 against torch's, by CUDA events, with the L2 cache flushed before each. A GPU is "
        "power-limited, so only ratios of interleaved times are meaningful. Gate: required speedup over torch.",
        40,
        HOPPER,
    ),
    "softmax": Sweep(
        "on_gpu",
        "softmax",
        "Softmax on a GPU: the configuration of config.py, alternatives, and torch, relative to the speed of a copy, "
        "timed as in `tilewise bench`.",
        0,
        (8, 0),
    ),
}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="sweep", required=True, metavar="SWEEP")
    for name, sweep in SWEEPS.items():
        command = commands.add_parser(name, description=sweep.text)
        command.add_argument("--cases", default="", help="only cases whose name has one of these parts")
        add_results(command)
        if sweep.turns:
            words = f"least number of rounds (default {sweep.turns})"
            command.add_argument("--turns", type=positive, default=sweep.turns, help=words)
        if sweep.capability is None:
            default = [torch.get_num_threads()] if name == "attention-cpu" else [1, 2]
            command.add_argument("--threads", type=positive, nargs="+", default=default, help="one run for each number")
    commands.choices["softmax"].add_argument(
        "--registers",
        action="store_true",
        help="only bfloat16 rows of 16k elements or more, with configurations that have more bytes in flight (see "
        "docs/notebook/softmax.md); less than a minute",
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
    """Return the missing requirement as text; "" if this machine has a suitable GPU."""
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
    module = importlib.import_module(f"tilewise_tools.benchmarks.{sweep.module}")  # GPU modules need Triton
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
