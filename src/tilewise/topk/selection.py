"""dynamic_mask: each query attends to its best keys, by scores that a model computes at each step."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewise.backends import has_triton
from tilewise.masks.block_sparse import Block, Kept, TileMask, checked_block
from tilewise.operator.eager import is_eager
from tilewise.spec.block_mask import TileTensors, no_bits
from tilewise.spec.integers import LARGEST, LARGEST_SIZE, check_range
from tilewise.spec.tensors import check_tensor


def dynamic_mask(
    scores: Tensor, *, keep: int, causal: bool = False, queries: int | None = None, block: Block = 128
) -> TileMask:
    """Return the `TileMask` in which each query sees the ``keep`` keys with the largest scores.

    Does not synchronize, and makes no array of queries times keys if scores do not depend on the query. Of equal scores
    the lower key index is selected; NaN is larger than any number.

    Args:
        scores: (B|1, H|Hkv|1, M|1, N), of any floating dtype; may be a bias. They get no gradient from the mask: pass
            them as ``bias=`` too for gradients of selected keys.
        keep: number of keys per query; a query that sees fewer selects all.
        causal: query i selects from the keys up to i + N - M, those that it sees with ``causal=True``, so that no later
            score has an effect. Otherwise from all keys.
        queries: M of the calls, for scores of one row. Default: N.
        block: queries and keys of a tile, multiples of 64, one number or two.

    With scores of one row each key is selected by one interval of queries: with ``causal`` from the first query that
    sees it until ``keep`` better keys are visible. Scores of M rows are sorted by rows of tiles, and take one bit per
    pair.

    A call with scores of one row gathers the selected keys if that is faster; see `tilewise.explain`.

    Raises:
        ValueError, TypeError: naming the argument, what was passed and what is allowed.

    Examples:
        >>> q, k, v = (torch.randn(2, 8, 100, 64) for _ in range(3))
        >>> mask = tilewise.dynamic_mask(torch.randn(2, 8, 1, 100), keep=16, causal=True)
        >>> tilewise.attention(q, k, v, mask=mask, causal=True).shape
        torch.Size([2, 8, 100, 64])

    Source: Dynamic Mask Attention (arXiv 2508.02124), whose top-w keys are those of one row.
    """
    check_tensor("scores", scores)
    if not scores.dtype.is_floating_point:
        raise TypeError(f"scores: dtype must be floating, got {scores.dtype}")
    if scores.dim() != 4 or 0 in scores.shape:
        raise ValueError(f"scores: expected (B|1, H|Hkv|1, M|1, N), none of them 0, got shape {tuple(scores.shape)}")
    for name, n in (("keep", keep), ("queries", queries)):
        if n is None and name == "queries":
            continue
        if isinstance(n, bool) or not isinstance(n, (int, torch.SymInt)):
            raise TypeError(f"{name}: expected an int, got {type(n).__name__}")
        if n < 1:
            raise ValueError(f"{name}: must be 1 or more, got {n}")
        check_range(name, n, LARGEST_SIZE if name == "queries" else LARGEST)
    if not isinstance(causal, bool):
        raise TypeError(f"causal: expected a bool, got {causal!r}")
    rows, keys = scores.shape[2:]
    if rows > 1 and queries not in (None, rows):
        raise ValueError(f"queries: must be the scores' {rows}, got {queries}")
    count = (keys if rows == 1 else rows) if queries is None else queries
    scores = scores.detach()
    kept = Kept(keep, causal, by_query=rows > 1)
    if rows > 1 or count == 1:
        found = _of_each_query(scores, keep, causal, block)
        return TileMask(found.queries, keys, found.tensors, kept)
    order = scores[:, :, 0].sort(dim=-1, descending=True, stable=True).indices
    if order.is_cuda and is_eager((order,)) and has_triton():
        from tilewise.backends.kernels import interval_tiles
        from tilewise.topk import kernels as topk_kernels

        size = checked_block(block)
        begins, ends = topk_kernels.selected_intervals(order, keep, causal, count)
        tiles = interval_tiles.tiles_of_intervals(begins, ends, count, size)
        return TileMask(count, keys, TileTensors(tiles, no_bits(size, tiles.device), begins, ends), kept)
    rank = torch.empty_like(order).scatter_(-1, order, torch.arange(keys, device=order.device).expand_as(order))
    if not causal:
        begins = torch.zeros_like(rank)
        found = TileMask.from_intervals(begins, torch.where(rank < keep, count, 0), count, block=block)
        return TileMask(count, keys, found.tensors, kept)
    # Key j is dropped at the keep-th better key: the keep-th smallest index before it in the order.
    gone = running_smallest(order, keep).gather(-1, rank)
    first = torch.arange(keys, device=order.device) - (keys - count)
    ends = torch.where(gone < keys, gone - (keys - count), count)
    found = TileMask.from_intervals(first.expand_as(ends).contiguous(), ends, count, block=block)
    return TileMask(count, keys, found.tensors, kept)


def _of_each_query(scores: Tensor, keep: int, causal: bool, block: Block) -> TileMask:
    rows, keys = scores.shape[2:]
    place = torch.arange(keys, device=scores.device)

    def kept(part: slice) -> Tensor:
        some, last = scores[:, :, part], torch.full((), keys, device=scores.device)
        if causal:
            last = torch.arange(part.start, part.stop, device=scores.device)[:, None] + keys - rows + 1
            # Invisible keys sort last, also behind visible keys with -inf, which have a lower index.
            some = some.masked_fill(place >= last, -torch.inf)
        order = some.sort(dim=-1, descending=True, stable=True).indices
        best = torch.zeros_like(order, dtype=torch.bool)
        best.scatter_(-1, order[..., :keep], torch.ones_like(order[..., :keep], dtype=torch.bool))
        return best & (place < last)

    return TileMask.from_rows(kept, rows, keys, block=block, device=scores.device)


def running_smallest(order: Tensor, w: int) -> Tensor:
    """Return, per place of a permutation (..., N), the w-th smallest number before it; N if there are fewer.

    A wavelet matrix (Claude, Navarro, Ordóñez 2015): level by level, from the highest bit, numbers are partitioned
    stably into those with 0 and those with 1. The counts of 0 before each place tell whether the w-th smallest is among
    them. N log N steps, vectorized over places.
    """
    if order.is_cuda and is_eager((order,)) and has_triton():
        from tilewise.topk import kernels as topk_kernels

        return topk_kernels.running_smallest(order, w)
    n = order.shape[-1]
    place = torch.arange(n, device=order.device).expand_as(order)
    begin, end = torch.zeros_like(place), place
    left = torch.full_like(place, w - 1)
    found, numbers = torch.zeros_like(place), order
    for bit in reversed(range(max((n - 1).bit_length(), 1))):
        zero = (numbers >> bit) & 1 == 0
        zeros = torch.nn.functional.pad(zero.cumsum(-1), (1, 0))
        before, until = zeros.gather(-1, begin), zeros.gather(-1, end)
        here = left < until - before
        total = zeros[..., -1:]
        begin, end = torch.where(here, before, total + begin - before), torch.where(here, until, total + end - until)
        left = torch.where(here, left, left - (until - before))
        found = torch.where(here, found, found | (1 << bit))
        to = torch.where(zero, zeros[..., 1:] - 1, total + place - zeros[..., 1:])
        numbers = torch.empty_like(numbers).scatter_(-1, to, numbers)
    return torch.where(place < w, n, found)
