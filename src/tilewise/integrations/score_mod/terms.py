"""Bias terms for what a score_mod adds.

What is added is split into addends. Each is computed once for the indices that it depends on: along the keys, along
the queries, or along the M + N - 1 distances kv - q. One that depends on queries and keys otherwise must be a captured
matrix, of which a view is passed. No array of queries times keys is made.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

from tilewise.bias import Alibi, RelativeBias, alibi
from tilewise.integrations.score_mod.score import TracedScore
from tilewise.integrations.score_mod.symbols import NUMBERS, Affine, Index, affine_of, by_distance, unsupported, words
from tilewise.integrations.score_mod.values import (
    DISTANCE,
    KEY,
    QUERY,
    ROW,
    ScoreShape,
    captured_view,
    computed,
    four_dims,
)

Bias = Tensor | RelativeBias | Alibi


def bias_terms(score: TracedScore, shape: ScoreShape) -> list[Bias]:
    """Return the terms of ``bias=`` for what is added to a score.

    Raises:
        NotImplementedError: naming an addend that depends on queries and keys, and is no captured matrix.
    """
    found: list[Bias] = []
    for coefficient, x in score.addends:
        found += _terms(coefficient, x, shape)
    return found


def _terms(coefficient: float, x: Any, shape: ScoreShape) -> list[Bias]:
    number, factors = _factors(x)
    term = _term(coefficient * number, factors, shape)
    if term is not None:
        return [term]
    parts = _split(x)
    if parts is None:
        raise unsupported(
            f"adds {words(x)}, which depends on q_idx and kv_idx",
            "compute such a bias before, and add bias[b, h, q_idx, kv_idx]; or hide by torch.where(visible, score, "
            "-float('inf'))",
        )
    return [term for number, part in parts for term in _terms(coefficient * number, part, shape)]


def _factors(x: Any) -> tuple[float, list[Any]]:
    """Return a number and expressions whose product is ``x``."""
    if isinstance(x, NUMBERS):
        return float(x), []
    if isinstance(x, Index) and x.affine is None and not x.kwargs:
        if x.name == "neg":
            number, factors = _factors(x.args[0])
            return -number, factors
        if x.name == "mul":
            first, second = (_factors(y) for y in x.args)
            return first[0] * second[0], first[1] + second[1]
        if x.name == "div" and isinstance(x.args[1], NUMBERS):
            number, factors = _factors(x.args[0])
            return number / x.args[1], factors
    return 1.0, [x]


def _split(x: Any) -> list[tuple[float, Any]] | None:
    """Return numbers and expressions whose products sum to ``x``; None if it is no sum, nor a product with one."""
    if not isinstance(x, Index) or x.kwargs:
        return None
    if x.affine is not None:
        return _split_affine(x, x.affine)
    if x.name in ("add", "sub"):
        return [(1.0, x.args[0]), (1.0 if x.name == "add" else -1.0, x.args[1])]
    if x.name == "neg":
        return [(-1.0, x.args[0])]
    if x.name == "div" and isinstance(x.args[1], NUMBERS):
        return [(1 / x.args[1], x.args[0])]
    if x.name == "mul":
        for one, other in (x.args, x.args[::-1]):
            parts = _split(one)
            if parts is not None:
                return [(number, part * other) for number, part in parts]
    return None


def _split_affine(x: Index, form: Affine) -> list[tuple[float, Any]] | None:
    if not form.q or not form.kv:
        return None
    query, rest = form._replace(b=0, h=0, kv=0, constant=0), form._replace(q=0)
    return [(1.0, Index("sum", None, (), {}, x.device, part)) for part in (query, rest)]


def _term(coefficient: float, factors: list[Any], shape: ScoreShape) -> Bias | None:
    """Return the term of a product; None if it depends on queries and keys, and is no captured matrix."""
    variables: frozenset[str] = frozenset()
    for x in factors:
        if isinstance(x, Index):
            variables = variables | x.variables
    among = variables - ROW
    if among not in (frozenset(), DISTANCE, QUERY, KEY):
        return _captured(coefficient, factors[0], shape) if len(factors) == 1 else None
    if among == DISTANCE:
        found = _alibi(coefficient, factors, shape)
        if found is not None:
            return found
    values = _values(coefficient, factors, shape, variables)
    return RelativeBias(values, lo=1 - shape.M, query_start=0) if among == DISTANCE else values


def _values(coefficient: float, factors: list[Any], shape: ScoreShape, variables: frozenset[str]) -> Tensor:
    """Return the product as a tensor of four dimensions, in the dtype of scores."""
    indices = shape.indices(variables)
    total: Any = None
    for x in factors:
        numbers = computed(x, indices)
        total = numbers if total is None else total * numbers
    if total is None:
        return torch.full((1, 1, 1, 1), coefficient, dtype=shape.dtype, device=shape.device)
    total = total.to(shape.dtype)
    return four_dims(total if coefficient == 1 else total * coefficient)


def _alibi(coefficient: float, factors: list[Any], shape: ScoreShape) -> Alibi | None:
    """Return the ALiBi term of a product of numbers per head and one distance, or its absolute value."""
    distances = [x for x in factors if isinstance(x, Index) and "distance" in x.variables]
    if len(distances) != 1:
        return None
    (distance,) = distances
    absolute = distance.name == "abs" and distance.affine is None
    form = affine_of(distance.args[0] if absolute else distance)
    if form is None or not by_distance(form) or form.constant % form.kv:
        return None
    slope = coefficient * (-abs(form.kv) if absolute else form.kv)
    others = [x for x in factors if x is not distance]
    variables: frozenset[str] = frozenset()
    for x in others:
        if isinstance(x, Index):
            variables = variables | x.variables
    slopes = _values(slope, others, shape, variables)[:, :, 0, 0]
    slopes = slopes[0] if slopes.shape[0] == 1 else slopes
    # Position of the key minus that of the query: kv - q, shifted.
    return alibi(slopes, "absolute" if absolute else "signed", query_start=0, key_start=form.constant // form.kv)


def _captured(coefficient: float, x: Any, shape: ScoreShape) -> Bias | None:
    """Return the term of an indexed tensor with axes of queries or keys, or None."""
    if not isinstance(x, Index) or x.name != "index":
        return None
    view = captured_view(x, shape)
    if view is None or not view.values.is_floating_point():
        return None
    values = view.values if coefficient == 1 else view.values * coefficient
    if view.distances is None:
        return values
    on: Literal["query", "key"] = "query" if "q" in view.axes else "key"
    form, entries = view.distances.affine, values.shape[3]
    if form is not None and abs(form.kv) == 1:
        first, last = sorted(form.constant + form.kv * end for end in (1 - shape.M, shape.N - 1))
        if first >= 0 and last < entries:
            return RelativeBias(values, lo=-form.constant, reverse=form.kv < 0, on=on, query_start=0)
    buckets = computed(view.distances, shape.indices(DISTANCE)).flatten()
    buckets = torch.where(buckets < 0, buckets + entries, buckets)  # as an index of a tensor
    return RelativeBias(values, lo=1 - shape.M, buckets=buckets, on=on, query_start=0)
