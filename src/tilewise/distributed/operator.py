"""The operator ``tilewise::context_parallel``: for a compiler, a call on shards is one operator with a derivative.

Its arguments are a list of tensors, and a string for everything else: a Python literal, so that a graph that a compiler
keeps on disk is valid in another process. The operator's backward has no graph of the forward: it receives the tensors
with o and lse, and computes dS = P ∘ (dP − D) for this rank's queries and keys, or heads.
"""

from __future__ import annotations

import ast
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.backends import Outputs, lse_dtype
from tilewise.bias import Alibi, LowRankBias, RelativeBias, T5Bias
from tilewise.bias.terms import Term
from tilewise.distributed.autograd import gradients, through
from tilewise.distributed.layout import Grads, LoadBalancer, Ranks, Tensors
from tilewise.distributed.methods import prepare, share_seed
from tilewise.distributed.operands import FUNCTION, Arguments, CallOptions, ContextParallelCall
from tilewise.distributed.plan import Method
from tilewise.frontend.autocast import autocast
from tilewise.operator.custom_op import autograd_again, operator_of_lists
from tilewise.operator.seed import drawn_seed
from tilewise.spec.dropout import threshold
from tilewise.spec.rounding import keeps_low_bits

_START = ("query_start", "key_start")
# Arguments of each term: the first may have no keyword.
_FIELDS: dict[type[Term], tuple[str, ...]] = {
    RelativeBias: ("values", "lo", "reverse", "outside", "on", *_START, "buckets"),
    T5Bias: ("table", "bidirectional", "max_distance", *_START),
    Alibi: ("slopes", "form", *_START),
    LowRankBias: ("u", "w"),
}
_BY_NAME = {cls.__name__: cls for cls in _FIELDS}


class Traced(NamedTuple):
    """A call without its tensors."""

    group: str
    device: str
    load_balancer: LoadBalancer
    arguments: tuple  # `Arguments`, as `_literal` returns them
    has_lse: bool  # asked for, or for the backward
    drawn: bool  # each rank has drawn a seed; the first rank's is used
    needs: tuple[bool, ...]  # which tensors require grad


def compiled_call(ranks: Ranks, load_balancer: LoadBalancer, given: Arguments) -> tuple[Tensor, Tensor]:
    """Call the operator; every line of this function is traced."""
    tensors: list[Tensor] = []
    options, bias = given.options, given.bias
    if options.deterministic is None:
        options = options._replace(deterministic=torch.are_deterministic_algorithms_enabled())
    q, k, v = autocast(*given.qkv)
    drawn = bool(options.dropout_p) and given.dropout_seed is None
    if drawn:
        given = given._replace(dropout_seed=drawn_seed(q))
    for part in () if bias is None else bias if isinstance(bias, (tuple, list)) else (bias,):
        if not isinstance(part, Tensor) and type(part) not in _FIELDS:
            raise NotImplementedError(f"bias: {type(part).__name__} is not taken by {FUNCTION}")
    arguments = _literal(tuple(given._replace(qkv=(q, k, v), options=options)), tensors)
    needs = tuple([x.requires_grad for x in tensors])
    has_lse = given.return_lse or any(needs)
    words = repr((ranks.group.group_name, ranks.device, load_balancer, arguments, has_lse, drawn, needs))
    o, lse, _ = torch.ops.tilewise.context_parallel(tensors, words)
    return o, lse


def _literal(x: Any, tensors: list[Tensor]) -> tuple[str, Any]:
    """Return (kind, literal) of a value, and append its tensors to the list."""
    if isinstance(x, Tensor):
        tensors.append(x)
        return "tensor", len(tensors) - 1
    if isinstance(x, (tuple, list)):
        return "tuple", tuple([_literal(part, tensors) for part in x])
    if isinstance(x, float):  # as a string: infinity has no Python literal
        return "float", str(x)
    if type(x) not in _FIELDS:
        return "", x
    if isinstance(x, LowRankBias) and tensors[0].dtype != torch.float64:
        x = LowRankBias(*autocast(x.u, x.w))
    return type(x).__name__, tuple([_literal(getattr(x, name), tensors) for name in _FIELDS[type(x)]])


def _value(literal: tuple[str, Any], tensors: Tensors) -> Any:
    kind, x = literal
    if kind in ("", "float"):
        return float(x) if kind else x
    if kind == "tensor":
        return tensors[x]
    parts = [_value(part, tensors) for part in x]
    if kind == "tuple":
        return tuple(parts)
    cls: Any = _BY_NAME[kind]
    return cls(parts[0], **dict(zip(_FIELDS[cls][1:], parts[1:], strict=True)))


@lru_cache(maxsize=1024)
def traced(words: str) -> Traced:
    return Traced(*ast.literal_eval(words))


def arguments_of(call: Traced, tensors: Tensors) -> Arguments:
    """Return the arguments as passed to `context_parallel_attention`."""
    given = Arguments(*_value(call.arguments, tensors))
    if call.drawn:  # a copy, as an operator must not write to its arguments
        given = given._replace(dropout_seed=given.dropout_seed.clone())  # type: ignore[union-attr]
    return given._replace(options=CallOptions(*given.options))


def ranks_of(call: Traced) -> Ranks:
    """Return the call's ranks; raise a RuntimeError if this process does not have the group, or no longer."""
    from torch.distributed.distributed_c10d import _resolve_process_group

    return Ranks.of_group(_resolve_process_group(call.group), call.device, call.load_balancer)  # type: ignore[arg-type]


# --- the operator ---


def _prepared(tensors: Tensors, call: Traced) -> tuple[Method, ContextParallelCall, list[Tensor], list[Tensor]]:
    """Return the method that all ranks agreed on, the call and its tensors, and those of the operator, of which they
    are views or casts."""
    leaves = [x.detach().requires_grad_(need) for x, need in zip(tensors, call.needs, strict=True)]
    with torch.enable_grad():
        method, sharded, found = prepare(ranks_of(call), arguments_of(call, leaves))
    if call.drawn:
        share_seed(sharded)
    return method, sharded, found, leaves


def _forward(tensors: Tensors, call: str) -> tuple[Tensor, Tensor, Tensor]:
    has_lse = traced(call).has_lse
    with autograd_again(), torch.no_grad():
        method, sharded, found, _ = _prepared(tensors, traced(call))
        (o, lse, o_low, _), _ = method.forward(sharded, found, (True, has_lse, True))
    lse = o.new_empty(0, dtype=lse_dtype(o.dtype)) if lse is None or not has_lse else lse.contiguous()
    return o.contiguous(), lse, o.new_empty(0, dtype=torch.int16) if o_low is None else o_low.contiguous()


def _forward_fake(tensors: Tensors, call: str) -> tuple[Tensor, Tensor, Tensor]:
    what, (q, _, v) = traced(call), tensors[:3]
    o = q.new_empty((*q.shape[:3], v.shape[3]))
    lse = q.new_empty(tuple(q.shape[:3]) if what.has_lse else (0,), dtype=lse_dtype(q.dtype))
    has_low = keeps_low_bits(q.dtype, threshold(arguments_of(what, tensors).options.dropout_p))
    return o, lse, q.new_empty(o.shape if has_low else (0,), dtype=torch.int16)


def _backward(
    do: Tensor | None, dlse: Tensor | None, tensors: Tensors, o: Tensor, lse: Tensor, o_low: Tensor, call: str
) -> list[Tensor]:
    with autograd_again(), torch.no_grad():
        method, sharded, found, leaves = _prepared(tensors, traced(call))
        saved = method.saved(sharded, found, Outputs(o, lse, o_low if o_low.shape == o.shape else None))
        grads = gradients(method, sharded, saved, do, dlse, [x.requires_grad for x in found])
        made = [n for n, grad in enumerate(grads) if grad is not None]
        mine = through([found[n] for n in made], [grads[n].to(found[n].dtype) for n in made], leaves)  # type: ignore[union-attr]
    return [x.new_empty(0) if grad is None else grad.contiguous() for x, grad in zip(tensors, mine, strict=True)]


def _backward_fake(
    do: Tensor | None, dlse: Tensor | None, tensors: Tensors, o: Tensor, lse: Tensor, o_low: Tensor, call: str
) -> list[Tensor]:
    needs = traced(call).needs
    return [x.new_empty(x.shape if need else (0,)) for x, need in zip(tensors, needs, strict=True)]


def _setup(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor, Tensor]) -> None:
    tensors, ctx.call = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, do: Tensor | None, dlse: Tensor | None, _: None) -> tuple[Grads, None]:
    *tensors, o, lse, o_low = ctx.saved_tensors
    needs = traced(ctx.call).needs
    if do is None and dlse is None:
        return [None] * len(tensors), None
    grads = torch.ops.tilewise.context_parallel_backward(do, dlse, tensors, o, lse, o_low, ctx.call)
    return [grad if need else None for grad, need in zip(grads, needs, strict=True)], None


operator_of_lists("context_parallel", _forward, _forward_fake, setup=_setup, backward=_differentiate)
operator_of_lists("context_parallel_backward", _backward, _backward_fake)
