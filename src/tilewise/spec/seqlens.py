"""Packed batches: sequences of any lengths, concatenated along one axis.

Sequence b has the queries ``cu_q[b] .. cu_q[b + 1] - 1`` and the keys from ``cu_k[b]`` to ``cu_k[b + 1] - 1``, or the
first ``used_k[b]`` of them. It does not see other sequences. Windows, distances, bias entries and dropout count from
its first query and key, and ``causal`` aligns its last query with its last key.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, NamedTuple

from tilewise.spec.table import Axes, Maybe


class Lengths(NamedTuple):
    """Sequence offsets of a packed batch, int32 or int64 on the device of q; all None without one.

    cu_q, cu_k: in queries and in keys.
    used_k: number of keys in use, or None for all.
    pairs: offset in elements of the matrix of each sequence in a ragged bias.
    """

    cu_q: Annotated[Maybe, Axes("B+1")] = None
    cu_k: Annotated[Maybe, Axes("B+1")] = None
    used_k: Annotated[Maybe, Axes("B")] = None
    pairs: Annotated[Maybe, Axes("B+1")] = None


NO_LENGTHS = Lengths()


@dataclass(frozen=True)
class Packed:
    """Host-side description of a packed batch.

    max_q, max_k: at least the queries and keys of the longest sequence.
    forms: names of the operands that are packed and not padded to max_q and max_k: "bias" along the keys or the
    queries, "cols" and "rows" of the bias components, "sink". Also "ragged": the bias has one matrix per sequence,
    concatenated. "from_start": distances of a Toeplitz bias are relative to j - i, not to the last query and key.
    "query_from_end", "key_from_end": the shift of values per query or per key is queries minus keys.
    """

    max_q: int
    max_k: int
    forms: tuple[str, ...] = ()


class SequencePlace(NamedTuple):
    """Offsets and sizes of one sequence, as integers on the host."""

    number: int
    first_query: int
    queries: int
    first_key: int
    keys: int
    first_pair: int  # its first element in a ragged bias


def places(lengths: Lengths, packed: Packed, totals: tuple[int, int], pairs: int | None = None) -> list[SequencePlace]:
    """Return all sequences, checked against ``totals`` and the number of ``pairs`` of a ragged bias.

    Reading the tensors synchronizes the host with a GPU.

    Raises:
        ValueError: naming the argument, what was passed and what is allowed.
    """
    assert lengths.cu_q is not None
    assert lengths.cu_k is not None
    q, k = lengths.cu_q.tolist(), lengths.cu_k.tolist()
    queries = _lengths("q", q, totals[0], packed.max_q)
    capacity = _lengths("k", k, totals[1], None if lengths.used_k is not None else packed.max_k)
    keys = capacity
    if lengths.used_k is not None:
        keys = lengths.used_k.tolist()
        for b, (used, most) in enumerate(zip(keys, capacity, strict=True)):
            if not 0 <= used <= most:
                raise ValueError(f"seqused_k: sequence {b} has {most} keys, got {used}")
        _check_longest("k", keys, packed.max_k)
    starts = [0] * len(queries) if lengths.pairs is None else lengths.pairs.tolist()
    found = [SequencePlace(*x) for x in zip(range(len(queries)), q, queries, k, keys, starts, strict=False)]
    if pairs is not None:
        for x in found:
            if not 0 <= x.first_pair <= pairs - x.queries * x.keys:
                raise ValueError(
                    f"RaggedBias.offsets: sequence {x.number} has {x.queries} x {x.keys} pairs from {x.first_pair} on, "
                    f"the values have {pairs}"
                )
    return found


def _lengths(name: str, offsets: list[int], total: int, longest: int | None) -> list[int]:
    if offsets[0] != 0:
        raise ValueError(f"cu_seqlens_{name}: must begin with 0, got {offsets[0]}")
    found = [end - begin for begin, end in pairwise(offsets)]
    if any(n < 0 for n in found):
        b = next(b for b, n in enumerate(found) if n < 0)
        raise ValueError(f"cu_seqlens_{name}: must not descend, got {offsets[b]} before {offsets[b + 1]} at {b}")
    if offsets[-1] > total:
        raise ValueError(f"cu_seqlens_{name}: ends at {offsets[-1]}, past the {total} rows of {name}")
    if longest is not None:
        _check_longest(name, found, longest)
    return found


def _check_longest(name: str, lengths: list[int], longest: int) -> None:
    if lengths and max(lengths) > longest:
        raise ValueError(f"max_seqlen_{name}: must be the longest sequence's {max(lengths)} or more, got {longest}")
