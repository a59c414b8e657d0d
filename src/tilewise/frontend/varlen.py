"""Arguments of packed batches, read and checked, and the call."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any, Unpack

import torch
from torch import Tensor

from tilewise.backends import Inputs, heads_first, rows_first
from tilewise.bias.packed import RaggedBias, packed_dense, packed_slots
from tilewise.frontend.arguments import (
    Bias,
    Call,
    Seed,
    Window,
    cast,
    check_dropout_seed,
    check_inputs,
    low_rank_of,
    padded_mask,
    seed_tensor,
    with_seed,
    with_slots,
)
from tilewise.frontend.autocast import autocast, autocast_somewhere
from tilewise.frontend.call_cache import cache_call, cached_call, settings_key
from tilewise.masks.block_sparse import TileMask, is_block_mask
from tilewise.operator.autograd import Found, attention_op
from tilewise.planner import check_backend
from tilewise.spec.checks import DTYPES, check_flag, check_head_dim, check_lengths
from tilewise.spec.integers import LARGEST_SIZE, check_range
from tilewise.spec.operands import Sizes
from tilewise.spec.score import Band, Numbers, Score, check_numbers
from tilewise.spec.seqlens import Lengths, Packed, places
from tilewise.spec.statistics import NO_STATISTICS, Statistics
from tilewise.spec.tensors import check_tensor, is_causal_bias, is_dtensor


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Lengths,
    longest: tuple[int, int],
    *,
    bias: Bias = None,
    mask: Tensor | None = None,
    sink: Tensor | None = None,
    dropout_seed: Seed = None,
    validate: bool = False,
    return_lse: bool = False,
    exact: bool = False,
    **settings: Any,
) -> Found:
    """Return o, lse and statistics of `varlen_attention` for public functions, None for those not asked for.

    longest: (max_seqlen_q, max_seqlen_k). exact: see `Problem`. settings: the arguments of `settings_key`.
    """
    check_flag("return_lse", return_lse)
    check_flag("validate", validate)
    given, key = Inputs(q, k, v, bias, mask, sink, lengths=lengths), None  # type: ignore[arg-type]
    if not torch.compiler.is_compiling():
        if dropout_seed is None and validate is False:
            key = settings_key(**settings)
            found = cached_packed(given, longest, key, return_lse, exact)
            if found is not None:
                return found
        if isinstance(q, Tensor) and q.is_cuda:  # the CPU checks max_seqlen exactly
            longest = shared_longest(longest, bias, mask, validate)
    call = read_packed(
        q, k, v, lengths, longest, bias=bias, mask=mask, sink=sink, dropout_seed=dropout_seed, **settings,
    )  # fmt: skip
    if validate and call.score.packed is not None:
        places(lengths, call.score.packed, (call.inputs.q.shape[2], call.inputs.k.shape[2]))
    found = cached_packed(given, longest, key, return_lse, exact, call)
    if found is None:
        o, *others = attention_op(with_seed(call.inputs, call.score), *call[1:], return_lse=return_lse, exact=exact)
        lse, statistics = (None if x is None else x.squeeze(0) for x in others)
        found = rows_first(o), lse, statistics
    return found


def cached_packed(
    given: Inputs, longest: tuple[int, int], settings: tuple | None, return_lse: bool, exact: bool = False,
    call: Call | None = None,
) -> Found | None:  # fmt: skip
    """Return `cached_call` of a packed batch, or `cache_call` of one that was read as ``call``.

    given: the caller's tensors; the bias may be a term. settings: `settings_key` of the other arguments.
    """
    if settings is None or type(return_lse) is not bool or not type(longest[0]) is type(longest[1]) is int:
        return None
    bias: Any = given.bias
    if isinstance(given.q, Tensor) and given.q.is_cuda:
        longest = shared_longest(longest, bias, given.mask)
    arguments = longest, exact, settings
    if autocast_somewhere():
        q, k, v = cast(*given[:3])
        given = given._replace(q=q, k=k, v=v)
    if type(bias) is RaggedBias and given.lengths is not None:
        given = given._replace(bias=bias.values, lengths=given.lengths._replace(pairs=bias.offsets))
    if call is not None:
        return cache_call(given, arguments, return_lse, call, exact=exact)
    try:
        return cached_call(given, arguments, return_lse)
    except RuntimeError:
        if any(isinstance(x, Tensor) and x.is_nested for x in given.tensors()):  # has no shape to look up
            return None
        raise


def shared_longest(
    longest: tuple[int, int], bias: Any = None, mask: Tensor | None = None, validate: bool = False
) -> tuple[int, int]:  # fmt: skip
    """Return ``longest`` rounded up, so that batches of similar lengths share a prepared call. It grows by at most 15
    up to 128, and above by at most 1/8 or 127; it is unchanged if a tensor's shape depends on it."""
    packed = bias is None or type(bias) is RaggedBias or (isinstance(bias, Tensor) and bias.dim() < 4)
    if packed and mask is None and not validate and type(longest[0]) is type(longest[1]) is int:
        return _rounded(longest[0]), _rounded(longest[1])
    return longest


@lru_cache(1024)
def _rounded(n: int) -> int:
    if n <= 16:
        return n
    step = 16 if n <= 128 else max(128, 1 << n.bit_length() - 4)
    return -(-n // step) * step


def read_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Lengths,
    longest: tuple[int, int],
    *,
    bias: Bias = None,
    mask: Tensor | None = None,
    sink: Tensor | None = None,
    causal: bool = False,
    window: Window | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Seed = None,
    deterministic: bool | None = None,
    backend: str | None = None,
    statistics: Statistics = NO_STATISTICS,
    **numbers: Unpack[Numbers],
) -> Call:
    """Read and check the arguments of `varlen_attention`, as `read_call` does for `attention`."""
    check_flag("causal", causal)
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    check_flag("deterministic", deterministic, "a bool or None")
    backend = check_backend(backend)
    check_numbers(window, dropout_p=dropout_p, **numbers)
    if isinstance(mask, TileMask) or is_block_mask(mask):
        raise TypeError(
            f"mask: varlen_attention takes no {type(mask).__name__} yet: its tiles would cross sequence boundaries; "
            "pass a bool mask"
        )
    check_inputs(q, k, v, bias, mask, sink)
    q, k, v = autocast(q, k, v)
    _check_packed(q, k, v)
    _check_offsets(lengths)
    q, k, v = (heads_first(x) for x in (q, k, v))
    totals, device = (q.shape[2], k.shape[2]), q.device
    sizes = Sizes(
        check_lengths(lengths, q), q.shape[1], k.shape[1],
        _longest("max_seqlen_q", longest[0]), _longest("max_seqlen_k", longest[1]),
    )  # fmt: skip
    packed = Packed(sizes.M, sizes.N)
    band = Band.aligned(bool(causal), window, 0)
    score = Score.of(band, q.shape[3], dropout_p=dropout_p, statistics=statistics, **numbers)
    inputs = Inputs(q, k, v, None, padded_mask(mask), None, lengths=lengths)
    forms: tuple[str, ...] = ()
    if bias is not None:
        if is_causal_bias(bias):
            raise TypeError("bias: a CausalBias has lengths of its own; pass causal=True")
        found = packed_slots(bias, sizes, totals, lengths, device)
        if found.slots.low_rank is not None and backend == "reference":
            found = packed_dense(found, low_rank_of(found.slots, q, score), sizes, lengths)
        slots, forms, pairs = found
        inputs, score = with_slots(inputs, score, slots)
        if slots.matrix is None:  # the first of these becomes the bias
            moved = "cols" if slots.cols is not None else "rows"
            forms = tuple("bias" if form == moved else form for form in forms)
        if pairs is not None:
            inputs = inputs._replace(lengths=lengths._replace(pairs=pairs))
    if sink is not None:
        sink, sink_forms = _sink(sink, q, totals[0])
        inputs, forms = inputs._replace(sink=sink), (*forms, *sink_forms)
    score = replace(score, packed=replace(packed, forms=forms))
    if score.dropout and dropout_seed is not None:
        check_dropout_seed(dropout_seed, q)
        inputs = inputs._replace(seed=seed_tensor(dropout_seed, device))
    return Call(inputs, score, bool(deterministic), backend)


def _check_packed(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Check q, k and v in the caller's shapes, (total, heads, head_dim)."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if is_dtensor(x):
            raise NotImplementedError(f"{name}: packed batches take no DTensors; call it on local tensors")
        if x.dim() != 3:
            raise ValueError(
                f"{name}: expected 3 dimensions (total length, heads, head_dim), got shape {tuple(x.shape)}"
            )
        if x.dtype not in DTYPES:
            raise TypeError(f"{name}: dtype must be float16, bfloat16, float32 or float64, got {x.dtype}")
        check_head_dim(name, x.shape[2])


def _check_offsets(lengths: Lengths) -> None:
    check_tensor("cu_seqlens_q", lengths.cu_q)
    check_tensor("cu_seqlens_k", lengths.cu_k)
    if lengths.used_k is not None:
        check_tensor("seqused_k", lengths.used_k)


def _longest(name: str, x: int) -> int:
    if isinstance(x, bool) or not isinstance(x, (int, torch.SymInt)):
        raise TypeError(f"{name}: expected an int, got {type(x).__name__}")
    if x < 0:
        raise ValueError(f"{name}: must be 0 or more, got {x}")
    check_range(name, x, LARGEST_SIZE)
    return x


def _sink(sink: Tensor, q: Tensor, total: int) -> tuple[Tensor, tuple[str, ...]]:
    """Return the sink with three dimensions, and ("sink",) if it is packed per query."""
    H = q.shape[1]
    if sink.dim() == 1 and sink.shape[0] in (1, H):
        return sink[None, :, None], ()
    if sink.dim() == 2 and sink.shape[0] in (1, H) and sink.shape[1] == total:
        return sink[None], ("sink",)
    raise ValueError(
        f"sink: expected one logit for each head, ({H}|1,), or for each query, ({H}|1, {total}), "
        f"got shape {tuple(sink.shape)}"
    )
