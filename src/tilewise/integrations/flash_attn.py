"""The door for code that imports from flash_attn 2.8: its functions, dense and packed, with its signatures and layout.

flash-attn itself is neither imported nor needed: these run wherever `tilewise.attention` does. Each has one argument
more, ``bias=``, by keyword. docs/flash-attn.md has the arguments in a table, and what differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise import attention, varlen_attention
from tilewise.bias import alibi
from tilewise.bias.terms import Term
from tilewise.frontend.arguments import Bias
from tilewise.frontend.autocast import autocast_on
from tilewise.frontend.keywords import named_only, unexpected
from tilewise.spec.checks import DTYPES, MAX_HEAD_DIM, check_flag
from tilewise.spec.integers import LARGEST_SIZE, check_range
from tilewise.spec.score import is_positive_float
from tilewise.spec.tensors import check_tensor, plain_int, plain_ints


@named_only
def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    bias: Bias = None,
    **unknown: Any,
) -> Any:
    """Attention of (batch, length, heads, head_dim) tensors, as flash-attn's function of this name computes it.

    Args:
        q: queries (B, M, H, D); float16, bfloat16, float32, or float64 (CPU). D is 1 to 256. Any strides.
        k: keys (B, N, Hkv, D) in q's dtype, where Hkv divides H (GQA, MQA).
        v: values (B, N, Hkv, Dv) in q's dtype. Dv is 1 to 256 and may differ from D.
        dropout_p: the share of the probabilities that are dropped, 0 to 1, by numbers from torch's generator on q's
            device, but other ones than flash-attn draws; see `tilewise.attention`. Beside softcap too.
        softmax_scale: multiplies ``q @ k.mT``; positive. Default ``1 / sqrt(D)``.
        causal: query i sees the keys up to i + N - M (bottom-right).
        window_size: ``(left, right)``, or an integer tensor of the two, for which the host waits on a GPU: query i sees
            the keys from i + N - M - left to i + N - M + right. A side that is negative, or None, has no limit.
        softcap: above 0, scores become ``softcap * tanh(score / softcap)`` before a bias is added; else they stay.
        alibi_slopes: (H,) or (B, H), float32 as flash-attn wants them or another float dtype: adds
            ``-slope * |i + N - M - j|`` to the score of query i and key j. Slopes that require grad get a gradient.
        deterministic: True: equal inputs give bitwise equal gradients. False is no wish: what
            ``torch.use_deterministic_algorithms`` says.
        return_attn_probs: also return the logsumexp, and None where flash-attn has the probabilities.
        bias: what `tilewise.attention` takes as ``bias``, broadcastable to (B, H, M, N): heads before the lengths,
            unlike q. It is added beside the slopes, and has a gradient.

    Returns:
        out (B, M, H, Dv) in q's dtype. With ``return_attn_probs`` ``(out, softmax_lse, None)``: softmax_lse (B, H, M),
        float32 (float64 for float64 inputs), natural logarithm, differentiable. The third, S_dmask in flash-attn, would
        be the matrix of probabilities, which is never formed. A query that sees no key gives out = 0 and zero
        gradients as in flash-attn, and softmax_lse = -inf, where flash-attn has +inf.

    Raises:
        ValueError, TypeError: naming the argument, what came and what is allowed.

    Source: flash_attn/flash_attn_interface.py of flash-attn 2.8 for the signature and what it means; of the computation
    `tilewise.attention`.
    """
    if unknown:
        raise unexpected("flash_attn_func", unknown)
    tensors = _Tensors(q, k, v)
    options = _Options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs, bias
    )
    return _dense(tensors, options)


@named_only
def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    bias: Bias = None,
    **unknown: Any,
) -> Any:
    """`flash_attn_func` of keys and values in one tensor, which gets its gradient in one piece.

    Args:
        q: queries (B, M, H, D).
        kv: keys and values (B, N, 2, Hkv, D) in q's dtype; views of it are read, nothing is copied.

    The others, what is returned and raised, and the source: those of `flash_attn_func`.
    """
    if unknown:
        raise unexpected("flash_attn_kvpacked_func", unknown)
    k, v = _unpacked("kv", kv, "(batch, seqlen, 2, heads, head_dim)")
    tensors = _Tensors(q, k, v, ("q", "kv", "kv"))
    options = _Options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs, bias
    )
    return _dense(tensors, options)


@named_only
def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    bias: Bias = None,
    **unknown: Any,
) -> Any:
    """`flash_attn_func` of queries, keys and values in one tensor, which gets its gradient in one piece.

    Args:
        qkv: (B, M, 3, H, D); views of it are read, nothing is copied.

    The others, what is returned and raised, and the source: those of `flash_attn_func`.
    """
    if unknown:
        raise unexpected("flash_attn_qkvpacked_func", unknown)
    q, k, v = _unpacked("qkv", qkv, "(batch, seqlen, 3, heads, head_dim)")
    tensors = _Tensors(q, k, v, ("qkv", "qkv", "qkv"))
    options = _Options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs, bias
    )
    return _dense(tensors, options)


@named_only
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    bias: Bias = None,
    **unknown: Any,
) -> Any:
    """Attention of sequences that lie end to end, without padding, each of which sees itself alone.

    Args:
        q: queries (total_q, H, D).
        k: keys (total_k, Hkv, D) in q's dtype.
        v: values (total_k, Hkv, Dv) in q's dtype.
        cu_seqlens_q: (B + 1,), int32 as flash-attn wants it or int64, on q's device: where the queries of each sequence
            begin, and the end of the last; it begins with 0.
        cu_seqlens_k: the same of the keys.
        max_seqlen_q, max_seqlen_k: the length of the longest sequence or more: ints, or integer tensors of no
            dimensions, for which the host waits on a GPU.
        causal, window_size, alibi_slopes: counted in each sequence from its own last query and key; slopes (B, H) are
            those of each sequence.
        block_table: None: keys and values in pages are not implemented.
        bias: what `tilewise.varlen_attention` takes as ``bias``, for example (B, H, max_seqlen_q, max_seqlen_k), or a
            number for each key, (H, total_k).

    The others are those of `flash_attn_func`.

    Returns:
        out (total_q, H, Dv) in q's dtype. With ``return_attn_probs`` ``(out, softmax_lse, None)``, softmax_lse being
        (H, total_q); otherwise as of `flash_attn_func`.

    Raises:
        ValueError, TypeError: naming the argument, what came and what is allowed.
        NotImplementedError: a block_table.

    Source: as of `flash_attn_func`; `tilewise.varlen_attention`.
    """
    if unknown:
        raise unexpected("flash_attn_varlen_func", unknown)
    if block_table is not None:
        raise NotImplementedError(
            "block_table: keys and values in pages are not implemented; pass them end to end, and block_table=None"
        )
    tensors = _Tensors(q, k, v)
    lengths = _Lengths(cu_seqlens_q, cu_seqlens_k, plain_int(max_seqlen_q), plain_int(max_seqlen_k))
    options = _Options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs, bias
    )
    return _varlen(tensors, lengths, options)


@named_only
def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    bias: Bias = None,
    **unknown: Any,
) -> Any:
    """`flash_attn_varlen_func` of keys and values in one tensor, which gets its gradient in one piece.

    Args:
        q: queries (total_q, H, D).
        kv: keys and values (total_k, 2, Hkv, D) in q's dtype; views of it are read, nothing is copied.

    The others, what is returned and raised, and the source: those of `flash_attn_varlen_func`.
    """
    if unknown:
        raise unexpected("flash_attn_varlen_kvpacked_func", unknown)
    k, v = _unpacked("kv", kv, "(total_k, 2, heads, head_dim)")
    tensors = _Tensors(q, k, v, ("q", "kv", "kv"))
    lengths = _Lengths(cu_seqlens_q, cu_seqlens_k, plain_int(max_seqlen_q), plain_int(max_seqlen_k))
    options = _Options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs, bias
    )
    return _varlen(tensors, lengths, options)


@named_only
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int | None] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    bias: Bias = None,
    **unknown: Any,
) -> Any:
    """`flash_attn_varlen_func` of queries, keys and values in one tensor, which gets its gradient in one piece.

    Args:
        qkv: (total, 3, H, D); views of it are read, nothing is copied.
        cu_seqlens: (B + 1,), of queries and keys alike.
        max_seqlen: int, the length of the longest sequence or more.

    The others, what is returned and raised, and the source: those of `flash_attn_varlen_func`.
    """
    if unknown:
        raise unexpected("flash_attn_varlen_qkvpacked_func", unknown)
    q, k, v = _unpacked("qkv", qkv, "(total, 3, heads, head_dim)")
    tensors = _Tensors(q, k, v, ("qkv", "qkv", "qkv"))
    longest = plain_int(max_seqlen)
    lengths = _Lengths(cu_seqlens, cu_seqlens, longest, longest, "cu_seqlens", "max_seqlen")
    options = _Options(
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs, bias
    )
    return _varlen(tensors, lengths, options)


# --- the six of them ---


class _Tensors(NamedTuple):
    """Queries, keys and values in flash-attn's layout, and the arguments that they came as."""

    q: Tensor
    k: Tensor
    v: Tensor
    names: tuple[str, str, str] = ("q", "k", "v")


class _Lengths(NamedTuple):
    """Where the sequences of a packed batch lie, and the arguments that this came as."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    cu_name: str = "cu_seqlens_q"
    max_name: str = "max_seqlen_q"

    def check(self, q: Tensor) -> None:
        """Raise for what has no number of sequences, or what `tilewise.varlen_attention` would name otherwise."""
        cu_seqlens, longest = self.cu_seqlens_q, self.max_seqlen_q
        check_tensor(self.cu_name, cu_seqlens)
        if cu_seqlens.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{self.cu_name}: dtype must be int32 or int64, got {cu_seqlens.dtype}")
        if cu_seqlens.dim() != 1 or cu_seqlens.shape[0] == 0:
            raise ValueError(f"{self.cu_name}: expected shape (batch + 1,), got {tuple(cu_seqlens.shape)}")
        if cu_seqlens.device != q.device:
            raise ValueError(f"{self.cu_name}: must be on q's device {q.device}, got {cu_seqlens.device}")
        if isinstance(longest, bool) or not isinstance(longest, (int, torch.SymInt)):
            raise TypeError(f"{self.max_name}: expected an int, got {type(longest).__name__}")
        if longest < 0:
            raise ValueError(f"{self.max_name}: must be 0 or more, got {longest}")
        check_range(self.max_name, longest, LARGEST_SIZE)


class _Options(NamedTuple):
    """The arguments that are no queries, keys or values, as they came."""

    dropout_p: float
    softmax_scale: float | None
    causal: bool
    window_size: Sequence[int | None]
    softcap: float
    alibi_slopes: Tensor | None
    deterministic: bool
    return_attn_probs: bool
    bias: Bias

    def keywords(self, batch: int, q: Tensor) -> dict[str, Any]:
        """Those of `tilewise.attention`, which checks what has the same name and meaning there."""
        for name in ("causal", "deterministic", "return_attn_probs"):
            check_flag(name, getattr(self, name))
        scale, softcap = self.softmax_scale, self.softcap
        if scale is not None:
            _check_number("softmax_scale", scale)
            if not is_positive_float(scale):
                raise ValueError(f"softmax_scale: must be positive and finite, got {scale}")
        _check_number("softcap", softcap)
        return {
            "bias": _with_slopes(self.bias, self.alibi_slopes, batch, q),
            "causal": self.causal,
            "window": _window(self.window_size),
            "scale": scale,
            "softcap": None if softcap <= 0 else softcap,
            "dropout_p": self.dropout_p,
            "return_lse": self.return_attn_probs,
            "deterministic": True if self.deterministic else None,
        }


def _dense(tensors: _Tensors, options: _Options) -> Any:
    _check_tensors(tensors, "(batch, seqlen, heads, head_dim)")
    q, k, v, names = tensors
    for name, x in zip(names[1:], (k, v), strict=True):
        if x.shape[0] != q.shape[0]:
            raise ValueError(f"{name}: batch size must equal q's {q.shape[0]}, got {x.shape[0]}")
    keywords = options.keywords(q.shape[0], q)
    found = attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), **keywords)
    if isinstance(found, Tensor):
        return _rows_first(found)
    o, lse = found
    return _rows_first(o), lse, None


def _varlen(tensors: _Tensors, lengths: _Lengths, options: _Options) -> Any:
    _check_tensors(tensors, "(total, heads, head_dim)")
    lengths.check(tensors.q)
    keywords = options.keywords(lengths.cu_seqlens_q.shape[0] - 1, tensors.q)
    cu_q, cu_k, max_q, max_k = lengths[:4]
    found = varlen_attention(*tensors[:3], cu_q, cu_k, max_q, max_k, **keywords)
    if isinstance(found, Tensor):
        return found.contiguous()
    o, lse = found
    return o.contiguous(), lse, None


def _rows_first(o: Tensor) -> Tensor:
    """(B, H, M, Dv) as (B, M, H, Dv), contiguous as flash-attn's: callers take views of it."""
    return o.transpose(1, 2).contiguous()


def _unpacked(name: str, x: Tensor, layout: str) -> Sequence[Tensor]:
    """The tensors in ``x``, along the axis that ``layout`` has a number for. Of their gradients one is stacked."""
    check_tensor(name, x)
    axes = layout.strip("()").split(", ")
    at = next(i for i, axis in enumerate(axes) if axis.isdigit())
    if x.dim() != len(axes) or x.shape[at] != int(axes[at]):
        raise ValueError(f"{name}: expected shape {layout}, got {tuple(x.shape)}")
    return x.unbind(at)


def _check_tensors(tensors: _Tensors, layout: str) -> None:
    """Raise for what `tilewise.attention` would refuse by other names, or by the shapes of its own layout."""
    q, k, v, names = tensors
    axes = layout.count(",") + 1
    for name, x in zip(names, (q, k, v), strict=True):
        check_tensor(name, x)
        if x.dim() != axes:
            raise ValueError(f"{name}: expected {axes} dimensions {layout}, got shape {tuple(x.shape)}")
        if x.dtype not in DTYPES:
            raise TypeError(f"{name}: dtype must be float16, bfloat16, float32 or float64, got {x.dtype}")
        if x.device != q.device:
            raise ValueError(f"{name}: must be on q's device {q.device}, got {x.device}")
        if x.dtype != q.dtype and not autocast_on(q):
            raise TypeError(f"{name}: dtype must equal q's {q.dtype}, got {x.dtype}")
        if not 1 <= x.shape[-1] <= MAX_HEAD_DIM:
            raise ValueError(f"{name}: head dimension must be between 1 and {MAX_HEAD_DIM}, got {x.shape[-1]}")
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"{names[1]}: head dimension must equal q's {q.shape[-1]}, got {k.shape[-1]}")
    if v.shape[-3:-1] != k.shape[-3:-1]:
        raise ValueError(
            f"{names[2]}: length and heads must equal k's {tuple(k.shape[-3:-1])}, got {tuple(v.shape[-3:-1])}"
        )
    H, Hkv = q.shape[-2], k.shape[-2]
    if Hkv != H and (Hkv == 0 or H % Hkv != 0):
        raise ValueError(f"{names[1]}: its {Hkv} heads must divide q's {H} heads")


def _check_number(name: str, x: object) -> None:
    if isinstance(x, bool) or not isinstance(x, (Real, torch.SymFloat, torch.SymInt)):
        raise TypeError(f"{name}: expected a float, got {type(x).__name__}")


def _window(window_size: Sequence[int | None]) -> tuple[int | None, int | None] | None:
    """As `tilewise.attention` takes it: None is no limit."""
    window_size = plain_ints(window_size)
    if not isinstance(window_size, tuple) or len(window_size) != 2:
        raise TypeError(f"window_size: expected a pair (left, right) of ints, -1 for no limit, got {window_size!r}")
    for side, width in zip(("left", "right"), window_size, strict=True):
        if width is None:
            continue
        if isinstance(width, bool) or not isinstance(width, (int, torch.SymInt)):
            raise TypeError(f"window_size: {side} width must be an int, -1 for no limit, got {width!r}")
        check_range("window_size", width)
    left, right = (None if width is None or width < 0 else width for width in window_size)
    return None if left is None and right is None else (left, right)


def _with_slopes(bias: Bias, slopes: Tensor | None, batch: int, q: Tensor) -> Bias:
    """The bias, and ALiBi's beside it."""
    if slopes is None:
        return bias
    check_tensor("alibi_slopes", slopes)
    if slopes.dtype not in DTYPES:
        raise TypeError(f"alibi_slopes: dtype must be float32 or another float dtype, got {slopes.dtype}")
    heads = q.shape[-2]
    if tuple(slopes.shape) not in ((heads,), (batch, heads)):
        raise ValueError(
            f"alibi_slopes: expected shape (heads,) = ({heads},) or (batch, heads) = ({batch}, {heads}), "
            f"got {tuple(slopes.shape)}"
        )
    if slopes.device != q.device:
        raise ValueError(f"alibi_slopes: must be on q's device {q.device}, got {slopes.device}")
    term = alibi(slopes, "absolute")
    if bias is None:
        return term
    return (term, bias) if isinstance(bias, (Tensor, Term)) else (term, *bias)
