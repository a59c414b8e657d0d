"""Methods and their costs: the bytes that each sends, and the share that computation hides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from tilewise.backends import Outputs
from tilewise.bias.terms import wide
from tilewise.distributed.layout import Flags, Grads, Tensors
from tilewise.distributed.operands import ContextParallelCall

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


class Saved(NamedTuple):
    """The tensors and outputs that a backward needs, with the rows and heads that the method computes with."""

    tensors: Tensors
    outputs: Outputs


class Method(Protocol):
    """A way in which queries meet the keys of other ranks. ``tensors`` are in the order of ``call.slots``."""

    def forward(self, call: ContextParallelCall, tensors: Tensors, asked: Flags) -> tuple[Outputs, Saved]:
        """Return the outputs of this rank's rows and what `backward` needs. Only outputs asked for are sent."""

    def backward(self, call: ContextParallelCall, saved: Saved, cotangents: Outputs, needs: Flags) -> Grads:
        """Return this rank's gradients of the tensors; ``cotangents`` are those of its rows."""

    def saved(self, call: ContextParallelCall, tensors: Tensors, outputs: Outputs) -> Saved:
        """Return what `forward` saves, from the outputs of this rank's rows."""
        return Saved(tensors, outputs)

    def cost(self, call: ContextParallelCall, tensors: Tensors) -> Cost:
        """Return the bytes sent and held, or why the method cannot run the call."""


def hides(call: ContextParallelCall, tensors: Tensors, keys: int) -> bool:
    """True if the products of this rank's queries and another's keys take longer than sending ``keys`` bytes."""
    (q, _, v), (B, H, *_), ranks = tensors[:3], call.sizes, call.ranks
    dense = B * H * call.queries * call.keys
    pairs = dense if call.documents is None else call.pairs(ranks.rank) // ranks.size
    return 2 * (q.shape[3] + v.shape[3]) * pairs >= HIDDEN_FROM * keys


def moving_bytes(call: ContextParallelCall, tensors: Tensors) -> tuple[int, int]:
    """Return the bytes of tensors that move with one rank's keys, and of their gradients."""
    moving = [tensors[n] for n in call.moving]
    share = call.ranks.split.sent_share
    return int(share * sum(bytes_of(x) for x in moving)), int(share * sum(wide_bytes(x) for x in moving))


def bytes_of(x: Tensor) -> int:
    return x.numel() * x.element_size()


def wide_bytes(x: Tensor) -> int:
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
