"""Derivative of the backward: the tangent of each gradient, with the cotangents of o and the LSE held fixed.

It is the Hessian of ⟨do, o⟩ + ⟨dlse, lse⟩ times the tangents, and the Hessian is symmetric. So it serves the derivative
of a backward in forward mode, and in reverse mode with the cotangents of the gradients as tangents.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.backends import Gradients, Inputs, Needs, Outputs, empty_output, lse_dtype
from tilewise.backends.protocol import Tangents
from tilewise.derivatives.scores import BatchBlock, ScoreTile, blocks, cut, products
from tilewise.derivatives.tangents import RowSums, put, row_sums
from tilewise.spec import reference
from tilewise.spec.problem import Problem
from tilewise.spec.relative import add_gradient


class Second(NamedTuple):
    """Tangents of the gradients, in the shape and dtype of the inputs, and those of o and the LSE."""

    gradients: Gradients
    o: Tensor
    lse: Tensor


def dense_second(
    problem: Problem, inputs: Inputs, tangents: Tangents, cotangents: Outputs, needs: Needs
) -> Second:  # fmt: skip
    """Return the tangents of the gradients of a dense call that are needed."""
    dtype = lse_dtype(problem.dtype)
    o = empty_output(inputs.q, problem.value_dim)
    lse = o.new_empty(o.shape[:3], dtype=dtype)
    named = dict(zip(Needs._fields, inputs.differentiable(), strict=True))
    sums = {
        name: torch.zeros_like(x, dtype=dtype) for name, x in named.items() if x is not None and getattr(needs, name)
    }
    for block in blocks(problem, inputs, tangents):
        for rows in block.row_blocks():
            found = row_sums(block, rows)
            put(block, rows, found, o, lse)
            if sums:
                _add_rows(block, rows, found, cotangents, sums)
    grads = {name: torch.empty_like(named[name]).copy_(x) for name, x in sums.items()}
    return Second(Gradients(*map(grads.get, Gradients._fields)), o, lse)


def _add_rows(block: BatchBlock, rows: slice, found: RowSums, cotangents: Outputs, sums: dict[str, Tensor]) -> None:
    """Add what some queries give. Each line is the tangent of a line of the backward, D = rowsum(dO∘O) − dLSE."""
    scale = block.problem.score.scale
    q, q_tangent, do = (block.rows(x, rows) for x in (block.q, block.q_tangent, block.of(cotangents.o)))
    assert q is not None
    assert do is not None
    # 0 · NaN = NaN: exclude a fully masked query and the gradient of its output.
    q, do = q.masked_fill(found.fully_masked, 0.0), do.masked_fill(found.fully_masked, 0.0)
    q_tangent = None if q_tangent is None else q_tangent.masked_fill(found.fully_masked, 0.0)
    delta = (do * found.o).sum(-1, keepdim=True)
    if cotangents.lse is not None:
        dlse = block.rows(block.of(cotangents.lse).unsqueeze(-1), rows)
        assert dlse is not None
        delta = (delta - dlse).masked_fill(found.fully_masked, 0.0)
    delta_tangent = (do * found.o_tangent).sum(-1, keepdim=True)
    dq = torch.zeros_like(q)
    for tile in block.tiles(rows):
        p = (tile.scores - found.top).exp() / found.total
        p_tangent = p * (-found.shift if tile.tangent is None else tile.tangent - found.shift)
        dp, dp_tangent = products(do, tile.v), None if tile.v_tangent is None else products(do, tile.v_tangent)
        if tile.kept is not None:
            dp, dp_tangent = dp * tile.kept, None if dp_tangent is None else dp_tangent * tile.kept
        ds = _visible(p * (dp - delta), tile)
        minus = delta_tangent if dp_tangent is None else delta_tangent - dp_tangent
        ds_tangent = _visible(p_tangent * (dp - delta) - p * minus, tile)
        _add_biases(block, tile, ds_tangent, sums)
        dx, dx_tangent = _through_softcap(block, tile, ds, ds_tangent)
        if "q" in sums:
            dq = dq + block.weighted(dx_tangent, tile.k, tile)
            if tile.k_tangent is not None:
                dq = dq + block.weighted(dx, tile.k_tangent, tile)
        if "k" in sums:
            dk = torch.einsum("bhgmn,bhgmd->bhnd", dx_tangent, q)
            if q_tangent is not None:
                dk = dk + torch.einsum("bhgmn,bhgmd->bhnd", dx, q_tangent)
            sums["k"][block.batch, :, tile.cols] += scale * dk
        if "v" in sums:
            weights = p_tangent if tile.kept is None else p_tangent * tile.kept
            sums["v"][block.batch, :, tile.cols] += torch.einsum("bhgmn,bhgmd->bhnd", weights, do)
    if "q" in sums:
        block.of(sums["q"])[:, :, :, rows] = scale * dq
    if "sink" in sums:
        _add_sink(block, rows, found, delta, delta_tangent, sums["sink"])


def _visible(x: Tensor, tile: ScoreTile) -> Tensor:
    """Set ``x`` to 0 at hidden pairs, where values may be NaN."""
    return x if tile.visible is None else torch.where(tile.visible, x, 0.0)


def _through_softcap(block: BatchBlock, tile: ScoreTile, ds: Tensor, ds_tangent: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient of the scaled product and its tangent."""
    score = block.problem.score
    slope = reference.transform_derivative(tile.capped, score)
    if slope is None or score.softcap is None:
        return ds, ds_tangent
    dx, dx_tangent = ds * slope, ds_tangent * slope
    if tile.product is not None:  # cap'' = -2 cap · cap' / c²
        dx_tangent = dx_tangent - dx * (2 / score.softcap**2) * tile.capped * tile.product
    return _visible(dx, tile), _visible(dx_tangent, tile)


def _add_biases(block: BatchBlock, tile: ScoreTile, ds_tangent: Tensor, sums: dict[str, Tensor]) -> None:
    for name, x in sums.items():
        if name in block.relatives:
            add_gradient(block.of(x), ds_tangent, block.relatives[name][0], tile.rows, tile.cols)
        elif name in ("bias", "cols", "rows"):
            place = cut(block.of_bias(x) if name == "bias" else block.of(x), tile.rows, tile.cols)
            place += ds_tangent.sum_to_size(place.shape)


def _add_sink(
    block: BatchBlock, rows: slice, found: RowSums, delta: Tensor, delta_tangent: Tensor, total: Tensor
) -> None:  # fmt: skip
    """Add the tangent of dSink = -P·D, a score without a value."""
    sink, tangent = block.rows(block.sink, rows), block.rows(block.sink_tangent, rows)
    assert sink is not None
    p = (sink - found.top).exp() / found.total
    p_tangent = p * (-found.shift if tangent is None else tangent - found.shift)
    place = block.of(total.unsqueeze(-1))
    place = place if place.shape[3] == 1 else place[:, :, :, rows]
    place -= (p_tangent * delta + p * delta_tangent).sum_to_size(place.shape)
