"""Host time, matmul and softmax on a GPU, compared with PyTorch and other configurations."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tilewise import clear_caches, matmul
from tilewise.ops.gemm import hopper
from tilewise.ops.gemm.config import hopper_config
from tilewise.ops.gemm.problem import describe
from tilewise.ops.row_softmax import SoftmaxNeeds
from tilewise.ops.row_softmax.triton import launch
from tilewise.ops.row_softmax.triton.config import SoftmaxConfig, softmax_config
from tilewise_tools.bench.cases import CaseInputs, tiny
from tilewise_tools.bench.providers import Steps, providers
from tilewise_tools.bench.timing import Clock, host_seconds
from tilewise_tools.benchmarks.turns import Options, Step, difference, dtype_name, in_turns, is_wanted, medians, verdict

GPU = torch.device("cuda")

# --- host ---

HOST_COLUMNS = ("no grad", "forward", "both")


def host_microseconds(steps: Steps, x: CaseInputs) -> list[float]:
    def microseconds(step: Callable[[], object]) -> float:
        for _ in range(20):
            step()
        return 1e6 * host_seconds(step, x.q.device)

    with steps.context():
        with torch.no_grad():
            alone = microseconds(steps.forward)
        return [
            alone,
            microseconds(steps.forward),
            microseconds(lambda: torch.autograd.grad(steps.forward(), x.leaves, x.do)),
        ]


def host(options: Options) -> dict[str, Any]:
    results: dict[str, dict[str, list[float]]] = {}
    known = {provider.name: provider for provider in providers(GPU)}
    for name, bias in (("tiny", False), ("tiny, bias 1HMN", True)):
        if not is_wanted(name, options):
            continue
        case = tiny("bfloat16", bias)
        x = case.inputs(GPU)
        names = ("sdpa-efficient" if bias else "sdpa-flash", "tilewise-hopper", "tilewise-triton")
        takes = {who: partial(host_microseconds, known[who].prepare(case, x), x) for who in names}
        found = in_turns(takes, options.turns)
        results[name] = {
            who: [statistics.median(column) for column in zip(*rows, strict=True)] for who, rows in found.items()
        }
        first = results[name][names[0]]
        for who, row in results[name].items():
            cells = (f"{c} {t:6.1f} ({t / r:.2f}x)" for c, t, r in zip(HOST_COLUMNS, row, first, strict=True))
            print(f"{name:16} {who:16} ", "  ".join(cells), flush=True)
    return {"unit": "microseconds", "columns": HOST_COLUMNS, "cases": results}


# --- matmul ---


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, device=GPU, dtype=torch.bfloat16)


def product_with(a: Tensor, b: Tensor, c: Tensor | None, **changes: int) -> Step:
    """Return a step by the Hopper kernel with changes to its default configuration."""
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


def product_cases() -> Iterator[tuple[str, float, float | None, Step, Step]]:
    """Yield (name, FLOP, gate, tilewise's step, torch's step)."""
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
    yield "the same, in turns", flops, None, product_with(a, b, c, turns=True), theirs
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
    # The two products of the backward, each of 128 tiles and 128 steps, with variants for all tiles running at once.
    dy = normal(8192, 8192)
    for name, x, y in ((" dA, 8192 × 512", dy, b.mT), (" dB, 512 × 8192", a.mT, dy)):
        theirs = lambda x=x, y=y: (x @ y,)  # noqa: E731
        yield name, flops, None, lambda x=x, y=y: (matmul(x, y),), theirs
        for words, changes in (
            ("256 × 128 tiles", {"rows": 128, "block_n": 128, "store_buffers": 1}),
            ("neighbours share A", {"group_m": 1}),
        ):
            yield f"  {words}", flops, None, product_with(x, y, None, **changes), theirs
    q, k = normal(4, 16, 4096, 128), normal(4, 16, 4096, 128)
    flops = 2 * 64 * 4096 * 4096 * 128
    yield "scores of 64 heads", flops, None, lambda: (matmul(q, k.mT, backend="hopper"),), lambda: (q @ k.mT,)


def timed_by_events(step: Step, flush: Tensor) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    flush.zero_()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    step()
    end.record()
    return start, end


def products(options: Options) -> dict[str, Any]:
    flush = torch.empty(256 << 20, dtype=torch.uint8, device=GPU)
    rows = []
    for name, flops, gate, ours, theirs in product_cases():
        if not is_wanted(name, options):
            continue
        difference(ours(), theirs(), 2e-2, name)
        takes = {"tilewise": partial(timed_by_events, ours, flush), "torch": partial(timed_by_events, theirs, flush)}
        events = in_turns(takes, options.turns, unmeasured=3)
        torch.cuda.synchronize()
        times = {who: [start.elapsed_time(end) / 1e3 for start, end in pairs] for who, pairs in events.items()}
        mine, its = medians(times).values()
        met = None if gate is None else its / mine >= gate
        row = {"name": name, "tflops": flops / mine / 1e12, "torch_tflops": flops / its / 1e12, "ratio": its / mine}
        rows.append({**row, "gate": gate, "met": met})
        print(
            f"{name:32} {row['tflops']:6.0f} TFLOP/s, torch {row['torch_tflops']:6.0f}, ratio {row['ratio']:.3f}"
            f"{'' if gate is None else f'   gate {gate}: {verdict(met)}'}",
            flush=True,
        )
    return {"rows": rows}


# --- softmax ---

LENGTHS = (1 << 10, 1 << 12, 1 << 13, 1 << 14, 1 << 15, 1 << 16, 1 << 17)
BYTES = 1 << 30  # of a tensor
# For forward (False) and backward (True): columns per program, warps, registers per thread; for more bytes in flight.
REGISTERS: dict[bool, tuple[tuple[int, int, int | None], ...]] = {
    False: ((8192, 2, 128), (16384, 4, 128), (8192, 4, 64), (4096, 1, 128), (4096, 2, 64), (4096, 1, 112),
            (4096, 1, 104), (2048, 1, 64)),
    True: ((8192, 8, 56), (4096, 4, None), (4096, 2, 88), (2048, 2, 48), (2048, 1, 88)),
}  # fmt: skip


def softmax_variants(
    length: int, itemsize: int, backward: bool, processors: int, registers: bool
) -> Iterator[tuple[str, SoftmaxConfig]]:
    """Yield (name, configuration): the chosen one, and alternatives for long rows.

    A limit on registers per thread fits more programs on an SM.
    """
    rows = BYTES // (length * itemsize)
    chosen = softmax_config(rows, rows, length, False, itemsize, backward, processors)
    yield "chosen", chosen
    if registers:
        for block, warps, most in REGISTERS[backward]:
            if block <= length:
                name = f"programs of {block}, {warps} warps of {most or 'free'} registers, packed"
                yield name, SoftmaxConfig(True, 1, block, length // block, block, warps, True, most)
    elif length in (1 << 14, 1 << 17):
        for block, warps in ((4096, 4), (2048, 2)):
            for pack in (False, True) if itemsize == 2 else (False,):
                shared = SoftmaxConfig(True, 1, block, length // block, block, warps, pack)
                if shared != chosen:
                    yield f"programs of {block}, {warps} warps{', packed' if pack else ''}", shared


def softmax_with(config: SoftmaxConfig, step: Callable[[], Tensor]) -> Callable[[], Tensor]:
    def run() -> Tensor:
        launch.softmax_config = lambda *arguments: config
        return step()

    clear_caches()
    return run


def measure_softmax(dtype: torch.dtype, length: int, copy: float, registers: bool) -> Iterator[dict[str, Any]]:
    clock = Clock(GPU, 0.02)
    processors = torch.cuda.get_device_properties(GPU).multi_processor_count
    x, dp = (torch.randn(BYTES // (length * dtype.itemsize), length, device=GPU, dtype=dtype) for _ in range(2))
    p = torch.softmax(x, -1)
    wide = torch.softmax(x[-64:].double(), -1), dp[-64:].double()
    p_wide = p[-64:].double()
    right = wide[0], p_wide * (wide[1] - (wide[1] * p_wide).sum(-1, keepdim=True))

    def dx() -> Tensor:
        found, _ = launch.backward(dp, p, 1.0, None, 1, SoftmaxNeeds(True, False))
        assert found is not None
        return found

    passes: tuple[tuple[str, Callable[[], Tensor], Callable[[], Tensor]], ...] = (
        ("forward", lambda: launch.forward(x, 1.0, None, None, 1), lambda: torch.softmax(x, -1)),
        ("backward", dx, lambda: torch.ops.aten._softmax_backward_data(dp, p, 1, dtype)),
    )
    for n, (name, ours, theirs) in enumerate(passes):
        moved = (2 + n) * BYTES
        for variant, config in softmax_variants(length, dtype.itemsize, n == 1, processors, registers):
            step = softmax_with(config, ours)
            difference([step()[-64:]], [right[n]], 1e-5 if dtype == torch.float32 else 1e-2, variant)
            speed = moved / clock.time(step).median_s
            yield {"pass": name, "variant": variant, "bytes_per_second": speed, "of_copy": speed / copy}
        if not registers:
            speed = moved / clock.time(theirs).median_s
            yield {"pass": name, "variant": "torch", "bytes_per_second": speed, "of_copy": speed / copy}


def copy_speed() -> float:
    x = torch.zeros(BYTES, dtype=torch.uint8, device=GPU)
    y = torch.empty_like(x)
    return 2 * BYTES / Clock(GPU, 0.05).time(lambda: y.copy_(x)).median_s


def softmax(options: Options) -> dict[str, Any]:
    copy = copy_speed()
    print(f"copy {copy / 1e12:.3f} TB/s", flush=True)
    rows = []
    for dtype in (torch.bfloat16,) if options.registers else (torch.bfloat16, torch.float32):
        for length in LENGTHS:
            if (options.registers and length < 1 << 14) or not is_wanted(f"{dtype_name(dtype)} {length}", options):
                continue
            for row in measure_softmax(dtype, length, copy, options.registers):
                rows.append({"dtype": str(dtype), "length": length, **row})
                print(
                    f"{dtype_name(dtype):8} {length:6} {row['pass']:8} {row['of_copy']:.3f} of copy  {row['variant']}",
                    flush=True,
                )
    return {"copy_bytes_per_second": copy, "rows": rows}
