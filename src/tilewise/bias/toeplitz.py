"""Toeplitz bias terms, equal for all queries at a relative position: T5's buckets and ALiBi's slopes.

Each becomes one vector per head, float32, with a number for each of the M + N - 1 distances of the call. Its gradient,
sums over diagonals, goes on to the table or the slopes by autograd. So backends know one Toeplitz bias: several are
added up, and positions, ends and buckets are resolved before. Some hundred kilobytes, the vector stays in the cache.
`canonical` also states where it is constant or linear (`spec.score.Far`): there a kernel reads only the ends and adds
gradients to them, from where they reach the table and the slopes.
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from tilewise.bias.autograd import is_node, vector_of
from tilewise.bias.buckets import t5_buckets
from tilewise.bias.constants import constant
from tilewise.bias.terms import (
    Sizes,
    Term,
    check_bool,
    check_device,
    check_float,
    check_int,
    check_sizes,
    check_starts,
    distances_of,
    name_of,
    pytree_node,
    shape_of,
    shift_of,
    start_words,
    summary,
    wide,
)
from tilewise.spec.integers import check_range, larger
from tilewise.spec.relative import Relative, overlap, window
from tilewise.spec.score import Distances, Far


class T5Rule(NamedTuple):
    """Rule from T5's table to its vector, see `autograd.Rule`.

    Each bucket is an interval of distances; the end buckets continue beyond `distances`.
    """

    buckets: int
    bidirectional: bool
    max_distance: int

    @property
    def most(self) -> int:
        """Return a distance from which on all are in the last bucket; 2 more than needed, as `t5_buckets` rounds."""
        buckets = self.buckets // (2 if self.bidirectional else 1)
        exact = buckets // 2
        last = exact * (self.max_distance / exact) ** ((buckets - 1 - exact) / (buckets - exact))
        return min(self.max_distance, math.ceil(last) + 2)

    @property
    def distances(self) -> Distances:
        """Return the distances with an entry of their own."""
        most = self.most
        return Distances("none", -most, most + (most if self.bidirectional else 0) + 1, outside="clamp")

    def bucket(self, distance: Tensor) -> Tensor:
        """Return the row of the table for each distance."""
        return t5_buckets(
            distance, buckets=self.buckets, bidirectional=self.bidirectional, max_distance=self.max_distance
        )

    def rows(self, device: torch.device) -> Tensor:
        """Return the rows of the table for `distances`, int64."""

        def make() -> Tensor:
            own = self.distances
            return self.bucket(torch.arange(own.lo, own.hi + 1, device=device))

        return constant(("t5", *self), device, make)

    def bounds(self, device: torch.device) -> Tensor:
        """Return (buckets, 2) int32: the first distance of each bucket and one past its last.

        End buckets extend to ±_INFINITE; an empty bucket has its bounds in reverse order.
        """

        def make() -> Tensor:
            rows, own = self.rows(device), self.distances
            place = torch.arange(own.count, device=device)
            has = rows == torch.arange(self.buckets, device=device)[:, None]
            begin = torch.where(has, place, own.count).amin(1)
            end = torch.where(has, place + 1, 0).amax(1)
            begin = torch.where(begin == 0, -_INFINITE, begin + own.lo)
            end = torch.where(end == own.count, _INFINITE, end + own.lo)
            return torch.stack([begin, end], 1).to(torch.int32)

        return constant(("t5 bounds", *self), device, make)

    def composed(self, x: Tensor, first: int, width: int) -> Tensor:
        values = _rows_of(wide(x), self.rows(x.device)).mT[None, :, None]
        return window(Relative(values, self.distances), first, width)

    def vector(self, x: Tensor, first: int, width: int) -> Tensor:
        from tilewise.backends.kernels.vectors import table_vector

        rows = self.rows(x.device)
        count = rows.shape[0]
        return table_vector(x, rows, -(count // 2) if self.bidirectional else 1 - count, first, width)

    def gradient(self, gradient: Tensor, first: int, x: Tensor) -> Tensor:
        if not x.is_cpu:
            from tilewise.backends.kernels.vectors import table_gradient

            return table_gradient(gradient, self.bounds(x.device), first, x)
        flat, rows = gradient[0, :, 0].mT, self.rows(x.device)
        left, start, middle, _ = overlap(self.distances, first, flat.shape[0])
        below, inside, above = flat.tensor_split((left, left + middle))
        found = flat.new_zeros(x.shape).index_add_(0, rows[start : start + middle], inside)
        # Distances beyond are in one bucket on either side: sum first, then add once.
        most = self.buckets // 2 if self.bidirectional else self.buckets
        for beyond, row in ((below, most - 1), (above, 2 * most - 1 if self.bidirectional else 0)):
            if beyond.shape[0] > 0:
                found[row] += beyond.sum(0)
        return found.to(x.dtype)


_INFINITE = 2**30  # no call has such a distance
MAX_DISTANCE = 2**24  # of T5's buckets, which are listed by distance


class AlibiRule(NamedTuple):
    """Rule from slopes (B|1, H|1, 1, 1) to ALiBi's vector, see `autograd.Rule`."""

    form: Literal["absolute", "signed"]

    def of_distance(self, distance: Tensor) -> Tensor:
        """Return the factor of the slope at each distance."""
        return distance if self.form == "signed" else -distance.abs()

    def factors(self, first: int, width: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        return self.of_distance(first + torch.arange(width, device=device)).to(dtype)

    def composed(self, x: Tensor, first: int, width: int) -> Tensor:
        slopes = wide(_slopes_of_rows(x))
        return slopes * self.factors(first, width, x.device, slopes.dtype)

    def vector(self, x: Tensor, first: int, width: int) -> Tensor:
        from tilewise.backends.kernels.vectors import slopes_vector

        return slopes_vector(_two(x), first, width, self.form == "signed")

    def gradient(self, gradient: Tensor, first: int, x: Tensor) -> Tensor:
        if not x.is_cpu:
            from tilewise.backends.kernels.vectors import slopes_gradient

            return slopes_gradient(gradient, first, _two(x), self.form == "signed").view(x.shape)
        factors = self.factors(first, gradient.shape[3], x.device, gradient.dtype)
        return (gradient * factors).sum(3).view(x.shape).to(x.dtype)


def _two(slopes: Tensor) -> Tensor:
    """Return the slopes as (B|1, H|1)."""
    return slopes if slopes.dim() == 2 else slopes[None]


def _slopes_of_rows(slopes: Tensor) -> Tensor:
    """Return the slopes as (B|1, H|1, 1, 1)."""
    return _two(slopes)[:, :, None, None]


@pytree_node
@dataclass(frozen=True, eq=False, repr=False)
class T5Bias(Term):
    """T5's relative position bias, made by `t5_bias`."""

    kind: ClassVar[str] = "toeplitz"

    table: Tensor
    bidirectional: bool
    max_distance: int
    _: KW_ONLY
    query_start: int | Tensor | None = None
    key_start: int | Tensor = 0

    def __post_init__(self) -> None:
        check_float(name_of(self, "table"), self.table, (2,), "(buckets, H)")
        check_bool(name_of(self, "bidirectional"), self.bidirectional)
        least = 4 if self.bidirectional else 2
        if self.table.shape[0] < least:
            raise ValueError(f"T5Bias.table: needs {least} buckets or more, got shape {shape_of(self.table)}")
        check_int(name_of(self, "max_distance"), self.max_distance)
        check_range(name_of(self, "max_distance"), self.max_distance, MAX_DISTANCE)
        exact = self.table.shape[0] // least
        if self.max_distance <= exact:
            raise ValueError(
                f"T5Bias.max_distance: must be above the {exact} distances with a bucket of their own, "
                f"got {self.max_distance}"
            )
        check_starts(self)
        check_device(self, None)

    def check(self, sizes: Sizes, device: torch.device | None = None) -> None:
        check_sizes(name_of(self, "table"), self.table, {"buckets": (self.table.shape[0],), "H|1": (sizes.H, 1)})
        check_starts(self, sizes.B)
        check_device(self, device)

    @property
    def of(self) -> Tensor:
        """Return the tensor that the vector is made of."""
        return self.table

    @property
    def rule(self) -> T5Rule:
        return T5Rule(self.table.shape[0], self.bidirectional, self.max_distance)

    def buckets(self, distance: Tensor) -> Tensor:
        """Return the row of the table for each distance."""
        return self.rule.bucket(distance)

    def toeplitz(self, M: int, N: int) -> Relative:
        """Return one row per head for the M + N - 1 distances ``j - i`` of the call, shifted.

        If only the device knows positions, or under tracing, return the row for `T5Rule.distances` and a shift.
        """
        rule = self.rule
        known, shift = shift_of(self, M, N)
        if shift is None and is_node(self.table) and M + N > 1:
            vector = vector_of(rule, self.table, 1 - M + known, M + N - 1)
            return Relative(vector, Distances("none", 1 - M, M + N - 1))
        values = _rows_of(wide(self.table), rule.rows(self.table.device)).mT[None, :, None]
        own = rule.distances
        return Relative(values, Distances("none", own.lo - known, own.count, outside="clamp"), shift)

    def far(self, M: int, N: int) -> Far | None:
        known, shift = shift_of(self, M, N)
        own = self.rule.distances
        return None if shift is not None else Far(own.lo - known, own.hi - known)

    def dense(self, sizes: Sizes) -> Tensor:
        distance = distances_of(self, sizes.M, sizes.N, self.table.device)[:, 0]
        return self.table.double()[self.buckets(distance)].permute(0, 3, 1, 2)

    def __repr__(self) -> str:
        way = "bidirectional" if self.bidirectional else "unidirectional"
        words = [summary(self.table), way, f"max_distance={self.max_distance}", *start_words(self)]
        return f"T5Bias({', '.join(words)})"


def _rows_of(table: Tensor, rows: Tensor) -> Tensor:
    """Return ``table[rows]`` with a gradient that adds in a fixed order: index_add on the CPU, indexing on a GPU."""
    return table.index_select(0, rows) if table.is_cpu else table[rows]


@pytree_node
@dataclass(frozen=True, eq=False, repr=False)
class Alibi(Term):
    """ALiBi's bias, made by `alibi`."""

    kind: ClassVar[str] = "toeplitz"

    slopes: Tensor
    form: Literal["absolute", "signed"] = "absolute"
    _: KW_ONLY
    query_start: int | Tensor | None = None
    key_start: int | Tensor = 0

    def __post_init__(self) -> None:
        check_float(name_of(self, "slopes"), self.slopes, (1, 2), "(H,) or (B, H)")
        if self.form not in ("absolute", "signed"):
            raise ValueError(f"Alibi.form: must be 'absolute' or 'signed', got {self.form!r}")
        check_starts(self)
        check_device(self, None)

    def check(self, sizes: Sizes, device: torch.device | None = None) -> None:
        heads = {"H|1": (sizes.H, 1)}
        allowed = heads if self.slopes.dim() == 1 else {"B|1": (sizes.B, 1), **heads}
        check_sizes(name_of(self, "slopes"), self.slopes, allowed)
        check_starts(self, sizes.B)
        check_device(self, device)

    @property
    def of(self) -> Tensor:
        """Return the tensor that the vector is made of."""
        return self.slopes

    @property
    def rule(self) -> AlibiRule:
        return AlibiRule(self.form)

    def toeplitz(self, M: int, N: int) -> Relative:
        """Return one row per head for the M + N - 1 distances ``j - i`` of the call, shifted."""
        known, shift = shift_of(self, M, N)
        width, rule = larger(M + N - 1, 0), self.rule
        first = 1 - M + known
        if shift is None and is_node(self.slopes) and M + N > 1:
            vector = vector_of(rule, self.slopes, first, width)
        elif shift is None:
            vector = rule.composed(self.slopes, first, width)
        else:
            slopes, device = wide(_slopes_of_rows(self.slopes)), self.slopes.device
            distance = first + torch.arange(width, device=device) + shift.view(-1, 1, 1, 1)
            vector = slopes * rule.of_distance(distance).to(slopes.dtype)
        return Relative(vector, Distances("none", 1 - M, width))

    def far(self, M: int, N: int) -> Far | None:
        known, shift = shift_of(self, M, N)
        return None if shift is not None else Far(-known, -known, linear=True)

    def dense(self, sizes: Sizes) -> Tensor:
        distance = distances_of(self, sizes.M, sizes.N, self.slopes.device)
        return _slopes_of_rows(self.slopes).double() * self.rule.of_distance(distance)

    def __repr__(self) -> str:
        return f"Alibi({', '.join([summary(self.slopes), self.form, *start_words(self)])})"


def t5_bias(
    table: Tensor,
    bidirectional: bool,
    max_distance: int = 128,
    *,
    query_start: int | Tensor | None = None,
    key_start: int | Tensor = 0,
) -> T5Bias:
    """Return T5's relative position bias: ``table[bucket(key position - query position), head]``.

    Args:
        table: (buckets, H) as transformers stores it (``relative_attention_bias.weight``); float. Read in float32; its
            gradient has its dtype and is summed in float32, while indexing a bfloat16 table sums in bfloat16.
        bidirectional: half of the buckets are for keys after the query (encoders); else these share one (decoders).
        max_distance: larger distances are all in the last bucket.
        query_start, key_start: positions of the first query (default N - M) and key, as for `RelativeBias`.

    Raises:
        ValueError, TypeError: naming the argument, what was passed and what is allowed.

    Source: arXiv 1910.10683, section 2.1; `t5_buckets` has the buckets.
    """
    return T5Bias(table, bidirectional, max_distance, query_start=query_start, key_start=key_start)


def alibi(
    slopes: Tensor,
    form: Literal["absolute", "signed"] = "absolute",
    *,
    query_start: int | Tensor | None = None,
    key_start: int | Tensor = 0,
) -> Alibi:
    """Return ALiBi's bias: ``-slope * |i - j|`` of positions, or ``slope * (j - i)`` with form "signed".

    Args:
        slopes: (H,), or (B, H) for slopes per batch element; float. ``alibi_slopes(H)`` has the paper's. Trained slopes
            get a gradient in their dtype, summed in float32.
        form: the two are equal for keys before the query. Bloom and MPT add ``slope * j``, which differs from "signed"
            by a constant per row: softmax ignores it, the LSE does not.
        query_start, key_start: positions of the first query (default N - M) and key, as for `RelativeBias`.

    Raises:
        ValueError, TypeError: naming the argument, what was passed and what is allowed.

    Source: arXiv 2108.12409.
    """
    return Alibi(slopes, form, query_start=query_start, key_start=key_start)
