"""Replacements in models of transformers that make a position bias of queries and keys: tilewise gets its components.

A replacement is set on a module instance for one method: the one that makes the bias if the model calls
AttentionInterface (Inkling, T5), else the attention itself (Bloom, DeBERTa-v2, MPNet, MPT). It acts while the model's
attn_implementation is "tilewise"; otherwise the class's method runs. Parameters keep their places and names.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, EncoderDecoderCache, PreTrainedConfig, PreTrainedModel
from transformers.utils.import_utils import is_tracing

from tilewise.bias import RelativeBias, alibi, log_buckets
from tilewise.integrations.position_bias import NoBias, RelativeLogits, TableBias

NAME = "tilewise"

Method = Callable[..., Any]


def _active(config: PreTrainedConfig) -> bool:
    return config._attn_implementation == NAME


def _own(module: nn.Module, method: str, *args: Any, **kwargs: Any) -> Any:
    """Call the method of the module's class."""
    return getattr(type(module), method)(module, *args, **kwargs)


def _cache(past_key_values: Any, cache: Any) -> Any:
    """Return the cache by either name: transformers 5.24 passes it as ``cache``."""
    return cache if past_key_values is None else past_key_values


def _attend(*args: Any, **kwargs: Any) -> Tensor:
    """Return (B, M, H * Dv) from the function registered as "tilewise"; arguments are those of `attention_forward`."""
    return AttentionInterface()[NAME](*args, **kwargs)[0].flatten(2)


# --- Inkling, Inkling-2 ---


def _inkling_relative_logits(
    module: Any, config: PreTrainedConfig, relative_states: Tensor, query_positions: Tensor, key_positions: Tensor
) -> Any:
    """Return the two factors of the bias, where InklingRelativeLogits gathers (B, H, M, N) from their product."""
    if not _active(config):
        return _own(module, "forward", relative_states, query_positions, key_positions)
    proj = module.proj
    if torch.is_autocast_enabled(relative_states.device.type):
        proj = proj.to(relative_states.dtype)  # as their matmul under autocast
    return RelativeLogits(relative_states.transpose(1, 2), proj, query_positions, key_positions)


# --- T5, mT5, UMT5 and models with T5's attention ---


def _t5_compute_bias(
    module: Any,
    config: PreTrainedConfig,
    query_length: int,
    key_length: int,
    device: torch.device | None = None,
    past_seen_tokens: int | Tensor = 0,
) -> Any:
    """Return the table, where T5Attention looks up (1, H, M, N)."""
    if not _active(config):
        return _own(module, "compute_bias", query_length, key_length, device, past_seen_tokens)
    start = past_seen_tokens
    return TableBias(
        module.relative_attention_bias,
        module.relative_attention_bias.weight.device if device is None else device,
        module.relative_attention_num_buckets,
        not module.is_decoder,
        module.relative_attention_max_distance,
        # None if the last query is at the last key, as always except with a static cache.
        None if not isinstance(start, Tensor) and start + query_length == key_length else start,
    )


def _t5_attention(
    module: Any,
    config: PreTrainedConfig,
    hidden_states: Tensor,
    mask: Tensor | None = None,
    key_value_states: Tensor | None = None,
    position_bias: Any = None,
    past_key_values: Any = None,
    *,
    cache: Any = None,
    **kwargs: Any,
) -> Any:
    """Run T5Attention, with cross attention without its (1, H, M, N) of zeros."""
    past_key_values = _cache(past_key_values, cache)
    if _active(config) and position_bias is None and not module.has_relative_attention_bias:
        position_bias = NoBias()
    return _own(module, "forward", hidden_states, mask, key_value_states, position_bias, past_key_values, **kwargs)


def _umt5_attention(
    module: Any,
    config: PreTrainedConfig,
    hidden_states: Tensor,
    encoder_hidden_states: Tensor | None = None,
    past_key_values: Any = None,
    attention_mask: Tensor | None = None,
    *,
    cache: Any = None,
    **kwargs: Any,
) -> Any:
    """Run UMT5Attention, with cross attention without its (1, H, M, N) of zeros."""
    past_key_values = cache = _cache(past_key_values, cache)
    if not _active(config) or module.has_relative_attention_bias:
        return _own(module, "forward", hidden_states, encoder_hidden_states, past_key_values, attention_mask, **kwargs)
    q = _heads(module.q(hidden_states), module.n_heads)
    updated: bool | None = False
    if isinstance(cache, EncoderDecoderCache):
        updated = cache.is_updated.get(module.layer_idx)
        cache = cache.self_attention_cache if encoder_hidden_states is None else cache.cross_attention_cache
    if encoder_hidden_states is not None and past_key_values is not None and updated:
        k, v = cache.layers[module.layer_idx].keys, cache.layers[module.layer_idx].values
    else:
        states = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        k, v = (_heads(projection(states), module.n_heads) for projection in (module.k, module.v))
        if cache is not None:
            k, v = cache.update(k, v, module.layer_idx)
            if encoder_hidden_states is not None and isinstance(past_key_values, EncoderDecoderCache):
                past_key_values.is_updated[module.layer_idx] = True
    dropout = module.dropout if module.training else 0.0
    o = _attend(module, q, k, v, attention_mask, dropout=dropout, scaling=module.scaling, **kwargs)
    return module.o(o), None


# --- MPNet ---


def _mpnet_bias(
    module: Any, config: PreTrainedConfig, x: Tensor, position_ids: Tensor | None = None, num_buckets: int = 32
) -> Any:
    """Return the table, with T5's buckets, where MPNetEncoder looks up (B, H, N, N)."""
    if not _active(config) or position_ids is not None:
        return _own(module, "compute_position_bias", x, position_ids, num_buckets)
    return TableBias(module.relative_attention_bias, x.device, num_buckets, True, 128, None)


def _mpnet_attention(
    module: Any,
    config: PreTrainedConfig,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    position_bias: Any = None,
    output_attentions: bool = False,
    **kwargs: Any,
) -> Any:
    """Run MPNetSelfAttention."""
    if not _active(config):
        return _own(module, "forward", hidden_states, attention_mask, position_bias, output_attentions, **kwargs)
    heads = module.num_attention_heads
    q, k, v = (_heads(projection(hidden_states), heads) for projection in (module.q, module.k, module.v))
    dropout = module.dropout.p if module.training else 0.0
    o = _attend(
        module, q, k, v, attention_mask, dropout=dropout, scaling=module.attention_head_size**-0.5, is_causal=False,
        position_bias=position_bias, output_attentions=output_attentions,
    )  # fmt: skip
    return (module.o(o), None) if output_attentions else (module.o(o),)


# --- ALiBi: MPT, Bloom ---


def _mpt_model(module: Any, config: PreTrainedConfig, *args: Any, **kwargs: Any) -> Any:
    mask = kwargs.get("attention_mask", args[2] if len(args) > 2 else None)
    if _active(config) and isinstance(mask, Tensor) and mask.dim() == 4 and mask.dtype != torch.bool:
        raise ValueError(
            f"attention_mask: MptModel makes a mask of four dimensions bool, got {mask.dtype}; pass bool, True = attend"
        )
    return _own(module, "forward", *args, **kwargs)


def _mpt_slopes(
    module: Any,
    config: PreTrainedConfig,
    num_heads: int,
    sequence_length: int,
    alibi_bias_max: int = 8,
    device: torch.device | None = None,
) -> Tensor:
    """Return the slopes (H,), where MptModel makes (H, 1, max_seq_len): its own, read at a distance of one."""
    if not _active(config):
        return _own(module, "build_mpt_alibi_tensor", num_heads, sequence_length, alibi_bias_max, device)
    return -_own(module, "build_mpt_alibi_tensor", num_heads, 2, alibi_bias_max, device)[:, 0, 0]


def _mpt_attention(
    module: Any,
    config: PreTrainedConfig,
    hidden_states: Tensor,
    position_bias: Tensor,
    past_key_values: Any = None,
    attention_mask: Tensor | None = None,
    *,
    cache: Any = None,
    **kwargs: Any,
) -> Any:
    """Run MptAttention. The first query's position does not matter: it adds a constant to a row of scores."""
    past_key_values = _cache(past_key_values, cache)
    if not _active(config):
        return _own(module, "forward", hidden_states, position_bias, past_key_values, attention_mask, **kwargs)
    qkv = module.Wqkv(hidden_states)
    if module.clip_qkv:
        qkv = qkv.clamp(min=-module.clip_qkv, max=module.clip_qkv)
    q, k, v = (_heads(x, module.n_heads) for x in qkv.chunk(3, dim=2))
    if past_key_values is not None:
        k, v = past_key_values.update(k, v, module.layer_idx)
    dropout = module.attn_dropout_p if module.training else 0.0
    o = _attend(
        module, q, k, v, attention_mask, dropout=dropout, scaling=module.softmax_scale, is_causal=True,
        position_bias=alibi(position_bias, "signed"),
    )  # fmt: skip
    return module.out_proj(o), None


def _bloom_attention(
    module: Any,
    config: PreTrainedConfig,
    hidden_states: Tensor,
    residual: Tensor,
    alibi: Tensor,
    attention_mask: Tensor | None,
    layer_past: Any = None,
    use_cache: bool = False,
    output_attentions: bool = False,
    **kwargs: Any,
) -> Any:
    """Run BloomAttention. Its ALiBi counts only tokens without padding, so it is passed unchanged: a number per key."""
    if not _active(config):
        return _own(
            module, "forward", hidden_states, residual, alibi, attention_mask, layer_past, use_cache,
            output_attentions, **kwargs,
        )  # fmt: skip
    q, k, v = module._reshape(module.query_key_value(hidden_states))
    if layer_past is not None:
        k, v = layer_past.update(k, v, module.layer_idx)
    dropout = module.attention_dropout.p if module.training else 0.0
    o = _attend(
        module, q, k, v, attention_mask, dropout=dropout, scaling=module.inv_norm_factor, is_causal=True,
        position_bias=alibi.unflatten(0, (-1, module.num_heads)), output_attentions=output_attentions,
    )  # fmt: skip
    output = functional.dropout(module.dense(o), module.hidden_dropout, module.training)
    return residual + output, None


def _check_bloom(module: Any) -> None:
    if module.pretraining_tp > 1 and module.slow_but_exact:
        raise ValueError(
            "slow_but_exact: a Bloom that adds up the parts of its output projection one by one is not known"
        )


# --- DeBERTa-v2 ---


def _deberta_mask(module: Any, config: PreTrainedConfig, attention_mask: Tensor) -> Tensor | None:
    """Return (B, 1, 1, N), where DebertaV2Encoder makes (B, 1, N, N): the output at padding does not matter."""
    if not _active(config) or attention_mask.dim() > 2:
        return _own(module, "get_attention_mask", attention_mask)
    mask = attention_mask.bool()
    if not is_tracing(mask) and bool(mask.all()):
        return None
    return mask[:, None, None, :]


def _deberta_entries(
    module: Any,
    config: PreTrainedConfig,
    hidden_states: Tensor,
    query_states: Tensor | None = None,
    relative_pos: Tensor | None = None,
) -> Tensor | None:
    """Return each distance's bucket, (L,), where DebertaV2Encoder makes (1, M, N); None if each has its own."""
    if not _active(config):
        return _own(module, "get_rel_pos", hidden_states, query_states, relative_pos)
    if relative_pos is not None:
        raise ValueError("relative_pos: distances of the user's own are not taken; the model's follow from positions")
    if not module.relative_attention or module.position_buckets <= 0:
        return None
    most, buckets = module.max_relative_positions, module.position_buckets
    distance = torch.arange(-most, most, device=hidden_states.device)
    return (log_buckets(distance, buckets=buckets, max_distance=most) + buckets).clamp(0, 2 * buckets - 1)


def _deberta_attention(
    module: Any,
    config: PreTrainedConfig,
    hidden_states: Tensor,
    attention_mask: Tensor | None,
    output_attentions: bool = False,
    query_states: Tensor | None = None,
    relative_pos: Tensor | None = None,
    rel_embeddings: Tensor | None = None,
) -> Any:
    """Run DisentangledSelfAttention; content to position and position to content are relative-position values."""
    if not _active(config):
        return _own(
            module, "forward", hidden_states, attention_mask, output_attentions, query_states, relative_pos,
            rel_embeddings,
        )  # fmt: skip
    heads = module.num_attention_heads
    q = _heads(module.query_proj(hidden_states if query_states is None else query_states), heads)
    k, v = (_heads(projection(hidden_states), heads) for projection in (module.key_proj, module.value_proj))
    ways = [way for way in ("c2p", "p2c") if way in module.pos_att_type]
    scaling = 1 / math.sqrt(q.shape[-1] * (1 + len(ways)))
    bias = []
    if module.relative_attention:
        span = module.pos_ebd_size
        embeddings = module.pos_dropout(rel_embeddings)[: 2 * span]
        for way in ways:
            content, on = (q, "query") if way == "c2p" else (k, "key")
            if module.share_att_key:
                projection = module.key_proj if way == "c2p" else module.query_proj
            else:
                projection = module.pos_key_proj if way == "c2p" else module.pos_query_proj
            # Scaled here because it is small: the values have a row for each query or key.
            profiles = _heads(projection(embeddings[None]), heads) * scaling
            values = torch.matmul(content, profiles.mT)
            lo = -span if relative_pos is None else -module.max_relative_positions
            where: dict[str, Any] = {"on": on, "query_start": 0, "buckets": relative_pos}
            bias.append(RelativeBias(values, lo=lo, reverse=True, outside="clamp", **where))
    dropout = module.dropout.p if module.training else 0.0
    mask = None if attention_mask is None else attention_mask.bool()
    o = _attend(
        module, q, k, v, mask, dropout=dropout, scaling=scaling, is_causal=False, position_bias=tuple(bias),
        output_attentions=output_attentions,
    )  # fmt: skip
    return o, None


def _heads(x: Tensor, heads: int) -> Tensor:
    """Return (B, M, H * D) as (B, H, M, D)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


# --- modules with replacements ---

_T5: dict[str, Method] = {"forward": _t5_attention, "compute_bias": _t5_compute_bias}

# file.Class in transformers.models: method -> replacement
_REPLACEMENTS: dict[str, dict[str, Method]] = {
    "modeling_inkling.InklingRelativeLogits": {"forward": _inkling_relative_logits},
    "modeling_inkling2.Inkling2RelativeLogits": {"forward": _inkling_relative_logits},
    "modeling_t5.T5Attention": _T5,
    "modeling_mt5.MT5Attention": _T5,
    "modeling_pop2piano.Pop2PianoAttention": _T5,
    "modeling_switch_transformers.SwitchTransformersAttention": _T5,
    "modeling_umt5.UMT5Attention": {"forward": _umt5_attention, "compute_bias": _t5_compute_bias},
    "modeling_mpnet.MPNetEncoder": {"compute_position_bias": _mpnet_bias},
    "modeling_mpnet.MPNetSelfAttention": {"forward": _mpnet_attention},
    "modeling_mpt.MptModel": {"forward": _mpt_model, "build_mpt_alibi_tensor": _mpt_slopes},
    "modeling_mpt.MptAttention": {"forward": _mpt_attention},
    "modeling_bloom.BloomAttention": {"forward": _bloom_attention},
    "modeling_deberta_v2.DebertaV2Encoder": {"get_attention_mask": _deberta_mask, "get_rel_pos": _deberta_entries},
    "modeling_deberta_v2.DisentangledSelfAttention": {"forward": _deberta_attention},
}
_CHECKS = {"modeling_bloom.BloomAttention": _check_bloom}
# Models that compute their attention by themselves: the attention is replaced.
_OWN_ATTENTION = ("modeling_bloom.", "modeling_deberta_v2.", "modeling_mpnet.", "modeling_mpt.")
FAMILIES = "Bloom, DeBERTa-v2, Inkling, Inkling-2, MPNet, MPT, mT5, Pop2Piano, Switch Transformers, T5 and UMT5"


def known_class(cls: type) -> str | None:
    """Return ``file.Class`` of the class or a base that has replacements; None if there is none."""
    for base in cls.__mro__:
        name = f"{base.__module__.rpartition('.')[2]}.{base.__qualname__}"
        if base.__module__.startswith("transformers.models.") and name in _REPLACEMENTS:
            return name
    return None


def computes_attention(name: str) -> bool:
    """True if the replacements of ``name`` are for a model that does not call AttentionInterface."""
    return name.startswith(_OWN_ATTENTION)


def modules_to_replace(model: nn.Module) -> Iterator[tuple[nn.Module, str, PreTrainedConfig]]:
    """Yield each module that has replacements, the name of their class, and the config of the module's model.

    Raises:
        ValueError: a setting that a replacement does not support.
    """
    modules: list[tuple[nn.Module, PreTrainedConfig | None]] = [(model, None)]
    while modules:
        module, config = modules.pop()
        if isinstance(module, PreTrainedModel):
            config = module.config
        name = known_class(type(module))
        if name is not None and config is not None:
            if name in _CHECKS:
                _CHECKS[name](module)
            yield module, name, config
        modules += [(child, config) for child in module.children()]


def replace(module: nn.Module, name: str, config: PreTrainedConfig) -> None:
    """Set the replacements of ``name`` on the instance, once.

    Raises:
        ValueError: other code has replaced the method on this instance.
    """
    for method, function in _REPLACEMENTS[name].items():
        # accelerate's hooks replace forward, and call the earlier one by this name.
        place = "_old_forward" if method == "forward" and "_old_forward" in vars(module) else method
        there = vars(module).get(place)
        if isinstance(there, functools.partial) and there.func is function:
            continue
        if there is not None and getattr(there, "__func__", None) is not getattr(type(module), method):
            raise ValueError(
                f"model: {type(module).__name__}.{method} of an instance has been replaced already, by {there}"
            )
        setattr(module, place, functools.partial(function, module, config))
