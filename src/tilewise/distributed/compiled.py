"""Calls on shards as torch.compile traces them: a list of tensors, and a string for everything else.

The string is a Python literal, so a graph that a compiler keeps on disk is valid in another process.
`tilewise.distributed.operator` reads it.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.bias import Alibi, LowRankBias, RelativeBias, T5Bias
from tilewise.bias.terms import Term
from tilewise.distributed.layout import LoadBalancer, Ranks
from tilewise.distributed.operands import FUNCTION, Arguments, CallOptions
from tilewise.frontend.autocast import autocast
from tilewise.operator.seed import drawn_seed

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
    """A call without its tensors: of each value its kind and what is left of it, for a tensor its index in a list."""

    group: str
    device: str
    load_balancer: LoadBalancer
    arguments: tuple  # of `Arguments`, as `_literal` returns them
    options: CallOptions
    method: str
    validate: bool
    return_lse: bool
    drawn: bool  # each rank has drawn a seed; the first rank's is used
    needs: tuple[bool, ...]  # which tensors require grad


def compiled_call(ranks: Ranks, load_balancer: LoadBalancer, given: Arguments) -> tuple[Tensor, Tensor]:
    """Call the operator; every line of this function is traced."""
    tensors: list[Tensor] = []
    options, seed = given.options, given.dropout_seed
    if options.deterministic is None:
        options = options._replace(deterministic=torch.are_deterministic_algorithms_enabled())
    q, k, v = autocast(*given.qkv)
    drawn = bool(options.dropout_p) and seed is None
    if drawn:
        seed = drawn_seed(q)
    bias = given.bias
    for part in () if bias is None else bias if isinstance(bias, (tuple, list)) else (bias,):
        if not isinstance(part, Tensor) and type(part) not in _FIELDS:
            raise NotImplementedError(f"bias: {type(part).__name__} is not taken by {FUNCTION}")
    arguments = _literal(((q, k, v), bias, given.mask, given.sink, seed), tensors)
    words = repr((
        ranks.group.group_name, ranks.device, load_balancer, arguments, tuple(options),
        given.method, given.validate, given.return_lse, drawn, tuple([x.requires_grad for x in tensors]),
    ))  # fmt: skip
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


def _value(literal: tuple[str, Any], tensors: Sequence[Tensor]) -> Any:
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
    found = Traced(*ast.literal_eval(words))
    return found._replace(options=CallOptions(*found.options))


def arguments_of(call: Traced, tensors: Sequence[Tensor]) -> Arguments:
    """Return the arguments as passed to `context_parallel_attention`."""
    qkv, bias, mask, sink, seed = _value(call.arguments, tensors)
    if call.drawn:  # a copy, as an operator must not write to its arguments
        seed = seed.clone()
    return Arguments(qkv, bias, mask, sink, seed, call.options, {}, call.method, call.validate, call.return_lse)


def ranks_of(call: Traced) -> Ranks:
    """Return the call's ranks; raise a RuntimeError if this process does not have the group, or no longer."""
    from torch.distributed.distributed_c10d import _resolve_process_group

    return Ranks.of_group(_resolve_process_group(call.group), call.device, call.load_balancer)  # type: ignore[arg-type]
