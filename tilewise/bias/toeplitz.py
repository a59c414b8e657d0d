"""Biases that depend on the distance alone, the same for every query: T5's table of buckets and ALiBi's slopes.

What becomes of them is one vector a head with a number for each of the M + N - 1 distances of the call, float32, made
by operations that autograd differentiates; the sums over diagonals that are its gradient then go on to the table or to
the slopes. So a backend knows one Toeplitz bias, several are one by adding vectors, and positions, ends and buckets are
settled before it. ALiBi is such a vector, too: some hundred kilobytes that stay in the cache. Where it is one number,
or lies on a line, `canonical` says beside it (`score.terms.Far`): a kernel then reads no more of it than where it
begins and ends, and gives the gradient back there, from where the vector's own leads to the table and the slopes.
"""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

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
from tilewise.score.integers import larger
from tilewise.score.relative import Relative
from tilewise.score.terms import Distances


@pytree_node
@dataclass(frozen=True, eq=False, repr=False)
class T5Bias(Term):
    """See `t5_bias`."""

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

    def buckets(self, distance: Tensor) -> Tensor:
        """The row of the table for each distance."""
        return t5_buckets(
            distance, buckets=self.table.shape[0], bidirectional=self.bidirectional, max_distance=self.max_distance
        )

    def toeplitz(self, M: int, N: int) -> Relative:
        """One row a head for the distances beyond which, on either side, one bucket goes on."""
        most = self._last_change()
        last = most if self.bidirectional else 0
        device = self.table.device
        key = ("t5", self.table.shape[0], self.bidirectional, self.max_distance)
        rows = constant(key, device, lambda: self.buckets(torch.arange(-most, last + 1, device=device)))
        values = _rows_of(wide(self.table), rows).mT[None, :, None]
        known, shift = shift_of(self, M, N)
        return Relative(values, Distances("none", -most - known, most + last + 1, outside="clamp"), shift)

    def _last_change(self) -> int:
        """A distance from which on all have the last bucket; `t5_buckets` may round by one, and two are allowed for."""
        buckets = self.table.shape[0] // (2 if self.bidirectional else 1)
        exact = buckets // 2
        last = exact * (self.max_distance / exact) ** ((buckets - 1 - exact) / (buckets - exact))
        return min(self.max_distance, math.ceil(last) + 2)

    def dense(self, sizes: Sizes) -> Tensor:
        distance = distances_of(self, sizes.M, sizes.N, self.table.device)[:, 0]
        return self.table.double()[self.buckets(distance)].permute(0, 3, 1, 2)

    def __repr__(self) -> str:
        way = "bidirectional" if self.bidirectional else "unidirectional"
        words = [summary(self.table), way, f"max_distance={self.max_distance}", *start_words(self)]
        return f"T5Bias({', '.join(words)})"


def _rows_of(table: Tensor, rows: Tensor) -> Tensor:
    """``table[rows]`` with a gradient that adds in a fixed order: index_add's on the CPU, indexing's on a GPU."""
    return table.index_select(0, rows) if table.is_cpu else table[rows]


@pytree_node
@dataclass(frozen=True, eq=False, repr=False)
class Alibi(Term):
    """See `alibi`."""

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

    def toeplitz(self, M: int, N: int) -> Relative:
        """One row a head for the M + N - 1 distances ``j - i`` of the call, shifted already."""
        known, shift = shift_of(self, M, N)
        width = larger(M + N - 1, 0)
        slopes = wide(self._four())
        first, device = 1 - M + known, slopes.device
        if shift is None:
            key = ("alibi", first, width, self.form, slopes.dtype)
            signed = constant(key, device, lambda: self._signed(first + torch.arange(width, device=device)).to(slopes))
        else:
            distance = first + torch.arange(width, device=device) + shift.view(-1, 1, 1, 1)
            signed = self._signed(distance).to(slopes.dtype)
        return Relative(slopes * signed, Distances("none", 1 - M, width))

    def _four(self) -> Tensor:
        """The slopes (B|1, H|1, 1, 1)."""
        slopes = self.slopes if self.slopes.dim() == 2 else self.slopes[None]
        return slopes[:, :, None, None]

    def _signed(self, distance: Tensor) -> Tensor:
        return distance if self.form == "signed" else -distance.abs()

    def dense(self, sizes: Sizes) -> Tensor:
        return self._four().double() * self._signed(distances_of(self, sizes.M, sizes.N, self.slopes.device))

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
    """T5's relative position bias: ``table[bucket(key position - query position), head]``.

    Args:
        table: (buckets, H) as transformers stores it (``relative_attention_bias.weight``); float. It is read in
            float32, and its gradient, in its dtype, is summed in float32: indexing a table of bfloat16 outside sums in
            bfloat16.
        bidirectional: half of the buckets are for keys after the query (encoders); else these share one (decoders).
        max_distance: from this distance on all have the last bucket.
        query_start, key_start: positions of the first query (default N - M) and key, as `RelativeBias` takes them.

    Raises:
        ValueError, TypeError: naming the argument, what came and what is allowed.

    Source: arXiv 1910.10683, section 2.1; the buckets are those of `t5_buckets`.
    """
    return T5Bias(table, bidirectional, max_distance, query_start=query_start, key_start=key_start)


def alibi(
    slopes: Tensor,
    form: Literal["absolute", "signed"] = "absolute",
    *,
    query_start: int | Tensor | None = None,
    key_start: int | Tensor = 0,
) -> Alibi:
    """ALiBi: ``-slope * |i - j|`` of positions, or ``slope * (j - i)`` in its "signed" form; the same if j is before i.

    Args:
        slopes: (H,), or (B, H) for slopes of their own in each batch element; float. Those of the paper are
            ``alibi_slopes(H)``; trained ones get a gradient, summed in float32, in their dtype.
        form: see above. Bloom and MPT add ``slope * j``, which differs from "signed" by a constant in each row: the
            softmax does not see it, the LSE does.
        query_start, key_start: positions of the first query (default N - M) and key, as `RelativeBias` takes them.

    Raises:
        ValueError, TypeError: naming the argument, what came and what is allowed.

    Source: arXiv 2108.12409.
    """
    return Alibi(slopes, form, query_start=query_start, key_start=key_start)
