"""Kernel arguments of tensors: pointer and strides, TMA descriptor, plain pointer, or record.

A layout is a kernel argument without its tensor; `launcher` combines the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor


class Strided(NamedTuple):
    """Four-dimensional tensor as pointer and strides in elements; a broadcast axis has stride 0."""

    pointer: Any
    stride0: int
    stride1: int
    stride2: int
    stride3: int


POINTER = "pointer"


class Within(NamedTuple):
    """Plain pointer to an element of a one-dimensional tensor, ``offset`` bytes after its first: a multiple of 16."""

    element: int
    offset: int


class Record(NamedTuple):
    """Layout of several tensors that are one kernel parameter. A call passes them one after the other."""

    kind: Any  # the parameter's class, a named tuple
    layouts: tuple[Any, ...]  # `Strided` or `POINTER` of each tensor


def strided(x: Tensor | None) -> Strided:
    """Return the layout of a tensor that is read by pointer."""
    if x is None:
        return Strided(None, 0, 0, 0, 0)
    return Strided(None, *(0 if n == 1 else s for n, s in zip(x.shape, x.stride(), strict=True)))


def strided_rows(x: Tensor | None) -> Strided:
    """Like `strided`, for a tensor that never broadcasts (q, k, v, o, their gradients).

    Its axes of size 1 keep strides that pass `keeps`, so that a launch for other sizes takes the strides unchanged.
    """
    if x is None:
        return Strided(None, 0, 0, 0, 0)
    return Strided(None, *(0 if n == 1 and not keeps(s) else s for n, s in zip(x.shape, x.stride(), strict=True)))


def keeps(stride: int) -> bool:
    """True if an axis of size 1 keeps its stride: TMA accepts it, and Triton specializes it as it does 0."""
    return stride & 15 == 0 and 0 < stride < 2**31


def strided_if_any(x: Tensor | None) -> Any:
    """Like `strided`, but `POINTER` for None: a kernel is compiled without the absent tensor."""
    return POINTER if x is None else strided(x)


def sink_layout(sink: Tensor | None) -> Any:
    """Return the layout of a sink (B|1, H|1, M|1) as a tensor with a last axis of size 1."""
    return strided_if_any(None if sink is None else sink[..., None])


_templates: dict[tuple, Any] = {}


def boxed(
    kind: Any, x: Tensor, strides: Sequence[int], box: Sequence[int], *shared: Any, shape: Sequence[int] | None = None
) -> Any:
    """Return the layout of a tensor that is read by TMA in boxes: a ``kind`` without tensor.

    The first descriptor with a box runs the checks of ``kind``; later ones copy it with new sizes and strides, which
    `tilewise.spec.tma` has checked. shape: replaces the tensor's.
    """
    shape = list(x.shape if shape is None else shape)
    key = (kind, x.dtype, *box)
    template = _templates.get(key)
    if template is None:
        _templates[key] = template = bound(kind(x, shape, list(strides), list(box), *shared), None)
    return bound(template, None, shape=shape, strides=list(strides))


def bound(layout: Any, x: Tensor | None, **other: Any) -> Any:
    """Return the kernel argument of ``x``, or a descriptor without tensor. other: descriptor fields."""
    if layout is POINTER:
        return x
    if isinstance(layout, Strided):
        return Strided(x, *layout[1:])
    if isinstance(layout, Within):
        return None if x is None else x[layout.element :]
    copy = object.__new__(type(layout))  # skip the checks, which the layout has passed
    copy.__dict__.update(layout.__dict__, base=x, **other)
    return copy


def row_strides(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> Sequence[int]:
    """Return the strides of a descriptor of four axes: multiples of 16 bytes, also along axes of size 1."""
    row = row_width(shape[3], itemsize)
    pairs = zip(shape[:3], strides[:3], strict=True)
    return *[row if n == 1 and not keeps(s) else s for n, s in pairs], 1


# --- for other sizes ---

# For each layout the index of its tensor's shape in a launch's values, before its strides; a tuple for a `Record`.
Places = Sequence["int | tuple[int | None, ...] | None"]


def row_width(columns: int, itemsize: int) -> int:
    """Return the elements of a row padded to a multiple of 16 bytes."""
    return (columns * itemsize + 15) // 16 * 16 // itemsize


def placed(layout: Any, at: Any, values: Sequence[Any]) -> Any:
    """Return ``layout`` with the shape values[at] and strides values[at + 1]; unchanged if ``at`` is None.

    The same axes have size 1 as before. One that does not keep its stride takes the layout's.
    """
    if at is None or layout is POINTER:
        return layout
    if isinstance(layout, Record):
        return Record(layout.kind, tuple([placed(x, y, values) for x, y in zip(layout.layouts, at, strict=True)]))
    shape, strides = values[at], values[at + 1]
    fixed = layout[1:] if isinstance(layout, Strided) else layout.strides
    pairs = zip(fixed, strides, gives(layout, shape, strides), strict=True)
    strides = [own if given else x for x, own, given in pairs]
    if isinstance(layout, Strided):
        return Strided(None, *strides)
    return bound(layout, None, shape=list(shape), strides=strides)


def gives(layout: Any, shape: Sequence[int], strides: Sequence[int]) -> list[bool]:
    """Return for each axis True if the tensor's own stride is used, False if the layout's (for size 1) is."""
    if isinstance(layout, Strided):
        pairs = zip(shape, strides, layout[1:], strict=True)
        return [n != 1 or (before != 0 and keeps(s)) for n, s, before in pairs]
    if len(shape) < 4:
        return [True] * len(shape)
    return [*[n != 1 or keeps(s) for n, s in zip(shape[:3], strides[:3], strict=True)], strides[3] == 1]


def layout_kind(layout: Any) -> Any:
    if layout is POINTER or isinstance(layout, Within):
        return None
    if isinstance(layout, Strided):
        return "strided"
    if isinstance(layout, Record):
        return layout.kind, *map(layout_kind, layout.layouts)
    return tuple(layout.block_shape), getattr(layout, "layout", None), getattr(layout, "padding", None)


def strides_of(layouts: Sequence[Any]) -> list[int]:
    """Return all strides of layouts by pointer."""
    found: list[int] = []
    for x in layouts:
        if isinstance(x, Strided):
            found += x[1:]
        elif isinstance(x, Record):
            for y in x.layouts:
                found += () if y is POINTER else y[1:]
    return found
