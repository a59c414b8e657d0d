"""Packed batches for backends with dense calls only: one call after the other.

Operands are views; results are copied into the packed tensors.

Consecutive sequences of equal lengths are one dense batch, because a call per short sequence would be mostly overhead.

The host reads the sequence offsets. This is free on the CPU; on a GPU (reference only) the host synchronizes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.backends import (
    Gradients,
    Inputs,
    Needs,
    Outputs,
    blank_statistics,
    empty_low_bits,
    empty_output,
    lse_dtype,
)
from tilewise.backends.protocol import INPUT_NAMES, OPERANDS
from tilewise.spec.bias_components import DIFFERENTIABLE, Parts
from tilewise.spec.problem import Problem
from tilewise.spec.score import Band, Distances, Score
from tilewise.spec.seqlens import SequencePlace, places

PAIRS = 2**20  # query-key pairs per head in a run of sequences at most: a larger call saves nothing

Forward = Callable[[Problem, Inputs], Outputs]
Backward = Callable[[Problem, Inputs, Outputs, Outputs, Needs], Gradients]


def forward(run: Forward, problem: Problem, inputs: Inputs) -> Outputs:
    """Compute a forward with the dense ``run``. Rows of no sequence get o = 0, lse = -inf."""
    if problem.totals is None:
        return run(problem, inputs)
    o = empty_output(inputs.q, problem.value_dim).zero_()
    lse = o.new_full(o.shape[:3], -torch.inf, dtype=lse_dtype(o.dtype))
    o_low = empty_low_bits(o, problem)
    if o_low is not None:
        o_low.zero_()
    statistics = blank_statistics(o, problem)
    for x in dense_calls(problem, inputs):
        if x.run.keys:
            found = run(x.problem, x.inputs)
            x.part("q", o).copy_(found.o)
            assert found.lse is not None
            x.part("q", lse).copy_(found.lse)
            if o_low is not None and found.o_low is not None:
                x.part("q", o_low).copy_(found.o_low)
            if statistics is not None and found.statistics is not None:
                x.part("q", statistics).copy_(found.statistics)
        elif x.inputs.sink is not None:
            x.part("q", lse).copy_(x.inputs.sink)
    return Outputs(o, lse, o_low, statistics)


def backward(
    run: Backward, problem: Problem, inputs: Inputs, outputs: Outputs, cotangents: Outputs, needs: Needs
) -> Gradients:
    """Compute a backward with the dense ``run``; sum shared gradients in the LSE's dtype."""
    if problem.totals is None:
        return run(problem, inputs, outputs, cotangents, needs)
    named, shared = _named(inputs), shared_names(problem, inputs)
    sums = {
        name: torch.zeros_like(x, dtype=lse_dtype(problem.dtype) if name in shared else x.dtype)
        for name, x in named.items()
        if getattr(needs, name, False)
    }
    for x in dense_calls(problem, inputs, wide=shared & sums.keys()):
        if x.run.keys == 0:
            _sink_alone(x, cotangents, sums)
            continue
        own, own_cotangents = (
            Outputs(*(None if z is None else x.part("q", z) for z in y))  # type: ignore[arg-type]
            for y in (outputs, cotangents)
        )
        found = run(x.problem, x.inputs, own, own_cotangents, needs)
        for name, total in sums.items():
            gradient = getattr(found, name)
            assert gradient is not None
            x.part(name, total).add_(gradient)
    return Gradients(*(
        sums[name].to(named[name].dtype) if name in sums else None for name in Gradients._fields
    ))  # fmt: skip


def _sink_alone(x: DenseCall, cotangents: Outputs, sums: dict[str, Tensor]) -> None:
    """Add the sink gradient of queries without a key: lse = sink, so dsink = dlse."""
    if "sink" in sums and cotangents.lse is not None and x.inputs.sink is not None:
        total = x.part("sink", sums["sink"])
        total.add_(x.part("q", cotangents.lse).sum_to_size(total.shape))


class _SequenceRun(NamedTuple):
    """Consecutive sequences of equal lengths."""

    first: SequencePlace
    batch: int  # number of sequences
    step: int  # rows between the first keys of two neighbours

    @property
    def queries(self) -> int:
        return self.first.queries

    @property
    def keys(self) -> int:
        return self.first.keys

    def rows(self, x: Tensor) -> Tensor:
        """View the queries of an operand (1, H, total_q, ...) as (batch, H, queries, ...)."""
        return self._windows(x, 2, self.first.first_query, self.queries, self.queries)

    def cols(self, x: Tensor, dim: int) -> Tensor:
        """View the keys, axis ``dim`` of an operand with leading axes (1, H), with a leading batch axis."""
        return self._windows(x, dim, self.first.first_key, self.keys, self.step)

    def pairs(self, x: Tensor) -> Tensor:
        """View the matrices of a ragged bias (1, H|1, 1, pairs) as (batch, H|1, queries, keys)."""
        first, size = self.first.first_pair, self.queries * self.keys
        found = x[0, :, 0, first : first + self.batch * size]
        return found.unflatten(1, (self.batch, self.queries, self.keys)).transpose(0, 1)

    def _windows(self, x: Tensor, dim: int, first: int, size: int, step: int) -> Tensor:
        if self.batch == 1:
            return x.narrow(dim, first, size)
        found = x[0].narrow(dim - 1, first, (self.batch - 1) * step + size).unfold(dim - 1, size, step)
        return found.movedim((dim - 1, -1), (0, dim))


def _runs(found: list[SequencePlace], shifts: list[tuple[int, ...]], ragged: bool) -> Iterator[_SequenceRun]:
    """Group the sequences that have queries into runs. ``shifts``: `_shifts` of each sequence."""
    run: _SequenceRun | None = None
    for x in found:
        if x.queries == 0:
            continue
        longer = None if run is None else _extended(run, x, shifts, ragged)
        if run is not None and longer is None:
            yield run
        run = longer or _SequenceRun(x, 1, 0)
    if run is not None:
        yield run


def _extended(run: _SequenceRun, x: SequencePlace, shifts: list[tuple[int, ...]], ragged: bool) -> _SequenceRun | None:
    """Return the run extended by the sequence ``x``; None if ``x`` does not fit."""
    first, n = run.first, run.batch
    step = run.step or x.first_key - first.first_key
    pairs = x.queries * x.keys
    fits = (
        x.keys > 0
        and x.number == first.number + n
        and (x.queries, x.keys, shifts[x.number]) == (first.queries, first.keys, shifts[first.number])
        and x.first_key == first.first_key + n * step
        and (not ragged or x.first_pair == first.first_pair + n * pairs)
        and (n + 1) * pairs <= PAIRS
    )
    return run._replace(batch=n + 1, step=step) if fits else None


class DenseCall(NamedTuple):
    """Dense call of a run of sequences."""

    packed: Problem
    run: _SequenceRun
    problem: Problem
    inputs: Inputs

    def part(self, name: str, x: Tensor) -> Tensor:
        return _part(self.packed, self.run, name, x)


def _named(inputs: Inputs) -> dict[str, Tensor]:
    """Return the tensors that may have a gradient, by the names of `Needs`."""
    return {name: x for name, x in zip(Needs._fields, inputs.differentiable(), strict=True) if x is not None}


def shared_names(problem: Problem, inputs: Inputs) -> set[str]:
    """Return the names of the tensors in `_named` with elements that several sequences read."""
    forms = () if problem.score.packed is None else problem.score.packed.forms
    packed = {*forms, *["bias"] * ("ragged" in forms)}
    return {
        name for name, x in _named(inputs).items()
        if not OPERANDS[name].packed and name not in packed and x.shape[0] == 1
    }  # fmt: skip


def _part(problem: Problem, run: _SequenceRun, name: str, x: Tensor) -> Tensor:
    """View the elements of a run in an operand of the packed batch, or in a tensor of that layout."""
    packed = problem.score.packed
    assert packed is not None
    assert problem.totals is not None
    if OPERANDS[name].packed:
        return run.rows(x) if "M" in OPERANDS[name].sizes(2) else run.cols(x, 2)
    if name == "sink" and "sink" in packed.forms:
        return run.rows(x)
    if name == "bias" and "ragged" in packed.forms:
        return run.pairs(x)
    if name in packed.forms:
        along_keys = x.shape[2] == 1 and x.shape[3] == problem.totals[1]
        return run.cols(x, 3) if along_keys else run.rows(x)
    if x.shape[0] > 1:
        x = x[run.first.number : run.first.number + run.batch]
    if name == "sink":
        return x
    if name == "toeplitz":
        count = max(run.queries + run.keys - 1, 0)
        first = packed.max_q - run.queries if "from_start" in packed.forms else packed.max_k - run.keys
        return x[..., first : first + count]
    rows = x[:, :, : run.queries] if x.shape[2] > 1 else x
    return rows[..., : run.keys] if x.shape[3] > 1 else rows


def dense_calls(problem: Problem, inputs: Inputs, wide: Collection[str] = ()) -> Iterator[DenseCall]:
    """Yield a dense call for each run. ``wide``: operands in the LSE's dtype, for unrounded gradients."""
    packed = problem.score.packed
    assert inputs.lengths is not None
    assert packed is not None
    assert problem.totals is not None
    ragged = inputs.bias is not None and "ragged" in packed.forms
    pairs = inputs.bias.shape[3] if ragged and inputs.bias is not None else None
    found = places(inputs.lengths, packed, problem.totals, pairs)
    dense: dict[tuple, Problem] = {}
    for run in _runs(found, _shifts(inputs, len(found)), ragged):
        own = _dense_inputs(problem, inputs, run, wide)
        score = _dense_score(problem, inputs, run)
        sequence = run.first.number if inputs.seed is not None else 0
        key = (run.batch, run.queries, run.keys, score, sequence)
        if key not in dense:
            dense[key] = replace(
                Problem.of(
                    *own, score, bias_grad=problem.bias_grad, sink_grad=problem.sink_grad,
                    part_grads=() if problem.parts is None else problem.parts.grads,
                    deterministic=problem.deterministic, exact=problem.exact,
                ),
                sequence=sequence,
            )  # fmt: skip
        yield DenseCall(problem, run, dense[key], own)


def _shifts(inputs: Inputs, count: int) -> list[tuple[int, ...]]:
    """Return the query and key shifts of each sequence's relative positions, as far as tensors hold them."""
    parts = inputs.parts
    tensors = [] if parts is None else [x for x in (parts.query_shift, parts.key_shift) if x is not None]
    columns = [x.tolist() if x.shape[0] > 1 else x.tolist() * count for x in tensors]
    return list(zip(*columns, strict=True)) if columns else [()] * count


def _dense_inputs(problem: Problem, inputs: Inputs, run: _SequenceRun, wide: Collection[str]) -> Inputs:
    def part(name: str, x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        view = _part(problem, run, name, x)
        return view.to(lse_dtype(problem.dtype)) if name in wide else view

    parts = inputs.parts
    if parts is not None:
        parts = Parts(
            **{name: part(name, getattr(parts, name)) for name in DIFFERENTIABLE},
            query_buckets=parts.query_buckets,
            key_buckets=parts.key_buckets,
        )
    q, k, v, bias, mask, sink = (part(name, x) for name, x in zip(INPUT_NAMES[:6], inputs[:6], strict=True))
    assert q is not None
    assert k is not None
    assert v is not None
    return Inputs(q, k, v, bias, mask, sink, parts, inputs.seed)


def _dense_score(problem: Problem, inputs: Inputs, run: _SequenceRun) -> Score:
    """Return a run's score: window and distances relative to each sequence's first query and key."""
    score, parts = problem.score, inputs.parts
    band = score.band.shifted(run.keys - run.queries)
    found: dict[str, Distances | None] = {"query": score.query, "key": score.key}
    for name, distances in found.items():
        shift = None if parts is None else getattr(parts, f"{name}_shift")
        if distances is None:
            continue
        if shift is not None:
            known = int(shift[run.first.number if shift.shape[0] > 1 else 0])
            found[name] = distances = replace(distances, lo=distances.lo - known)
        if distances.outside == "hidden":  # do not visit tiles beyond the window of these distances
            band = band.both(Band(distances.lo, distances.hi))
    return replace(score, band=band, packed=None, query=found["query"], key=found["key"])
