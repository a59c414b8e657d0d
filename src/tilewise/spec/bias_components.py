"""Bias components: tensors of bias terms that the one bias tensor of a call cannot hold.

A bias that is a single tensor, whatever its broadcast dims, is passed as ``bias`` and is no component. A call without
bias terms has no `Parts`.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

from torch import Tensor

from tilewise.spec.relative import Relative
from tilewise.spec.score import Distances, Score
from tilewise.spec.table import Axes, Maybe, rows_of


class Parts(NamedTuple):
    """The bias components, added to the scores beside the bias; None where there is none.

    query, key: relative position values, R for each query or key; see `Relative`, also for shifts and buckets.
    toeplitz: float32 or float64; one value for each ``j - i`` from 1 - M on.
    shifts, buckets: int64.
    """

    cols: Annotated[Maybe, Axes("B|1 H|Hkv|1 1 N|1", True, words="a bias along the keys")] = None
    rows: Annotated[Maybe, Axes("B|1 H|Hkv|1 M 1", True, words="a bias along the queries")] = None
    query: Annotated[Maybe, Axes("B|1 H|Hkv|1 M R", True, True, "a bias by distance with values per query")] = None
    key: Annotated[Maybe, Axes("B|1 H|Hkv|1 N R", True, True, "a bias by distance with values per key")] = None
    toeplitz: Annotated[Maybe, Axes("B|1 H|Hkv|1 1 M+N-1", True, words="a bias by distance alone")] = None
    query_shift: Annotated[Maybe, Axes("B|1")] = None
    key_shift: Annotated[Maybe, Axes("B|1")] = None
    query_buckets: Annotated[Maybe, Axes("count")] = None
    key_buckets: Annotated[Maybe, Axes("count")] = None

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
ROWS = {name: row for name, row in rows_of(Parts).items() if row.grad}  # components with values
DIFFERENTIABLE = tuple(ROWS)
