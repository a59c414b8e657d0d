"""Triangle attention with rows split over the GPUs of a host, compared with one GPU.

    torchrun --nproc-per-node 2 -m tilewise_tools.benchmarks.triangle_parallel --lengths 512 768 1024

A starting and an ending node with their projections, forward and backward, 128 channels and four heads, in bfloat16.
Prints for each length milliseconds (medians), the share of linear speedup, the time of the collectives alone, and the
peak memory of a rank.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tilewise.distributed import transpose_shards, triangle_attention, unshard
from tilewise.integrations import evoformer

CHANNELS, HEADS = 128, 4


def node(z: Tensor, weights: list[Tensor], attend: Callable[..., Tensor]) -> Tensor:
    to_qkv, to_bias, to_z = weights
    q, k, v = F.linear(z, to_qkv).unflatten(-1, (3, HEADS, -1)).movedim(-2, 2).unbind(-2)
    bias = F.linear(z, to_bias).movedim(-1, 1)[:, None].contiguous()
    return F.linear(attend(q, k, v, bias).transpose(2, 3).flatten(-2), to_z)


def step(z: Tensor, weights: list[Tensor], do: Tensor, attend: Callable, transpose: Callable) -> None:
    """Compute both nodes and the gradients of z and the weights."""
    x = z + node(z, weights, attend)
    x = x + transpose(node(transpose(x), weights, attend))
    torch.autograd.grad(x, [z, *weights], do)


def milliseconds(call: Callable[[], object], cuda: bool, repeats: int, together: bool) -> float:
    found = []
    for n in range(repeats + 3):
        if together:
            dist.barrier()
        if cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        if cuda:
            torch.cuda.synchronize()
        if n >= 3:
            found.append(1e3 * (time.perf_counter() - start))
    return statistics.median(found)


def measure(N: int, mesh: DeviceMesh, cuda: bool, repeats: int) -> None:
    device, dtype = ("cuda", torch.bfloat16) if cuda else ("cpu", torch.float32)
    torch.manual_seed(0)  # equal whole tensors on every rank
    z, do = (torch.randn(1, N, N, CHANNELS).to(dtype) for _ in range(2))  # on the CPU, to exclude them from the peak
    shapes = ((3 * CHANNELS, CHANNELS), (HEADS, CHANNELS), (CHANNELS, CHANNELS))
    weights = [(torch.randn(s, device=device, dtype=dtype) / 11).requires_grad_() for s in shapes]
    alone = 0.0
    if mesh.get_local_rank() == 0:
        whole, whole_do = z.to(device).requires_grad_(), do.to(device)
        alone = milliseconds(
            lambda: step(
                whole, weights, whole_do, evoformer.triangle_attention, lambda x: x.transpose(1, 2).contiguous()
            ),
            cuda, repeats, False,
        )  # fmt: skip
        del whole, whole_do
    mine, mine_do = (x.chunk(mesh.size(), 1)[mesh.get_local_rank()].to(device) for x in (z, do))
    mine.requires_grad_()
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    split = milliseconds(
        lambda: step(
            mine, weights, mine_do, lambda *x: triangle_attention(*x, mesh=mesh), lambda x: transpose_shards(x, mesh)
        ),
        cuda, repeats, True,
    )  # fmt: skip
    peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0
    bias = torch.zeros(1, 1, HEADS, N // mesh.size(), N, device=device, dtype=dtype)

    def collectives() -> None:  # of a step: two transpositions and two gathers, and their backwards
        for _ in range(4):
            transpose_shards(mine.detach(), mesh)
        for _ in range(2):
            x = bias.clone().requires_grad_()
            whole = unshard(x, mesh, dim=3)
            torch.autograd.grad(whole, x, whole.detach())

    alone_together = milliseconds(collectives, cuda, repeats, True)
    if mesh.get_local_rank() == 0:
        ranks = mesh.size()
        print(
            f"N={N}: one {alone:.2f} ms, {ranks} ranks {split:.2f} ms, {alone / split / ranks:.2f} of ideal; "
            f"collectives by themselves {alone_together:.2f} ms; peak {peak:.2f} GiB a rank",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="Triangle attention over several GPUs.")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 768, 1024])
    parser.add_argument("--repeats", type=int, default=20)
    arguments = parser.parse_args()
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    mesh = init_device_mesh("cuda" if cuda else "cpu", (int(os.environ["WORLD_SIZE"]),))
    for N in arguments.lengths:
        measure(N, mesh, cuda, arguments.repeats)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
