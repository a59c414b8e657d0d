"""Nested tuples of integers, in which CuTe writes shapes, strides and coordinates."""

from __future__ import annotations

from typing import TypeAlias

IntTuple: TypeAlias = "int | tuple[IntTuple, ...]"


def flatten(t: IntTuple) -> tuple[int, ...]:
    """The integers of ``t`` from left to right."""
    return (t,) if isinstance(t, int) else tuple(i for part in t for i in flatten(part))


def product(t: IntTuple) -> int:
    """The product of all integers of ``t``; 1 for an empty tuple."""
    result = 1
    for i in flatten(t):
        result *= i
    return result


def congruent(a: IntTuple, b: IntTuple) -> bool:
    """Whether ``a`` and ``b`` have the same nesting."""
    if isinstance(a, int) or isinstance(b, int):
        return isinstance(a, int) and isinstance(b, int)
    return len(a) == len(b) and all(map(congruent, a, b))


def compact_strides(shape: IntTuple, first: int = 1) -> IntTuple:
    """Strides that number the coordinates of ``shape`` without gaps, the leftmost running fastest."""
    if isinstance(shape, int):
        return first
    strides = []
    for part in shape:
        strides.append(compact_strides(part, first))
        first *= product(part)
    return tuple(strides)


def coordinate(index: int, shape: IntTuple) -> IntTuple:
    """The coordinate in ``shape`` that has number ``index``, the leftmost running fastest (colexicographic order)."""
    if isinstance(shape, int):
        return index
    parts = []
    for n, part in enumerate(shape):
        size = product(part)
        # The last one takes what is left, so that an index past the end stays distinct.
        parts.append(coordinate(index if n == len(shape) - 1 else index % size, part))
        index //= size
    return tuple(parts)


def text(t: IntTuple) -> str:
    """As CuTe prints it: ``((8,16),(64,4))``."""
    return str(t) if isinstance(t, int) else f"({','.join(map(text, t))})"
