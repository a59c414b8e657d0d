"""The public call. It names and checks its arguments; everything else happens further down."""

from __future__ import annotations

from typing import Any, Literal, overload

import torch
from torch import Tensor

from tilewise.backends import Inputs
from tilewise.frontend.arguments import Bias, Mask, Seed, Window, cast, check_inputs, read_call, with_seed
from tilewise.frontend.autocast import autocast_somewhere
from tilewise.frontend.call_cache import cache_call, cached_call
from tilewise.frontend.jagged import are_jagged, jagged_attention
from tilewise.frontend.keywords import named_only, too_many, unexpected
from tilewise.frontend.leading import attention_of_leading
from tilewise.masks.block_sparse import TileMask
from tilewise.operator.autograd import attention_op
from tilewise.operator.tools import is_symbolic, symbolic
from tilewise.spec.checks import check_flag
from tilewise.spec.tensors import PLAIN, is_dtensor
from tilewise.topk.gather import attention_of_selected


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, bias: Bias = ..., mask: Mask = ..., sink: Tensor | None = ...,
    causal: bool = ..., window: Window | None = ..., scale: float | None = ..., softcap: float | None = ...,
    dropout_p: float = ..., dropout_seed: Seed = ..., return_lse: Literal[False] = ...,
    deterministic: bool | None = ..., backend: str | None = ...,
) -> Tensor: ...  # fmt: skip


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, bias: Bias = ..., mask: Mask = ..., sink: Tensor | None = ...,
    causal: bool = ..., window: Window | None = ..., scale: float | None = ..., softcap: float | None = ...,
    dropout_p: float = ..., dropout_seed: Seed = ..., return_lse: Literal[True], deterministic: bool | None = ...,
    backend: str | None = ...,
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, bias: Bias = ..., mask: Mask = ..., sink: Tensor | None = ...,
    causal: bool = ..., window: Window | None = ..., scale: float | None = ..., softcap: float | None = ...,
    dropout_p: float = ..., dropout_seed: Seed = ..., return_lse: bool, deterministic: bool | None = ...,
    backend: str | None = ...,
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip


@named_only
def attention(
    q: Tensor = None,  # type: ignore[assignment]  # required, by the checks of it: so that query= gets its hint
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
            A `torch.nn.attention.bias.CausalBias` is read as the band that it stands for. Or a term of `tilewise.bias`
            (by distance, T5's, ALiBi's, of low rank), or a tuple of tensors and terms, which are added up; each tensor
            of a term gets its gradient. Tables in half precision are indexed, and their gradients summed, in float32.
        mask: bool, the same broadcasting; True = attend. Padding (B, N) is passed as ``mask[:, None, None, :]``. Or a
            `tilewise.TileMask`, or FlexAttention's BlockMask, whose TileMask is made once and kept: hidden tiles are
            not computed, in both passes.
        sink: one more logit in each row's softmax, with no value: it takes its share of the row and adds nothing to o.
            A logit for each head, (H,), or for each query, broadcastable {B|1} × {H|1} × {M|1}; float16, bfloat16,
            float32 or float64 (CPU), whatever q's dtype is; natural units, which neither scale nor softcap touches.
            -inf is no sink. Its gradient has its shape and dtype and is summed in float32.
        causal: query i sees the keys up to i + N - M, so that the last query sees the last key (bottom-right).
        window: ``(left, right)``: query i sees the keys from i + N - M - left to i + N - M + right; None: no limit.
        scale: multiplies ``q @ k.mT``; positive. Default ``1 / sqrt(D)``.
        softcap: if given, scores become ``softcap * tanh(score / softcap)`` before the bias is added.
        dropout_p: the share of the probabilities that are dropped, 0 to 1, to the nearest multiple of 1/32768; the
            others are divided by the share that is kept. The lse knows nothing of it. Pass 0 where nothing is trained.
        dropout_seed: ``(seed, offset)``, ints of 64 bits, or an int64 tensor (2,) on q's device. What is dropped is a
            function of these two numbers and of a score's place: its sequence, query head, query and key, each counted
            from 0. Equal seeds drop the same on every backend and device, in a forward and in its backward. Default:
            two numbers from torch's generator on q's device, for which nobody waits, so that ``torch.manual_seed``
            repeats them and a checkpointed call recomputes with them; under `torch.vmap` as its ``randomness`` says.
        return_lse: also return the logarithm of each row's softmax denominator.
        deterministic: True: equal inputs give bitwise equal gradients. Default: what
            ``torch.use_deterministic_algorithms`` says.
        backend: "hopper", "triton", "cpu" or "reference"; one that cannot run the call is an error. Default, and
            "auto": chosen by the plan, see `tilewise.explain`.

    float32 on a GPU follows torch's setting for matrix products. Where that is TF32
    (``torch.backends.cuda.matmul.allow_tf32``), operands are rounded to ten bits of their mantissa and errors are about
    1e-3; by default they are float32's own, about 1e-6. `tilewise.scaled_dot_product_attention` always has the latter.

    Under `torch.autocast` q, k and v are cast to its dtype, but for float64, as for PyTorch's own attention; bias keeps
    its dtype. Their gradients come back in the dtypes that they had.

    q, k and v may have more leading dimensions than the batch, (..., H, M, D), the same ones each; o and lse have them
    too. bias and mask then broadcast along any of them, and a sink of queries is (..., H, M). Nothing is copied or
    expanded for it: where each tensor is full along all leading dimensions or along none, and lies so in memory that a
    view makes them one, that is the batch of one call, with sequences counted in row-major order. Else the call is
    computed in parts, one for each index of as few of them as need be, and o and lse are stacked: of q (B, N, H, M, D)
    with a bias (B, 1, H, M, N) B calls, and one where B is 1. Each part draws a dropout seed of its own; one that is
    given is an error there. Bias terms and masks by tiles are shared along all leading dimensions.

    A subclass of Tensor with a ``__torch_function__`` of its own is refused: its memory need not be what it stands for.
    But q, k and v may all be jagged nested tensors (``layout=torch.jagged``), q (B, H, j, D), k (B, Hkv, l, D) and
    v (B, Hkv, l, Dv), as (B, j, H, D) gives them by ``transpose(1, 2)``. Nothing is padded or copied, o has q's j, and
    lse is jagged (B, H, j). Everything else is then as for `tilewise.varlen_attention`. On a GPU the host waits, once
    for each tensor, where it does not know its ``max_seqlen``, and where k and v were not made of one offsets.

    Returns:
        o (B, H, M, Dv) in q's dtype; with ``return_lse`` also lse (B, H, M), float32 (float64 for float64 inputs),
        natural logarithm, differentiable, the sink included. A query that sees no key gives o = 0, lse = -inf and zero
        gradients; with a sink o = 0 and lse = sink, whose gradient is lse's. NaN or infinity in a key or value that a
        query does not see stays out of its output. NaN or infinity in a query, or in the gradient of its output, does
        reach the gradients of all keys of its head; on a GPU, or beside a sink, even if it sees none. An infinite key
        is not hidden by its infinity: mask it, see docs/maths.md.

    Raises:
        ValueError, TypeError: naming the argument, what came and what is allowed.
        NotImplementedError: dropout of DTensors, or in a graph for ONNX; jagged tensors with holes; more than 4
            dimensions of DTensors, or with a dropout_seed where the call is computed in parts.

    Source: FlashAttention-2 (arXiv 2307.08691), Algorithms 1 and 2; the sink: StreamingLLM (arXiv 2309.17453) and
    gpt-oss (arXiv 2508.10925), ``s_aux`` there; dropout: Philox (Salmon et al., SC 2011), see tilewise.spec.dropout;
    docs/maths.md derives every formula.
    """
    if unknown:
        raise unexpected("attention", unknown)
    if others:
        raise too_many("attention", 3, len(others))
    if return_lse is not True and return_lse is not False:
        check_flag("return_lse", return_lse)
    arguments = None
    if (
        window is None and scale is None and softcap is None and type(dropout_p) is float
        and 0.0 <= dropout_p <= 1.0 and dropout_seed is None and (causal is False or causal is True)
        and (deterministic is None or type(deterministic) is bool) and (backend is None or type(backend) is str)
        and not torch.compiler.is_compiling()
    ):  # fmt: skip
        ordered = torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic
        arguments = (causal, ordered, backend, dropout_p)
        if autocast_somewhere():
            q, k, v = cast(q, k, v)
        try:
            # One with a bias term is no call's inputs yet.
            found = cached_call(Inputs(q, k, v, bias, mask, sink), arguments, return_lse)  # type: ignore[arg-type]
        except RuntimeError:
            check_inputs(q, k, v, bias, mask, sink)  # a nested tensor has no shape to look a call up by
            raise
        if found is not None:
            return found if return_lse else found[0]  # type: ignore[return-value]
    options: dict[str, Any] = {
        "bias": bias, "mask": mask, "sink": sink, "causal": causal, "window": window, "scale": scale,
        "softcap": softcap, "dropout_p": dropout_p, "dropout_seed": dropout_seed, "deterministic": deterministic,
        "backend": backend,
    }  # fmt: skip
    if type(q) not in PLAIN and are_jagged(q, k, v):
        return jagged_attention(q, k, v, **options, return_lse=return_lse)
    if type(q) not in PLAIN and is_dtensor(q) and dropout_p == 0 and dropout_seed is None:
        split = _of_sequences(q, k, v, options)
        if split is not None:
            return split if return_lse else split[0]
    try:
        if isinstance(q, Tensor) and q.dim() > 4:
            return attention_of_leading(attention, q, k, v, **options, return_lse=return_lse, arguments=arguments)
        call = read_call(q, k, v, **options)
    except TypeError:
        if is_symbolic(q, k, v, bias, mask, sink):
            return symbolic(attention, q, k, v, **options, return_lse=return_lse)
        raise
    if isinstance(mask, TileMask) and mask.kept is not None:
        gathered = attention_of_selected(call, mask.kept, return_lse)
        if gathered is not None:
            return gathered if return_lse else gathered[0]  # type: ignore[return-value]
    o, lse = attention_op(with_seed(call.inputs, call.score), *call[1:], return_lse=return_lse)
    if arguments is not None:
        given = Inputs(q, k, v, bias, mask, sink)  # type: ignore[arg-type]
        cache_call(given, arguments, *call[1:], parts=call.inputs.parts)
    return (o, lse) if return_lse else o  # type: ignore[return-value]


def _of_sequences(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor] | None:
    """Of DTensors whose sequence is split; None for others. Only who has DTensors has torch.distributed."""
    from tilewise.distributed.dtensor import attention_of_sequences
    from tilewise.distributed.operands import CallOptions

    given = {name: options[name] for name in ("bias", "mask", "sink")}
    return attention_of_sequences(
        q, k, v, given, CallOptions(**{name: options[name] for name in CallOptions._fields}), {}
    )
