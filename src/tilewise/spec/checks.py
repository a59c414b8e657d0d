"""Checks of shapes, dtypes and devices. Errors name the argument, what was passed and what is allowed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tilewise.spec.operands import Sizes
from tilewise.spec.score import Distances
from tilewise.spec.seqlens import Lengths

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


# Hint for tensors that seem to be (batch, length, heads, head_dim).
HEADS_FIRST = "; tensors (batch, length, heads, head_dim) are passed as q.transpose(1, 2)"


def check_qkv(q: Tensor, k: Tensor, v: Tensor) -> None:
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise ValueError(f"{name}: expected 4 dimensions (batch, heads, length, head_dim), got shape {_shape(x)}")
        if x.dtype not in DTYPES:
            raise TypeError(f"{name}: dtype must be float16, bfloat16, float32 or float64, got {x.dtype}")
        if x.dtype != q.dtype:
            raise TypeError(f"{name}: dtype must equal q's, got {x.dtype} with q {q.dtype}")
        if x.device != q.device:
            raise ValueError(f"{name}: must be on q's device {q.device}, got {x.device}")
        if x.shape[0] != q.shape[0]:
            raise ValueError(f"{name}: batch size must equal q's {q.shape[0]}, got {x.shape[0]} (shape {_shape(x)})")
    if k.shape[3] != q.shape[3]:
        raise ValueError(f"k: head dimension must equal q's {q.shape[3]}, got {k.shape[3]}")
    for name, n, size in (("v: number of heads", 1, v), ("v: length", 2, v)):
        if size.shape[n] != k.shape[n]:
            raise ValueError(f"{name} must equal k's {k.shape[n]}, got {size.shape[n]}")
    H, Hkv = q.shape[1], k.shape[1]
    if Hkv != H and (Hkv == 0 or H % Hkv != 0):
        hint = HEADS_FIRST if q.shape[2] == k.shape[2] < min(H, Hkv) else ""
        raise ValueError(f"k, v: the {Hkv} key/value heads must divide the {H} query heads{hint}")
    for name, x in (("q, k", q), ("v", v)):
        check_head_dim(name, x.shape[3])


def check_head_dim(name: str, size: int) -> None:
    if size < 1:
        raise ValueError(f"{name}: head dimension must be 1 or more, got {size}")


def _check_operand(name: str, x: Tensor, sizes: Sizes, device: torch.device) -> None:
    if name == "mask" and x.dtype != torch.bool:
        raise TypeError(f"mask: dtype must be bool (True = attend), got {x.dtype}; an additive mask is passed as bias=")
    if name == "bias" and x.dtype not in DTYPES:
        raise TypeError(
            f"bias: dtype must be float16, bfloat16, float32 or float64, got {x.dtype}"
            + ("; a bool mask is passed as mask=" if x.dtype == torch.bool else "")
        )
    if x.device != device:
        raise ValueError(f"{name}: must be on q's device {device}, got {x.device}")
    if x.dim() > 4:
        raise ValueError(f"{name}: expected at most 4 dimensions, got shape {_shape(x)}")
    check_broadcast(name, x, (sizes.B,), sizes)


def check_repeated(x: Tensor, sizes: Sizes, device: torch.device) -> None:
    """Raise unless a mask (1, n, H|Hkv|1, M|1, N|1) repeats along the batch: batch element b has mask b % n."""
    _check_operand("mask", x[0, :1], sizes, device)
    if x.shape[0] != 1 or x.shape[1] == 0 or sizes.B % x.shape[1] != 0:
        raise ValueError(f"mask: shape {_shape(x)} does not repeat along a batch of {sizes.B}")


def check_in_runs(x: Tensor, sizes: Sizes, device: torch.device) -> None:
    """Raise unless a bias is (n, 1, H|Hkv|1, M, N), for n runs of batch elements: b has bias b // (B // n)."""
    if x.shape[1] != 1 or x.shape[0] == 0 or sizes.B % x.shape[0] != 0 or tuple(x.shape[3:]) != (sizes.M, sizes.N):
        raise ValueError(f"bias: shape {_shape(x)} does not divide a batch of {sizes.B} into runs")
    _check_operand("bias", x[:1, 0], sizes, device)


def check_broadcast(name: str, x: Tensor, lead: tuple[int, ...], sizes: Sizes) -> None:
    """Raise unless a bias or mask broadcasts to (*lead, H|Hkv, M, N)."""
    if not _broadcasts(x, lead, sizes):
        lengths = {"M": sizes.M, "N": sizes.N}
        hint = missing_axes(name, _shape(x), lead[0], lengths) if len(lead) == 1 else ""
        if len(lead) == 1 and not hint:
            hint = _heads_last(_shape(x), sizes.H, sizes.M)
        raise ValueError(f"{name}: shape {_shape(x)} does not broadcast to {_words(_axes(lead, sizes))}{hint}")


def check_sink(
    x: Tensor, sizes: Sizes, device: torch.device, of: str = "q", lead: tuple[int, ...] | None = None
) -> None:
    """Raise unless the sink is (H|1,) or broadcasts to (*lead, H, M); lead is (B,) by default."""
    if x.dtype not in DTYPES:
        raise TypeError(f"sink: dtype must be float16, bfloat16, float32 or float64, got {x.dtype}")
    if x.device != device:
        raise ValueError(f"sink: must be on {of}'s device {device}, got {x.device}")
    lead = (sizes.B,) if lead is None else lead
    if not _is_sink_of(x, lead, sizes):
        rows = _words([(n,) for n in (*lead, sizes.H, sizes.M)])
        raise ValueError(
            f"sink: expected one logit for each head, ({sizes.H}|1,), or for each query, {rows}, got shape {_shape(x)}"
        )


def check_seed(name: str, x: Tensor, q: Tensor) -> None:
    if x.dtype != torch.int64 or x.shape != (2,):
        raise ValueError(f"{name}: expected (seed, offset), int64 of shape (2,), got {x.dtype} of shape {_shape(x)}")
    if x.device != q.device:
        raise ValueError(f"{name}: must be on q's device {q.device}, got {x.device}")


def check_lengths(lengths: Lengths, q: Tensor) -> int:
    """Check the shapes, dtypes and devices of the lengths and return the number of sequences."""
    B = 0
    for name, x in zip(("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "offsets"), lengths, strict=True):
        if x is None:
            if name in ("cu_seqlens_q", "cu_seqlens_k"):
                raise ValueError(f"{name}: a packed batch needs it")
            continue
        if x.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{name}: dtype must be int32 or int64, got {x.dtype}")
        if x.device != q.device:
            raise ValueError(f"{name}: must be on q's device {q.device}, got {x.device}")
        if name == "cu_seqlens_q" and (x.dim() != 1 or x.shape[0] == 0):
            raise ValueError(f"{name}: expected (B + 1,), where each sequence begins and the end, got {_shape(x)}")
        B = x.shape[0] - 1 if name == "cu_seqlens_q" else B
        expected = (B,) if name == "seqused_k" else (B + 1,)
        if _shape(x) != expected:
            raise ValueError(f"{name}: expected shape {expected} for {B} sequences, got {_shape(x)}")
    if q.shape[0] != 1:
        raise ValueError(f"q: of a packed batch expected shape (1, H, queries, D), got {_shape(q)}")
    return B


def _check_distances(name: str, distances: Distances, entries: Tensor, shift: Tensor | None, B: int) -> None:
    if distances.count != entries.shape[-1]:
        raise ValueError(f"bias: values per {name}: {distances.count} distances with {entries.shape[-1]} entries")
    if shift is not None and (shift.dim() != 1 or shift.shape[0] not in (1, B)):
        raise ValueError(f"bias: values per {name}: expected a shift ({B}|1,), got shape {_shape(shift)}")


def _axes(lead: tuple[int, ...], sizes: Sizes) -> list[tuple[int, ...]]:
    """Return, for each axis of a bias or mask, the sizes other than 1 that it may have."""
    _, H, Hkv, M, N = sizes
    return [*((n,) for n in lead), (H,) if Hkv == H else (H, Hkv), (M,), (N,)]


def _broadcasts(x: Tensor, lead: tuple[int, ...], sizes: Sizes) -> bool:
    full = _axes(lead, sizes)
    return x.dim() <= len(full) and broadcasts(x.shape, full[len(full) - x.dim() :])


def _is_sink_of(x: Tensor, lead: tuple[int, ...], sizes: Sizes) -> bool:
    full = (sizes.H,) if x.dim() == 1 else (*lead, sizes.H, sizes.M)
    return x.dim() == len(full) and broadcasts(x.shape, full)


def broadcasts(shape: Sequence[int], full: Sequence[int | tuple[int, ...]]) -> bool:
    """True if each size of ``shape`` is 1 or equals that of ``full`` (one of them where it is a tuple)."""
    return all(
        n == 1 or (n in size if isinstance(size, tuple) else n == size) for n, size in zip(shape, full, strict=True)
    )


def _words(full: Sequence[tuple[int, ...]]) -> str:
    return f"({', '.join('|'.join(str(n) for n in (*sizes, 1)) for sizes in full)})"


def missing_axes(name: str, shape: tuple[int, ...], batch: int, lengths: dict[str, int]) -> str:
    """Return a hint for a mask that lacks an axis; lengths: {"M": queries, "N": keys}, by letter."""
    (m, M), (n, N) = lengths.items()
    if shape == (batch, N):
        return f"; a padding mask (B, {n}) is passed as {name}[:, None, None, :]"
    if len(shape) == 3 and shape[0] == batch and shape[1] in (1, M) and shape[2] in (1, N):
        return f"; a mask (B, {m}, {n}) is passed as {name}[:, None]"
    return ""


def _heads_last(shape: tuple[int, ...], heads: int, queries: int) -> str:
    """Return a hint for a bias or mask that would fit if heads and length of q were swapped."""
    swapped = heads > queries and len(shape) >= 3 and shape[-3] in (1, queries) and shape[-2] == heads
    return HEADS_FIRST if swapped else ""


def four_dims(name: str, x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return ``x`` with leading dimensions of size 1, up to four; an error shows the original shape."""
    if x.dim() == 4:
        return x
    if q.dim() == k.dim() == 4 and not _broadcasts(x, q.shape[:1], sizes := _sizes(q, k)):
        check_qkv(q, k, v)
        _check_operand(name, x, sizes, q.device)
    return x[(None,) * (4 - x.dim())]


def sink_of_rows(sink: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return a sink (H,) as (1, H, 1), and any other sink unchanged; an error shows the original shape."""
    if q.dim() == k.dim() == 4 and not _is_sink_of(sink, q.shape[:1], sizes := _sizes(q, k)):
        check_qkv(q, k, v)
        check_sink(sink, sizes, q.device)
    return sink[None, :, None] if sink.dim() == 1 else sink


def _sizes(q: Tensor, k: Tensor) -> Sizes:
    return Sizes(q.shape[0], q.shape[1], k.shape[1], q.shape[2], k.shape[2])


def _shape(x: Tensor) -> tuple[int, ...]:
    return tuple(x.shape)


def check_flag(name: str, flag: bool, allowed: str = "a bool") -> None:
    """Raise unless the flag is a bool: a string such as "top-left" would count as True."""
    if not isinstance(flag, (bool, torch.SymBool)):
        raise TypeError(f"{name}: expected {allowed}, got {flag!r}")
