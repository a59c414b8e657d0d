"""Cache of calls, keyed by the layouts of their tensors and all other arguments."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.backends import Inputs, address
from tilewise.bias.autograd import Rule, is_node, vector_of
from tilewise.bias.terms import shift_of
from tilewise.bias.toeplitz import Alibi, T5Bias
from tilewise.cache import calls
from tilewise.frontend.arguments import seed_tensor
from tilewise.frontend.autocast import autocast_on
from tilewise.masks.block_sparse import TileMask
from tilewise.operator.autograd import PackedViews, ShapedViews, Views, eager_attention
from tilewise.operator.dispatch import Forward, forward_of, forward_variants
from tilewise.operator.eager import is_eager
from tilewise.operator.seed import drawn_seed
from tilewise.operator.structure import Variants, layouts, structure_of
from tilewise.spec.bias_components import Parts
from tilewise.spec.score import Band, Score, ScoreNumbers, Window

_STRIDED = torch.strided

Limits = tuple[bool, Window | None]  # causal and window


class Cached(NamedTuple):
    """Cached call: its numbers, the prepared forward, and the views of the inputs that it takes, if not these."""

    terms: ScoreNumbers
    run: Forward
    views: Views | None = None


SETTINGS = ("causal", "window", "scale", "softcap", "dropout_p", "deterministic", "backend")


def settings_key(
    causal: bool = False, window: Window | None = None, scale: float | None = None, softcap: float | None = None,
    dropout_p: float = 0.0, deterministic: bool | None = None, backend: str | None = None,
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
        return causal, ordered, backend, dropout_p, scale, softcap, window
    return None


def cached_call(inputs: Inputs, arguments: tuple, return_lse: bool) -> tuple[Tensor, Tensor | None] | None:
    """Return ``(o, lse)`` on a cache hit, else None. ``inputs`` are the caller's."""
    tiles = inputs.mask if type(inputs.mask) is TileMask else None
    if tiles is not None:
        inputs = inputs._replace(mask=None, tiles=tiles.tensors)
    term: Any = inputs.bias
    if type(term) is T5Bias or type(term) is Alibi:
        settings = _settings(term)
        if settings is None:
            return None
        inputs, arguments = inputs._replace(bias=None), (*arguments, settings)
    else:
        term = None
    if not is_cacheable(inputs, tiles):
        return None
    key = _key_of(inputs, tiles, arguments)
    known: Cached | None = calls.get(key)
    if known is None:
        if term is not None or tiles is not None:
            return None
        known = _of_structure(inputs, key)
        if known is None:
            return None
        calls.put(key, known)
    if term is not None:
        made: tuple[Rule, int, int] | None = calls.get(("vector", key))
        if made is None:
            return None
        rule, first, width = made
        inputs = inputs._replace(parts=Parts(toeplitz=vector_of(rule, term.of, first, width)))
    if known[0].dropout:
        inputs = inputs._replace(seed=drawn_seed(inputs.q))
    return eager_attention(inputs, *known, return_lse)


def _settings(term: T5Bias | Alibi) -> tuple | None:
    """Return what a call depends on in a term besides its tensor's elements. None if the call cannot be cached."""
    query_start, key_start, x = term.query_start, term.key_start, term.of
    if isinstance(query_start, Tensor) or isinstance(key_start, Tensor) or not is_node(x):
        return None
    return term.rule, query_start, key_start, layouts(x)


def _of_structure(inputs: Inputs, key: tuple) -> Cached | None:
    """Return the entry of a call that differs from a cached one in its lengths only, or None. key: see `_key_of`."""
    views, tensors = _views_of(inputs), (key[1:6], key[6:11], key[11:16], *key[16:19])
    if views is not None:
        inputs = views.inputs(inputs)
        tensors = layouts(*inputs[:6])
    structure = structure_of(*tensors)
    if structure is None:
        return None
    known: tuple[ScoreNumbers, Limits | None, Variants] | None = calls.get(("structure", structure.key, key[20]))
    if known is None:
        return None
    terms, limits, variants = known
    if limits is not None:
        band = Band.aligned(*limits, structure.keys - structure.queries)
        terms = tuple.__new__(ScoreNumbers, (band.lo, band.hi, *terms[2:]))
    run = variants.resized(structure, terms, inputs)
    return None if run is None else Cached(terms, run, views)


def cache_call(
    inputs: Inputs, arguments: tuple, return_lse: bool, score: Score, deterministic: bool, backend: str, *,
    exact: bool = False, limits: Limits | None = None, parts: Parts | None = None,
) -> tuple[Tensor, Tensor | None] | None:  # fmt: skip
    """Cache a call that was read, if it can be, and return `cached_call` of it. So a first call saves the tensors for
    its backward that an equal one saves when a checkpoint recomputes it.

    limits: causal and window, if they make the band depend on the lengths, aligned bottom-right. parts: the bias
    components of a bias term.
    """
    terms = ScoreNumbers.of(score, deterministic, backend, exact)
    if type(inputs.bias) is T5Bias or type(inputs.bias) is Alibi:
        _cache_vector(inputs, arguments, terms, parts)
    else:
        _cache_tensors(inputs, arguments, terms, limits)
    return cached_call(inputs, arguments, return_lse)


def _cache_tensors(inputs: Inputs, arguments: tuple, terms: ScoreNumbers, limits: Limits | None) -> None:
    """Cache a call without a bias term."""
    tiles = inputs.mask if type(inputs.mask) is TileMask else None
    if tiles is not None:
        inputs = inputs._replace(mask=None, tiles=tiles.tensors)
    if is_cacheable(inputs, tiles):
        key, views = _key_of(inputs, tiles, arguments), _views_of(inputs)
        inputs = inputs if views is None else views.inputs(inputs)
        calls.put(key, Cached(terms, _forward_of(inputs, terms), views))
        if tiles is None and not terms.dropout:
            structure = structure_of(*layouts(*inputs[:6]))  # type: ignore[arg-type]
            variants = None if structure is None else forward_variants(structure, terms)
            if structure is not None and variants is not None:
                calls.put(("structure", structure.key, arguments), (terms, limits, variants))


def _cache_vector(inputs: Inputs, arguments: tuple, terms: ScoreNumbers, parts: Parts | None) -> None:
    """Cache a call whose bias term became a vector, in ``parts``."""
    term: Any = inputs.bias
    settings = _settings(term)
    tiles = inputs.mask if type(inputs.mask) is TileMask else None
    inputs = inputs._replace(bias=None)
    if tiles is not None:
        inputs = inputs._replace(mask=None, tiles=tiles.tensors)
    M, N = inputs.q.shape[2], inputs.k.shape[2]
    if settings is None or parts is None or M + N < 2 or not is_cacheable(inputs, tiles):
        return
    key, views = _key_of(inputs, tiles, (*arguments, settings)), _views_of(inputs)
    inputs = (inputs if views is None else views.inputs(inputs))._replace(parts=parts)
    calls.put(key, Cached(terms, _forward_of(inputs, terms), views))
    calls.put(("vector", key), (term.rule, 1 - M + shift_of(term, M, N)[0], M + N - 1))


def cache_flattened(
    inputs: Inputs, flattened: Inputs, arguments: tuple, return_lse: bool, terms: ScoreNumbers
) -> tuple[Tensor, Tensor | None] | None:  # fmt: skip
    """Cache a call with more leading dimensions that `is_cacheable`, and return `cached_call` of it. ``flattened`` are
    views with a batch."""
    views = _views_of(flattened)
    run = _forward_of(flattened if views is None else views.inputs(flattened), terms)
    views = _views(inputs, flattened, views, tuple(inputs.q.shape[:-3]))
    calls.put(_key_of(inputs, None, arguments), Cached(terms, run, views))
    return cached_call(inputs, arguments, return_lse)


def _views_of(inputs: Inputs) -> ShapedViews | None:
    """Return views of bias, mask and sink with all dimensions that the operator takes; None if they have these."""
    bias, mask, sink = inputs[3:6]
    if (bias is None or bias.dim() >= 4) and (mask is None or mask.dim() >= 4) and (sink is None or sink.dim() != 1):
        return None
    shapes = [None if x is None or x.dim() >= 4 else ((1,) * (4 - x.dim()) + tuple(x.shape)) for x in (bias, mask)]
    rows = None if sink is None or sink.dim() != 1 else (1, sink.shape[0], 1)
    return ShapedViews((), (None, None, None, *shapes, rows))


def _views(given: Inputs, flattened: Inputs, views: ShapedViews | None, lead: tuple[int, ...]) -> ShapedViews:
    """Return views of ``given`` that equal ``views`` of ``flattened``."""
    more = (None,) * 6 if views is None else views.shapes
    shapes = [y if x is None or y is not None else tuple(x.shape) for x, y in zip(flattened[:6], more, strict=True)]
    pairs = zip(given[:6], shapes, strict=True)
    return ShapedViews(lead, tuple([None if x is None or x.shape == shape else shape for x, shape in pairs]))


def _forward_of(inputs: Inputs, terms: ScoreNumbers) -> Forward:
    """Return `forward_of` with a seed, whose numbers do not matter, if the call has dropout."""
    if terms.dropout:
        inputs = inputs._replace(seed=seed_tensor((0, 0), inputs.q.device))
    return forward_of(inputs, terms)


def is_cacheable(inputs: Inputs, tiles: TileMask | None = None) -> bool:
    """True if a call with these inputs can be cached: eager, strided tensors."""
    q, k, v, bias, mask, sink, *_ = inputs
    return (
        q is not None and k is not None and v is not None
        and is_eager(inputs[:6] if tiles is None else (*inputs[:6], *tiles.tensors))
        and (tiles is None or tiles.kept is None)  # selected keys: the gather is chosen while the call is read
        and q.layout is k.layout is v.layout is _STRIDED
        and (bias is None or bias.layout is _STRIDED)
        and (mask is None or mask.layout is _STRIDED)
        and (sink is None or sink.layout is _STRIDED)
    )  # fmt: skip


def _key_of(inputs: Inputs, tiles: TileMask | None, arguments: tuple) -> tuple:
    """Return all that reading a call depends on."""
    q, k, v, bias, mask, sink, *_ = inputs
    if q.is_cuda:
        q_begin, k_begin, v_begin = q.data_ptr() & 15, k.data_ptr() & 15, v.data_ptr() & 15
    elif q.is_cpu:
        q_begin = k_begin = v_begin = 0
    else:
        q_begin, k_begin, v_begin = [address(x) % 16 for x in (q, k, v)]
    return (  # `layouts` of q, k and v come first
        "call", q.shape, q.dtype, q.device, q.stride(), q_begin, k.shape, k.dtype, k.device, k.stride(), k_begin,
        v.shape, v.dtype, v.device, v.stride(), v_begin,
        None if bias is None else layouts(bias)[0], None if mask is None else layouts(mask)[0],
        None if sink is None else layouts(sink)[0],
        None if tiles is None else (tiles.queries, tiles.keys, layouts(*tiles.tensors)), arguments,
    )  # fmt: skip


# --- packed batches ---


def packed_key(inputs: Inputs, longest: tuple[int, int], exact: bool, settings: tuple | None) -> tuple | None:
    """Return the key of a packed batch with the caller's tensors, or None if it is not cached.

    longest: max_seqlen_q and max_seqlen_k. settings: from `settings_key`.
    """
    q, tensors = inputs.q, inputs.flat()
    if settings is None or q is None or not is_eager(tensors) or autocast_on(q):
        return None
    if not type(longest[0]) is type(longest[1]) is int:
        return None
    return "packed", layouts(*tensors), longest, exact, settings


def cached_packed_call(key: tuple, inputs: Inputs, return_lse: bool) -> tuple[Tensor, Tensor | None] | None:
    """Return ``(o, lse)`` in the caller's shapes on a cache hit, else None."""
    known: Cached | None = calls.get(key)
    if known is None:
        return None
    if known.terms.dropout:
        inputs = inputs._replace(seed=drawn_seed(inputs.q))
    return eager_attention(inputs, *known, return_lse)


def cache_packed_call(
    key: tuple, inputs: Inputs, return_lse: bool, read: Inputs, terms: ScoreNumbers
) -> tuple[Tensor, Tensor | None] | None:  # fmt: skip
    """Cache a call that was read, as ``read``, if it can be, and return `cached_packed_call` of it."""
    if read.parts is None:
        bias, mask, sink = [None if x is None else tuple(x.shape) for x in read[3:6]]
        calls.put(key, Cached(terms, _forward_of(read, terms), PackedViews(bias, mask, sink)))
    return cached_packed_call(key, inputs, return_lse)
