"""How tensors reach kernels: by pointer and strides, by TMA, several as one parameter, or as a plain pointer.

A layout is a kernel's argument without its tensor; `launcher` says what becomes of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor


class Strided(NamedTuple):
    """A four-dimensional tensor for pointer arithmetic, in elements; a broadcast axis has stride 0."""

    pointer: Any
    stride0: int
    stride1: int
    stride2: int
    stride3: int


POINTER = "pointer"


class Record(NamedTuple):
    """The layout of several tensors that are one parameter of a kernel, a named tuple of ``kind``.

    layouts: `Strided` or `POINTER` for each. A call gives its tensors one after the other, like all others.
    """

    kind: Any
    layouts: tuple[Any, ...]


def strided(x: Tensor | None) -> Strided:
    """The layout of a tensor that is read by pointer."""
    if x is None:
        return Strided(None, 0, 0, 0, 0)
    return Strided(None, *(0 if n == 1 else s for n, s in zip(x.shape, x.stride(), strict=True)))


def strided_if_any(x: Tensor | None) -> Any:
    """The same of what most calls lack: without one the kernel is compiled as if it knew of none."""
    return POINTER if x is None else strided(x)


def sink_layout(sink: Tensor | None) -> Any:
    """A sink (B|1, H|1, M|1), of rows of one element."""
    return strided_if_any(None if sink is None else sink[..., None])


_templates: dict[tuple, Any] = {}


def boxed(
    kind: Any, x: Tensor, strides: Sequence[int], box: Sequence[int], *shared: Any, shape: Sequence[int] | None = None
) -> Any:
    """The layout of a tensor that is read by TMA in boxes, a descriptor of ``kind`` without its tensor.

    The first with such a box passes the descriptor's checks; of another tensor only sizes and strides are new, and
    those `tilewise.memory` has looked at. shape: another than the tensor's.
    """
    shape = list(x.shape if shape is None else shape)
    key = (kind, x.dtype, *box)
    template = _templates.get(key)
    if template is None:
        _templates[key] = template = bound(kind(x, shape, list(strides), list(box), *shared), None)
    return bound(template, None, shape=shape, strides=list(strides))


def bound(layout: Any, x: Tensor | None, **other: Any) -> Any:
    """The kernel argument of ``x`` in its layout; of None for a descriptor: the layout itself, freed of its tensor.

    other: what a descriptor gets beside it.
    """
    if layout is POINTER:
        return x
    if isinstance(layout, Strided):
        return Strided(x, *layout[1:])
    copy = object.__new__(type(layout))  # a descriptor, without the checks that the layout has passed already
    copy.__dict__.update(layout.__dict__, base=x, **other)
    return copy


def row_strides(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> Sequence[int]:
    """Strides of a descriptor of four axes, which must be multiples of 16 bytes also along an axis of size 1."""
    (a, b, c, d), (s, t, u, _) = shape, strides
    if a != 1 != b and c != 1:
        return s, t, u, 1
    row = (d * itemsize + 15) // 16 * 16 // itemsize
    return row if a == 1 else s, row if b == 1 else t, row if c == 1 else u, 1


# --- for other sizes ---

# What a resized launch is filled from: one flat tuple, `place` after `place`, and these at its end.
ENDS = (None, 0, 1)
_NONE, _ZERO, _ONE = -3, -2, -1
PLACE = 9  # numbers of a tensor of four axes


def place(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """How a tensor of four axes lies: shape, strides, and what a descriptor steps by along an axis of size 1, see
    `row_strides`. Of other tensors, of which only descriptors are resized, shape and strides alone."""
    return (*shape, *strides, (shape[3] * itemsize + 15) // 16 * 16 // itemsize)


Indices = tuple[int, ...]
Places = Sequence["int | tuple[int | None, ...] | None"]  # where layouts' tensors begin; of a `Record` a tuple


def places_of(layout: Any, begin: Any, numbers: Sequence[Any]) -> Any:
    """Where in ``numbers`` stand those of a layout whose tensor's begin at ``begin``: strides by pointer, shape and
    strides of a descriptor; a list of those of a `Record`. None where it stays as it is.

    Which axes are of size 1 is asked of these numbers once: it is the same for all sizes.
    """
    if begin is None or layout is POINTER:
        return None
    if isinstance(layout, Record):
        return [places_of(x, at, numbers) for x, at in zip(layout.layouts, begin, strict=True)]
    if isinstance(layout, Strided):
        return tuple([_ZERO if numbers[begin + n] == 1 else begin + 4 + n for n in range(4)])
    axes = len(layout.shape)
    if axes != 4:
        return tuple(range(begin, begin + 2 * axes))
    strides = [begin + (8 if numbers[begin + n] == 1 else 4 + n) for n in range(3)]
    return (*range(begin, begin + 4), *strides, _ONE)


def joined(one: Indices, other: Indices) -> Indices:
    """Of two descriptors that are neighbours among a launch's arguments; between them is room for the second."""
    return (*one, _NONE, *other)


def placed(layout: Any, places: Any, numbers: Sequence[Any]) -> Any:
    """``layout`` with the numbers that `places_of` says."""
    if places is None:
        return layout
    if isinstance(layout, Record):
        return Record(layout.kind, tuple([placed(x, y, numbers) for x, y in zip(layout.layouts, places, strict=True)]))
    found = [numbers[n] for n in places]
    if isinstance(layout, Strided):
        return Strided(None, *found)
    axes = len(found) // 2
    return bound(layout, None, shape=found[:axes], strides=found[axes:])


def layout_kind(layout: Any) -> Any:
    if layout is POINTER:
        return None
    if isinstance(layout, Strided):
        return "strided"
    if isinstance(layout, Record):
        return layout.kind, *map(layout_kind, layout.layouts)
    return tuple(layout.block_shape), getattr(layout, "layout", None), getattr(layout, "padding", None)


def strides_of(layouts: Sequence[Any]) -> list[int]:
    """All strides of layouts by pointer."""
    found: list[int] = []
    for x in layouts:
        if isinstance(x, Strided):
            found += x[1:]
        elif isinstance(x, Record):
            for y in x.layouts:
                found += () if y is POINTER else y[1:]
    return found
