"""Bias terms computed from positions, from two vectors or from a small table, without a matrix.

RelativeBias       relative position values per query, per key or for all: Shaw, Transformer-XL, DeBERTa, Inkling
t5_bias            T5's table of relative position buckets
alibi              ALiBi's slopes, trainable or not
low_rank_bias      u @ w.mT, as additional columns of q and k
RaggedBias         a matrix for each sequence of a packed batch
swin_bias          Swin's table of offsets in a window; a matrix
relative_logits    a product that stores the values of a RelativeBias where TMA can read them

t5_buckets, log_buckets, alibi_slopes    buckets of T5 and DeBERTa-v2, ALiBi's slopes

Terms are frozen dataclasses and pytree nodes with their tensors as leaves.
"""

from __future__ import annotations

from tilewise.bias.buckets import alibi_slopes, log_buckets, t5_buckets
from tilewise.bias.low_rank import LowRankBias, low_rank_bias
from tilewise.bias.packed import RaggedBias
from tilewise.bias.relative import RelativeBias, relative_logits
from tilewise.bias.swin import swin_bias
from tilewise.bias.toeplitz import Alibi, T5Bias, alibi, t5_bias

__all__ = [
    "Alibi",
    "LowRankBias",
    "RaggedBias",
    "RelativeBias",
    "T5Bias",
    "alibi",
    "alibi_slopes",
    "log_buckets",
    "low_rank_bias",
    "relative_logits",
    "swin_bias",
    "t5_bias",
    "t5_buckets",
]


def __dir__() -> list[str]:
    return sorted(__all__)
