"""The backward of a bias (1,1,M,N) that 16 heads share, by how many programs form a group, in turns on one GPU.

    python benchmarks/group_programs.py [blocks in a hundred, or "dense"]...

The heads of a group run side by side: their Q, dO and float32 dQ want to be in the L2 cache together, while fewer of
them add to the float32 sum of dBias more often. dQ, dK, dV and dBias of each are compared before they are timed.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pair import patched
from tilewise.backends import Inputs, Needs, Outputs
from tilewise.backends.gluon.sm90 import backward_launch, dbias, launch
from tilewise.bench import sparse
from tilewise.problem import Problem
from tilewise.score.terms import Band, Score

S, HEADS, DIM, ROUNDS = 16384, 16, 128, 15
NEEDS = Needs(True, True, True, True)


def inputs_of(share: str, biased: bool = True) -> Inputs:
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    q, k, v = (normal(1, HEADS, S, DIM) for _ in range(3))
    bias = normal(1, 1, S, S) if biased else None
    found = Inputs(q, k, v, bias, None)
    if share == "dense":
        return found
    return found._replace(tiles=sparse.tile_mask(f"blocks {share}", S, S, q.device).tensors)


def calls(share: str) -> dict[str, Callable[[], Any]]:
    made: dict[str, Callable[[], Any]] = {}
    for biased, programs in ((True, 8), (True, 4), (True, 2), (False, 8)):
        inputs = inputs_of(share, biased)
        problem = Problem.of(*inputs, Score(DIM**-0.5, None, Band()), bias_grad=biased)
        outputs = launch.Forward(problem, inputs)(inputs)
        cotangents = Outputs(torch.randn_like(outputs.o), None)
        cotangents.o.copy_(outputs.o.roll(1, 2))  # the same for all
        with patched(dbias, MOST_PROGRAMS=programs):
            run = backward_launch.Backward(problem, inputs, outputs, cotangents, NEEDS._replace(bias=biased))
            run(inputs, outputs, cotangents)  # compiled
        name = f"groups of {programs}" if biased else "no bias"
        made[name] = lambda run=run, x=(inputs, outputs, cotangents): run(*x)
    return made


def milliseconds(call: Callable[[], Any]) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def main() -> None:
    print(torch.cuda.get_device_name())
    for share in sys.argv[1:] or ("25", "5"):
        variants = calls(share)
        first = None
        for name, call in variants.items():
            if name != "no bias":
                found = [x.float() for x in call()[:4]]
                first = first or found
                off = [((x - y).norm() / y.norm()).item() for x, y in zip(found, first, strict=True)]
                print(f"{share} {name}: dQ, dK, dV, dBias off by {', '.join(f'{x:.1e}' for x in off)}", flush=True)
        del first, found
        times: dict[str, list[float]] = {name: [] for name in variants}
        for _ in range(ROUNDS):
            for name, call in variants.items():
                times[name].append(milliseconds(call))
        medians = {name: statistics.median(x) for name, x in times.items()}
        for name, time in medians.items():
            print(f"{share} {name}: {time:.3f} ms, {medians['no bias'] / time:.3f} of no bias", flush=True)
        del variants, call
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
