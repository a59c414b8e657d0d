"""A call as a compiler traces it: tensors in a list, and all else in words that another process could read.

The words are a Python literal, so that a graph that a compiler keeps on disk means the same when it is read again.
`tilewise.distributed.operator` reads them.
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
# What a description has instead of a tensor: its place among the tensors.
_TENSOR = "tensor"


class Description(NamedTuple):
    """All of a call but its tensors. bias: of each piece its class and fields, of a tensor "" and it; ``one``: that it
    is no tuple. mask, sink, seed: places among the tensors; ``pair``: a seed of two numbers. drawn: each rank has drawn
    the seed, and the first one's counts. needs: which tensors require grad."""

    group: str
    device: str
    load_balancer: LoadBalancer
    method: str
    validate: bool
    return_lse: bool
    options: tuple
    bias: tuple
    one: bool
    mask: int | None
    sink: int | None
    seed: int | None
    pair: tuple[int, int] | None
    drawn: bool
    needs: tuple[bool, ...]


def compiled_call(
    ranks: Ranks, load_balancer: LoadBalancer, qkv: tuple[Tensor, Tensor, Tensor], given: dict[str, Any],
    options: CallOptions, *, method: str, validate: bool, return_lse: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The operator's call; every line of it is traced."""
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
    """What torch's setting says now, and not when the graph runs."""
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
        else:  # of an infinite number its name: the literal of none is one
            fields.append((name, "float" if isinstance(x, float) else "", str(x) if isinstance(x, float) else x))
    return (type(part).__name__, tuple(fields))


@lru_cache(maxsize=1024)
def described(words: str) -> Description:
    return Description(*ast.literal_eval(words))


def given_by(
    call: Description, tensors: list[Tensor]
) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any], CallOptions]:
    """q, k and v; bias, mask and sink; and the options, as `context_parallel_attention` was given them."""
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
    """Raise a RuntimeError for a group that this process has not, or no more."""
    from torch.distributed.distributed_c10d import _resolve_process_group

    return Ranks.of_group(_resolve_process_group(call.group), call.device, call.load_balancer)  # type: ignore[arg-type]
