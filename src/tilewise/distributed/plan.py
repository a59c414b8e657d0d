"""Choice of the method, by the bytes that each method sends and the share that computation hides."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from tilewise.bias.terms import wide
from tilewise.distributed.head_groups import groups_of
from tilewise.distributed.layout import ring_steps
from tilewise.distributed.operands import ShardedCall

# FLOPs per byte from which a ring step takes longer than its transfer: 5e14 FLOP/s over 2e11 B/s, about those of a
# Hopper GPU and its NVLink. A figure for choosing, not a measurement of this machine.
HIDDEN_FROM = 2500.0


@dataclass(frozen=True)
class Cost:
    """The cost of one method on each rank."""

    method: str
    forward_bytes: int  # sent
    backward_bytes: int  # sent
    held_bytes: int  # beside the shards, during the computation
    hidden: bool = False  # all transfers but last_bytes take less time than the products beside them, by `HIDDEN_FROM`
    declines: str | None = None  # why the method cannot run the call; None if it can
    groups: int = 1  # of heads; nothing hides transfers of the first in the forward and of the last in the backward
    last_bytes: int = 0  # sent after the last products

    @property
    def exposed_bytes(self) -> int:
        """Return the bytes that no products hide."""
        return self.last_bytes if self.hidden else (self.forward_bytes + self.backward_bytes) // self.groups

    def __str__(self) -> str:
        if self.declines is not None:
            return f"{self.method}: not supported, {self.declines}"
        words = f"{self.method}: sends {_size(self.forward_bytes)} forward, {_size(self.backward_bytes)} backward"
        if self.hidden:
            words += f" (all but {_size(self.last_bytes)} hidden)" if self.last_bytes else " (hidden)"
        elif self.groups > 1:
            words += f" (in {self.groups} groups of heads: all but {_size(self.exposed_bytes)} hidden)"
        return f"{words}, holds {_size(self.held_bytes)} more"


@dataclass(frozen=True)
class ContextParallelPlan:
    """The plan of a call; str() prints it in lines."""

    method: str  # the chosen one
    reason: str
    flops: tuple[int, ...]  # forward, of each rank, for all_gather and ring; with all_to_all each rank has the mean
    costs: tuple[Cost, ...]  # of every method

    def __str__(self) -> str:
        mean = sum(self.flops) / len(self.flops)
        balance = f"busiest rank {max(self.flops):.3g} FLOPs forward, mean {mean:.3g}"
        return "\n".join([f"{self.method}: {self.reason}", balance, *(str(cost) for cost in self.costs)])


def make_plan(call: ShardedCall, tensors: Sequence[Tensor], method: str) -> ContextParallelPlan:
    """Return the plan of a call; raise a ValueError if ``method`` cannot run it."""
    costs = tuple(_cost(method, call, tensors) for method in _COSTS)
    q, _, v = tensors[:3]
    flops = tuple(2 * (q.shape[3] + v.shape[3]) * call.pairs(rank) for rank in range(call.ranks.size))
    if method != "auto":
        asked = next(cost for cost in costs if cost.method == method)
        if asked.declines is not None:
            raise ValueError(f"method: {method!r} cannot run this call: {asked.declines}")
        return ContextParallelPlan(method, "asked for", flops, costs)
    least = min((cost for cost in costs if cost.declines is None), key=_order)
    reason = "its transfers hide behind products" if least.hidden else "sends the fewest bytes that nothing hides"
    return ContextParallelPlan(least.method, reason, flops, costs)


def _cost(method: str, call: ShardedCall, tensors: Sequence[Tensor]) -> Cost:
    reason = call.declines(method)
    return _COSTS[method](call, tensors) if reason is None else Cost(method, 0, 0, 0, declines=reason)


def _order(cost: Cost) -> tuple[int, int]:
    """Return the sort key: exposed bytes, then fewer calls and no steps that wait for each other."""
    return cost.exposed_bytes, ("all_gather", "all_to_all", "ring").index(cost.method)


def _all_gather(call: ShardedCall, tensors: Sequence[Tensor]) -> Cost:
    """Return the cost in `groups_of` groups. With one, nothing is hidden and one buffer of keys is held. Else two
    groups of keys are held beside the one in use, and of gradients the sent and received buffers of two groups."""
    size, (keys, _) = call.ranks.size, _moving(call, tensors)
    moving = [(tensors[n], call.slots[n]) for n in call.moving]
    # Gradients with heads are sent in their dtype; the others are summed over ranks in float32.
    grads = sum((_bytes if slot.heads is not None else _wide_bytes)(x) for x, slot in moving if x.requires_grad)
    grads = int(call.sent_share * grads)
    groups = groups_of(call, tensors)
    held = size * keys if groups == 1 else size * 3 * keys // groups
    going = size * grads * min(2 * groups, 4) // groups
    others = size - 1
    hides = groups > 1 and _hides(call, tensors, keys)
    return Cost("all_gather", others * keys, others * (keys + grads), held + going, False, None, groups if hides else 1)


def _hides(call: ShardedCall, tensors: Sequence[Tensor], keys: int) -> bool:
    """True if the products of this rank's queries and another's keys take longer than sending ``keys`` bytes."""
    q, v = tensors[0], tensors[2]
    products = 2 * (q.shape[3] + v.shape[3]) * call.hop_pairs
    return products >= HIDDEN_FROM * keys


def _ring(call: ShardedCall, tensors: Sequence[Tensor]) -> Cost:
    hops = ring_steps(call.band, call.ranks.split, call.queries, call.keys) - 1
    keys, grads = _moving(call, tensors)
    hidden = hops == 0 or _hides(call, tensors, keys)
    backward = hops * (keys + grads) + (grads if hops else 0)
    home = grads if hops else 0
    return Cost("ring", hops * keys, backward, keys + 2 * grads if hops else 0, hidden, last_bytes=home)


def _all_to_all(call: ShardedCall, tensors: Sequence[Tensor]) -> Cost:
    size, (q, _, v) = call.ranks.size, tensors[:3]
    o = q.numel() // q.shape[3] * v.shape[3] * q.element_size()
    forward, backward, held = o * (size - 1) // size, o * (size - 1) // size, 0
    for x, slot in zip(tensors, call.slots, strict=True):
        if slot.replicated:
            continue
        if slot.heads is not None:
            sent = _bytes(x) * (size - 1) // size
            forward, backward = forward + sent, backward + (sent if x.requires_grad else 0)
            held += _bytes(x)
        else:
            forward, held = forward + (size - 1) * _bytes(x), held + (size - 1) * _bytes(x)
            backward += (size - 1) * _wide_bytes(x)
    return Cost("all_to_all", forward, backward, held)


_COSTS = {"all_gather": _all_gather, "ring": _ring, "all_to_all": _all_to_all}


def _moving(call: ShardedCall, tensors: Sequence[Tensor]) -> tuple[int, int]:
    """Return the bytes of tensors that move with one rank's keys, and of their gradients."""
    moving = [tensors[n] for n in call.moving]
    share = call.sent_share
    return int(share * sum(_bytes(x) for x in moving)), int(share * sum(_wide_bytes(x) for x in moving))


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def _wide_bytes(x: Tensor) -> int:
    """Return the bytes of the gradient in the dtype in which it is summed over ranks."""
    return x.numel() * wide(x.new_empty(0)).element_size() if x.requires_grad else 0


def _size(count: int) -> str:
    """Return a number of bytes in words, such as 1.5 MiB."""
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} GiB"
