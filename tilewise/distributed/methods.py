"""The three ways to bring queries and keys of different ranks together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tilewise.distributed.autograd import gather, ring_attention, summed, to_heads, to_rows
from tilewise.distributed.layout import Chunk
from tilewise.distributed.operands import ShardedCall, Slot

Method = Callable[[ShardedCall, Sequence[Tensor], bool], tuple[Tensor, Tensor]]


def attend(method: str, call: ShardedCall, tensors: Sequence[Tensor], return_lse: bool) -> tuple[Tensor, Tensor]:
    """``(o, lse)`` of this rank's rows, differentiable; without ``return_lse`` nobody looks at the lse."""
    pairs = zip(tensors, call.slots, strict=True)
    tensors = [summed(x, call.ranks) if slot.replicated and x.requires_grad else x for x, slot in pairs]
    return METHODS[method](call, tensors, return_lse)


def _all_gather(call: ShardedCall, tensors: Sequence[Tensor], return_lse: bool) -> tuple[Tensor, Tensor]:
    """All keys here; a local call for each chunk of queries."""
    pairs = zip(tensors, call.slots, strict=True)
    whole = [x if slot.keys is None else gather(x, call.ranks, slot.keys) for x, slot in pairs]
    keys = Chunk(0, 0, call.sizes.N)
    found = [
        call.attend(call.cut(whole, rows, keys), rows, keys, return_lse=return_lse)
        for rows in call.ranks.chunks(call.queries)
    ]
    if len(found) == 1:
        return found[0]
    return torch.cat([o for o, _ in found], 2), torch.cat([lse for _, lse in found], -1)


def _all_to_all(call: ShardedCall, tensors: Sequence[Tensor], return_lse: bool) -> tuple[Tensor, Tensor]:
    """All rows here, of this rank's heads."""
    queries, keys = Chunk(0, 0, call.sizes.M), Chunk(0, 0, call.sizes.N)
    local = [_of_heads(call, x, slot) for x, slot in zip(tensors, call.slots, strict=True)]
    o, lse = call.attend(local, queries, keys, return_lse=return_lse)
    return to_rows(o, call.ranks, 1, 2), to_rows(lse, call.ranks, 1, 2) if return_lse else lse


def _of_heads(call: ShardedCall, x: Tensor, slot: Slot) -> Tensor:
    ranks, split = call.ranks, slot.rows if slot.rows is not None else slot.keys
    if slot.heads is None:
        return x if split is None else gather(x, ranks, split)
    if split is not None:
        return to_heads(x, ranks, slot.heads, split)
    count = x.shape[slot.heads] // ranks.size
    return x.narrow(slot.heads, ranks.rank * count, count)


def _ring(call: ShardedCall, tensors: Sequence[Tensor], return_lse: bool) -> tuple[Tensor, Tensor]:
    return ring_attention(call, tensors)


METHODS: dict[str, Method] = {"all_gather": _all_gather, "ring": _ring, "all_to_all": _all_to_all}
