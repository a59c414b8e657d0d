"""The public calls on shards: they check arguments, agree with the other ranks, and run a method."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from tilewise.distributed.agreement import Description, agree, agreed
from tilewise.distributed.autograd import summed, to_rows
from tilewise.distributed.compiled import compiled_call
from tilewise.distributed.layout import LoadBalancer, Ranks
from tilewise.distributed.methods import METHODS, attend, of_heads
from tilewise.distributed.operands import FUNCTION, CallOptions, ShardedCall, read
from tilewise.distributed.plan import ContextParallelPlan, make_plan
from tilewise.frontend.arguments import Bias, Seed, Window
from tilewise.frontend.keywords import named_only, unexpected
from tilewise.operator.dispatch import describe
from tilewise.planner import check_backend
from tilewise.spec.checks import check_flag
from tilewise.spec.score import ScoreNumbers

MethodName = Literal["auto", "all_gather", "ring", "all_to_all"]


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
    given = {"bias": bias, "mask": mask, "sink": sink, "dropout_seed": dropout_seed}
    options = CallOptions(causal, window, scale, softcap, deterministic, backend, dropout_p)
    how: Any = {"method": method, "validate": validate, "return_lse": return_lse}
    if isinstance(mesh, DeviceMesh) and mesh.ndim == 2:
        found = attend_on_two_axes(mesh, load_balancer, (q, k, v), given, options, unknown, **how)
    else:
        ranks = Ranks.of(mesh, load_balancer)
        found = attend_shards(ranks, load_balancer, (q, k, v), given, options, unknown, **how)
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
    _refuse(unknown)
    options = CallOptions(causal, window, scale, softcap, deterministic, backend, dropout_p)
    ranks = Ranks.of(mesh, load_balancer)
    call, tensors = read((q, k, v), bias, mask, sink, ranks, options, dropout_seed)
    check_method(method)
    _check_locally(call, tensors)
    return make_plan(call, tensors, method)


def attend_shards(
    ranks: Ranks, load_balancer: LoadBalancer, qkv: tuple[Tensor, Tensor, Tensor], given: dict[str, Any],
    options: CallOptions, unknown: dict[str, Any], *, method: str, validate: bool, return_lse: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return ``(o, lse)`` of this rank's rows; under torch.compile by the operator."""
    how: Any = {"method": method, "validate": validate, "return_lse": return_lse}
    if torch.compiler.is_compiling():
        _refuse(unknown)
        return compiled_call(ranks, load_balancer, qkv, given, options, **how)
    return attend(*prepare(ranks, qkv, given, options, unknown, **how), return_lse)


def prepare(
    ranks: Ranks, qkv: tuple[Tensor, Tensor, Tensor], given: dict[str, Any], options: CallOptions,
    unknown: dict[str, Any], *, method: str, validate: bool, return_lse: bool,
) -> tuple[str, ShardedCall, list[Tensor]]:  # fmt: skip
    """Return the method that all ranks use, the call and its tensors; an error of one rank is raised on all."""
    failure: Exception | None = None
    description: Description | None = None
    chosen: str | None = None
    try:
        _refuse(unknown)
        check_flag("validate", validate)
        check_flag("return_lse", return_lse)
        check_method(method)
        call, tensors = read(qkv, given["bias"], given["mask"], given["sink"], ranks, options, given["dropout_seed"])
        description = described(call, tensors, method, return_lse)
        chosen = agreed(ranks, description)
        known = chosen is not None
        if not known or validate:
            _check_locally(call, tensors)
            chosen = _of_two_axes(method, call) if ranks.axes else make_plan(call, tensors, method).method
    except (ValueError, TypeError, NotImplementedError) as error:
        failure, known = error, False
    if not known or validate:
        agree(ranks, description, chosen, failure)
    assert chosen is not None
    return chosen, call, tensors


def _refuse(unknown: dict[str, Any]) -> None:
    for name in unknown:
        if name.startswith(("cu_seqlens", "seqused", "max_seqlen")):
            raise NotImplementedError(f"{name}: {FUNCTION} takes no packed batches: context_parallel_varlen_attention")
        else:
            raise unexpected(FUNCTION, unknown)


def check_method(method: str) -> None:
    if method != "auto" and method not in METHODS:
        raise ValueError(f"method: must be 'auto' or one of {', '.join(map(repr, METHODS))}, got {method!r}")


def _check_locally(call: ShardedCall, tensors: list[Tensor]) -> None:
    """Raise any error of a local call before anything is sent."""
    check_backend(call.options.backend)
    ranks = call.ranks
    at = ranks.chunks(call.queries)[0], ranks.chunks(call.keys)[0]
    local = call.local(call.cut(tensors, *at), *at)
    describe(local.inputs, ScoreNumbers.of(local.score, local.deterministic, local.backend))
    device = tensors[0].device.type
    if device != ranks.device:
        raise ValueError(f"q: must be on the mesh's device {ranks.device}, got {device}")


def described(call: ShardedCall, tensors: list[Tensor], method: str, return_lse: bool) -> Description:
    """Return (name, value) pairs that must be equal on all ranks."""
    layouts = tuple(
        (slot.name if count == 0 else f"{slot.name} ({count + 1})", (tuple(x.shape), x.dtype, x.requires_grad))
        for (slot, count), x in zip(_numbered(call), tensors, strict=True)
    )
    terms = (("bias terms", tuple(repr(piece.term) for piece in call.pieces)),)
    options = tuple(call.options._asdict().items())
    rest = (
        ("mesh", tuple(x.size for x in call.ranks.axes)), ("method", method),
        ("load_balancer", call.ranks.split.pieces), ("return_lse", return_lse),
        ("dropout_seed", (call.seed is None, call.drawn)), ("torch.is_grad_enabled()", torch.is_grad_enabled()),
    )  # fmt: skip
    return *layouts, *terms, *options, *rest


def _numbered(call: ShardedCall) -> list[tuple[Any, int]]:
    """Return each slot with the number of earlier slots of the same name."""
    names = [slot.name for slot in call.slots]
    return [(slot, names[:n].count(slot.name)) for n, slot in enumerate(call.slots)]


@torch.compiler.disable  # a graph break: collectives in an autograd.Function cannot be traced
def attend_on_two_axes(
    mesh: DeviceMesh, load_balancer: LoadBalancer, qkv: tuple[Tensor, Tensor, Tensor], given: dict[str, Any],
    options: CallOptions, unknown: dict[str, Any], **how: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return ``(o, lse)`` of this rank's rows on a mesh of two axes, see `two_axes`."""
    ranks = Ranks.of(mesh, load_balancer, 2)
    method, call, tensors = prepare(ranks, qkv, given, options, unknown, **how)
    across, inside = ranks.axes
    traded = []
    for x, slot in zip(tensors, call.slots, strict=True):
        x = summed(x, inside) if slot.replicated and x.requires_grad else x
        traded.append(of_heads(replace(call, ranks=inside), x, slot))
    sizes = call.sizes._replace(H=call.sizes.H // inside.size, Hkv=call.sizes.Hkv // inside.size)
    o, lse = attend(method, replace(call, ranks=across, sizes=sizes), traded, True)
    return to_rows(o, inside, 1, 2), to_rows(lse, inside, 1, 2)


def _of_two_axes(method: str, call: ShardedCall) -> str:
    """Return the method along the first axis; raise if the call is not supported."""
    inside = call.ranks.axes[1]
    for name, heads in (("query heads", call.sizes.H), ("key/value heads", call.sizes.Hkv)):
        if heads % inside.size:
            raise ValueError(f"mesh: the {heads} {name} do not divide by the {inside.size} of its second axis")
    if method not in ("auto", "ring", "all_gather"):
        raise ValueError(f"method: must be 'auto', 'ring' or 'all_gather' with a mesh of two axes, got {method!r}")
    if call.options.dropout_p:
        raise NotImplementedError("dropout_p: dropout is not taken with a mesh of two axes")
    return "ring" if method == "auto" else method
