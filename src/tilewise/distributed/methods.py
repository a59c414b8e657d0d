"""The three methods of context parallelism: all_gather, ring and all_to_all."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from tilewise.backends import Outputs
from tilewise.distributed import ring
from tilewise.distributed.autograd import by_parts, gather, summed, to_heads, to_rows
from tilewise.distributed.head_groups import Gathered, groups_of
from tilewise.distributed.layout import Chunk
from tilewise.distributed.operands import ShardedCall, Slot

Method = Callable[[ShardedCall, Sequence[Tensor], bool], Outputs]


def attend(method: str, call: ShardedCall, tensors: Sequence[Tensor], return_lse: bool) -> tuple[Tensor, Tensor]:
    """Return differentiable ``(o, lse)`` of this rank's rows; without ``return_lse`` lse is undefined."""
    o, lse, _ = outputs_of(method, call, tensors, return_lse)
    assert lse is not None
    return o, lse


def outputs_of(method: str, call: ShardedCall, tensors: Sequence[Tensor], return_lse: bool) -> Outputs:
    """Return the outputs of this rank's rows; without autograd including the low bits of o."""
    if call.drawn and call.seed is not None:  # one seed for all ranks; counters differ by rank
        dist.broadcast(call.seed, dist.get_global_rank(call.ranks.group, 0), group=call.ranks.group)
    pairs = zip(tensors, call.slots, strict=True)
    tensors = [summed(x, call.ranks) if slot.replicated and x.requires_grad else x for x, slot in pairs]
    return METHODS[method](call, tensors, return_lse)


def _all_gather(call: ShardedCall, tensors: Sequence[Tensor], return_lse: bool) -> Outputs:
    """Gather all keys, some heads at a time, and make a local call for each chunk of queries."""
    return by_parts(call, tensors, Gathered(groups_of(call, tensors)))


def _all_to_all(call: ShardedCall, tensors: Sequence[Tensor], return_lse: bool) -> Outputs:
    """Trade rows for heads, and make one local call with all rows of this rank's heads."""
    queries, keys = Chunk(0, 0, call.sizes.M), Chunk(0, 0, call.sizes.N)
    local = [of_heads(call, x, slot) for x, slot in zip(tensors, call.slots, strict=True)]
    first = call.ranks.rank * (call.sizes.H // call.ranks.size)
    low: Tensor | None = None
    if torch.is_grad_enabled():  # the local call keeps what its backward needs
        o, lse = call.attend(local, queries, keys, first_head=first, return_lse=return_lse)
    else:
        o, found, low = call.outputs(local, queries, keys, first_head=first)
        assert found is not None
        lse = found
    return Outputs(
        to_rows(o, call.ranks, 1, 2), to_rows(lse, call.ranks, 1, 2) if return_lse else lse,
        None if low is None else to_rows(low, call.ranks, 1, 2),
    )  # fmt: skip


def of_heads(call: ShardedCall, x: Tensor, slot: Slot) -> Tensor:
    ranks, split = call.ranks, slot.rows if slot.rows is not None else slot.keys
    if slot.heads is None:
        return x if split is None else gather(x, ranks, split)
    if split is not None:
        return to_heads(x, ranks, slot.heads, split)
    count = x.shape[slot.heads] // ranks.size
    return x.narrow(slot.heads, ranks.rank * count, count)


def _ring(call: ShardedCall, tensors: Sequence[Tensor], return_lse: bool) -> Outputs:
    return by_parts(call, tensors, ring)


METHODS: dict[str, Method] = {"all_gather": _all_gather, "ring": _ring, "all_to_all": _all_to_all}
