"""Batches without padding of transformers: where their sequences begin, as the models and the masks say it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import masking_utils
from transformers.masking_utils import causal_mask_function
from transformers.utils.import_utils import is_tracing

from tilewise.score.lengths import Lengths


class Sequences(NamedTuple):
    """Where those of a batch lie in its rows, end to end, and the longest of them."""

    lengths: Lengths
    longest: tuple[int, int]


def is_packed_form(mask: Tensor | None) -> bool:
    """Whether it is an answer of `packed_form`."""
    return mask is not None and mask.dtype == torch.int32 and mask.dim() < 4


def packed_form(mask_function: Callable, local_size: int | None) -> Tensor | None:
    """The mask of sequences that positions tell apart, which are causal or causal within a window; else None.

    int32 (L, S + 1) or, with a window, (W, L, S + 1): where S sequences begin and the last one ends. The L and W rows
    are one, expanded without memory: L is the longest sequence, W the window. transformers describes the pattern by
    nested functions, which are recognized by their names; another pattern, or one in a graph, gives None. On a GPU the
    host waits here, once for all layers.
    """
    parts = _variables(mask_function, "and_masks.<locals>.and_mask").get("mask_functions", ())
    if len(parts) != 2:
        return None
    number = _variables(parts[0], "packed_sequence_mask_function.<locals>.inner_mask").get("packed_sequence_mask")
    pattern = _variables(parts[1], "remap_positions_for_packed_sequence.<locals>.inner_mask").get("mask_function")
    if number is None or pattern is None or is_tracing(number):
        return None
    if local_size is None:
        if pattern is not causal_mask_function:
            return None
    else:
        parts = _variables(pattern, "and_masks.<locals>.and_mask").get("mask_functions", ())
        if len(parts) != 2 or parts[1] is not causal_mask_function:
            return None
        window = _variables(parts[0], "sliding_window_overlay.<locals>.inner_mask").get("sliding_window")
        if window != local_size:
            return None
    first = torch.ones_like(number, dtype=torch.bool)
    first[:, 1:] = number.diff() != 0
    begins = first.flatten().nonzero().view(-1)
    offsets = torch.cat([begins, begins.new_full((1,), number.numel())])
    longest = int(offsets.diff().max())
    offsets = offsets.to(torch.int32)[None].expand(longest, -1)
    return offsets if local_size is None else offsets[None].expand(local_size, -1, -1)


def _variables(function: Any, name: str) -> dict[str, Any]:
    """Those of the outer function that ``function`` uses, if it is the one of this name in transformers."""
    if getattr(function, "__qualname__", None) != name or function.__module__ != masking_utils.__name__:
        return {}
    return dict(inspect.getclosurevars(function).nonlocals)


def sequences_of(mask: Tensor | None, kwargs: dict[str, Any]) -> Sequences | None:
    """What a layer is told: the keywords of flash attention count before the mask; None: nothing of sequences.

    A maximum that is a tensor is read, for which the host waits on a GPU.
    """
    names = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
    cu_q, cu_k, max_q, max_k = (kwargs.get(name) for name in names)
    if cu_q is not None and cu_k is not None and max_q is not None and max_k is not None:
        return Sequences(Lengths(cu_q, cu_k), (int(max_q), int(max_k)))
    if mask is not None and is_packed_form(mask):
        offsets = mask[(0,) * (mask.dim() - 1)]
        return Sequences(Lengths(offsets, offsets), (mask.shape[-2], mask.shape[-2]))
    return None


def visible(lengths: Lengths, shape: tuple[int, int, int], causal: bool, window: int | None) -> Tensor:
    """The mask (B, 1, M, N) of sequences end to end in B rows: for what has numbers for queries and keys of a row."""
    B, M, N = shape
    assert lengths.cu_q is not None
    assert lengths.cu_k is not None
    (query, from_last), (key, key_from_last) = _places(lengths.cu_q, B, M), _places(lengths.cu_k, B, N)
    seen = query[:, :, None] == key[:, None, :]
    distance = key_from_last[:, None, :] - from_last[:, :, None]
    if causal:
        seen = seen & (distance <= 0)
    if window is not None:
        seen = seen & (distance > -window)
    return seen[:, None]


def _places(offsets: Tensor, B: int, length: int) -> tuple[Tensor, Tensor]:
    """Of each row of a batch its sequence, and its position counted from that one's end."""
    ends, at = offsets[1:].contiguous(), torch.arange(B * length, device=offsets.device)
    sequence = torch.searchsorted(ends, at.to(ends.dtype), right=True)
    end = ends[sequence.clamp(max=ends.shape[0] - 1)]
    return sequence.view(B, length), (at - end).view(B, length)
