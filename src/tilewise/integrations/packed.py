"""Padding-free batches of transformers: where sequences begin, from a model's keywords, masks and positions."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary
from transformers import masking_utils
from transformers.masking_utils import causal_mask_function
from transformers.utils.import_utils import is_tracing

from tilewise.masks.block_sparse import TileMask
from tilewise.operator.tools import exports_onnx
from tilewise.spec.seqlens import Lengths


class Sequences(NamedTuple):
    """The offsets of a packed batch's sequences, and the longest numbers of queries and keys."""

    lengths: Lengths
    longest: tuple[int, int]


def is_packed_form(mask: Tensor | None) -> bool:
    """True if the mask is a result of `packed_form`."""
    return mask is not None and mask.dtype == torch.int32 and mask.dim() < 4


def packed_form(mask_function: Callable, local_size: int | None) -> Tensor | None:
    """Return the mask of causal sequences, within a window or not, that positions tell apart; None for other patterns.

    int32 (L, S + 1) or, with a window, (W, L, S + 1): where S sequences begin and the last one ends. The L and W rows
    are one, expanded without memory: L is the longest sequence, W the window. transformers describes the pattern by
    nested functions, which are recognized by name; a pattern in a graph gives None. On a GPU this synchronizes the
    host, once for all layers."""
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
    offsets = _offsets(first.flatten())
    longest = int(offsets.diff().max())
    offsets = offsets.to(torch.int32)[None].expand(longest, -1)
    return offsets if local_size is None else offsets[None].expand(local_size, -1, -1)


def _offsets(first: Tensor) -> Tensor:
    """Return where sequences begin, and the end of the last, from a mask of their first tokens."""
    begins = first.nonzero().view(-1)
    return torch.cat([begins, begins.new_full((1,), first.numel())])


def _variables(function: Any, name: str) -> dict[str, Any]:
    """Return the closure variables of ``function`` if it is transformers' function of this name, else none."""
    if getattr(function, "__qualname__", None) != name or function.__module__ != masking_utils.__name__:
        return {}
    return dict(inspect.getclosurevars(function).nonlocals)


def sequences_of(mask: Tensor | None, kwargs: dict[str, Any]) -> Sequences | None:
    """Return a layer's sequences, by the keywords of flash attention, else by the mask; None if neither has them.

    Reading a maximum that is a tensor on a GPU synchronizes the host."""
    names = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
    cu_q, cu_k, max_q, max_k = (kwargs.get(name) for name in names)
    if cu_q is not None and cu_k is not None and max_q is not None and max_k is not None:
        return Sequences(Lengths(cu_q, cu_k), (int(max_q), int(max_k)))
    if mask is not None and is_packed_form(mask):
        offsets = mask[(0,) * (mask.dim() - 1)]
        return Sequences(Lengths(offsets, offsets), (mask.shape[-2], mask.shape[-2]))
    return None


def positions_of(
    module: nn.Module, mask: Tensor | None, kwargs: dict[str, Any], shape: tuple[int, int, int]
) -> Tensor | None:
    """Return the position_ids of a layer, (1, M), if they may tell sequences apart, by the rule of flash_attention_2.

    They may if the batch is one row, the keys are those of the queries, and the mask hides no padding; in a graph,
    where the mask is not read, it may. shape: (B, M, N)."""
    positions, (batch, M, N) = kwargs.get("position_ids"), shape
    if positions is None or batch != 1 or M == 1 or M != N or tuple(positions.shape) != (1, M):
        return None
    if getattr(module, "is_cross_attention", False) or "CrossAttention" in type(module).__name__:
        return None
    if mask is None or (mask.dim() < 4 and mask.shape[-1] == 1):
        return positions
    is_padding = mask.dtype == torch.bool and (mask.dim() < 4 or tuple(mask.shape[1:]) == (1, 1, N))
    return positions if is_padding and is_tracing(positions) else None


# Results of `sequences_of_positions` by tensor and version: all layers receive the same tensor.
_found: WeakIdKeyDictionary = WeakIdKeyDictionary()


def sequences_of_positions(positions: Tensor) -> Sequences | None:
    """Find the sequences of a row by its positions, (1, M): each begins at the smallest one. None: there is only one.

    On a GPU this synchronizes the host, once for all layers of a forward, and once more if there are several."""
    version = None if positions.is_inference() else positions._version
    known: tuple[int | None, Sequences | None] | None = _found.get(positions)
    if known is not None and known[0] == version is not None:
        return known[1]
    first = positions[0] == positions.amin()
    first[0] = True
    offsets, found = _offsets(first).to(torch.int32), None
    if offsets.shape[0] > 2:
        longest = int(offsets.diff().max())
        found = Sequences(Lengths(offsets, offsets), (longest, longest))
    _found[positions] = version, found
    return found


def documents_of_positions(positions: Tensor, padding: Tensor | None) -> Any:
    """Return the mask of these sequences for a graph, which cannot wait for their number: a TileMask or a Tensor.

    padding: (1, 1, 1, M), bool, True = a token; or None."""
    ids = (positions == positions.amin()).cumsum(-1)
    if padding is not None:
        ids = ids.masked_fill(~padding[0, 0], -1)
    if exports_onnx() or torch.jit.is_tracing():  # neither supports a TileMask
        return ids[:, None, :, None] == ids[:, None, None, :]
    return TileMask.documents(ids)


def visible(lengths: Lengths, shape: tuple[int, int, int], causal: bool, window: int | None) -> Tensor:
    """Return the mask (B, 1, M, N) of sequences end to end in B rows, for calls with a bias or another mask."""
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
    """Return each token's sequence, and its position relative to the end of that sequence, both (B, length)."""
    ends, at = offsets[1:].contiguous(), torch.arange(B * length, device=offsets.device)
    sequence = torch.searchsorted(ends, at.to(ends.dtype), right=True)
    end = ends[sequence.clamp(max=ends.shape[0] - 1)]
    return sequence.view(B, length), (at - end).view(B, length)
