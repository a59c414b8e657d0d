"""The backward of causal windows at D=128, 16 heads, S=16,384, by other configurations, in turns on one GPU.

    python benchmarks/window_backward.py [widths]

A work tile has ten steps at a width of 512, so that what lies between two counts: K and V of the next come where dK and
dV have left. Gradients of each are compared before they are timed.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from group_programs import DIM, HEADS, ROUNDS, S, milliseconds
from pair import patched
from tilewise.backends import Inputs, Needs, Outputs
from tilewise.backends.gluon.sm90 import backward_launch, launch
from tilewise.problem import Problem
from tilewise.score.terms import Band, Score

FORMS: dict[str, dict[str, int]] = {
    "as it is": {},
    "K and V twice, dO once": {"key_stages": 2, "do_stages": 1},
    "one head after the other": {"head_swizzle": 1},
    "16 heads at once": {"head_swizzle": 16},
}


def calls(width: int) -> dict[str, Callable[[], Any]]:
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v, do = (
        torch.randn(1, HEADS, S, DIM, generator=generator, device="cuda", dtype=torch.bfloat16) for _ in range(4)
    )
    inputs = Inputs(q, k, v, None, None)
    problem = Problem.of(*inputs, Score(DIM**-0.5, None, Band(1 - width, 0)))
    outputs, cotangents = launch.Forward(problem, inputs)(inputs), Outputs(do, None)
    needs, usual = Needs(True, True, True, False), backward_launch.backward_config
    made: dict[str, Callable[[], Any]] = {}
    for name, changes in FORMS.items():
        with patched(backward_launch, backward_config=lambda p, c=changes: replace(usual(p), **c)):
            run = backward_launch.Backward(problem, inputs, outputs, cotangents, needs)
            run(inputs, outputs, cotangents)  # compiled
        made[name] = lambda run=run: run(inputs, outputs, cotangents)
    return made


def main() -> None:
    print(torch.cuda.get_device_name())
    for width in map(int, sys.argv[1:] or ("512", "2048")):
        forms = calls(width)
        first = None
        for name, call in forms.items():
            found = [x.float() for x in call()[:3]]
            first = first or found
            off = [((x - y).norm() / y.norm()).item() for x, y in zip(found, first, strict=True)]
            print(f"window {width}, {name}: dQ, dK, dV off by {', '.join(f'{x:.1e}' for x in off)}", flush=True)
        times: dict[str, list[float]] = {name: [] for name in forms}
        for _ in range(2 * ROUNDS):
            for name, call in forms.items():
                times[name].append(milliseconds(call))
        medians = {name: statistics.median(x) for name, x in times.items()}
        for name, time in medians.items():
            print(f"window {width}, {name}: {time:.4f} ms, {medians['as it is'] / time:.3f} of as it is", flush=True)


if __name__ == "__main__":
    main()
