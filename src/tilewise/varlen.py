"""Attention of packed batches: sequences of any lengths, concatenated without padding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilewise.backends import Inputs
from tilewise.frontend.arguments import Bias, Seed, Window
from tilewise.frontend.call_cache import settings_key
from tilewise.frontend.keywords import named_only, unexpected
from tilewise.frontend.varlen import cached_packed, packed_attention
from tilewise.spec.checks import check_flag
from tilewise.spec.integers import check_range
from tilewise.spec.seqlens import Lengths
from tilewise.spec.statistics import NO_STATISTICS, AuxOutput, AuxRequest, aux_output, read_request
from tilewise.spec.tensors import check_tensor, plain_int, plain_ints


@named_only
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
    scale: float | None = None,
    softcap: float | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Seed = None,
    return_lse: bool = False,
    return_aux: AuxRequest | None = None,
    deterministic: bool | None = None,
    backend: str | None = None,
    validate: bool = False,
    **unknown: Any,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput]:
    """Return `tilewise.attention` of B packed sequences, each of which attends to itself only.

    No tensor is padded or copied, and on a GPU the host does not synchronize for the lengths. Queries and keys are
    counted from the start of their sequence: ``causal`` lets its last query see its last key, and entry (i, j) of a
    bias or mask belongs to its query i and key j.

    Args:
        q: queries (total_q, H, D), dtypes and sizes as for `attention`, any strides.
        k: keys (total_k, Hkv, D).
        v: values (total_k, Hkv, Dv).
        cu_seqlens_q: offsets (B + 1,), int32 or int64, on q's device: sequence b has the queries ``cu_seqlens_q[b]`` to
            ``cu_seqlens_q[b + 1] - 1``. They start at 0 and do not decrease; lengths 0 and 1 are allowed.
        cu_seqlens_k: the offsets of the keys, in the same form.
        max_seqlen_q, max_seqlen_k: length of the longest sequence, or any larger number. Ints, or integer tensors of no
            dimensions, for which the host synchronizes on a GPU.
        seqused_k: (B,), int32 or int64: number of keys used from the start of each sequence. Default: all.
        bias: a tensor of four dimensions is padded, {B|1} × {H|Hkv|1} × {max_seqlen_q|1} × {max_seqlen_k|1}. A tensor
            of fewer dimensions is packed: along the keys, (1|H, total_k), or along the queries, (1|H, total_q, 1). Or a
            term of `tilewise.bias`, or a tuple of tensors and terms: `RaggedBias` has one matrix per sequence,
            `RelativeBias` packed values (total_q, H, R), and `low_rank_bias` takes (1, H, total_q, r) and (1, Hkv,
            total_k, r). Each tensor gets its gradient.
        mask: bool, True = attend; padded, {B|1} × {H|Hkv|1} × {max_seqlen_q|1} × {max_seqlen_k|1}. No mask is needed to
            separate the sequences.
        sink: (H,), or packed per query, (1|H, total_q).
        dropout_seed: as for `attention`, with the sequence's number b as the batch index: a packed batch drops what the
            padded batch would.
        validate: check the lengths and raise an error if they are invalid; on a GPU the host synchronizes for it. On
            the CPU they are always checked. Without it, on a GPU, invalid lengths give wrong numbers, but no memory
            outside the tensors is written.
        causal, window, scale, softcap, dropout_p, deterministic, backend: as for `attention`.
        return_lse: if True, also return lse.
        return_aux: `tilewise.AuxRequest` of more results for each query, as for `attention`.

    Returns:
        o (total_q, H, Dv) in q's dtype; with ``return_lse`` also lse (H, total_q), float32 (float64 for float64
        inputs), or with ``return_aux`` a `tilewise.AuxOutput`. Rows past the last sequence and queries that see no key
        have o = 0 and lse = -inf.

    Raises:
        ValueError, TypeError: an argument is not allowed; the message names it, the value received and what is allowed.
        NotImplementedError: DTensors; ONNX graphs.

    Examples:
        >>> q, k, v = (torch.randn(300, 8, 64) for _ in range(3))
        >>> offsets = torch.tensor([0, 100, 300], dtype=torch.int32)
        >>> tilewise.varlen_attention(q, k, v, offsets, offsets, 200, 200, causal=True).shape
        torch.Size([300, 8, 64])

    Source: flash_attn_varlen_func of FlashAttention (arXiv 2307.08691) for the layout; docs/maths.md for the formulas.
    """
    if unknown:
        raise unexpected("varlen_attention", unknown)
    statistics, request = NO_STATISTICS, None
    if return_aux is not None:
        request = read_request(return_aux, return_lse)
        return_lse, statistics = request.lse, request.statistics
    lengths, found = Lengths(cu_seqlens_q, cu_seqlens_k, seqused_k), None
    if dropout_seed is None and validate is False and not torch.compiler.is_compiling():
        given = Inputs(q, k, v, bias, mask, sink, None, None, lengths)  # type: ignore[arg-type]  # a bias may be a term
        settings = settings_key(causal, window, scale, softcap, dropout_p, deterministic, backend, statistics)
        found = cached_packed(given, (max_seqlen_q, max_seqlen_k), settings, return_lse)
    if found is None:
        longest = plain_int(max_seqlen_q), plain_int(max_seqlen_k)
        found = packed_attention(
            q, k, v, lengths, longest, bias=bias, mask=mask, sink=sink, causal=causal, window=plain_ints(window),
            scale=scale, softcap=softcap, dropout_p=dropout_p, dropout_seed=dropout_seed, return_lse=return_lse,
            deterministic=deterministic, backend=backend, validate=validate, statistics=statistics,
        )  # fmt: skip
    o, lse, more = found
    if request is not None:
        return o, aux_output(request, lse, more)
    return (o, lse) if return_lse else o  # type: ignore[return-value]


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
) -> Any:
    """Return `varlen_attention`, with the signature of `torch.nn.attention.varlen.varlen_attn` and a bias.

    The signature is that of torch 2.12 and 2.13.

    Args:
        query, key, value: (total_q, H, D), (total_k, Hkv, D), (total_k, Hkv, Dv): q, k and v of `varlen_attention`.
        cu_seq_q, cu_seq_k: its cu_seqlens_q and cu_seqlens_k, (B + 1,), int32 or int64.
        max_q, max_k: its max_seqlen_q and max_seqlen_k.
        return_aux: PyTorch's AuxRequest; with its ``lse`` lse is returned too. Or `tilewise.AuxRequest`.
        scale: multiplies ``query @ key.mT``; positive. Default: ``1 / sqrt(D)``.
        window_size: (left, right), -1 for no limit: (-1, 0) is causal, aligned bottom-right.
        enable_gqa: if True, key and value may have fewer heads than query, a divisor of H.
        seqused_k: as for `varlen_attention`; gradients are supported with it too.
        block_table, num_splits: must be None; paged keys and a number of splits are not implemented.
        bias: as for `varlen_attention`; PyTorch's function has none.

    Returns:
        o (total_q, H, Dv) in query's dtype; with the lse also lse (H, total_q), float32 (float64 for float64 inputs).
        If ``return_aux`` asks for statistics, o and an AuxOutput.

    Raises:
        ValueError, TypeError: an argument is not allowed; the message names it, the value received and what is allowed.
            Checks shared with `varlen_attention` use its names.
        NotImplementedError: block_table, num_splits, and those of `varlen_attention`.

    Examples:
        >>> q, k, v = (torch.randn(300, 8, 64) for _ in range(3))
        >>> offsets = torch.tensor([0, 100, 300], dtype=torch.int32)
        >>> tilewise.varlen_attn(q, k, v, offsets, offsets, 200, 200, window_size=(-1, 0)).shape
        torch.Size([300, 8, 64])
    """
    if (
        type(window_size) is tuple and len(window_size) == 2 and type(window_size[0]) is type(window_size[1]) is int
        and block_table is num_splits is return_aux is None and type(enable_gqa) is bool
        and not torch.compiler.is_compiling()
    ):  # fmt: skip
        given = Inputs(query, key, value, bias, None, None, None, None, Lengths(cu_seq_q, cu_seq_k, seqused_k))  # type: ignore[arg-type]
        found = cached_packed(given, (max_q, max_k), settings_key(*_limits(*window_size), scale), False)
        if found is not None and (enable_gqa or query.shape[1] == key.shape[1]):
            return found[0]
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
    request = AuxRequest() if return_aux is None else read_request(return_aux)
    for name, x in (("query", query), ("key", key), ("value", value), ("cu_seq_q", cu_seq_q), ("cu_seq_k", cu_seq_k)):
        check_tensor(name, x)
    if query.dim() == key.dim() == 3 and not enable_gqa and query.shape[1] != key.shape[1]:
        raise ValueError(
            f"key: number of heads must equal query's {query.shape[1]}, got {key.shape[1]}; enable_gqa=True allows a "
            "divisor"
        )
    causal, window = _limits(*window_size)
    o, lse, more = packed_attention(
        query, key, value, Lengths(cu_seq_q, cu_seq_k, seqused_k), (plain_int(max_q), plain_int(max_k)),
        bias=bias, scale=scale, causal=causal, window=window, return_lse=request.lse, statistics=request.statistics,
    )  # fmt: skip
    if any(request.statistics):
        return o, aux_output(request, lse, more)
    return (o, lse) if request.lse else o


def _limits(left: int, right: int) -> tuple[bool, Window | None]:
    """Return causal and window of `varlen_attention` for PyTorch's window_size, in which -1 is no limit."""
    if left == -1 and right == 0:
        return True, None
    return False, (None if left == -1 else left, None if right == -1 else right)
