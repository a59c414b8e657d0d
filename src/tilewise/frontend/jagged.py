"""Jagged nested tensors (``layout=torch.jagged``) as packed batches of their values and offsets."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from tilewise.frontend.varlen import packed_attention
from tilewise.operator.autograd import Found
from tilewise.spec.checks import DTYPES, check_head_dim
from tilewise.spec.seqlens import Lengths
from tilewise.spec.tensors import PLAIN


def are_jagged(*tensors: object) -> bool:
    """True if all are jagged nested tensors. A mix is rejected when the call is read."""
    return all(
        type(x) not in PLAIN and isinstance(x, Tensor) and x.is_nested and x.layout is torch.jagged for x in tensors
    )


def jagged_attention(
    q: Any,
    k: Any,
    v: Any,
    *,
    names: tuple[str, str, str] = ("q", "k", "v"),
    equal_lengths: str | None = None,
    **options: Any,
) -> Found:
    """Return `packed_attention` of jagged tensors (B, H, j, D), where j is the ragged dimension. Nothing is copied.

    On a GPU the host synchronizes once for each tensor that does not know its ``max_seqlen``, and to compare the
    lengths of tensors with different j.

    Args:
        q, k, v: jagged (B, H, j, D), (B, Hkv, l, D) and (B, Hkv, l, Dv).
        names: the caller's names for them.
        equal_lengths: if not None, queries and keys must have equal lengths; the text of the error otherwise.
        options: those of `packed_attention`.

    Returns:
        o, jagged (B, H, j, Dv), with q's j; lse, jagged (B, H, j), and statistics, jagged (B, H, j, count), or None.

    Raises:
        ValueError, TypeError: an argument is not allowed; the message names it, the value received and what is allowed.
        NotImplementedError: jagged tensors with holes; under torch.compile, different j that would have to be compared.
    """
    values, lengths, longest = packed_of(q, k, v, names, equal_lengths)
    o, *others = packed_attention(*values, lengths, longest, **options)
    lse, statistics = (None if x is None else _as(q, x) for x in others)
    return _as(q, o.transpose(0, 1)), lse, statistics


class PackedOf(NamedTuple):
    """Jagged tensors as a packed batch: views of q, k and v, each (total, heads, head_dim)."""

    values: tuple[Tensor, Tensor, Tensor]
    lengths: Lengths
    longest: tuple[int, int]


def packed_of(
    q: Any, k: Any, v: Any, names: tuple[str, str, str] = ("q", "k", "v"), equal_lengths: str | None = None
) -> PackedOf:
    """Return jagged q, k and v as a packed batch; arguments and errors as for `jagged_attention`."""
    for name, x in zip(names, (q, k, v), strict=True):
        _check(name, x, names[0], q)
    if not _have_equal_lengths(k, v, names[2]):
        raise ValueError(f"{names[2]}: its sequences must be as long as {names[1]}'s")
    if k.shape[3] != q.shape[3]:
        raise ValueError(f"{names[1]}: head dimension must equal {names[0]}'s {q.shape[3]}, got {k.shape[3]}")
    heads, kv_heads = q.shape[1], k.shape[1]
    if v.shape[1] != kv_heads or (kv_heads != heads and (kv_heads == 0 or heads % kv_heads != 0)):
        raise ValueError(
            f"{names[1]}, {names[2]}: expected equally many heads, a divisor of {names[0]}'s {q.shape[1]}, "
            f"got {k.shape[1]} and {v.shape[1]}"
        )
    if equal_lengths is not None and not _have_equal_lengths(q, k, names[1]):
        raise ValueError(equal_lengths)
    return PackedOf(
        (q.values().transpose(0, 1), k.values().transpose(0, 1), v.values().transpose(0, 1)),
        Lengths(q.offsets(), k.offsets()),
        (q._get_max_seqlen(), k._get_max_seqlen()),
    )


def _as(q: Any, values: Tensor) -> Tensor:
    """Return ``values`` (H, total_q, ...) with q's ragged structure."""
    return torch.nested.nested_tensor_from_jagged(
        values, q.offsets(), jagged_dim=2, min_seqlen=q._maybe_min_seqlen, max_seqlen=q._maybe_max_seqlen
    )


def _check(name: str, x: Any, first: str, q: Any) -> None:
    if x.dim() != 4 or x._ragged_idx != 2:
        ragged = x._ragged_idx
        shape = ", ".join("j" if i == ragged else str(x._size[i]) for i in range(x.dim()))
        hint = "; transpose(1, 2) makes it so" if x.dim() == 4 and ragged == 1 else ""
        raise ValueError(f"{name}: expected a jagged tensor (batch, heads, j, head_dim), got ({shape}){hint}")
    if x.lengths() is not None:
        raise NotImplementedError(f"{name}: a jagged tensor with holes (lengths()); {name}.contiguous() has none")
    if x.dtype not in DTYPES:
        raise TypeError(f"{name}: dtype must be float16, bfloat16, float32 or float64, got {x.dtype}")
    if x.dtype != q.dtype and not torch.is_autocast_enabled(x.device.type):
        raise TypeError(f"{name}: dtype must equal {first}'s {q.dtype}, got {x.dtype}")
    if x.device != q.device:
        raise ValueError(f"{name}: must be on {first}'s device {q.device}, got {x.device}")
    if x.shape[0] != q.shape[0]:
        raise ValueError(f"{name}: batch size must equal {first}'s {q.shape[0]}, got {x.shape[0]}")
    check_head_dim(name, x.shape[3])


def _have_equal_lengths(a: Any, b: Any, name: str) -> bool:
    """True if a and b, of equal batch size, have equal lengths. Equal ragged sizes are not compared on the device."""
    if a.shape[2] == b.shape[2]:
        return True
    if is_compiling():
        raise NotImplementedError(
            f"{name}: under torch.compile expected the same ragged size as the others have; make them of one offsets"
        )
    return bool((a.offsets() == b.offsets()).all())
