"""Host time of a call with a new length on a GPU, and of the backward of a tiny call."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tilewise import attention
from tilewise_tools.bench.cases import tiny
from tilewise_tools.bench.providers import providers
from tilewise_tools.bench.timing import host_seconds
from tilewise_tools.benchmarks.turns import Options, in_turns, is_wanted

GPU = torch.device("cuda")
COLUMNS = ("new", "met before", "same as before")
HEADS, DIM, LONGEST = 8, 64, 1024
# Lengths with equal numbers of tiles, not divisible by 16, so that Triton compiles once for all. WARM runs first, with
# full and partial tiles of 64 and 128.
WARM = (*range(515, 531, 4), *range(579, 595, 4), 576, 640)
NEW = (*range(531, 576, 4), *range(595, 640, 4))
Call = Callable[[tuple[Tensor, ...]], Any]


def normal(*shape: int, grad: bool = False) -> Tensor:
    return torch.randn(shape, device=GPU, dtype=torch.bfloat16, requires_grad=grad)


def inputs_of(kind: str) -> Callable[[int], tuple[Tensor, ...]]:
    if kind == "decoding":
        q = normal(1, HEADS, 1, DIM)
        k, v = (normal(1, HEADS, LONGEST, DIM) for _ in range(2))
        return lambda n: (q, k[:, :, :n], v[:, :, :n])
    return lambda n: tuple(normal(1, HEADS, n, DIM, grad=kind != "forward") for _ in range(3))


def steps(kind: str) -> dict[str, tuple[AbstractContextManager, Call]]:
    """Return (context, call) of each provider.

    With as many queries as keys, tilewise's causal (aligned at the last key) equals SDPA's is_causal.
    """
    ordered = kind != "decoding"

    def theirs(x: tuple[Tensor, ...]) -> Tensor:
        return F.scaled_dot_product_attention(*x, is_causal=ordered)

    def both(call: Call) -> Call:
        def step(x: tuple[Tensor, ...]) -> None:
            o = call(x)
            torch.autograd.grad(o, x, o.detach())

        return step

    found: dict[str, tuple[AbstractContextManager, Call]] = {
        "tilewise": (nullcontext(), lambda x: attention(*x, causal=True)),
        "sdpa-flash": (sdpa_kernel(SDPBackend.FLASH_ATTENTION), theirs),
        "sdpa-cudnn": (sdpa_kernel(SDPBackend.CUDNN_ATTENTION), theirs),
    }
    if kind == "forward and backward":
        return {name: (context, both(call)) for name, (context, call) in found.items()}
    return found


def microseconds(call: Call, xs: Iterable[tuple[Tensor, ...]], *, twice: bool = False) -> float:
    """Return the median time of calls on an idle device; ``twice``: of the second of two equal calls."""
    times = []
    for x in xs:
        if twice:
            call(x)
        torch.cuda.synchronize()
        start = time.perf_counter()
        call(x)
        times.append(time.perf_counter() - start)
    torch.cuda.synchronize()
    return 1e6 * statistics.median(times)


def row_of(call: Call, kind: str) -> list[float]:
    make = inputs_of(kind)
    for n in (*WARM, *WARM):
        call(make(n))
    xs = [make(n) for n in NEW]
    new = microseconds(call, xs)
    return [new, microseconds(call, xs), microseconds(call, xs, twice=True)]


class _Nothing(torch.autograd.Function):
    """Empty function, to measure autograd's overhead."""

    @staticmethod
    def forward(ctx, q, k, v):
        return torch.empty_like(q)

    @staticmethod
    def backward(ctx, do):
        return do, do, do


def backwards(turns: int) -> dict[str, list[float]]:
    """Measure the backward of a tiny call in the calling thread and in autograd's thread, in microseconds."""
    case = tiny("bfloat16", bias=False)
    x = case.inputs(GPU)
    known = {provider.name: provider for provider in providers(GPU)}
    wanted = ("tilewise-hopper", "tilewise-triton", "sdpa-flash", "sdpa-cudnn", "fa4")
    takes: dict[str, Callable[[], list[float]]] = {}

    def take(o: Tensor) -> list[float]:
        found = []
        for many in (False, True):
            step = lambda: torch.autograd.grad(o, x.leaves, x.do, retain_graph=True)  # noqa: E731
            with torch.autograd.set_multithreading_enabled(many):
                for _ in range(20):
                    step()
                found.append(1e6 * host_seconds(step, GPU))
        return found

    for name in wanted:
        if known[name].unavailable or known[name].declines(case):
            print(f"  {name}: {known[name].unavailable or known[name].declines(case)}")
            continue
        found = known[name].prepare(case, x)
        with found.context():
            o = found.forward()
        takes[name] = lambda o=o: take(o)
    o = _Nothing.apply(x.q, x.k, x.v)
    takes["nothing"] = lambda: take(o)
    rows = in_turns(takes, turns)
    return {name: [statistics.median(column) for column in zip(*found, strict=True)] for name, found in rows.items()}


def wrong() -> list[str]:
    """Return the outputs and gradients at new lengths whose error exceeds the tolerance.

    The tolerance is twice the error of unfused bfloat16 against float64; with and without causal.
    """
    found = []
    for causal in (True, False):
        for n in (128, *WARM[:2], *NEW[:3], *NEW[-3:], 640):
            x = inputs_of("forward and backward")(n)
            do = normal(1, HEADS, n, DIM)

            def results(call: Call, dtype: torch.dtype, x: tuple[Tensor, ...] = x, do: Tensor = do) -> list[Tensor]:
                leaves = [y.detach().to(dtype).requires_grad_() for y in x]
                o = call(tuple(leaves))
                return [y.double() for y in (o, *torch.autograd.grad(o, leaves, do.to(dtype)))]

            def unfused(x: tuple[Tensor, ...], n: int = n, causal: bool = causal) -> Tensor:
                scores = x[0] @ x[1].mT * DIM**-0.5
                if causal:
                    scores = scores.masked_fill(torch.ones(n, n, device=GPU, dtype=torch.bool).triu(1), -torch.inf)
                return scores.softmax(-1) @ x[2]

            right, near = results(unfused, torch.float64), results(unfused, torch.bfloat16)
            ours = results(lambda x, causal=causal: attention(*x, causal=causal), torch.bfloat16)
            for name, a, b, c in zip(("o", "dq", "dk", "dv"), ours, near, right, strict=True):
                if not (a - c).abs().max() <= 2 * (b - c).abs().max() + 1e-5:
                    found.append(f"{name}, {n} queries, causal={causal}")
    return found


def lengths(options: Options) -> dict[str, Any]:
    bad = wrong()
    if bad:
        print("wrong:", "; ".join(bad), flush=True)
        return {"rows": [{"met": False}]}
    cases: dict[str, dict[str, list[float]]] = {}
    for kind in ("decoding", "forward", "forward and backward"):
        if not is_wanted(kind, options):
            continue
        cases[kind] = {}
        for name, (context, call) in steps(kind).items():
            with context, torch.autograd.set_multithreading_enabled(False):
                cases[kind][name] = row = row_of(call, kind)
            cells = "  ".join(f"{c} {t:7.1f}" for c, t in zip(COLUMNS, row, strict=True))
            print(f"{kind:21} {name:16} {cells}   new {row[0] / row[2]:.2f}x", flush=True)
    found = {"unit": "microseconds", "columns": COLUMNS, "cases": cases}
    if is_wanted("backward of a tiny call", options):
        columns = ("calling thread", "usual")
        rows = backwards(options.turns)
        theirs = [row for name, row in rows.items() if name.startswith(("sdpa", "fa"))]
        best = [min(column) for column in zip(*theirs, strict=True)]
        for name, row in rows.items():
            cells = "  ".join(f"{c} {t:7.1f} {t / x:5.2f}x" for c, t, x in zip(columns, row, best, strict=True))
            print(f"backward of a tiny call  {name:16} {cells}", flush=True)
        found["backward"] = {"columns": columns, "cases": rows}
    return found
