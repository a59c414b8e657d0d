"""Cache of calls, keyed by the layouts of their tensors and all other arguments."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.backends import Inputs
from tilewise.bias.autograd import Rule, is_node, vector_of
from tilewise.bias.terms import shift_of
from tilewise.bias.toeplitz import Alibi, T5Bias
from tilewise.cache import calls
from tilewise.frontend.arguments import Call, seed_tensor
from tilewise.masks.block_sparse import TileMask
from tilewise.operator.autograd import Found, eager_attention
from tilewise.operator.dispatch import Forward, forward_of, forward_variants
from tilewise.operator.eager import is_eager
from tilewise.operator.seed import drawn_seed
from tilewise.operator.structure import Variants, layouts, structure_of
from tilewise.operator.views import PackedViews, ShapedViews, Views
from tilewise.spec.bias_components import Parts
from tilewise.spec.score import Band, ScoreNumbers, Window
from tilewise.spec.statistics import NO_STATISTICS, Statistics

Limits = tuple[bool, Window | None]  # causal and window


class Cached(NamedTuple):
    """Cached call: its numbers, the prepared forward, and what it takes for the caller's inputs.

    views: of the inputs, if it does not take these. vector: arguments of `vector_of` for a bias term.
    """

    terms: ScoreNumbers
    run: Forward
    views: Views | None = None
    vector: tuple[Rule, int, int] | None = None


def settings_key(
    causal: bool = False, window: Window | None = None, scale: float | None = None, softcap: float | None = None,
    dropout_p: float = 0.0, deterministic: bool | None = None, backend: str | None = None,
    statistics: Statistics = NO_STATISTICS,
) -> tuple | None:  # fmt: skip
    """Return the arguments of `tilewise.attention` besides its tensors and seed, for a key. None if a call with them is
    not cached: True equals 1, so only exact types are."""
    if (
        (causal is False or causal is True) and type(dropout_p) is float and 0.0 <= dropout_p <= 1.0
        and (scale is None or type(scale) is float) and (softcap is None or type(softcap) is float)
        and (window is None or (type(window) is tuple and all(x is None or type(x) is int for x in window)))
        and (deterministic is None or type(deterministic) is bool) and (backend is None or type(backend) is str)
    ):  # fmt: skip
        ordered = torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic
        return causal, ordered, backend, dropout_p, scale, softcap, window, statistics
    return None


def _look_up(inputs: Inputs, arguments: tuple) -> tuple[tuple, Inputs] | None:
    """Return the key of a call and its inputs without a bias term; None if it is not cached: only eager calls are."""
    q, k, v, bias, mask, sink, _, _, lengths, _ = inputs
    if type(mask) is TileMask:
        if mask.kept is not None:  # selected keys: the gather is chosen while the call is read
            return None
        inputs, arguments = inputs._replace(mask=None, tiles=mask.tensors), (arguments, mask.queries, mask.keys)
    if type(bias) is T5Bias or type(bias) is Alibi:
        settings = _settings(bias)
        if settings is None:
            return None
        _, _, _, _, mask, _, *more = inputs
        inputs, arguments = Inputs(q, k, v, None, mask, sink, *more), (arguments, settings)
    tensors = inputs.tensors()
    if len(tensors) == 10 and tensors[6] is tensors[7]:  # offsets of queries and keys
        tensors, arguments = (*tensors[:7], *tensors[8:]), (arguments, "self-attention")
    if q is None or k is None or v is None or not is_eager(tensors):
        return None
    return ("call" if lengths is None else "packed", layouts(*tensors), arguments), inputs


def _settings(term: Any) -> tuple | None:
    """Return what a call depends on in a term besides its tensor's elements. None if the call cannot be cached."""
    query_start, key_start, x = term.query_start, term.key_start, term.of
    if isinstance(query_start, Tensor) or isinstance(key_start, Tensor) or not is_node(x):
        return None
    return term.rule, query_start, key_start, layouts(x)


def cached_call(inputs: Inputs, arguments: tuple, return_lse: bool) -> Found | None:
    """Return `eager_attention` on a cache hit, else None. inputs: the caller's; a bias term may be among them."""
    found = _look_up(inputs, arguments)
    if found is None:
        return None
    term: Any = inputs.bias
    key, inputs = found
    known: Cached | None = calls.get(key)
    if known is None:
        known = _of_structure(inputs, key) if inputs.bias is term else None
        if known is None:
            return None
        calls.put(key, known)
    terms, run, views, vector = known
    if vector is not None:
        rule, first, width = vector
        inputs = Inputs(*inputs[:6], Parts(toeplitz=vector_of(rule, term.of, first, width)), *inputs[7:])
    if terms.dropout:
        inputs = inputs._replace(seed=drawn_seed(inputs.q))
    return eager_attention(inputs, terms, run, views, return_lse)


def _of_structure(inputs: Inputs, key: tuple) -> Cached | None:
    """Return the entry of a call that differs from a cached one in its lengths only, or None. key: see `_look_up`."""
    _, found, arguments = key
    if len(found) > 6:
        return None
    views = _views_of(inputs)
    if views is not None:
        inputs = views.inputs(inputs)
        found = layouts(*inputs[:6])
    structure = structure_of(*found)
    if structure is None:
        return None
    known: tuple[ScoreNumbers, Limits | None, Variants] | None = calls.get(("structure", structure.key, arguments))
    if known is None:
        return None
    terms, limits, variants = known
    if limits is not None:
        band = Band.aligned(*limits, structure.keys - structure.queries)
        terms = tuple.__new__(ScoreNumbers, (band.lo, band.hi, *terms[2:]))
    run = variants.resized(structure, terms, inputs)
    return None if run is None else Cached(terms, run, views)


def _views_of(inputs: Inputs) -> ShapedViews | None:
    """Return views of bias, mask and sink with all dimensions that the operator takes; None if they have these."""
    bias, mask, sink = inputs[3:6]
    if (bias is None or bias.dim() >= 4) and (mask is None or mask.dim() >= 4) and (sink is None or sink.dim() != 1):
        return None
    shapes = [None if x is None or x.dim() >= 4 else ((1,) * (4 - x.dim()) + tuple(x.shape)) for x in (bias, mask)]
    rows = None if sink is None or sink.dim() != 1 else (1, sink.shape[0], 1)
    return ShapedViews((), (None, None, None, *shapes, rows))


def cache_call(
    inputs: Inputs, arguments: tuple, return_lse: bool, call: Call, *, exact: bool = False,
    limits: Limits | None = None,
) -> Found | None:  # fmt: skip
    """Cache a call that was read as ``call``, if it can be, and return `cached_call` of it. So a first call saves the
    tensors for its backward that an equal one saves when a checkpoint recomputes it.

    inputs: the caller's, of which the operator takes views. limits: causal and window, if they make the band depend on
    the lengths, aligned bottom-right.
    """
    looked_up, read = _look_up(inputs, arguments), call.inputs
    if looked_up is None:
        return None
    key, given = looked_up
    terms, vector = ScoreNumbers.of(*call[1:], exact), None
    views: Views | None
    if read.lengths is not None:
        if read.parts is not None and given.bias is inputs.bias:
            return None
        views = PackedViews(*[None if x is None else tuple(x.shape) for x in read[3:6]])
    else:
        views = ShapedViews.between(given, read)
    if given.bias is not inputs.bias:  # a bias term
        term: Any = inputs.bias
        packed = call.score.packed
        M, N = (read.q.shape[2], read.k.shape[2]) if packed is None else (packed.max_q, packed.max_k)
        if read.parts is None or M + N < 2:
            return None
        vector = term.rule, 1 - M + shift_of(term, M, N)[0], M + N - 1
    ready = (given if views is None else views.inputs(given))._replace(parts=read.parts)
    if terms.dropout:  # any seed: its numbers do not matter
        ready = ready._replace(seed=seed_tensor((0, 0), ready.q.device))
    run = forward_of(ready, terms)
    if read.lengths is not None and getattr(run, "takes_rows", False):
        views = ShapedViews.between(given, read._replace(q=given.q, k=given.k, v=given.v))
    calls.put(key, Cached(terms, run, views, vector))
    if len(key[1]) == 6 and vector is None and not terms.dropout:
        structure = structure_of(*layouts(*ready[:6]))  # type: ignore[arg-type]
        variants = None if structure is None else forward_variants(structure, terms)
        if structure is not None and variants is not None:
            calls.put(("structure", structure.key, arguments), (terms, limits, variants))
    return cached_call(inputs, arguments, return_lse)
