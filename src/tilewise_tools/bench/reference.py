"""Reference results: unfused attention and its gradients in plain torch, in a wider dtype.

Independent of tilewise, except for the dropout mask.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tilewise.spec import dropout
from tilewise_tools.bench import packed, sparse, terms
from tilewise_tools.bench.cases import DROPOUT_SEED, AnyCase, Case, CaseInputs

# Relative to the norm of the reference: 2 to 10 times the rounding error of the dtype.
TOLERANCES = {"bfloat16": 3e-2, "float16": 5e-3, "float32": 1e-5, "float64": 1e-10}
_SCORES_AT_ONCE = {"cuda": 1 << 27, "cpu": 1 << 21}  # elements of the score matrix of a chunk


def exact(case: Case, x: CaseInputs, wide: torch.dtype | None = None) -> dict[str, Tensor]:
    """Compute o and, if the case has a backward, dq, dk, dv, dbias, dsink and dterm in dtype ``wide``.

    The default is float32 for 16-bit inputs and float64 for others.
    """
    group = case.heads // case.kv_heads
    scale = 1 / math.sqrt(case.head_dim)
    if wide is None:
        wide = torch.float32 if x.q.dtype.itemsize == 2 else torch.float64
    results = {"o": torch.zeros(x.do.shape, dtype=wide, device=x.q.device)}
    if case.backward:
        for name in x.names:
            leaf = getattr(x, name)
            results[f"d{name}"] = torch.zeros(leaf.shape, dtype=wide, device=x.q.device)
    at_once = max(_SCORES_AT_ONCE[x.q.device.type] // (group * case.keys), 1)  # query rows of a chunk, over the batch
    rows = min(at_once, case.queries)
    batches = min(max(at_once // rows, 1), case.batch)
    with torch.no_grad():
        for b in _slices(case.batch, batches):
            for g in range(case.kv_heads):
                for r in _slices(case.queries, rows):
                    _chunk(case, x, results, b, g, r, scale)
    return results


def exact_packed(case: packed.PackedCase, x: packed.PackedInputs, wide: torch.dtype | None = None) -> dict[str, Tensor]:
    """Compute o and gradients of a packed batch, in its layout, by one call of `exact` per sequence.

    The heads of a sequence are passed as the batch, so that one call computes them together.
    """
    if wide is None:
        wide = torch.float32 if x.do.dtype.itemsize == 2 else torch.float64
    shapes = {"o": x.do.shape} | ({f"d{name}": leaf.shape for name, leaf in x.named.items()} if case.backward else {})
    results = {name: torch.zeros(shape, dtype=wide, device=x.do.device) for name, shape in shapes.items()}
    with torch.no_grad():
        for b, (rows, n) in enumerate(zip(case.sequences, case.lengths, strict=True)):
            q, k, v, do = (t[rows].transpose(0, 1)[:, None] for t in (*x.leaves[:3], x.do))
            bias = packed.matrix(case, x.named["bias"], b)[:, None] if case.bias else None
            shape = None if bias is None else (bias.shape[0], 1, bias.shape[2], n)
            one = Case("", case.heads, 1, 1, n, n, case.head_dim, case.causal, shape, case.dtype, case.backward)
            found = exact(one, CaseInputs(q, k, v, bias, do), wide)
            for name in ("o", "dq", "dk", "dv"):
                if name in found:
                    results[name][rows] = found[name][:, 0].transpose(0, 1)
            if "dbias" in found:
                packed.add_gradient(case, results["dbias"], found["dbias"][:, 0], b)
    return results


def _slices(length: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def _chunk(case: Case, x: CaseInputs, results: dict[str, Tensor], b: slice, g: int, r: slice, scale: float) -> None:
    """Compute batch elements ``b``, query rows ``r`` and the query heads of key/value head ``g``."""
    group = case.heads // case.kv_heads
    wide = results["o"].dtype
    h, one = slice(g * group, (g + 1) * group), slice(g, g + 1)
    q, do = x.q[b, h, r].to(wide), x.do[b, h, r].to(wide)
    k, v = x.k[b, one].to(wide), x.v[b, one].to(wide)
    s = scale * (q @ k.mT)
    part: tuple[Any, ...] = ()
    runs = torch.arange(b.start, b.stop, device=s.device) // case.run
    if x.bias is not None:  # slice(None) for an axis that broadcasts
        part = tuple(
            slice(None) if size == 1 else axis for size, axis in zip(x.bias.shape, (b, h, r, slice(None)), strict=True)
        )
        s += x.bias[part] if case.run == 1 else x.bias[(runs, *part[1:])]
    i = torch.arange(case.queries, device=s.device)[r, None] + case.keys - case.queries
    distance = torch.arange(case.keys, device=s.device)[None, :] - i  # 0 between the last query and the last key
    trained = None
    if case.term is not None and x.term is not None:
        trained = terms.own(case.term, b, h, r)
        s += terms.part(case.term, x.term[trained].to(wide), distance)
    if case.causal:
        s.masked_fill_(distance > 0, -torch.inf)
    if case.window is not None:
        s.masked_fill_(distance <= -case.window, -torch.inf)
    if case.mask is not None and sparse.keep(case.mask) is not None:
        own = sparse.scores(case.heads, case.keys)[0, h].to(s.device)
        s.masked_fill_(~sparse.kept(case.mask, own, distance, case.causal), -torch.inf)
    elif case.mask is not None:
        keys, row = torch.arange(case.keys, device=s.device), torch.arange(r.start, r.stop, device=s.device)[:, None]
        seen = sparse.seen(case.mask, case.queries, case.keys, s.device)
        s.masked_fill_(~seen(row, keys), -torch.inf)
    if x.mask is not None:
        s.masked_fill_(~x.mask[b], -torch.inf)
    if x.sink is not None:  # an additional column without a value
        s = torch.cat([s, x.sink[h, None, None].to(wide).expand(*s.shape[:3], 1)], -1)
    p = torch.softmax(s, dim=-1)
    p, p_sink = p[..., : case.keys], p[..., case.keys :]
    z: Tensor | float = 1.0
    if case.dropout:
        z = _dropout(case, b, h, r, x.q.device).to(wide)
    o = (z * p) @ v
    results["o"][b, h, r] = o
    if not case.backward:
        return
    results["dv"][b, one] += ((z * p).mT @ do).sum(1, keepdim=True)
    delta = (do * o).sum(-1, keepdim=True)
    if x.sink is not None:
        results["dsink"][h] -= (p_sink * delta).sum((0, 2, 3))
    ds = p * (z * (do @ v.mT) - delta)
    results["dq"][b, h, r] = scale * (ds @ k)
    results["dk"][b, one] += scale * (ds.mT @ q).sum(1, keepdim=True)
    if x.bias is not None:
        if case.run == 1:
            results["dbias"][part] += ds.sum_to_size(x.bias[part].shape)
        else:
            results["dbias"][(slice(None), *part[1:])].index_add_(0, runs, ds)
    if case.term is not None and x.term is not None and trained is not None:
        results["dterm"][trained] += terms.part_gradient(case.term, x.term[trained], ds, distance)


def _dropout(case: Case, b: slice, h: slice, r: slice, device: torch.device) -> Tensor:
    """Return the dropout factors of a chunk's probabilities."""
    threshold = dropout.threshold(case.dropout)
    batches, heads, rows = (torch.arange(x.start, x.stop, device=device) for x in (b, h, r))
    seed = torch.tensor(DROPOUT_SEED, device=device)
    words = dropout.stream(seed, batches[:, None, None, None], heads[:, None, None])
    kept = dropout.kept(words, rows[:, None], torch.arange(case.keys, device=device), threshold)
    return kept * dropout.weight(threshold)


def errors(found: dict[str, Tensor], right: dict[str, Tensor]) -> dict[str, float]:
    """Return |found - right| / |right| (Euclidean norms) of each tensor's worst head; of o's worst row.

    A norm over a whole tensor would hide errors in the last rows, where a causal result is small. Gradients are not
    compared by row, since a row may cancel to zero.
    """
    return {name: _error(found[name], right[name], by_row=name == "o") for name in right}


def errors_packed(case: packed.PackedCase, found: dict[str, Tensor], right: dict[str, Tensor]) -> dict[str, float]:
    """Like `errors`, but of a packed batch: the worst sequence and head of a gradient, the worst row of o.

    A gradient's error is relative to its own norm or, if larger, to the average norm of as many elements: the
    gradients of a sequence of one token cancel to zero.
    """
    worst = {}
    for name, exact in right.items():
        if found[name].shape != exact.shape:
            raise ValueError(f"the shape is {tuple(found[name].shape)}, not {tuple(exact.shape)}")
        off, own = (_by_sequence(case, name, x) for x in (found[name].detach().to(exact.dtype) - exact, exact))
        if name != "o":
            sizes = _by_sequence(case, name, torch.ones_like(exact))
            own = torch.maximum(own, own.sum(0) * sizes / sizes.sum(0))
        worst[name] = (off / own.clamp_min(torch.finfo(own.dtype).tiny)).max().sqrt().item()
    return worst


def _by_sequence(case: packed.PackedCase, name: str, x: Tensor) -> Tensor:
    """Return sums of squares in float64: (B, H) for a gradient, (total, H) for o."""
    squares = x.double().square()
    squares = squares.sum(-1) if x.dim() == 3 else squares.mT  # a 2-D bias has its elements last
    if name == "o":
        return squares
    ragged = name == "dbias" and case.bias == "ragged"
    counts = torch.tensor([n * n if ragged else n for n in case.lengths], device=x.device)
    number = torch.repeat_interleave(torch.arange(len(counts), device=x.device), counts)
    return squares.new_zeros(len(counts), squares.shape[1]).index_add_(0, number, squares)


def wrong(errors: dict[str, float], case: AnyCase) -> str:
    """Describe the errors that exceed `TOLERANCES` or are NaN; return "" if there are none."""
    tolerance = TOLERANCES[case.dtype]
    return ", ".join(f"{name} is off by {e:.1e} of its norm" for name, e in errors.items() if not e <= tolerance)


def _error(found: Tensor, right: Tensor, by_row: bool) -> float:
    if found.shape != right.shape:
        raise ValueError(f"the shape is {tuple(found.shape)}, not {tuple(right.shape)}")
    # a matrix of softmax or matmul is one head
    found, right = (x.flatten(0, 1) if x.dim() == 4 else x[None] for x in (found.detach(), right))
    at_once = max((1 << 27) // max(right[0].numel(), 1), 1)
    dims = (-1,) if by_row else (-2, -1)
    worst = []
    for a, b in zip(found.split(at_once), right.split(at_once), strict=True):
        norm = torch.linalg.vector_norm(b, dim=dims).clamp_min(torch.finfo(b.dtype).tiny)
        worst.append((torch.linalg.vector_norm(a.to(b.dtype) - b, dim=dims) / norm).max())
    return torch.stack(worst).max().item()  # NaN if there is one
