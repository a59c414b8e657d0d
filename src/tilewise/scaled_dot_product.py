"""Drop-in replacement for torch.nn.functional.scaled_dot_product_attention."""

from __future__ import annotations

import math
from numbers import Real
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from tilewise.backends import Inputs
from tilewise.frontend.arguments import Call, cast, with_seed
from tilewise.frontend.autocast import autocast, autocast_on, autocast_somewhere
from tilewise.frontend.call_cache import cache_call, cached_call
from tilewise.frontend.jagged import are_jagged, jagged_attention
from tilewise.frontend.keywords import named_only, unexpected
from tilewise.operator.autograd import attention_op
from tilewise.operator.tools import is_symbolic, symbolic
from tilewise.spec.checks import DTYPES, check_flag, check_head_dim, missing_axes
from tilewise.spec.score import Band, Score, check_numbers
from tilewise.spec.tensors import PLAIN, causal_limit, check_tensor, is_causal_bias, is_dtensor

_CAST = (torch.float16, torch.bfloat16, torch.float32)  # dtypes that autocast casts


@named_only
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    **unknown: Any,
) -> Tensor:
    """Return ``softmax(scale * query @ key.mT + attn_mask) @ value``, with PyTorch's signature.

    Signature, shapes and the meaning of every argument are those of `torch.nn.functional.scaled_dot_product_attention`.
    The score matrix is not stored. A float ``attn_mask`` that requires grad gets its gradient, summed in float32.

    Args:
        query: (..., H, L, E) with any number of leading dimensions, also none, in float16, bfloat16, float32 or, on the
            CPU, float64; E is 1 or more. Like PyTorch's function, float32 keeps its precision on a GPU whatever
            ``allow_tf32`` says.
        key: (..., H, S, E) in query's dtype. Leading dimensions of query, key and value broadcast against each other.
        value: (..., H, S, Ev) in query's dtype. Ev is 1 or more.
        attn_mask: broadcastable to (..., H, L, S). bool: True = attend. float16, bfloat16, float32 or, on the CPU,
            float64, independently of query's dtype: added to the scores; -inf hides the key from the query. Or a
            `torch.nn.attention.bias.CausalBias` (``causal_upper_left(L, S)``, ``causal_lower_right(L, S)``), for which
            no matrix is formed.
        dropout_p: probability of dropping an entry of the softmax, 0 to 1. Random numbers come from torch's generator
            on query's device, but differ from those of PyTorch's function; see `tilewise.attention`.
        is_causal: query i sees the keys 0 to i that attn_mask leaves visible (aligned top-left, unlike
            ``tilewise.attention(causal=True)``).
        scale: multiplies ``query @ key.mT``; any finite number, or a tensor of no dimensions, whose value is read at
            once and which gets no gradient. Default: ``1 / sqrt(E)``.
        enable_gqa: if True, key and value may have fewer heads (dimension -3) than query, a divisor of H.

    Returns:
        o (..., H, L, Ev) in query's dtype, or in autocast's: `torch.autocast` casts query, key and value, as for
        PyTorch's function, while attn_mask keeps its dtype. o is contiguous, except for 4-dimensional arguments with
        equal leading dimensions: then it has query's memory layout, so that (B, L, H, E) data passed by transpose
        returns by transpose.

    Raises:
        ValueError, TypeError: an argument is not allowed; the message names it, the value received and what is allowed.
        NotImplementedError: dropout with DTensors or in an ONNX graph; jagged tensors with holes; within
            context_parallel what `tilewise.distributed.context_parallel_attention` does not support.

    Examples:
        >>> query, key, value = (torch.randn(2, 8, 100, 64) for _ in range(3))
        >>> attn_mask = torch.randn(8, 100, 100, requires_grad=True)
        >>> o = tilewise.scaled_dot_product_attention(query, key, value, attn_mask)
        >>> o.sum().backward()
        >>> o.shape, attn_mask.grad.shape
        (torch.Size([2, 8, 100, 64]), torch.Size([8, 100, 100]))

    Where PyTorch's backends differ from each other: a query that sees no key gives 0 and zero gradients. NaN or
    infinity in a key or value that no query sees does not reach the output. attn_mask with is_causal applies both; in
    torch 2.13 only the CPU kernel supports that. A scale that is a bool, infinite or NaN is an error.

    Copies: 4-dimensional arguments are never copied, and a mask is not expanded. More leading dimensions are flattened
    into two by views. Query, key and value are copied if their strides do not allow a view: if sizes of 1 were
    broadcast, or if attn_mask has some of the leading dimensions before the heads and broadcasts along others. If key
    and value have different numbers of heads, they are repeated to query's. The result is copied if it would not be
    contiguous.

    Nested tensors: query, key and value may all be jagged (``layout=torch.jagged``), (B, H, j, E), (B, H, l, E) and (B,
    H, l, Ev); the result is jagged with query's j. attn_mask is then a tensor, broadcastable to (B, H, L, S) for the
    longest query and key, and is_causal requires as many keys as queries in each sequence. Nothing is padded or copied;
    see `tilewise.attention` for when the host synchronizes.

    DTensors split along the sequence, and shards within `torch.distributed.tensor.experimental.context_parallel`, are
    computed as one sequence by `tilewise.distributed.context_parallel_attention`.
    """
    if unknown:
        raise unexpected("scaled_dot_product_attention", unknown)
    arguments = given = None
    if type(functional.scaled_dot_product_attention) is FunctionType or type(query) not in PLAIN:
        split = _of_shards(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
        if split is not None:
            return split
    if (
        (scale is None or type(scale) is float) and type(dropout_p) is float and 0.0 <= dropout_p <= 1.0
        and (is_causal is False or is_causal is True) and (enable_gqa is False or enable_gqa is True)
        and type(attn_mask) in PLAIN and not torch.compiler.is_compiling()
    ):  # fmt: skip
        ordered = torch.are_deterministic_algorithms_enabled()
        arguments = ("sdpa", is_causal, enable_gqa, scale, ordered, dropout_p)
        if autocast_somewhere():
            query, key, value = cast(query, key, value)
        given = Inputs(query, key, value, *_bias_and_mask(attn_mask))
        try:
            found = cached_call(given, arguments, return_lse=False)
        except RuntimeError:
            _check_tensors(query, key, value, attn_mask)  # a nested tensor has no shape to look up
            raise
        if found is not None:
            return found[0]
    if type(query) not in PLAIN and are_jagged(query, key, value):
        return _jagged(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)
    try:
        _check_tensors(query, key, value, attn_mask)
    except TypeError:
        if is_symbolic(query, key, value, attn_mask):
            return symbolic(
                scaled_dot_product_attention, query, key, value, attn_mask, dropout_p, is_causal, scale=scale,
                enable_gqa=enable_gqa,
            )  # fmt: skip
        raise
    check_flag("is_causal", is_causal)
    check_flag("enable_gqa", enable_gqa)
    attn_mask, band = _band(query, key, attn_mask, bool(is_causal))
    query, scale = _positive_scale(query, _number(scale))
    check_numbers(dropout_p=dropout_p, scale=scale)
    query, key, value = autocast(query, key, value)
    inputs, fold = _fold(query, key, value, attn_mask, enable_gqa)
    score = Score.of(band, query.shape[-1], dropout_p=dropout_p, scale=scale)
    call = Call(inputs, score, torch.are_deterministic_algorithms_enabled(), "auto")
    if given is not None and arguments is not None and fold.as_query and _same(inputs, given):
        found = cache_call(given, arguments, False, call, exact=True)
        if found is not None:
            return found[0]
    o, *_ = attention_op(with_seed(inputs, score), *call[1:], return_lse=False, exact=True)
    return fold.unfold(o)


def _of_shards(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float, is_causal: bool,
    scale: float | Tensor | None, enable_gqa: bool,
) -> Tensor | None:  # fmt: skip
    """Return attention of one sequence split over devices, or None if query is not split.

    The inputs are DTensors, or the call is within PyTorch's context_parallel, which replaces PyTorch's function by its
    own. Neither occurs before torch.distributed is imported.
    """
    replaced = str(getattr(functional.scaled_dot_product_attention, "__module__", "")).startswith("torch.distributed.")
    if not replaced and not is_dtensor(query):
        return None
    from tilewise.distributed.drop_in import sdpa_of_shards

    _check_tensors(query, key, value, attn_mask)
    check_flag("is_causal", is_causal)
    check_flag("enable_gqa", enable_gqa)
    query, scale = _positive_scale(query, _number(scale))
    return sdpa_of_shards(query, key, value, attn_mask, dropout_p, bool(is_causal), scale, bool(enable_gqa))


def _jagged(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, dropout_p: float, is_causal: bool,
    scale: float | Tensor | None, enable_gqa: bool,
) -> Tensor:  # fmt: skip
    check_flag("is_causal", is_causal)
    check_flag("enable_gqa", enable_gqa)
    if key.dim() == query.dim() == 4 and not enable_gqa and key.shape[1] != query.shape[1]:
        raise ValueError(
            f"key: number of heads must equal query's {query.shape[1]}, got {key.shape[1]}; enable_gqa=True allows a "
            "divisor"
        )
    if attn_mask is not None:
        _check_mask(attn_mask, query)
        if is_causal_bias(attn_mask):
            raise TypeError("attn_mask: a CausalBias has lengths of its own; pass is_causal=True")
        if attn_mask.dim() > 4:
            raise ValueError(f"attn_mask: shape {_shape(attn_mask)} does not broadcast to (B, H, L, S)")
        attn_mask = attn_mask[(None,) * (4 - attn_mask.dim())]
    query, scale = _positive_scale(query, _number(scale))
    bias, mask = _bias_and_mask(attn_mask)
    o, *_ = jagged_attention(
        query, key, value, names=("query", "key", "value"), bias=bias, mask=mask, causal=is_causal,
        scale=scale, dropout_p=dropout_p, exact=True,
        equal_lengths="is_causal: is aligned top-left, for which jagged tensors must have as many keys as queries in "
        "each sequence; tilewise.attention(causal=True) is aligned bottom-right" if is_causal else None,
    )  # fmt: skip
    return o


def _check_mask(attn_mask: Tensor, query: Tensor) -> None:
    check_tensor("attn_mask", attn_mask, may_be_causal=True)
    if is_causal_bias(attn_mask):  # its device does not matter, and it has no numbers
        return
    if attn_mask.device != query.device:
        raise ValueError(f"attn_mask: must be on query's device {query.device}, got {attn_mask.device}")
    if attn_mask.dtype not in (torch.bool, *DTYPES):
        raise TypeError(
            "attn_mask: dtype must be bool, float16, bfloat16, float32 or float64, "
            f"got {attn_mask.dtype} with query {query.dtype}"
        )


def _check_tensors(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None) -> None:
    for name, x in (("query", query), ("key", key), ("value", value)):
        check_tensor(name, x)
        if x.device != query.device:
            raise ValueError(f"{name}: must be on query's device {query.device}, got {x.device}")
        if x.dim() < 2:
            raise ValueError(f"{name}: expected at least 2 dimensions (..., length, head_dim), got shape {_shape(x)}")
        if x is query and x.dtype not in DTYPES:
            raise TypeError(f"{name}: dtype must be float16, bfloat16, float32 or float64, got {x.dtype}")
        if x.dtype != query.dtype and not (x.dtype in _CAST and query.dtype in _CAST and autocast_on(query)):
            raise TypeError(f"{name}: dtype must equal query's {query.dtype}, got {x.dtype}")
    if attn_mask is not None:
        _check_mask(attn_mask, query)
    if key.shape[-1] != query.shape[-1]:
        raise ValueError(f"key: head dimension must equal query's {query.shape[-1]}, got {key.shape[-1]}")
    if value.shape[-2] != key.shape[-2]:
        raise ValueError(f"value: length must equal key's {key.shape[-2]}, got {value.shape[-2]}")
    for name, size in (("query, key", query.shape[-1]), ("value", value.shape[-1])):
        check_head_dim(name, size)


def _band(query: Tensor, key: Tensor, attn_mask: Tensor | None, is_causal: bool) -> tuple[Tensor | None, Band]:
    """Return attn_mask, or None for a CausalBias, and the causal limit; is_causal is aligned top-left."""
    if attn_mask is None or not is_causal_bias(attn_mask):
        return attn_mask, Band.aligned(is_causal, None, diagonal=0)
    if is_causal:
        raise ValueError("attn_mask: a CausalBias says by itself what is hidden; leave is_causal=True out")
    return None, Band(None, causal_limit("attn_mask", attn_mask, query.shape[-2], key.shape[-2]))


def _number(scale: float | Tensor | None) -> float | None:
    """Return ``scale`` as a float: a tensor of no dimensions is read, as PyTorch's function does."""
    if not isinstance(scale, Tensor):
        return scale
    if scale.dim() > 0 or scale.requires_grad or scale.is_meta:
        kind = "that requires grad" if scale.requires_grad else "on the meta device" if scale.is_meta else ""
        raise TypeError(
            "scale: expected a float, or a tensor of no dimensions that holds one and needs no gradient, "
            f"got a tensor of shape {_shape(scale)} {kind}".rstrip()
        )
    return scale.item()


def _positive_scale(query: Tensor, scale: float | None) -> tuple[Tensor, float | None]:
    """Return the query times the sign of ``scale`` (1, 0 or -1: no rounding), and a positive scale."""
    if isinstance(scale, Real) and not -math.inf < scale < math.inf:
        raise ValueError(f"scale: must be finite, got {scale}")
    if isinstance(scale, Real) and not isinstance(scale, bool) and scale <= 0:
        return (-query, -scale) if scale < 0 else (query * 0, 1.0)
    return query, scale


class _Fold(NamedTuple):
    """Leading dimensions that were flattened into (B, H). ``order`` permutes ``lead``; the result keeps the last
    ``rank`` of ``lead``. ``as_query``: the result has query's memory layout; otherwise it is contiguous."""

    order: tuple[int, ...]
    lead: tuple[int, ...]
    rank: int
    as_query: bool

    def unfold(self, o: Tensor) -> Tensor:
        n = len(self.lead)
        if n > 2:
            o = o.reshape(*[self.lead[i] for i in self.order], *o.shape[-2:])
            o = o.permute(*[self.order.index(i) for i in range(n)], -2, -1)
        # A query without a batch or heads dimension was given one.
        o = o.reshape(*self.lead[n - self.rank :], *o.shape[-2:]) if self.rank < n else o
        return o if self.as_query else o.contiguous()


def _fold(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, gqa: bool) -> tuple[Inputs, _Fold]:
    """Return the arguments as (B, H, L, E), and the `_Fold` that undoes it."""
    rank = max(x.dim() - 2 for x in (query, key, value))
    if gqa and query.dim() < 3:
        raise ValueError(f"enable_gqa: needs a dimension of heads, got query of shape {_shape(query)}")
    heads, kv_heads = _heads(query, key, value, gqa)
    batch = _broadcast_batch(query, key, value)
    leads = [x.shape[:-3] if gqa else x.shape[:-2] for x in (query, key, value)]
    as_query = rank == 2 and leads[0] == leads[1] == leads[2]
    query = _per_head(query, heads, batch)
    key, value = _per_head(key, kv_heads, batch), _per_head(value, kv_heads, batch)
    lead = (*batch, heads)
    if attn_mask is not None:
        attn_mask = _with_leading(attn_mask, lead, query.shape[-2], key.shape[-2])
    beside_batch, beside_heads = _groups(lead, None if attn_mask is None else attn_mask.shape[:-2])
    order = (*beside_batch, *beside_heads)

    def fold(x: Tensor) -> Tensor:
        if len(lead) == 2:
            return x
        return x.permute(*order, -2, -1).reshape(_product(x, beside_batch), _product(x, beside_heads), *x.shape[-2:])

    bias, mask = _bias_and_mask(None if attn_mask is None else fold(attn_mask))
    return Inputs(fold(query), fold(key), fold(value), bias, mask), _Fold(order, lead, rank, as_query)


def _same(inputs: Inputs, given: Inputs) -> bool:
    """True if nothing was flattened, expanded or negated: the operator gets the caller's tensors, or attn_mask with
    more dimensions."""
    unchanged = inputs.q is given.q and inputs.k is given.k and inputs.v is given.v
    added = ((inputs.bias, given.bias), (inputs.mask, given.mask))
    return unchanged and all(x is y or (y is not None and y.dim() < 4) for x, y in added)


def _bias_and_mask(attn_mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Return attn_mask as (bias, mask), one of which is None."""
    if attn_mask is None:
        return None, None
    return (None, attn_mask) if attn_mask.dtype == torch.bool else (attn_mask, None)


def _heads(query: Tensor, key: Tensor, value: Tensor, gqa: bool) -> tuple[int, int]:
    """Return the numbers of query heads and of key/value heads; a tensor of two dimensions has one head."""
    H, Hk, Hv = [x.shape[-3] if x.dim() > 2 else 1 for x in (query, key, value)]
    if H == Hk == Hv:
        return H, H
    for name, h in (("key", Hk), ("value", Hv)):
        if gqa and h != H and (h == 0 or H % h != 0):
            raise ValueError(f"{name}: its {h} heads must divide query's {H} heads")
    if gqa:
        return H, Hk if Hk == Hv else H
    common, kv = _common(H, Hk, Hv), _common(Hk, Hv)
    if common is None or kv is None:
        raise ValueError(
            f"key, value: number of heads must equal query's {H} or be 1, got {Hk} and {Hv}; "
            "enable_gqa=True allows a divisor"
        )
    return common, kv


def _broadcast_batch(query: Tensor, key: Tensor, value: Tensor) -> tuple[int, ...]:
    """Return the dimensions before the heads, broadcast; at least one."""
    shapes = [tuple(x.shape[:-3]) for x in (query, key, value)]
    if shapes[0] == shapes[1] == shapes[2]:
        return shapes[0] or (1,)
    rank = max(1, *(len(s) for s in shapes))
    batch = [_common(*sizes) for sizes in zip(*((1,) * (rank - len(s)) + s for s in shapes), strict=True)]
    if None in batch:
        raise ValueError(
            f"query, key, value: leading dimensions do not broadcast: shapes {_shape(query)}, {_shape(key)}, "
            f"{_shape(value)}"
        )
    return tuple(size for size in batch if size is not None)


def _common(*sizes: int) -> int | None:
    """Return the size that all ``sizes`` broadcast to, or None."""
    common = 1
    for size in sizes:
        if size != 1 and common not in (1, size):
            return None
        common = common if size == 1 else size
    return common


def _per_head(x: Tensor, heads: int, batch: tuple[int, ...]) -> Tensor:
    """Return ``x`` expanded to (*batch, heads, length, head_dim)."""
    if x.dim() == 2:
        x = x.unsqueeze(0)
    if x.shape[-3] != heads:
        repeats = heads // max(x.shape[-3], 1)
        x = x.unsqueeze(-3).expand(*x.shape[:-2], repeats, *x.shape[-2:]).flatten(-4, -3)
    return x if x.shape[:-3] == batch else x.expand(*batch, *x.shape[-3:])


def _with_leading(attn_mask: Tensor, lead: tuple[int, ...], L: int, S: int) -> Tensor:
    full = (*lead, L, S)
    missing = len(full) - attn_mask.dim()
    x = attn_mask[(None,) * missing] if missing > 0 else attn_mask
    if missing < 0 or any(size not in (1, allowed) for size, allowed in zip(x.shape, full, strict=True)):
        hint = missing_axes("attn_mask", _shape(attn_mask), lead[0], {"L": L, "S": S}) if len(lead) == 2 else ""
        raise ValueError(f"attn_mask: shape {_shape(attn_mask)} does not broadcast to {full}{hint}")
    return x


def _groups(lead: tuple[int, ...], mask: torch.Size | None) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the leading dimensions flattened into B, and those flattened, with the heads, into H.

    A mask that broadcasts along some leading dimensions is not expanded if the dimensions it has and those it lacks go
    to different groups. A dimension flattened into H keeps each key head with its query heads: keys are flattened
    alike.
    """
    heads = len(lead) - 1
    others = tuple(range(heads))
    if mask is None:
        return others, (heads,)
    lacking = [i for i in range(len(lead)) if mask[i] == 1]
    long = [i for i in others if lead[i] != 1]
    if all(i in lacking for i in long) or not any(i in lacking for i in long):
        return others, (heads,)
    beside_heads = tuple(i for i in long if (i in lacking) == (heads in lacking))
    return tuple(i for i in others if i not in beside_heads), (*beside_heads, heads)


def _product(x: Tensor, dims: tuple[int, ...]) -> int:
    n = 1
    for i in dims:
        n = n * x.shape[i]
    return n


def _shape(x: Tensor) -> tuple[int, ...]:
    return tuple(x.shape)
