"""The public call. It names and checks its arguments; everything else happens further down."""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor

from tilewise.autocast import autocast, autocast_somewhere
from tilewise.autograd import attention_op, remember_call, usual_call
from tilewise.backends import Inputs
from tilewise.keywords import named_only, unexpected
from tilewise.plan import check_backend
from tilewise.problem import check_dense, check_flag, check_numbers, four_dims
from tilewise.score.terms import Band, Score

Window = tuple[int | None, int | None]
_EVERYWHERE = Band()


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, bias: Tensor | None = ..., mask: Tensor | None = ..., causal: bool = ...,
    window: Window | None = ..., scale: float | None = ..., softcap: float | None = ..., dropout_p: float = ...,
    return_lse: Literal[False] = ..., deterministic: bool | None = ..., backend: str | None = ...,
) -> Tensor: ...  # fmt: skip


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, bias: Tensor | None = ..., mask: Tensor | None = ..., causal: bool = ...,
    window: Window | None = ..., scale: float | None = ..., softcap: float | None = ..., dropout_p: float = ...,
    return_lse: Literal[True], deterministic: bool | None = ..., backend: str | None = ...,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, bias: Tensor | None = ..., mask: Tensor | None = ..., causal: bool = ...,
    window: Window | None = ..., scale: float | None = ..., softcap: float | None = ..., dropout_p: float = ...,
    return_lse: bool, deterministic: bool | None = ..., backend: str | None = ...,
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip


@named_only
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout_p: float = 0.0,
    return_lse: bool = False,
    deterministic: bool | None = None,
    backend: str | None = None,
    **unknown: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Exact attention, ``softmax(softcap(scale * q @ k.mT) + bias) @ v``, without ever storing the score matrix.

    Args:
        q: queries (B, H, M, D); float16, bfloat16, float32, or float64 (CPU). D is 1 to 256. Any strides: data laid
            out as (B, M, H, D) passes by ``transpose(1, 2)`` without a copy, and the output has the same layout.
        k: keys (B, Hkv, N, D) in q's dtype, where Hkv divides H (GQA, MQA): query head h uses head h // (H / Hkv).
        v: values (B, Hkv, N, Dv) in q's dtype. Dv is 1 to 256 and may differ from D.
        bias: added to the scaled scores; float16, bfloat16, float32 or float64 (CPU), whatever q's dtype is, of at most
            4 dimensions, broadcastable {B|1} × {H|Hkv|1} × {M|1} × {N|1}. Its gradient has its shape and dtype and is
            summed in float32 (float64 for float64 inputs). A bias of -inf hides the key from the query like a mask.
        mask: bool, the same broadcasting; True = attend. Padding (B, N) is passed as ``mask[:, None, None, :]``.
        causal: query i sees the keys up to i + N - M, so that the last query sees the last key (bottom-right).
        window: ``(left, right)``: query i sees the keys from i + N - M - left to i + N - M + right; None: no limit.
        scale: multiplies ``q @ k.mT``; positive. Default ``1 / sqrt(D)``.
        softcap: if given, scores become ``softcap * tanh(score / softcap)`` before the bias is added.
        dropout_p: must be 0 for now.
        return_lse: also return the logarithm of each row's softmax denominator.
        deterministic: True: equal inputs give bitwise equal gradients. Default: what
            ``torch.use_deterministic_algorithms`` says.
        backend: "hopper", "triton", "cpu" or "oracle"; one that cannot run the call is an error. Default, and "auto":
            chosen by the plan, see `tilewise.explain`.

    Under `torch.autocast` q, k and v are cast to its dtype, but for float64, as for PyTorch's own attention; bias keeps
    its dtype. Their gradients come back in the dtypes that they had.

    Returns:
        o (B, H, M, Dv) in q's dtype; with ``return_lse`` also lse (B, H, M), float32 (float64 for float64 inputs),
        natural logarithm, differentiable. A query that sees no key gives o = 0, lse = -inf and zero gradients, and
        NaN or infinity in a key or value that a query does not see stays out of its output.

    Raises:
        ValueError, TypeError: naming the argument, what came and what is allowed.
        NotImplementedError: dropout_p > 0.

    Source: FlashAttention-2 (arXiv 2307.08691), Algorithms 1 and 2; docs/maths.md derives every formula.
    """
    if unknown:
        raise unexpected("attention", unknown)
    if return_lse is not True and return_lse is not False:
        check_flag("return_lse", return_lse)
    arguments = None
    if (
        window is None and scale is None and softcap is None and type(dropout_p) is float and dropout_p == 0.0
        and (causal is False or causal is True) and (deterministic is None or type(deterministic) is bool)
        and (backend is None or type(backend) is str) and not torch.compiler.is_compiling()
    ):  # fmt: skip
        ordered = torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic
        arguments = (causal, ordered, backend)
        if autocast_somewhere():
            q, k, v = _cast(q, k, v)
        found = usual_call(Inputs(q, k, v, bias, mask), arguments, return_lse)
        if found is not None:
            return found if return_lse else found[0]  # type: ignore[return-value]
    call = read_call(
        q, k, v, bias=bias, mask=mask, causal=causal, window=window, scale=scale, softcap=softcap,
        dropout_p=dropout_p, deterministic=deterministic, backend=backend,
    )  # fmt: skip
    o, lse = attention_op(*call, return_lse=return_lse)
    if arguments is not None:
        remember_call(Inputs(q, k, v, bias, mask), arguments, *call[1:])
    return (o, lse) if return_lse else o  # type: ignore[return-value]


class Call(NamedTuple):
    """The arguments of a call with their defaults filled in: those of `attention_op`."""

    inputs: Inputs
    score: Score
    deterministic: bool
    backend: str


def read_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    bias: Tensor | None,
    mask: Tensor | None,
    causal: bool,
    window: Window | None,
    scale: float | None,
    softcap: float | None,
    dropout_p: float,
    deterministic: bool | None,
    backend: str | None,
) -> Call:
    """The keyword arguments of `attention`, read and checked."""
    check_numbers(window, scale, softcap, dropout_p)
    if causal is not True and causal is not False:  # the common case without a call
        check_flag("causal", causal)
    if deterministic is not None:
        check_flag("deterministic", deterministic, "a bool or None")
    check_backend(backend)
    q, k, v = _cast(q, k, v)
    inputs = _inputs(q, k, v, bias, mask)
    band = _EVERYWHERE
    if causal or window is not None:
        # Malformed tensors get a neutral diagonal here and their error where the Problem is made.
        diagonal = k.shape[2] - q.shape[2] if q.dim() == k.dim() == 4 else 0
        band = Band.aligned(bool(causal), window, diagonal)
    score = Score(_scale(q, scale), None if softcap is None else float(softcap), band)
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    return Call(inputs, score, deterministic, "auto" if backend is None else backend)


def _scale(q: Tensor, scale: float | None) -> float:
    if scale is not None:
        return float(scale)
    dim = q.shape[-1] if q.dim() > 0 else 0
    return 1.0 / math.sqrt(dim) if dim > 0 else 1.0


def _cast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """What autocast makes of them, if they are tensors at all."""
    tensors = isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)
    return autocast(q, k, v) if tensors else (q, k, v)


def _inputs(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: Tensor | None) -> Inputs:
    if not (isinstance(q, Tensor) and isinstance(k, Tensor) and isinstance(v, Tensor)):
        name, x = next((n, x) for n, x in (("q", q), ("k", k), ("v", v)) if not isinstance(x, Tensor))
        raise TypeError(f"{name}: expected a torch.Tensor, got {type(x).__name__}")
    if not (q.layout is k.layout is v.layout is torch.strided):
        check_dense("q", q)
        check_dense("k", k)
        check_dense("v", v)
    if bias is None and mask is None:
        return Inputs(q, k, v, None, None)
    for name, x in (("bias", bias), ("mask", mask)):
        if x is None:
            continue
        if not isinstance(x, Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor, got {type(x).__name__}")
        check_dense(name, x)
    if mask is not None and mask.requires_grad:
        raise ValueError("mask: requires grad, but a mask has no gradient; pass a trainable additive mask as bias=")
    if bias is not None:
        bias = four_dims("bias", bias, q, k, v)
    if mask is not None:
        mask = four_dims("mask", mask, q, k, v)
    return Inputs(q, k, v, bias, mask)
