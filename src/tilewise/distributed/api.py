"""The public calls on shards, of a sequence or of a packed batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tilewise.distributed.agreement import Description
from tilewise.distributed.autograd import run
from tilewise.distributed.documents import packed_ranks, read_offsets
from tilewise.distributed.layout import LoadBalancer, Ranks
from tilewise.distributed.methods import explain, prepare
from tilewise.distributed.operands import PACKED_FUNCTION, Arguments, CallOptions
from tilewise.distributed.operator import compiled_call
from tilewise.distributed.plan import ContextParallelPlan
from tilewise.frontend.arguments import Bias, Seed, Window
from tilewise.frontend.keywords import named_only

MethodName = Literal["auto", "all_gather", "ring", "all_to_all"]
PackedMethod = Literal["auto", "all_gather", "all_to_all"]


@named_only
def context_parallel_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mesh: DeviceMesh,
    bias: Bias = None,
    mask: Tensor | None = None,
    sink: Tensor | None = None,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Seed = None,
    load_balancer: LoadBalancer = None,
    method: MethodName = "auto",
    deterministic: bool | None = None,
    backend: str | None = None,
    validate: bool = False,
    return_lse: bool = False,
    **unknown: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute `tilewise.attention` of a sequence split over a mesh: this rank's queries over all keys.

    A collective: every rank of the mesh makes the call, and the backward, in the same order. Gradients are those of the
    sum of all ranks' losses.

    Args:
        q, k, v: this rank's shards, (B, H, M / ranks, D), (B, Hkv, N / ranks, D) and (B, Hkv, N / ranks, Dv), with
            equal shapes on all ranks: the r-th contiguous part, or with a load balancer what `shard` returns.
        mesh: a DeviceMesh with one axis, such as ``mesh["cp"]``, which splits the sequence. Or with two axes, (A, B):
            the sequence is split over A B ranks, counted along the second axis first; B ranks trade rows for heads, and
            A ranks use the ring or all_gather.
        bias: like ``bias`` of `tilewise.attention`, except CausalBias. A matrix has this rank's rows and all keys in
            sequence order, (B|1, H|Hkv|1, M / ranks, N), and its gradient stays on this rank. A bias along the queries,
            or along the keys (B|1, H|Hkv|1, 1, N / ranks), is split like q or k; so are values per query or key of a
            RelativeBias, and u and w of a LowRankBias. Tensors without these axes are equal on all ranks, and their
            gradients are the sum over ranks. Bias terms count positions in the whole sequence.
        mask: bool, in the shapes of a bias.
        sink: (H,), equal on all ranks, or one for each of this rank's queries, (B|1, H|1, M / ranks).
        dropout_p, dropout_seed: as in `tilewise.attention`. The same scores are dropped for any number of ranks. A seed
            is equal on all ranks; None: the first rank's generator draws it.
        causal, window, scale, softcap, deterministic, backend: as in `tilewise.attention`, for the whole sequence.
        load_balancer: how the sequence was split. None: contiguous parts. "head_tail": a chunk of the head and one of
            the tail on each rank, which gives all ranks equal work under a causal mask.
        method: "all_gather" gathers keys and values; "ring" passes them from rank to rank while it computes;
            "all_to_all" trades rows for heads, if the number of ranks divides the heads. "auto": see
            `explain_context_parallel`. With two mesh axes it applies to the first: "ring" ("auto") or "all_gather".
        validate: compare the ranks' arguments before every call, not only before the first of each kind. Differences
            and errors of one rank are raised on all; without a comparison, ranks that differ wait until the group's
            timeout.
        return_lse: also return the logarithm of each row's softmax denominator.

    DTensors (use `tilewise.attention`), jagged tensors and packed batches (use `context_parallel_varlen_attention`) are
    not supported.

    Returns:
        o (B, H, M / ranks, Dv), split like q; with ``return_lse`` also lse (B, H, M / ranks).

    Raises:
        ValueError, TypeError: an invalid argument; the message names it, its value and what is allowed.
        NotImplementedError: an argument that is not supported, by name.

    Source: Ring Attention (arXiv 2310.01889), DeepSpeed-Ulysses (arXiv 2309.14509); all_gather with head and tail:
    Llama 3 (arXiv 2407.21783), section 3.3.2.
    """
    options = CallOptions(causal, window, scale, softcap, deterministic, backend, dropout_p)
    given = Arguments((q, k, v), bias, mask, sink, dropout_seed, options, unknown, method, validate, return_lse)
    if isinstance(mesh, DeviceMesh) and mesh.ndim == 2:
        found = _attend_on_two_axes(mesh, load_balancer, given)
    else:
        found = attend_shards(Ranks.of(mesh, load_balancer), load_balancer, given)
    return found if return_lse else found[0]


@named_only
def explain_context_parallel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mesh: DeviceMesh,
    bias: Bias = None,
    mask: Tensor | None = None,
    sink: Tensor | None = None,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Seed = None,
    load_balancer: LoadBalancer = None,
    method: MethodName = "auto",
    deterministic: bool | None = None,
    backend: str | None = None,
    **unknown: Any,
) -> ContextParallelPlan:
    """Return the plan of `context_parallel_attention`, with the costs of each method; nothing is sent.

    "auto" chooses the method with the fewest bytes that no computation hides. The ring's transfers count as hidden if
    its products take longer at the rates of `plan.HIDDEN_FROM`; methods are not timed.

    Raises:
        ValueError, TypeError, NotImplementedError: like the call on this rank.
    """
    options = CallOptions(causal, window, scale, softcap, deterministic, backend, dropout_p)
    given = Arguments((q, k, v), bias, mask, sink, dropout_seed, options, unknown, method)
    given.refuse()
    return explain(Ranks.of(mesh, load_balancer), given)


@named_only
def context_parallel_varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | Sequence[int],
    *,
    mesh: DeviceMesh,
    bias: Bias = None,
    sink: Tensor | None = None,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Seed = None,
    load_balancer: Literal["document"] | None = None,
    method: PackedMethod = "auto",
    deterministic: bool | None = None,
    backend: str | None = None,
    validate: bool = False,
    return_lse: bool = False,
    **unknown: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Compute `tilewise.varlen_attention` of a packed batch whose tokens are split over the ranks of a mesh.

    A collective like `context_parallel_attention`, which documents the other arguments.

    Args:
        q, k, v: this rank's tokens, (T / ranks, H, D), (T / ranks, Hkv, D) and (T / ranks, Hkv, Dv), of T on all ranks.
        cu_seqlens: (B + 1,), ints, of the whole batch and equal on all ranks: where sequences begin, and T. A tensor on
            the CPU, or a sequence of ints; a tensor on a GPU synchronizes the host once.
        bias: tensors along the keys, (1|H, T / ranks), or the queries, (1|H, T / ranks, 1), split like the tokens;
            terms of `tilewise.bias`, with values (T / ranks, H, R), u and w (1, H, T / ranks, r).
        sink: (H,), equal on all ranks, or one for each of this rank's queries, (1|H, T / ranks).
        load_balancer: how `shard` with ``cu_seqlens`` split the tokens. None: contiguous parts. "document": each
            sequence on one rank, but the longest with a head and a tail on every rank, so that all ranks have equally
            many tokens and about equally many visible pairs.
        method: "all_gather" gathers keys and values; it supports windows and terms that count positions in causal calls
            alone, and no dropout. "all_to_all" trades tokens for heads and supports all of these. "auto": see
            `explain_context_parallel`.

    A mask, a padded bias, `RaggedBias` and the ring are not supported.

    Returns:
        o (T / ranks, H, Dv), split like q; with ``return_lse`` also lse (H, T / ranks).

    Raises:
        ValueError, TypeError: an invalid argument; the message names it, its value and what is allowed.
        NotImplementedError: an argument that is not supported, by name.
    """
    options = CallOptions(causal, window, scale, softcap, deterministic, backend, dropout_p)
    given = Arguments(
        (q, k, v), bias, None, sink, dropout_seed, options, unknown, method, validate, return_lse, PACKED_FUNCTION
    )
    o, lse = _run(mesh, load_balancer, cu_seqlens, given)
    o = o.squeeze(0).transpose(0, 1)
    return (o, lse.squeeze(0)) if return_lse else o


@torch.compiler.disable  # a graph break: collectives in an autograd.Function cannot be traced
def _run(
    mesh: DeviceMesh, load_balancer: LoadBalancer, cu_seqlens: Any, given: Arguments
) -> tuple[Tensor, Tensor]:  # fmt: skip
    def split(ranks: Ranks) -> tuple[Ranks, Description]:
        offsets = read_offsets("cu_seqlens", cu_seqlens)
        return packed_ranks(mesh, load_balancer, offsets, ranks), (("cu_seqlens", offsets),)

    return run(*prepare(Ranks.of(mesh, None), given, split), given.return_lse)


@named_only
def explain_context_parallel_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | Sequence[int],
    *,
    mesh: DeviceMesh,
    bias: Bias = None,
    sink: Tensor | None = None,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Seed = None,
    load_balancer: Literal["document"] | None = None,
    method: PackedMethod = "auto",
    deterministic: bool | None = None,
    backend: str | None = None,
    **unknown: Any,
) -> ContextParallelPlan:
    """Return the plan of `context_parallel_varlen_attention`; see `explain_context_parallel`. Windows do not count.

    Raises:
        ValueError, TypeError, NotImplementedError: like the call on this rank.
    """
    options = CallOptions(causal, window, scale, softcap, deterministic, backend, dropout_p)
    function = "explain_context_parallel_varlen"
    given = Arguments((q, k, v), bias, None, sink, dropout_seed, options, unknown, method, function=function)
    given.refuse()
    return explain(packed_ranks(mesh, load_balancer, read_offsets("cu_seqlens", cu_seqlens)), given)


def attend_shards(ranks: Ranks, load_balancer: LoadBalancer, given: Arguments) -> tuple[Tensor, Tensor]:
    """Return ``(o, lse)`` of this rank's rows; under torch.compile by the operator."""
    if torch.compiler.is_compiling():
        given.refuse()
        return compiled_call(ranks, load_balancer, given)
    return run(*prepare(ranks, given), given.return_lse)


@torch.compiler.disable  # a graph break: collectives in an autograd.Function cannot be traced
def _attend_on_two_axes(mesh: DeviceMesh, load_balancer: LoadBalancer, given: Arguments) -> tuple[Tensor, Tensor]:
    return run(*prepare(Ranks.of(mesh, load_balancer, 2), given), given.return_lse)
