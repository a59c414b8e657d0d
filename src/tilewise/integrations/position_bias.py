"""What goes through a model of transformers in the place of a position bias, and what becomes of it in a layer.

A model makes its position bias where its parameters are, and hands it on: to its attention in the same layer, or
through all layers. `integrations.models` puts one of these in its place, so that what travels is a table or the two
factors of relative logits, and no tensor of queries and keys.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tilewise.bias import T5Bias, relative_logits, t5_bias


class PositionBias:
    """In the place of a position bias: `bias` is what `tilewise.attention` takes."""

    def bias(self, device: torch.device, aligned: bool) -> Any:
        """A tensor, a term or a tuple of them on ``device``. aligned: the layer's last query stands at its last key."""
        raise NotImplementedError


class NoBias(PositionBias):
    """Of cross attention in T5, where the model makes zeros of queries and keys."""

    def bias(self, device: torch.device, aligned: bool) -> Any:
        return ()


class TableBias(PositionBias):
    """T5's table of buckets. The first layer makes it, and it goes through the others.

    The table is what the embedding returns for each of its rows, not its parameter: what hooks and wrappers do around
    the module (weights offloaded, sharded, or adapted) has been done then. From half precision it goes to float32
    here, so that the gradients of all layers are added up in it.
    """

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
        # A model spread over devices: tensors that go from layer to layer are moved, and so is this.
        start = start.to(device) if isinstance(start, Tensor) else start
        return t5_bias(table.to(device), self.term.bidirectional, self.term.max_distance, query_start=start)


class RelativeLogits(PositionBias):
    """Inkling's: ``states @ proj`` has a value of each query for each distance back to a key; beyond, it is 0.

    Inkling scales its bias by a factor of each query, in float32: ``(position_bias.float() * tau).to(dtype)``. So
    `float` and `to` are here, and `__mul__` scales the states, which are smaller than the product. torch.compile asks
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
        """By a factor of each query, (B|1, H|1, M|1, 1)."""
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
        # Those of a static cache count in tensors, which are not read back.
        query_start, key_start = self.query_positions[:1], self.key_positions[:1]
        return relative_logits(
            self.states, self.proj, lo=0, reverse=True, query_start=query_start, key_start=key_start
        )  # fmt: skip
