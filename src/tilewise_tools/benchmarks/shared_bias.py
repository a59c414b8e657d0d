"""The backward of a bias (1,H,M,N) on Hopper, bfloat16, one change at a time, interleaved.

    python -m tilewise_tools.benchmarks.shared_bias values [cases of CASES]

Each line has a case, a variant, the kernel time of a backward by CUDA graphs, TFLOP/s, and the share of the speed
without a bias. Before timing, one head of each variant is compared with float64: its worst error over the largest
element. "values" only compares small cases: odd lengths, causal, other dtypes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from subprocess import PIPE, STDOUT, Popen, TimeoutExpired
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.backends import Inputs, Needs, Outputs
from tilewise.backends.gluon.sm90.backward import dbias
from tilewise.backends.gluon.sm90.backward import launch as backward_launch
from tilewise.backends.gluon.sm90.common import config
from tilewise.backends.gluon.sm90.forward import launch
from tilewise.spec.problem import Problem
from tilewise.spec.score import Band, Score
from tilewise_tools.benchmarks.pair import patched
from tilewise_tools.benchmarks.pair import timed as timed_in_turns


def no(_: Any) -> bool:
    return False


class SharedBiasCase(NamedTuple):
    batch: int
    heads: int
    length: int
    head_dim: int
    keys: int = 0  # else as many as queries
    kv_heads: int = 0  # else as many as heads
    bias_heads: int = 0
    causal: bool = False
    deterministic: bool = False
    dtype: torch.dtype = torch.bfloat16
    bias_dtype: torch.dtype | None = None


CASES = {
    "D64": SharedBiasCase(4, 16, 4096, 64),
    "D128": SharedBiasCase(4, 16, 4096, 128),
    "D64 causal": SharedBiasCase(4, 16, 4096, 64, causal=True),
    "D128 causal": SharedBiasCase(4, 16, 4096, 128, causal=True),
    "D64 added": SharedBiasCase(16, 16, 2048, 64),
    "D128 added": SharedBiasCase(16, 16, 2048, 128),
    "tokens": SharedBiasCase(16, 16, 768, 48),
    "pair 256": SharedBiasCase(256, 4, 256, 32),
    "pair 512": SharedBiasCase(512, 4, 512, 32),
    "pair 768": SharedBiasCase(768, 4, 768, 32),
}
VALUES = {
    "one tile": SharedBiasCase(4, 1, 64, 128, 128),
    "few D128": SharedBiasCase(4, 4, 512, 128),
    "D128 odd": SharedBiasCase(4, 3, 333, 128, 472),
    "few D64": SharedBiasCase(4, 4, 512, 64),
    "D64 odd": SharedBiasCase(4, 3, 333, 64, 472),
    "D64 many": SharedBiasCase(4, 16, 1000, 64),
    "two": SharedBiasCase(2, 2, 400, 64, 136),
    "two D128": SharedBiasCase(2, 2, 130, 128, 264),
    "sixteen": SharedBiasCase(16, 2, 300, 48, 296),
    "six": SharedBiasCase(6, 2, 200, 128, 256),
    "causal": SharedBiasCase(4, 2, 700, 64, 704, causal=True),
    "causal D128": SharedBiasCase(8, 2, 700, 128, 704, causal=True),
    "float16": SharedBiasCase(4, 2, 260, 128, 264, dtype=torch.float16),
    "grouped": SharedBiasCase(4, 8, 260, 64, 264, kv_heads=2),
    "one for heads": SharedBiasCase(1, 8, 260, 128, 264, bias_heads=1),
    "float32 bias": SharedBiasCase(12, 2, 333, 64, 472, bias_dtype=torch.float32),
    "many D128": SharedBiasCase(4, 16, 1000, 128),
    "many grouped": SharedBiasCase(4, 16, 1000, 64, kv_heads=8),
    "many of one for heads": SharedBiasCase(1, 8, 520, 128, 2568, bias_heads=1),
    "many causal": SharedBiasCase(8, 8, 1000, 128, causal=True),
    "many of float32": SharedBiasCase(4, 16, 1000, 64, bias_dtype=torch.float32),
    "in order": SharedBiasCase(4, 4, 520, 64, 528, deterministic=True),
}


def calls(
    case: SharedBiasCase, device: str = "cuda", timed: bool = True
) -> tuple[dict[str, Callable[[], Any]], float, tuple[Tensor, ...]]:
    """Return the variants, each called once, the FLOPs of one, and the inputs; ``timed``: add baselines."""
    generator = None if device == "meta" else torch.Generator(device).manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=case.dtype, generator=generator)

    batch, heads, length, head_dim = case[:4]
    keys, kv_heads = case.keys or length, case.kv_heads or heads
    q, do = (draw(batch, heads, length, head_dim) for _ in range(2))
    k, v = (draw(batch, kv_heads, keys, head_dim) for _ in range(2))
    shared = draw(1, case.bias_heads or heads, length, keys).to(case.bias_dtype or case.dtype)
    score = Score(head_dim**-0.5, None, Band.aligned(case.causal, None, keys - length))

    def described(bias: Tensor | None, grad: bool = True) -> Problem:
        grad = grad and bias is not None
        found = Problem.of(q, k, v, bias, *(None,) * 6, score, bias_grad=grad, deterministic=case.deterministic)
        return replace(found, device="cuda", capability=(9, 0))

    problem, cotangents, made = described(shared), Outputs(do, None), {}
    outputs = launch.HopperForward(problem, Inputs(q, k, v, shared, None))(Inputs(q, k, v, shared, None))
    plain = launch.HopperForward(described(None), Inputs(q, k, v, None, None))(Inputs(q, k, v, None, None))

    def add(name: str, bias: Tensor | None = shared, grad: bool = True, **patches: Any) -> None:
        inputs, results = Inputs(q, k, v, bias, None), plain if bias is None else outputs
        needs = Needs(True, True, True, grad and bias is not None, False)
        of_dbias = {name: patches[name] for name in patches if hasattr(dbias, name)}
        of_launch = {name: patches[name] for name in patches if hasattr(backward_launch, name)}
        with patched(config, **patches), patched(dbias, **of_dbias), patched(backward_launch, **of_launch):
            backward = backward_launch.HopperBackward(described(bias, grad), inputs, results, cotangents, needs)
            backward(inputs, results, cotangents)  # compiles
        made[name] = partial(backward, inputs, results, cotangents)

    if timed:
        add("no bias", None)
        add("no dBias", grad=False)
    if config.is_batched(problem):
        add("three elements")
    if config.dbias_sums(problem):
        add("added to dBias")
    add("pipeline of dS", is_batched=no, dbias_sums=no)
    return made, problem.backward_flops, (q, k, v, do, shared)


def exact(case: SharedBiasCase, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Return each batch element's dQ, dK, dV of the last head, and the last head's dBias, in float64.

    For a bias with fewer heads than q, all heads that share it are computed.
    """
    q, k, v, do, shared = (x.double() for x in tensors)
    group, per_bias = q.shape[1] // k.shape[1], q.shape[1] // shared.shape[1]
    first = min(q.shape[1] - per_bias, q.shape[1] - group)
    dbias = torch.zeros_like(shared[0, -1])
    dq, dk, dv = torch.zeros_like(q[:, -1]), torch.zeros_like(k[:, -1]), torch.zeros_like(v[:, -1])
    hidden = torch.ones_like(dbias, dtype=torch.bool).triu(1 + dbias.shape[1] - dbias.shape[0])
    for b in range(q.shape[0]):
        for h in range(first, q.shape[1]):
            qh, kh, vh, doh = q[b, h], k[b, h // group], v[b, h // group], do[b, h]
            s = qh @ kh.T * case.head_dim**-0.5 + shared[0, h // per_bias]
            if case.causal:
                s.masked_fill_(hidden, -torch.inf)
            p = s.softmax(-1)
            dp = doh @ vh.T
            ds = p * (dp - (p * dp).sum(-1, keepdim=True))
            if h // per_bias == shared.shape[1] - 1:
                dbias += ds
            if h // group == k.shape[1] - 1:
                dk[b] += ds.T @ qh * case.head_dim**-0.5
                dv[b] += p.T @ doh
            if h == q.shape[1] - 1:
                dq[b] = ds @ kh * case.head_dim**-0.5
    return dq, dk, dv, dbias


def compare(
    name: str, case: SharedBiasCase, variants: dict[str, Callable[[], Any]], tensors: tuple[Tensor, ...]
) -> None:
    """Print each variant's errors against float64, and how often a repeated dBias has equal bits."""
    wanted = exact(case, tensors)
    for variant, call in variants.items():
        if variant == "no bias" or variant.startswith("no dBias"):
            continue
        found = call()
        dq, dk, dv, dbias_found = found.q[:, -1], found.k[:, -1], found.v[:, -1], found.bias[0, -1]
        pairs = zip((dq, dk, dv, dbias_found), wanted, strict=True)
        off = [((x.double() - y).abs().max() / y.abs().max()).item() for x, y in pairs]
        again = [torch.equal(call().bias, found.bias) for _ in range(3)]
        words = " ".join(f"{x:.1e}" for x in off)
        print(f"{name}, {variant}: off by {words} (q k v bias), equal again {sum(again)} of 3", flush=True)


def compared(cases: dict[str, SharedBiasCase], seconds: float = 100.0) -> list[str]:
    """Compare each case in its own process, in parallel, since they compile; return the successes."""
    command = [sys.executable, "-m", __spec__.name, "compare"]
    running = {name: Popen([*command, name], stdout=PIPE, stderr=STDOUT, text=True) for name in cases}
    end, good = time.monotonic() + seconds, []
    for name, process in running.items():
        try:
            said, _ = process.communicate(timeout=max(1.0, end - time.monotonic()))
        except TimeoutExpired:
            process.kill()
            said = (process.communicate()[0] or "") + f"{name}: HANGS\n"
        lines = said.splitlines()
        print("\n".join(lines if process.returncode == 0 else lines[-8:]), flush=True)
        if process.returncode == 0:
            good.append(name)
    return good


def main() -> None:
    if sys.argv[1:2] == ["compare"]:
        name = sys.argv[2]
        case = CASES.get(name) or VALUES[name]
        variants, _, tensors = calls(case, timed=name in CASES)
        compare(name, case, variants, tensors)
        return
    print(torch.cuda.get_device_name())
    names = sys.argv[1:] or ("values", "D64", "D128", "D64 causal", "D128 causal", "D64 added", "D128 added", "tokens")
    small = VALUES if "values" in names else {}
    for name in compared(small | {name: CASES[name] for name in names if name != "values"}):
        if name in small:
            continue
        variants, flops, tensors = calls(CASES[name])
        times = timed_in_turns(variants)
        for variant, milliseconds in times.items():
            share = times["no bias"] / milliseconds
            speed = flops / milliseconds * 1e-9
            print(f"{name}, {variant}: {milliseconds:.3f} ms, {speed:.0f} TFLOP/s, {share:.3f} of no bias", flush=True)
        del variants, tensors
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
