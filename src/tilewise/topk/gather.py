"""Dynamic masks by gathering: attention to the selected keys of all queries, or of chunks of queries.

With scattered scores nearly every tile has a selected key, and skipping tiles saves nothing. If all queries select the
same keys, these are gathered once for a dense call. With ``causal`` the keys selected by the queries of a chunk are
gathered per chunk. Chunks become batch elements, and a TileMask over the gathered keys, intervals of queries again,
masks them. Keys are ordered so that nearly all tiles are full or empty.

The number of keys of a chunk is not read but bounded: its first query sees at most keep, each other one more.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.backends import Inputs, has_triton
from tilewise.frontend.arguments import Call
from tilewise.masks.block_sparse import Kept, TileMask
from tilewise.operator.autograd import Found, attention_op
from tilewise.operator.eager import in_forward_mode, is_eager
from tilewise.operator.tools import exports_onnx
from tilewise.spec.block_mask import TileTensors
from tilewise.spec.operands import BiasKind, TensorSpec, TileOperand
from tilewise.spec.problem import Problem
from tilewise.spec.score import Band
from tilewise.spec.tensors import is_dtensor
from tilewise.spec.tiles import limits, visible_pairs
from tilewise.topk.autograd import gather_rows

# Least FLOPs of a forward that gathering must save: about the time of its own operators.
WORTH = {"cpu": 1e7, "cuda": 1e11}
CHUNK = 128  # queries and gathered keys per chunk are multiples, for the tiles of kernels


class Gather(NamedTuple):
    """Number of chunks, of queries (rows) and of gathered keys (cols, padded) per chunk.

    masked: not all queries of a chunk see all of its keys.
    """

    chunks: int
    rows: int
    cols: int
    masked: bool

    def problem(self, of: Problem) -> Problem:
        """Return the problem on gathered keys for the call ``of``."""
        batch, one = of.batch * self.chunks, self.chunks == 1
        bias, sink, mask = of.bias, of.sink, None
        if bias is not None:
            wide = torch.float64 if bias.dtype == torch.float64 else torch.float32
            assert of.mask is not None
            heads = bias.heads if of.mask.heads == 1 else max(bias.heads, of.mask.heads)
            bias = TensorSpec(wide, 1 if one and bias.batch == of.mask.batch == 1 else batch, heads, 1, self.cols)
        if sink is not None and not one and sink.batch * sink.rows > 1:
            sink = replace(sink, batch=batch, rows=self.rows if sink.rows > 1 else 1)
        if self.masked and of.mask is not None:
            mask = replace(
                of.mask, batch=of.mask.batch if one else batch, rows=self.rows, cols=self.cols, heads=of.mask.heads
            )
        return replace(
            of, batch=batch, queries=self.rows, keys=self.cols, score=replace(of.score, band=Band()), bias=bias,
            sink=sink, mask=mask, tile_mask=None if mask is None else TileOperand(128, 128, "intervals"),
        )  # fmt: skip


def gather_of(problem: Problem, kept: Kept) -> Gather | str:
    """Return how to gather the selected keys of a call, or the reason to visit tiles instead."""
    p, mask = problem, problem.mask
    M, N = p.queries, p.keys
    if kept.by_query:
        return "each query has scores of its own, and so keeps keys of its own"
    if not all(type(n) is int for n in (p.batch, p.heads, M, N, kept.keep)):
        return "sizes are not known while a compiler traces"
    if mask is None or p.tile_mask is None or p.tile_mask.kind != "intervals":
        return "there is one query"
    if mask.heads not in (1, p.kv_heads):
        return "query heads of one key/value head keep keys of their own"
    if p.score.dropout:
        return "dropout goes by the places of keys"
    if p.parts is not None:
        return "a bias of several terms, or by distance, goes by the places of keys"
    if p.bias is not None and p.bias.axes != BiasKind.COLS:
        return "the bias is not one of keys alone"
    keep = min(kept.keep, N)
    rows = min(-(-keep // CHUNK) * CHUNK, M) if kept.causal else M
    chunks = -(-M // rows)
    # Prefer a number of chunks for which q is not padded, which copies.
    chunks = next((n for n in range(chunks, 2 * chunks) if M % (n * CHUNK) == 0), chunks)
    rows = -(-M // chunks)
    cols = min(N, -(-(keep + rows - 1) // CHUNK) * CHUNK) if kept.causal else keep
    band = p.score.band.both(Band.aligned(kept.causal, None, N - M))
    dense = visible_pairs(M, N, band)
    if 2 * M * keep > dense:
        return f"{keep} keys for each query are more than half of the scores that causal and window leave"
    saved = 2 * (p.head_dim + p.value_dim) * p.batch * p.heads * (dense - M * keep)
    if saved < WORTH.get(p.device, WORTH["cuda"]):
        return "the call is so small that gathering takes longer"
    return Gather(chunks, rows, cols, masked=kept.causal or not p.score.band.unlimited)


def attention_of_selected(call: Call, kept: Kept, return_lse: bool) -> Found | None:
    """Return `attention_op` of a call with a dynamic mask if its keys are gathered, else None.

    None also for DTensors, ONNX export and forward AD, for which the operator raises its own errors.
    """
    if is_dtensor(call.inputs.q) or exports_onnx() or in_forward_mode():
        return None
    gather = gather_of(Problem.of(*call.inputs, call.score), kept)
    return gathered_attention(call, gather, return_lse) if isinstance(gather, Gather) else None


def gathered_attention(call: Call, gather: Gather, return_lse: bool) -> Found:
    """Return `attention_op` of a call with a `Gather` from `gather_of`; differentiable."""
    inputs, score = call.inputs, call.score
    q, k, v, bias, _, sink, *_ = inputs
    tiles = inputs.tiles
    assert k is not None
    assert v is not None
    assert tiles is not None
    assert tiles.begins is not None
    assert tiles.ends is not None
    B, _, M, _ = q.shape
    chunks = gather.chunks
    keys, found = of_chunks(tiles.begins, tiles.ends, score.band, gather, B)
    if bias is not None:
        wide = bias if bias.dtype == torch.float64 else bias.float()  # summands of its gradient are not rounded
        own = wide.mT if chunks == 1 else wide.mT.expand(B, -1, -1, -1)
        bias = gather_rows(keys, chunks, own)[0].mT
    if sink is not None and chunks > 1:
        sink = _sink_of_chunks(sink, B, M, gather)
    k, v = gather_rows(keys, chunks, k, v)
    compact = Inputs(_split(q, gather), k, v, bias, None, sink, tiles=found)
    o, *others = attention_op(compact, replace(score, band=Band()), *call[2:], return_lse=return_lse)
    lse, statistics = (None if x is None else _joined(x, B, M, gather) for x in others)
    return _joined(o, B, M, gather), lse, statistics


def of_chunks(
    begins: Tensor, ends: Tensor, band: Band, gather: Gather, batch: int
) -> tuple[Tensor, TileTensors | None]:
    """Return the keys of each chunk, (B|1, H|1, chunks, cols), and their mask, None if all are visible.

    Missing keys are N. The mask is for chunks as batch elements.
    """
    chunks, rows, _, masked = gather
    batch = 1 if chunks == 1 and begins.shape[0] == 1 else batch
    if begins.is_cuda and is_eager((begins, ends)) and has_triton():
        from tilewise.topk import kernels as topk_kernels

        return topk_kernels.keys_of_chunks(begins, ends, limits(band), gather, batch)
    begins, ends = _in_band(begins, ends, band)
    keys = _selected_keys(begins, ends, gather)
    if not masked:
        return keys, None
    keys, seen_from, seen_to = _in_order(keys, begins, ends, gather)
    lo, hi = (x.expand(batch, -1, -1, -1).transpose(1, 2).flatten(0, 1) for x in (seen_from, seen_to))
    return keys, TileMask.from_intervals(lo, hi, rows).tensors


def _in_band(begins: Tensor, ends: Tensor, band: Band) -> tuple[Tensor, Tensor]:
    """Return intervals of queries, (B|1, H|1, 1, N), restricted to a causal or local window."""
    if band.unlimited:
        return begins, ends
    j = torch.arange(begins.shape[3], device=begins.device, dtype=begins.dtype)
    if band.hi is not None:
        begins = torch.maximum(begins, j - band.hi)
    if band.lo is not None:
        ends = torch.minimum(ends, j - (band.lo - 1))
    return begins, ends


def _selected_keys(begins: Tensor, ends: Tensor, gather: Gather) -> Tensor:
    """Return the ascending keys selected in each chunk, (B|1, H|1, chunks, cols) int64, padded with N."""
    chunks, rows, cols, _ = gather
    first = torch.arange(chunks, device=begins.device, dtype=begins.dtype)[:, None] * rows
    meets = (begins < first + rows) & (ends > first) & (ends > begins)
    counts = meets.cumsum(-1, dtype=torch.int32)
    number = torch.arange(1, cols + 1, device=begins.device, dtype=torch.int32)
    # The n-th key is where the count reaches n. At most cols keys, even if the mask was changed.
    return torch.searchsorted(counts, number.expand(*counts.shape[:3], cols).contiguous())


def _in_order(keys: Tensor, begins: Tensor, ends: Tensor, gather: Gather) -> tuple[Tensor, Tensor, Tensor]:
    """Return the keys of each chunk in an order that makes tiles full or empty, and the queries [from, to) of each.

    All are (B|1, H|1, chunks, cols). Keys visible to all queries come first, then those visible from the first query
    on, longest first, then the others by their first query.
    """
    chunks, rows, _, _ = gather
    first = torch.arange(chunks, device=keys.device, dtype=begins.dtype)[:, None] * rows
    at = keys.clamp(max=begins.shape[3] - 1)
    seen_from, seen_to = (
        (x.expand(-1, -1, chunks, -1).gather(-1, at) - first).clamp(0, rows) for x in (begins, ends)
    )  # fmt: skip
    seen_from = torch.where(keys < begins.shape[3], seen_from, 0)
    seen_to = torch.where(keys < begins.shape[3], seen_to, 0)
    rank = torch.where(seen_from == 0, rows - seen_to, rows + seen_from)
    rank = torch.where(seen_to > seen_from, rank, 2 * rows + 1)
    order = rank.sort(dim=-1, stable=True).indices
    return keys.gather(-1, order), seen_from.gather(-1, order), seen_to.gather(-1, order)


def _split(x: Tensor, gather: Gather) -> Tensor:
    """Return (B, H, M, D) as (B · chunks, H, rows, D): a view if rows divide M and B has stride M · row stride."""
    if gather.chunks == 1:
        return x
    more = gather.chunks * gather.rows - x.shape[2]
    x = torch.nn.functional.pad(x, (0, 0, 0, more)) if more else x
    return x.unflatten(2, (gather.chunks, gather.rows)).transpose(1, 2).flatten(0, 1)


def _joined(x: Tensor, batch: int, queries: int, gather: Gather) -> Tensor:
    """Return (B · chunks, H, rows, ...) as (B, H, M, ...)."""
    if gather.chunks == 1:
        return x
    x = x.unflatten(0, (batch, gather.chunks)).transpose(1, 2).flatten(2, 3)
    return x[:, :, :queries] if x.shape[2] > queries else x


def _sink_of_chunks(sink: Tensor, batch: int, queries: int, gather: Gather) -> Tensor:
    """Return the sink (B|1, H|1, M|1) for chunks as batch elements, more than one."""
    if sink.shape[0] == sink.shape[2] == 1:
        return sink
    wide = sink if sink.dtype == torch.float64 else sink.float()  # summands of its gradient are not rounded
    rows = gather.rows if sink.shape[2] > 1 else 1
    wide = wide.expand(batch, -1, queries if sink.shape[2] > 1 else gather.chunks)[..., None]
    return _split(wide, gather._replace(rows=rows))[..., 0]
