"""Biases of packed batches: packed tensors, a matrix per sequence, and positions within each sequence."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from tilewise.bias.canonical import Slots, add, put, toeplitz_sum, with_dense
from tilewise.bias.canonical import place_of as padded_place
from tilewise.bias.low_rank import LowRankBias
from tilewise.bias.relative import RelativeBias
from tilewise.bias.terms import (
    FLOATING,
    Sizes,
    Term,
    check_device,
    check_float,
    check_starts,
    name_of,
    pytree_node,
    shape_of,
    summary,
)
from tilewise.bias.toeplitz import Alibi, T5Bias
from tilewise.spec.seqlens import Lengths
from tilewise.spec.tensors import check_tensor


@pytree_node
@dataclass(frozen=True, eq=False, repr=False)
class RaggedBias(Term):
    """A matrix per sequence of a packed batch, without padding, as for graphs and pair representations.

    Args:
        values: (H|Hkv|1, pairs), float; the m × n matrix of sequence b, with m queries and n keys, begins at
            ``offsets[b]``, row-major. Its gradient has its shape and dtype.
        offsets: (B + 1,), int32 or int64, on the values' device, never read back: the beginning of each matrix, and the
            end.

    Raises:
        ValueError, TypeError: naming the argument, what was passed and what is allowed.
    """

    kind: ClassVar[str] = "matrix"

    values: Tensor
    offsets: Tensor

    def __post_init__(self) -> None:
        check_float(name_of(self, "values"), self.values, (2,), "(H|Hkv|1, pairs)")
        check_tensor(name_of(self, "offsets"), self.offsets)
        if self.offsets.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"RaggedBias.offsets: dtype must be int32 or int64, got {self.offsets.dtype}")
        if self.offsets.dim() != 1 or self.offsets.shape[0] == 0:
            raise ValueError(f"RaggedBias.offsets: expected (B + 1,), got shape {shape_of(self.offsets)}")
        check_device(self, None)

    def check(self, sizes: Sizes, device: torch.device | None = None) -> None:
        raise ValueError(
            "RaggedBias: belongs to a packed batch, tilewise.varlen_attention; a dense call takes a tensor"
        )

    def check_packed(self, sizes: Sizes, device: torch.device) -> None:
        if self.values.shape[0] not in (1, sizes.Hkv, sizes.H):
            raise ValueError(
                f"RaggedBias.values: shape {shape_of(self.values)} is not ({sizes.H}|{sizes.Hkv}|1, pairs)"
            )
        if self.offsets.shape[0] != sizes.B + 1:
            raise ValueError(
                f"RaggedBias.offsets: expected shape ({sizes.B + 1},) for {sizes.B} sequences, "
                f"got {shape_of(self.offsets)}"
            )
        check_device(self, device)

    def __repr__(self) -> str:
        return f"RaggedBias({summary(self.values)}, offsets {shape_of(self.offsets)})"


class PackedSlots(NamedTuple):
    """Bias components of a packed batch, the names of the packed ones, and the offsets of a ragged one."""

    slots: Slots
    forms: tuple[str, ...] = ()
    pairs: Tensor | None = None


def packed_slots(
    bias: Any, sizes: Sizes, totals: tuple[int, int], lengths: Lengths, device: torch.device
) -> PackedSlots:
    """Like `canonical`, but for a packed batch of ``totals`` queries and keys, at most ``sizes`` per sequence.

    A tensor of four dimensions is padded to ``sizes``, one with fewer is packed. Positions count within each sequence.

    Raises:
        ValueError, TypeError: naming the argument, what was passed and what is allowed; two terms for one component
            that cannot be added here, such as a padded and a packed tensor.
    """
    found: dict[str, Any] = {}
    forms: list[str] = []
    toeplitz: list[RelativeBias | T5Bias | Alibi] = []
    pairs = None
    for part in bias if isinstance(bias, (tuple, list)) else (bias,):
        if isinstance(part, RaggedBias):
            part.check_packed(sizes, device)
            put(found, "matrix", part.values[None, :, None])
            forms, pairs = [*forms, "ragged"], part.offsets
        elif isinstance(part, (T5Bias, Alibi)) or (isinstance(part, RelativeBias) and part.kind == "toeplitz"):
            part.check(sizes, device)
            toeplitz.append(part)
        elif isinstance(part, RelativeBias):
            put(found, part.kind, _relative(part, sizes, totals, lengths, device))
            if part.query_start is None and not isinstance(part.key_start, Tensor) and part.key_start == 0:
                forms.append(f"{part.kind}_from_end")
        elif isinstance(part, LowRankBias):
            part.check(sizes._replace(B=1, M=totals[0], N=totals[1]), device)
            put(found, "low_rank", part)
        elif not isinstance(part, Tensor):
            raise TypeError(f"bias: expected tensors and terms of tilewise.bias, got {type(part).__name__}")
        elif part.dim() == 4:
            place = padded_place(part, found, sizes, device)
            is_packed = place in forms or (place == "matrix" and "ragged" in forms)
            (put if is_packed else add)(found, place, part)
        else:
            place, vector = _vector(part, sizes, totals, device)
            (add if place in forms else put)(found, place, vector)
            forms += [] if place in forms else [place]
    if toeplitz:
        found["toeplitz"], form = _toeplitz(toeplitz, sizes)
        forms += form
    return PackedSlots(Slots(**found), tuple(forms), pairs)


def packed_dense(found: PackedSlots, low_rank: LowRankBias, sizes: Sizes, lengths: Lengths) -> PackedSlots:
    """Like `canonical.with_dense`, but for a packed batch: the matrix is padded to the longest sequences."""
    assert lengths.cu_q is not None
    assert lengths.cu_k is not None
    i, j = (torch.arange(n, device=low_rank.u.device) for n in (sizes.M, sizes.N))
    rows, cols = lengths.cu_q[:-1, None] + i, lengths.cu_k[:-1, None] + j
    padded = LowRankBias(_padded(low_rank.u, rows), _padded(low_rank.w, cols))
    matrix = found.slots.matrix
    if found.pairs is not None and matrix is not None:
        keys = lengths.used_k if lengths.used_k is not None else lengths.cu_k.diff()
        at = found.pairs[:-1, None, None] + i[:, None] * keys[:, None, None] + j
        matrix = _padded(matrix[:, :, 0], at.flatten(1)).unflatten(2, (sizes.M, sizes.N))
    slots = found.slots._replace(matrix=with_dense(padded, matrix, sizes), low_rank=None)
    return PackedSlots(slots, tuple(form for form in found.forms if form != "ragged"))


def _padded(x: Tensor, at: Tensor) -> Tensor:
    """Return x[:, :, at], (B, H|1, n, ...), of x (1, H|1, total, ...) and indices (B, n); 0 past the end."""
    last = x.shape[2]
    x = torch.cat([x, x.new_zeros(1).expand(*x.shape[:2], 1, *x.shape[3:])], 2)
    return x[0][:, at.clamp(0, last)].transpose(0, 1)


def _vector(x: Tensor, sizes: Sizes, totals: tuple[int, int], device: torch.device) -> tuple[str, Tensor]:
    """Return component and tensor for one number per key, (1|H, total_k), or per query, (1|H, total_q, 1)."""
    check_tensor("bias", x)
    if x.dtype not in FLOATING:
        raise TypeError(f"bias: dtype must be float16, bfloat16, float32 or float64, got {x.dtype}")
    if x.device != device:
        raise ValueError(f"bias: must be on {device}, got {x.device}")
    heads = (1, sizes.Hkv, sizes.H)
    full = x if x.dim() == 3 else x.unsqueeze(-2) if x.dim() == 2 else x[None, None] if x.dim() == 1 else None
    if full is not None and full.shape[0] in heads:
        if full.shape[1:] == (1, totals[1]):
            return "cols", full[None]
        if full.shape[1:] == (totals[0], 1):
            return "rows", full[None]
    letters = "|".join(str(n) for n in dict.fromkeys(reversed(heads)))
    raise ValueError(
        f"bias: shape {shape_of(x)} is neither packed, along the keys ({letters}, {totals[1]}) or the queries "
        f"({letters}, {totals[0]}, 1), nor padded, ({sizes.B}|1, {letters}, {sizes.M}|1, {sizes.N}|1)"
    )


def _relative(part: RelativeBias, sizes: Sizes, totals: tuple[int, int], lengths: Lengths, device: torch.device) -> Any:
    """Return the relative bias, values (total, H|Hkv|1, R) as (1, H|Hkv|1, total, R), with a shift per sequence."""
    if part.values.dim() == 3:
        letters, total = ("total_q", totals[0]) if part.on == "query" else ("total_k", totals[1])
        rows, heads, R = part.values.shape
        if rows != total or heads not in (1, sizes.Hkv, sizes.H):
            allowed = "|".join(str(n) for n in dict.fromkeys((sizes.H, sizes.Hkv, 1)))
            raise ValueError(
                f"RelativeBias.values: shape {shape_of(part.values)} is not packed, ({letters}, H|Hkv|1, R) = "
                f"({total}, {allowed}, {R})"
            )
        part = replace(part, values=part.values.transpose(0, 1)[None])
    start = part.query_start
    whole = replace(part, query_start=0 if isinstance(start, Tensor) else start, key_start=0)
    whole.check(sizes._replace(B=1, M=totals[0], N=totals[1]), device)
    check_starts(part, sizes.B)
    check_device(part, device)
    if start is None:
        part = replace(part, query_start=_diagonals(lengths))
    return part.relative(sizes.M, sizes.N, on=part.on)


def _diagonals(lengths: Lengths) -> Tensor:
    """Return N - M of each sequence, (B,) int64."""
    assert lengths.cu_q is not None
    assert lengths.cu_k is not None
    if lengths.cu_q is lengths.cu_k and lengths.used_k is None:  # saves four small kernels
        return torch.zeros_like(lengths.cu_q[1:], dtype=torch.int64)
    keys = lengths.cu_k.diff() if lengths.used_k is None else lengths.used_k
    return keys.to(torch.int64) - lengths.cu_q.diff()


def _toeplitz(terms: list[RelativeBias | T5Bias | Alibi], sizes: Sizes) -> tuple[Any, list[str]]:
    """Return one vector for all sequences, each of which reads a part of it.

    By default distances are relative to the last query and key, which are aligned: the vector begins with the distance
    of the first of ``max_k`` keys from the last query.
    """
    starts = [x.query_start is not None for x in terms]
    if any(starts) and not all(starts):
        raise ValueError("bias: terms that say where queries begin, query_start=, and ones that do not; say it for all")
    if all(starts):
        return toeplitz_sum([x.toeplitz(sizes.M, sizes.N) for x in terms], sizes), ["from_start"]
    turned = sizes._replace(M=sizes.N, N=sizes.M)
    return toeplitz_sum([replace(x, query_start=0).toeplitz(turned.M, turned.N) for x in terms], turned), []
