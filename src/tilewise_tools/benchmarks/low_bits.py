"""Cost of the low bits of O with dropout on one GPU, forward and backward, interleaved.

    python -m tilewise_tools.benchmarks.low_bits

Each line has dropout 0.1 in the Hopper kernels with and without the low bits: milliseconds of a pass, and the share of
the speed without. Results of both are compared first; rows with one visible key have known gradients.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from tilewise import attention, clear_caches
from tilewise.backends import empty_low_bits
from tilewise.backends.gluon.sm90.forward import launch
from tilewise_tools.benchmarks.turns import difference, in_turns

SEED = torch.tensor([1, 2], device="cuda")
CASES = [  # batch, heads, length, head dimension, causal
    (4, 16, 4096, 64, False), (4, 16, 4096, 64, True), (4, 16, 4096, 128, False), (4, 16, 4096, 128, True),
    (32, 16, 512, 64, False), (32, 16, 512, 128, False), (2, 8, 4096, 256, False), (32, 16, 512, 128, True),
]  # fmt: skip


def made(batch: int, heads: int, length: int, dim: int) -> list[Tensor]:
    return [
        torch.randn(batch, length, heads, dim, device="cuda", dtype=torch.bfloat16).transpose(1, 2).requires_grad_()
        for _ in range(3)
    ]


def with_bits(on: bool) -> None:
    """Clear all caches; later calls store the low bits of o only if ``on``."""
    launch.empty_low_bits = empty_low_bits if on else lambda o, problem: None
    clear_caches()


def milliseconds(step: Callable[[], object], calls: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(2_000_000)  # lets the host run ahead
    begin.record()
    for _ in range(calls):
        step()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / calls


def hold_one_key() -> None:
    """Check that dq and dk are 0 in rows with one visible key."""
    for on in (True, False):
        with_bits(on)
        x = made(2, 4, 512, 128)
        o = attention(*x, window=(0, 0), dropout_p=0.9, dropout_seed=SEED, backend="hopper")
        dq, dk, dv = torch.autograd.grad(o, x, torch.randn_like(o))
        least = max(dq.abs().max().item(), dk.abs().max().item())
        words = "with" if on else "without"
        print(f"one key a row, {words} the bits: |dq|, |dk| up to {least:.1e}, |dv| {dv.abs().max():.1f}")
        if on and least > 1e-3:
            raise SystemExit("the gradients of rows that see one key are not 0")


class PassTimes:
    """Forward and backward of a call, with or without the low bits of o."""

    def __init__(self, case: tuple[int, int, int, int, bool]) -> None:
        *shape, self.causal = case
        self.x, self.calls = made(*shape), 12 if shape[2] > 1000 else 60
        self.do = torch.randn_like(self.x[0])

    def forward(self) -> Tensor:
        return attention(*self.x, causal=self.causal, dropout_p=0.1, dropout_seed=SEED, backend="hopper")

    def gradients(self, o: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(o, self.x, self.do, retain_graph=True)

    def results(self, on: bool) -> list[Tensor]:
        with_bits(on)
        o = self.forward()
        return [o.detach(), *self.gradients(o)]

    def times(self, on: bool) -> tuple[float, float]:
        with_bits(on)
        o = self.forward()
        self.gradients(o)
        with torch.no_grad():
            forward = milliseconds(self.forward, self.calls)
        return forward, milliseconds(lambda: self.gradients(o), self.calls)


def main() -> None:
    hold_one_key()
    print("B, heads, S, D: forward with, without, share; backward with, without, share; ms")
    for case in CASES:
        run = PassTimes(case)
        difference(run.results(True), run.results(False), 2e-2, str(case))
        found = in_turns({name: partial(run.times, name == "with") for name in ("with", "without")}, 5, unmeasured=1)
        line = "{:>3} {:>3} {:>5} {:>4} {:<6}".format(*case[:4], "causal" if case[4] else "full")
        for n in range(2):
            a, b = (statistics.median(t[n] for t in found[name]) for name in ("with", "without"))
            line += f"   {a:7.3f} {b:7.3f} {b / a:6.3f}"
        print(line, flush=True)


if __name__ == "__main__":
    main()
