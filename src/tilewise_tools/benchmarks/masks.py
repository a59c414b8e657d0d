"""Masks on one GPU: blocks, windows, documents, prefix trees, dynamic masks, against dense calls and other kernels.

    python -m tilewise_tools.benchmarks.masks --json masks.json

Each line has a required ratio, for forward and backward, or for both together: of dynamic masks, which each call makes,
and of prefix trees.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from tilewise_tools.bench import cases, packed
from tilewise_tools.bench.cases import AnyCase
from tilewise_tools.bench.providers import providers
from tilewise_tools.bench.results import Pass, Results, write_document
from tilewise_tools.bench.run import PlainProgress, RunOptions, run

S, LONG = 16384, 32768
HOPPER, TRITON, FLEX, FA4, VARLEN = "tilewise-hopper", "tilewise-triton", "flex", "fa4", "tilewise-varlen-hopper"
FA4_VARLEN = "fa4-varlen"
DENSE = cases.dense(128, S, causal=False)
BLOCKS = {(share, biased): cases.masked(f"blocks {share}", S, biased=biased) for share in (25, 5) for biased in (0, 1)}
WINDOWS = {width: cases.windowed(width, S) for width in (512, 2048)}
DOCUMENTS = {causal: cases.masked("documents", LONG, causal) for causal in (True, False)}
TREES = {dim: (cases.tree(dim), packed.rollouts_case(dim)) for dim in (128, 64)}
PACKED = {causal: packed.lognormal_case(128, causal) for causal in (True, False)}
ALL_PACKED = {(dim, causal): packed.lognormal_case(dim, causal) for dim in (128, 64) for causal in (True, False)}
WHOLE = {causal: cases.long(LONG, causal) for causal in (True, False)}
KEPT = {causal: cases.masked("kept 2048", LONG, causal) for causal in (True, False)}

# (cases, providers) of each run, the most important first.
PARTS: list[tuple[list[AnyCase], tuple[str, ...]]] = [
    ([*WHOLE.values(), *KEPT.values()], (HOPPER,)),
    ([DENSE, BLOCKS[25, 0]], (HOPPER, TRITON)),
    ([BLOCKS[5, 0], BLOCKS[25, 1], BLOCKS[5, 1]], (HOPPER,)),
    ([*PACKED.values(), *DOCUMENTS.values()], (HOPPER, VARLEN)),
    ([case for both in TREES.values() for case in both], (HOPPER, VARLEN)),
    ([*ALL_PACKED.values()], (VARLEN, FA4_VARLEN)),
    ([*WINDOWS.values()], (HOPPER, FA4)),
    ([BLOCKS[25, 0], BLOCKS[5, 0]], (FLEX,)),
    ([*WINDOWS.values(), *DOCUMENTS.values()], (FLEX,)),
]


class Gate(NamedTuple):
    """Ratio that must be at least ``least``; ``both``: of forward and backward together."""

    what: str
    ratio: Callable[[Pass | None], float | None]
    least: tuple[float, float]  # forward and backward
    both: bool = False


class MaskTimes:
    """Measured times of all parts of a run."""

    def __init__(self, parts: list[Results]) -> None:
        self.parts = parts

    def seconds(self, case: AnyCase, provider: str, which: Pass | None) -> float | None:
        if which is None:
            each = [self.seconds(case, provider, x) for x in ("forward", "backward")]
            return None if None in each else sum(x for x in each if x is not None)
        for part in self.parts:
            for row in part.rows:
                if (row.case, row.provider) == (case.name, provider) and row.timing(which) is not None:
                    return row.timing(which).median_s
        return None

    def times(self, case: AnyCase, provider: str, other: AnyCase, by: str) -> Callable[[Pass | None], float | None]:
        """Return the speedup over ``other`` by provider ``by``, preferably from a part with both."""

        def ratio(which: Pass | None) -> float | None:
            for found in (*(MaskTimes([part]) for part in self.parts), self):
                ratio = _divided(found.seconds(other, by, which), found.seconds(case, provider, which))
                if ratio is not None:
                    return ratio
            return None

        return ratio

    def speed(self, case: AnyCase, other: AnyCase) -> Callable[[Pass | None], float | None]:
        """Return the ratio of FLOP/s of visible pairs to ``other``'s, by the Hopper backend."""

        def ratio(which: Pass | None) -> float | None:
            assert which is not None
            found = self.times(case, HOPPER, other, HOPPER)(which)
            if found is None:
                return None
            part = self.parts[0]
            return found * part.work(case, which).flops / part.work(other, which).flops

        return ratio


def _divided(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a / b


def gates(found: MaskTimes) -> Iterator[Gate]:
    for share, least in ((25, 0.85), (5, 0.7)):
        case = BLOCKS[share, 0]
        yield Gate(f"blocks {share} %: of dense", found.speed(case, DENSE), (least, least))
        yield Gate(f"blocks {share} %: x FlexAttention", found.times(case, HOPPER, case, FLEX), (1.5, 1.5))
        name = f"blocks {share} %: with a bias (1, 1, M, N), of without"
        yield Gate(name, found.times(BLOCKS[share, 1], HOPPER, case, HOPPER), (0.7, 0.7))
    name = "blocks 25 %: Triton, dense over sparse"
    yield Gate(name, found.times(BLOCKS[25, 0], TRITON, DENSE, TRITON), (1 / 0.35, 1 / 0.35))
    for (dim, causal), case in ALL_PACKED.items():
        name = f"packed, D={dim}, {'causal' if causal else 'full'}: x FlashAttention-4"
        yield Gate(name, found.times(case, VARLEN, case, FA4_VARLEN), (1.0, 1.0))
    for width, case in WINDOWS.items():
        yield Gate(f"window {width}: x FlashAttention-4", found.times(case, HOPPER, case, FA4), (1.0, 1.0))
        yield Gate(f"window {width}: x FlexAttention", found.times(case, HOPPER, case, FLEX), (1.0, 1.0))
    for causal, case in DOCUMENTS.items():
        name = f"documents, {'causal' if causal else 'full'}: of the packed call"
        yield Gate(name, found.times(case, HOPPER, PACKED[causal], VARLEN), (0.9, 0.9))
        yield Gate(f"{name.split(':')[0]}: x FlexAttention", found.times(case, HOPPER, case, FLEX), (1.0, 1.0))
    for dim, (case, copies) in TREES.items():
        ratio = found.times(case, HOPPER, copies, VARLEN)
        yield Gate(f"tree of 8 responses, D={dim}: x packed sequences", ratio, (2.0, 2.0), both=True)
    for causal, least in ((False, 6.0), (True, 4.0)):
        name = f"dynamic mask, 2048 of 32768 keys, {'causal' if causal else 'full'}: x dense"
        yield Gate(name, found.times(KEPT[causal], HOPPER, WHOLE[causal], HOPPER), (least, least), both=True)


def table(found: MaskTimes) -> list[str]:
    lines = []
    for gate in gates(found):
        if gate.both:
            ratio = gate.ratio(None)
            words = "not measured" if ratio is None else f"{ratio:6.2f}"
            met = ratio is not None and ratio >= gate.least[0]
        else:
            ratios = [gate.ratio("forward"), gate.ratio("backward")]
            words = " ".join("     -" if x is None else f"{x:6.2f}" for x in ratios)
            met = all(x is not None and x >= least for x, least in zip(ratios, gate.least, strict=True))
        lines.append(f"{gate.what:64} {words:14} asked {gate.least[0]:.2f}  {'met' if met else 'MISSED'}")
    return lines


def kernels(case: AnyCase) -> None:
    """Print the kernels of a forward and backward by PyTorch's profiler, the longest first."""
    device = torch.device("cuda")
    who = VARLEN if case in PACKED.values() else HOPPER
    steps = next(p for p in providers(device) if p.name == who).prepare(case, case.inputs(device))
    for _ in range(3):
        steps.backward(steps.forward())
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        steps.backward(steps.forward())
        torch.cuda.synchronize()
    ordered = sorted(found.key_averages(), key=lambda x: -x.device_time_total)
    # Excludes the host's launch calls.
    ordered = [x for x in ordered if x.device_type == DeviceType.CUDA]
    print(f"{case.name}: {sum(x.device_time_total for x in ordered):.0f} us, {sum(x.count for x in ordered)} launches")
    for x in ordered[:14]:
        print(f"{x.device_time_total:8.0f} us {x.count:4} x {x.key[:90]}")


def chosen(word: str) -> list[tuple[list[AnyCase], tuple[str, ...]]]:
    """Return the parts with a case that has ``word`` in its name, with all of their cases for the ratios."""
    return [part for part in PARTS if any(word in case.name for case in part[0])]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the measurements to this file")
    parser.add_argument("--budget", type=float, default=190.0, metavar="SECONDS", help="nothing new starts after it")
    parser.add_argument("--commit", default="", help="commit to record, if there is no git checkout")
    parser.add_argument(
        "--cases", default="", metavar="WORD", help="only cases with this in their names, such as kept, documents"
    )
    parser.add_argument("--kernels", action="store_true", help="only list the kernels of dynamic masks")
    arguments = parser.parse_args()
    if arguments.kernels:
        word = arguments.cases or "kept"
        for case in {case.name: case for todo, _ in PARTS for case in todo if word in case.name}.values():
            kernels(case)
        return
    end, parts = time.monotonic() + arguments.budget, []
    for todo, who in chosen(arguments.cases):
        left = end - time.monotonic()
        if left <= 0:
            break
        options = RunOptions("cuda", providers=who, budget=left, commit=arguments.commit)
        parts.append(run(options, PlainProgress(), todo=todo))
        if arguments.json is not None:
            write_document(
                {"how": f"python -m {__spec__.name}", "parts": [asdict(x) for x in parts]},
                arguments.json,
            )
    found = MaskTimes(parts)
    for part in parts[:1]:
        print(f"calibration: {part.calibration}")
    for line in table(found):
        print(line)


if __name__ == "__main__":
    main()
