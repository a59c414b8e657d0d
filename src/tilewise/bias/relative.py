"""RelativeBias: relative position values per query, per key or for all, and a product that makes them."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from tilewise.bias.terms import (
    Sizes,
    Term,
    check_bool,
    check_device,
    check_float,
    check_int,
    check_sizes,
    check_starts,
    name_of,
    pytree_node,
    shape_of,
    shift_of,
    start_words,
    summary,
    wide,
)
from tilewise.spec.relative import Relative, gather
from tilewise.spec.score import Distances, Far, Outside
from tilewise.spec.tensors import check_tensor

# 16-bit elements per 16 bytes; autocast may turn any dtype into 16 bits.
_STEP = 8
_OUTSIDE: dict[Any, Outside] = {0.0: "zero", -math.inf: "hidden", "clamp": "clamp"}


@pytree_node
@dataclass(frozen=True, eq=False, repr=False)
class RelativeBias(Term):
    """Relative position bias ``bias[i, j] = values[row, entry]``, without a matrix, forward or backward.

    Covers Shaw (arXiv 1803.02155), Transformer-XL (1901.02860), DeBERTa's c2p and p2c (2006.03654), and the relative
    logits of Inkling's attention. With one row for all it is a Toeplitz bias.

    Args:
        values: (B|1, H|Hkv|1, M|1, R), or (B|1, H|Hkv|1, N|1, R) with ``on="key"``; float16, bfloat16, float32 or
            float64 (CPU), whatever q's dtype is. Its gradient has its shape and dtype and is summed in float32. For a
            packed batch (total_q, H|Hkv|1, R) or (total_k, H|Hkv|1, R).
        lo: entry r belongs to the distance ``lo + r``, key position minus query position.
        reverse: distances are query position minus key position, so that entries descend with the key.
        outside: value at all other distances: 0.0; -inf, hidden like a mask; or "clamp", the entry of the nearest end.
        on: "query" or "key", to which the rows of values belong.
        query_start, key_start: positions of the first query and of the first key; an int, or an integer tensor (B,) or
            () on the values' device, which is never read back. Default of query_start: N - M, which aligns the last
            query with the last key, like ``causal=True``. Under torch.compile another int of a Toeplitz bias may
            recompile, at most once for each way in which its distances overlap the entries; another tensor never does.
        buckets: integer tensor (L,): the distances ``lo .. lo + L - 1`` have the entries ``buckets[0 .. L - 1]``, each
            0 to R - 1, such as `log_buckets`. By default each of R distances has its own entry.

    Raises:
        ValueError, TypeError: naming the argument, what was passed and what is allowed; the call raises those about
            shapes.
    """

    values: Tensor
    _: KW_ONLY
    lo: int
    reverse: bool = False
    outside: float | Literal["clamp"] = 0.0
    on: Literal["query", "key"] = "query"
    query_start: int | Tensor | None = None
    key_start: int | Tensor = 0
    buckets: Tensor | None = None

    def __post_init__(self) -> None:
        axes = "(B|1, H|Hkv|1, M|1, R), or packed (total, H|Hkv|1, R); N for M where on='key'"
        check_float(name_of(self, "values"), self.values, (3, 4), axes)
        if self.values.shape[-1] == 0:
            raise ValueError(f"RelativeBias.values: needs one entry or more, got shape {shape_of(self.values)}")
        check_int("RelativeBias.lo", self.lo)
        check_bool("RelativeBias.reverse", self.reverse)
        if isinstance(self.outside, bool) or self.outside not in _OUTSIDE:
            raise ValueError(f"RelativeBias.outside: must be 0.0, -inf or 'clamp', got {self.outside!r}")
        if self.on not in ("query", "key"):
            raise ValueError(f"RelativeBias.on: must be 'query' or 'key', got {self.on!r}")
        check_starts(self)
        if self.buckets is not None:
            _check_buckets(self.buckets, self.values.shape[-1])
        check_device(self, None)

    @property
    def kind(self) -> str:  # type: ignore[override]
        return "toeplitz" if self.values.dim() == 4 and self.values.shape[2] == 1 else self.on

    def check(self, sizes: Sizes, device: torch.device | None = None) -> None:
        B, H, Hkv, M, N = sizes
        if self.values.dim() == 3:
            raise ValueError(
                f"RelativeBias.values: three dimensions (total, H|Hkv|1, R) belong to a packed batch, "
                f"tilewise.varlen_attention; a dense call takes four, got shape {shape_of(self.values)}"
            )
        rows = {"M|1": (M, 1)} if self.on == "query" else {"N|1": (N, 1)}
        allowed = {"B|1": (B, 1), "H|Hkv|1": (H, Hkv, 1), **rows, "R": (self.values.shape[3],)}
        check_sizes(name_of(self, "values"), self.values, allowed)
        check_starts(self, B)
        check_device(self, device)

    def relative(self, M: int, N: int, *, on: Literal["query", "key", "none"] | None = None) -> Relative:
        """Return the form for backends, with ascending buckets; ``on`` defaults to "none" for a single row."""
        buckets, reverse = self.buckets, self.reverse
        count = self.values.shape[3] if buckets is None else buckets.shape[0]
        if buckets is not None:
            buckets, reverse = (buckets.flip(0) if reverse else buckets).to(torch.int64), False
        axis = on or ("none" if self.kind == "toeplitz" else self.on)
        lo = -(self.lo + count - 1) if self.reverse else self.lo
        known, shift = shift_of(self, M, N)
        distances = Distances(axis, lo - known, count, reverse, _OUTSIDE[self.outside])
        return Relative(self.values, distances, shift, buckets)

    def toeplitz(self, M: int, N: int) -> Relative:
        """Return `relative` of a single row, in float32 (float64 for float64)."""
        relative = self.relative(M, N, on="none")
        return relative._replace(values=wide(relative.values))

    def far(self, M: int, N: int) -> Far | None:
        """Return the distances at which a single row need not be read; None if they are not known on the host."""
        relative = self.relative(M, N, on="none")
        if relative.shift is not None or relative.buckets is not None:
            return None
        beyond = 0 if self.outside == "clamp" else 1
        return Far(relative.distances.lo - beyond, relative.distances.hi + beyond)

    def dense(self, sizes: Sizes) -> Tensor:
        relative = self.relative(sizes.M, sizes.N)
        return gather(relative._replace(values=self.values.double()), sizes.M, sizes.N)

    def __repr__(self) -> str:
        words = [summary(self.values), f"lo={self.lo}"]
        words += ["reverse"] * self.reverse + [f"outside={self.outside}"] * (self.outside != 0.0)
        words += ["on='key'"] * (self.on == "key") + start_words(self)
        if self.buckets is not None:
            words.append(f"buckets {summary(self.buckets)}")
        return f"RelativeBias({', '.join(words)})"


def _check_buckets(buckets: Tensor, R: int) -> None:
    name = "RelativeBias.buckets"
    check_tensor(name, buckets)
    if buckets.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name}: dtype must be int32 or int64, got {buckets.dtype}")
    if buckets.dim() != 1 or buckets.shape[0] == 0:
        raise ValueError(f"{name}: expected (L,), an entry for each of L distances, got shape {shape_of(buckets)}")
    # Checked only where it can be read without synchronization; else the device raises.
    if type(buckets) is Tensor and buckets.is_cpu and not (
        torch.compiler.is_compiling() or torch._C._functorch.is_functorch_wrapped_tensor(buckets)
    ):  # fmt: skip
        least, most = (int(x) for x in buckets.aminmax())
        if least < 0 or most >= R:
            raise ValueError(f"{name}: entries must be 0 to {R - 1}, got {least} to {most}")


def relative_logits(
    states: Tensor,
    proj: Tensor,
    *,
    lo: int,
    reverse: bool = False,
    outside: float | Literal["clamp"] = 0.0,
    query_start: int | Tensor | None = None,
    key_start: int | Tensor = 0,
) -> RelativeBias:
    """Return ``RelativeBias(states @ proj, ...)`` per query, with values in a layout that TMA can read.

    A tile of the bias is a tile of the values seen with rows that are one element shorter,
    `tilewise.spec.relative.skewed`. TMA needs these rows to be a multiple of 16 bytes and entries that ascend with the
    key. So the small ``proj`` is flipped for ``reverse``, and padded by up to 7 columns: copies of the end with
    ``outside="clamp"``, else zeros. Nothing of the values' size is copied, unless ``outside`` is -inf or M is no
    multiple of 8: then the values' gradient is copied, and in the latter case the states are padded with rows of zeros.

    Args:
        states: (B, H, M, C), float, any strides: mixing weights of each query (Inkling's relative states,
            Transformer-XL's queries).
        proj: (C, R) or (H|1, C, R) in states' dtype: profiles over the distance.
        lo, reverse, outside, query_start, key_start: as for `RelativeBias`. Inkling's attention has ``lo=0,
            reverse=True``: entry r belongs to the key r positions before the query.

    Returns:
        A `RelativeBias` whose entries ascend with the key, hence never ``reverse``.

    Raises:
        ValueError, TypeError: naming the argument, what was passed and what is allowed.
    """
    check_float("states", states, (4,), "(B, H, M, C)")
    check_float("proj", proj, (2, 3), "(C, R) or (H|1, C, R)")
    if proj.dtype != states.dtype:
        raise TypeError(f"proj: dtype must equal states' {states.dtype}, got {proj.dtype}")
    if proj.shape[-2] != states.shape[3]:
        raise ValueError(f"proj: shape {shape_of(proj)} does not have states' {states.shape[3]} rows of profiles")
    if proj.dim() == 3 and proj.shape[0] not in (1, states.shape[1]):
        raise ValueError(f"proj: shape {shape_of(proj)} is not (H|1, C, R) with states' {states.shape[1]} heads")
    R, M = proj.shape[-1], states.shape[2]
    check_int("lo", lo)
    more = (1 - R) % _STEP
    if reverse:
        # After the flip the padding comes first, for larger distances of query minus key.
        proj, lo = proj.flip(-1), -(lo + R - 1)
    padded = _with_columns(proj, more, first=reverse, repeat=outside == "clamp")
    if reverse and outside != -math.inf:
        lo -= more
    values = torch.matmul(functional.pad(states, (0, 0, 0, -M % _STEP)) if M % _STEP else states, padded)
    if M % _STEP:
        values = values[:, :, :M]
    if outside == -math.inf:
        values = values.narrow(3, more if reverse else 0, R)
    return RelativeBias(values, lo=lo, outside=outside, query_start=query_start, key_start=key_start)


def _with_columns(proj: Tensor, more: int, *, first: bool, repeat: bool) -> Tensor:
    """Return ``proj`` with ``more`` columns before or after it, zeros or copies of its end column."""
    shape = (*proj.shape[:-1], more)
    end = proj.narrow(-1, 0 if first else proj.shape[-1] - 1, 1)
    columns = end.expand(shape) if repeat else proj.new_zeros(shape)
    return torch.cat([columns, proj] if first else [proj, columns], -1)
