"""Toeplitz biases beside no bias, in turns, on one GPU: T5's table and ALiBi's slopes, 16 heads of 64 dimensions.

    python benchmarks/toeplitz.py            all that the gates ask for, in about a minute

Calls are what a user calls, the bias made anew each time, by CUDA events with a flushed L2 cache; "host" is how long
one keeps the host. ``--parts`` also says how long each kernel takes (torch's profiler). ``--causal`` adds a causal
case, ``--kernels`` compares forms of the backward.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import torch

import tilewise
from tilewise import dispatch
from tilewise.backends.gluon.sm90 import backward_launch
from tilewise.bench import terms
from tilewise.bench.timing import Clock, calibrate, host_seconds
from turns import in_turns, medians

HEADS, DIM = 16, 64


class Call:
    """A call and its backward; form: of the backward, see FORMS."""

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


FORMS = {
    "": {},
    "not ahead": {"ahead": False},
    "K in shared memory": {"k_in_registers": False},
    "neither": {"ahead": False, "k_in_registers": False},
}


def formed(form: str) -> Any:
    """The backward of the next call in another form."""
    usual = backward_launch.backward_config
    changes: dict[str, Any] = FORMS[form]

    def config(problem: Any) -> Any:
        found = usual(problem)
        return found if problem.parts is None else replace(found, **changes)

    return config


def timed(clock: Clock, calls: dict[str, Call], what: str) -> dict[str, float]:
    usual = backward_launch.backward_config

    def take(call: Call) -> float:
        if what == "forward":
            return clock.time(call.forward).median_s
        if call.form:
            dispatch.backwards.clear()
            backward_launch.backward_config = formed(call.form)
        found = clock.time(call.backward).median_s
        if call.form:
            dispatch.backwards.clear()
            backward_launch.backward_config = usual
        return found

    return medians(in_turns({name: lambda call=call: take(call) for name, call in calls.items()}, 3, 1))


def parts(call: Call) -> None:
    """The kernels of a forward and a backward."""
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
    parser.add_argument("--seconds", type=float, default=0.04)
    options = parser.parse_args()
    clock = Clock(torch.device("cuda"), options.seconds)
    found = calibrate(clock, ["bfloat16"])
    product, copy = found.matmul_flops["bfloat16"], found.copy_bytes_per_second
    print(f"cuBLAS {product / 1e12:.0f} TFLOP/s, copy {copy / 1e12:.2f} TB/s")
    for batch, length, causal in ((4, 2048, False), (1, 8192, False), *[(1, 8192, True)] * options.causal):
        calls = {name: Call(name, batch, length, causal) for name in ("none", "t5", "alibi")}
        many = dict(calls)
        if options.kernels:
            for form in [form for form in FORMS if form]:
                many |= {f"{name}, {form}": Call(name, batch, length, causal, form) for name in ("t5", "alibi")}
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
