"""tilewise.matmul beside torch's products on a GPU, bfloat16: results compared, then times taken in turns.

    python benchmarks/matmul.py [--rounds N] [--json PATH] [--commit HASH]

A GPU is limited by its power, so only ratios of times taken in turns mean anything: the median of each, by CUDA events,
with the L2 cache flushed before each. A gate is how many of our times torch's must be, at least; rows without one are
there to learn from. The exit status is 1 if a gate is missed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from tilewise import matmul
from tilewise.bench.run import origin
from tilewise.bench.timing import Clock, calibrate
from tilewise.ops.matmul import hopper
from tilewise.ops.matmul.config import hopper_config
from tilewise.ops.matmul.problem import describe

Step = Callable[[], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Row:
    name: str
    tflops: float
    torch_tflops: float
    ratio: float  # torch's time / ours
    gate: float | None


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def with_config(a: Tensor, b: Tensor, c: Tensor | None, **changes: int) -> Step:
    """The Hopper kernel in a configuration that it does not choose by itself."""
    product, y = describe(a, b, c, ()), a.new_empty(a.shape[0], b.shape[1])
    assert product is not None
    launch = hopper.prepare(product, a, b, c, y, 1.0, 1.0, replace(hopper_config(product), **changes))

    def step() -> tuple[Tensor]:
        launch(a, b, c, y)
        return (y,)

    return step


def gradients(function: Callable[..., Tensor], *inputs: Tensor) -> Step:
    leaves = [x.detach().requires_grad_() for x in inputs]
    y = function(*leaves)
    dy = normal(*y.shape)
    return lambda: torch.autograd.grad(y, leaves, dy, retain_graph=True)


def cases() -> Iterator[tuple[str, float, float | None, Step, Step]]:
    """Name, FLOP, gate, our step, torch's."""
    for n, gate in ((4096, 0.97), (8192, 0.97), (2048, None), (1024, None)):
        a, b = normal(n, n), normal(n, n)
        yield f"{n}³", 2 * n**3, gate, lambda a=a, b=b: (matmul(a, b),), lambda a=a, b=b: (a @ b,)
    a, b = normal(8192, 8192), normal(8192, 8192)
    yield "8192³, B transposed", 2 * 8192**3, None, lambda: (matmul(a, b.mT),), lambda: (a @ b.mT,)
    a, b = normal(4096, 4096), normal(4096, 4096)
    torch.manual_seed(0)
    ours = gradients(matmul, a, b)
    torch.manual_seed(0)
    yield "4096³ backward", 4 * 4096**3, 0.97, ours, gradients(torch.mm, a, b)
    a, b, c = normal(8192, 512), normal(512, 8192), normal(8192, 8192)
    flops = 2 * 8192 * 8192 * 512
    yield "8192 × 8192 × 512", flops, None, lambda: (matmul(a, b),), lambda: (a @ b,)
    theirs = lambda: (torch.addmm(c, a, b),)  # noqa: E731
    yield "8192 × 8192 × 512 + C", flops, 1.5, lambda: (matmul(a, b, c=c),), theirs
    yield "the same, in turns", flops, None, with_config(a, b, c, turns=True), theirs
    row = c[0].clone()
    yield "8192 × 8192 × 512 + row", flops, None, lambda: (matmul(a, b, c=row),), lambda: (torch.addmm(row, a, b),)
    torch.manual_seed(0)
    ours = gradients(lambda a, b, c: matmul(a, b, c=c), a, b, c)
    torch.manual_seed(0)
    yield (
        "8192 × 8192 × 512 + C backward",
        2 * flops,
        0.97,
        ours,
        gradients(lambda a, b, c: torch.addmm(c, a, b), a, b, c),
    )
    # Its two products one by one, each of 128 tiles and 128 steps, with what may help where all tiles run at once.
    dy = normal(8192, 8192)
    for name, x, y in ((" dA, 8192 × 512", dy, b.mT), (" dB, 512 × 8192", a.mT, dy)):
        theirs = lambda x=x, y=y: (x @ y,)  # noqa: E731
        yield name, flops, None, lambda x=x, y=y: (matmul(x, y),), theirs
        for words, changes in (
            ("256 × 128 tiles", {"rows": 128, "block_n": 128, "store_buffers": 1}),
            ("neighbours share A", {"group_m": 1}),
        ):
            yield f"  {words}", flops, None, with_config(x, y, None, **changes), theirs
    q, k = normal(4, 16, 4096, 128), normal(4, 16, 4096, 128)
    flops = 2 * 64 * 4096 * 4096 * 128
    yield "scores of 64 heads", flops, None, lambda: (matmul(q, k.mT, backend="hopper"),), lambda: (q @ k.mT,)


def compare(ours: Step, theirs: Step) -> None:
    for x, y in zip(ours(), theirs(), strict=True):
        error, largest = (x.float() - y.float()).abs().max().item(), y.float().abs().max().item()
        assert error <= 2e-2 * largest, f"results differ by {error:.3e}, the largest element is {largest:.3e}"


def seconds_in_turns(steps: list[Step], rounds: int) -> list[float]:
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    events: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in steps]
    for n in range(rounds + 3):
        for i in range(len(steps)):
            which = (i + n) % len(steps)
            flush.zero_()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            steps[which]()
            end.record()
            if n >= 3:
                events[which].append((start, end))
    torch.cuda.synchronize()
    return [statistics.median(start.elapsed_time(end) / 1e3 for start, end in pairs) for pairs in events]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--commit", default="", help="the commit that is measured, where there is no git")
    args = parser.parse_args()
    rows = []
    for name, flops, gate, ours, theirs in cases():
        compare(ours, theirs)
        mine, its = seconds_in_turns([ours, theirs], args.rounds)
        row = Row(name, flops / mine / 1e12, flops / its / 1e12, its / mine, gate)
        rows.append(row)
        verdict = "" if gate is None else f"   gate {gate}: {'met' if row.ratio >= gate else 'MISSED'}"
        print(
            f"{name:32} {row.tflops:6.0f} TFLOP/s, torch {row.torch_tflops:6.0f}, ratio {row.ratio:.3f}{verdict}",
            flush=True,
        )
    if args.json is not None:
        device = torch.device("cuda")
        found = {
            **origin(device, args.commit),
            "calibration": asdict(calibrate(Clock(device, 0.3), ["bfloat16"])),
            "rows": [asdict(r) for r in rows],
        }
        args.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return int(any(row.gate is not None and row.ratio < row.gate for row in rows))


if __name__ == "__main__":
    sys.exit(main())
