"""The backward of a bias (1,H,M,N) on Hopper, bfloat16, one change at a time, in turns.

    python benchmarks/shared_bias.py [cases of CASES]

Each line: a case, a variant, the time of the kernels of a backward by CUDA graphs, TFLOP/s, and the share of the speed
without a bias. Variants are compared to the first one before they are timed. Of up to eight batch elements dBias is
stored as their sum, of more it is added to a float32 sum.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from triton.runtime.jit import JITFunction

from pair import patched, timed
from tilewise.backends import Inputs, Needs, Outputs, launcher
from tilewise.backends.gluon.sm90 import backward_launch, config, dbias, dbias_reduce, launch
from tilewise.problem import Problem
from tilewise.score.terms import Band, Score


def no(*_: Any) -> bool:
    return False


class Case(NamedTuple):
    batch: int
    heads: int
    length: int
    head_dim: int


CASES = {
    "D64": Case(4, 16, 4096, 64),
    "D128": Case(4, 16, 4096, 128),
    "D64 added": Case(16, 16, 2048, 64),
    "D128 added": Case(16, 16, 2048, 128),
    "pair": Case(512, 4, 512, 32),
    "tokens": Case(16, 16, 768, 48),
}
THREADS = "gl.BlockedLayout([8 // WIDTH, WIDTH], [32 * WIDTH // COLS, COLS // WIDTH], [2, 1], [1, 0])"


def _forget() -> None:
    """What has been compiled, where a kernel's source changes; launches keep the kernels that they have found."""
    launcher._kernels.clear()
    for module in [x for name, x in sys.modules.items() if name.startswith("tilewise.")]:
        for function in vars(module).values():
            if isinstance(function, JITFunction):
                function.hash = None
                function.device_caches.clear()


@contextmanager
def halves_of_sectors() -> Iterator[None]:
    """Kernels in which a thread has eight neighbours of dBias, and adds them by two instructions."""
    function = dbias_reduce.reduce_group
    before = function.src
    assert THREADS in before
    function._unsafe_update_src(before.replace(THREADS, "gl.BlockedLayout([1, 8], [4, 8], [2, 1], [1, 0])"))
    _forget()
    try:
        yield
    finally:
        function._unsafe_update_src(before)
        _forget()


def _smaller_ring(problem: Problem, chosen: Any, device: torch.device) -> tuple[Any, int]:
    sizes, groups = _sizes(problem, chosen, device)
    return sizes._replace(ring=min(sizes.lag + sizes.lag // 2 + 2, groups)), groups


_sizes = backward_launch._sizes


def calls(case: Case, device: str = "cuda") -> tuple[dict[str, Callable[[], Any]], float]:
    """The variants, each called once, and the operations of one."""
    generator = None if device == "meta" else torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16, generator=generator)

    batch, heads, length, head_dim = case
    q, k, v, do = (draw(batch, heads, length, head_dim) for _ in range(4))
    shared = draw(1, heads, length, length)
    score = Score(head_dim**-0.5, None, Band())

    def described(bias: torch.Tensor | None) -> Problem:
        found = Problem.of(q, k, v, bias, *(None,) * 6, score, bias_grad=bias is not None, deterministic=False)
        return replace(found, device="cuda", capability=(9, 0))

    problem, cotangents, made = described(shared), Outputs(do, None), {}
    outputs = launch.Forward(problem, Inputs(q, k, v, shared, None))(Inputs(q, k, v, shared, None))
    plain = launch.Forward(described(None), Inputs(q, k, v, None, None))(Inputs(q, k, v, None, None))

    def add(
        name: str, bias: torch.Tensor | None = shared, lanes: bool = True, source: Any = None, **patches: Any
    ) -> None:
        inputs, of_lanes = Inputs(q, k, v, bias, None), {} if lanes else {"has_lanes": no}
        results, needs = plain if bias is None else outputs, Needs(True, True, True, bias is not None, False)
        with (
            source or nullcontext(),
            patched(config, **of_lanes),
            patched(dbias, **of_lanes),
            patched(backward_launch, **patches),
        ):
            backward = backward_launch.Backward(described(bias), inputs, results, cotangents, needs)
            backward(inputs, results, cotangents)  # compiles
        made[name] = partial(backward, inputs, results, cotangents)

    add("no bias", None)
    if config.has_lanes(problem):
        add("three lanes")
    add("ring of dS", lanes=False)
    with patched(dbias, has_lanes=no):
        adds = dbias.adds(problem)
    if adds:
        add("ring of dS, halves of sectors", lanes=False, source=halves_of_sectors())
    add("ring of dS, three quarters of it", lanes=False, _sizes=_smaller_ring)
    if head_dim == 64 and not adds:  # Q, dO and dQ cross the L2 half as often, one program instead of two adds up dBias
        alone = replace(problem.bias, batch=batch)
        whole = config.backward_config(replace(problem, bias=alone))
        add("ring of dS, 128 keys in a program", lanes=False, backward_config=lambda _: whole)
    return made, problem.backward_flops


def main() -> None:
    print(torch.cuda.get_device_name())
    for name in sys.argv[1:] or ("D64", "D128", "D64 added", "pair"):
        variants, flops = calls(CASES[name])
        first = None
        for variant, call in variants.items():
            if variant == "no bias":
                continue
            found = [x.float() for x in call() if x is not None]
            first = first or found
            worst = max(((x - y).abs().max() / y.abs().max()).item() for x, y in zip(found, first, strict=True))
            print(f"{name} {variant}: off by {worst:.1e}", flush=True)
        del first, found
        times = timed(variants)
        for variant, milliseconds in times.items():
            share = times["no bias"] / milliseconds
            speed = flops / milliseconds * 1e-9
            print(f"{name} {variant}: {milliseconds:.3f} ms, {speed:.0f} TFLOP/s, {share:.3f} of no bias", flush=True)
        del variants, call
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
