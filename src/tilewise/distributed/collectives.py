"""Collectives of one tensor, and the order of a sequence before and after; `autograd` adds derivatives."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from tilewise.bias.terms import wide
from tilewise.distributed.layout import Ranks, shards_of, whole_of

# PyTorch has renamed two of its collectives.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def as_bytes(x: Tensor) -> Tensor:
    """Return bool and 16-bit integer tensors, which not every transport supports, as bytes; others unchanged."""
    return x.view(torch.uint8) if x.dtype in (torch.bool, torch.int16) else x


def gathered(x: Tensor, ranks: Ranks, dim: int) -> Tensor:
    """Return the whole tensor, gathered from the ranks' shards along ``dim``."""
    sent = as_bytes(x.contiguous())
    stacked = sent.new_empty((ranks.size * sent.shape[0], *sent.shape[1:]))
    all_gather(stacked, sent, group=ranks.group)
    return whole_of(stacked.view(x.dtype).unflatten(0, (ranks.size, -1)), dim, ranks.split)


def scattered(x: Tensor, ranks: Ranks, dim: int) -> Tensor:
    """Return this rank's shard of the sum over ranks; 16-bit numbers are summed in float32."""
    sent = shards_of(wide(x), dim, ranks.split).contiguous()
    found = sent.new_empty(sent.shape[1:])
    _reduce_scatter(found, sent.flatten(0, 1), group=ranks.group)
    return found.to(x.dtype)


def all_to_all(stacked: Tensor, ranks: Ranks) -> Tensor:
    """Return what every rank has stacked for this one; ``stacked`` and the result are (ranks, ...)."""
    sent = as_bytes(stacked.contiguous())
    found = torch.empty_like(sent)
    dist.all_to_all_single(found, sent, group=ranks.group)
    return found.view(stacked.dtype)
