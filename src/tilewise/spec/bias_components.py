"""Bias components: tensors of bias terms that the one bias tensor of a call cannot hold.

A bias that is a single tensor, whatever its broadcast dims, is passed as ``bias`` and is no component. A call without
bias terms has no `Parts`.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from tilewise.spec.relative import Relative
from tilewise.spec.score import Distances, Score


class Parts(NamedTuple):
    """The bias components, added to the scores beside the bias; None where there is none.

    cols: (B|1, H|Hkv|1, 1, N|1), along the keys, beside a bias that is a matrix.
    rows: (B|1, H|Hkv|1, M, 1), along the queries.
    query, key: relative position values per query, (B|1, H|Hkv|1, M, R), and per key, (B|1, H|Hkv|1, N, R); see
    `Relative`.
    toeplitz: (B|1, H|Hkv|1, 1, M + N - 1), float32 or float64; one value for each ``j - i`` from 1 - M on.
    query_shift, key_shift: int64 (B|1,).
    query_buckets, key_buckets: int64 (count,).
    """

    cols: Tensor | None = None
    rows: Tensor | None = None
    query: Tensor | None = None
    key: Tensor | None = None
    toeplitz: Tensor | None = None
    query_shift: Tensor | None = None
    key_shift: Tensor | None = None
    query_buckets: Tensor | None = None
    key_buckets: Tensor | None = None

    def relatives(self, score: Score, M: int) -> list[tuple[str, Relative]]:
        """Return the relative position components, each with the name of the field that has its values."""
        found = []
        if self.query is not None:
            assert score.query is not None
            found.append(("query", Relative(self.query, score.query, self.query_shift, self.query_buckets)))
        if self.key is not None:
            assert score.key is not None
            found.append(("key", Relative(self.key, score.key, self.key_shift, self.key_buckets)))
        if self.toeplitz is not None:
            distances = Distances("none", 1 - M, self.toeplitz.shape[3])
            found.append(("toeplitz", Relative(self.toeplitz, distances)))
        return found

    def vectors(self) -> list[tuple[str, Tensor]]:
        """Return the components along the keys or the queries, with their names."""
        return [(name, x) for name, x in (("cols", self.cols), ("rows", self.rows)) if x is not None]


NO_PARTS = Parts()
# Components that can have a gradient.
DIFFERENTIABLE = ("cols", "rows", "query", "key", "toeplitz")
