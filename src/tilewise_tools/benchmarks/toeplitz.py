"""Toeplitz biases (T5, ALiBi; 16 heads, D=64) against no bias on one GPU, interleaved.

    python -m tilewise_tools.benchmarks.toeplitz            all gates, in about a minute

Times are of public calls, which create the bias each time, by CUDA events with a flushed L2 cache; "host" is the host
time of a call. Before timing, each case of 2,048 tokens is compared with float64 on new inputs; ``--check 127 799``
only compares, at these lengths. ``--parts`` prints the time of each kernel (torch's profiler), ``--causal`` adds a
causal case, ``--kernels`` compares variants of the backward.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from typing import Any

import torch

import tilewise
from tilewise import clear_caches
from tilewise.backends.gluon.sm90.backward import launch as backward_launch
from tilewise_tools.bench import terms
from tilewise_tools.bench.timing import Clock, calibrate, host_seconds
from tilewise_tools.benchmarks.turns import in_turns, medians

HEADS, DIM = 16, 64


class ToeplitzCall:
    """A call and its backward in a form of `FORMS`."""

    def __init__(self, name: str, batch: int, length: int, causal: bool, form: str = ""):
        self.name, self.causal, self.form = name, causal, form
        generator = torch.Generator("cuda").manual_seed(0)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device="cuda").to(torch.bfloat16)

        self.leaves = [normal(batch, HEADS, length, DIM).requires_grad_() for _ in range(3)]
        self.do = normal(batch, HEADS, length, DIM)
        self.trained = None
        if name != "none":
            self.trained = terms.trained(name, batch, HEADS, length, normal).requires_grad_()
            self.leaves.append(self.trained)
        self.o = self.forward()

    def forward(self) -> torch.Tensor:
        q, k, v, *_ = self.leaves
        bias = None if self.trained is None else terms.term(self.name, self.trained)
        return tilewise.attention(q, k, v, bias=bias, causal=self.causal, backend="hopper")

    def backward(self) -> Any:
        return torch.autograd.grad(self.o, self.leaves, self.do, retain_graph=True)


def unfused(q: Any, k: Any, v: Any, trained: Any, do: Any, name: str, causal: bool) -> list[torch.Tensor]:
    """Return o, LSE and the gradients of one head of each batch element, by torch in the dtype of q."""
    leaves = [x.detach().requires_grad_() for x in (q, k, v, trained)]
    q, k, v, trained = leaves
    N = q.shape[2]
    distance = torch.arange(N, device="cuda") - torch.arange(N, device="cuda")[:, None]
    s = q @ k.mT * DIM**-0.5 + terms.part(name, trained, distance).to(q.dtype)
    if causal:
        s = s.masked_fill(distance > 0, float("-inf"))
    o = torch.softmax(s, -1) @ v
    lse = torch.logsumexp(s.to(torch.promote_types(s.dtype, torch.float32)), -1)
    return [o.detach(), lse.detach(), *torch.autograd.grad(o, leaves, do)]


def check(name: str, length: int, causal: bool) -> None:
    """Print the ratio of errors to torch's in bfloat16, and the places of errors above twice torch's."""
    generator, heads, batch = torch.Generator("cuda").manual_seed(time.time_ns() % 2**31), HEADS, 2

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda").to(torch.bfloat16)

    q, k, v, do = (normal(batch, heads, length, DIM) for _ in range(4))
    trained = terms.trained(name, batch, heads, length, normal)
    leaves = [x.detach().requires_grad_() for x in (q, k, v, trained)]
    o, lse = tilewise.attention(
        *leaves[:3], bias=terms.term(name, leaves[3]), causal=causal, return_lse=True, backend="hopper"
    )
    ours = [o.detach(), lse.detach(), *torch.autograd.grad(o, leaves, do)]
    names = ("o", "lse", "dq", "dk", "dv", "d" + name)
    errors, yardsticks = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0)
    wrong: dict[str, list[Any]] = {what: [] for what in names}
    for h in range(heads):
        head = slice(h, h + 1)
        inputs = [x[:, head] for x in (q, k, v)] + [trained[..., head], do[:, head]]
        exact = unfused(*(x.double() for x in inputs), name, causal)
        other = unfused(*inputs, name, causal)
        for i, what in enumerate(names):
            mine = ours[i][..., head] if i == 5 else ours[i][:, head]
            error, yardstick = ((x.double() - exact[i]).abs() for x in (mine, other[i]))
            error = error.nan_to_num(float("inf"))
            errors[what] = max(errors[what], float(error.max()))
            least = 1e-6 * float(exact[i].abs().max())
            yardsticks[what] = max(yardsticks[what], float(yardstick.max()), least)
            if i < 5:
                far = error > 2 * max(float(yardstick.max()), least)
                far = far if i == 1 else far.any(-1)
                wrong[what] += sorted({(int(b), h, int(r) // 64 * 64) for b, _, r in far.nonzero().tolist()})
    told = "  ".join(f"{what} {errors[what] / yardsticks[what]:.2f}" for what in names)
    print(f"S={length:5d} {'causal' if causal else 'full':6s} {name:6s} error by torch's: {told}", flush=True)
    for what in names:
        if errors[what] > 2 * yardsticks[what]:
            print(f"    WRONG {what}, in (batch element, head, from row) {wrong[what][:24]}", flush=True)


FORMS = {
    "": {},
    "not ahead": {"ahead": False},
    "K in shared memory": {"k_in_registers": False},
    "neither": {"ahead": False, "k_in_registers": False},
}


def formed(form: str) -> Any:
    """Return a replacement of backward_config that applies ``form``."""
    usual = backward_launch.backward_config
    changes: dict[str, Any] = FORMS[form]

    def config(problem: Any) -> Any:
        found = usual(problem)
        return found if problem.parts is None else replace(found, **changes)

    return config


def timed(clock: Clock, calls: dict[str, ToeplitzCall], what: str) -> dict[str, float]:
    usual = backward_launch.backward_config

    def take(call: ToeplitzCall) -> float:
        if what == "forward":
            return clock.time(call.forward).median_s
        if call.form:
            clear_caches()
            backward_launch.backward_config = formed(call.form)
        found = clock.time(call.backward).median_s
        if call.form:
            clear_caches()
            backward_launch.backward_config = usual
        return found

    return medians(in_turns({name: lambda call=call: take(call) for name, call in calls.items()}, 3, 1))


def parts(call: ToeplitzCall) -> None:
    """Print the kernels of a forward and a backward."""
    for step in (call.forward, call.backward):
        step()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            step()
            torch.cuda.synchronize()
        found = [event for event in profiler.key_averages() if event.device_time_total > 0]
        whole, launches = sum(event.device_time_total for event in found), sum(event.count for event in found)
        print(f"    {step.__name__}: {launches} launches, {whole:.1f} us")
        for event in found:
            print(f"      {event.device_time_total:8.1f} us {event.count:3d} {event.key[:90]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parts", action="store_true")
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--check", type=int, nargs="*", metavar="LENGTH")
    parser.add_argument("--seconds", type=float, default=0.04)
    options = parser.parse_args()
    for length in options.check or (2048,):
        for name in ("t5", "alibi"):
            for causal in (False, *[True] * options.causal):
                check(name, length, causal)
    if options.check is not None:
        return
    clock = Clock(torch.device("cuda"), options.seconds)
    found = calibrate(clock, ["bfloat16"])
    product, copy = found.matmul_flops["bfloat16"], found.copy_bytes_per_second
    print(f"cuBLAS {product / 1e12:.0f} TFLOP/s, copy {copy / 1e12:.2f} TB/s")
    for batch, length, causal in ((4, 2048, False), (1, 8192, False), *[(1, 8192, True)] * options.causal):
        calls = {name: ToeplitzCall(name, batch, length, causal) for name in ("none", "t5", "alibi")}
        many = dict(calls)
        if options.kernels:
            for form in [form for form in FORMS if form]:
                many |= {f"{name}, {form}": ToeplitzCall(name, batch, length, causal, form) for name in ("t5", "alibi")}
        for what in ("forward", "backward"):
            times = timed(clock, calls if what == "forward" else many, what)
            for name, seconds in times.items():
                ratio = times["none"] / seconds
                print(f"S={length:5d} {'causal' if causal else 'full':6s} {what:8s} {name:24s} "
                      f"{1e3 * seconds:8.4f} ms {ratio:6.3f} of unbiased", flush=True)  # fmt: skip
        if length == 2048:
            for name, call in calls.items():
                host = (1e6 * host_seconds(step, clock.device) for step in (call.forward, call.backward))
                print(f"    host {name:6s} forward {next(host):6.1f} us, backward {next(host):6.1f} us", flush=True)
        if options.parts and not causal:
            for name in calls:
                print(f"    {name} S={length}")
                parts(calls[name])


if __name__ == "__main__":
    main()
