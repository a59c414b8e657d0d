"""The softmax's tiles on this GPU: what config.py chooses and what it might, as shares of a copy's speed.

    python benchmarks/softmax.py [--sweep] [--json FILE] [--commit HASH]
    python benchmarks/softmax.py --device cpu [--threads N] [--json FILE] [--commit HASH]

--sweep: only what falls short, bfloat16 rows of 16k and more, with configurations by which more bytes are on their way
(docs/notebook/softmax.md has what they should gain); less than a minute.
Every variant is held to float64 before it is timed. Needs a GPU of compute capability 8.0 or later.
--device cpu: forward and backward beside what a user would write in torch operators, in turns, each ratio the median of
the turns' ratios. With one thread the clock is the processor's time, which a busy machine stretches less.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from tilewise import softmax
from tilewise.bench.run import origin
from tilewise.bench.timing import Clock, calibrate
from tilewise.ops.softmax import Needs
from tilewise.ops.softmax.triton import launch
from tilewise.ops.softmax.triton.config import Config, softmax_config

LENGTHS = (1 << 10, 1 << 12, 1 << 13, 1 << 14, 1 << 15, 1 << 16, 1 << 17)
BYTES = 1 << 30  # of a tensor
DEVICE = torch.device("cuda")
# Of rows, their length, bytes of an element and whether it is a backward: names and configurations.
Variants = Callable[[int, int, int, bool], Iterator[tuple[str, Config]]]


def variants(rows: int, length: int, itemsize: int, backward: bool) -> Iterator[tuple[str, Config]]:
    processors = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    chosen = softmax_config(rows, rows, length, False, itemsize, backward, processors)
    yield "chosen", chosen
    if length in (1 << 14, 1 << 17):
        for block, warps in ((4096, 4), (2048, 2)):
            for pack in (False, True) if itemsize == 2 else (False,):
                shared = Config(True, 1, block, length // block, block, warps, pack)
                if shared != chosen:
                    yield f"programs of {block}, {warps} warps{', packed' if pack else ''}", shared


def sweep(rows: int, length: int, itemsize: int, backward: bool) -> Iterator[tuple[str, Config]]:
    """The compiler takes the registers that it likes; with fewer of them more programs fit a multiprocessor."""
    processors = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    yield "chosen", softmax_config(rows, rows, length, False, itemsize, backward, processors)
    blocks = {  # columns, warps, registers
        False: ((8192, 2, 128), (16384, 4, 128), (8192, 4, 64), (4096, 1, 128), (4096, 2, 64), (4096, 1, 112),
                (4096, 1, 104), (2048, 1, 64)),
        True: ((8192, 8, 56), (4096, 4, None), (4096, 2, 88), (2048, 2, 48), (2048, 1, 88)),
    }  # fmt: skip
    for block, warps, registers in blocks[backward]:
        if block <= length:
            name = f"programs of {block}, {warps} warps of {registers or 'free'} registers, packed"
            yield name, Config(True, 1, block, length // block, block, warps, True, registers)


def with_config(config: Config, step: Callable[[], Tensor]) -> Callable[[], Tensor]:
    def run() -> Tensor:
        launch.softmax_config = lambda *arguments: config
        return step()

    launch._prepare.cache_clear()
    return run


def measure(dtype: torch.dtype, length: int, copy: float, candidates: Variants, peers: bool) -> Iterator[dict]:
    clock = Clock(DEVICE, 0.02)
    rows = BYTES // (length * dtype.itemsize)
    x, dp = (torch.randn(rows, length, device=DEVICE, dtype=dtype) for _ in range(2))
    p = torch.softmax(x, -1)
    wide = torch.softmax(x[-64:].double(), -1), dp[-64:].double()
    p_wide = p[-64:].double()
    right = wide[0], p_wide * (wide[1] - (wide[1] * p_wide).sum(-1, keepdim=True))
    passes: tuple[tuple[str, Callable[[], Tensor], Callable[[], Tensor]], ...] = (
        ("forward", lambda: launch.forward(x, 1.0, None, None, 1), lambda: torch.softmax(x, -1)),
        (
            "backward",
            lambda: _dx(dp, p),
            lambda: torch.ops.aten._softmax_backward_data(dp, p, 1, dtype),
        ),
    )
    for n, (name, ours, theirs) in enumerate(passes):
        moved = (2 + n) * BYTES
        for variant, config in candidates(rows, length, dtype.itemsize, n == 1):
            step = with_config(config, ours)
            error = ((step()[-64:] - right[n]).abs().max() / right[n].abs().max()).item()
            assert error < (1e-5 if dtype == torch.float32 else 1e-2), f"{variant} is wrong: {error}"
            speed = moved / clock.time(step).median_s
            yield {"pass": name, "variant": variant, "bytes_per_second": speed, "of_copy": speed / copy}
        if peers:
            speed = moved / clock.time(theirs).median_s
            yield {"pass": name, "variant": "torch", "bytes_per_second": speed, "of_copy": speed / copy}


def _dx(dp: Tensor, p: Tensor) -> Tensor:
    dx, _ = launch.backward(dp, p, 1.0, None, 1, Needs(True, False))
    assert dx is not None
    return dx


def copy_speed() -> float:
    x = torch.zeros(BYTES, dtype=torch.uint8, device=DEVICE)
    y = torch.empty_like(x)
    return 2 * BYTES / Clock(DEVICE, 0.05).time(lambda: y.copy_(x)).median_s


# --- a CPU ---

SHAPES = ((64, 1024), (4096, 1024), (16, 65536))
GATE = 1.2  # of torch.softmax's time, for a plain call of these shapes along the last axis
# Name, shape, axis and what is given besides x.
OTHERS: tuple[tuple[str, tuple[int, ...], int, tuple[str, ...]], ...] = (
    ("few elements", (4, 8), -1, ()),
    ("first axis", (1024, 1024), 0, ()),
    ("an axis between", (16, 256, 256), 1, ()),
    ("transposed", (1024, 1024), -1, ("transposed",)),
    ("scale", (4096, 1024), -1, ("scale",)),
    ("bias of a row", (4096, 1024), -1, ("row",)),
    ("bias", (4096, 1024), -1, ("bias",)),
    ("mask", (4096, 1024), -1, ("mask",)),
    ("scale, bias, mask", (4096, 1024), -1, ("scale", "bias", "mask")),
)


def torch_softmax(x: Tensor, *, scale: float, bias: Tensor | None, mask: Tensor | None, dim: int) -> Tensor:
    """What a user would write."""
    s = x if scale == 1 else x * scale
    s = s if bias is None else s + bias
    s = s if mask is None else s.masked_fill(~mask, -torch.inf)
    return torch.softmax(s, dim)


def on_cpu(dtype: torch.dtype, shape: tuple[int, ...], dim: int, given: tuple[str, ...], seconds: float) -> dict:
    torch.manual_seed(0)
    x, dp = (torch.randn(shape).to(dtype) for _ in range(2))
    leaves = [(x.t().contiguous().t() if "transposed" in given else x).requires_grad_()]
    bias = mask = None
    if "bias" in given or "row" in given:
        bias = torch.randn(shape if "bias" in given else shape[-1:]).to(dtype).requires_grad_()
        leaves.append(bias)
    if "mask" in given:
        mask = torch.rand(shape) < 0.7
    scale = 0.3 if "scale" in given else 1.0

    def step(function: Callable[..., Tensor]) -> list[Tensor]:
        p = function(leaves[0], scale=scale, bias=bias, mask=mask, dim=dim)
        return [p, *torch.autograd.grad(p, leaves, dp)]

    functions = {"tilewise": softmax, "torch": torch_softmax}
    for ours, theirs in zip(step(softmax), step(torch_softmax), strict=True):
        error = ((ours - theirs).abs().max() / theirs.abs().max()).item()
        assert error < (1e-4 if dtype == torch.float32 else 5e-2), f"{shape} {given}: wrong by {error}"
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    start = time.perf_counter()
    step(softmax)
    calls = max(int(1e-3 / (time.perf_counter() - start)), 1)  # of a turn
    turns: dict[str, list[float]] = {name: [] for name in functions}
    while time.perf_counter() - start < seconds or len(turns["torch"]) < 9:
        for name, function in functions.items():
            before = clock()
            for _ in range(calls):
                step(function)
            turns[name].append((clock() - before) / calls)
    ratios = sorted(ours / theirs for ours, theirs in zip(turns["tilewise"], turns["torch"], strict=True))
    return {
        "median_seconds": {name: statistics.median(times) for name, times in turns.items()},
        "least_seconds": {name: min(times) for name, times in turns.items()},
        "turns": len(ratios),
        "ratio": statistics.median(ratios),
        "ratio_of_least": min(turns["tilewise"]) / min(turns["torch"]),
    }


def measure_cpu(seconds: float) -> Iterator[dict]:
    for dtype in (torch.float32, torch.bfloat16):
        for name, shape, dim, given in (*(("plain", shape, -1, ()) for shape in SHAPES), *OTHERS):
            found = on_cpu(dtype, shape, dim, given, seconds)
            gate = {"gate": GATE, "met": found["ratio"] <= GATE} if name == "plain" else {}
            case = {"case": name, "dtype": str(dtype).removeprefix("torch."), "shape": list(shape), "dim": dim}
            yield {**case, "threads": torch.get_num_threads(), **found, **gate}


def main_cpu(threads: list[int], path: Path | None, commit: str) -> None:
    rows = []
    for number in threads:
        torch.set_num_threads(number)
        for row in measure_cpu(2.0):
            rows.append(row)
            ours, theirs = (row["median_seconds"][name] * 1e3 for name in ("tilewise", "torch"))
            words = f"{row['dtype']:9}{row['shape']!s:16}{row['case']:18} {number} threads"
            gate = {True: "met", False: "MISSED", None: ""}[row.get("met")]
            print(
                f"{words} {ours:8.3f} ms, torch {theirs:8.3f} ms: {row['ratio']:.2f}, "
                f"of the least times {row['ratio_of_least']:.2f} {gate}",
                flush=True,
            )
    if path is not None:
        document = {**origin(torch.device("cpu"), commit), "rows": rows}
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--sweep", action="store_true", help="only the configurations that may help what falls short")
    parser.add_argument("--commit", default="", help="the commit that is measured, where there is no git")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 2], help="of a CPU, one run for each")
    arguments = parser.parse_args()
    if arguments.device == "cpu":
        main_cpu(arguments.threads, arguments.json, arguments.commit)
        return
    copy = copy_speed()
    print(f"{torch.cuda.get_device_name(DEVICE)}: copy {copy / 1e12:.3f} TB/s", flush=True)
    found = []
    candidates, dtypes, lengths = variants, (torch.bfloat16, torch.float32), LENGTHS
    if arguments.sweep:
        candidates, dtypes, lengths = sweep, dtypes[:1], tuple(n for n in LENGTHS if n >= 1 << 14)
    for dtype in dtypes:
        for length in lengths:
            for row in measure(dtype, length, copy, candidates, not arguments.sweep):
                found.append({"dtype": str(dtype), "length": length, **row})
                print(
                    f"{str(dtype).removeprefix('torch.'):8} {length:6} {row['pass']:8} {row['of_copy']:.3f} of copy  "
                    f"{row['variant']}",
                    flush=True,
                )
    if arguments.json is not None:
        document = {
            **origin(DEVICE, arguments.commit),
            "calibration": asdict(calibrate(Clock(DEVICE, 0.3), ["bfloat16"])),
            "copy_bytes_per_second": copy,
            "rows": found,
        }
        arguments.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
