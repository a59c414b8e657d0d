"""One rank of test_mesh.py: DTensors, PyTorch's context manager, compiled calls and a mesh of two axes, through NCCL.

    python tests/gpu/nccl_mesh_child.py RANK SIZE STORE [cpu]     # a line of JSON for each check

Each is held to one rank that has the whole sequence, in bfloat16, by the norm of the difference: 2 % of the norm.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import tilewise
from tilewise.bias import RelativeBias, t5_bias
from tilewise.distributed import context_parallel_attention, shard

B, H, Hkv, S, D, R = 1, 8, 4, 4096, 128, 257
SHAPES = {"q": (B, H, S, D), "k": (B, Hkv, S, D), "v": (B, Hkv, S, D), "r": (1, H, S, R)}
Tensors = dict[str, Tensor]


def whole(device: str) -> tuple[Tensors, Tensor]:
    torch.manual_seed(0)
    made = {name: torch.randn(shape).to(device, torch.bfloat16) for name, shape in SHAPES.items()}
    return made | {"t": torch.randn(32, H, device="cpu").to(device)}, torch.randn(B, H, S, D).to(device, torch.bfloat16)


def gradients(call: Callable[[Tensors], Tensor], x: Tensors, do: Tensor) -> list[Tensor]:
    leaves = {name: t.detach().requires_grad_() for name, t in x.items()}
    o = call(leaves)
    return [o.detach(), *torch.autograd.grad(o, list(leaves.values()), do, allow_unused=True)]


def alone(x: Tensors) -> Tensor:
    bias = (RelativeBias(x["r"], lo=1 - R), t5_bias(x["t"], False))
    return tilewise.attention(x["q"], x["k"], x["v"], bias=bias, causal=True)


def compare(found: list[Any], right: list[Any], names: list[str]) -> str:
    wrong = []
    for name, x, y in zip(names, found, right, strict=True):
        if y is not None:
            error = float((x.double() - y.double()).norm() / y.double().norm())
            wrong += [f"{name} {error:.2g}"] * (not error < 0.02)
    return ", ".join(wrong)


def shards(x: Tensors, mesh: DeviceMesh) -> Tensors:
    return {name: t if name == "t" else shard(t, mesh, "head_tail") for name, t in x.items()}


def sharded(mesh: DeviceMesh, method: str, compiler: str | None = None) -> Callable[[DeviceMesh], str]:
    def check(_: DeviceMesh) -> str:
        x, do = whole(mesh.device_type)
        names = ["o", *x]
        right = gradients(alone, x, do)
        parts = [right[0], *right[1:-1]]

        def call(q: Tensor, k: Tensor, v: Tensor, r: Tensor, t: Tensor) -> Tensor:
            o = context_parallel_attention(
                q * 1, k, v, mesh=mesh, bias=(RelativeBias(r, lo=1 - R), t5_bias(t, False)), causal=True,
                load_balancer="head_tail", method=method,
            )  # fmt: skip
            assert isinstance(o, Tensor)
            return o * 1

        if compiler is not None:
            call = torch.compile(call, fullgraph=True, backend=compiler)
        found = gradients(lambda y: call(*y.values()), shards(x, mesh), shard(do, mesh, "head_tail"))
        return compare(found, [*(shard(y, mesh, "head_tail") for y in parts), right[-1]], names)

    return check


def dtensors(mesh: DeviceMesh) -> str:
    x, do = whole(mesh.device_type)
    right = gradients(alone, x, do)
    rows = [Shard(2)]
    split = {name: distribute_tensor(t, mesh, None if name == "t" else rows) for name, t in x.items()}
    found = gradients(alone, split, distribute_tensor(do, mesh, rows))
    return compare([y.full_tensor() for y in found], right, ["o", *x])


def manager(mesh: DeviceMesh) -> str:
    from torch.distributed.tensor.experimental import context_parallel

    x, do = whole(mesh.device_type)
    x = {name: x[name] for name in "qkv"}

    def call(y: Tensors) -> Tensor:
        return tilewise.scaled_dot_product_attention(*y.values(), is_causal=True, enable_gqa=True)

    right = [shard(y, mesh, "head_tail") for y in gradients(call, x, do)]
    buffers = {name: t.clone() for name, t in x.items()} | {"do": do.clone()}
    with context_parallel(mesh, buffers=list(buffers.values()), buffer_seq_dims=[2] * 4):
        found = gradients(call, {name: buffers[name].clone() for name in "qkv"}, buffers["do"].clone())
    return compare(found, right, ["o", *x])


def main() -> None:
    rank, size, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    device = "cpu" if "cpu" in sys.argv[4:] else "cuda"
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo", init_method=f"file://{store}", rank=rank, world_size=size
    )
    mesh, two = init_device_mesh(device, (size,)), init_device_mesh(device, (max(size // 2, 1), 2))
    checks = {
        "DTensors": dtensors, "context manager": manager, "two axes": sharded(two, "auto"),
        **{f"compiled {method}": sharded(mesh, method, "inductor") for method in ("all_gather", "ring", "all_to_all")},
    }  # fmt: skip
    for name, check in checks.items():
        begin = time.perf_counter()
        try:
            wrong = check(mesh)
        except (RuntimeError, ValueError, TypeError, AttributeError) as error:
            wrong = f"{type(error).__name__}: {error}"
        print(json.dumps([name, wrong, round(time.perf_counter() - begin, 1)]), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
