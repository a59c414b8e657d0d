"""Triangle attention of rows that are split over ranks, held to one process; distributed_child.py runs these."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from processes import raises
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._python_dispatch import TorchDispatchMode

from tilewise.distributed import shard, transpose_shards, triangle_attention
from tilewise.integrations import evoformer

N, C, H, D = 8, 6, 2, 4


def node(z: Tensor, weights: list[Tensor], attend: Callable[..., Tensor], mask: Tensor | None) -> Tensor:
    """One node of pair rows z (B, rows, N, C), starting or, of the transposed, ending."""
    to_qkv, to_bias, to_z = weights
    q, k, v = F.linear(z, to_qkv).unflatten(-1, (3, H, D)).movedim(-2, 2).unbind(-2)  # (B, rows, H, N, D)
    bias = F.linear(z, to_bias).movedim(-1, 1)[:, None]  # (B, 1, H, rows, N)
    o = attend(q, k, v, bias, None if mask is None else mask[:, :, None, None])
    return z + F.linear(o.transpose(2, 3).flatten(-2), to_z)


def drawn(B: int, dtype: torch.dtype, *, seed: int = 0) -> tuple[Tensor, list[Tensor], Tensor]:
    """z (B, N, N, C), the weights of both nodes, and a mask (B, N, N) with a row that sees nothing."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    weights = [normal(*shape) for _ in range(2) for shape in ((3 * H * D, C), (H, C), (C, H * D))]
    mask = normal(B, N, N).float() > -0.7
    mask[:, 3] = False
    return normal(B, N, N, C), weights, mask


def both_nodes(z: Tensor, weights: list[Tensor], mask: Tensor | None, attend: Any, transpose: Any) -> Tensor:
    z = node(z, weights[:3], attend, mask)
    z = node(transpose(z), weights[3:], attend, None if mask is None else transpose(mask))
    return transpose(z)


def check_nodes(B: int, masked: bool, mesh: DeviceMesh) -> None:
    """A starting node and an ending one: z, its gradient, and the sum over ranks of those of weights."""
    z, weights, mask = drawn(B, torch.float64)
    seen = mask if masked else None
    z.requires_grad_()
    whole = [w.clone().requires_grad_() for w in weights]
    local = [w.clone().requires_grad_() for w in weights]
    expected = both_nodes(z, whole, seen, evoformer.triangle_attention, lambda x: x.transpose(1, 2))
    expected.square().sum().backward()
    mine = shard(z.detach(), mesh, dim=1).requires_grad_()
    found = both_nodes(
        mine, local, None if seen is None else shard(seen, mesh, dim=1),
        lambda *x: triangle_attention(*x, mesh=mesh, validate=True), lambda x: transpose_shards(x, mesh),
    )  # fmt: skip
    found.square().sum().backward()
    torch.testing.assert_close(found, shard(expected, mesh, dim=1))
    torch.testing.assert_close(mine.grad, shard(z.grad, mesh, dim=1))
    for x, y in zip(local, whole, strict=True):
        dist.all_reduce(x.grad)
        torch.testing.assert_close(x.grad, y.grad)


def rows(mesh: DeviceMesh, *, B: int = 1, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """q, k, v and bias of this rank, of four dimensions where B is 0."""
    lead, ranks = ((B, N // mesh.size()) if B else (N // mesh.size(),)), mesh.size()
    torch.manual_seed(mesh.get_local_rank())
    shapes = [(*lead, H, N, D)] * 3 + [(*((B, 1) if B else (1,)), H, N // ranks, N)]
    return [torch.randn(shape, dtype=dtype).requires_grad_() for shape in shapes]


class Sent(TorchDispatchMode):
    """What is sent: the name of each collective, and the dtype of its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func.namespace == "c10d":
            tensor = next(x for x in args if isinstance(x, Tensor))
            self.found.append((func.overloadpacket.__name__, tensor.dtype))
        return func(*args, **(kwargs or {}))


def check_collectives(mesh: DeviceMesh) -> None:
    """The bias is gathered once and its gradient scattered once, summed in float32; nothing else is sent."""
    q, k, v, bias = rows(mesh, dtype=torch.bfloat16)
    triangle_attention(q, k, v, bias, mesh=mesh)  # which agrees
    with Sent() as sent:
        o = triangle_attention(q, k, v, bias, mesh=mesh)
        torch.autograd.grad(o.float().sum(), (q, k, v, bias))
    assert sent.found == [("_allgather_base_", torch.bfloat16), ("_reduce_scatter_base_", torch.float32)], sent.found


def check_aux(mesh: DeviceMesh) -> None:
    """Of four dimensions, a bias that heads share, and a mask of bytes; the lse too."""
    q, k, v, bias = rows(mesh, B=0)
    bias = bias[:, :1]
    mask = (torch.rand(N // mesh.size(), 1, 1, N) < 0.8).byte()
    o, lse, largest = triangle_attention(q, k, v, bias, mask, 0.3, True, mesh=mesh)
    whole = [torch.empty_like(bias) for _ in range(mesh.size())]
    dist.all_gather(whole, bias.detach().contiguous())
    expected = evoformer.triangle_attention(q, k, v, torch.cat(whole, 2), mask, 0.3, True)
    torch.testing.assert_close((o, lse, largest), expected)


def check_transposed(mesh: DeviceMesh) -> None:
    """Of what does not have as many rows as columns, bool too; twice is once back."""
    torch.manual_seed(0)
    for x in (torch.randn(2, 8, 12, 3), torch.randn(1, 4, 8), torch.rand(2, 8, 4) < 0.5):
        mine = shard(x, mesh, dim=1)
        found = transpose_shards(mine, mesh)
        assert found.is_contiguous()
        assert torch.equal(found, shard(x.transpose(1, 2), mesh, dim=1))
        assert torch.equal(transpose_shards(found, mesh), mine)


def check_errors(mesh: DeviceMesh) -> None:
    """An error of one rank is raised on all; ranks that differ are named."""
    q, k, v, bias = rows(mesh)
    first, size = mesh.get_local_rank() == 0, mesh.size()
    whole = torch.cat([bias] * size, 3)

    def wrong(kind: type[Exception], words: str, *arguments: Any, **options: Any) -> None:
        """Of rank 0's arguments; the others' are right."""
        given, more = (arguments, options) if first else ((q, k, v, bias), {})
        words = re.escape(words if first else f"rank 0: {words}")
        raises(kind, words, triangle_attention, *given, mesh=mesh, validate=True, **more)

    wrong(ValueError, f"bias: expected this rank's rows of queries, (1|1, 1|1, 2|1, {N // size}, 8)", q, k, v, whole)
    wrong(ValueError, "bias: expected this rank's rows", q, k, v, bias[0])
    wrong(TypeError, "bias: dtype must be float16", q, k, v, bias.int())
    wrong(ValueError, "mask: shape (1, 3, 1, 1, 8) does not broadcast to", q, k, v, bias, torch.ones(1, 3, 1, 1, 8))
    wrong(ValueError, "q: expected (B, N / ranks, heads, queries, head_dim)", q[0, 0], k, v, bias)
    wrong(ValueError, "k: leading dimensions must equal q's", q, k[:, :1].expand(2, -1, -1, -1, -1), v, bias)
    wrong(TypeError, "v: dtype must equal q's", q, k, v.half(), bias)
    wrong(ValueError, f"q: the 7 queries must be a multiple of the {size} ranks", q[..., :7, :], k, v, bias)
    wrong(TypeError, "return_aux: expected a bool", q, k, v, bias, None, None, 1)
    wrong(ValueError, "q: a rank must have a row", q[:, :0], k[:, :0], v[:, :0], bias)
    taken = DTensor.from_local(q.detach(), mesh, [Shard(1)])
    wrong(NotImplementedError, "q: triangle_attention takes no DTensor", taken, k, v, bias)
    scale = 0.5 if first else 0.25
    words = "scale: must be alike on all ranks, got 0.5 on rank 0 and 0.25 on rank 1"
    raises(ValueError, words, triangle_attention, q, k, v, bias, None, scale, mesh=mesh, validate=True)
    raises(ValueError, "columns must be a multiple of", transpose_shards, torch.zeros(1, 2, 7), mesh)
    raises(ValueError, r"tensor: expected \(B, rows, columns, \.\.\.\)", transpose_shards, torch.zeros(2, 8), mesh)
    raises(
        ValueError, "tensor: must be on the mesh's device", transpose_shards, torch.zeros(1, 2, 8, device="meta"), mesh
    )


CHECKS: dict[str, tuple] = {
    "triangle: both nodes": (check_nodes, 1, True), "triangle: both nodes of a batch": (check_nodes, 2, False),
    "triangle: collectives": (check_collectives,), "triangle: lse": (check_aux,),
    "triangle: transposed": (check_transposed,), "triangle: errors": (check_errors,),
}  # fmt: skip
