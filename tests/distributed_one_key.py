"""Dropout beside few visible keys, over ranks: what test_distributed.py's processes run, see test_low_bits.py."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from distributed_child import METHODS
from torch.distributed.device_mesh import DeviceMesh

from tilewise.distributed import context_parallel_attention


def check_one_key(mesh: DeviceMesh) -> None:
    """Beside dropout gradients of rows that see one key are 0, in 16 bits too: parts are merged, rows are traded and a
    compiler's operator hands on what rounding takes of o."""
    for method, balancer in itertools.product(METHODS, (None, "head_tail")):
        torch.manual_seed(3)
        x = [torch.randn(1, 4, 8, 16, dtype=torch.float16, requires_grad=True) for _ in range(3)]

        def call(*x: torch.Tensor, more: dict[str, Any]) -> torch.Tensor:
            return context_parallel_attention(
                *x, mesh=mesh, causal=True, window=(0, 0), dropout_p=0.9, dropout_seed=(1, 2), **more
            )

        more = {"method": method, "load_balancer": balancer}
        for f in (call, torch.compile(call, backend="eager", fullgraph=True))[: 1 if balancer else 2]:
            dq, dk, dv = torch.autograd.grad((f(*x, more=more).float() * torch.arange(16.0)).sum(), x)
            assert dv.abs().max() > 100, method
            assert max(dq.abs().max(), dk.abs().max()) < 1e-2, (method, balancer, f is call)


def checks_of_one_key() -> dict[str, tuple]:
    return {"one key": (check_one_key,)}
