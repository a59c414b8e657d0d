"""Hugging Face transformers: ``register()`` once, then load any model with ``attn_implementation="tilewise"``.

    import tilewise.integrations.transformers
    tilewise.integrations.transformers.register()
    model = AutoModel.from_pretrained(..., attn_implementation="tilewise")

Every model that calls transformers' AttentionInterface runs: encoders, decoders with their caches, sliding windows,
softcaps, and the T5 family, whose relative position bias goes in as ``bias`` and gets its gradient. Some models (Bloom,
GPT-J, MPNet and other old ones) compute their attention by themselves, whatever attn_implementation says; where such
a model asks for a mask, which it would misread, it gets a ValueError.

What a mask means here. transformers asks `attention_mask` once for all layers of a kind, and hands its answer to
`attention_forward` in each layer:

    None               nothing to hide but what causality hides, if the layer is causal
    bool (B, N)        causal, and these keys are tokens, not padding
    bool (B|1, W, N|1) the same within a window: query i sees itself and the W - 1 keys before it. The W rows are one
                       row, expanded without memory: their number alone counts
    (B, 1|H, 1|M, N)   the whole truth, causality and window included: bool, True = attend, or floating, added

In all but the last, causality and window stay numbers: no (M, N) mask is made, and tiles that they hide are skipped.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    prepare_padding_mask,
    sdpa_mask,
)
from transformers.utils.import_utils import is_tracing

from tilewise.api import attention
from tilewise.sdpa import autocast

NAME = "tilewise"

# What some models pass to change the result, and tilewise.attention does not compute.
_UNSUPPORTED = {
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "indices": "sparse attention by token indices",
    "block_indices": "sparse attention by block indices",
    "cache": "the paged cache of continuous batching",
}


def register() -> None:
    """Make ``attn_implementation="tilewise"`` known to transformers. Calling it again changes nothing."""
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, attention_mask)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """One layer's attention, as AttentionInterface calls it.

    Args:
        module: the layer; its ``is_causal`` counts where the argument is None.
        query: (B, H, M, D). key, value: (B, Hkv, N, D) and (B, Hkv, N, Dv). A batch of 1 is broadcast. Under autocast
            all three are cast to its dtype.
        attention_mask: in one of the four forms of the module's docstring.
        dropout: must be 0 for now.
        scaling: multiplies ``query @ key.mT``; default ``1 / sqrt(D)``.
        softcap: as for `tilewise.attention`.
        position_bias: floating, broadcastable to (B, H, M, N), added to the scores; it gets its gradient.
        kwargs: what else a model passes. The window is the mask's; what does not change the result is ignored.

    Returns:
        (B, M, H, Dv), contiguous, and None where transformers' eager attention returns its weights.

    Raises:
        NotImplementedError: dropout > 0, or an argument that changes the result and is not supported.
        ValueError: ``output_attentions=True``.
    """
    _check(dropout, kwargs)
    query, key, value = autocast(query, key, value)
    batch = max(query.shape[0], key.shape[0])
    query, key, value = (x.expand(batch, -1, -1, -1) for x in (query, key, value))

    causal, window, mask, bias = False, None, None, position_bias
    if attention_mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    elif attention_mask.dim() == 2:
        causal, mask = True, attention_mask[:, None, None, :]
    elif attention_mask.dim() == 3:
        causal, window = True, (attention_mask.shape[1] - 1, 0)
        mask = None if attention_mask.shape[2] < key.shape[2] else attention_mask[:, None, :1, :]
    elif attention_mask.dtype == torch.bool:
        mask = attention_mask
    else:
        bias = attention_mask if position_bias is None else position_bias + attention_mask

    o = attention(query, key, value, bias=bias, mask=mask, causal=causal, window=window, scale=scaling, softcap=softcap)
    return o.transpose(1, 2).contiguous(), None


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Callable = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    config: object = None,
    **kwargs: Any,
) -> Tensor | None:
    """The mask of one kind of layer, as AttentionMaskInterface calls it: the smallest of the module's four forms.

    Args:
        batch_size: B. q_length: M. kv_length: N.
        q_offset: position of the first query, an int, or a tensor with static caches. kv_offset: of the first key.
        mask_function: transformers' description of the pattern.
        attention_mask: padding, bool (B, at least N), True = a token; or None.
        local_size: width of the sliding window or of the chunks, if the pattern has one.
        allow_is_causal_skip: the pattern is causal, within ``local_size``, and nothing else; and a short form will do.
        allow_is_bidirectional_skip: the same for a pattern that is not causal.
        config: the model's; its ``sliding_window`` tells a window from chunks.
        kwargs: what `transformers.masking_utils.sdpa_mask` takes beside these.
    """
    if _has_its_own_attention(type(config)):
        raise ValueError(
            f"attn_implementation: the model of {type(config).__name__} does not call AttentionInterface, so that "
            f'"{NAME}" cannot run its attention; use attn_implementation="eager"'
        )
    if attention_mask is not None and attention_mask.dim() != 2:
        if attention_mask.dim() == 3 and attention_mask.shape[1] == local_size:
            return attention_mask  # an earlier answer of ours, which generate() or an outer model hands on
        raise ValueError(f"attention_mask: expected 2 or 4 dimensions, got shape {tuple(attention_mask.shape)}")
    padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if padding is not None:
        padding = padding[:, kv_offset : kv_offset + kv_length]
        # Reading the mask is a branch on data, which a compiled graph cannot have.
        if not is_tracing(padding) and bool(padding.all()):
            padding = None

    if allow_is_bidirectional_skip and mask_function is bidirectional_mask_function:
        return None if padding is None else padding[:, None, None, :]

    # Bottom-right alignment: the last query is the last key. Static caches, longer than what they hold, are not so.
    aligned = not isinstance(q_offset, Tensor) and q_offset + q_length == kv_offset + kv_length
    if allow_is_causal_skip and aligned:
        # A (B, N) answer may come back as `attention_mask`, whose columns then count from kv_offset: it must be 0.
        if (local_size is None or kv_offset + kv_length <= local_size) and (padding is None or kv_offset == 0):
            return padding
        if local_size is not None and _is_window(local_size, config):
            rows = padding if padding is not None else torch.ones(1, 1, dtype=torch.bool, device=kwargs.get("device"))
            return rows[:, None, :].expand(-1, local_size, -1)

    return sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        attention_mask=attention_mask,
        mask_function=mask_function,
        local_size=local_size,
        allow_is_causal_skip=False,
        allow_is_bidirectional_skip=allow_is_bidirectional_skip,
        **kwargs,
    )


@torch.compiler.assume_constant_result
def _has_its_own_attention(config_type: type) -> bool:
    """The model's file defines attention layers but does not know AttentionInterface."""
    file = sys.modules.get(config_type.__module__.replace(".configuration_", ".modeling_"))
    if file is None or hasattr(file, "ALL_ATTENTION_FUNCTIONS"):
        return False
    return any(
        isinstance(x, type) and issubclass(x, nn.Module) and "Attention" in x.__name__ and x.__module__ == file.__name__
        for x in vars(file).values()
    )


def _check(dropout: float, kwargs: dict) -> None:
    if dropout > 0:
        raise NotImplementedError(
            f"dropout: attention dropout is not implemented yet, got {dropout}; set the config's attention dropout "
            "(attention_dropout, attention_probs_dropout_prob, or dropout_rate for T5) to 0, or call model.eval()"
        )
    for name, meaning in _UNSUPPORTED.items():
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"{name}: {meaning} is not implemented; use another attn_implementation")
    if kwargs.get("output_attentions"):
        raise ValueError('output_attentions: the weights are never formed; use attn_implementation="eager"')


def _is_window(local_size: int, config: object) -> bool:
    """``local_size`` is a sliding window: chunks come with their size as ``local_size`` too."""
    return local_size == getattr(config, "sliding_window", None) != getattr(config, "attention_chunk_size", None)
