"""A self-attention layer with grouped heads and a rotation of the caller's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tilewise.api import attention

Rotation = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class Attention(nn.Module):
    """Self-attention with four projections, named as in Llama: q_proj, k_proj, v_proj, o_proj.

    Args:
        embed_dim: features of a token.
        num_heads: query heads.
        num_kv_heads: key/value heads, which divides num_heads; default num_heads.
        head_dim: default embed_dim // num_heads.
        bias: True for a bias in the projections.
        device, dtype: of the parameters.

    Shapes:
        x (B, N, embed_dim) -> (B, N, embed_dim)

    ``forward(x, rotate=None, **options)``: ``rotate(q, k)`` returns both (B, H, N, head_dim) and (B, Hkv, N, head_dim)
    with their rotary embedding. options are those of `tilewise.attention`: bias, mask, causal, window, dropout_p, …

    Example:
        >>> layer = Attention(512, 8, num_kv_heads=2)
        >>> y = layer(x, lambda q, k: (rotary(q), rotary(k)), bias=position(), causal=True)
    """

    def __init__(
        self, embed_dim: int, num_heads: int, num_kv_heads: int | None = None, head_dim: int | None = None,
        bias: bool = False, device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        if num_heads < 1 or num_kv_heads < 1 or num_heads % num_kv_heads:
            raise ValueError(f"num_kv_heads: must divide the {num_heads} query heads, got {num_kv_heads}")
        if head_dim is None and embed_dim % num_heads:
            raise ValueError(f"num_heads: must divide embed_dim={embed_dim} if there is no head_dim, got {num_heads}")
        self.head_dim = embed_dim // num_heads if head_dim is None else head_dim
        more: dict[str, Any] = {"bias": bias, "device": device, "dtype": dtype}
        self.q_proj = nn.Linear(embed_dim, num_heads * self.head_dim, **more)
        self.k_proj = nn.Linear(embed_dim, num_kv_heads * self.head_dim, **more)
        self.v_proj = nn.Linear(embed_dim, num_kv_heads * self.head_dim, **more)
        self.o_proj = nn.Linear(num_heads * self.head_dim, embed_dim, **more)

    def forward(self, x: Tensor, rotate: Rotation | None = None, **options: Any) -> Tensor:
        if options.get("return_lse"):
            raise ValueError("return_lse: the layer returns its output alone; call tilewise.attention")
        q, k, v = (
            project(x).unflatten(-1, (-1, self.head_dim)).transpose(-3, -2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        if rotate is not None:
            q, k = rotate(q, k)
        o: Tensor = attention(q, k, v, **options)
        y: Tensor = self.o_proj(o.transpose(-3, -2).flatten(-2))
        return y
