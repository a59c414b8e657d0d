"""Hugging Face transformers: call ``register()`` once, then load models with ``attn_implementation="tilewise"``.

    import tilewise.integrations.transformers
    tilewise.integrations.transformers.register()
    model = AutoModel.from_pretrained(..., attn_implementation="tilewise")

Every model that calls transformers' AttentionInterface runs: encoders, decoders with their caches, sliding windows,
softcaps, attention sinks (gpt-oss, Inkling-2), and T5 and Inkling, whose position bias is passed as ``bias`` and gets
its gradient. They make it as a tensor of queries and keys; with `use_bias_terms` they pass its components, and neither
they nor tilewise make that tensor:

    model = use_bias_terms(AutoModel.from_pretrained(...))

Some models do not call it (Bloom, DeBERTa, Falcon, GPT-J, MPNet, Swin v2 and others). transformers accepts every
registered name for them, but they compute their attention by themselves, or raise a bare KeyError. Here such a model is
refused while it is made, by a ValueError that names the model and an alternative. It is found

    by its modules       A module calls the interface if a method of its class names an AttentionInterface. A model is
                         refused if it has attention modules and no module in it, submodels included, calls the
                         interface. Attention modules are those with "Attention" or "Attn" in the name of their class,
                         and nn.MultiheadAttention; but not deformable attention, which samples points, without scores.
    by its dictionaries  Falcon, GPT-J, SAM and others look attn_implementation up in a dictionary of attention classes.
                         Each of those in the file of a model gets an entry that raises, before the layers are made.

`use_bias_terms` runs some of them: Bloom, DeBERTa-v2, MPNet and MPT.

A submodel is checked by itself, and Gemma3n is refused because its audio encoder is. Name the parts that can run:
``attn_implementation={"text_config": "tilewise"}``.

transformers has no hook for this, so `register` replaces two methods of PreTrainedModel by ones that check, then call
the original: ``get_correct_attn_implementation``, called before the layers are made and by set_attn_implementation, and
``post_init``, called after. They check nothing under another attn_implementation. `unregister` undoes everything.

Masks: transformers calls `attention_mask` once for all layers of a kind, and passes the result to `attention_forward`
in each layer:

    None               hides nothing but what causality hides, if the layer is causal
    bool (B, N|1)      causal; True at tokens, False at padding; one column: all keys are tokens
    bool (B|1, W, N|1) likewise within a window: query i sees itself and the W - 1 keys before it. The W rows are one
                       row, expanded without memory; only their number counts
    int32 (L, S + 1) or (W, L, S + 1)
                       S sequences end to end, causal, and within a window of W: where each begins, see `packed`
    bool (B|1, 1, 1, W, N|1)
                       the third form, for Gemma 4 with layers that share keys: it crops the queries of a mask of four
                       dimensions to the last ones, which leaves this one as it is. W = N without a window
    (B, 1|H, 1|M, N)   the complete mask, causality and window included: bool, True = attend, or floating, added

In all but the last, causality and window stay numbers: no (M, N) mask is made, and tiles that they hide are skipped.

Batches without padding, several sequences in a row, use `tilewise.varlen_attention`, without a mask of (M, N). Their
sequences are given by

    cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k
                       keywords of the model, as DataCollatorWithFlattening(return_flash_attn_kwargs=True) gives them.
                       They always count, without host synchronization on a GPU
    position_ids       that restart, in a batch of one row, by the rule of flash_attention_2: in decoders and encoders,
                       without a cache or with one that was empty, if the attention_mask hides no padding; each
                       sequence begins at the smallest position. On a GPU this synchronizes the host once a forward, and
                       once more if there are several sequences. In a batch of several rows, as in transformers' sdpa,
                       they count if there is neither a cache (use_cache=False) nor an attention_mask

Positions are ignored if the cache holds earlier keys, in cross attention, and with a mask of four dimensions, as chunks
and static caches need: pass the keywords there. Layers of Gemma 4 that share keys and compute only the
last queries (``logits_to_keep``) ignore them too, and refuse the keywords.

With a position bias, padding or a mask of four dimensions a mask of (M, N) is made nevertheless; also for Gemma 4 with
layers that share keys, if transformers itself reads positions. In a graph, of torch.compile or of CUDA, positions
become a `tilewise.TileMask`, or if transformers itself reads them, such a mask.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    prepare_padding_mask,
    sdpa_mask,
)
from transformers.utils import logging
from transformers.utils.import_utils import is_tracing

from tilewise.api import attention
from tilewise.frontend.varlen import packed_attention
from tilewise.integrations import models, packed
from tilewise.integrations.models import NAME
from tilewise.integrations.position_bias import PositionBias

# Below transformers' logger, so that transformers.logging.set_verbosity and TRANSFORMERS_VERBOSITY apply.
_logger = logging.get_logger(f"transformers.{NAME}")

# Arguments of some models that change the result, and that tilewise.attention does not support.
_UNSUPPORTED = {
    "indices": "sparse attention by token indices",
    "block_indices": "sparse attention by block indices",
    "cache": "the paged cache of continuous batching",
}

# Models whose layers crop a mask of four dimensions to the keys: they get this form.
_CROP_THE_MASK = {"pix2struct_text_model"}
# Models that crop the queries of a mask, which they index by four dimensions, before their layers that share keys.
_CROP_THE_QUERIES = {"gemma4_text", "gemma4_unified_text"}
# Models that convert the mask, which must not be None.
_CONVERT_THE_MASK = {"mpt"}


def register() -> None:
    """Register ``attn_implementation="tilewise"`` with transformers. Calling it again changes nothing."""
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, attention_mask)
    if not _replaced:
        for method in (_get_correct_attn_implementation, _post_init):
            name = method.__name__.removeprefix("_")
            _replaced[name] = getattr(PreTrainedModel, name)
            setattr(PreTrainedModel, name, method)


def unregister() -> None:
    """Restore transformers as it was before `register`. Models made with "tilewise" no longer run."""
    AttentionInterface._global_mapping.pop(NAME, None)
    AttentionMaskInterface._global_mapping.pop(NAME, None)
    while _replaced:
        setattr(PreTrainedModel, *_replaced.popitem())
    while _extended:
        del _extended.pop()[NAME]


def use_bias_terms(model: PreTrainedModel) -> PreTrainedModel:
    """Make a model pass the components of its position bias to tilewise, not a tensor of queries and keys.

    - Bloom: ALiBi, unchanged, as a number per key. MPT: ALiBi by its slopes
    - DeBERTa-v2: content to position and position to content, as values of each query and key by relative position
    - Inkling, Inkling-2: relative states and profiles, whose product has a value of each query for each distance
    - MPNet: the table of buckets
    - T5, mT5, UMT5, Pop2Piano, Switch Transformers: the table of buckets, also in decoding with a cache; cross
      attention gets no zeros

    Methods of modules are replaced on this model alone; calling it again changes nothing. It calls `register` and sets
    the model's attn_implementation to "tilewise". To restore the original code, call
    ``model.set_attn_implementation("eager")`` for T5 and Inkling; the others do not support that, so set
    ``model.config._attn_implementation = "eager"``. Parameters keep their places and names: checkpoints are unchanged.
    Tables of half precision are indexed in float32.

    Args:
        model: made with any attn_implementation that it supports; with "tilewise" too if it calls AttentionInterface.

    Returns:
        The model.

    Raises:
        TypeError: the model is not a PreTrainedModel.
        ValueError: no module of the model is known here by name; a setting is not supported; other code has replaced a
            method; or "tilewise" cannot run a part, see `register`.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model: expected a PreTrainedModel of transformers, got {type(model).__name__}")
    found = list(models.modules_to_replace(model))
    if not found:
        raise ValueError(
            f"model: no part of {type(model).__name__} has a position bias that is known here; known are those of "
            f"{models.FAMILIES}"
        )
    register()
    for module, name, config in found:
        models.replace(module, name, config)
    # The replacements act from here on.
    for _, name, config in found:
        if models.computes_attention(name):
            config._attn_implementation = NAME
    if not all(models.computes_attention(name) for _, name, _ in found):
        model.set_attn_implementation(NAME)
    return model


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
    position_bias: Any = None,
    s_aux: Tensor | None = None,
    sinks: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute one layer's attention, as AttentionInterface calls it.

    Args:
        module: the layer; its ``is_causal`` counts if the argument is None.
        query: (B, H, M, D). key, value: (B, Hkv, N, D) and (B, Hkv, N, Dv). A batch of 1 is broadcast. Under autocast
            all three are cast to its dtype.
        attention_mask: in one of the six forms of the module's docstring.
        dropout: in training mode, of the probabilities: ``dropout_p`` of `tilewise.attention`, with a seed from torch's
            generator.
        scaling: multiplies ``query @ key.mT``; default ``1 / sqrt(D)``.
        softcap: as in `tilewise.attention`.
        position_bias: floating, broadcastable to (B, H, M, N), added to the scores; it gets its gradient. Or any other
            ``bias`` of `tilewise.attention`, or a stand-in of `use_bias_terms`.
        s_aux: attention sinks (gpt-oss), floating, (H,): ``sink`` of `tilewise.attention`; it gets its gradient.
        sinks: those of Inkling-2, of each query, floating, (B, H, M, 1); likewise.
        kwargs: further arguments of models. ``cu_seq_lens_q`` and ``cu_seq_lens_k``, (S + 1,) int32 or int64, and
            ``max_length_q``, ``max_length_k`` give sequences; without them ``position_ids``, (1, M), do. The window is
            the mask's. Arguments that do not change the result are ignored.

    Returns:
        (B, M, H, Dv), contiguous, and None in place of the weights of transformers' eager attention. So it is with
        ``output_attentions=True``, like transformers' sdpa: a warning says so once, and the model's ``attentions`` are
        empty.

    Raises:
        NotImplementedError: an argument that changes the result and is not supported.
        ValueError: sinks of another shape, or together with s_aux; a packed batch of which a layer that shares keys has
            the last queries alone.
    """
    _check(kwargs)
    if attention_mask is not None and attention_mask.dim() == 5:
        attention_mask = attention_mask[:, 0, 0]
    batch = max(query.shape[0], key.shape[0])
    query, key, value = (x.expand(batch, -1, -1, -1) for x in (query, key, value))

    if sinks is not None:
        if s_aux is not None or sinks.dim() != 4 or sinks.shape[3] != 1:
            beside = "" if s_aux is None else ", and s_aux"
            raise ValueError(f"sinks: expected (B, H, M, 1) and no s_aux, got {tuple(sinks.shape)}{beside}")
        s_aux = sinks.squeeze(3)
    if isinstance(position_bias, PositionBias):
        # In all forms of the mask but the last, the last query is at the last key.
        aligned = attention_mask is None or attention_mask.dim() < 4
        position_bias = position_bias.bias(query.device, aligned)

    causal, window, mask, bias = False, None, None, position_bias
    sequences, positions = packed.sequences_of(attention_mask, kwargs), None
    if sequences is not None and getattr(module, "is_kv_shared_layer", False):
        all_queries = kwargs.get("position_ids")  # Gemma 4 crops the queries, and not their positions
        if all_queries is not None and query.shape[2] < all_queries.shape[-1]:
            raise ValueError(
                "logits_to_keep: expected 0 beside cu_seq_lens_q, for a model whose layers share keys, got "
                f"{query.shape[2]} of {all_queries.shape[-1]} queries"
            )
    if sequences is None:
        positions = packed.positions_of(module, attention_mask, kwargs, (batch, query.shape[2], key.shape[2]))
    if positions is not None and not is_tracing(positions):
        sequences, positions = packed.sequences_of_positions(positions), None
    if attention_mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    elif packed.is_packed_form(attention_mask):
        causal, window = True, (attention_mask.shape[0] - 1, 0) if attention_mask.dim() == 3 else None
    elif attention_mask.dim() == 2:
        causal = True
        mask = None if attention_mask.shape[1] == 1 < key.shape[2] else attention_mask[:, None, None, :]
    elif attention_mask.dim() == 3:
        causal, window = True, (attention_mask.shape[1] - 1, 0)
        mask = None if attention_mask.shape[2] < key.shape[2] else attention_mask[:, None, :1, :]
    elif attention_mask.dtype == torch.bool:
        mask = attention_mask
    elif isinstance(position_bias, Tensor):
        bias = position_bias + attention_mask
    else:
        terms = position_bias if isinstance(position_bias, (tuple, list)) else (position_bias,)
        bias = attention_mask if position_bias is None else (*terms, attention_mask)

    options: dict[str, Any] = {"causal": causal, "window": window}
    if sequences is not None and bias is None and mask is None:
        q, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
        if s_aux is not None and s_aux.dim() == 3:
            s_aux = s_aux.expand(batch, -1, query.shape[2]).transpose(0, 1).flatten(1)
        o, *_ = packed_attention(
            q, k, v, *sequences, sink=s_aux, scale=scaling, softcap=softcap, dropout_p=dropout, **options
        )  # fmt: skip
        return o.unflatten(0, (batch, -1)).contiguous(), None
    if positions is not None:
        mask = packed.documents_of_positions(positions, mask)
    if sequences is not None:
        seen = packed.visible(
            sequences.lengths, (batch, query.shape[2], key.shape[2]), causal, None if window is None else window[0] + 1
        )
        mask, options = seen if mask is None else mask & seen, {}
    o = attention(
        query, key, value, bias=bias, mask=mask, sink=s_aux, scale=scaling, softcap=softcap, dropout_p=dropout,
        **options,
    )  # fmt: skip
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
    """Return the mask of one kind of layer for AttentionMaskInterface, in the smallest of the module's six forms.

    Args:
        batch_size: B. q_length: M. kv_length: N.
        q_offset: position of the first query, an int, or a tensor with static caches. kv_offset: of the first key.
        mask_function: transformers' description of the pattern.
        attention_mask: padding, bool (B, at least N), True = a token; or None.
        local_size: width of the sliding window or of the chunks, if the pattern has one.
        allow_is_causal_skip: the pattern is only causal, within ``local_size``, and a short form is allowed.
        allow_is_bidirectional_skip: likewise for a pattern that is not causal.
        config: the model's; its ``sliding_window`` tells a window from chunks.
        kwargs: further arguments of `transformers.masking_utils.sdpa_mask`.
    """
    if attention_mask is not None and attention_mask.dim() != 2:
        if attention_mask.dim() == 3 and attention_mask.shape[1] == local_size:
            return attention_mask  # an earlier result, passed on by generate() or an outer model
        raise ValueError(f"attention_mask: expected 2 or 4 dimensions, got shape {tuple(attention_mask.shape)}")
    padding = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if padding is not None:
        padding = padding[:, kv_offset : kv_offset + kv_length]
        # A compiled graph cannot branch on the mask's data.
        if not is_tracing(padding) and bool(padding.all()):
            padding = None

    if allow_is_bidirectional_skip and mask_function is bidirectional_mask_function:
        return None if padding is None else padding[:, None, None, :]

    model_type = getattr(config, "model_type", None)
    crops = model_type in _CROP_THE_QUERIES and getattr(config, "num_kv_shared_layers", 0) > 0
    if padding is None and not crops and model_type not in _CROP_THE_MASK | _CONVERT_THE_MASK:
        form = packed.packed_form(mask_function, local_size)
        if form is not None:
            return form

    # Bottom-right alignment: the last query is at the last key. Static caches are longer than their content.
    aligned = not isinstance(q_offset, Tensor) and q_offset + q_length == kv_offset + kv_length
    if allow_is_causal_skip and aligned and model_type not in _CROP_THE_MASK:
        # A (B, N) result may return as `attention_mask`, whose columns then count from kv_offset: it must be 0.
        if (local_size is None or kv_offset + kv_length <= local_size) and (padding is None or kv_offset == 0):
            if padding is None and model_type in _CONVERT_THE_MASK:
                return torch.ones(1, 1, dtype=torch.bool, device=kwargs.get("device"))
            return _croppable(padding, kv_length) if crops else padding
        if local_size is not None and _is_window(local_size, config):
            rows = padding if padding is not None else torch.ones(1, 1, dtype=torch.bool, device=kwargs.get("device"))
            rows = rows[:, None, :].expand(-1, local_size, -1)
            return _croppable(rows, kv_length) if crops else rows

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


def _croppable(short: Tensor | None, kv_length: int) -> Tensor | None:
    """Return the second or third form of a mask in five dimensions, which ``mask[:, :, -M:, :]`` leaves as it is."""
    if short is not None and short.dim() == 2:
        short = short[:, None, :].expand(-1, kv_length, -1)
    return None if short is None else short[:, None, None]


# Methods of PreTrainedModel that `register` replaced, and dictionaries of attention classes with an added entry.
_replaced: dict[str, Callable] = {}
_extended: list[dict[str, Any]] = []


def _get_correct_attn_implementation(
    self: PreTrainedModel, requested_attention: str | None, is_init_check: bool = False
) -> str:
    implementation = _replaced["get_correct_attn_implementation"](self, requested_attention, is_init_check)
    if implementation == NAME and is_init_check:
        for name, classes in _dictionaries(type(self)):
            if NAME not in classes:
                classes[NAME] = functools.partial(_refuse_layer, name, " or ".join(f'"{x}"' for x in classes))
                _extended.append(classes)
    elif implementation == NAME:
        # set_attn_implementation calls this once for each config, so check all models with this one.
        for module in self.modules():
            if isinstance(module, PreTrainedModel) and module.config is self.config:
                _check_modules(module)
    return implementation


def _post_init(self: PreTrainedModel) -> None:
    if self.config._attn_implementation == NAME:
        _check_modules(self)
    _replaced["post_init"](self)


def _refuse_layer(name: str, allowed: str, *args: Any, **kwargs: Any) -> None:
    """Raise for the dictionary ``name``: its entry, called like a layer's class with the model's config."""
    configs = " ".join(type(x).__name__ for x in (*args, *kwargs.values()) if isinstance(x, PreTrainedConfig))
    raise _refusal(f"the model of {configs} takes its attention from {name}", allowed)


def _check_modules(model: PreTrainedModel) -> None:
    """Raise if the model computes its attention by itself; submodels are checked separately."""
    from_dictionaries = {cls for _, classes in _dictionaries(type(model)) for cls in classes.values()}
    calls, own = False, set()
    modules: list[tuple[nn.Module, bool]] = [(model, True)]
    while modules:
        module, belongs = modules.pop()
        cls: Any = type(module)
        belongs = belongs and (module is model or not isinstance(module, PreTrainedModel))
        if _calls_interface(cls):
            calls = True
        elif belongs and _is_attention(cls):
            own.add(cls)
        modules += [(child, belongs) for child in module.children()]
    if own and (not calls or own & from_dictionaries):
        names = ", ".join(sorted(cls.__name__ for cls in own))
        allowed = '"eager" or "sdpa"' if model._supports_sdpa else '"eager"'
        known = any(models.known_class(cls) for cls in own)
        raise _refusal(f"{type(model).__name__} computes its attention by itself, in {names}", allowed, known)


def _refusal(what: str, allowed: str, known: bool = False) -> ValueError:
    instead = f"load it with {allowed} and call use_bias_terms(model)" if known else f"use {allowed}"
    return ValueError(
        f'attn_implementation: {what}, and does not call AttentionInterface, so that "{NAME}" cannot run it; '
        f"{instead}. If it is part of a model whose other parts can run, name those: "
        f'attn_implementation={{"text_config": "{NAME}"}}'
    )


def _dictionaries(model_type: type[PreTrainedModel]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield name and dictionary from attn_implementation to attention classes in the files of a model's classes."""
    files = {cls.__module__ for cls in model_type.__mro__ if issubclass(cls, PreTrainedModel)}
    for file in files & sys.modules.keys():
        for name, x in vars(sys.modules[file]).items():
            if isinstance(x, dict) and "eager" in x and all(isinstance(x[key], type) for key in x if key != NAME):
                yield name, x


def _is_attention(module_type: type[nn.Module]) -> bool:
    name = module_type.__name__
    named = ("Attention" in name or "Attn" in name) and "Deformable" not in name
    return named or issubclass(module_type, nn.MultiheadAttention)


@functools.cache
def _calls_interface(cls: Any) -> bool:
    """True if a method of the class, its own or inherited, names an AttentionInterface."""
    if cls is PreTrainedModel:  # names it to check attn_implementation
        return False
    for method in vars(cls).values():
        function = inspect.unwrap(method)
        if isinstance(function, FunctionType):
            values = map(function.__globals__.get, _names(function.__code__))
            if any(isinstance(x, AttentionInterface) for x in values):
                return True
    return any(_calls_interface(base) for base in cls.__bases__)


def _names(code: CodeType) -> Iterator[str]:
    """Yield the names of globals and attributes in a function and in its inner functions."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _check(kwargs: dict) -> None:
    for name, meaning in _UNSUPPORTED.items():
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"{name}: {meaning} is not implemented; use another attn_implementation")
    if kwargs.get("output_attentions"):
        _logger.warning_once(
            f'output_attentions: attn_implementation="{NAME}" never forms the weights and returns None in their place; '
            'use attn_implementation="eager" to get them'
        )


def _is_window(local_size: int, config: object) -> bool:
    """True if ``local_size`` is a sliding window: chunks pass their size as ``local_size`` too."""
    return local_size == getattr(config, "sliding_window", None) != getattr(config, "attention_chunk_size", None)
