"""Forward-mode derivative (JVP) of attention: an online softmax with two more sums, Σ p∘ds and Σ p∘ds·v + p·dv."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.backends import Inputs, empty_output, lse_dtype
from tilewise.backends.protocol import Tangents
from tilewise.derivatives.scores import BatchBlock, blocks
from tilewise.spec.problem import Problem


class RowSums(NamedTuple):
    """Sums over the keys for some queries, (batch, Hkv, G, rows, 1), of o and its tangent (.., Dv).

    Probabilities are exp(s - top) / total: an LSE of a large bias would round the logarithm of the total away. A query
    that sees nothing has top = 0 and total = inf. shift: tangent of the LSE.
    """

    top: Tensor
    total: Tensor
    o: Tensor
    shift: Tensor
    o_tangent: Tensor

    @property
    def fully_masked(self) -> Tensor:
        return self.total == torch.inf


def row_sums(block: BatchBlock, rows: slice) -> RowSums:
    """Return the sums of these queries."""
    q = block.rows(block.q, rows)
    assert q is not None
    top = q.new_full((*q.shape[:4], 1), -torch.inf)
    total, shift = torch.zeros_like(top), torch.zeros_like(top)
    o = q.new_zeros(*q.shape[:4], block.problem.value_dim)
    moved = torch.zeros_like(o)
    for tile in block.tiles(rows):
        new = torch.maximum(top, tile.scores.amax(-1, keepdim=True))
        finite = new.masked_fill(new == -torch.inf, 0.0)
        p, alpha = (tile.scores - finite).exp(), (top - finite).exp()
        dp = None if tile.tangent is None else p * tile.tangent
        total = alpha * total + p.sum(-1, keepdim=True)
        shift = alpha * shift if dp is None else alpha * shift + dp.sum(-1, keepdim=True)
        if tile.kept is not None:
            p, dp = p * tile.kept, None if dp is None else dp * tile.kept
        o = alpha * o + block.weighted(p, tile.v, tile)
        moved = alpha * moved
        if dp is not None:
            moved = moved + block.weighted(dp, tile.v, tile)
        if tile.v_tangent is not None:
            moved = moved + block.weighted(p, tile.v_tangent, tile)
        top = new
    sink = block.rows(block.sink, rows)
    if sink is not None:  # one more score without a value
        new = torch.maximum(top, sink)
        finite = new.masked_fill(new == -torch.inf, 0.0)
        p, alpha = (sink - finite).exp(), (top - finite).exp()
        sink_tangent = block.rows(block.sink_tangent, rows)
        total = alpha * total + p
        shift = alpha * shift if sink_tangent is None else alpha * shift + p * sink_tangent
        o, moved, top = alpha * o, alpha * moved, new
    fully_masked = total == 0
    top, total = top.masked_fill(fully_masked, 0.0), total.masked_fill(fully_masked, torch.inf)
    o, shift = o / total, shift / total
    return RowSums(top, total, o, shift, moved / total - shift * o)


def dense_tangents(problem: Problem, inputs: Inputs, tangents: Tangents) -> tuple[Tensor, Tensor]:
    """Return the tangents of o (B, H, M, Dv), in q's dtype, and of the LSE (B, H, M) of a dense call."""
    o = empty_output(inputs.q, problem.value_dim)
    lse = o.new_empty(o.shape[:3], dtype=lse_dtype(o.dtype))
    for block in blocks(problem, inputs, tangents):
        for rows in block.row_blocks():
            put(block, rows, row_sums(block, rows), o, lse)
    return o, lse


def put(block: BatchBlock, rows: slice, found: RowSums, o: Tensor, lse: Tensor) -> None:
    """Write the tangents of some rows."""
    block.of(o)[:, :, :, rows] = found.o_tangent.to(o.dtype)
    block.of(lse)[:, :, :, rows] = found.shift.squeeze(-1)
