"""Attention of atoms in windows of keys: host and device time, against other implementations.

    python -m tilewise_tools.benchmarks.windows [--samples 1 16] [--tiles] [--peers flex einsum]

host: microseconds until a call returns, without synchronization. device: the sum of its kernels' times, and their
number. clock: by CUDA events with a flushed L2 cache, as in `tilewise bench`. --tiles: numbers of warps and registers
other than those of src/tilewise/windows/config.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

from tilewise import clear_caches
from tilewise.windows import config, launch
from tilewise_tools.bench import windows
from tilewise_tools.bench.operators import OperatorInputs
from tilewise_tools.bench.timing import Clock, host_seconds
from tilewise_tools.benchmarks.turns import difference

DEVICE = torch.device("cuda")
Step = Callable[[], object]
TILES = [  # forward_warps, backward_warps, forward_registers, backward_registers
    (4, 8, None, None),
    (4, 8, 128, 128),
    (2, 4, None, None),
    (2, 4, 168, 168),
    (4, 4, 104, 168),
    (8, 8, 80, 96),
    (8, 16, None, None),
    (8, 16, 64, 64),
]


def steps(case: windows.WindowCase, x: OperatorInputs, provider: str) -> tuple[Step, Step]:
    makers = {"einsum": windows.einsum, "einsum-compiled": windows.einsum_compiled, "flex": windows.flex}
    forward = makers[provider](case, x) if provider in makers else windows.tilewise_windows(case, x, provider)
    o = forward()
    return forward, lambda: torch.autograd.grad(o, x.leaves, x.do, retain_graph=True)


def kernels(step: Step, calls: int = 20) -> tuple[float, float]:
    """Return the total microseconds and the number of a call's kernels."""
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(calls):
            step()
        torch.cuda.synchronize()
    events = [e for e in found.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    return sum(e.time_range.elapsed_us() for e in events) / calls, len(events) / calls


def report(name: str, step: Step, clock: Clock) -> None:
    step()
    host = host_seconds(step, DEVICE) * 1e6
    device, count = kernels(step)
    timing = clock.time(step)
    print(
        f"{name:42s} host {host:7.1f}  device {device:7.1f} in {count:4.1f} launches  "
        f"clock {timing.median_s * 1e6:7.1f} (low {timing.low_s * 1e6:.1f})",
        flush=True,
    )


def check(case: windows.WindowCase, x: OperatorInputs) -> None:
    exact = case.exact(x)
    o = windows.tilewise_windows(case, x, "auto")()
    found = (o, *torch.autograd.grad(o, x.leaves, x.do))
    worst = difference([y.double() for y in found], [y.double() for y in exact.values()], 3e-2, "tilewise")
    print(f"largest difference to float64, of the largest element: {worst:.1e}")


def with_tiles(warps: tuple[int | None, ...]) -> None:
    of = config.tiles_of
    names = ("forward_warps", "backward_warps", "forward_registers", "backward_registers")
    launch.tiles_of = lambda *a: of(*a)._replace(**dict(zip(names, warps, strict=True)))
    clear_caches()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, nargs="*", default=[1])
    parser.add_argument("--tiles", action="store_true")
    parser.add_argument("--peers", nargs="*", default=["flex", "einsum", "einsum-compiled"])
    options = parser.parse_args()
    print(torch.cuda.get_device_name(), torch.__version__)
    clock = Clock(DEVICE, 0.3)
    for samples in options.samples:
        case = windows.WindowCase("windows", samples, 4, 10240, 32)
        x = case.inputs(DEVICE)
        check(case, x)
        for provider in ("auto", *options.peers):
            for which, step in zip(("forward", "backward"), steps(case, x, provider), strict=True):
                report(f"{samples} samples, {provider}, {which}", step, clock)
        if options.tiles:
            for warps in TILES:
                with_tiles(warps)
                for which, step in zip(("forward", "backward"), steps(case, x, "auto"), strict=True):
                    report(f"{samples} samples, {warps}, {which}", step, clock)
            launch.tiles_of = config.tiles_of
            for launch.PROGRAMS in (1024, 1 << 30) if samples > 1 else ():
                clear_caches()
                report(f"{samples} samples, {launch.PROGRAMS} programs, forward", steps(case, x, "auto")[0], clock)
            launch.PROGRAMS = config.PROGRAMS
            clear_caches()


if __name__ == "__main__":
    main()
