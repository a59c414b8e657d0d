"""The pair bias with a key mask on Hopper (D=32, 4 heads, B=S, bias (1,4,S,S), bfloat16), interleaved.

    python -m tilewise_tools.benchmarks.pair_mask [forward|backward] [flex] [lengths]

Each line has a length, a mask, a variant, the kernel time of a pass by CUDA graphs, and the memory that the pass
allocates beyond its results. "before": the forward for general masks. flex: include FlexAttention, see `pair.flex`.
Results of three batch elements are compared with float64 first; dBias is compared for a loss of these elements alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tilewise.backends import Inputs, Needs, Outputs
from tilewise.backends.gluon.sm90.backward import launch as backward_launch
from tilewise.backends.gluon.sm90.common import config
from tilewise.backends.gluon.sm90.forward import launch
from tilewise.spec.problem import Problem
from tilewise.spec.score import Band, Score
from tilewise_tools.benchmarks.pair import flex, patched, timed, working_memory

SCALE = 32**-0.5
LOOKED_AT = 0, 3, -1  # batch elements; the random mask hides all keys of element 3


def masks(length: int, generator: torch.Generator) -> dict[str, Tensor | None]:
    all_seen = torch.ones(length, 1, 1, length, dtype=torch.bool, device="cuda")
    drawn = torch.rand(length, 1, 1, length, device="cuda", generator=generator) > 0.1
    drawn[3] = False
    padded, kept = all_seen.clone(), int(0.8 * length)
    padded[kept:], padded[..., kept:] = False, False
    return {"no mask": None, "nothing hidden": all_seen, "a tenth hidden": drawn, "a fifth padded": padded}


def reference(inputs: Inputs, do: Tensor, index: int) -> list[Tensor]:
    """Return o, LSE and all gradients of one batch element, in float64."""
    q, k, v, do = (x[index].double() for x in (*inputs[:3], do))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    bias = inputs.bias[0].double().requires_grad_()
    s = q @ k.transpose(-1, -2) * SCALE + bias
    if inputs.mask is not None:
        s = s.masked_fill(~inputs.mask[index], -torch.inf)
    lse = torch.logsumexp(s, -1)
    o = torch.exp(s - torch.where(lse.isinf(), 0.0, lse)[..., None]) @ v
    return [o, lse, *torch.autograd.grad(o, (q, k, v, bias), do)]


def held(name: str, found: Tensor, wanted: Tensor, bound: float) -> None:
    assert bool((found.isinf() == wanted.isinf()).all()), name
    error = torch.where(wanted.isinf(), 0.0, found.double() - wanted).abs().max().item()
    assert error <= bound * max(1.0, torch.where(wanted.isinf(), 0.0, wanted).abs().max().item()), (name, error)


def calls(length: int, backward: bool, peer: bool) -> dict[tuple[str, str], Callable[[], Any]]:
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16, generator=generator)

    q, k, v, do = (draw(length, 4, length, 32) for _ in range(4))
    stored = -(-length // 8) * 8  # row stride for TMA
    bias = draw(1, 4, length, stored)[..., :length]
    score = Score(SCALE, None, Band())
    made: dict[tuple[str, str], Callable[[], Any]] = {}
    for hidden, mask in masks(length, generator).items():
        inputs = Inputs(q, k, v, bias, mask)
        if peer:
            made[hidden, "flex"] = flex(inputs)
        problem = Problem.of(q, k, v, bias, mask, *(None,) * 5, score, bias_grad=True, deterministic=False)
        for variant in ("before", "now"):
            if variant == "before" and (backward or (mask is None and length % 64 == 0)):
                continue
            no = {"has_small_heads": lambda _: False} if variant == "before" else {}
            with patched(launch, **no), patched(config, **(no if mask is not None else {})):
                forward = launch.HopperForward(problem, inputs)
            outputs = forward(inputs)
            for index in LOOKED_AT:
                o, lse, *_ = reference(inputs, do, index)
                held(f"o {hidden} {variant} {index}", outputs.o[index], o, 1e-2)
                held(f"lse {hidden} {variant} {index}", outputs.lse[index], lse, 1e-2)
            if not backward:
                made[hidden, variant] = partial(forward, inputs)
                continue
            cotangents, needs = Outputs(do, None), Needs(True, True, True, True, False)
            differentiate = backward_launch.HopperBackward(problem, inputs, outputs, cotangents, needs)
            alone = torch.zeros_like(do)
            sums = 0
            for index in LOOKED_AT:
                alone[index] = do[index]
            found = differentiate(inputs, outputs, Outputs(alone, None))
            for index in LOOKED_AT:
                *_, dq, dk, dv, dbias = reference(inputs, do, index)
                sums = sums + dbias
                for name, x, y in (("dq", found[0], dq), ("dk", found[1], dk), ("dv", found[2], dv)):
                    held(f"{name} {hidden} {variant} {index}", x[index], y, 2e-2)
            held(f"dbias {hidden} {variant}", found[3][0], sums, 2e-2)
            made[hidden, variant] = partial(differentiate, inputs, outputs, cotangents)
    return made


def main(passes: str, *more: str) -> None:
    print(torch.cuda.get_device_name())
    lengths = [x for x in more if x != "flex"]
    for length in map(int, lengths or ("256", "384", "512", "768")):
        made = calls(length, passes == "backward", "flex" in more)
        for (hidden, variant), time in timed(made).items():
            memory = working_memory(made[hidden, variant])
            print(f"{length:5} {hidden:15} {variant:7} {time:7.4f} ms {memory:6.1f} MiB", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
