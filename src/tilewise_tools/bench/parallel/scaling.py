"""How long a call would take on R ranks, from the speed of one and the rates of transfers: arithmetic, nothing is run.

Bytes and FLOPs are those of `explain_context_parallel`. A method computes in stages, and while it computes one it
transfers what the next needs; with c seconds of products and x of transfers in n stages each, it takes

    gathered in n parts     x/n + (n - 1) max(c/n, x/n) + c/n       the first part is waited for
    ring of R ranks         (R - 1) max(c/R, x/(R - 1)) + c/R       the first part is there; of a backward, and the
                                                                    gradients' last way home
    all_to_all              x + c

and what that is more than c is exposed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tilewise.distributed.head_groups import groups_of
from tilewise.distributed.layout import LoadBalancer, Ranks, Split
from tilewise.distributed.operands import CallOptions, read
from tilewise.distributed.plan import make_plan


@dataclass(frozen=True)
class Machine:
    """What is measured. FLOP/s of one rank's products, forward and backward, of the whole sequence; bytes a second that
    a rank sends in each method; seconds that a transfer takes whatever its size. efficiency: of a rank's products
    beside those of the whole sequence, 1 where parts are computed as fast."""

    forward_flops: float
    backward_flops: float
    rates: dict[str, float]
    latency_s: float = 0.0
    efficiency: float = 1.0


@dataclass(frozen=True)
class Prediction:
    """Of one method on so many ranks: seconds of a forward and backward of the busiest, those of its products, those of
    its transfers, and what part of ideal that is: one rank's time over R times this."""

    method: str
    ranks: int
    seconds: float
    compute_s: float
    transfer_s: float
    of_ideal: float

    @property
    def exposed_s(self) -> float:
        return self.seconds - self.compute_s


def predict(
    q: Tensor, k: Tensor, v: Tensor, ranks: int, machine: Machine, *, causal: bool = False,
    load_balancer: LoadBalancer = None, stages: int | None = None,
) -> list[Prediction]:  # fmt: skip
    """Of every method that can run the call.

    Args:
        q, k, v: the whole sequence's, (B, H, S, D), (B, Hkv, S, D) and (B, Hkv, S, Dv); their numbers are not looked
            at, so that they may be on the meta device.
        ranks: how many, which divide S as `shard` needs it.
        stages: in how many groups of heads keys and values are gathered; by default as many as a call takes.
    """
    split = Split(ranks, 1 if load_balancer is None else 2)
    shards = [torch.empty(_part(x, ranks), dtype=x.dtype, device="meta").requires_grad_() for x in (q, k, v)]
    options = CallOptions(causal=causal, window=None, scale=None, softcap=None, deterministic=None, backend=None)
    call, tensors = read((shards[0], shards[1], shards[2]), None, None, None, Ranks(None, 0, split, "meta"), options)
    plan = make_plan(call, tensors, "auto")
    stages = groups_of(call, tensors) if stages is None else stages
    busiest, total = max(plan.flops), sum(plan.flops)
    found = []
    for cost in plan.costs:
        if cost.declines is not None:
            continue
        flops = total / ranks if cost.method == "all_to_all" else busiest
        rate = machine.rates[cost.method]
        compute = transfer = seconds = 0.0
        for one, speed, sent in (
            (flops, machine.forward_flops, cost.forward_bytes),
            (2.5 * flops, machine.backward_flops, cost.backward_bytes - cost.last_bytes),
        ):
            calls = ranks - 1 if cost.method == "ring" else stages if cost.method == "all_gather" else 1
            c, x = one / speed / machine.efficiency, sent / rate + calls * machine.latency_s * (sent > 0)
            compute, transfer = compute + c, transfer + x
            seconds += _seconds(cost.method, c, x, ranks, stages)
        last = cost.last_bytes / rate + machine.latency_s * (cost.last_bytes > 0)
        transfer, seconds = transfer + last, seconds + last
        found.append(
            Prediction(cost.method, ranks, seconds, compute, transfer, _alone(total, machine) / ranks / seconds)
        )
    return found


def predict_two_axes(
    q: Tensor, k: Tensor, v: Tensor, across: int, inside: int, machine: Machine, *, causal: bool = False,
    load_balancer: LoadBalancer = None, across_rate: float | None = None,
) -> Prediction:  # fmt: skip
    """Of a mesh of (across, inside) ranks: ``inside`` ranks trade rows for heads, and wait for it; across goes a ring.
    across_rate: bytes a second that a rank sends there, where that is another than within."""
    H, S = q.shape[1:3]
    if H % inside or k.shape[1] % inside:
        raise ValueError(f"inside: must divide {H} query and {k.shape[1]} key/value heads, got {inside}")
    rates = machine.rates if across_rate is None else {**machine.rates, "ring": across_rate}
    q_few, k_few, v_few = (x[:, : x.shape[1] // inside] for x in (q, k, v))
    q_part, k_part, v_part = (x[:, :, : S // across] for x in (q, k, v))
    far = replace(machine, rates=rates)
    rings = predict(q_few, k_few, v_few, across, far, causal=causal, load_balancer=load_balancer)
    ring = next(x for x in rings if x.method == "ring")
    trades = predict(q_part, k_part, v_part, inside, machine)
    trade = next(x for x in trades if x.method == "all_to_all").transfer_s
    seconds, ranks = ring.seconds + trade, across * inside
    of_ideal = ring.of_ideal * ring.seconds / seconds
    return Prediction("two axes", ranks, seconds, ring.compute_s, ring.transfer_s + trade, of_ideal)


def _alone(flops: float, machine: Machine) -> float:
    """One rank's time for the forward's FLOPs and the backward's."""
    return flops / machine.forward_flops + 2.5 * flops / machine.backward_flops


def _seconds(method: str, compute: float, transfer: float, ranks: int, stages: int) -> float:
    if method == "ring" and ranks > 1:
        return (ranks - 1) * max(compute / ranks, transfer / (ranks - 1)) + compute / ranks
    n = stages if method == "all_gather" else 1
    return transfer / n + (n - 1) * max(compute / n, transfer / n) + compute / n


def _part(x: Tensor, ranks: int) -> tuple[int, ...]:
    return (*x.shape[:2], x.shape[2] // ranks, *x.shape[3:])
