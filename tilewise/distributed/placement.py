"""`shard` and `unshard`: a whole tensor's part of this rank, and back."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tilewise.distributed.autograd import gather
from tilewise.distributed.layout import LoadBalancer, Ranks, shards_of
from tilewise.tensors import check_tensor


def shard(tensor: Tensor, mesh: DeviceMesh, load_balancer: LoadBalancer = None, dim: int = 2) -> Tensor:
    """This rank's part of a tensor that every rank has whole, along ``dim``: what `context_parallel_attention` takes.

    Ranks are counted as in the mesh's group. Nothing is sent. Differentiable: the gradient of the whole tensor is zero
    outside of this rank's part.

    Raises:
        ValueError, TypeError: naming the argument, what came and what is allowed: a length that does not divide.
    """
    ranks = Ranks.of(mesh, load_balancer)
    dim = _axis(tensor, dim)
    count = ranks.size * ranks.split.pieces
    if tensor.shape[dim] % count:
        words = f"{ranks.size} ranks" + (" with a head and a tail each" if ranks.split.pieces == 2 else "")
        raise ValueError(
            f"tensor: length along dim {dim} must be a multiple of {count} for {words}, got shape {tuple(tensor.shape)}"
        )
    return shards_of(tensor, dim, ranks.split)[ranks.rank].contiguous()


def unshard(tensor: Tensor, mesh: DeviceMesh, load_balancer: LoadBalancer = None, dim: int = 2) -> Tensor:
    """`shard` backwards: the whole tensor on every rank. A collective: every rank calls it, with shards of one shape.

    Differentiable: each rank gets the sum of all ranks' gradients of its shard, as is right where the loss is the sum
    of what the ranks make of it. A loss that every rank computes alike counts as often as there are ranks.

    Raises:
        ValueError, TypeError: naming the argument, what came and what is allowed.
    """
    ranks = Ranks.of(mesh, load_balancer)
    dim = _axis(tensor, dim)
    if tensor.shape[dim] % ranks.split.pieces:
        raise ValueError(f"tensor: a shard of a head and a tail has an even length, got shape {tuple(tensor.shape)}")
    return gather(tensor, ranks, dim)


def _axis(tensor: Tensor, dim: int) -> int:
    check_tensor("tensor", tensor)
    if not -tensor.dim() <= dim < tensor.dim():
        raise ValueError(f"dim: must be an axis of the tensor's shape {tuple(tensor.shape)}, got {dim}")
    return dim % tensor.dim()
