"""Exact attention for PyTorch, tile by tile, with additive biases and masks, and their gradients.

attention                      softmax(scale · q kᵀ + bias) v with masks, and gradients of q, k, v and bias
scaled_dot_product_attention   attention with the signature of PyTorch's function
sdpa                           PyTorch's function in code of others, computed by tilewise
varlen_attention               attention of a packed batch: sequences of any lengths, concatenated
varlen_attn                    varlen_attention with the signature of PyTorch's function
merge_attention                attention over parts of the keys, merged by their LSEs, with gradients
TileMask, dynamic_mask         masks by tiles of the scores; empty tiles are not computed
AuxRequest, AuxOutput          results besides o: LSE, maximum of the scores, entropy
plan                           attention of one layout of tensors, prepared once and run many times
tree_positions                 positions of the tokens of prefix trees, for rotary embeddings and losses
explain, explain_varlen        backend, tiles, FLOPs and bytes of a call, and what limits it
cache_info, clear_caches       use of the caches of prepared calls and compiled kernels, and how to empty them
matmul, softmax                the parts of attention as operators

`tilewise.bias` has biases without a matrix: relative positions, T5, ALiBi, low rank. `tilewise.distributed` has
attention of a sequence that is split over several GPUs. `tilewise.layouts` has shared-memory layouts of tensor-core
operands, `tilewise.integrations.transformers` the integration with Hugging Face, `tilewise.integrations.flash_attn`
functions with the signatures of flash-attn, `tilewise.nn` modules.

Public names are resolved on first use: importing tilewise neither imports Triton nor initializes CUDA.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tilewise.api import attention
    from tilewise.cache import cache_info, clear_caches
    from tilewise.explanation.attention import explain, explain_varlen
    from tilewise.integrations.pytorch import sdpa
    from tilewise.masks.block_sparse import TileMask
    from tilewise.masks.tree import tree_positions
    from tilewise.merge import merge_attention
    from tilewise.ops.gemm.api import matmul
    from tilewise.ops.row_softmax.api import softmax
    from tilewise.plans import plan
    from tilewise.scaled_dot_product import scaled_dot_product_attention
    from tilewise.spec.statistics import AuxOutput, AuxRequest
    from tilewise.topk.selection import dynamic_mask
    from tilewise.varlen import varlen_attention, varlen_attn

__version__ = "0.2.0"

_HOMES = {
    "AuxOutput": "tilewise.spec.statistics",
    "AuxRequest": "tilewise.spec.statistics",
    "TileMask": "tilewise.masks.block_sparse",
    "attention": "tilewise.api",
    "cache_info": "tilewise.cache",
    "clear_caches": "tilewise.cache",
    "dynamic_mask": "tilewise.topk.selection",
    "explain": "tilewise.explanation.attention",
    "explain_varlen": "tilewise.explanation.attention",
    "matmul": "tilewise.ops.gemm.api",
    "merge_attention": "tilewise.merge",
    "plan": "tilewise.plans",
    "scaled_dot_product_attention": "tilewise.scaled_dot_product",
    "sdpa": "tilewise.integrations.pytorch",
    "softmax": "tilewise.ops.row_softmax.api",
    "tree_positions": "tilewise.masks.tree",
    "varlen_attention": "tilewise.varlen",
    "varlen_attn": "tilewise.varlen",
}

_PACKAGES = ("bias", "distributed", "integrations", "layouts", "nn")

__all__ = [
    "AuxOutput",
    "AuxRequest",
    "TileMask",
    "attention",
    "cache_info",
    "clear_caches",
    "dynamic_mask",
    "explain",
    "explain_varlen",
    "matmul",
    "merge_attention",
    "plan",
    "scaled_dot_product_attention",
    "sdpa",
    "softmax",
    "tree_positions",
    "varlen_attention",
    "varlen_attn",
]


def __getattr__(name: str) -> object:
    if name in _PACKAGES:
        return importlib.import_module(f"tilewise.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'tilewise' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    if name not in ("cache_info", "clear_caches", "explain", "explain_varlen", "plan", "sdpa"):
        from tilewise.operator.scripting import refuse

        refuse(value)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, *_PACKAGES])
