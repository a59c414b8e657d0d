"""Assignment of each sequence's tokens to ranks for load_balancer="document", as arithmetic.

A sequence on one rank needs no other rank's keys, and its tiles are full. So most sequences are on one rank: the
longest first, each on the rank with the fewest visible pairs that has enough free tokens (greedy LPT). All ranks have
equally many tokens: sequences that fit on no rank are laid out end to end, and cut where a rank is full. If whole
sequences do not balance the ranks to within `UNEVEN`, the longest are on all ranks, cut into heads and tails like
"head_tail" of `layout`.

Source of two chunks per rank: TransformerEngine's context parallelism of packed batches, which cuts every sequence
this way and pads it to a multiple of 2R.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import torch
from torch import Tensor

UNEVEN = 0.02  # allowed excess of the busiest rank's pairs over the mean


def assign(lengths: Sequence[int], size: int) -> Tensor:
    """Return the tokens of each sequence on each rank, from its start to its end: int64 (2 size, B), on the CPU. Rows
    are heads of rank 0, 1, ..., then tails of the last rank, the one before, and so on. ``size`` divides the sum of
    lengths."""
    order = sorted(range(len(lengths)), key=lambda n: -lengths[n])
    share = sum(n * n for n in lengths) / size
    everybodys = sum(n * n > share for n in lengths)  # at least these, the first of the order
    best: tuple[int, Tensor] | None = None
    while True:
        busiest, chunks = _assign(lengths, order, everybodys, size)
        if best is None or busiest < best[0]:
            best = busiest, chunks
        if busiest <= (1 + UNEVEN) * share or everybodys == len(order):
            return best[1]
        everybodys = min(2 * everybodys + 1, len(order))


def _assign(lengths: Sequence[int], order: list[int], everybodys: int, size: int) -> tuple[int, Tensor]:
    """Return twice the pairs of the busiest rank under a causal mask, and the tensor of `assign`, with the first
    ``everybodys`` sequences of ``order`` on all ranks."""
    chunks = torch.zeros(2 * size, len(lengths), dtype=torch.int64, device="cpu")
    everybody = order[:everybodys]
    long = torch.tensor([lengths[n] for n in everybody], dtype=torch.int64, device="cpu")
    chunks[:, everybody] = _heads_and_tails(long, size)
    tokens = chunks[:size].sum(1) + chunks[size:].flip(0).sum(1)
    free_tokens = [sum(lengths) // size - n for n in tokens.tolist()]
    work = [0] * size  # of sequences on one rank
    least = [(0, rank) for rank in range(size)]  # a heap: the rank with the least work in front
    owners, rest = [], []
    for n in order[everybodys:]:
        full = []
        while least and free_tokens[least[0][1]] < lengths[n]:
            full.append(heapq.heappop(least))
        if least:
            rank = least[0][1]
            work[rank] += lengths[n] ** 2
            free_tokens[rank] -= lengths[n]
            heapq.heapreplace(least, (work[rank], rank))
            owners.append((rank, n, lengths[n]))
        else:
            rest.append(n)
        for one in full:  # has space for shorter ones
            heapq.heappush(least, one)
    if owners:
        ranks, whole, count = torch.tensor(owners, device="cpu").T
        chunks[ranks, whole] = count
    if rest:  # end to end into the remaining space
        count = torch.tensor([lengths[n] for n in rest], device="cpu")
        begin = count.cumsum(0) - count
        limit = torch.tensor(free_tokens, device="cpu").cumsum(0)[:, None]
        last = (limit - begin).clamp(min=0).minimum(count)
        first = torch.cat([torch.zeros_like(last[:1]), last[:-1]])
        chunks[:size, rest] = last - first
        work = [n + more for n, more in zip(work, (last**2 - first**2).sum(1).tolist(), strict=True)]
    return max(work) + sum(lengths[n] ** 2 for n in everybody) // size, chunks


def _heads_and_tails(lengths: Tensor, size: int) -> Tensor:
    """Return `assign` of sequences on all ranks. Left-over tokens, fewer than 2R of a sequence, are assigned one by
    one, from rank to rank and through all sequences, so that ranks differ by one token at most."""
    chunk, left = lengths // (2 * size), lengths % (2 * size)
    assigned = left.cumsum(0) - left  # to earlier sequences
    ranks = torch.arange(size, device=lengths.device)[:, None]
    mine = (assigned + left - 1 - ranks) // size - (assigned - 1 - ranks) // size  # 0, 1 or 2: head, then tail
    return torch.cat([chunk + (mine >= 1), (chunk + (mine >= 2)).flip(0)])
