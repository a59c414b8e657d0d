"""Hints for keywords of other attention functions: the names that tilewise uses."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

_BIAS_OR_MASK = "mask= (bool, True = attend) or bias= (float, added to the scores)"
_SINK = "sink=, (H,) or (B, H, M), which requires grad like any tensor"
_WINDOW = "window=(left, right), with None for no limit"
_HINTS = {
    "attn_mask": _BIAS_OR_MASK,
    "attention_mask": _BIAS_OR_MASK,
    "attn_bias": _BIAS_OR_MASK,
    "score_mod": f"{_BIAS_OR_MASK}; tilewise.integrations.flex.flex_attention takes a score_mod",
    "block_mask": "mask=, which takes a BlockMask as it is, and a tilewise.TileMask",
    "key_padding_mask": "mask=tokens[:, None, None, :], where tokens (B, N) is True at keys that are no padding",
    "is_causal": "causal=, aligned bottom-right; tilewise.scaled_dot_product_attention(is_causal=) is aligned top-left",
    "softmax_scale": "scale=",
    "sm_scale": "scale=",
    "scaling": "scale=",
    "dropout": "dropout_p=",
    "attention_dropout": "dropout_p=",
    "seed": "dropout_seed=(seed, offset)",
    "window_size": _WINDOW,
    "sliding_window": _WINDOW,
    "alibi_slopes": "bias=tilewise.bias.alibi(slopes)",
    "logits_soft_cap": "softcap=",
    "soft_cap": "softcap=",
    "return_softmax_lse": "return_lse=",
    "return_attn_probs": "return_lse=; the probabilities are never formed",
    "need_weights": "return_lse=; the probabilities are never formed",
    "s_aux": _SINK,
    "learnable_sink": _SINK,
    "sinks": _SINK,
    "enable_gqa": "k and v with fewer heads as they are",
    "query": "q=",
    "key": "k=",
    "value": "v=",
}  # fmt: skip
_ATTN_MASK = "attn_mask= (bool, True = attend, or float, added to the scores)"
_OF_ATTENTION = "no such thing; tilewise.attention does, as "
_SDPA_HINTS = {
    "mask": _ATTN_MASK,
    "attention_mask": _ATTN_MASK,
    "bias": _ATTN_MASK,
    "attn_bias": _ATTN_MASK,
    "causal": "is_causal=, aligned top-left; tilewise.attention(causal=) is aligned bottom-right",
    "softmax_scale": "scale=",
    "sm_scale": "scale=",
    "scaling": "scale=",
    "dropout": "dropout_p=",
    "attention_dropout": "dropout_p=",
    "q": "query=",
    "k": "key=",
    "v": "value=",
    "sink": f"{_OF_ATTENTION}{_SINK}",
    "softcap": f"{_OF_ATTENTION}softcap=",
    "return_lse": f"{_OF_ATTENTION}return_lse=",
    "window": f"{_OF_ATTENTION}{_WINDOW}",
    "window_size": f"{_OF_ATTENTION}{_WINDOW}",
    "sliding_window": f"{_OF_ATTENTION}{_WINDOW}",
}  # fmt: skip
_BIAS = "bias= (float, added to the scores, heads before the lengths)"
_FLASH_HINTS = {
    "attn_mask": _BIAS,
    "attention_mask": _BIAS,
    "attn_bias": _BIAS,
    "mask": f"{_BIAS}, with -inf where nothing is to be seen",
    "is_causal": "causal=, aligned bottom-right",
    "scale": "softmax_scale=",
    "sm_scale": "softmax_scale=",
    "scaling": "softmax_scale=",
    "dropout": "dropout_p=",
    "attention_dropout": "dropout_p=",
    "window": "window_size=(left, right), with -1 for no limit",
    "sliding_window": "window_size=(left, right), with -1 for no limit",
    "return_lse": "return_attn_probs=, which returns the lse",
    "return_softmax_lse": "return_attn_probs=, which returns the lse",
    "query": "q=",
    "key": "k=",
    "value": "v=",
    **dict.fromkeys(("s_aux", "learnable_sink", "sink", "sinks"), f"{_OF_ATTENTION}{_SINK}"),
}  # fmt: skip

F = TypeVar("F", bound=Callable)


def unexpected(function: str, names: Iterable[str]) -> TypeError:
    """Return Python's error for an unknown keyword, with a hint for the names of other libraries."""
    name = next(iter(names))
    hints, at = _HINTS, "tilewise."
    if function == "scaled_dot_product_attention":
        hints = _SDPA_HINTS
    elif function.startswith("flash_attn"):
        hints, at = _FLASH_HINTS, ""
    hint = f"; {at}{function} takes {hints[name]}" if name in hints else ""
    return TypeError(f"{function}() got an unexpected keyword argument {name!r}{hint}")


def too_many(function: str, taken: int, more: int) -> TypeError:
    """Return Python's error for too many positional arguments, with a hint to pass bias and mask by name."""
    return TypeError(
        f"{function}() takes {taken} positional arguments but {taken + more} were given; "
        f"tilewise.{function} takes the others by name: {_BIAS_OR_MASK}"
    )


def named_only(function: F, more: Mapping[str, Any] = MappingProxyType({}), after: str = "") -> F:
    """Set the signature of ``function`` to its named parameters and return it.

    ``**unknown``, which `unexpected` rejects, and ``*others`` are left out; parameters before ``*others`` are required.
    ``more`` (name -> a parameter, or its type, with default None) become keyword-only parameters after the parameter
    ``after``.
    """
    signature = inspect.signature(function)
    named: list[inspect.Parameter] = []
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            named = [x.replace(default=x.empty) for x in named]
        elif parameter.kind is not parameter.VAR_KEYWORD:
            named.append(parameter)
        if parameter.name == after:
            kind = inspect.Parameter.KEYWORD_ONLY
            for name, x in more.items():
                whole = isinstance(x, inspect.Parameter)
                named.append(x if whole else inspect.Parameter(name, kind, default=None, annotation=x))
    function.__signature__ = signature.replace(parameters=named)  # type: ignore[attr-defined]
    return function
