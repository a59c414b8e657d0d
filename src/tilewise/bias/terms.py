"""Base class of bias terms: pytree registration, checks of arguments, and positions."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree

from tilewise.spec.integers import check_range
from tilewise.spec.operands import Sizes
from tilewise.spec.tensors import check_tensor

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_Term = TypeVar("_Term", bound=type)


def pytree_node(cls: _Term) -> _Term:
    """Register a dataclass as a pytree node with its tensors as children and other fields as context.

    Functions over pytrees insert placeholders, such as 0 for a tensor. So an unflattened term is not checked, and
    remembers which of its fields are children.
    """
    names = [field.name for field in dataclasses.fields(cls)]

    def children(x: Any) -> tuple[list[str], tuple]:
        known = vars(x).get("_children")
        found = [name for name in names if isinstance(getattr(x, name), Tensor)] if known is None else list(known)
        return found, tuple((name, getattr(x, name)) for name in names if name not in found)

    def flatten(x: Any) -> tuple[list[Any], tuple]:
        found, settings = children(x)
        return [getattr(x, name) for name in found], (tuple(found), settings)

    def flatten_with_keys(x: Any) -> tuple[list[tuple[Any, Any]], tuple]:
        leaves, context = flatten(x)
        return [(_pytree.GetAttrKey(name), leaf) for name, leaf in zip(context[0], leaves, strict=True)], context

    def unflatten(leaves: Iterable[Any], context: tuple) -> Any:
        found, settings = context
        x: Any = object.__new__(cls)
        for name, value in (*zip(found, leaves, strict=True), *settings, ("_children", found)):
            object.__setattr__(x, name, value)
        return x

    torch.serialization.add_safe_globals([cls])  # for torch.load(weights_only=True)
    _pytree.register_pytree_node(
        cls,
        flatten,
        unflatten,
        serialized_type_name=f"{cls.__module__}.{cls.__qualname__}",
        flatten_with_keys_fn=flatten_with_keys,
    )
    return cls


class Term:
    """Bias computed from something smaller than a matrix; kind: its component in `tilewise.bias.canonical`."""

    kind: ClassVar[str]

    def check(self, sizes: Sizes, device: torch.device | None = None) -> None:
        """Raise a ValueError or TypeError that names the argument, what was passed and what this call allows."""
        raise NotImplementedError

    def dense(self, sizes: Sizes) -> Tensor:
        """Return the whole bias (B|1, H|Hkv|1, M, N), float64; differentiable, for the reference and tests."""
        raise NotImplementedError


def name_of(x: object, field: str) -> str:
    """Return the name of a field of a term, as errors and explanations show it."""
    return f"{type(x).__name__}.{field}"


def shape_of(x: Tensor) -> tuple[int, ...]:
    return tuple(x.shape)


def check_float(name: str, x: object, dims: tuple[int, ...], axes: str) -> None:
    """Raise unless ``x`` is a dense float tensor with one of ``dims`` dimensions; ``axes`` describes them."""
    check_tensor(name, x)
    assert isinstance(x, Tensor)
    if x.dtype not in FLOATING:
        raise TypeError(f"{name}: dtype must be float16, bfloat16, float32 or float64, got {x.dtype}")
    if x.dim() not in dims:
        expected = " or ".join(str(n) for n in dims)
        raise ValueError(f"{name}: expected {expected} dimensions {axes}, got shape {shape_of(x)}")


def check_int(name: str, x: object, least: int | None = None) -> None:
    if isinstance(x, bool) or not isinstance(x, (int, torch.SymInt)):
        raise TypeError(f"{name}: expected an int, got {type(x).__name__}")
    if least is not None and x < least:
        raise ValueError(f"{name}: must be {least} or more, got {x}")
    check_range(name, x)


def check_bool(name: str, x: object) -> None:
    if not isinstance(x, bool):
        raise TypeError(f"{name}: expected a bool, got {x!r}")


def check_sizes(name: str, x: Tensor, allowed: Mapping[str, Iterable[int]]) -> None:
    """Raise unless each axis has an allowed size; keys are the letters of axes: ``{"H|Hkv|1": (8, 2, 1)}``."""
    if all(size in sizes for size, sizes in zip(x.shape, allowed.values(), strict=True)):
        return
    letters = ", ".join(allowed)
    numbers = ", ".join("|".join(str(n) for n in dict.fromkeys(sizes)) for sizes in allowed.values())
    raise ValueError(f"{name}: shape {shape_of(x)} is not ({letters}) = ({numbers})")


def check_device(x: object, device: torch.device | None) -> None:
    """Raise unless all tensors of a term are on one device, the call's if it is given."""
    for name, tensor in vars(x).items():
        if not isinstance(tensor, Tensor):
            continue
        if device is None:
            device = tensor.device
        elif tensor.device != device:
            raise ValueError(f"{name_of(x, name)}: must be on {device}, got {tensor.device}")


# --- positions ---


def check_start(name: str, x: object) -> None:
    """Raise unless ``x`` is an int, or an integer tensor of no or one dimension."""
    if not isinstance(x, Tensor):
        check_int(name, x)
        return
    check_tensor(name, x)
    if x.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name}: dtype must be int32 or int64, got {x.dtype}")
    if x.dim() > 1:
        raise ValueError(f"{name}: expected an int or a tensor (B,), got shape {shape_of(x)}")


def check_starts(x: Any, B: int | None = None) -> None:
    """Check the query_start and key_start of a term, also against the batch size if given."""
    for field in ("query_start", "key_start"):
        start = getattr(x, field)
        if (start is None and field == "query_start") or (type(start) is int and start == 0):
            continue
        check_start(name_of(x, field), start)
        if B is not None and isinstance(start, Tensor) and start.numel() not in (1, B):
            raise ValueError(f"{name_of(x, field)}: shape {shape_of(start)} is not (B|1,) = ({B}|1,)")


def shift_of(x: Any, M: int, N: int) -> tuple[int, Tensor | None]:
    """Return key position minus query position minus ``j - i``: (int, None), or (0, int64 tensor (B|1,)).

    query_start is N - M by default, which aligns the last query with the last key, as for causal attention.
    """
    query_start = N - M if x.query_start is None else x.query_start
    shift = x.key_start - query_start
    return (0, shift.reshape(-1).to(torch.int64)) if isinstance(shift, Tensor) else (shift, None)


def distances_of(x: Any, M: int, N: int, device: torch.device) -> Tensor:
    """Return key position minus query position of all pairs, (B|1, 1, M, N), int64."""
    known, shift = shift_of(x, M, N)
    distance = (torch.arange(N, device=device) - torch.arange(M, device=device)[:, None] + known)[None, None]
    return distance if shift is None else distance + shift.view(-1, 1, 1, 1)


def start_words(x: Any) -> list[str]:
    """Return the non-default starts for a repr."""
    words = []
    for field, usual in (("query_start", None), ("key_start", 0)):
        start = getattr(x, field)
        if isinstance(start, Tensor):
            words.append(f"{field} {shape_of(start)}")
        elif start != usual:
            words.append(f"{field}={start}")
    return words


def summary(x: Tensor) -> str:
    """Return shape and dtype, "(1, 8, 1, 64) float32"; placeholders for tensors show as their repr."""
    if not isinstance(x, Tensor):
        return repr(x)
    return f"{shape_of(x)} {str(x.dtype).removeprefix('torch.')}"


def wide(x: Tensor) -> Tensor:
    """Return ``x`` in float32 (float64 for float64), so that gradients of tables are not summed in 16 bits."""
    return x if x.dtype == torch.float64 else x.float()
