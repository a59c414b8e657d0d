"""Time and memory of context parallel attention beside one GPU's for the whole sequence; forward and backward.

    torchrun --nproc-per-node 2 benchmarks/context_parallel.py [--cases dense relative packed] [--lengths 65536 131072]

Causal, bfloat16, 32/8 heads of 128. share: of one GPU's time, ideal is 1 / ranks.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tilewise import attention, varlen_attention
from tilewise.bias import RelativeBias
from tilewise.distributed import context_parallel_attention, context_parallel_varlen_attention

H, HKV, D, RANGE = 32, 8, 128, 1024


def lognormal(total: int) -> list[int]:
    """Lengths by quantiles, that add up to ``total``: median 1,024, sigma 1.2."""
    normal = torch.distributions.Normal(0.0, 1.0)
    count = 1
    while True:
        at = (torch.arange(count) + 0.5) / count
        lengths = (1024 * torch.exp(1.2 * normal.icdf(at))).long().tolist()
        if sum(lengths) >= total:
            break
        count += 1
    generator = torch.Generator().manual_seed(0)
    lengths = [lengths[n] for n in torch.randperm(count, generator=generator)]
    over = sum(lengths) - total
    for n, length in enumerate(lengths):
        cut = min(over, length - 1)
        lengths[n], over = length - cut, over - cut
    return lengths


def runner(
    case: str, method: str, leaves: list[torch.Tensor], lengths: list[int], terms: dict[str, Any]
) -> Callable[[], torch.Tensor]:
    q, k, v = leaves[:3]
    cu, longest = tuple(accumulate(lengths, initial=0)), max(lengths)
    if case == "packed":
        if method != "one GPU":
            return lambda: context_parallel_varlen_attention(q, k, v, cu, **terms)
        at = torch.tensor(cu, dtype=torch.int32, device="cuda")
        return lambda: varlen_attention(q, k, v, at, at, longest, longest, **terms)
    if method != "one GPU":
        return lambda: context_parallel_attention(q, k, v, **terms)
    return lambda: attention(q, k, v, **terms)


def measured(run: Callable[[], torch.Tensor], do: torch.Tensor, leaves: list[torch.Tensor], turns: int) -> Any:
    """Milliseconds forward and of both, the middle of ``turns`` turns, and peak memory in GiB."""
    found = []
    for turn in range(turns + 1):
        for x in leaves:
            x.grad = None
        events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        torch.cuda.synchronize()
        if dist.get_world_size() > 1:
            dist.barrier()
        torch.cuda.synchronize()
        if turn == 1:
            torch.cuda.reset_peak_memory_stats()
        events[0].record()
        o = run()
        events[1].record()
        o.backward(do)
        events[2].record()
        torch.cuda.synchronize()
        if turn:
            found.append((events[0].elapsed_time(events[2]), events[0].elapsed_time(events[1])))
        del o
    both, forward = sorted(found)[len(found) // 2]
    return forward, both, torch.cuda.max_memory_allocated() / 2**30


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", nargs="+", default=["dense", "relative", "packed"])
    parser.add_argument("--lengths", nargs="+", type=int, default=[65536, 131072])
    parser.add_argument("--methods", nargs="+", default=["all_gather", "ring", "all_to_all"])
    parser.add_argument("--turns", type=int, default=5)
    given = parser.parse_args()
    dist.init_process_group("nccl")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(rank)
    mesh = init_device_mesh("cuda", (size,))

    def drawn(*shape: int, seed: int) -> torch.Tensor:
        generator = torch.Generator("cuda").manual_seed(seed + 100 * rank)
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=generator).requires_grad_()

    def say(case: str, S: int, method: str, found: Any, alone: Any) -> None:
        worst = torch.tensor(found, device="cuda")
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        forward, both, memory = worst.tolist()
        words = f"{case:9} {S:7} {method:11} forward {forward:8.2f} ms, both {both:8.2f} ms, {memory:6.2f} GiB"
        if alone is not None:
            words += (
                f"; share of one GPU {forward / alone[0]:.3f}, {both / alone[1]:.3f}, memory {memory / alone[2]:.3f}"
            )
        if rank == 0:
            print(words, flush=True)

    for case in given.cases:
        for S in given.lengths:
            if case == "packed" and given.lengths[-1] != S:
                continue
            lengths = lognormal(S)
            alone = None
            for method in ("one GPU", *given.methods):
                if case == "packed" and method == "ring":
                    continue
                gc.collect()
                torch.cuda.empty_cache()
                n = S if method == "one GPU" else S // size
                order = (n, H, D), (n, HKV, D)
                dense = (1, H, n, D), (1, HKV, n, D)
                q_shape, k_shape = order if case == "packed" else dense
                leaves = [drawn(*q_shape, seed=1), drawn(*k_shape, seed=2), drawn(*k_shape, seed=3)]
                terms: dict[str, Any] = {"causal": True}
                if case == "relative":  # as `relative_logits` leaves them: R and one more column
                    leaves.append(drawn(1, H, n, RANGE + 1, seed=4))
                    terms["bias"] = RelativeBias(leaves[3], lo=-RANGE)
                do = drawn(*q_shape, seed=5).detach()
                if method != "one GPU":
                    balancer = "document" if case == "packed" else "head_tail"
                    terms |= {"mesh": mesh, "method": method, "load_balancer": balancer}
                run = runner(case, method, leaves, lengths, terms)
                found = measured(run, do, leaves, given.turns)
                say(case, S, method, found, alone)
                if method == "one GPU":
                    alone = found
                del leaves, do, run, terms
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
