"""Packed batches: sequences of any lengths, end to end along one axis, and what one of them is.

Sequence b has the queries ``cu_q[b] .. cu_q[b + 1] - 1`` and the keys from ``cu_k[b]`` on, up to ``cu_k[b + 1]`` or as
many as ``used_k[b]``. Queries and keys of different sequences do not see each other. Everything that is counted, the
band, distances, the entries of a bias, dropout's places, is counted from each sequence's own first query and key; and
``causal`` lets each one's last query see its last key.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from torch import Tensor


class Lengths(NamedTuple):
    """Where sequences begin and end: integer tensors (int32 or int64) on the device of q; all None is no packed batch.

    cu_q, cu_k: (B + 1,), in queries and in keys. used_k: (B,), how many keys count, or None for all.
    pairs: (B + 1,), of a ragged bias where each sequence's matrix begins, in elements.
    """

    cu_q: Tensor | None = None
    cu_k: Tensor | None = None
    used_k: Tensor | None = None
    pairs: Tensor | None = None


NO_LENGTHS = Lengths()


@dataclass(frozen=True)
class Packed:
    """What the host knows of a packed batch: the longest sequences, and which operands lie packed as well.

    max_q, max_k: at least the queries and keys of the longest sequence.
    forms: of the operands that are not padded to these, their names: "bias" along the keys or the queries, "cols" and
    "rows" of bias parts, and "sink". "ragged": the bias is one matrix a sequence, end to end. "from_start": the
    distances of a Toeplitz bias are counted from j - i and not from the last query and key. "query_from_end": those of
    values per query are counted from these, so that their shift is queries less keys; "key_from_end" likewise.
    """

    max_q: int
    max_k: int
    forms: tuple[str, ...] = ()


class SequencePlace(NamedTuple):
    """One sequence, in integers that the host has read."""

    number: int
    first_query: int
    queries: int
    first_key: int
    keys: int
    first_pair: int  # of a ragged bias, its first element


def places(lengths: Lengths, packed: Packed, totals: tuple[int, int], pairs: int | None = None) -> list[SequencePlace]:
    """Every sequence, checked against the numbers of queries and keys and, of a ragged bias, of ``pairs``.

    It reads the tensors: on a GPU the host waits.

    Raises:
        ValueError: naming the argument, what came and what is allowed.
    """
    assert lengths.cu_q is not None
    assert lengths.cu_k is not None
    q, k = lengths.cu_q.tolist(), lengths.cu_k.tolist()
    queries = _lengths("q", q, totals[0], packed.max_q)
    room = _lengths("k", k, totals[1], None if lengths.used_k is not None else packed.max_k)
    keys = room
    if lengths.used_k is not None:
        keys = lengths.used_k.tolist()
        for b, (used, most) in enumerate(zip(keys, room, strict=True)):
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
