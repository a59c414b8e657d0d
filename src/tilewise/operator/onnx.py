"""The operators in PyTorch's own operators, for ONNX.

Unlike tilewise, they store the scores, and NaN or infinity in a masked value reaches the output.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.spec.bias_components import Parts
from tilewise.spec.block_mask import TileTensors
from tilewise.spec.reference import transform
from tilewise.spec.relative import gather
from tilewise.spec.score import Score
from tilewise.spec.seqlens import Lengths

Maybe = Tensor | None


def attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Maybe, mask: Maybe, sink: Maybe, parts: Parts | None, seed: Maybe,
    lengths: Lengths | None, tiles: TileTensors | None, score: Score,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return ``(o, lse)``. The heads of a group are an axis of their own: scores are (B, Hkv, G, M, N)."""
    if any(score.statistics):
        raise NotImplementedError("return_aux: statistics of the scores have no form in ONNX; export without them")
    if lengths is not None:
        raise NotImplementedError("varlen_attention: packed batches have no form in ONNX; export a model with padding")
    if tiles is not None:
        raise NotImplementedError("mask: a TileMask has no form in ONNX; export the model with its mask.dense()")
    if seed is not None:
        raise NotImplementedError("dropout_p: dropout has no form in ONNX; export the model in evaluation mode")
    kv_heads, group = k.shape[1], q.shape[1] // max(k.shape[1], 1)

    def grouped(x: Tensor) -> Tensor:
        return x.unsqueeze(2) if x.shape[1] in (1, kv_heads) else x.unflatten(1, (kv_heads, group))

    s = _wide(q.unflatten(1, (kv_heads, group)) @ k.unsqueeze(2).transpose(-1, -2)) * score.scale
    s = transform(s, score)
    if bias is not None:
        if bias.dim() == 5:  # (n, 1, H, M, N): each for a run of batch elements
            bias = bias[:, 0].repeat_interleave(q.shape[0] // bias.shape[0], 0)
        s = s + grouped(bias)
    if parts is not None:
        M, N = q.shape[2], k.shape[2]
        for x in (*(x for _, x in parts.vectors()), *(gather(x, M, N) for _, x in parts.relatives(score, M))):
            s = s + grouped(x)
    if mask is not None:
        if mask.dim() == 5:  # (1, n, H, M, N) repeats along the batch
            mask = mask[0].repeat(q.shape[0] // mask.shape[1], 1, 1, 1)
        s = s.masked_fill(~grouped(mask), -torch.inf)
    lo, hi = score.band.lo, score.band.hi
    if lo is not None or hi is not None:
        distance = torch.arange(k.shape[2], device=q.device) - torch.arange(q.shape[2], device=q.device).unsqueeze(1)
        for hidden in ([] if lo is None else [distance < lo]) + ([] if hi is None else [distance > hi]):
            s = s.masked_fill(hidden, -torch.inf)
    if sink is not None:  # one more column, which no value goes with
        column = grouped(sink.expand(q.shape[:3]).unsqueeze(-1)).to(s.dtype)
        s = torch.cat([s, column], -1)
        lse = torch.logsumexp(s, -1)
        return (_softmax(s, -1)[..., :-1].to(v.dtype) @ v.unsqueeze(2)).flatten(1, 2), lse.flatten(1, 2)
    o = _softmax(s, -1).to(v.dtype) @ v.unsqueeze(2)
    return o.flatten(1, 2), torch.logsumexp(s, -1).flatten(1, 2)


def matmul(a: Tensor, b: Tensor, c: Maybe, alpha: float, beta: float) -> Tensor:
    y = alpha * _wide(a @ b)
    return (y if c is None or beta == 0.0 else y + beta * c).to(a.dtype)


def softmax(x: Tensor, scale: float, bias: Maybe, mask: Maybe, dim: int) -> Tensor:
    s = scale * _wide(x)
    if bias is not None:
        s = s + bias
    if mask is not None:
        s = s.masked_fill(~mask, -torch.inf)
    return _softmax(s, dim).to(x.dtype)


def _softmax(s: Tensor, dim: int) -> Tensor:
    """Return the softmax; a row in which everything is -inf is 0."""
    return torch.softmax(s, dim).masked_fill((s == -torch.inf).all(dim, keepdim=True), 0.0)


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype.itemsize == 2 else x
