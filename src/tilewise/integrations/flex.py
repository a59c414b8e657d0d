"""FlexAttention's `flex_attention`, computed by tilewise: the score_mod is traced and its terms are arguments.

See `tilewise.integrations.score_mod` for what is recognised.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from tilewise.api import attention
from tilewise.integrations.score_mod.score import traced
from tilewise.integrations.score_mod.terms import bias_terms
from tilewise.integrations.score_mod.values import ScoreShape
from tilewise.integrations.score_mod.visible import hidden_by
from tilewise.masks.block_sparse import TileMask, is_block_mask
from tilewise.spec.checks import check_flag
from tilewise.spec.tensors import check_tensor

ScoreMod = Callable[[Any, Any, Any, Any, Any], Any]


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Mapping[str, Any] | None = None,
    *,
    return_aux: Any = None,
) -> Any:
    """Return FlexAttention's result by `tilewise.attention`, with the arguments of PyTorch's function.

    ``score_mod(score, b, h, q_idx, kv_idx)`` is traced at each call, with symbols; it is never computed for all pairs.
    What it does must be, in this order:

    - the score times positive numbers, then ``cap * tanh(score / cap)``;
    - plus any number of addends that depend on b and h, and on q_idx, on kv_idx or on ``kv_idx - q_idx``, by any
      functions of single numbers and indices of captured tensors: ALiBi, tables by distance or bucket, biases of keys;
    - plus captured tensors ``bias[b, h, q_idx, kv_idx]``, or with some of these indices, and values by distance
      ``values[b, h, q_idx, kv_idx - q_idx + offset]``. Times a number, or subtracted, they are copied;
    - ``torch.where(visible, score, -float("inf"))``, where ``visible`` is a range of ``kv_idx - q_idx``, a condition of
      keys or of queries, a bool tensor ``mask[b, h, q_idx, kv_idx]``, or another condition, such as equal documents,
      which is computed for all pairs once, by rows of tiles, while score_mod and the tensors that it reads exist.

    Captured tensors get gradients. Those of 16 bits are read in float32.

    Args:
        query: (B, H, M, D) in float16, bfloat16, float32 or, on the CPU, float64.
        key: (B, Hkv, N, D) in query's dtype.
        value: (B, Hkv, N, Dv) in query's dtype.
        score_mod: see above.
        block_mask: a BlockMask with any BLOCK_SIZE, or a `tilewise.TileMask`.
        scale: positive. Default: ``1 / sqrt(D)``.
        enable_gqa: allows Hkv to be a divisor of H.
        return_lse: if True, also return the log-sum-exp (B, H, M), float32 (float64 for float64).
        kernel_options: tunes FlexAttention's kernels; not read.
        return_aux: an AuxRequest, of the lse and of max_scores, the largest score that each query sees.

    Returns:
        o (B, H, M, Dv); with ``return_lse`` ``(o, lse)``; with ``return_aux`` ``(o, AuxOutput)``.

    Raises:
        NotImplementedError: naming the operation of score_mod that no argument computes, and what to write instead; a
            condition of queries and keys beside ``block_mask``. Under torch.compile the compiler's error quotes it.
        ValueError, TypeError: naming the argument, what was passed and what is allowed.

    Examples:
        >>> table = torch.randn(8, 33, requires_grad=True)
        >>> def score_mod(score, b, h, q_idx, kv_idx):
        ...     return score + table[h, (kv_idx - q_idx).clamp(-16, 16) + 16]
        >>> flex_attention(q, k, v, score_mod=score_mod).sum().backward()  # table.grad

    Source: arXiv 2412.05496.
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, x)
        if x.dim() != 4:
            raise ValueError(f"{name}: expected (batch, heads, length, head_dim), got shape {tuple(x.shape)}")
    check_flag("enable_gqa", enable_gqa)
    check_flag("return_lse", return_lse)
    if kernel_options is not None and not isinstance(kernel_options, Mapping):
        raise TypeError(f"kernel_options: expected a dict or None, got {type(kernel_options).__name__}")
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise ValueError(
            f"key: expected the {query.shape[1]} heads of query, got {key.shape[1]}; pass enable_gqa=True for fewer"
        )
    if block_mask is not None and not isinstance(block_mask, TileMask) and not is_block_mask(block_mask):
        raise TypeError(f"block_mask: expected a BlockMask, a TileMask or None, got {type(block_mask).__name__}")
    options: dict[str, Any] = {"mask": block_mask, "scale": scale}
    if score_mod is not None and query.shape[2] > 0 and key.shape[2] > 0:
        options |= _arguments(score_mod, query, key, block_mask, scale)
    found = attention(query, key, value, **options, return_lse=return_lse, return_aux=return_aux)
    if return_aux is None:
        return found
    from torch.nn.attention.flex_attention import AuxOutput

    o, aux = found
    return o, AuxOutput(lse=aux.lse, max_scores=aux.max_scores)


def _arguments(score_mod: ScoreMod, query: Tensor, key: Tensor, block_mask: Any, scale: float | None) -> dict[str, Any]:
    """Return the arguments of `tilewise.attention` that compute ``score_mod``."""
    B, H, M, D = query.shape
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    shape = ScoreShape(B, H, key.shape[1], M, key.shape[2], query.device, dtype)
    score = traced(score_mod, query.device, dtype)
    hidden = hidden_by(score_mod, score.visible, shape, block_mask)
    bias = (*bias_terms(score, shape), *hidden.biases)
    found = {"bias": bias or None, "mask": hidden.mask, "window": hidden.window, "softcap": score.cap}
    factor = score.factor[0] / score.factor[1] * (1.0 if score.cap is None else score.cap)
    if factor != 1:
        found["scale"] = factor * (D**-0.5 if scale is None else scale)
    return found
