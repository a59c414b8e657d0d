"""Drop-in replacements for flash_attn 2.8: its functions, dense and packed, with its signatures and layout.

flash-attn itself is neither imported nor needed: these run wherever `tilewise.attention` does. Each also takes
``bias=``, by keyword. docs/flash-attn.md has a table of the arguments, and the differences.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise import attention, varlen_attention
from tilewise.backends import Inputs
from tilewise.bias import alibi
from tilewise.bias.terms import Term
from tilewise.frontend.arguments import Bias
from tilewise.frontend.autocast import autocast_on
from tilewise.frontend.call_cache import settings_key
from tilewise.frontend.keywords import named_only, unexpected
from tilewise.frontend.varlen import cached_packed
from tilewise.operator.autograd import Found
from tilewise.spec.checks import DTYPES, check_flag, check_head_dim
from tilewise.spec.integers import LARGEST_SIZE, check_range
from tilewise.spec.score import is_positive_float
from tilewise.spec.seqlens import Lengths
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
    """Compute attention of (batch, length, heads, head_dim) tensors like flash-attn's function of this name.

    Args:
        q: queries (B, M, H, D); float16, bfloat16, float32, or float64 (CPU). D is 1 or more. Any strides.
        k: keys (B, N, Hkv, D) in q's dtype, where Hkv divides H (GQA, MQA).
        v: values (B, N, Hkv, Dv) in q's dtype. Dv is 1 or more and may differ from D.
        dropout_p: the share of the probabilities that are dropped, 0 to 1, by torch's generator on q's device, but with
            other numbers than flash-attn's; see `tilewise.attention`. Also with softcap.
        softmax_scale: multiplies ``q @ k.mT``; positive. Default ``1 / sqrt(D)``.
        causal: query i sees the keys up to i + N - M (bottom-right).
        window_size: ``(left, right)``: query i sees the keys from i + N - M - left to i + N - M + right. A negative
            side, or None, has no limit. An integer tensor of the two on a GPU synchronizes the host.
        softcap: above 0, scores become ``softcap * tanh(score / softcap)`` before a bias is added; else unchanged.
        alibi_slopes: (H,) or (B, H), float32 as in flash-attn or another float dtype: adds ``-slope * |i + N - M - j|``
            to the score of query i and key j. Slopes that require grad get a gradient.
        deterministic: True: equal inputs give bitwise equal gradients. False: ``torch.use_deterministic_algorithms``
            decides.
        return_attn_probs: also return the logsumexp, and None in place of flash-attn's probabilities.
        bias: like ``bias`` of `tilewise.attention`, broadcastable to (B, H, M, N): heads before the lengths, unlike
            q. It is added with the slopes, and has a gradient.

    Returns:
        out (B, M, H, Dv) in q's dtype. With ``return_attn_probs`` ``(out, softmax_lse, None)``: softmax_lse (B, H, M),
        float32 (float64 for float64 inputs), natural logarithm, differentiable. The third, S_dmask in flash-attn, would
        be the matrix of probabilities, which is never formed. A query that sees no key gives out = 0 and zero gradients
        as in flash-attn, and softmax_lse = -inf, where flash-attn has +inf.

    Raises:
        ValueError, TypeError: an invalid argument; the message names it, its value and what is allowed.

    Source: flash_attn/flash_attn_interface.py of flash-attn 2.8 for the signature and its meaning; for the computation
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
    """Compute `flash_attn_func` of keys and values in one tensor, which gets its gradient in one piece.

    Args:
        q: queries (B, M, H, D).
        kv: keys and values (B, N, 2, Hkv, D) in q's dtype; read as views, without a copy.

    Other arguments, results, errors and the source: see `flash_attn_func`."""
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
    """Compute `flash_attn_func` of queries, keys and values in one tensor, which gets its gradient in one piece.

    Args:
        qkv: (B, M, 3, H, D); read as views, without a copy.

    Other arguments, results, errors and the source: see `flash_attn_func`."""
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
    """Compute attention of packed sequences without padding, each of which sees itself alone.

    Args:
        q: queries (total_q, H, D).
        k: keys (total_k, Hkv, D) in q's dtype.
        v: values (total_k, Hkv, Dv) in q's dtype.
        cu_seqlens_q: (B + 1,), int32 as in flash-attn or int64, on q's device: where the queries of each sequence
            begin, from 0, and the end of the last.
        cu_seqlens_k: likewise for the keys.
        max_seqlen_q, max_seqlen_k: the length of the longest sequence or more: ints, or integer tensors without
            dimensions, which synchronize the host on a GPU.
        causal, window_size, alibi_slopes: relative to each sequence's own last query and key; slopes (B, H) are per
            sequence.
        block_table: None: paged keys and values are not implemented.
        bias: like ``bias`` of `tilewise.varlen_attention`, for example (B, H, max_seqlen_q, max_seqlen_k), or a number
            for each key, (H, total_k).

    Other arguments: see `flash_attn_func`.

    Returns:
        out (total_q, H, Dv) in q's dtype. With ``return_attn_probs`` ``(out, softmax_lse, None)``, where softmax_lse is
        (H, total_q); otherwise as in `flash_attn_func`.

    Raises:
        ValueError, TypeError: an invalid argument; the message names it, its value and what is allowed.
        NotImplementedError: a block_table.

    Source: see `flash_attn_func`; `tilewise.varlen_attention`.
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
    """Compute `flash_attn_varlen_func` of keys and values in one tensor, which gets its gradient in one piece.

    Args:
        q: queries (total_q, H, D).
        kv: keys and values (total_k, 2, Hkv, D) in q's dtype; read as views, without a copy.

    Other arguments, results, errors and the source: see `flash_attn_varlen_func`."""
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
    """Compute `flash_attn_varlen_func` of queries, keys and values in one tensor, which gets its gradient in one piece.

    Args:
        qkv: (total, 3, H, D); read as views, without a copy.
        cu_seqlens: (B + 1,), for queries and keys.
        max_seqlen: int, the length of the longest sequence or more.

    Other arguments, results, errors and the source: see `flash_attn_varlen_func`.
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


# --- shared by the six functions ---


class _Tensors(NamedTuple):
    """Queries, keys and values in flash-attn's layout, and the names of their arguments."""

    q: Tensor
    k: Tensor
    v: Tensor
    names: tuple[str, str, str] = ("q", "k", "v")


class _Lengths(NamedTuple):
    """The offsets and longest lengths of a packed batch, and the names of their arguments."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    cu_name: str = "cu_seqlens_q"
    max_name: str = "max_seqlen_q"

    def check(self, q: Tensor) -> None:
        """Raise errors that `tilewise.varlen_attention` would name differently, or for lack of a batch size."""
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
    """The arguments other than queries, keys and values, unchanged."""

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
        """Return the keywords of `tilewise.attention`, which checks those of equal name and meaning."""
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
    known = _known(tensors, lengths, options)
    if known is not None:
        o, lse, _ = known
        return (o.contiguous(), lse, None) if options.return_attn_probs else o.contiguous()
    _check_tensors(tensors, "(total, heads, head_dim)")
    lengths.check(tensors.q)
    keywords = options.keywords(lengths.cu_seqlens_q.shape[0] - 1, tensors.q)
    cu_q, cu_k, max_q, max_k = lengths[:4]
    found = varlen_attention(*tensors[:3], cu_q, cu_k, max_q, max_k, **keywords)
    if isinstance(found, Tensor):
        return found.contiguous()
    o, rows = found
    return o.contiguous(), rows, None


def _known(tensors: _Tensors, lengths: _Lengths, options: _Options) -> Found | None:
    """Return o and lse of a packed call without slopes that is cached. Its arguments have passed all checks before."""
    dropout_p, scale, causal, window, softcap, slopes, deterministic, return_lse, bias = options
    if slopes is not None or type(softcap) is not float or type(deterministic) is not bool:
        return None
    if type(window) is not tuple or len(window) != 2 or torch.compiler.is_compiling():
        return None
    left, right = window
    if type(left) is not int or type(right) is not int:
        return None
    limits = None if left < 0 and right < 0 else (None if left < 0 else left, None if right < 0 else right)
    cap = None if softcap <= 0 else softcap
    settings = settings_key(causal, limits, scale, cap, dropout_p, True if deterministic else None)
    q, k, v, _ = tensors
    cu_q, cu_k, max_q, max_k, *_ = lengths
    given = Inputs(q, k, v, bias, None, None, None, None, Lengths(cu_q, cu_k))  # type: ignore[arg-type]
    return cached_packed(given, (max_q, max_k), settings, return_lse)


def _rows_first(o: Tensor) -> Tensor:
    """Return (B, H, M, Dv) as (B, M, H, Dv), contiguous like flash-attn's output: callers take views of it."""
    return o.transpose(1, 2).contiguous()


def _unpacked(name: str, x: Tensor, layout: str) -> Sequence[Tensor]:
    """Return the tensors in ``x``, along the axis with a number in ``layout``; autograd stacks their gradients."""
    check_tensor(name, x)
    axes = layout.strip("()").split(", ")
    at = next(i for i, axis in enumerate(axes) if axis.isdigit())
    if x.dim() != len(axes) or x.shape[at] != int(axes[at]):
        raise ValueError(f"{name}: expected shape {layout}, got {tuple(x.shape)}")
    return x.unbind(at)


def _check_tensors(tensors: _Tensors, layout: str) -> None:
    """Raise errors that `tilewise.attention` would name differently, or by shapes in its own layout."""
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
        check_head_dim(name, x.shape[-1])
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
    """Return the window in the form of `tilewise.attention`: None is no limit."""
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
    """Return the bias together with ALiBi's."""
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
