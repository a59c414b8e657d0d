"""Modules: attention layers whose scores take a trainable bias, and the parameters of such biases.

MultiheadAttention   torch.nn.MultiheadAttention with ``attn_bias=``; equal parameters and state dict
Attention            grouped heads, as in Llama; a function of yours rotates queries and keys
T5RelativeBias       T5's table of relative position buckets
AlibiSlopes          ALiBi's slopes, trained or not
"""

from __future__ import annotations

from tilewise.nn.biases import AlibiSlopes, T5RelativeBias
from tilewise.nn.grouped import Attention
from tilewise.nn.multihead import MultiheadAttention

__all__ = ["AlibiSlopes", "Attention", "MultiheadAttention", "T5RelativeBias"]


def __dir__() -> list[str]:
    return sorted(__all__)
