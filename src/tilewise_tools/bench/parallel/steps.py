"""Providers: differentiable forwards of a case, from this rank's shards or from whole tensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import tilewise
from tilewise.distributed import (
    context_parallel_attention,
    context_parallel_varlen_attention,
    explain_context_parallel,
    shard,
)
from tilewise.distributed.layout import Split
from tilewise_tools.bench.parallel.cases import ParallelCase

BALANCER: Literal["head_tail"] = "head_tail"
Leaves = dict[str, Tensor]
Forward = Callable[[], Tensor]


@dataclass(frozen=True)
class ParallelProvider:
    """One implementation of context parallelism.

    Attributes:
        name: name in the table.
        prepare: (case, leaves, mesh) -> forward; leaves are this rank's shards, balanced by `BALANCER`.
        declines: (case, mesh) -> reason why it does not support the case, or None.
        context: (case, mesh) -> context manager around forward and backward.
        ours: True for methods of tilewise, which are measured without transfers, too.
        stage: a stage starts after all cases of the previous stages.
        once: True to measure a single round, because each round compiles again.
    """

    name: str
    prepare: Callable[[ParallelCase, Leaves, DeviceMesh], Forward]
    declines: Callable[[ParallelCase, DeviceMesh], str | None]
    context: Callable[[ParallelCase, DeviceMesh], AbstractContextManager[None]] = lambda case, mesh: nullcontext()
    ours: bool = False
    stage: int = 0
    once: bool = False


def alone(case: ParallelCase, x: Leaves, backend: str | None = None) -> Forward:
    """Return the forward of one process on the whole sequence."""
    if case.kind == "packed":
        cu = torch.tensor(case.cu_seqlens, dtype=torch.int32, device=x["q"].device)
        longest = max(case.lengths)
        return lambda: tilewise.varlen_attention(  # type: ignore[return-value]
            x["q"], x["k"], x["v"], cu, cu, longest, longest, causal=True, backend=backend
        )
    return lambda: tilewise.attention(x["q"], x["k"], x["v"], bias=case.bias(x), causal=True, backend=backend)


# --- tilewise ---


def _ours(method: str, balancer: str | None = BALANCER) -> Callable[[ParallelCase, Leaves, DeviceMesh], Forward]:
    def prepare(case: ParallelCase, x: Leaves, mesh: DeviceMesh) -> Forward:
        more: dict[str, Any] = {"mesh": mesh, "method": method, "load_balancer": balancer, "causal": True}
        if case.kind == "packed":
            more["load_balancer"] = "document"
            return lambda: context_parallel_varlen_attention(  # type: ignore[return-value]
                x["q"], x["k"], x["v"], case.cu_seqlens, **more
            )
        return lambda: context_parallel_attention(  # type: ignore[return-value]
            x["q"], x["k"], x["v"], bias=case.bias(x), **more
        )

    return prepare


def part_of(case: ParallelCase, x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return this rank's shard of a whole tensor: a head and a tail chunk, or its packed sequences."""
    if case.kind == "packed":
        return shard(x, mesh, "document", cu_seqlens=case.cu_seqlens)
    return shard(x, mesh, BALANCER, case.axis)


def sent_bytes(case: ParallelCase, x: Leaves, mesh: DeviceMesh, method: str) -> tuple[int, int] | None:
    """Return the bytes that each rank sends in forward and backward; None for packed batches.

    Counted by `explain_context_parallel`.
    """
    if case.kind == "packed":
        return None
    plan = explain_context_parallel(
        x["q"], x["k"], x["v"], bias=case.bias(x), causal=True, mesh=mesh, load_balancer=BALANCER
    )
    cost = next(cost for cost in plan.costs if cost.method == method)
    return cost.forward_bytes, cost.backward_bytes


def _heads_divide(case: ParallelCase, mesh: DeviceMesh) -> str | None:
    ranks = mesh.size()
    if case.heads % ranks or case.kv_heads % ranks:
        return f"the {case.heads} query and {case.kv_heads} key/value heads do not divide by {ranks} ranks"
    return None


def _no_packed(case: ParallelCase, mesh: DeviceMesh) -> str | None:
    return "the ring takes no packed batches" if case.kind == "packed" else None


@cache
def _mesh_of_two(device: str, ranks: int) -> DeviceMesh:
    """Return a mesh (2, ranks / 2): a ring of two, which has the fewest steps."""
    return init_device_mesh(device, (2, ranks // 2))


def _two_axes(case: ParallelCase, x: Leaves, mesh: DeviceMesh) -> Forward:
    return _ours("ring")(case, x, _mesh_of_two(mesh.device_type, mesh.size()))


def _two_axes_decline(case: ParallelCase, mesh: DeviceMesh) -> str | None:
    ranks = mesh.size()
    if ranks < 4 or ranks % 2:
        return f"two axes need 4 ranks or more, an even number, got {ranks}"
    if case.kind == "packed":
        return "a mesh of two axes takes no packed batches"
    inside = ranks // 2
    return f"the {case.kv_heads} key/value heads do not divide by {inside}" if case.kv_heads % inside else None


# --- PyTorch ---


def _needs_cuda(mesh: DeviceMesh) -> str | None:
    return None if mesh.device_type == "cuda" else "needs a CUDA device"


def _torch_declines(case: ParallelCase, mesh: DeviceMesh) -> str | None:
    if case.kind == "relative":
        return "PyTorch's context_parallel takes no attn_mask"
    if case.kind == "packed":
        return "PyTorch's context_parallel takes no packed batch"
    return _needs_cuda(mesh)


def _torch(repeat: bool) -> Callable[[ParallelCase, Leaves, DeviceMesh], Forward]:
    """Return ``prepare`` of SDPA; ``repeat``: repeat key/value heads in the forward instead of enable_gqa."""

    def prepare(case: ParallelCase, x: Leaves, mesh: DeviceMesh) -> Forward:
        group = case.heads // case.kv_heads

        def forward() -> Tensor:
            k, v = x["k"], x["v"]
            if repeat:
                k, v = (t.repeat_interleave(group, 1) for t in (k, v))
            return torch.nn.functional.scaled_dot_product_attention(
                x["q"], k, v, is_causal=True, enable_gqa=not repeat and group > 1
            )

        return forward

    return prepare


def _torch_context(backend: str) -> Callable[[ParallelCase, DeviceMesh], AbstractContextManager[None]]:
    @contextmanager
    def context(case: ParallelCase, mesh: DeviceMesh) -> Iterator[None]:
        from torch.distributed.tensor.experimental import context_parallel
        from torch.nn.attention import SDPBackend, sdpa_kernel

        # context_parallel reads length and device from a buffer; the tensors are already sharded.
        buffer = torch.zeros(case.length, device=mesh.device_type)
        with context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[0]), sdpa_kernel(getattr(SDPBackend, backend)):
            yield

    return context


def _flex_declines(case: ParallelCase, mesh: DeviceMesh) -> str | None:
    if case.kind == "packed":
        return "is not measured on packed batches"
    if case.kind == "relative" and case.heads * case.length // mesh.size() * case.entries >= 2**31:
        return "values of 2^31 elements or more in a score_mod"
    return _needs_cuda(mesh)


def _flex(case: ParallelCase, x: Leaves, mesh: DeviceMesh) -> Forward:
    """Return the forward by FlexAttention; k and v are in rank order, score_mod maps positions."""
    from torch.distributed.tensor.experimental import context_parallel
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()  # beyond its recompilation limit flex_attention would run uncompiled and unfused
    compiled = torch.compile(flex_attention, dynamic=False)
    gather: Any = inspect.unwrap(context_parallel).__globals__["flex_cp_allgather"]
    device, group = x["q"].device, mesh.get_group().group_name
    # The order of PyTorch's head-tail load balancer.
    order = Split(mesh.size(), 2).shards_of(torch.arange(case.length, device=device), 0).flatten()
    mask = _block_mask(order, mesh, create_block_mask)
    score_mod = None
    if case.kind == "relative":
        rows = order.view(mesh.size(), -1)[mesh.get_local_rank()]
        values, last = x["values"], case.entries - 1

        def score_mod(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            entry = order[j] - rows[i] + last
            inside = (entry >= 0) & (entry <= last)
            return s + torch.where(inside, values[b, h, i, entry.clamp(0, last)], 0.0)

    def forward() -> Tensor:
        k, v = gather(x["k"].contiguous(), x["v"].contiguous(), 2, group)
        o: Tensor = compiled(x["q"], k, v, score_mod=score_mod, block_mask=mask, enable_gqa=True)
        return o

    return forward


def _block_mask(order: Tensor, mesh: DeviceMesh, create_block_mask: Callable[..., Any]) -> Any:
    """Return the causal block mask of this rank's queries and all keys in rank order.

    Creation is compiled, which avoids the matrix of all pairs.
    """
    rows = order.view(mesh.size(), -1)[mesh.get_local_rank()]

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return order[j] <= rows[i]

    make = torch.compile(create_block_mask, dynamic=False)
    return make(visible, None, None, rows.numel(), order.numel(), device=str(order.device))


def providers() -> list[ParallelProvider]:
    """Return all providers in the order of the run; PyTorch's are last."""
    found = [
        ParallelProvider("all_gather", _ours("all_gather"), lambda case, mesh: None, ours=True),
        ParallelProvider("ring", _ours("ring"), _no_packed, ours=True),
        ParallelProvider("all_to_all", _ours("all_to_all"), _heads_divide, ours=True),
        ParallelProvider("two axes", _two_axes, _two_axes_decline),
    ]
    for name, backend in (("torch-flash", "FLASH_ATTENTION"), ("torch-cudnn", "CUDNN_ATTENTION")):
        usual = ParallelProvider(name, _torch(False), _torch_declines, _torch_context(backend), stage=1)
        found += [usual, replace(usual, name=f"{name}, heads repeated", prepare=_torch(True))]
    return [*found, ParallelProvider("torch-flex", _flex, _flex_declines, stage=2, once=True)]
