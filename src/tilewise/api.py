"""The public function `attention`: it reads and checks its arguments, and calls the operator."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from tilewise.backends import Inputs
from tilewise.frontend.arguments import Bias, Mask, Seed, Window, cast, check_inputs, read_call, with_seed
from tilewise.frontend.autocast import autocast_somewhere
from tilewise.frontend.call_cache import cache_call, cached_call, settings_key
from tilewise.frontend.jagged import are_jagged, jagged_attention
from tilewise.frontend.keywords import named_only, too_many, unexpected
from tilewise.frontend.leading import attention_of_leading
from tilewise.masks.block_sparse import TileMask
from tilewise.operator.autograd import Found, attention_op
from tilewise.operator.tools import is_symbolic, symbolic
from tilewise.spec.checks import check_flag
from tilewise.spec.statistics import NO_STATISTICS, AuxOutput, AuxRequest, aux_output, read_request
from tilewise.spec.tensors import PLAIN, is_dtensor
from tilewise.topk.gather import attention_of_selected


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, bias: Bias = ..., mask: Mask = ..., sink: Tensor | None = ...,
    causal: bool = ..., window: Window | None = ..., scale: float | None = ..., softcap: float | None = ...,
    dropout_p: float = ..., dropout_seed: Seed = ..., return_lse: Literal[False] = ..., return_aux: None = ...,
    deterministic: bool | None = ..., backend: str | None = ...,
) -> Tensor: ...  # fmt: skip


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, bias: Bias = ..., mask: Mask = ..., sink: Tensor | None = ...,
    causal: bool = ..., window: Window | None = ..., scale: float | None = ..., softcap: float | None = ...,
    dropout_p: float = ..., dropout_seed: Seed = ..., return_lse: Literal[True], return_aux: None = ...,
    deterministic: bool | None = ..., backend: str | None = ...,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, bias: Bias = ..., mask: Mask = ..., sink: Tensor | None = ...,
    causal: bool = ..., window: Window | None = ..., scale: float | None = ..., softcap: float | None = ...,
    dropout_p: float = ..., dropout_seed: Seed = ..., return_lse: bool = ..., return_aux: AuxRequest,
    deterministic: bool | None = ..., backend: str | None = ...,
) -> tuple[Tensor, AuxOutput]: ...  # fmt: skip


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, bias: Bias = ..., mask: Mask = ..., sink: Tensor | None = ...,
    causal: bool = ..., window: Window | None = ..., scale: float | None = ..., softcap: float | None = ...,
    dropout_p: float = ..., dropout_seed: Seed = ..., return_lse: bool, return_aux: None = ...,
    deterministic: bool | None = ..., backend: str | None = ...,
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip


@named_only
def attention(
    q: Tensor = None,  # type: ignore[assignment]  # checked below, so that query= gets a hint
    k: Tensor = None,  # type: ignore[assignment]
    v: Tensor = None,  # type: ignore[assignment]
    *others: Any,
    bias: Bias = None,
    mask: Mask = None,
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
    **unknown: Any,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput]:
    """Return exact attention, ``softmax(softcap(scale * q @ k.mT) + bias) @ v``; the scores are not stored.

    Args:
        q: queries (B, H, M, D) in float16, bfloat16, float32 or, on the CPU, float64; any strides.
        k: keys (B, Hkv, N, D) in q's dtype. Hkv divides H (GQA, MQA).
        v: values (B, Hkv, N, Dv) in q's dtype.
        bias: added to the scaled scores, after the softcap. A tensor that broadcasts as {B|1} × {H|Hkv|1} × {M|1} ×
            {N|1}, in any of these dtypes, whatever q's is; or a term of `tilewise.bias` (relative positions, T5, ALiBi,
            low rank); or a tuple of them. Each tensor gets a gradient of its own shape and dtype. -inf hides a key.
        mask: bool, True = attend; broadcasts as the bias does. Pass padding (B, N) as ``mask[:, None, None, :]``. Or a
            `tilewise.TileMask` or a BlockMask of FlexAttention, whose empty tiles are skipped.
        sink: one more logit per row of the softmax, without a value: (H,), or per query {B|1} × {H|1} × {M|1}, in any
            of these dtypes. Its gradient has its shape and dtype.
        causal: query i sees the keys up to i + N - M, so the last query sees the last key (aligned bottom-right).
        window: ``(left, right)``: query i sees the keys i + N - M - left to i + N - M + right; None means no limit.
        scale: multiplies ``q @ k.mT``; positive. Default: ``1 / sqrt(D)``.
        softcap: if given, scores become ``softcap * tanh(score / softcap)`` before the bias is added.
        dropout_p: probability of dropping an entry of the softmax, 0 to 1. Pass 0 in evaluation.
        dropout_seed: ``(seed, offset)``, ints of 64 bits, or an int64 tensor (2,) on q's device; one seed drops the
            same entries on every backend. Default: drawn from torch's generator, without host synchronization.
        return_lse: if True, also return the log-sum-exp of each row, the logarithm of its softmax denominator.
        return_aux: `tilewise.AuxRequest` of more results for each query: maximum of its scores, entropy of its softmax.
        deterministic: if True, equal inputs give bitwise equal gradients. Default:
            ``torch.are_deterministic_algorithms_enabled()``.
        backend: "hopper", "triton", "cpu" or "reference"; raises an error if it cannot run the call. Default, and
            "auto": the first that supports the call and is not slow for it. `tilewise.explain` tells which.

    Returns:
        o (B, H, M, Dv) in q's dtype; with ``return_lse`` also lse (B, H, M), natural logarithm, sink included, float32
        (float64 for float64 inputs). Both are differentiable, in forward mode and (not fused yet) twice too. With
        ``return_aux`` o and a `tilewise.AuxOutput`.

    Raises:
        ValueError, TypeError: an argument is not allowed; the message names it, the value received and what is allowed.
        NotImplementedError: dropout with DTensors or in an ONNX graph; jagged tensors with holes; DTensors with more
            than 4 dimensions; dropout_seed for leading dimensions that need several calls; a third derivative, or a
            jvp of a jvp.

    Examples:
        >>> q, k, v = (torch.randn(2, 8, 100, 64, requires_grad=True) for _ in range(3))
        >>> bias = torch.randn(8, 100, 100, requires_grad=True)
        >>> o, lse = tilewise.attention(q, k, v, bias=bias, causal=True, return_lse=True)
        >>> o.sum().backward()
        >>> o.shape, lse.shape, bias.grad.shape
        (torch.Size([2, 8, 100, 64]), torch.Size([2, 8, 100]), torch.Size([8, 100, 100]))

    q, k and v may have more leading dimensions, or be jagged nested tensors. A query that sees no key gives o = 0.
    docs/rules.md has the rules in full: fully masked rows, NaN, precision, autocast, leading dimensions, dropout.

    Source: FlashAttention-2 (arXiv 2307.08691), Algorithms 1 and 2; sinks: StreamingLLM (arXiv 2309.17453) and gpt-oss
    (arXiv 2508.10925), called ``s_aux`` there; dropout: Philox (Salmon et al., SC 2011), see tilewise.spec.dropout.
    docs/maths.md derives every formula.
    """
    if unknown:
        raise unexpected("attention", unknown)
    if others:
        raise too_many("attention", 3, len(others))
    if return_lse is not True and return_lse is not False:
        check_flag("return_lse", return_lse)
    statistics, request = NO_STATISTICS, None
    if return_aux is not None:
        request = read_request(return_aux, return_lse)
        return_lse, statistics = request.lse, request.statistics
    arguments = found = None
    if dropout_seed is None and not torch.compiler.is_compiling():
        arguments = settings_key(causal, window, scale, softcap, dropout_p, deterministic, backend, statistics)
    if arguments is not None:
        if autocast_somewhere():
            q, k, v = cast(q, k, v)
        try:
            # A bias term is not a tensor of `Inputs` yet.
            found = cached_call(Inputs(q, k, v, bias, mask, sink), arguments, return_lse)  # type: ignore[arg-type]
        except RuntimeError:
            check_inputs(q, k, v, bias, mask, sink)  # a nested tensor has no shape to look up
            raise
    if found is None:
        options: dict[str, Any] = {
            "bias": bias, "mask": mask, "sink": sink, "causal": causal, "window": window, "scale": scale,
            "softcap": softcap, "dropout_p": dropout_p, "dropout_seed": dropout_seed, "deterministic": deterministic,
            "backend": backend,
        }  # fmt: skip
        if is_symbolic(q, k, v, bias, mask, sink):
            return symbolic(attention, q, k, v, **options, return_lse=return_lse, return_aux=return_aux)
        found = _first_call(q, k, v, return_lse=return_lse, arguments=arguments, statistics=statistics, **options)
    o, lse, more = found
    if request is not None:
        return o, aux_output(request, lse, more)
    return (o, lse) if return_lse else o  # type: ignore[return-value]


def _first_call(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool, arguments: tuple | None = None, **options: Any
) -> Found:  # fmt: skip
    """Return `attention_op` of a call that is read, checked, and cached if it can be. arguments: its `settings_key`, or
    None; options: the other arguments of `attention`, and statistics."""
    if type(q) not in PLAIN and are_jagged(q, k, v):
        return jagged_attention(q, k, v, return_lse=return_lse, **options)
    if type(q) not in PLAIN and is_dtensor(q) and options["dropout_p"] == 0 and options["dropout_seed"] is None:
        split = _of_sequences(q, k, v, options)
        if split is not None:
            return split
    if isinstance(q, Tensor) and q.dim() > 4:
        return attention_of_leading(_first_call, q, k, v, return_lse=return_lse, arguments=arguments, **options)
    call = read_call(q, k, v, **options)
    bias, mask, sink = options["bias"], options["mask"], options["sink"]
    if isinstance(mask, TileMask) and mask.kept is not None:
        gathered = attention_of_selected(call, mask.kept, return_lse)
        if gathered is not None:
            return gathered
    if arguments is not None:
        causal, window = options["causal"], options["window"]
        limits = None if causal is False and window is None else (causal, window)
        found = cache_call(Inputs(q, k, v, bias, mask, sink), arguments, return_lse, call, limits=limits)
        if found is not None:
            return found
    return attention_op(with_seed(call.inputs, call.score), *call[1:], return_lse=return_lse)


def _of_sequences(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Found | None:
    """Return o and lse of DTensors split along the sequence; None for others. Import torch.distributed only here:
    with DTensors it is loaded already."""
    from tilewise.distributed.dtensor import attention_of_sequences
    from tilewise.distributed.operands import Arguments, CallOptions

    numbers = CallOptions(**{name: options[name] for name in CallOptions._fields})
    given = Arguments((q, k, v), options["bias"], options["mask"], options["sink"], None, numbers, {})
    found = attention_of_sequences(given)
    if found is not None and any(options["statistics"]):
        raise NotImplementedError("return_aux: of DTensors split along the sequence there is the lse alone")
    return None if found is None else (*found, None)
