"""Calls on shards as torch.compile traces them: a list of tensors, and a string for everything else.

The string is a Python literal, so a graph that a compiler keeps on disk is valid in another process.
`tilewise.distributed.operator` reads it.
"""

from __future__ import annotations

import ast
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.bias import Alibi, LowRankBias, RelativeBias, T5Bias
from tilewise.bias.terms import Term
from tilewise.distributed.layout import LoadBalancer, Ranks
from tilewise.distributed.operands import FUNCTION, CallOptions
from tilewise.frontend.autocast import autocast
from tilewise.operator.seed import drawn_seed

_START = ("query_start", "key_start")
_FIELDS: dict[type[Term], tuple[str, ...]] = {
    RelativeBias: ("values", "lo", "reverse", "outside", "on", *_START, "buckets"),
    T5Bias: ("table", "bidirectional", "max_distance", *_START),
    Alibi: ("slopes", "form", *_START),
    LowRankBias: ("u", "w"),
}
_BY_NAME = {cls.__name__: cls for cls in _FIELDS}
# Kind of a field whose value is an index in the list of tensors.
_TENSOR = "tensor"


class Description(NamedTuple):
    """A call without its tensors; ints in place of tensors are indices in the list of tensors."""

    group: str
    device: str
    load_balancer: LoadBalancer
    method: str
    validate: bool
    return_lse: bool
    options: tuple
    bias: tuple  # of each component its class name and fields; of a tensor "" and its index
    one: bool  # bias= was not a tuple
    mask: int | None
    sink: int | None
    seed: int | None
    pair: tuple[int, int] | None  # a seed of two numbers
    drawn: bool  # each rank has drawn a seed; the first rank's is used
    needs: tuple[bool, ...]  # which tensors require grad


def compiled_call(
    ranks: Ranks, load_balancer: LoadBalancer, qkv: tuple[Tensor, Tensor, Tensor], given: dict[str, Any],
    options: CallOptions, *, method: str, validate: bool, return_lse: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Call the operator; every line of this function is traced."""
    tensors = list(autocast(*qkv))
    bias, pieces = given["bias"], []
    one = not isinstance(bias, (tuple, list))
    for part in () if bias is None else (bias,) if one else bias:
        pieces.append(_described(part, tensors))
    places = []
    for name in ("mask", "sink"):
        if given[name] is not None:
            tensors.append(given[name])
        places.append(None if given[name] is None else len(tensors) - 1)
    seed, drawn = given["dropout_seed"], False
    if options.dropout_p and seed is None:
        seed, drawn = drawn_seed(tensors[0]), True
    if isinstance(seed, Tensor):
        tensors.append(seed)
        places.append(len(tensors) - 1)
        seed = None
    else:
        places.append(None)
    numbers = tuple(options._replace(deterministic=_ordered(options)))
    words = repr((
        ranks.group.group_name, ranks.device, load_balancer, method, validate, return_lse, numbers,
        tuple(pieces), one, *places, None if seed is None else tuple(seed), drawn,
        tuple([x.requires_grad for x in tensors]),
    ))  # fmt: skip
    o, lse, _ = torch.ops.tilewise.context_parallel(tensors, words)
    return o, lse


def _ordered(options: CallOptions) -> bool:
    """Return ``deterministic``, where None becomes torch's setting at tracing time."""
    if options.deterministic is None:
        return torch.are_deterministic_algorithms_enabled()
    return options.deterministic


def _described(part: Any, tensors: list[Tensor]) -> tuple:
    if isinstance(part, Tensor):
        tensors.append(part)
        return ("", len(tensors) - 1)
    if type(part) not in _FIELDS:
        raise NotImplementedError(f"bias: {type(part).__name__} is not taken by {FUNCTION}")
    fields: list[tuple[str, str, Any]] = []
    if isinstance(part, LowRankBias) and tensors[0].dtype != torch.float64:
        part = LowRankBias(*autocast(part.u, part.w))
    for name in _FIELDS[type(part)]:
        x = getattr(part, name)
        if isinstance(x, Tensor):
            tensors.append(x)
            fields.append((name, _TENSOR, len(tensors) - 1))
        else:  # as a string: infinity has no Python literal
            fields.append((name, "float" if isinstance(x, float) else "", str(x) if isinstance(x, float) else x))
    return (type(part).__name__, tuple(fields))


@lru_cache(maxsize=1024)
def described(words: str) -> Description:
    return Description(*ast.literal_eval(words))


def given_by(
    call: Description, tensors: list[Tensor]
) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any], CallOptions]:
    """Return (q, k, v), the other tensors by name, and the options, as passed to `context_parallel_attention`."""
    pieces: list[Any] = []
    for name, found in call.bias:
        if name == "":
            pieces.append(tensors[found])
            continue
        fields: dict[str, Any] = {}
        for field, kind, x in found:
            fields[field] = tensors[x] if kind == _TENSOR else float(x) if kind == "float" else x
        cls = _BY_NAME[name]
        arguments = [fields.pop(field) for field in ("values", "table", "slopes") if field in fields]
        pieces.append(cls(*arguments, **fields))
    given = {
        "bias": None if not pieces else pieces[0] if call.one else tuple(pieces),
        "mask": None if call.mask is None else tensors[call.mask],
        "sink": None if call.sink is None else tensors[call.sink],
        "dropout_seed": call.pair if call.seed is None else tensors[call.seed],
    }
    q, k, v = tensors[:3]
    return (q, k, v), given, CallOptions(*call.options)


def ranks_of(call: Description) -> Ranks:
    """Return the call's ranks; raise a RuntimeError if this process does not have the group, or no longer."""
    from torch.distributed.distributed_c10d import _resolve_process_group

    return Ranks.of_group(_resolve_process_group(call.group), call.device, call.load_balancer)  # type: ignore[arg-type]
