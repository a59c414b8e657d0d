"""Attention of packed batches: sequences of any lengths, end to end, and no padding."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Unpack, get_type_hints

import torch
from torch import Tensor

from tilewise.autocast import autocast
from tilewise.autograd import attention_op, heads_first
from tilewise.backends import Inputs
from tilewise.bias.packed import RaggedBias, packed_dense, packed_slots
from tilewise.call import (
    Bias,
    Call,
    Seed,
    UsualPacked,
    Window,
    check_dropout_seed,
    check_inputs,
    low_rank_of,
    padded_mask,
    seed_tensor,
    with_seed,
    with_slots,
)
from tilewise.keywords import named_only, unexpected
from tilewise.plan import check_backend
from tilewise.problem import DTYPES, MAX_HEAD_DIM, Sizes, check_flag, check_lengths
from tilewise.score.integers import LARGEST_SIZE, check_range
from tilewise.score.lengths import Lengths, Packed, places
from tilewise.score.terms import Band, Numbers, Score, Terms, check_numbers
from tilewise.tensors import check_tensor, is_causal_bias, is_dtensor, plain_int, plain_ints
from tilewise.tile_mask import TileMask, is_block_mask


@partial(named_only, more=get_type_hints(Numbers), after="window")
def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    seqused_k: Tensor | None = None,
    bias: Bias = None,
    mask: Tensor | None = None,
    sink: Tensor | None = None,
    causal: bool = False,
    window: Window | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Seed = None,
    return_lse: bool = False,
    deterministic: bool | None = None,
    backend: str | None = None,
    validate: bool = False,
    **numbers: Unpack[Numbers],
) -> Tensor | tuple[Tensor, Tensor]:
    """`tilewise.attention` of B sequences of any lengths that lie end to end, each of which sees itself alone.

    No tensor is padded or copied, and on a GPU the host never waits for the lengths. Everything is counted from each
    sequence's own first query and key: ``causal`` lets its last query see its last key, and entry (i, j) of a bias or
    mask belongs to its query i and key j.

    Args:
        q: queries (total_q, H, D); k: keys (total_k, Hkv, D); v: values (total_k, Hkv, Dv), as `attention` takes them
            otherwise; any strides.
        cu_seqlens_q: (B + 1,), int32 or int64, on q's device: sequence b has the queries ``cu_seqlens_q[b]`` to
            ``cu_seqlens_q[b + 1] - 1``. It begins with 0 and does not descend; lengths 0 and 1 are allowed.
        cu_seqlens_k: the same of the keys.
        max_seqlen_q, max_seqlen_k: the length of the longest sequence or more: ints, or integer tensors of no
            dimensions, for which the host waits on a GPU.
        seqused_k: (B,), int32 or int64: how many keys of each sequence count, from its first. Default: all.
        bias: a tensor of four dimensions is padded, {B|1} × {H|Hkv|1} × {max_seqlen_q|1} × {max_seqlen_k|1}; one of
            fewer lies packed, along the keys, (1|H, total_k), or the queries, (1|H, total_q, 1). Or a term of
            `tilewise.bias`, or a tuple of tensors and terms: `RaggedBias` has a matrix of its own for each sequence,
            `RelativeBias` packed values (total_q, H, R), and `low_rank_bias` (1, H, total_q, r) and (1, Hkv, total_k,
            r). Each tensor gets its gradient.
        mask: bool, padded, {B|1} × {H|Hkv|1} × {max_seqlen_q|1} × {max_seqlen_k|1}; True = attend. The borders of the
            sequences need none.
        sink: (H,), or packed for each query, (1|H, total_q).
        dropout_seed: as for `attention`; a score's sequence is its number b, so that a packed batch drops what the
            padded one would.
        validate: read the lengths and raise where they are no such ones, for which the host waits on a GPU. On the CPU
            they are always checked. Without it, on a GPU, wrong ones give wrong numbers, and nothing is written
            outside.
        causal, window, scale, softcap, dropout_p, deterministic, backend: as for `attention`.

    Returns:
        o (total_q, H, Dv) in q's dtype; with ``return_lse`` also lse (H, total_q), float32 (float64 for float64
        inputs). Rows past the last sequence have o = 0 and lse = -inf, and so have queries that see no key.

    Raises:
        ValueError, TypeError: naming the argument, what came and what is allowed.
        NotImplementedError: DTensors; in a graph for ONNX.

    Source: flash_attn_varlen_func of FlashAttention (arXiv 2307.08691) for the layout; docs/maths.md for the formulas.
    """
    if unknown := [name for name in numbers if name not in Numbers.__annotations__]:
        raise unexpected("varlen_attention", unknown)
    return packed_attention(
        q, k, v, Lengths(cu_seqlens_q, cu_seqlens_k, seqused_k),
        (plain_int(max_seqlen_q), plain_int(max_seqlen_k)), bias=bias, mask=mask, sink=sink, causal=causal,
        window=plain_ints(window), dropout_p=dropout_p, dropout_seed=dropout_seed, return_lse=return_lse,
        deterministic=deterministic, backend=backend, validate=validate, **numbers,
    )  # fmt: skip


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
    bias: Bias = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """`varlen_attention` by the signature of `torch.nn.attention.varlen.varlen_attn` (torch 2.12 and 2.13), and a bias.

    Args:
        query, key, value: (total_q, H, D), (total_k, Hkv, D), (total_k, Hkv, Dv): q, k and v of `varlen_attention`.
        cu_seq_q, cu_seq_k: its cu_seqlens_q and cu_seqlens_k. max_q, max_k: its max_seqlen_q and max_seqlen_k.
        return_aux: an AuxRequest of PyTorch's; with ``lse`` the lse is returned too.
        scale: multiplies ``query @ key.mT``; positive. Default ``1 / sqrt(D)``.
        window_size: (left, right), -1 for no limit: (-1, 0) is causal, aligned bottom-right.
        enable_gqa: key and value may have fewer heads than query, a divisor of H.
        seqused_k: as for `varlen_attention`; gradients flow with it too.
        block_table, num_splits: None; pages and numbers of splits are not implemented.
        bias: as for `varlen_attention`; PyTorch's function has none.

    Returns:
        (total_q, H, Dv) in query's dtype; with the lse also that, (H, total_q), float32 (float64 for float64 inputs).

    Raises:
        ValueError, TypeError: naming the argument, what came and what is allowed; those of `varlen_attention` have its
            names.
        NotImplementedError: block_table, num_splits, an AuxRequest's max_scores; what `varlen_attention` raises it for.
    """
    check_flag("enable_gqa", enable_gqa)
    for name, x in (("block_table", block_table), ("num_splits", num_splits)):
        if x is not None:
            raise NotImplementedError(f"{name}: is not implemented; leave it None")
    window_size = plain_ints(window_size)
    if not isinstance(window_size, tuple) or len(window_size) != 2:
        raise TypeError(f"window_size: expected a pair (left, right), got {window_size!r}")
    for x in window_size:
        if isinstance(x, bool) or not isinstance(x, int):
            raise TypeError(f"window_size: expected ints, got {window_size!r}")
        if x < -1:
            raise ValueError(f"window_size: expected -1 (no limit), 0 or more, got {window_size!r}")
        check_range("window_size", x)
    lse = False if return_aux is None else getattr(return_aux, "lse", None)
    if not isinstance(lse, bool):
        raise TypeError(f"return_aux: expected an AuxRequest with a bool lse, or None, got {return_aux!r}")
    for name in getattr(return_aux, "_fields", ("max_scores",)):  # FlexAttention's AuxRequest has more than lse
        if name != "lse" and getattr(return_aux, name, False):
            raise NotImplementedError(f"return_aux: {name} is not implemented; ask for lse alone")
    for name, x in (("query", query), ("key", key), ("value", value), ("cu_seq_q", cu_seq_q), ("cu_seq_k", cu_seq_k)):
        check_tensor(name, x)
    if query.dim() == key.dim() == 3 and not enable_gqa and query.shape[1] != key.shape[1]:
        raise ValueError(
            f"key: number of heads must equal query's {query.shape[1]}, got {key.shape[1]}; enable_gqa=True allows a "
            "divisor"
        )
    left, right = (None if x == -1 else x for x in window_size)
    return packed_attention(
        query, key, value, Lengths(cu_seq_q, cu_seq_k, seqused_k), (plain_int(max_q), plain_int(max_k)),
        bias=bias, scale=scale, causal=(left, right) == (None, 0),
        window=None if right == 0 and left is None else (left, right), return_lse=lse,
    )  # fmt: skip


def packed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Lengths,
    longest: tuple[int, int],
    *,
    return_lse: bool = False,
    exact: bool = False,
    **options: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """`varlen_attention` for the doors, with its lengths in one; ``longest``: its maxima; exact: see `Problem`."""
    check_flag("return_lse", return_lse)
    if isinstance(q, Tensor) and q.is_cuda and not torch.compiler.is_compiling():  # on a CPU they are checked
        longest = shared_longest(longest, **options)
    usual = UsualPacked.of(q, k, v, lengths, longest, exact, options)
    found = None if usual is None else usual.again(return_lse)
    if found is not None:
        return found if return_lse else found[0]  # type: ignore[return-value]
    call = read_packed(q, k, v, lengths, longest, **options)
    inputs = with_seed(call.inputs, call.score)
    o, lse = attention_op(inputs, *call[1:], return_lse=return_lse, exact=exact)
    if usual is not None:
        usual.keep(inputs, Terms.of(*call[1:], exact))
    o = o.squeeze(0).transpose(0, 1)  # an index would copy the cotangent
    if not return_lse:
        return o
    assert lse is not None
    return o, lse.squeeze(0)


def shared_longest(
    longest: tuple[int, int], *, bias: Bias = None, mask: Tensor | None = None, validate: bool = False, **_: Any
) -> tuple[int, int]:  # fmt: skip
    """Longest lengths that many batches have in common, where nothing has a shape of them: a call is prepared anew for
    each, and batches of a training differ in theirs. At most 15 more up to 128, and an eighth or 127 above."""
    packed = bias is None or type(bias) is RaggedBias or (isinstance(bias, Tensor) and bias.dim() < 4)
    if not packed or mask is not None or validate or not all(type(n) is int for n in longest):
        return longest
    found = [n if n <= 16 else _rounded(n, 16 if n <= 128 else max(128, 1 << n.bit_length() - 4)) for n in longest]
    return found[0], found[1]


def _rounded(n: int, step: int) -> int:
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
    validate: bool = False,
    **numbers: Unpack[Numbers],
) -> Call:
    """The arguments of `varlen_attention`, read and checked, as `read_call` does those of `attention`."""
    check_flag("validate", validate)
    check_flag("causal", causal)
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    check_flag("deterministic", deterministic, "a bool or None")
    check_backend(backend)
    check_numbers(window, dropout_p=dropout_p, **numbers)
    if isinstance(mask, TileMask) or is_block_mask(mask):
        raise TypeError(
            f"mask: varlen_attention takes no {type(mask).__name__} yet: its tiles would cross borders of sequences; "
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
    if validate:
        places(lengths, packed, totals)

    band = Band.aligned(bool(causal), window, 0)
    score = Score.of(band, q.shape[3], dropout_p=dropout_p, **numbers)
    inputs = Inputs(q, k, v, None, padded_mask(mask), None, lengths=lengths)
    forms: tuple[str, ...] = ()
    if bias is not None:
        if is_causal_bias(bias):
            raise TypeError("bias: a CausalBias has lengths of its own; pass causal=True")
        found = packed_slots(bias, sizes, totals, lengths, device)
        if found.slots.low_rank is not None and backend == "oracle":
            found = packed_dense(found, low_rank_of(found.slots, q, score), sizes, lengths)
        slots, forms, pairs = found
        inputs, score = with_slots(inputs, score, slots)
        if slots.matrix is None:  # the bias is then the first of these
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
    return Call(inputs, score, bool(deterministic), "auto" if backend is None else backend)


def _check_packed(q: Tensor, k: Tensor, v: Tensor) -> None:
    """q, k and v as a caller gave them."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if is_dtensor(x):
            raise NotImplementedError(f"{name}: packed batches take no DTensors; call it on local tensors")
        if x.dim() != 3:
            raise ValueError(
                f"{name}: expected 3 dimensions (total length, heads, head_dim), got shape {tuple(x.shape)}"
            )
        if x.dtype not in DTYPES:
            raise TypeError(f"{name}: dtype must be float16, bfloat16, float32 or float64, got {x.dtype}")
        if not 1 <= x.shape[2] <= MAX_HEAD_DIM:
            raise ValueError(f"{name}: head dimension must be between 1 and {MAX_HEAD_DIM}, got {x.shape[2]}")


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
    H = q.shape[1]
    if sink.dim() == 1 and sink.shape[0] in (1, H):
        return sink[None, :, None], ()
    if sink.dim() == 2 and sink.shape[0] in (1, H) and sink.shape[1] == total:
        return sink[None], ("sink",)
    raise ValueError(
        f"sink: expected one logit for each head, ({H}|1,), or for each query, ({H}|1, {total}), "
        f"got shape {tuple(sink.shape)}"
    )
