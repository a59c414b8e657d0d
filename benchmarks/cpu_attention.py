"""tilewise's CPU backend beside PyTorch's scaled_dot_product_attention: time in turns, memory in fresh processes.

    python benchmarks/cpu_attention.py [--cases SUBSTRING,...] [--repeats N] [--threads N] [--json PATH]

Both get the same inputs, and their outputs and gradients must agree before anything is timed. Then they take turns, and
the ratio is that of their medians. Memory is what the peak of the resident set gains in one step, less what the step
returns; a fresh process measures each length (on Linux). The exit status is 1 if a gate is missed.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
from torch import Tensor

import tilewise

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # relative to the largest element
MEMORY_LENGTHS = (1024, 2048, 4096)
Step = Callable[[], tuple[Tensor, ...]]


@dataclass(frozen=True)
class Case:
    """``length`` queries and keys of dimension 64 a head. ``gate``: how many of our times SDPA's must be, at least."""

    name: str
    dtype: torch.dtype
    gate: float
    batch: int = 1
    heads: int = 8
    length: int = 4096
    bias_batch: int | None = None  # of a trainable bias (bias_batch, heads, length, length)
    backward: bool = True


# Within 5% of SDPA without a bias gradient; faster by a half, and in bfloat16 by 2.5, with one.
CASES = (
    Case("forward, float32", torch.float32, 1 / 1.05, backward=False),
    Case("forward, bfloat16", torch.bfloat16, 1 / 1.05, backward=False),
    Case("forward and backward, float32", torch.float32, 1 / 1.05),
    Case("forward and backward, bfloat16", torch.bfloat16, 1 / 1.05),
    Case("trainable bias (B,H,M,N), float32", torch.float32, 1.5, bias_batch=1),
    Case("trainable bias (B,H,M,N), bfloat16", torch.bfloat16, 2.5, bias_batch=1),
    Case("trainable bias (1,H,M,N), float32", torch.float32, 1.5, batch=2, heads=4, bias_batch=1),
    Case("trainable bias (1,H,M,N), bfloat16", torch.bfloat16, 2.5, batch=2, heads=4, bias_batch=1),
)


def inputs(case: Case, length: int) -> list[Tensor]:
    """q, k, v, dO and the bias if there is one, made without a temporary that the memory's peak would remember."""
    torch.manual_seed(0)
    shapes = [(case.batch, case.heads, length, 64)] * 4
    if case.bias_batch is not None:
        shapes.append((case.bias_batch, case.heads, length, length))
    return [torch.empty(shape, dtype=case.dtype).normal_() for shape in shapes]


def step(case: Case, implementation: str, tensors: list[Tensor]) -> Step:
    """One forward, or one forward and backward, that returns the output and the gradients."""
    q, k, v, do, *rest = tensors
    leaves = [x.detach().requires_grad_(case.backward) for x in (q, k, v, *rest)]
    bias = leaves[3] if rest else None

    def run() -> tuple[Tensor, ...]:
        if implementation == "tilewise":
            o = tilewise.attention(*leaves[:3], bias=bias, backend="cpu")
        else:
            o = torch.nn.functional.scaled_dot_product_attention(*leaves[:3], attn_mask=bias)
        return (o.detach(), *torch.autograd.grad(o, leaves, do)) if case.backward else (o,)

    return run


def difference(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> float:
    """The largest difference, relative to the largest element of its tensor."""
    return max(((x - y).abs().max() / y.abs().max()).item() for x, y in zip(a, b, strict=True))


def in_turns(steps: dict[str, Step], repeats: int) -> dict[str, list[float]]:
    """Seconds of each step, ``repeats`` times each, one after the other; the first turn does not count."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(repeats + 1):
        for name, run in steps.items():
            start = time.perf_counter()
            run()
            if turn > 0:
                times[name].append(time.perf_counter() - start)
    return times


def peak_memory() -> int:
    """The resident set's peak since the last call, in bytes."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from what is resident now
    return int(fields["VmHWM"].split()[0]) * 1024


def extra_memory(case: Case, implementation: str, length: int) -> int:
    """Bytes that the peak of this process gains in a step beyond what the step returns. For a fresh process only."""
    step(case, implementation, inputs(case, 64))()  # what is loaded on the first call is no working memory
    tensors = inputs(case, length)
    run = step(case, implementation, tensors)
    peak_memory()
    before = peak_memory()
    results = run()
    return peak_memory() - before - sum(x.numel() * x.itemsize for x in results)


def extra_memory_in_child(case: Case, implementation: str, length: int, threads: int) -> int:
    command = [sys.executable, __file__, "--threads", str(threads), "--memory", case.name, implementation, str(length)]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def measure(case: Case, repeats: int, threads: int) -> dict:
    tensors = inputs(case, case.length)
    steps = {name: step(case, name, tensors) for name in ("SDPA", "tilewise")}
    error = difference(steps["tilewise"](), steps["SDPA"]())
    if error > TOLERANCES[case.dtype]:
        raise SystemExit(f"{case.name}: the results differ by {error:.1e} of their largest element")
    times = in_turns(steps, repeats)
    del tensors, steps
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    memory = {
        name: {length: extra_memory_in_child(case, name, length, threads) for length in MEMORY_LENGTHS}
        for name in medians
    }
    ratio = medians["SDPA"] / medians["tilewise"]
    return {
        **asdict(case),
        "dtype": str(case.dtype).removeprefix("torch."),
        "difference": error,
        "median_seconds": medians,
        "seconds": times,
        "ratio": ratio,
        "met": ratio >= case.gate,
        "extra_bytes": memory,
    }


def cpu_model() -> str:
    """As the kernel names it, with the instructions that decide a product's speed."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return platform.processor() or platform.machine()
    lines = dict(line.split(":", 1) for line in path.read_text().splitlines() if ":" in line)
    fields = {name.strip(): value.strip() for name, value in lines.items()}
    flags = [x for x in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if x in fields.get("flags", "").split()]
    family = f"family {fields.get('cpu family')} model {fields.get('model')}"
    return f"{fields.get('model name', platform.machine())}, {family}, {' '.join(flags)}"


def git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="", help="only cases whose name contains one of these, comma-separated")
    parser.add_argument("--repeats", type=int, default=7, help="turns of each implementation (default 7)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--memory", nargs=3, metavar=("CASE", "IMPLEMENTATION", "LENGTH"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.memory is not None:
        name, implementation, length = args.memory
        print(extra_memory(next(c for c in CASES if c.name == name), implementation, int(length)))
        return

    wanted = [c for c in CASES if any(part in c.name for part in args.cases.split(","))]
    print(f"{cpu_model()}; {args.threads} threads; torch {torch.__version__}; median of {args.repeats} turns")
    lengths = " ".join(f"{length:>6}" for length in MEMORY_LENGTHS)
    print(f"{'':36}{'SDPA':>9}{'tilewise':>10}{'ratio':>8}{'gate':>7}       extra MiB: SDPA / tilewise at {lengths}")
    rows = []
    for case in wanted:
        row = measure(case, args.repeats, args.threads)
        rows.append(row)
        seconds, extra = row["median_seconds"], row["extra_bytes"]
        mebibytes = ("".join(f"{extra[name][n] / 2**20:7.0f}" for n in MEMORY_LENGTHS) for name in ("SDPA", "tilewise"))
        print(
            f"{case.name:36}{seconds['SDPA'] * 1e3:6.0f} ms{seconds['tilewise'] * 1e3:7.0f} ms{row['ratio']:8.2f}"
            f"{case.gate:7.2f} {'met   ' if row['met'] else 'MISSED'}{' /'.join(mebibytes)}",
            flush=True,
        )
    if args.json is not None:
        document = {
            "commit": git("rev-parse", "HEAD"),
            "changed_files": git("status", "--short").splitlines(),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "cpu": cpu_model(),
            "threads": args.threads,
            "torch": torch.__version__,
            "rows": rows,
        }
        args.json.write_text(json.dumps(document, indent=1) + "\n")
    if not all(row["met"] for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
