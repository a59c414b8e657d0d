"""Dropout of 0.1 on Hopper, bfloat16, S=4096: variants of the forward's random numbers, interleaved.

    python -m tilewise_tools.benchmarks.dropout [cases of CASES]

Each line has a case, a variant, the kernel time of a pass by CUDA graphs, TFLOP/s, and the share of the speed without
dropout. Before timing, each variant and unfused PyTorch in bfloat16 are compared with float64, with a dropout mask
that PyTorch computes by definition.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.backends import Inputs, Needs, Outputs
from tilewise.backends.gluon.sm90.backward import launch as backward_launch
from tilewise.backends.gluon.sm90.common import config
from tilewise.backends.gluon.sm90.forward import launch
from tilewise.spec import dropout
from tilewise.spec.problem import Problem
from tilewise.spec.score import Band, Score
from tilewise_tools.benchmarks.pair import patched, timed

P = 0.1
LAST, AMONG = {"words_last": True}, {"words_last": False}
VARIANTS: dict[int, dict[str, dict[str, Any]]] = {
    64: {
        "as chosen": {},
        "words last": LAST,
        "three warpgroups, words last": {"warpgroups": 3, "registers": (160, 32), "q_in_registers": False, **LAST},
    },
    128: {
        "as chosen": {},
        "sums by thread": {"sums_by_thread": True},
        "Q in shared memory, words among exponentials": {"q_in_registers": False, "q_stages": 2, **AMONG},
    },
}


class DropoutCase(NamedTuple):
    heads: int
    head_dim: int
    causal: bool


CASES = {
    "D64": DropoutCase(32, 64, False),
    "D128": DropoutCase(16, 128, False),
    "D64 causal": DropoutCase(32, 64, True),
    "D128 causal": DropoutCase(16, 128, True),
}


def described(inputs: Inputs, causal: bool) -> Problem:
    band = Band.aligned(causal, None, 0)
    score = Score.of(band, inputs.q.shape[-1], dropout_p=P if inputs.seed is not None else 0.0)
    return Problem.of(*inputs, score, bias_grad=False, deterministic=False)


def drawn(batch: int, case: DropoutCase, length: int) -> list[Tensor]:
    """Return random q, k, v and the gradient of o."""
    shape = batch, case.heads, length, case.head_dim
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4)]


def forward(problem: Problem, inputs: Inputs, changes: dict[str, Any]) -> Callable[[], Outputs]:
    made = replace(config.forward_config(problem), **changes)
    with patched(launch, forward_config=lambda _: made):
        return partial(launch.HopperForward(problem, inputs), inputs)


def backward(problem: Problem, inputs: Inputs, outputs: Outputs, do: Tensor) -> Callable[[], Any]:
    needs, cotangents = Needs(True, True, True, False, False), Outputs(do, None)
    return partial(
        backward_launch.HopperBackward(problem, inputs, outputs, cotangents, needs), inputs, outputs, cotangents
    )


def unfused(inputs: Inputs, do: Tensor, causal: bool, dtype: torch.dtype) -> list[Tensor]:
    """Return o and the gradients of q, k and v by unfused PyTorch in ``dtype``."""
    q, k, v = leaves = [x.to(dtype).requires_grad_() for x in inputs[:3]]
    at = [torch.arange(n, device="cuda") for n in q.shape[:3]]
    words = dropout.stream(inputs.seed, at[0][:, None, None, None], at[1][:, None, None])
    threshold = dropout.threshold(P)
    kept = dropout.kept(words, at[2][:, None], at[2], threshold)
    s = q @ k.mT / math.sqrt(q.shape[-1])
    if causal:
        s = s.masked_fill(at[2][:, None] < at[2], -math.inf)
    o = (torch.softmax(s, -1) * kept * dropout.weight(threshold)) @ v
    return [o, *torch.autograd.grad(o, leaves, do.to(dtype))]


def held(name: str, case: DropoutCase, seed: Tensor) -> None:
    """Compare all variants of a case with float64, at 1,152 queries, which run the same kernels."""
    q, k, v, do = drawn(2, case, 1152)
    inputs = Inputs(q, k, v, None, None, seed=seed)
    problem = described(inputs, case.causal)
    exact = unfused(inputs, do, case.causal, torch.float64)
    allowed = [
        (x - y).abs().max().item() for x, y in zip(unfused(inputs, do, case.causal, q.dtype), exact, strict=True)
    ]
    for variant, changes in VARIANTS[case.head_dim].items():
        outputs = forward(problem, inputs, changes)()
        found = [outputs.o, *backward(problem, inputs, outputs, do)()[:3]]
        errors = [(x - y).abs().max().item() for x, y in zip(found, exact, strict=True)]
        word = "right" if all(x <= 2 * y for x, y in zip(errors, allowed, strict=True)) else "WRONG"
        shown = ", ".join(f"{x:.1e} of {y:.1e}" for x, y in zip(errors, allowed, strict=True))
        print(f"{name} {variant}: {word}: o, dq, dk, dv off by {shown} unfused", flush=True)


def main() -> None:
    print(torch.cuda.get_device_name())
    torch.manual_seed(0)
    seed = torch.tensor([1, 2], device="cuda")
    for name in sys.argv[1:] or CASES:
        case = CASES[name]
        held(name, case, seed)
        q, k, v, do = drawn(4, case, 4096)
        plain, dropped = Inputs(q, k, v, None, None), Inputs(q, k, v, None, None, seed=seed)
        without, problem = described(plain, case.causal), described(dropped, case.causal)
        flash = partial(torch.nn.functional.scaled_dot_product_attention, q, k, v, None, P, case.causal)
        passes = {"none": forward(without, plain, {}), "SDPA": flash}
        passes |= {x: forward(problem, dropped, changes) for x, changes in VARIANTS[case.head_dim].items()}
        first = next(iter(VARIANTS[case.head_dim]))
        backwards = {
            "none": backward(without, plain, passes["none"](), do),
            "dropout": backward(problem, dropped, passes[first](), do),
        }
        for what, calls, flops in (
            ("forward", passes, problem.flops),
            ("backward", backwards, problem.backward_flops),
        ):
            times = timed(calls)
            for variant, milliseconds in times.items():
                share, speed = times["none"] / milliseconds, flops / milliseconds * 1e-9
                print(f"{name} {what} {variant}: {milliseconds:.3f} ms, {speed:.0f} TFLOP/s, {share:.3f}", flush=True)


if __name__ == "__main__":
    main()
