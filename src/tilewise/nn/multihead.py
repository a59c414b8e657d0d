"""torch.nn.MultiheadAttention with a trainable bias of the scores."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tilewise.api import attention


class MultiheadAttention(nn.MultiheadAttention):
    """torch.nn.MultiheadAttention, computed by `tilewise.attention`, plus ``attn_bias=``.

    Constructor, parameters and state dict are those of PyTorch's class, so that a checkpoint of one loads into the
    other: ``MultiheadAttention(embed_dim, num_heads, dropout=0.0, bias=True, add_bias_kv=False, add_zero_attn=False,
    kdim=None, vdim=None, batch_first=False, device=None, dtype=None)``, where ``bias`` is that of the projections.

    Shapes, with ``batch_first``:
        query (B, L, embed_dim), key (B, S, kdim), value (B, S, vdim) -> ((B, L, embed_dim), None); without it (L, B, …)
        and so on, and without a batch (L, embed_dim) and so on.

    What differs from PyTorch's class: the weights are not stored, so that ``need_weights`` is False by default and True
    is an error; a query whose keys are all hidden gives the bias of the output projection, not NaN; ``is_causal=True``
    needs no attn_mask, but as many queries as keys, and does not hide the keys of add_bias_kv and add_zero_attn.

    Example:
        >>> layer = MultiheadAttention(512, 8, batch_first=True)
        >>> pair = torch.nn.Parameter(torch.zeros(1, 8, 256, 256))
        >>> y, _ = layer(x, x, x, attn_bias=pair)

    Source: arXiv 1706.03762, section 3.2.2; for the computation `tilewise.attention`.
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        attn_bias: Any = None,
    ) -> tuple[Tensor, None]:
        """Return ``(output, None)``.

        Args:
            query, key, value: see the class.
            key_padding_mask: (B, S), or (S,) without a batch; bool, True = hidden, or float, added to the scores.
            need_weights: False; PyTorch's class would return the weights.
            attn_mask: (L, S) or (B · num_heads, L, S); bool, True = hidden, or float, added, with its gradient.
            average_attn_weights: has no effect, as there are no weights.
            is_causal: query i sees the keys up to i. An attn_mask beside it is taken for that causal mask.
            attn_bias: what `tilewise.attention` takes as ``bias``: a tensor that broadcasts to (B, num_heads, L, S), a
                term of `tilewise.bias`, or a tuple of these.

        Raises:
            ValueError, TypeError: an invalid argument; the message names it, its value and what is allowed.
        """
        if need_weights:
            raise ValueError("need_weights: weights are not stored; pass False, the default here")
        if query.is_nested or key.is_nested or value.is_nested:
            raise TypeError("query, key, value: expected tensors that are not nested; call tilewise.attention on these")
        batched = query.dim() == 3
        if not batched:
            query, key, value = (x.unsqueeze(int(not self.batch_first)) for x in (query, key, value))
            key_padding_mask = None if key_padding_mask is None else key_padding_mask[None]
        if not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        q, k, v = self._heads(query, key, value)
        if is_causal and q.shape[2] != key.shape[1]:
            raise ValueError(f"is_causal: needs as many queries as keys, got {q.shape[2]} and {key.shape[1]}")
        keys, more = key.shape[1], k.shape[2] - key.shape[1]  # more: keys that no mask hides
        masks = [_scores("key_padding_mask", key_padding_mask, (q.shape[0], 1, 1, keys))]
        if is_causal and more:
            masks.append(~torch.ones(1, 1, keys, keys, dtype=torch.bool, device=q.device).tril())
        elif not is_causal:
            sequences = (q.shape[0], self.num_heads) if attn_mask is not None and attn_mask.dim() == 3 else (1, 1)
            masks.append(_scores("attn_mask", attn_mask, (*sequences, q.shape[2], keys)))
        added = attn_bias if isinstance(attn_bias, (tuple, list)) else [] if attn_bias is None else [attn_bias]
        given = [x for x in masks if x is not None]
        if more:
            given = [F.pad(x, (0, more)) for x in given]
            added = [F.pad(x, (0, more)) if isinstance(x, Tensor) and x.shape[-1] == keys else x for x in added]
        hidden = [x for x in given if x.dtype == torch.bool]
        biases = (*added, *(x for x in given if x.dtype != torch.bool))
        bias = None if not biases else biases[0] if len(biases) == 1 else biases
        mask = None if not hidden else ~hidden[0] if len(hidden) == 1 else ~(hidden[0] | hidden[1])
        dropout_p = self.dropout if self.training else 0.0
        o = attention(q, k, v, bias=bias, mask=mask, causal=is_causal and not more, dropout_p=dropout_p)
        y = self.out_proj(o.transpose(1, 2).flatten(2))
        y = y if self.batch_first else y.transpose(0, 1)
        return (y if batched else y.squeeze(int(not self.batch_first))), None

    def _heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v by heads, with the keys of add_bias_kv and add_zero_attn."""
        if self._qkv_same_embed_dim and query is key is value:
            found = F.linear(query, self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
        else:
            weights: Any = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
            if self._qkv_same_embed_dim:
                weights = self.in_proj_weight.chunk(3)
            biases: Any = [None] * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
            found = tuple(map(F.linear, (query, key, value), weights, biases))
        q, k, v = found
        if self.bias_k is not None and self.bias_v is not None:
            k, v = (torch.cat([x, y.expand(len(x), -1, -1)], 1) for x, y in ((k, self.bias_k), (v, self.bias_v)))
        if self.add_zero_attn:
            k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))
        q, k, v = (x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2) for x in (q, k, v))
        return q, k, v


def _scores(name: str, x: Tensor | None, shape: tuple[int, ...]) -> Tensor | None:
    """Return a mask in a shape that broadcasts to the scores."""
    if x is None:
        return None
    if x.numel() != torch.Size(shape).numel() or x.shape[-1] != shape[-1]:
        raise ValueError(f"{name}: shape {tuple(x.shape)} does not fit scores of shape {shape}")
    return x.reshape(shape)
