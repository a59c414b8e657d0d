"""A packed batch one sequence after the other, by a backend that computes dense calls: views, and no copies.

The host reads where sequences begin. That costs nothing on the CPU; on a GPU it would wait, and the oracle does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from tilewise.backends import Gradients, Inputs, Needs, Outputs, empty_output, lse_dtype
from tilewise.problem import Problem
from tilewise.score.lengths import Place, places
from tilewise.score.parts import Parts
from tilewise.score.terms import Band, Distances, Score

Forward = Callable[[Problem, Inputs], Outputs]
Backward = Callable[[Problem, Inputs, Outputs, Outputs, Needs], Gradients]


def forward(run: Forward, problem: Problem, inputs: Inputs) -> Outputs:
    """By ``run``, which computes dense problems. Rows that belong to no sequence get o = 0 and lse = -inf."""
    if problem.totals is None:
        return run(problem, inputs)
    o = empty_output(inputs.q, problem.value_dim).zero_()
    lse = o.new_full(o.shape[:3], -torch.inf, dtype=lse_dtype(o.dtype))
    for x in _sequences(problem, inputs):
        if x.place.keys:
            found = run(x.problem, x.inputs)
            x.part("q", o).copy_(found.o)
            assert found.lse is not None
            x.part("q", lse).copy_(found.lse)
        elif x.inputs.sink is not None:
            x.part("q", lse).copy_(x.inputs.sink)
    return Outputs(o, lse)


def backward(
    run: Backward, problem: Problem, inputs: Inputs, outputs: Outputs, cotangents: Outputs, needs: Needs
) -> Gradients:
    """The same backwards. What sequences share gets a sum in the dtype of the LSE."""
    if problem.totals is None:
        return run(problem, inputs, outputs, cotangents, needs)
    named, shared = _named(inputs), _shared(problem, inputs)
    sums = {
        name: torch.zeros_like(x, dtype=lse_dtype(problem.dtype) if name in shared else x.dtype)
        for name, x in named.items()
        if getattr(needs, name, False)
    }
    for x in _sequences(problem, inputs, wide=shared & sums.keys()):
        if x.place.keys == 0:
            _sink_alone(x, cotangents, sums)
            continue
        own, own_cotangents = (
            Outputs(x.part("q", y.o), None if y.lse is None else x.part("q", y.lse)) for y in (outputs, cotangents)
        )
        found = run(x.problem, x.inputs, own, own_cotangents, needs)
        for name, total in sums.items():
            gradient = getattr(found, name)
            assert gradient is not None
            x.part(name, total).add_(gradient)
    return Gradients(*(
        sums[name].to(named[name].dtype) if name in sums else None for name in Gradients._fields
    ))  # fmt: skip


def _sink_alone(x: _Sequence, cotangents: Outputs, sums: dict[str, Tensor]) -> None:
    """Of queries without a key: lse = sink, so that dsink = dlse."""
    if "sink" in sums and cotangents.lse is not None and x.inputs.sink is not None:
        total = x.part("sink", sums["sink"])
        total.add_(x.part("q", cotangents.lse).sum_to_size(total.shape))


class _Sequence(NamedTuple):
    """One sequence as a dense call."""

    packed: Problem
    place: Place
    problem: Problem
    inputs: Inputs

    def part(self, name: str, x: Tensor) -> Tensor:
        return _part(self.packed, self.place, name, x)


def _named(inputs: Inputs) -> dict[str, Tensor]:
    """The tensors that may have a gradient, by the names of `Needs`."""
    parts = {} if inputs.parts is None else inputs.parts._asdict()
    every = {"q": inputs.q, "k": inputs.k, "v": inputs.v, "bias": inputs.bias, "sink": inputs.sink, **parts}
    return {name: x for name, x in every.items() if x is not None and name in Needs._fields}


def _shared(problem: Problem, inputs: Inputs) -> set[str]:
    """Which of `_named` have elements that several sequences read."""
    forms = () if problem.score.packed is None else problem.score.packed.forms
    named = _named(inputs)
    packed = {"q", "k", "v", "query", "key", *forms} | ({"bias"} if "ragged" in forms else set())
    return {name for name, x in named.items() if name not in packed and x.shape[0] == 1}


def _part(problem: Problem, place: Place, name: str, x: Tensor) -> Tensor:
    """Of an operand of the packed batch, or of what is laid out like it, the view that belongs to a sequence."""
    packed = problem.score.packed
    assert packed is not None
    assert problem.totals is not None
    if name in ("q", "query") or (name == "sink" and "sink" in packed.forms):
        return x[:, :, place.rows]
    if name in ("k", "v", "key"):
        return x[:, :, place.cols]
    if name == "bias" and "ragged" in packed.forms:
        pairs = place.queries * place.keys
        return x[:, :, 0, place.first_pair : place.first_pair + pairs].unflatten(2, (place.queries, place.keys))
    if name in packed.forms:
        along_keys = x.shape[2] == 1 and x.shape[3] == problem.totals[1]
        return x[..., place.cols] if along_keys else x[:, :, place.rows]
    if x.shape[0] > 1:
        x = x[place.number : place.number + 1]
    if name == "sink":
        return x
    if name == "toeplitz":
        count = max(place.queries + place.keys - 1, 0)
        first = packed.max_q - place.queries if "from_start" in packed.forms else packed.max_k - place.keys
        return x[..., first : first + count]
    rows = x[:, :, : place.queries] if x.shape[2] > 1 else x
    return rows[..., : place.keys] if x.shape[3] > 1 else rows


def _sequences(problem: Problem, inputs: Inputs, wide: Collection[str] = ()) -> Iterator[_Sequence]:
    """Those that have queries. ``wide``: what goes in in the LSE's dtype, for a gradient that is not rounded yet."""
    packed = problem.score.packed
    assert inputs.lengths is not None
    assert packed is not None
    assert problem.totals is not None
    pairs = None if inputs.bias is None or "ragged" not in packed.forms else inputs.bias.shape[3]
    dense: dict[tuple, Problem] = {}
    for place in places(inputs.lengths, packed, problem.totals, pairs):
        if place.queries == 0:
            continue
        found = _dense_inputs(problem, inputs, place, wide)
        score = _dense_score(problem, inputs, place)
        sequence = place.number if inputs.seed is not None else 0
        key = (place.queries, place.keys, score, sequence)
        if key not in dense:
            dense[key] = replace(
                Problem.of(
                    *found, score, bias_grad=problem.bias_grad, sink_grad=problem.sink_grad,
                    part_grads=() if problem.parts is None else problem.parts.grads,
                    deterministic=problem.deterministic, exact=problem.exact,
                ),
                sequence=sequence,
            )  # fmt: skip
        yield _Sequence(problem, place, dense[key], found)


def _dense_inputs(problem: Problem, inputs: Inputs, place: Place, wide: Collection[str]) -> Inputs:
    def part(name: str, x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        view = _part(problem, place, name, x)
        return view.to(lse_dtype(problem.dtype)) if name in wide else view

    parts = inputs.parts
    if parts is not None:
        parts = Parts(
            **{name: part(name, getattr(parts, name)) for name in ("cols", "rows", "query", "key", "toeplitz")},
            query_buckets=parts.query_buckets,
            key_buckets=parts.key_buckets,
        )
    q, k, v, bias, mask, sink = (
        part(name, x) for name, x in zip(("q", "k", "v", "bias", "mask", "sink"), inputs[:6], strict=True)
    )
    assert q is not None
    assert k is not None
    assert v is not None
    return Inputs(q, k, v, bias, mask, sink, parts, inputs.seed)


def _dense_score(problem: Problem, inputs: Inputs, place: Place) -> Score:
    """With the band, and with distances, counted from this sequence's first query and key."""
    score, parts = problem.score, inputs.parts
    band = score.band.shifted(place.keys - place.queries)
    found: dict[str, Distances | None] = {"query": score.query, "key": score.key}
    for name, distances in found.items():
        shift = None if parts is None else getattr(parts, f"{name}_shift")
        if distances is None:
            continue
        if shift is not None:
            known = int(shift[place.number if shift.shape[0] > 1 else 0])
            found[name] = distances = replace(distances, lo=distances.lo - known)
        if distances.outside == "hidden":  # tiles beyond it are not even visited
            band = band.both(Band(distances.lo, distances.hi))
    return replace(score, band=band, packed=None, query=found["query"], key=found["key"])
