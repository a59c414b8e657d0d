"""The methods of context parallelism by name, and the preparation of a call: its arguments are checked, the ranks
agree, and a method is chosen."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from tilewise.distributed.agreement import Description, settled
from tilewise.distributed.all_to_all import AllToAll, Alone, traded_call
from tilewise.distributed.head_groups import Gathered, groups_of
from tilewise.distributed.layout import Ranks, Tensors
from tilewise.distributed.operands import Arguments, ContextParallelCall, read
from tilewise.distributed.plan import ContextParallelPlan, Cost, Method
from tilewise.distributed.ring import Ring
from tilewise.operator.dispatch import describe
from tilewise.planner import check_backend
from tilewise.spec.checks import check_flag
from tilewise.spec.score import ScoreNumbers

METHODS: dict[str, Callable[[ContextParallelCall, Tensors], Method]] = {
    "all_gather": lambda call, tensors: Gathered(groups_of(call, tensors)),
    "ring": lambda call, tensors: Ring(),
    "all_to_all": lambda call, tensors: AllToAll(Alone()),
}


def method_of(name: str, call: ContextParallelCall, tensors: Tensors) -> Method:
    """Return the method; on a mesh of two axes, rows are traded for heads along the second, and ``name`` is that along
    the first."""
    if not call.ranks.axes:
        return METHODS[name](call, tensors)
    return AllToAll(METHODS[name](traded_call(call), tensors))


def check_method(method: str) -> None:
    if method != "auto" and method not in METHODS:
        raise ValueError(f"method: must be 'auto' or one of {', '.join(map(repr, METHODS))}, got {method!r}")


def choose(call: ContextParallelCall, tensors: Tensors, method: str) -> str:
    """Return the method's name; raise an error if the call is invalid, or the method cannot run it."""
    _check_locally(call, tensors)
    if not call.ranks.axes:
        return make_plan(call, tensors, method).method
    name = "all_gather" if method == "all_gather" else "ring"
    reason = method_of(name, call, tensors).cost(call, tensors).declines
    if reason is not None:
        raise ValueError(f"mesh: {reason}")
    if method not in ("auto", name):
        raise ValueError(f"method: must be 'auto', 'ring' or 'all_gather' with a mesh of two axes, got {method!r}")
    if call.options.dropout_p:
        raise NotImplementedError("dropout_p: dropout is not taken with a mesh of two axes")
    return name


def make_plan(call: ContextParallelCall, tensors: Tensors, method: str) -> ContextParallelPlan:
    """Return the plan of a call; raise a ValueError if ``method`` cannot run it."""
    costs = tuple(make(call, tensors).cost(call, tensors) for make in METHODS.values())
    flops = call.flops(tensors)
    if method != "auto":
        asked = next(cost for cost in costs if cost.method == method)
        if asked.declines is not None:
            raise ValueError(f"method: {method!r} cannot run this call: {asked.declines}")
        return ContextParallelPlan(method, "asked for", flops, costs)
    least = min((cost for cost in costs if cost.declines is None), key=_order)
    reason = "its transfers hide behind products" if least.hidden else "sends the fewest bytes that nothing hides"
    return ContextParallelPlan(least.method, reason, flops, costs)


def _order(cost: Cost) -> tuple[int, int]:
    """Return the sort key: exposed bytes, then fewer calls and no steps that wait for each other."""
    return cost.exposed_bytes, ("all_gather", "all_to_all", "ring").index(cost.method)


# --- preparation ---


def prepare(
    ranks: Ranks, given: Arguments, split: Callable[[Ranks], tuple[Ranks, Description]] = lambda ranks: (ranks, ())
) -> tuple[Method, ContextParallelCall, list[Tensor]]:
    """Return the method that all ranks use, the call and its tensors; an error of one rank is raised on all.
    ``split`` returns the ranks as they split the sequence, and what they compare of that."""

    def read_call() -> tuple[Description, Description, tuple[ContextParallelCall, list[Tensor]]]:
        given.refuse()
        check_flag("validate", given.validate)
        check_flag("return_lse", given.return_lse)
        check_method(given.method)
        splitting, beside = split(ranks)
        call, tensors = read(splitting, given)
        return _description(call, tensors, given), beside, (call, tensors)

    name, (call, tensors) = settled(ranks, given.validate, read_call, lambda x: choose(*x, given.method))
    if call.drawn:
        share_seed(call)
    return method_of(name, call, tensors), call, tensors


def share_seed(call: ContextParallelCall) -> None:
    """Give all ranks the first rank's seed; counters differ by rank."""
    if call.seed is not None:
        dist.broadcast(call.seed, dist.get_global_rank(call.ranks.group, 0), group=call.ranks.group)


def explain(ranks: Ranks, given: Arguments) -> ContextParallelPlan:
    """Return the plan of a call; nothing is sent."""
    call, tensors = read(ranks, given)
    check_method(given.method)
    _check_locally(call, tensors)
    return make_plan(call, tensors, given.method)


def _check_locally(call: ContextParallelCall, tensors: Tensors) -> None:
    """Raise any error of a local call before anything is sent. Of a packed batch other ranks' keys are views without
    memory."""
    check_backend(call.options.backend)
    query, found = call.row_chunks[0], list(tensors)
    key = call.ranks.chunks(call.keys)[0] if call.documents is None else call.seen_keys(query)
    if call.documents is not None:
        for n, axis in call.moving.items():
            shape = list(tensors[n].shape)
            shape[axis] = call.sizes.N
            found[n] = tensors[n].narrow(axis, 0, 1).expand(shape)
    local = call.local(call.cut(found, query, key), query, key)
    describe(local.inputs, ScoreNumbers.of(local.score, local.deterministic, local.backend))
    device = tensors[0].device.type
    if device != call.ranks.device:
        raise ValueError(f"q: must be on the mesh's device {call.ranks.device}, got {device}")


def _description(call: ContextParallelCall, tensors: list[Tensor], given: Arguments) -> Description:
    """Return (name, value) pairs that must be equal on all ranks."""
    names = [slot.name for slot in call.slots]
    counts = [names[: n + 1].count(name) for n, name in enumerate(names)]
    names = [name if count == 1 else f"{name} ({count})" for name, count in zip(names, counts, strict=True)]
    layouts = [(tuple(x.shape), x.dtype, x.requires_grad) for x in tensors]
    return (
        *zip(names, layouts, strict=True), ("bias terms", tuple(repr(piece.term) for piece in call.pieces)),
        *call.options._asdict().items(), ("method", given.method), ("load_balancer", call.ranks.split.pieces),
        ("return_lse", given.return_lse), ("dropout_seed", (call.seed is None, call.drawn)),
        ("torch.is_grad_enabled()", torch.is_grad_enabled()), ("mesh", tuple(x.size for x in call.ranks.axes)),
    )  # fmt: skip
