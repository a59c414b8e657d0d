"""`shard` and `unshard`: this rank's part of a whole tensor, and the whole tensor back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tilewise.distributed.autograd import gather
from tilewise.distributed.documents import packed_ranks, read_offsets
from tilewise.distributed.layout import LoadBalancer, Ranks
from tilewise.spec.tensors import check_tensor


def shard(
    tensor: Tensor, mesh: DeviceMesh, load_balancer: LoadBalancer = None, dim: int | None = None, *,
    cu_seqlens: Tensor | Sequence[int] | None = None,
) -> Tensor:  # fmt: skip
    """Return this rank's part along ``dim`` of a tensor that every rank has whole; nothing is sent.

    Default axes: 2, the sequence of `context_parallel_attention`, or with ``cu_seqlens`` 0, the tokens of
    `context_parallel_varlen_attention`. Ranks are counted as in the mesh's group. Differentiable: the gradient of the
    whole tensor is zero outside of this rank's part.

    Raises:
        ValueError, TypeError: an invalid argument or length; the message names it, its value and what is allowed.
    """
    ranks, dim = _where(tensor, mesh, load_balancer, dim, cu_seqlens, True)
    if cu_seqlens is not None and load_balancer is not None:
        return tensor.index_select(dim, ranks.split.rows(ranks.rank).to(tensor.device)).contiguous()
    count = ranks.size * (ranks.split.pieces if cu_seqlens is None else 1)
    if tensor.shape[dim] % count:
        words = f"{ranks.size} ranks" + (" with a head and a tail each" if ranks.split.pieces == 2 else "")
        raise ValueError(
            f"tensor: length along dim {dim} must be a multiple of {count} for {words}, got shape {tuple(tensor.shape)}"
        )
    return ranks.split.shards_of(tensor, dim)[ranks.rank].contiguous()


def unshard(
    tensor: Tensor, mesh: DeviceMesh, load_balancer: LoadBalancer = None, dim: int | None = None, *,
    cu_seqlens: Tensor | Sequence[int] | None = None,
) -> Tensor:  # fmt: skip
    """Return the whole tensor on every rank: the inverse of `shard`.

    A collective: every rank calls it, with shards of equal shape. Differentiable: each rank gets the sum of all ranks'
    gradients of its shard, as is right if the loss is the sum of the ranks' losses. A loss that every rank computes
    equally counts once for each rank.

    Raises:
        ValueError, TypeError: an invalid argument; the message names it, its value and what is allowed.
    """
    ranks, dim = _where(tensor, mesh, load_balancer, dim, cu_seqlens, False)
    if cu_seqlens is None and tensor.shape[dim] % ranks.split.pieces:
        raise ValueError(f"tensor: a shard of a head and a tail has an even length, got shape {tuple(tensor.shape)}")
    for one in reversed(ranks.axes or (ranks,)):
        tensor = gather(tensor, one, dim)
    return tensor


def _where(
    tensor: Tensor, mesh: DeviceMesh, load_balancer: LoadBalancer, dim: int | None, cu_seqlens: Any, is_whole: bool
) -> tuple[Ranks, int]:
    """Return the ranks and the axis."""
    if cu_seqlens is None:
        return Ranks.of(mesh, load_balancer, 2), _axis(tensor, 2 if dim is None else dim)
    offsets = read_offsets("cu_seqlens", cu_seqlens)
    ranks, dim = packed_ranks(mesh, load_balancer, offsets), _axis(tensor, 0 if dim is None else dim)
    parts = 1 if is_whole else ranks.size
    if tensor.shape[dim] * parts != offsets[-1]:
        raise ValueError(
            f"tensor: expected {offsets[-1] // parts} of the {offsets[-1]} tokens of cu_seqlens along dim {dim}, got "
            f"shape {tuple(tensor.shape)}"
        )
    return ranks, dim


def _axis(tensor: Tensor, dim: int) -> int:
    check_tensor("tensor", tensor)
    if not -tensor.dim() <= dim < tensor.dim():
        raise ValueError(f"dim: must be an axis of the tensor's shape {tuple(tensor.shape)}, got {dim}")
    return dim % tensor.dim()
