"""The tensors of a bias that one tensor beside the scores cannot hold: what a backend gets of bias terms.

A bias that is one tensor, whatever it broadcasts along, is none of these: it goes where it always went. So a call
without terms has no `Parts` at all, and nothing on its way grows by them.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from tilewise.spec.relative import Relative
from tilewise.spec.score import Distances, Score


class Parts(NamedTuple):
    """Added to the scores beside the bias; each may be None, not all. `Relative` says what the values by distance are.

    cols: (B|1, H|Hkv|1, 1, N|1), beside a bias that is a matrix; rows: (B|1, H|Hkv|1, M, 1).
    query: values (B|1, H|Hkv|1, M, R); key: values (B|1, H|Hkv|1, N, R).
    toeplitz: (B|1, H|Hkv|1, 1, M + N - 1), a value for each ``j - i`` from 1 - M on; float32 or float64.
    query_shift, key_shift: int64 (B|1,). query_buckets, key_buckets: int64 (count,).
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
        """Those by distance, with the names of the fields that have their values."""
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
        """Those along the keys or the queries, with their names."""
        return [(name, x) for name, x in (("cols", self.cols), ("rows", self.rows)) if x is not None]


NO_PARTS = Parts()
# Those that can have a gradient.
DIFFERENTIABLE = ("cols", "rows", "query", "key", "toeplitz")
