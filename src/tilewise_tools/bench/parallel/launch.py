"""Start of N processes by PyTorch's elastic launch, or of this rank if torchrun started it."""

from __future__ import annotations

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tilewise_tools.bench.parallel.results import table
from tilewise_tools.bench.parallel.run import ParallelRunOptions, chosen, run
from tilewise_tools.bench.run import UsageError

_TIMEOUT = timedelta(seconds=120)  # for a rank that waits for another; then all ranks end


def launch(ranks: int, device: str, options: ParallelRunOptions) -> int:
    """Run on ``ranks`` processes; return 0, or 1 if a method of tilewise failed or was wrong.

    Under torchrun, run as one of its ranks; otherwise start the processes. Raise a UsageError for invalid options.
    """
    if device == "cuda" and torch.cuda.device_count() < ranks:
        raise UsageError("--nproc", f"there are {torch.cuda.device_count()} GPUs here, got {ranks}")
    chosen(options, device, ranks)
    started = started_by_torchrun()
    if started is not None:
        if started != ranks:
            raise UsageError("--nproc", f"torchrun has started {started} processes, got {ranks}")
        return rank_of(device, options)
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.setdefault("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // ranks, 1)))
    config = LaunchConfig(
        1, 1, ranks, run_id="tilewise-bench", rdzv_backend="c10d", rdzv_endpoint="127.0.0.1:0", max_restarts=0,
        local_addr="127.0.0.1",
    )  # fmt: skip
    statuses: dict[int, int] = elastic_launch(config, rank_of)(device, options)
    return max(statuses.values())


def started_by_torchrun() -> int | None:
    """Return the number of processes that torchrun started; None outside torchrun."""
    return int(os.environ["WORLD_SIZE"]) if "TORCHELASTIC_RUN_ID" in os.environ else None


def rank_of(
    device: str, options: ParallelRunOptions, init_method: str = "env://", rank: int = -1, size: int = -1
) -> int:
    """Run as one rank, given by the arguments or by torchrun's environment variables."""
    rank = int(os.environ["RANK"]) if rank < 0 else rank
    size = int(os.environ["WORLD_SIZE"]) if size < 0 else size
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)))
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=size, timeout=_TIMEOUT)
    try:
        found = run(options, init_device_mesh(device, (size,)), lambda words: print(words, file=sys.stderr, flush=True))
        if found is None:
            return 0
        print(f"\n{table(found)}", flush=True)
        ours = {"all_gather", "ring", "all_to_all"}
        return int(any(row.outcome == "failed" and row.provider in ours for row in found.rows))
    finally:
        dist.destroy_process_group()
