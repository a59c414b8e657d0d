"""Parameters of position biases as modules, whose call returns a term for ``bias=``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tilewise.bias import Alibi, T5Bias, alibi, alibi_slopes, t5_bias


class T5RelativeBias(nn.Module):
    """T5's relative position bias; ``weight`` (num_buckets, num_heads) has the layout of T5's checkpoints.

    Args:
        num_heads: query heads.
        bidirectional: True for encoders: half of the buckets are for keys after the query.
        num_buckets: rows of the table; even if bidirectional.
        max_distance: larger distances are all in the last bucket.
        device, dtype: of the table, which is normal with a standard deviation of 0.02.

    Returns:
        of a call, the term `tilewise.bias.t5_bias` of the table; keyword arguments go there, such as ``query_start``.

    Example:
        >>> position = T5RelativeBias(8, bidirectional=True)
        >>> o = tilewise.attention(q, k, v, bias=position())

    Source: arXiv 1910.10683, section 2.1.
    """

    def __init__(
        self, num_heads: int, bidirectional: bool, num_buckets: int = 32, max_distance: int = 128,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.bidirectional, self.max_distance = bidirectional, max_distance
        self.weight = nn.Parameter(torch.empty(num_buckets, num_heads, device=device, dtype=dtype).normal_(std=0.02))
        self()  # raises the errors of the numbers

    def forward(self, **positions: Any) -> T5Bias:
        return t5_bias(self.weight, self.bidirectional, self.max_distance, **positions)


class AlibiSlopes(nn.Module):
    """ALiBi's slopes, one for each head, from `tilewise.bias.alibi_slopes`.

    Args:
        num_heads: query heads.
        trained: True makes ``slopes`` a parameter, False a buffer.
        device: of the slopes, which are float32.

    Returns:
        of a call, the term `tilewise.bias.alibi` of the slopes; keyword arguments go there.

    Example:
        >>> position = AlibiSlopes(8)
        >>> o = tilewise.attention(q, k, v, bias=position(), causal=True)

    Source: arXiv 2108.12409.
    """

    slopes: Tensor

    def __init__(self, num_heads: int, trained: bool = False, device: torch.device | str | None = None) -> None:
        super().__init__()
        slopes = alibi_slopes(num_heads).to(device)
        if trained:
            self.slopes = nn.Parameter(slopes)
        else:
            self.register_buffer("slopes", slopes)

    def forward(self, **positions: Any) -> Alibi:
        return alibi(self.slopes, **positions)
