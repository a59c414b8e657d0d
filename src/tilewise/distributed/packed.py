"""Context parallelism of packed batches: the public functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tilewise.distributed.agreement import Description
from tilewise.distributed.documents import packed_ranks, read_offsets
from tilewise.distributed.layout import LoadBalancer, Ranks
from tilewise.distributed.methods import attend
from tilewise.distributed.operands import PACKED_FUNCTION, Arguments, CallOptions
from tilewise.distributed.plan import ContextParallelPlan
from tilewise.distributed.prepare import explain, prepare
from tilewise.frontend.arguments import Bias, Seed, Window
from tilewise.frontend.keywords import named_only

PackedMethod = Literal["auto", "all_gather", "all_to_all"]


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

    return attend(*prepare(Ranks.of(mesh, None), given, split), given.return_lse)


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
