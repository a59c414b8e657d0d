"""A trainable bias along the keys against no bias on one GPU, interleaved: packed and dense batches.

    python -m tilewise_tools.benchmarks.key_bias            ratios, forward and backward; about 60 s, mostly compiling
    python -m tilewise_tools.benchmarks.key_bias --forms    with other variants of the kernels, too; about 110 s

A packed batch has 32,768 tokens of 52 lognormal lengths, a dense one 4 sequences of 4,096; heads * head_dim = 2,048,
bfloat16. Each pass, with all of its kernels, is timed by CUDA events with a flushed L2 cache.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from tilewise.backends import Inputs, Needs, Outputs
from tilewise.backends.gluon.sm90.backward import launch as backward_launch
from tilewise.backends.gluon.sm90.forward import launch
from tilewise.frontend.arguments import read_call
from tilewise.frontend.varlen import read_packed
from tilewise.spec.problem import Problem
from tilewise.spec.seqlens import Lengths
from tilewise_tools.bench.packed import lognormal_case
from tilewise_tools.bench.timing import Clock, calibrate
from tilewise_tools.benchmarks.turns import difference, in_turns, medians

TERMS: dict[str, Any] = {"mask": None, "sink": None, "window": None, "dropout_p": 0.0, "dropout_seed": None}
USUAL: dict[str, Any] = {}
FORWARDS = {
    "not lazy": {"lazy": False, "sums_by_thread": False},
    "other sums": {"sums_by_thread": None},  # None: the opposite of the default
    "Q in shared memory": {"q_in_registers": False, "q_stages": 2},
    "64 keys": {"block_n": 64},
    "bias after Q K^T": {"bias_first": False},
}
BACKWARDS = {"programs stay": {"dynamic": True}}


class Shape(NamedTuple):
    packed: bool
    head_dim: int
    causal: bool

    def __str__(self) -> str:
        return f"{'packed' if self.packed else 'dense'} D{self.head_dim} {'causal' if self.causal else 'full'}"


SHAPES = {str(x): x for x in (Shape(packed, d, causal) for packed in (True, False) for d in (128, 64)
                              for causal in (True, False))}  # fmt: skip


class TimedPass:
    """Forward and backward of a shape, with or without a bias."""

    def __init__(self, shape: Shape, biased: bool):
        self.biased = biased
        generator = torch.Generator("cuda").manual_seed(0)

        def normal(*sizes: int) -> torch.Tensor:
            return torch.randn(sizes, generator=generator, device="cuda").to(torch.bfloat16)

        d, heads = shape.head_dim, 2048 // shape.head_dim
        common: dict[str, Any] = {**TERMS, "causal": shape.causal, "deterministic": None, "backend": None}
        if shape.packed:
            case = lognormal_case(d, shape.causal, "keys" if biased else None)
            self.sequences = case.sequences
            q, k, v = (normal(case.keys, heads, d) for _ in range(3))
            edges = torch.tensor([0, *(x.stop for x in case.sequences)], dtype=torch.int32, device="cuda")
            self.bias = normal(1, case.keys) if biased else None
            longest = (case.longest, case.longest)
            call = read_packed(q, k, v, Lengths(edges, edges), longest, bias=self.bias, **common)
        else:
            self.sequences = [slice(0, 4096)]
            q, k, v = (normal(4, heads, 4096, d) for _ in range(3))
            self.bias = normal(4, 1, 1, 4096) if biased else None
            call = read_call(q, k, v, bias=self.bias, **common)
        self.inputs: Inputs = call.inputs
        self.problem = Problem.of(*call.inputs, call.score, bias_grad=biased, deterministic=False)
        self.causal = shape.causal
        self.steps: dict[tuple[str, str], Callable[[], Any]] = {}
        self.outputs: Outputs = launch.HopperForward(self.problem, self.inputs)(self.inputs)
        self.cotangents = Outputs(torch.randn_like(self.outputs.o), None)

    def step(self, what: str, form: str) -> Callable[[], Any]:
        """Return a pass in a form of `FORWARDS` or `BACKWARDS`; "" is the default form."""
        if (what, form) in self.steps:
            return self.steps[what, form]
        if what == "forward":
            with_form(launch, "forward_config", FORWARDS.get(form, USUAL), lambda: self._made(what, form))
        else:
            with_form(backward_launch, "backward_config", BACKWARDS.get(form, USUAL), lambda: self._made(what, form))
        return self.steps[what, form]

    def _made(self, what: str, form: str) -> None:
        if what == "forward":
            forward = launch.HopperForward(self.problem, self.inputs)
            self.steps[what, form] = lambda: forward(self.inputs)
        else:
            given = self.inputs, self.outputs, self.cotangents
            backward = backward_launch.HopperBackward(self.problem, *given, Needs(True, True, True, self.biased))
            self.steps[what, form] = lambda: backward(*given)
        self.steps[what, form]()

    def check(self) -> None:
        """Compare o of a few sequences with PyTorch's."""
        q, k, v, bias, *_ = self.inputs
        for rows in self.sequences[:3]:
            scores = q[:1, :, rows].float() @ k[:1, :, rows].float().mT * self.problem.score.scale
            if bias is not None:
                scores += bias[:1, :, :, rows].float()
            if self.causal:
                scores += torch.full_like(scores[0, 0], -torch.inf).triu(1)
            o = scores.softmax(-1) @ v[:1, :, rows].float()
            difference([self.outputs.o[:1, :, rows].float()], [o], 2e-2, "o")


def with_form(module: Any, name: str, changes: dict[str, Any], step: Callable[[], None]) -> None:
    """Run ``step`` with ``changes`` to the launch configuration ``module.name``; None negates a value."""
    usual = getattr(module, name)

    def config(problem: Problem) -> Any:
        found = usual(problem)
        return replace(found, **{key: not getattr(found, key) if x is None else x for key, x in changes.items()})

    setattr(module, name, config)
    try:
        step()
    finally:
        setattr(module, name, usual)


def forms_of(shape: Shape, what: str, asked: bool) -> Iterator[str]:
    yield ""
    if not asked:
        return
    if what == "forward" and shape.head_dim == 128:
        yield from FORWARDS
    elif what == "forward":
        yield "not lazy"
    elif shape.head_dim == 128 and not shape.packed:
        yield from BACKWARDS


def report(name: str, options: argparse.Namespace) -> None:
    shape, clock = SHAPES[name], Clock(torch.device("cuda"), options.seconds)
    none, keys = TimedPass(shape, False), TimedPass(shape, True)
    keys.check()
    for what in ("forward", "backward"):
        steps = {"none": none.step(what, "")}
        steps |= {f"keys {form}": keys.step(what, form) for form in forms_of(shape, what, options.forms)}
        if options.compile:
            continue
        takes = {form: lambda step=step: clock.time(step).median_s for form, step in steps.items()}
        times = medians(in_turns(takes, 3, 1))
        for form, seconds in times.items():
            ratio = times["none"] / seconds
            print(f"{name:19s} {what:8s} {form:24s} {1e3 * seconds:8.4f} ms {ratio:6.3f} of none", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--forms", action="store_true")
    parser.add_argument("--shapes", nargs="*", default=[*SHAPES], help="of: " + ", ".join(SHAPES))
    parser.add_argument("--seconds", type=float, default=0.03)
    parser.add_argument("--compile", action="store_true", help="only compile, for one shape")
    options = parser.parse_args()
    if not options.compile:  # compile in parallel, one process per shape, into Triton's cache
        command = [
            sys.executable,
            "-m",
            __spec__.name,
            "--compile",
            *["--forms"] * options.forms,
            "--shapes",
        ]
        for child in [subprocess.Popen([*command, name]) for name in options.shapes]:
            if child.wait():
                raise SystemExit("a kernel did not compile, or gave a wrong result")
        found = calibrate(Clock(torch.device("cuda"), options.seconds), ["bfloat16"])
        print(f"{torch.cuda.get_device_name()}, cuBLAS {found.matmul_flops['bfloat16'] / 1e12:.0f} TFLOP/s", flush=True)
    for name in options.shapes:
        report(name, options)


if __name__ == "__main__":
    main()
