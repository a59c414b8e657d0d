"""Predicted time of a call on R ranks, from one rank's speed and the rates of transfers.

Bytes and FLOPs are those of `explain_context_parallel`. A method computes in stages and overlaps each stage with the
transfer for the next. With c seconds of compute and x seconds of transfers, the time is

    all_gather in n groups  x/n + (n - 1) max(c/n, x/n) + c/n       the first transfer is exposed
    ring of R ranks         (R - 1) max(c/R, x/(R - 1)) + c/R       the first part is local; the backward adds the last
                                                                    transfer of gradients to their rank
    all_to_all              x + c

Time beyond c is exposed communication.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tilewise.distributed.head_groups import groups_of
from tilewise.distributed.layout import LoadBalancer, Ranks, Split
from tilewise.distributed.methods import make_plan
from tilewise.distributed.operands import Arguments, CallOptions, read


@dataclass(frozen=True)
class Machine:
    """Measured speeds.

    Attributes:
        forward_flops, backward_flops: FLOP/s of one rank on the whole sequence.
        rates: bytes/s that a rank sends, for each method.
        latency_s: latency of a transfer in seconds.
        efficiency: speed of a rank on its part relative to the whole sequence.
    """

    forward_flops: float
    backward_flops: float
    rates: dict[str, float]
    latency_s: float = 0.0
    efficiency: float = 1.0


@dataclass(frozen=True)
class Prediction:
    """Predicted time of one method on ``ranks`` ranks.

    Attributes:
        seconds: forward and backward of the busiest rank.
        compute_s, transfer_s: its compute and its transfers.
        of_ideal: one rank's time divided by ``ranks`` times ``seconds``.
    """

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
    """Predict every method that supports the call.

    Args:
        q, k, v: whole tensors (B, H, S, D), (B, Hkv, S, D) and (B, Hkv, S, Dv); only shapes and dtypes are used, so
            that they may be on the meta device.
        ranks: number of ranks; S must be divisible as for `shard`.
        stages: number of head groups in which all_gather gathers keys and values; default: the call's own.
    """
    split = Split(ranks, 1 if load_balancer is None else 2)
    shards = [torch.empty(_part(x, ranks), dtype=x.dtype, device="meta").requires_grad_() for x in (q, k, v)]
    options = CallOptions(causal=causal, window=None, scale=None, softcap=None, deterministic=None, backend=None)
    given = Arguments((shards[0], shards[1], shards[2]), None, None, None, None, options, {})
    call, tensors = read(Ranks(None, 0, split, "meta"), given)
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
    """Predict a mesh of (across, inside) ranks: an all-to-all of heads inside, a ring across.

    The all-to-all is exposed. ``across_rate``: bytes/s of the ring, if it differs from ``machine``'s.
    """
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
    """Return one rank's time for forward and backward, in seconds; ``flops``: of the forward."""
    return flops / machine.forward_flops + 2.5 * flops / machine.backward_flops


def _seconds(method: str, compute: float, transfer: float, ranks: int, stages: int) -> float:
    if method == "ring" and ranks > 1:
        return (ranks - 1) * max(compute / ranks, transfer / (ranks - 1)) + compute / ranks
    n = stages if method == "all_gather" else 1
    return transfer / n + (n - 1) * max(compute / n, transfer / n) + compute / n


def _part(x: Tensor, ranks: int) -> tuple[int, ...]:
    return (*x.shape[:2], x.shape[2] // ranks, *x.shape[3:])
