"""A relative position bias per query on Hopper, as in the Inkling models, against no bias.

    python -m tilewise_tools.benchmarks.relative [lengths, default 4096 8192 16384; or packed]

64 query and 8 key/value heads, D=128, causal, bfloat16, 1,025 entries from distance -1024 on; packed: 32,768 tokens in
52 sequences (`tilewise_tools.bench.packed`), 16 heads, 256 entries. For each length the output and all gradients of
one key/value head and its query heads (packed: of two heads of three sequences) are compared with float64; the
tolerance is twice the error of unfused torch. Then forward and backward are timed, interleaved, and the kernels of one
call are listed. "shared", a forward whose heads share their values, which stay in the L2 cache, shows the cost of
reading separate values from memory.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from tilewise import attention, varlen_attention
from tilewise.bias import RelativeBias
from tilewise_tools.bench.packed import lognormal_case

HEADS, KV_HEADS, DIM, ENTRIES = 64, 8, 128, 1025
ROUNDS, ROWS = 9, 512
Leaves = tuple[Tensor, Tensor, Tensor, Tensor]
Step = Callable[[], object]


def drawn(length: int) -> tuple[Leaves, Tensor]:
    """Return random q, k, v and values, and the gradient of o."""
    generator = torch.Generator("cuda").manual_seed(length)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    q, do = (normal(1, HEADS, length, DIM) for _ in range(2))
    k, v = (normal(1, KV_HEADS, length, DIM) for _ in range(2))
    return (q, k, v, normal(1, HEADS, length, ENTRIES)), do


def heads_of(leaves: Leaves, kv_head: int) -> slice:
    group = leaves[0].shape[1] // leaves[1].shape[1]
    return slice(group * kv_head, group * (kv_head + 1))


def unfused(leaves: Leaves, do: Tensor, kv_head: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return o and gradients of a key/value head and its query heads, computed unfused in ``dtype``.

    Rows are processed in chunks; dK and dV are accumulated in float32 or wider.
    """
    heads = heads_of(leaves, kv_head)
    k, v = (x[0, kv_head].to(dtype) for x in leaves[1:3])
    length, entries = k.shape[0], leaves[3].shape[3]
    sums = [torch.zeros(length, DIM, dtype=torch.promote_types(dtype, torch.float32), device="cuda") for _ in range(2)]
    rows_of: dict[str, list[Tensor]] = {"o": [], "dq": [], "dvalues": []}
    for begin in range(0, length, ROWS):
        rows = slice(begin, min(begin + ROWS, length))
        q, g, values = (x[0, heads, rows].to(dtype) for x in (leaves[0], do, leaves[3]))
        distance = torch.arange(length, device="cuda") - torch.arange(rows.start, rows.stop, device="cuda")[:, None]
        entry = (distance + entries - 1).expand(len(q), -1, -1)
        inside = (entry >= 0) & (entry < entries)
        entry = entry.clamp(0, entries - 1)
        s = (q @ k.mT) * DIM**-0.5 + torch.where(inside, values.gather(-1, entry), 0.0)
        p = torch.softmax(s.masked_fill(distance > 0, -torch.inf), -1)
        o = p @ v
        ds = p * (g @ v.mT - (g * o).sum(-1, keepdim=True))
        rows_of["o"].append(o)
        rows_of["dq"].append(ds @ k * DIM**-0.5)
        rows_of["dvalues"].append(torch.zeros_like(values).scatter_add_(-1, entry, ds.masked_fill(~inside, 0.0)))
        for total, x, y in ((sums[0], ds * DIM**-0.5, q), (sums[1], p, g)):
            total += (x.mT @ y).sum(0)
    return {name: torch.cat(parts, 1) for name, parts in rows_of.items()} | {"dk": sums[0], "dv": sums[1]}


def compare(leaves: Leaves, do: Tensor, o: Tensor, gradients: tuple[Tensor, ...], kv_head: int) -> None:
    """Print the errors against float64; end the run if one exceeds the tolerance."""
    heads = heads_of(leaves, kv_head)
    dq, dk, dv, dvalues = gradients
    ours = {"o": o[0, heads], "dq": dq[0, heads], "dk": dk[0, kv_head], "dv": dv[0, kv_head],
            "dvalues": dvalues[0, heads]}  # fmt: skip
    exact = unfused(leaves, do, kv_head, torch.float64)
    other = unfused(leaves, do, kv_head, torch.bfloat16)
    words = []
    for name, truth in exact.items():
        error, yardstick = (float((x[name].double() - truth).abs().max()) for x in (ours, other))
        words.append(f"{name} {error:.1e} of {yardstick:.1e}")
        if not error <= 2 * yardstick + 1e-3 * float(truth.abs().max()):  # also if it is NaN
            raise SystemExit(f"wrong: {', '.join(words)}")
    print(f"  errors, and those of unfused torch, head {kv_head}: {', '.join(words)}", flush=True)


def in_turns(calls: dict[str, Step], each: int) -> dict[str, float]:
    """Return the median milliseconds of each call, over interleaved rounds of ``each`` calls in a row.

    A sleep on the GPU before each round lets the host run ahead.
    """
    found: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(ROUNDS + 1):
        for name, call in calls.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(1_000_000)
            begin.record()
            for _ in range(each):
                call()
            end.record()
            end.synchronize()
            if turn:
                found[name].append(begin.elapsed_time(end) / each)
    return {name: statistics.median(times) for name, times in found.items()}


def kernels(what: str, call: Step) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    times = [
        f"{x.key.split('(')[0][:28]} {x.self_device_time_total:.0f}"
        for x in profile.key_averages()
        if x.self_device_time_total > 0
    ]
    print(f"  {what}, µs: {', '.join(times)}", flush=True)


def measure(length: int) -> None:
    leaves, do = drawn(length)
    for x in leaves:
        x.requires_grad_()
    q, k, v, values = leaves

    def without() -> Tensor:
        return attention(q, k, v, causal=True, backend="hopper")

    def beside() -> Tensor:
        return attention(q, k, v, bias=RelativeBias(values, lo=1 - ENTRIES), causal=True, backend="hopper")

    def shared() -> Tensor:
        common = RelativeBias(values[:, :1].detach(), lo=1 - ENTRIES)
        return attention(q, k, v, bias=common, causal=True, backend="hopper")

    print(f"S={length}", flush=True)
    o, plain = beside(), without()
    gradients = torch.autograd.grad(o, leaves, do, retain_graph=True)
    with torch.no_grad():
        for kv_head in (0, KV_HEADS - 1) if length <= 4096 else (KV_HEADS - 1,):
            compare(leaves, do, o, gradients, kv_head)
    del gradients
    backwards = {
        "without": lambda: torch.autograd.grad(plain, leaves[:3], do, retain_graph=True),
        "beside": lambda: torch.autograd.grad(o, leaves, do, retain_graph=True),
    }
    product = 2 * HEADS * DIM * length * (length + 1) / 2
    time({"without": without, "beside": beside, "shared": shared}, dict(backwards), product)


def time(forwards: dict[str, Step], backwards: dict[str, Step], product: float) -> None:
    """Time forwards and backwards and print them; ``product``: FLOPs of one matrix product of all scores."""
    for what, calls, products, each in (("forward", forwards, 2, 4), ("backward", backwards, 5, 2)):
        ms = in_turns(calls, each)
        for name, took in ms.items():
            rate, share = products * product / took / 1e9, ms["without"] / took
            print(f"  {what:8} {name:7} {took:.3f} ms, {rate:.0f} TFLOP/s, {share:.3f} of without", flush=True)
        for name, call in calls.items():
            kernels(f"{what} {name}", call)


def alone(o: Tensor | tuple[Tensor, Tensor]) -> Tensor:
    assert isinstance(o, Tensor)
    return o


def measure_packed() -> None:
    case = lognormal_case(DIM, causal=True, bias="relative")
    x = case.inputs(torch.device("cuda"))
    q, k, v, _ = x.leaves
    lengths = (x.cu, x.cu, case.longest, case.longest)

    def without() -> Tensor:
        return alone(varlen_attention(q, k, v, *lengths, causal=True, backend="hopper"))

    def beside() -> Tensor:
        return alone(varlen_attention(q, k, v, *lengths, bias=case.term(x), causal=True, backend="hopper"))

    print(f"packed, {case.keys} tokens", flush=True)
    o, plain = beside(), without()
    gradients = torch.autograd.grad(o, x.leaves, x.do, retain_graph=True)
    by_length = sorted(range(len(case.lengths)), key=lambda b: case.lengths[b])
    with torch.no_grad():
        for b in (by_length[0], by_length[len(by_length) // 2], by_length[-1]):
            rows = case.sequences[b]
            sq, sk, sv, values, do, of_o = (y[rows].transpose(0, 1)[None] for y in (*x.leaves, x.do, o))
            found = tuple(y[rows].transpose(0, 1)[None] for y in gradients)
            for head in (0, case.heads - 1):
                compare((sq, sk, sv, values), do, of_o, found, head)
    backwards = {
        "without": lambda: torch.autograd.grad(plain, (q, k, v), x.do, retain_graph=True),
        "beside": lambda: torch.autograd.grad(o, x.leaves, x.do, retain_graph=True),
    }
    time({"without": without, "beside": beside}, dict(backwards), case.work("forward").flops / 2)


def main() -> None:
    print(torch.cuda.get_device_name())
    for length in sys.argv[1:] or ["4096", "8192", "16384"]:
        if length == "packed":
            measure_packed()
        else:
            measure(int(length))
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
