"""Tangents (JVP) of o on one GPU, bfloat16, B=2, 16 heads, S=4096: the kernel, PyTorch's operators, a peer.

    python -m tilewise_tools.benchmarks.tangents [cases of CASES]

Each line has a case, a variant, milliseconds by CUDA graphs, TFLOP/s at 12 D FLOP a pair, and the time relative to the
forward's. "jvp" is the forward and the tangents. The peer is jvp_flash_attention's `JVPAttn.fwd_dual`, where it can be
imported; it has no tangent of a bias. First each variant is compared with PyTorch's tangent in float64.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tilewise.backends import Inputs, Outputs
from tilewise.backends.protocol import Tangents
from tilewise.derivatives import packed
from tilewise.operator.dispatch import describe, forward_of, tangents_of
from tilewise.spec.score import Band, Score, ScoreNumbers
from tilewise_tools.benchmarks.pair import timed
from tilewise_tools.benchmarks.turns import difference

BATCH, HEADS, LENGTH = 2, 16, 4096
CHECKED = 300  # queries and keys of the comparison


class TangentCase(NamedTuple):
    head_dim: int
    causal: bool
    bias: bool


CASES = {
    f"D{D}{' causal' * causal}{' bias' * bias}": TangentCase(D, causal, bias)
    for D in (64, 128)
    for causal in (False, True)
    for bias in (False, True)
}


class TangentCall:
    """Operands of a case, with random tangents."""

    def __init__(self, case: TangentCase, length: int) -> None:
        self.case, self.length = case, length
        shape = BATCH, HEADS, length, case.head_dim
        self.qkv, moved = ([self._normal(*shape) for _ in range(3)] for _ in range(2))
        bias, bias_tangent = (self._normal(1, HEADS, length, length) if case.bias else None for _ in range(2))
        self.inputs, self.given = Inputs(*self.qkv, bias, None), Tangents(*moved, bias_tangent)
        score = Score.of(Band.aligned(case.causal, None, 0), case.head_dim)
        self.terms = ScoreNumbers.of(score, False, "auto")

    @staticmethod
    def _normal(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    def forward(self) -> Outputs:
        return forward_of(self.inputs, self.terms)(self.inputs)

    def tangents(self, outputs: Outputs) -> Outputs:
        return tangents_of(self.inputs, outputs, self.given, self.terms)(self.inputs, outputs, self.given)

    def jvp(self) -> Outputs:
        return self.tangents(self.forward())

    def in_operators(self) -> Outputs:
        return Outputs(*packed.tangents(describe(self.inputs, self.terms), self.inputs, self.given))

    def peer(self, attend: Callable[..., Tensor]) -> Tensor | None:
        with forward_ad.dual_level():
            duals = map(forward_ad.make_dual, self.qkv, self.given[:3])
            found: Tensor | None = forward_ad.unpack_dual(attend(*duals, causal=self.case.causal)).tangent
        return found

    def exact(self) -> Tensor:
        """Return the tangent of o by PyTorch in float64."""
        hidden = torch.ones(self.length, self.length, device="cuda", dtype=torch.bool).triu(1) & self.case.causal

        def attend(q: Tensor, k: Tensor, v: Tensor, *bias: Tensor) -> Tensor:
            s = sum(bias, q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(hidden, -math.inf)
            return torch.softmax(s, -1) @ v

        pairs = [
            (x.double(), t.double()) for x, t in zip(self.inputs[:4], self.given[:4], strict=True) if x is not None
        ]
        found: Tensor = torch.func.jvp(attend, *map(tuple, zip(*pairs, strict=True)))[1]
        return found


def variants(call: TangentCall) -> dict[str, Callable[[], Any]]:
    outputs = call.forward()
    found: dict[str, Callable[[], Any]] = {
        "forward": call.forward,
        "tangents": partial(call.tangents, outputs),
        "jvp": call.jvp,
        "tangents in PyTorch's operators": call.in_operators,
    }
    if not call.case.bias and importlib.util.find_spec("jvp_flash_attention") is not None:
        module = importlib.import_module("jvp_flash_attention.jvp_attention")
        found["jvp_flash_attention"] = partial(call.peer, module.JVPAttn.fwd_dual)
    return found


def main() -> None:
    print(torch.cuda.get_device_name())
    torch.manual_seed(0)
    for name in sys.argv[1:] or CASES:
        case = CASES[name]
        call = TangentCall(case, CHECKED)
        exact = call.exact()
        for variant, step in variants(call).items():
            if variant != "forward":
                result = step()
                o = result if isinstance(result, Tensor) else result.o
                error = difference([o.double()], [exact], 2e-2, f"{name} {variant}")
                print(f"{name} {variant}: off by {error:.1e} of the largest element", flush=True)
        call = TangentCall(case, LENGTH)
        times = timed(variants(call))
        flops = 3 * describe(call.inputs, call.terms).flops
        for variant, milliseconds in times.items():
            speed, share = flops / milliseconds * 1e-9, milliseconds / times["forward"]
            speed = speed / 3 if variant == "forward" else speed
            print(f"{name} {variant}: {milliseconds:.3f} ms, {speed:.0f} TFLOP/s, {share:.2f} forwards", flush=True)


if __name__ == "__main__":
    main()
