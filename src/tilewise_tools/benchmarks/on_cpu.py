"""Attention and softmax on a CPU, compared with PyTorch."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import tilewise
from tilewise_tools.benchmarks.turns import (
    Options,
    Step,
    difference,
    dtype_name,
    elapsed,
    in_turns,
    is_wanted,
    medians,
    verdict,
)

# --- attention ---

ATTENTION_TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
MEMORY_LENGTHS = (1024, 2048, 4096)
CLEAR_REFS = Path("/proc/self/clear_refs")  # on Linux


@dataclass(frozen=True)
class CpuCase:
    """``length`` queries and keys, head dimension 64. ``gate``: required speedup over SDPA."""

    name: str
    dtype: torch.dtype
    gate: float
    batch: int = 1
    heads: int = 8
    length: int = 4096
    bias_batch: int | None = None  # of a trainable bias (bias_batch, heads, length, length)
    backward: bool = True


# Within 5% of SDPA without a bias gradient; 1.5 times as fast with one, 2.5 times in bfloat16.
CASES = (
    CpuCase("forward, float32", torch.float32, 1 / 1.05, backward=False),
    CpuCase("forward, bfloat16", torch.bfloat16, 1 / 1.05, backward=False),
    CpuCase("forward and backward, float32", torch.float32, 1 / 1.05),
    CpuCase("forward and backward, bfloat16", torch.bfloat16, 1 / 1.05),
    CpuCase("trainable bias (B,H,M,N), float32", torch.float32, 1.5, bias_batch=1),
    CpuCase("trainable bias (B,H,M,N), bfloat16", torch.bfloat16, 2.5, bias_batch=1),
    CpuCase("trainable bias (1,H,M,N), float32", torch.float32, 1.5, batch=2, heads=4, bias_batch=1),
    CpuCase("trainable bias (1,H,M,N), bfloat16", torch.bfloat16, 2.5, batch=2, heads=4, bias_batch=1),
)


def attention_inputs(case: CpuCase, length: int) -> list[Tensor]:
    """Return q, k, v, dO and any bias, without temporaries, which would raise the peak memory."""
    torch.manual_seed(0)
    shapes = [(case.batch, case.heads, length, 64)] * 4
    if case.bias_batch is not None:
        shapes.append((case.bias_batch, case.heads, length, length))
    return [torch.empty(shape, dtype=case.dtype).normal_() for shape in shapes]


def attention_step(case: CpuCase, implementation: str, tensors: list[Tensor]) -> Step:
    """Return a forward, or a forward and backward, that returns the output and the gradients."""
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


def peak_memory() -> int:
    """Return the peak of the resident set since the last call, in bytes."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    CLEAR_REFS.write_text("5")  # resets the peak to the current resident set
    return int(fields["VmHWM"].split()[0]) * 1024


def extra_memory(case: CpuCase, implementation: str, length: int) -> int:
    """Return the growth of a fresh process's peak memory in a step, minus its results, in bytes."""
    attention_step(case, implementation, attention_inputs(case, 64))()  # excludes what the first call loads
    tensors = attention_inputs(case, length)
    run = attention_step(case, implementation, tensors)
    peak_memory()
    before = peak_memory()
    results = run()
    return peak_memory() - before - sum(x.numel() * x.itemsize for x in results)


def extra_memory_in_child(case: CpuCase, implementation: str, length: int, threads: int) -> int:
    memory = ["--threads", str(threads), "--memory", case.name, implementation, str(length)]
    command = [sys.executable, "-m", "tilewise_tools.benchmarks.sweep", "attention-cpu", *memory]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def memory_of(name: str, implementation: str, length: str, threads: int) -> int:
    """Run `extra_memory` in the child of `extra_memory_in_child`."""
    torch.set_num_threads(threads)
    return extra_memory(next(case for case in CASES if case.name == name), implementation, int(length))


def measure_attention(case: CpuCase, turns: int, threads: int) -> dict:
    tensors = attention_inputs(case, case.length)
    steps = {name: attention_step(case, name, tensors) for name in ("SDPA", "tilewise")}
    error = difference(steps["tilewise"](), steps["SDPA"](), ATTENTION_TOLERANCES[case.dtype], case.name)
    times = in_turns({name: partial(elapsed, step) for name, step in steps.items()}, turns, unmeasured=1)
    del tensors, steps
    median = medians(times)
    lengths = MEMORY_LENGTHS if CLEAR_REFS.exists() else ()
    memory = {
        name: {length: extra_memory_in_child(case, name, length, threads) for length in lengths} for name in median
    }
    ratio = median["SDPA"] / median["tilewise"]
    return {
        **asdict(case),
        "dtype": dtype_name(case.dtype),
        "threads": threads,
        "difference": error,
        "median_seconds": median,
        "seconds": times,
        "ratio": ratio,
        "met": ratio >= case.gate,
        "extra_bytes": memory,
    }


def attention(options: Options) -> dict[str, Any]:
    lengths = " ".join(f"{length:>6}" for length in MEMORY_LENGTHS)
    print(f"{'':48}{'SDPA':>9}{'tilewise':>10}{'ratio':>8}{'gate':>7}       extra MiB: SDPA / tilewise at {lengths}")
    rows = []
    for threads in options.threads:
        torch.set_num_threads(threads)
        for case in CASES:
            if not is_wanted(case.name, options):
                continue
            row = measure_attention(case, options.turns, threads)
            rows.append(row)
            seconds, extra = row["median_seconds"], row["extra_bytes"].values()
            mebibytes = ("".join(f"{n / 2**20:7.0f}" for n in of.values()) for of in extra)
            print(
                f"{case.name:36}{threads:4} threads{seconds['SDPA'] * 1e3:6.0f} ms{seconds['tilewise'] * 1e3:7.0f} ms"
                f"{row['ratio']:8.2f}{case.gate:7.2f} {verdict(row['met']):6}{' /'.join(mebibytes)}",
                flush=True,
            )
    return {"rows": rows}


# --- softmax ---

SOFTMAX_SECONDS = 2.0  # of a row
SOFTMAX_GATE = 1.2  # of torch.softmax's time, for a plain call along the last axis
# Name, shape, axis and what is given besides x.
SOFTMAX_CASES: tuple[tuple[str, tuple[int, ...], int, tuple[str, ...]], ...] = (
    ("plain", (64, 1024), -1, ()),
    ("plain", (4096, 1024), -1, ()),
    ("plain", (16, 65536), -1, ()),
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
    """Compute scale, bias, mask and softmax with torch operators, as a user would."""
    s = x if scale == 1 else x * scale
    s = s if bias is None else s + bias
    s = s if mask is None else s.masked_fill(~mask, -torch.inf)
    return torch.softmax(s, dim)


def measure_softmax(
    dtype: torch.dtype, shape: tuple[int, ...], dim: int, given: tuple[str, ...], turns: int
) -> dict[str, Any]:
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

    ours, theirs = partial(step, tilewise.softmax), partial(step, torch_softmax)
    difference(ours(), theirs(), 1e-4 if dtype == torch.float32 else 5e-2, f"{shape} {given}")
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    calls = max(int(1e-3 / elapsed(ours)), 1)  # of a turn
    takes = {"tilewise": partial(elapsed, ours, calls, clock), "torch": partial(elapsed, theirs, calls, clock)}
    times = in_turns(takes, turns, seconds=SOFTMAX_SECONDS)
    ratios = [mine / its for mine, its in zip(times["tilewise"], times["torch"], strict=True)]
    return {
        "median_seconds": medians(times),
        "least_seconds": {name: min(seconds) for name, seconds in times.items()},
        "turns": len(ratios),
        "ratio": statistics.median(ratios),
        "ratio_of_least": min(times["tilewise"]) / min(times["torch"]),
    }


def softmax(options: Options) -> dict[str, Any]:
    rows = []
    for threads in options.threads:
        torch.set_num_threads(threads)
        for dtype in (torch.float32, torch.bfloat16):
            for name, shape, dim, given in SOFTMAX_CASES:
                if not is_wanted(f"{name}, {dtype_name(dtype)}", options):
                    continue
                found = measure_softmax(dtype, shape, dim, given, options.turns)
                gate = {"gate": SOFTMAX_GATE, "met": found["ratio"] <= SOFTMAX_GATE} if name == "plain" else {}
                case = {"case": name, "dtype": dtype_name(dtype), "shape": list(shape), "dim": dim, "threads": threads}
                row = {**case, **found, **gate}
                rows.append(row)
                ours, theirs = (found["median_seconds"][who] * 1e3 for who in ("tilewise", "torch"))
                print(
                    f"{row['dtype']:9}{shape!s:16}{name:18} {threads} threads {ours:8.3f} ms, torch {theirs:8.3f} ms: "
                    f"{row['ratio']:.2f}, of the least times {row['ratio_of_least']:.2f} {verdict(row.get('met'))}",
                    flush=True,
                )
    return {"rows": rows}
