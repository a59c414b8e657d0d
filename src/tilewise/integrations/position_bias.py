"""Stand-ins for the position bias of a model of transformers, and the bias that a layer makes of them.

A model makes its position bias where its parameters are, and passes it to its attention, in one layer or through all
layers. `integrations.models` puts one of these in its place, so that the model passes a table, or the two factors of
relative logits, instead of a tensor of queries and keys.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tilewise.bias import T5Bias, relative_logits, t5_bias


class PositionBias:
    """A stand-in for a position bias; `bias` returns an argument of `tilewise.attention`."""

    def bias(self, device: torch.device, aligned: bool) -> Any:
        """Return a tensor, a term or a tuple of them on ``device``. aligned: the layer's last query is at its last
        key."""
        raise NotImplementedError


class NoBias(PositionBias):
    """The bias of T5's cross attention, where the model makes zeros of queries and keys."""

    def bias(self, device: torch.device, aligned: bool) -> Any:
        return ()


class TableBias(PositionBias):
    """T5's table of buckets, which the first layer makes and passes to the others.

    The table is the embedding's output for each of its rows, not its parameter, so that hooks and wrappers of the
    module (weights offloaded, sharded or adapted) have run. Half precision becomes float32 here, so that the gradients
    of all layers are summed in float32."""

    def __init__(
        self,
        embedding: nn.Module,
        device: torch.device,
        buckets: int,
        bidirectional: bool,
        max_distance: int,
        query_start: int | Tensor | None,
    ) -> None:
        table = embedding(torch.arange(buckets, device=device))
        table = table if table.dtype == torch.float64 else table.float()
        self.term: T5Bias = t5_bias(table, bidirectional, max_distance, query_start=query_start)
        self._trained = any(p.requires_grad for p in embedding.parameters())

    def bias(self, device: torch.device, aligned: bool) -> T5Bias:
        table = self.term.table
        if self._trained and torch.is_grad_enabled() and not table.requires_grad:
            raise ValueError(
                "position_bias: it was made without gradients and is used with them, as checkpoints with "
                "use_reentrant=True do, where the table of a layer's bias would get no gradient from other layers; "
                'use the default, {"use_reentrant": False}'
            )
        start = self.term.query_start
        if table.device == device and not (isinstance(start, Tensor) and start.device != device):
            return self.term
        # In a model spread over devices it moves with the tensors that layers pass on.
        start = start.to(device) if isinstance(start, Tensor) else start
        return t5_bias(table.to(device), self.term.bidirectional, self.term.max_distance, query_start=start)


class RelativeLogits(PositionBias):
    """Inkling's bias ``states @ proj``: a value of each query for each distance back to a key, and 0 beyond.

    Inkling scales its bias by a factor of each query, in float32: ``(position_bias.float() * tau).to(dtype)``. So this
    class has `float` and `to`, and `__mul__` scales the states, which are smaller than the product. torch.compile calls
    `__torch_function__` for that multiplication.

    Args:
        states: (B, H, M, C), proj: (C, R), of one dtype.
        query_positions: (M,), key_positions: (N,), consecutive integers.
    """

    def __init__(self, states: Tensor, proj: Tensor, query_positions: Tensor, key_positions: Tensor) -> None:
        self.states, self.proj = states, proj
        self.query_positions, self.key_positions = query_positions, key_positions

    @property
    def dtype(self) -> torch.dtype:
        return self.states.dtype

    def float(self) -> RelativeLogits:
        return self

    def to(self, dtype: torch.dtype) -> RelativeLogits:
        if dtype != self.dtype:
            raise TypeError(f"position_bias: relative logits are {self.dtype}, as their states are, got {dtype}")
        return self

    def __mul__(self, factor: Tensor) -> RelativeLogits:
        """Multiply by a factor of each query, (B|1, H|1, M|1, 1)."""
        if factor.dim() != 4 or factor.shape[3] != 1:
            raise ValueError(f"position_bias: takes a factor (B|1, H|1, M|1, 1), got shape {tuple(factor.shape)}")
        states = (self.states.float() * factor).to(self.dtype)
        return RelativeLogits(states, self.proj, self.query_positions, self.key_positions)

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        if function not in (Tensor.mul, Tensor.__mul__, Tensor.__rmul__):
            return NotImplemented
        logits, factor = args if isinstance(args[0], cls) else args[::-1]
        return logits.__mul__(factor)

    def bias(self, device: torch.device, aligned: bool) -> Any:
        if aligned:
            return relative_logits(self.states, self.proj, lo=0, reverse=True)
        # With a static cache positions are tensors, which are not read back.
        query_start, key_start = self.query_positions[:1], self.key_positions[:1]
        return relative_logits(
            self.states, self.proj, lo=0, reverse=True, query_start=query_start, key_start=key_start
        )  # fmt: skip
