"""Nested tuples of integers: CuTe's shapes, strides and coordinates."""

from __future__ import annotations

from typing import TypeAlias

IntTuple: TypeAlias = "int | tuple[IntTuple, ...]"


def flatten(t: IntTuple) -> tuple[int, ...]:
    """Return the integers of ``t`` from left to right."""
    return (t,) if isinstance(t, int) else tuple(i for part in t for i in flatten(part))


def product(t: IntTuple) -> int:
    """Return the product of all integers of ``t``; 1 for an empty tuple."""
    result = 1
    for i in flatten(t):
        result *= i
    return result


def congruent(a: IntTuple, b: IntTuple) -> bool:
    """True if ``a`` and ``b`` have the same nesting."""
    if isinstance(a, int) or isinstance(b, int):
        return isinstance(a, int) and isinstance(b, int)
    return len(a) == len(b) and all(map(congruent, a, b))


def compact_strides(shape: IntTuple, first: int = 1) -> IntTuple:
    """Return strides that number the coordinates of ``shape`` without gaps, the leftmost mode fastest."""
    if isinstance(shape, int):
        return first
    strides = []
    for part in shape:
        strides.append(compact_strides(part, first))
        first *= product(part)
    return tuple(strides)


def coordinate(index: int, shape: IntTuple) -> IntTuple:
    """Return the coordinate in ``shape`` with number ``index``, the leftmost fastest (colexicographic order)."""
    if isinstance(shape, int):
        return index
    parts = []
    for n, part in enumerate(shape):
        size = product(part)
        # The last mode takes the rest, so that an index past the end stays distinct.
        parts.append(coordinate(index if n == len(shape) - 1 else index % size, part))
        index //= size
    return tuple(parts)


def text(t: IntTuple) -> str:
    """Return ``t`` as CuTe prints it: ``((8,16),(64,4))``."""
    return str(t) if isinstance(t, int) else f"({','.join(map(text, t))})"
