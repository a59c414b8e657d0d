"""Quadratic attention in float64, one formula per line: the tests' reference for every other backend."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.backends import Gradients, Inputs, Needs, Outputs, empty_output, lse_dtype, sequences
from tilewise.backends.protocol import Pass, Tangents, at_once
from tilewise.derivatives import packed
from tilewise.derivatives.second import Second
from tilewise.spec import dropout, reference
from tilewise.spec.bias_components import Parts
from tilewise.spec.problem import Problem
from tilewise.spec.relative import gather, scatter
from tilewise.spec.rounding import keeps_low_bits, low_bits
from tilewise.spec.statistics import stacked


def declines(problem: Problem, work: Pass = "forward") -> str | None:
    return None


def prefers(problem: Problem) -> str | None:
    return None


def tiles(problem: Problem) -> str:
    return f"one tile of {problem.queries} x {problem.keys} scores a head, in float64"


def forward(problem: Problem, inputs: Inputs) -> Outputs:
    q, v = inputs.q, inputs.v
    s, visible, transformed = _scores(problem, inputs)
    p, p_sink, lse = _softmax(s, inputs.sink)
    o = reference.visible_product(p * _dropout(problem, inputs), visible, _per_head(problem, v))
    rounded = empty_output(q, problem.value_dim).copy_(o)
    o_low = low_bits(o, rounded) if keeps_low_bits(q.dtype, problem.score.dropout) else None
    return Outputs(rounded, lse.to(lse_dtype(q.dtype)), o_low, _statistics(problem, s, transformed, p, p_sink, rounded))


def _statistics(
    problem: Problem, s: Tensor, transformed: Tensor, p: Tensor, p_sink: Tensor, o: Tensor
) -> Tensor | None:  # fmt: skip
    """Return `Outputs.statistics`. transformed: the scores before the bias."""
    wanted = problem.score.statistics
    if not any(wanted):
        return None
    found = {
        "max_scores": s.amax(-1),
        "max_scores_unbiased": torch.where(s == -torch.inf, s, transformed).amax(-1),
        "entropy": torch.special.entr(torch.cat([p, p_sink], -1)).sum(-1),
    }
    return stacked(wanted, found).to(lse_dtype(o.dtype))


def backward(problem: Problem, inputs: Inputs, outputs: Outputs, cotangents: Outputs, needs: Needs) -> Gradients:
    """Return the gradients; recompute O and LSE in float64 instead of reading ``outputs``."""
    q, k, v, bias, _, sink, parts, *_ = inputs
    s, visible, transformed = _scores(problem, inputs)
    p, p_sink, _ = _softmax(s, sink)
    # 0 · NaN = NaN: exclude a fully masked query's values and the gradient of its output.
    fully_masked = ~visible.any(-1, keepdim=True)
    seeing_q, do = (x.double().masked_fill(fully_masked, 0.0) for x in (q, cotangents.o))
    kh, vh = _per_head(problem, k), _per_head(problem, v)
    z = _dropout(problem, inputs)

    o = reference.visible_product(p * z, visible, vh)
    delta = (do * o).sum(-1, keepdim=True)
    if cotangents.lse is not None:
        delta = delta - cotangents.lse.double().unsqueeze(-1)
    ds, db = _score_gradients(problem, p, z * (do @ vh.mT), delta, visible, transformed)
    dbias = None
    if needs.bias and bias is not None:
        dbias = torch.empty_like(bias).copy_(_sum_to(db, problem, bias.shape))
    dsink = None
    if needs.sink and sink is not None:  # a sink has no value: its dP is 0
        dsink = torch.empty_like(sink).copy_(-(p_sink * delta).squeeze(-1).sum_to_size(sink.shape))
    dq = problem.score.scale * reference.visible_product(ds, visible, kh)
    dk = problem.score.scale * (ds.mT @ seeing_q)
    dv = (p * z).mT @ do
    return Gradients(
        torch.empty_like(q).copy_(dq) if needs.q else None,
        torch.empty_like(k).copy_(_sum_to(dk, problem, k.shape)) if needs.k else None,
        torch.empty_like(v).copy_(_sum_to(dv, problem, v.shape)) if needs.v else None,
        dbias,
        dsink,
        **({} if parts is None else _part_gradients(problem, parts, db, needs)),
    )


def tangents(problem: Problem, inputs: Inputs, given: Tangents) -> tuple[Tensor, Tensor]:
    """Return the tangents of o and the LSE."""
    found = _moved(problem, inputs, given)
    o = empty_output(inputs.q, problem.value_dim).copy_(found.o_tangent)
    return o, found.shift.squeeze(-1).to(lse_dtype(o.dtype))


def second(problem: Problem, inputs: Inputs, given: Tangents, cotangents: Outputs, needs: Needs) -> Second:
    """Return the tangents of `backward`'s gradients, line by line, and those of o and the LSE."""
    q, k, v, bias, _, sink, parts, *_ = inputs
    found = _moved(problem, inputs, given)
    p, p_tangent, z, visible, shift = found.p, found.p_tangent, found.z, found.visible, found.shift
    fully_masked = ~visible.any(-1, keepdim=True)
    seeing_q, q_tangent, do = (x.double().masked_fill(fully_masked, 0.0) for x in (q, found.q_tangent, cotangents.o))
    kh, vh, k_tangent, v_tangent = (_per_head(problem, x) for x in (k, v, found.k_tangent, found.v_tangent))
    delta = (do * found.o).sum(-1, keepdim=True)
    if cotangents.lse is not None:
        delta = delta - cotangents.lse.double().unsqueeze(-1)
    delta_tangent = (do * found.o_tangent).sum(-1, keepdim=True)
    dp, dp_tangent = z * (do @ vh.mT), z * (do @ v_tangent.mT)
    ds, db = _score_gradients(problem, p, dp, delta, visible, found.capped)
    db_tangent = torch.where(visible, p_tangent * (dp - delta) + p * (dp_tangent - delta_tangent), 0.0)
    ds_tangent, slope = db_tangent, reference.transform_derivative(found.capped, problem.score)
    if slope is not None and problem.score.softcap is not None:
        bend = -2 / problem.score.softcap**2 * found.capped * slope  # the softcap's second derivative
        ds_tangent = torch.where(visible, db_tangent * slope + db * bend * found.product, 0.0)
    scale = problem.score.scale
    sums = {
        "q": scale * (reference.visible_product(ds_tangent, visible, kh)
            + reference.visible_product(ds, visible, k_tangent)),
        "k": scale * (ds_tangent.mT @ seeing_q + ds.mT @ q_tangent),
        "v": (p_tangent * z).mT @ do,
    }  # fmt: skip
    if bias is not None:
        sums["bias"] = db_tangent
    if sink is not None and found.sink_tangent is not None:
        p_sink_tangent = found.p_sink * (found.sink_tangent - shift)
        sums["sink"] = -(p_sink_tangent * delta + found.p_sink * delta_tangent).squeeze(-1)
    named = dict(zip(Needs._fields, inputs.differentiable(), strict=True))
    grads = {} if parts is None else _part_gradients(problem, parts, db_tangent, needs)
    for name, total in sums.items():
        x = named[name]
        if x is not None and getattr(needs, name):
            whole = total.sum_to_size(x.shape) if name == "sink" else _sum_to(total, problem, x.shape)
            grads[name] = torch.empty_like(x).copy_(whole)
    o = empty_output(q, problem.value_dim).copy_(found.o_tangent)
    return Second(Gradients(*map(grads.get, Gradients._fields)), o, shift.squeeze(-1).to(lse_dtype(q.dtype)))


# A packed batch is computed one run of equal-length sequences at a time.
prepare = {
    "forward": at_once(partial(sequences.forward, forward)),
    "backward": at_once(partial(sequences.backward, backward)),
}
derivatives = {
    "tangents": partial(packed.tangents, dense=tangents),
    "second": partial(packed.second, dense=second),
}


class _Moved(NamedTuple):
    """Matrices of a forward and their tangents; product: tangent of scale · q·k. shift: of the LSE, a column."""

    q_tangent: Tensor
    k_tangent: Tensor
    v_tangent: Tensor
    sink_tangent: Tensor | None
    product: Tensor
    capped: Tensor
    visible: Tensor
    z: Tensor | float
    p: Tensor
    p_sink: Tensor
    p_tangent: Tensor
    shift: Tensor
    o: Tensor
    o_tangent: Tensor


def _moved(problem: Problem, inputs: Inputs, given: Tangents) -> _Moved:
    """Return `_Moved`; a tangent of None is zero."""
    pairs = zip(Needs._fields, inputs.differentiable(), given, strict=True)
    named = {name: torch.zeros_like(x) if y is None else y for name, x, y in pairs if x is not None}
    kh, vh, k_tangent, v_tangent = (_per_head(problem, x) for x in (inputs.k, inputs.v, named["k"], named["v"]))
    s, visible, capped = _scores(problem, inputs)
    p, p_sink, _ = _softmax(s, inputs.sink)
    product = problem.score.scale * (named["q"].double() @ kh.mT + inputs.q.double() @ k_tangent.mT)
    slope = reference.transform_derivative(capped, problem.score)
    ds = product if slope is None else slope * product
    parts = inputs.parts
    if parts is not None:
        parts = parts._replace(**{name: x for name, x in named.items() if name in Parts._fields})
    for x in _biases(problem, inputs._replace(bias=named.get("bias"), parts=parts)):
        ds = ds + x
    ds = torch.where(visible, ds, 0.0)
    shift = (p * ds).sum(-1, keepdim=True)
    sink_tangent = None
    if inputs.sink is not None:
        sink_tangent = named["sink"].double().unsqueeze(-1).expand_as(shift)
        shift = shift + p_sink * sink_tangent
    z = _dropout(problem, inputs)
    p_tangent = p * (ds - shift)
    o = reference.visible_product(p * z, visible, vh)
    o_tangent = reference.visible_product(p_tangent * z, visible, vh)
    o_tangent = o_tangent + reference.visible_product(p * z, visible, v_tangent)
    return _Moved(
        named["q"], named["k"], named["v"], sink_tangent, product, capped, visible, z, p, p_sink, p_tangent, shift, o,
        o_tangent,
    )  # fmt: skip


def _scores(problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Return the scores (-inf where hidden), the visible pairs (bool), and the scores before the bias."""
    q, k, _, _, mask, *_ = inputs
    score = problem.score
    s = transformed = reference.transform(score.scale * (q.double() @ _per_head(problem, k).mT), score)
    rows = torch.arange(problem.queries, device=q.device)[:, None]
    cols = torch.arange(problem.keys, device=q.device)[None, :]
    visible = reference.in_band(rows, cols, score.band).expand(s.shape)
    if inputs.tiles is not None:
        mask = inputs.tiles.rows_visible(slice(0, problem.queries), problem.keys)
    elif mask is not None and mask.shape[0] > 1:
        mask = mask.repeat(problem.batch // mask.shape[0], 1, 1, 1)
    if mask is not None:
        visible = visible & _per_head(problem, mask)
    for x in _biases(problem, inputs):
        s = s + x
        visible = visible & (x != -torch.inf)
    return torch.where(visible, s, -torch.inf), visible, transformed


def _biases(problem: Problem, inputs: Inputs) -> list[Tensor]:
    """Return all that is added to the scores, in float64."""
    bias, parts = inputs.bias, inputs.parts
    if problem.bias_in_runs and bias is not None:
        bias = bias.repeat_interleave(problem.batch // bias.shape[0], 0)
    added = [] if bias is None else [bias]
    if parts is not None:
        added += [x for _, x in parts.vectors()]
        by_distance = [x._replace(values=x.values.double()) for _, x in parts.relatives(problem.score, problem.queries)]
        added += [gather(x, problem.queries, problem.keys) for x in by_distance]
    return [_per_head(problem, x) for x in added]


def _part_gradients(problem: Problem, parts: Parts, db: Tensor, needs: Needs) -> dict[str, Tensor]:
    """Return the gradients of the bias components that need one, by name, from that of the biased scores."""
    found = {name: _sum_to(db, problem, x.shape) for name, x in parts.vectors()}
    found |= {name: scatter(x, db) for name, x in parts.relatives(problem.score, problem.queries)}
    return {name: torch.empty_like(getattr(parts, name)).copy_(found[name]) for name in needs.parts}


def _score_gradients(
    problem: Problem, p: Tensor, dp: Tensor, delta: Tensor, visible: Tensor, transformed: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients with respect to scale · q·k and to the biased score; 0 for hidden pairs."""
    db = torch.where(visible, reference.softmax_derivative(p, dp, delta), 0.0)
    slope = reference.transform_derivative(transformed, problem.score)
    return (db if slope is None else torch.where(visible, db * slope, 0.0)), db


def _softmax(s: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the probabilities of keys (B, H, M, N) and sink (B, H, M, 1 or 0), and the LSE (B, H, M).

    Not exp(s - lse): if all scores are near -1e30, rounding removes the logarithm of the number of keys from the LSE.
    A row without visible key and sink has lse = -inf and probabilities 0.
    """
    keys = s.shape[-1]
    if sink is not None:
        s = torch.cat([s, sink.double().unsqueeze(-1).expand(*s.shape[:-1], 1)], -1)
    lse = torch.logsumexp(s, dim=-1)
    p = torch.where((lse == -torch.inf).unsqueeze(-1), 0.0, torch.softmax(s, -1))
    return p[..., :keys], p[..., keys:], lse


def _dropout(problem: Problem, inputs: Inputs) -> Tensor | float:
    """Return dropout's factor of each probability, (B, H, M, N): 0 or 1 / (share of kept probabilities)."""
    threshold, seed = problem.score.dropout, inputs.seed
    if seed is None:
        return 1.0
    shape = (problem.batch, problem.heads, problem.queries, problem.keys)
    b, h, i, j = torch.meshgrid(*(torch.arange(n, device=seed.device) for n in shape), indexing="ij")
    at = problem.score.origin
    words = dropout.stream(seed, b + problem.sequence, h + at.head)
    return dropout.kept(words, i + at.query, j + at.key, threshold).double() * dropout.weight(threshold)


def _per_head(problem: Problem, x: Tensor) -> Tensor:
    """Repeat (B, Hkv, ...) for the query heads of each group; keep tensors of H heads or one head."""
    if x.dtype != torch.bool:
        x = x.double()
    if x.shape[1] in (1, problem.heads):
        return x
    return x.repeat_interleave(problem.heads // x.shape[1], dim=1)


def _sum_to(x: Tensor, problem: Problem, shape: torch.Size) -> Tensor:
    """Sum (B, H, ...) over each axis on which ``shape`` broadcasts, over the heads of a group and runs of the batch."""
    if shape[0] not in (1, x.shape[0]):
        x = x.unflatten(0, (shape[0], -1)).sum(1)
    B, H = x.shape[:2]
    if shape[1] not in (1, H):
        x = x.reshape(B, shape[1], H // shape[1], *x.shape[2:]).sum(2)
    return x.sum_to_size(shape)
