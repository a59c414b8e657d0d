"""Masks and windows for what a score_mod hides: a window, a mask of keys, a captured matrix, or a TileMask."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.integrations.score_mod.symbols import (
    BOOL,
    Affine,
    Index,
    affine_of,
    by_distance,
    fingerprint,
    unsupported,
    words,
)
from tilewise.integrations.score_mod.values import KEY, QUERY, ROW, ScoreShape, captured_view, computed, four_dims
from tilewise.masks.block_sparse import TileMask, cached_mask
from tilewise.spec.score import Window


class Hidden(NamedTuple):
    """Arguments of `tilewise.attention` for what is hidden; biases: of 0 and -inf."""

    window: Window | None
    mask: Any
    biases: list[Tensor]


def hidden_by(score_mod: Any, conditions: tuple[Index, ...], shape: ScoreShape, block_mask: Any) -> Hidden:
    """Return the arguments for the conditions under which a score is visible, beside ``block_mask``.

    Raises:
        NotImplementedError: a condition of queries and keys beside ``block_mask``.
    """
    lo, hi, others = visible_distances(conditions)
    diagonal = shape.N - shape.M
    window = (
        None
        if lo is None and hi is None
        else (None if lo is None else diagonal - lo, None if hi is None else hi - diagonal)
    )
    is_window = window is None or ((window[0] or 0) >= 0 and (window[1] or 0) >= 0)
    found = [(x, condition_mask(x, shape)) for x in others]
    pairs = [(x, mask) for x, mask in found if mask is None or 1 not in mask.shape[2:]]
    mask = block_mask
    if pairs or not is_window:
        first = pairs[0][0] if pairs else conditions[0]
        if block_mask is not None:
            raise unsupported(
                f"hides by {words(first)} beside block_mask", "combine them in one block_mask, by PyTorch's and_masks"
            )
        if not pairs:
            mask = _band(lo, hi, shape)
        elif is_window and len(pairs) == 1 and pairs[0][1] is not None:
            mask = pairs[0][1]
        else:
            mask = _tile_mask(score_mod, [x for x, _ in pairs] if is_window else list(conditions), shape)
    # Each condition of keys or of queries is a mask, or a bias of -inf beside another mask.
    vectors = [mask for _, mask in found if mask is not None and 1 in mask.shape[2:]]
    if mask is None and vectors:
        mask = vectors.pop()
    biases = [torch.where(x, 0.0, -math.inf) for x in vectors]
    return Hidden(window if is_window else None, mask, biases)


def _band(lo: int | None, hi: int | None, shape: ScoreShape) -> TileMask:
    """Return the mask of distances from ``lo`` to ``hi``, of which none is the window of a query."""
    keys = torch.arange(shape.N, device=shape.device)
    begins = torch.zeros_like(keys) if hi is None else keys - hi
    ends = torch.full_like(keys, shape.M) if lo is None else keys - lo + 1
    return TileMask.from_intervals(begins[None, None], ends[None, None], shape.M)


def _tile_mask(score_mod: Any, conditions: list[Index], shape: ScoreShape) -> TileMask:
    """Return the TileMask of conditions of queries and keys, cached for a function while its tensors are unchanged."""
    variables = frozenset().union(*(x.variables for x in conditions))
    batch, heads = shape.B if "b" in variables else 1, shape.H if "h" in variables else 1

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        indices = {"b": b, "h": h, "q": q, "kv": kv}
        seen = condition(conditions[0], indices)
        for x in conditions[1:]:
            seen = seen & condition(x, indices)
        return seen

    def make() -> TileMask:
        return TileMask.from_mask_mod(mask_mod, shape.M, shape.N, batch=batch, heads=heads, device=shape.device)

    if torch.compiler.is_compiling() or not isinstance(score_mod, (FunctionType, partial)):
        return make()
    tensors: list[Tensor] = []
    key = (shape, tuple(fingerprint(x, tensors) for x in conditions))
    return cached_mask(score_mod, key, tensors, shape.device, make)


class Visible(NamedTuple):
    """Limits of the visible distances kv - q, and the conditions that are no such limits."""

    lo: int | None
    hi: int | None
    conditions: list[Index]


def visible_distances(conditions: tuple[Index, ...]) -> Visible:
    """Return the range of distances that the conditions say, and the other conditions."""
    lo, hi, others, left = None, None, [], list(conditions)
    while left:
        x = left.pop(0)
        bools = all(isinstance(y, Index) and y.name in BOOL for y in x.args)
        if x.name == "and" or (x.name == "logical_and" and bools):
            left = [*x.args, *left]
            continue
        limits = _limits(x)
        if limits is None:
            others.append(x)
            continue
        if limits[0] is not None:
            lo = limits[0] if lo is None else max(lo, limits[0])
        if limits[1] is not None:
            hi = limits[1] if hi is None else min(hi, limits[1])
    return Visible(lo, hi, others)


def _limits(x: Index) -> tuple[int | None, int | None] | None:
    """Return the first and the last distance of a comparison of distances with a number, None for no limit; or None."""
    if x.name == "not":
        limits = _limits(x.args[0])
        if limits is None or None not in limits:
            return None
        lo, hi = limits
        return None if hi is None else hi + 1, None if lo is None else lo - 1
    if x.name not in ("ge", "gt", "le", "lt"):
        return None
    first, second = x.args
    if x.name in ("ge", "gt"):
        first, second = second, first
    strict = x.name in ("gt", "lt")
    left, right = affine_of(first), affine_of(second)
    if left is None and isinstance(first, Index) and first.name == "abs" and right is not None:
        inside = affine_of(first.args[0])
        if inside is None or not by_distance(inside) or any(right[:4]):
            return None
        bound = Affine(0, 0, 0, 0, 0)
        ends = [_bound(bound.plus(inside, sign).plus(right, -1), strict) for sign in (1, -1)]
        return max(e[0] for e in ends if e[0] is not None), min(e[1] for e in ends if e[1] is not None)
    if left is None or right is None:
        return None
    form = left.plus(right, -1)
    if not by_distance(form):
        return None
    return _bound(form, strict)


def _bound(form: Affine, strict: bool) -> tuple[int | None, int | None]:
    """Return the limits of the distances at which ``form <= 0``, or ``form < 0``."""
    constant = form.constant + strict
    if form.kv > 0:
        return None, -constant // form.kv
    return -(-constant // -form.kv), None


def condition(x: Any, indices: Mapping[str, Tensor]) -> Tensor:
    """Return `computed` of a condition, which must be bool, as for ``torch.where``."""
    found: Tensor = computed(x, indices)
    if found.dtype != torch.bool:
        raise TypeError(f"score_mod: the condition {words(x)} must be bool, got {found.dtype}")
    return found


def condition_mask(x: Index, shape: ScoreShape) -> Tensor | None:
    """Return a condition of keys or of queries, or of a captured bool matrix, as a mask; None for others."""
    if x.variables - ROW in (frozenset(), KEY, QUERY):
        return four_dims(condition(x, shape.indices(x.variables)))
    view = captured_view(x, shape) if x.name == "index" else None
    if view is None or view.distances is not None or view.values.dtype != torch.bool:
        return None
    return view.values
