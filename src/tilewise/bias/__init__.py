"""Biases without a matrix: terms that say how a bias follows from positions, from two vectors, or from a small table.

RelativeBias       values per query, per key or for all, by distance: Shaw, Transformer-XL, DeBERTa, Inkling
t5_bias            T5's table of distance buckets
alibi              ALiBi's slopes, trainable or not
low_rank_bias      u @ w.mT, as a few more columns of q and k
RaggedBias         of a packed batch, a matrix for each sequence
swin_bias          Swin's table of offsets in a window; a matrix
relative_logits    a product that makes the values of a RelativeBias where TMA can read them

t5_buckets, log_buckets, alibi_slopes    T5's and DeBERTa-v2's maps from distance to bucket, ALiBi's slopes

Terms are small frozen values and pytree nodes: what walks over tensors finds theirs.
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
