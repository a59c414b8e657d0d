"""Canonical form of ``bias=``: the bias components that backends know.

matrix      tensors that vary along queries and keys: their sum
cols        tensors along the keys, one number per key for all queries: their sum
rows        tensors along the queries: their sum
query       relative position values, a row per query
key         relative position values, a row per key
toeplitz    relative position values for all rows: the sum of all such terms, one vector per head
low_rank    additional columns of q and k; added to the matrix by the reference
band        limits outside of which terms with outside=-inf hide everything, so that tiles are skipped
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.bias.low_rank import LowRankBias
from tilewise.bias.relative import RelativeBias
from tilewise.bias.terms import FLOATING, Sizes, Term, shape_of
from tilewise.bias.toeplitz import Alibi, T5Bias
from tilewise.spec.integers import larger
from tilewise.spec.relative import Relative, hidden_band, window
from tilewise.spec.score import Band, Distances, Far
from tilewise.spec.tensors import check_tensor

# Words for each component in errors, and how to combine two of them.
_PLACES = {
    "matrix": ("a matrix of queries and keys", "add them"),
    "cols": ("a bias along the keys", "add them"),
    "rows": ("a bias along the queries", "add them"),
    "query": ("a RelativeBias with values per query", "add their values over one range of distances"),
    "key": ("a RelativeBias with values per key", "add their values over one range of distances"),
    "low_rank": ("a low_rank_bias", "concatenate their u and w"),
}


class Slots(NamedTuple):
    """The components of a bias, which are added up; see the module."""

    matrix: Tensor | None = None  # (B|1, H|Hkv|1, M, N)
    cols: Tensor | None = None  # (B|1, H|Hkv|1, 1, N|1)
    rows: Tensor | None = None  # (B|1, H|Hkv|1, M, 1)
    query: Relative | None = None
    key: Relative | None = None
    toeplitz: Relative | None = None  # values (B|1, H|Hkv|1, 1, M + N - 1), float32 or float64; always inside
    low_rank: LowRankBias | None = None
    band: Band = Band()
    far: Far | None = None  # of `toeplitz`


def canonical(bias: Any, B: int, H: int, Hkv: int, M: int, N: int, device: torch.device | None = None) -> Slots:
    """Return the components of ``bias``, checked against the sizes of a call and, if given, its device.

    Differentiable: gradients of the Toeplitz vector reach the tensors it is made of.

    Raises:
        ValueError, TypeError: naming the argument, what was passed and what is allowed; two terms for one component
            that cannot be added here.
    """
    parts = bias if isinstance(bias, (tuple, list)) else (bias,)
    sizes = Sizes(B, H, Hkv, M, N)
    found: dict[str, Any] = {}
    toeplitz: list[RelativeBias | T5Bias | Alibi] = []
    for part in parts:
        if isinstance(part, Term):
            part.check(sizes, device)
            if isinstance(part, (T5Bias, Alibi)) or (isinstance(part, RelativeBias) and part.kind == "toeplitz"):
                toeplitz.append(part)
            else:
                put(found, part.kind, part)
        elif isinstance(part, Tensor):
            add(found, place_of(part, found, sizes, device), part if part.dim() == 4 else _four(part))
        else:
            raise TypeError(f"bias: expected tensors and terms of tilewise.bias, got {type(part).__name__}")
    band = Band()
    for kind in ("query", "key"):
        if kind in found:
            found[kind] = found[kind].relative(M, N)
            band = band.both(hidden_band(found[kind]))
    if len(toeplitz) == 1 and M == 1 and "query" not in found:
        (only,) = toeplitz
        if isinstance(only, RelativeBias) and only.on == "query":
            # One query has one row, whose values are read directly; a vector would have N numbers.
            found["query"] = only.relative(M, N, on="query")
            return Slots(**found, band=band.both(hidden_band(found["query"])))
    terms = [x.toeplitz(M, N) for x in toeplitz]
    for relative in terms:
        band = band.both(hidden_band(relative))
    if not terms:
        return Slots(**found, band=band)
    far = _far(toeplitz[0], M, N)
    for x in toeplitz[1:]:
        far = far.both(_far(x, M, N))
    return Slots(**found, toeplitz=toeplitz_sum(terms, sizes), band=band, far=far)


def dense(term: Term | Tensor, B: int, H: int, M: int, N: int, Hkv: int | None = None) -> Tensor:
    """Return the whole bias of one term, (B, H, M, N), float64; differentiable, for the reference and tests."""
    sizes = Sizes(B, H, H if Hkv is None else Hkv, M, N)
    full = _four(term.double()) if isinstance(term, Tensor) else term.dense(sizes)
    return _per_head(full, H).expand(B, H, M, N)


def with_dense(low_rank: LowRankBias, matrix: Tensor | None, sizes: Sizes) -> Tensor:
    """Return the matrix of a call plus ``low_rank`` in float64, for the reference; backends add columns to q and k."""
    found = dense(low_rank, sizes.B, sizes.H, sizes.M, sizes.N, sizes.Hkv)
    return found if matrix is None else found + _per_head(matrix.double(), sizes.H)


def put(found: dict[str, Any], place: str, part: Any) -> None:
    if place in found:
        words, instead = _PLACES[place]
        raise ValueError(f"bias: takes {words} once, got two; {instead}")
    found[place] = part


def add(found: dict[str, Any], place: str, x: Tensor) -> None:
    """Add a tensor of four dimensions to those of the same component, in float32 or float64; gradients reach each."""
    if place in found:
        other = found[place]
        heads = max(x.shape[1], other.shape[1])
        dtype = torch.promote_types(torch.promote_types(x.dtype, other.dtype), torch.float32)
        x = _per_head(other, heads).to(dtype) + _per_head(x, heads).to(dtype)
    found[place] = x


def place_of(x: Tensor, found: dict[str, Any], sizes: Sizes, device: torch.device | None) -> str:
    """Return the component for a tensor by its axes; a second one may be the matrix if M or N is 1."""
    check_tensor("bias", x)
    B, H, Hkv, M, N = sizes
    if x.dtype not in FLOATING:
        raise TypeError(f"bias: dtype must be float16, bfloat16, float32 or float64, got {x.dtype}")
    if device is not None and x.device != device:
        raise ValueError(f"bias: must be on {device}, got {x.device}")
    b, h, m, n = (1, 1, 1, 1, *x.shape)[-4:]
    if x.dim() > 4 or b not in (1, B) or h not in (1, Hkv, H) or m not in (1, M) or n not in (1, N):
        heads = f"{H}|1" if Hkv == H else f"{H}|{Hkv}|1"
        raise ValueError(f"bias: shape {shape_of(x)} does not broadcast to ({B}|1, {heads}, {M}|1, {N}|1)")
    if m != 1 and n != 1:
        return "matrix"
    # A single number goes along the axis of size 1, if there is one.
    places = ["rows"] if m != 1 else ["cols"] if n != 1 else ["rows", "cols"] if M == 1 else ["cols", "rows"]
    if (M == 1 and m == 1) or (N == 1 and n == 1):
        places.append("matrix")
    return next((place for place in places if place not in found), places[0])


def _four(x: Tensor) -> Tensor:
    return x[(None,) * (4 - x.dim())]


def _far(term: RelativeBias | T5Bias | Alibi, M: int, N: int) -> Far:
    """Return `far` of one Toeplitz term; no distance is far if only the device knows its positions."""
    return term.far(M, N) or Far(-M, N)


def toeplitz_sum(terms: list[Relative], sizes: Sizes) -> Relative:
    """Return the sum of Toeplitz terms as one vector over the M + N - 1 distances ``j - i``."""
    first, width = 1 - sizes.M, larger(sizes.M + sizes.N - 1, 0)
    vectors = [window(x, first, width) for x in terms]
    heads = max(x.shape[1] for x in vectors)
    total = _per_head(vectors[0], heads)
    for x in vectors[1:]:
        total = total + _per_head(x, heads)
    return Relative(total, Distances("none", first, width))


def _per_head(x: Tensor, heads: int) -> Tensor:
    """Return (B, H, ...) from (B, Hkv, ...), repeating the values of a group for each of its heads."""
    return x if x.shape[1] in (1, heads) else x.repeat_interleave(heads // x.shape[1], 1)
