"""Which rank has which tokens of each sequence of a packed batch: "document", as arithmetic.

A sequence that is computed where it lies needs no other rank's keys, and its tiles are full ones. So most sequences are
one rank's: the longest first, each to the rank with the fewest visible pairs that has room for it (the greedy rule of
longest processing times). Every rank has as many tokens: what finds no room is laid end to end, and cut where a rank is
full. Sequences that are so long that no such dealing is even, to `UNEVEN`, are everybody's: cut into 2R
chunks, of which rank r has the r-th from the start and the r-th from the end, so that under a causal mask each rank has
as many pairs of them as every other.

Source of cutting a sequence in two chunks a rank: TransformerEngine's context parallelism with packed batches, which
cuts every sequence so, and pads them to multiples of 2R.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import torch
from torch import Tensor

UNEVEN = 0.02  # by which the busiest rank may have more pairs than the mean


def assign(lengths: Sequence[int], size: int) -> Tensor:
    """(2 size, B), int64, on the CPU: how many tokens of each sequence the ranks have, from its start to its end: heads
    of rank 0, 1, .., then tails of the last rank, of the one before, .. `lengths` come to a multiple of ``size``."""
    order = sorted(range(len(lengths)), key=lambda n: -lengths[n])
    share = sum(n * n for n in lengths) / size
    everybodys = sum(n * n > share for n in lengths)  # at least these, which are the first of the order
    best: tuple[int, Tensor] | None = None
    while True:
        busiest, chunks = _assign(lengths, order, everybodys, size)
        if best is None or busiest < best[0]:
            best = busiest, chunks
        if busiest <= (1 + UNEVEN) * share or everybodys == len(order):
            return best[1]
        everybodys = min(2 * everybodys + 1, len(order))


def _assign(lengths: Sequence[int], order: list[int], everybodys: int, size: int) -> tuple[int, Tensor]:
    """Twice the pairs of the busiest rank under a causal mask, and what `assign` gives, where the first of the order
    are everybody's."""
    chunks = torch.zeros(2 * size, len(lengths), dtype=torch.int64, device="cpu")
    everybody = order[:everybodys]
    long = torch.tensor([lengths[n] for n in everybody], dtype=torch.int64, device="cpu")
    chunks[:, everybody] = _heads_and_tails(long, size)
    tokens = chunks[:size].sum(1) + chunks[size:].flip(0).sum(1)
    room = [sum(lengths) // size - n for n in tokens.tolist()]
    work = [0] * size  # beside everybody's
    least = [(0, rank) for rank in range(size)]  # a heap: the rank with the least work in front
    owners, rest = [], []
    for n in order[everybodys:]:
        full = []
        while least and room[least[0][1]] < lengths[n]:
            full.append(heapq.heappop(least))
        if least:
            rank = least[0][1]
            work[rank] += lengths[n] ** 2
            room[rank] -= lengths[n]
            heapq.heapreplace(least, (work[rank], rank))
            owners.append((rank, n, lengths[n]))
        else:
            rest.append(n)
        for one in full:  # has room for shorter ones
            heapq.heappush(least, one)
    if owners:
        ranks, whole, count = torch.tensor(owners, device="cpu").T
        chunks[ranks, whole] = count
    if rest:  # end to end into the room that is left
        count = torch.tensor([lengths[n] for n in rest], device="cpu")
        begin = count.cumsum(0) - count
        limit = torch.tensor(room, device="cpu").cumsum(0)[:, None]
        last = (limit - begin).clamp(min=0).minimum(count)
        first = torch.cat([torch.zeros_like(last[:1]), last[:-1]])
        chunks[:size, rest] = last - first
        work = [n + more for n, more in zip(work, (last**2 - first**2).sum(1).tolist(), strict=True)]
    return max(work) + sum(lengths[n] ** 2 for n in everybody) // size, chunks


def _heads_and_tails(lengths: Tensor, size: int) -> Tensor:
    """`assign` of sequences that are everybody's. Tokens that are left over, fewer than 2R of a sequence, are assigned
    out one by one, from rank to rank and through all sequences, so that ranks differ by one token at most."""
    chunk, left = lengths // (2 * size), lengths % (2 * size)
    assigned = left.cumsum(0) - left  # to the sequences before
    ranks = torch.arange(size, device=lengths.device)[:, None]
    mine = (assigned + left - 1 - ranks) // size - (assigned - 1 - ranks) // size  # 0, 1 or 2: head, then tail
    return torch.cat([chunk + (mine >= 1), (chunk + (mine >= 2)).flip(0)])
