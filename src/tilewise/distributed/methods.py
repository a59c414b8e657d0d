"""The methods of context parallelism by name, and the choice of one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from tilewise.distributed.all_to_all import AllToAll, Alone, traded_call
from tilewise.distributed.autograd import run
from tilewise.distributed.head_groups import Gathered, groups_of
from tilewise.distributed.operands import ContextParallelCall
from tilewise.distributed.plan import ContextParallelPlan, Cost, Method
from tilewise.distributed.ring import Ring

METHODS: dict[str, Callable[[ContextParallelCall, Sequence[Tensor]], Method]] = {
    "all_gather": lambda call, tensors: Gathered(groups_of(call, tensors)),
    "ring": lambda call, tensors: Ring(),
    "all_to_all": lambda call, tensors: AllToAll(Alone()),
}


def method_of(name: str, call: ContextParallelCall, tensors: Sequence[Tensor]) -> Method:
    """Return the method; on a mesh of two axes, rows are traded for heads along the second, and ``name`` is that along
    the first."""
    if not call.ranks.axes:
        return METHODS[name](call, tensors)
    return AllToAll(METHODS[name](traded_call(call), tensors))


def attend(
    name: str, call: ContextParallelCall, tensors: Sequence[Tensor], return_lse: bool
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return differentiable ``(o, lse)`` of this rank's rows; without ``return_lse`` lse is undefined."""
    return run(method_of(name, call, tensors), call, tensors, return_lse)


def check_method(method: str) -> None:
    if method != "auto" and method not in METHODS:
        raise ValueError(f"method: must be 'auto' or one of {', '.join(map(repr, METHODS))}, got {method!r}")


def choose(call: ContextParallelCall, tensors: Sequence[Tensor], method: str) -> str:
    """Return the method's name; raise an error if it cannot run the call."""
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


def make_plan(call: ContextParallelCall, tensors: Sequence[Tensor], method: str) -> ContextParallelPlan:
    """Return the plan of a call; raise a ValueError if ``method`` cannot run it."""
    costs = tuple(make(call, tensors).cost(call, tensors) for make in METHODS.values())
    q, _, v = tensors[:3]
    flops = tuple(2 * (q.shape[3] + v.shape[3]) * call.pairs(rank) for rank in range(call.ranks.size))
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
