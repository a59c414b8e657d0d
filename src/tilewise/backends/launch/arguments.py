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


def strided_rows(x: Tensor | None) -> Strided:
    """The same of a tensor that is not broadcast, as q, k, v and what is made of them: nobody steps along its axes of
    size 1, so that `keeps` strides, and a launch for other sizes takes all as they are."""
    if x is None:
        return Strided(None, 0, 0, 0, 0)
    return Strided(None, *(0 if n == 1 and not keeps(s) else s for n, s in zip(x.shape, x.stride(), strict=True)))


def keeps(stride: int) -> bool:
    """Whether an axis of size 1 keeps its stride, which TMA can step by, and which Triton takes for 0's like."""
    return stride & 15 == 0 and 0 < stride < 2**31


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
    those `tilewise.spec.tma` has looked at. shape: another than the tensor's.
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
    row = row_width(shape[3], itemsize)
    pairs = zip(shape[:3], strides[:3], strict=True)
    return *[row if n == 1 and not keeps(s) else s for n, s in pairs], 1


# --- for other sizes ---

# Where in values of a launch layouts' tensors stand, each by its shape and, next to that, its strides; of a `Record` a
# tuple.
Places = Sequence["int | tuple[int | None, ...] | None"]


def row_width(columns: int, itemsize: int) -> int:
    """Elements of a row filled up to 16 bytes."""
    return (columns * itemsize + 15) // 16 * 16 // itemsize


def placed(layout: Any, at: Any, values: Sequence[Any]) -> Any:
    """``layout`` of a tensor that lies as ``values`` say from number ``at`` on; as it is where that is None. Axes of
    size 1 are the same, and where one does not keep its stride it has the layout's."""
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
    """Whether each stride is the tensor's own, not what its layout has for an axis of size 1."""
    if isinstance(layout, Strided):
        pairs = zip(shape, strides, layout[1:], strict=True)
        return [n != 1 or (before != 0 and keeps(s)) for n, s, before in pairs]
    if len(shape) < 4:
        return [True] * len(shape)
    return [*[n != 1 or keeps(s) for n, s in zip(shape[:3], strides[:3], strict=True)], strides[3] == 1]


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
