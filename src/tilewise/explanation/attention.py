"""explain() and explain_varlen(): describe a call of attention without running it."""

from __future__ import annotations

import inspect
from dataclasses import replace
from functools import partial
from typing import Any, Unpack, get_type_hints

import torch
from torch import Tensor

from tilewise.backends import Needs
from tilewise.explanation.shared import DEVICES, on_device
from tilewise.explanation.text import Explanation
from tilewise.explanation.work import (
    BACKWARD_PASSES,
    FORWARD_PASSES,
    Work,
    _data_sheet,
    _given_limits,
    _mask_share,
    _stored,
    _tile_share,
    backward_work,
    forward_work,
)
from tilewise.frontend.arguments import Bias, Call, Mask, Seed, read_call
from tilewise.frontend.jagged import are_jagged, packed_of
from tilewise.frontend.keywords import named_only, unexpected
from tilewise.frontend.leading import read_flattened, split_leading
from tilewise.frontend.varlen import read_packed
from tilewise.masks.block_sparse import TileMask
from tilewise.planner import make_plan
from tilewise.spec.bias_components import NO_PARTS
from tilewise.spec.checks import check_flag
from tilewise.spec.gpus import CAPABILITIES, gpu_key
from tilewise.spec.problem import Problem, irregular
from tilewise.spec.score import Numbers, Window
from tilewise.spec.seqlens import Lengths, places
from tilewise.spec.statistics import NO_STATISTICS, AuxRequest, Statistics, read_request
from tilewise.spec.tensors import PLAIN, check_tensor, plain_int, plain_ints
from tilewise.topk.gather import Gather, gather_of


@partial(named_only, more=get_type_hints(Numbers), after="window")
def explain(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    bias: Bias = None,
    mask: Mask = None,
    sink: Tensor | None = None,
    causal: bool = False,
    window: Window | None = None,
    dropout_p: float = 0.0,
    dropout_seed: Seed = None,
    return_lse: bool = False,
    return_aux: AuxRequest | None = None,
    deterministic: bool | None = None,
    backend: str | None = None,
    device: str | None = None,
    limits: tuple[float, float] | None = None,
    **numbers: Unpack[Numbers],
) -> Explanation:
    """Return the backend, tiles, FLOPs and bytes of a call of `tilewise.attention`, and its bottleneck.

    Nothing is computed. Only shapes, dtypes, device and requires_grad of the tensors are read, and the elements of the
    mask. Under `torch.autocast` q, k and v are cast, as for the call.

    Args:
        q, k, v, bias, mask, sink, causal, window, scale, softcap, dropout_p, dropout_seed, deterministic, backend: as
            for `tilewise.attention`. Tensors may be on the meta device, together with ``device=``; a TileMask may then
            be on the CPU. A low-rank bias is shown as wider q and k. Lengths of jagged tensors are read, as by
            `explain_varlen`, so these tensors need elements. With more leading dimensions than a batch it is one of the
            calls of four dimensions that is shown, and how many there are.
        return_aux: as for `tilewise.attention`: not every backend computes every statistic.
        return_lse: has no effect: the LSE is always computed and written.
        device: plan for another device than the tensors': "cpu", a GPU such as "H100" or "RTX 4090", or a compute
            capability such as "sm_90".
        limits: ``(FLOP/s, bytes/s)`` of the device. Default: the data sheet of an A100, H100 or H200 (SXM), for 16-bit
            tensors; for others, and for CPUs, no bound is computed.

    Returns:
        Explanation; print it.

    Raises:
        ValueError, TypeError: as for `tilewise.attention`, and for an invalid device or limits.

    Examples:
        >>> q = torch.empty(2, 16, 4096, 128, dtype=torch.bfloat16, device="meta")
        >>> print(tilewise.explain(q, q, q, causal=True, device="sm_90"))
        attention on cuda (compute capability 9.0), bfloat16
        ...

    Source: the roofline model (Williams, Waterman, Patterson, CACM 52(4), 2009).
    """
    if unknown := [name for name in numbers if name not in Numbers.__annotations__]:
        raise unexpected("explain", unknown)
    if type(q) not in PLAIN and are_jagged(q, k, v):
        values, lengths, longest = packed_of(q, k, v)
        assert lengths.cu_q is not None
        assert lengths.cu_k is not None
        if q.is_meta:
            raise ValueError("q: its lengths are read, and need elements; on the meta device use explain_varlen")
        return explain_varlen(
            *values, lengths.cu_q, lengths.cu_k, *longest, bias=bias, mask=mask, sink=sink, causal=causal,
            window=window, dropout_p=dropout_p, dropout_seed=dropout_seed, deterministic=deterministic,
            return_aux=return_aux, backend=backend, device=device, limits=limits, **numbers,
        )  # fmt: skip
    listed = None
    if isinstance(mask, TileMask) and isinstance(q, Tensor) and q.is_meta and mask.device.type == "cpu":
        listed, mask = mask.tensors, mask.to("meta")
    options = {
        "causal": causal, "window": window, "dropout_p": dropout_p, "dropout_seed": dropout_seed,
        "deterministic": deterministic, "backend": backend, "statistics": _statistics(return_aux), **numbers,
    }  # fmt: skip
    calls = 1
    with torch.enable_grad():  # bias components computed from a trained table must require grad too
        if isinstance(q, Tensor) and q.dim() > 4:
            split = split_leading(q, k, v, bias=bias, mask=mask, sink=sink, ordered=dropout_p != 0)
            calls, call = split.way.calls, read_flattened(split.calls[0], options)
        else:
            call = read_call(q, k, v, bias=bias, mask=mask, sink=sink, **options)  # type: ignore[arg-type]
    problem, name = _problem_of(call, device)
    known = _data_sheet(problem, name) if limits is None else _given_limits(limits)
    kept = mask.kept if isinstance(mask, TileMask) else None
    gather = None if kept is None else gather_of(problem, kept)
    computed = gather.problem(problem) if isinstance(gather, Gather) else problem
    plan = make_plan(computed, call.backend)
    tiles = "nothing to compute" if problem.empty else plan.module.tiles(computed)
    listed = call.inputs.tiles if listed is None else listed
    whole = call.inputs.mask
    share = _mask_share(problem, whole[0] if whole is not None and whole.dim() == 5 else whole, listed)
    forward, backward = forward_work(computed), backward_work(computed)
    if isinstance(gather, Gather):
        forward, backward = _gathered(problem, computed, forward, backward)
    if share is not None:
        forward, backward = replace(forward, flops=problem.flops), replace(backward, flops=problem.backward_flops)
        forward, backward = (replace(x, flops=round(x.flops * share.pairs)) for x in (forward, backward))
    read = sum(x.nbytes for x in call.inputs.tiles or () if x is not None)
    forward, backward = (replace(x, bytes=x.bytes + read) for x in (forward, backward))
    called = problem if isinstance(gather, Gather) else None
    return Explanation(plan, tiles, forward, backward, known, share, _tile_share(listed), gather, called, calls)


def _gathered(problem: Problem, computed: Problem, forward: Work, backward: Work) -> tuple[Work, Work]:
    """Return both works plus the traffic of gathering keys and values and of adding up their gradients."""

    def keys_and_values(p: Problem) -> int:
        return p.batch * p.kv_heads * p.keys * (p.head_dim + p.value_dim) * p.dtype.itemsize

    copied, whole = keys_and_values(computed), keys_and_values(problem)
    return (
        replace(forward, bytes=forward.bytes + 2 * copied, unfused_bytes=_stored(problem, FORWARD_PASSES)),
        replace(backward, bytes=backward.bytes + copied + whole, unfused_bytes=_stored(problem, BACKWARD_PASSES)),
    )


_OF_PACKED = {
    name: x
    for name, x in inspect.signature(read_packed).parameters.items()
    if x.kind is inspect.Parameter.KEYWORD_ONLY and name != "statistics"
}
_OF_PACKED["return_aux"] = inspect.signature(explain).parameters["return_aux"]
_OF_PACKED["validate"] = inspect.Parameter("validate", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=bool)


@partial(named_only, more=_OF_PACKED | get_type_hints(Numbers), after="seqused_k")
def explain_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    seqused_k: Tensor | None = None,
    device: str | None = None,
    limits: tuple[float, float] | None = None,
    **options: Any,
) -> Explanation:
    """Return `explain` of a call of `tilewise.varlen_attention`: FLOPs and bytes summed over the sequences.

    Args:
        q, k, v: as for `varlen_attention`; also on the meta device, together with ``device=``.
        cu_seqlens_q, cu_seqlens_k, seqused_k: as for `varlen_attention`. Their elements are read: on a GPU the host
            synchronizes; pass them on the CPU if q, k and v are on the meta device.
        max_seqlen_q, max_seqlen_k: as for `varlen_attention`.
        bias, mask, sink, causal, window, scale, softcap, dropout_p, dropout_seed, deterministic, backend, validate: as
            for `varlen_attention`. Masked scores are counted as visible.
        return_aux, device, limits: as for `explain`.

    Returns:
        Explanation; print it.

    Raises:
        ValueError, TypeError: as for `varlen_attention` and `explain`.

    Examples:
        >>> q = torch.empty(300, 16, 128, dtype=torch.bfloat16, device="meta")
        >>> offsets = torch.tensor([0, 100, 300], dtype=torch.int32)
        >>> print(tilewise.explain_varlen(q, q, q, offsets, offsets, 200, 200, device="sm_90"))
        attention on cuda (compute capability 9.0), bfloat16
        ...
    """
    allowed = _OF_PACKED.keys() | Numbers.__annotations__.keys() | {"return_lse"}
    if unknown := [name for name in options if name not in allowed]:
        raise unexpected("explain_varlen", unknown)
    options.pop("return_lse", None)  # it has no effect
    check_flag("validate", options.pop("validate", False))  # the lengths are read in any case
    statistics = _statistics(options.pop("return_aux", None))
    read = Lengths(cu_seqlens_q, cu_seqlens_k, seqused_k)
    for argument, x in zip(("cu_seqlens_q", "cu_seqlens_k", "seqused_k"), read, strict=False):
        if x is not None:
            check_tensor(argument, x)
            if x.is_meta:
                raise ValueError(f"{argument}: is read, and needs elements: pass it on the CPU beside meta tensors")
    moved = Lengths(*(None if x is None else x.to(q.device) for x in read))
    with torch.enable_grad():
        longest = plain_int(max_seqlen_q), plain_int(max_seqlen_k)
        options |= {"window": plain_ints(options.get("window")), "statistics": statistics}
        call = read_packed(q, k, v, moved, longest, **options)
    problem, name = _problem_of(call, device)
    assert problem.totals is not None
    assert problem.score.packed is not None
    known = _data_sheet(problem, name) if limits is None else _given_limits(limits)
    plan = make_plan(problem, call.backend)
    tiles = "nothing to compute" if problem.empty else plan.module.tiles(problem)
    plain = replace(problem, bias=None, mask=None, sink=None, parts=None, totals=None, batch=1)
    forward = backward = Work(0, 0, 0)
    for place in places(read, problem.score.packed, problem.totals):
        band = problem.score.band.shifted(place.keys - place.queries)
        score = replace(problem.score, band=band, packed=None)
        own = replace(plain, queries=place.queries, keys=place.keys, score=score)
        forward, backward = forward + forward_work(own), backward + backward_work(own)
    given, grads = _operand_bytes(call, problem)
    forward = replace(forward, bytes=forward.bytes + given)
    return Explanation(plan, tiles, forward, replace(backward, bytes=backward.bytes + given + grads), known)


def _operand_bytes(call: Call, problem: Problem) -> tuple[int, int]:
    """Return the bytes of a packed batch's operands besides q, k and v, and of their required gradients."""
    inputs, parts = call.inputs, call.inputs.parts or NO_PARTS
    sizes = {"bias": inputs.bias, "mask": inputs.mask, "sink": inputs.sink, **parts._asdict()}
    found = {name: x.numel() * x.element_size() for name, x in sizes.items() if x is not None}
    asking = [*["bias"] * problem.bias_grad, *["sink"] * problem.sink_grad]
    asking += [] if problem.parts is None else problem.parts.grads
    return sum(found.values()), sum(found[name] for name in asking)


def _statistics(return_aux: AuxRequest | None) -> Statistics:
    return NO_STATISTICS if return_aux is None else read_request(return_aux).statistics


def _problem_of(call: Call, device: str | None) -> tuple[Problem, str | None]:
    """Return the problem of a call, and the name of its GPU, or None."""
    q, needs = call.inputs.q, Needs(*[x is not None and x.requires_grad for x in call.inputs.differentiable()])
    problem = Problem.of(
        *call.inputs, call.score, **needs.of_problem, deterministic=call.deterministic,
        irregular=irregular(*call.inputs[:4]),
    )  # fmt: skip
    if device is not None:
        return on_device(problem, device), gpu_key(device) if gpu_key(device) in CAPABILITIES else None
    if q.is_meta:
        raise ValueError(f"device: needed for tensors on the meta device: {DEVICES}")
    return problem, torch.cuda.get_device_name(q.device) if q.is_cuda else None
