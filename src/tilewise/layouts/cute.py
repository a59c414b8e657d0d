"""CuTe's layout algebra: functions from coordinates to offsets, written shape:stride.

A layout maps a coordinate to the inner product of coordinate and strides. A coordinate may be given at any depth: an
integer is the number of a coordinate, with the leftmost mode fastest. Operations and laws are those of CUTLASS's "CuTe
layout algebra"; the tests check each law in these docstrings by enumeration.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from tilewise.layouts.int_tuple import IntTuple, compact_strides, congruent, flatten, product, text


@dataclass(frozen=True)
class Layout:
    """Layout ``shape:stride``, two congruent nested tuples. Default strides are compact, the leftmost mode fastest.

    Raises:
        ValueError: the tuples are not congruent, a size is below 1 or a stride below 0.
    """

    shape: IntTuple
    stride: IntTuple | None = None

    def __post_init__(self) -> None:
        if self.stride is None:
            object.__setattr__(self, "stride", compact_strides(self.shape))
        if not congruent(self.shape, self._stride):
            raise ValueError(f"stride must be nested as shape {text(self.shape)} is, got {text(self._stride)}")
        if any(size < 1 for size in flatten(self.shape)) or any(d < 0 for d in flatten(self._stride)):
            raise ValueError(f"sizes are at least 1 and strides at least 0, got {self}")

    @property
    def _stride(self) -> IntTuple:
        assert self.stride is not None
        return self.stride

    @property
    def size(self) -> int:
        """Number of coordinates."""
        return product(self.shape)

    @property
    def cosize(self) -> int:
        """One more than the largest offset."""
        return 1 + sum((size - 1) * d for size, d in self.flat())

    @cached_property
    def modes(self) -> tuple[Layout, ...]:
        """The layouts of the top-level modes."""
        if isinstance(self.shape, int):
            return (self,)
        assert not isinstance(self._stride, int)
        return tuple(Layout(s, d) for s, d in zip(self.shape, self._stride, strict=True))

    def flat(self) -> list[tuple[int, int]]:
        """Return (size, stride) of each innermost mode."""
        return list(self._flat)

    @cached_property
    def _flat(self) -> tuple[tuple[int, int], ...]:
        return tuple(zip(flatten(self.shape), flatten(self._stride), strict=True))

    def _at(self, index: int) -> int:
        """Return the offset of the coordinate with this number; the last mode takes the rest."""
        result, last = 0, len(self._flat) - 1
        for n, (size, stride) in enumerate(self._flat):
            result += stride * (index % size if n < last else index)
            index //= size
        return result

    def __call__(self, *coord: IntTuple) -> int:
        """Return the offset of a coordinate: one integer, or one argument per mode, each an integer or nested."""
        given = coord[0] if len(coord) == 1 else coord
        if isinstance(given, int):
            return self._at(given)
        modes = self.modes
        if isinstance(self.shape, int):
            raise ValueError(f"coordinate {text(given)} is nested deeper than shape {text(self.shape)}")
        if len(given) != len(modes):
            raise ValueError(f"coordinate {text(given)} does not fit shape {text(self.shape)}")
        return sum(mode._at(c) if isinstance(c, int) else mode(c) for mode, c in zip(modes, given, strict=True))

    def __str__(self) -> str:
        return f"{text(self.shape)}:{text(self._stride)}"


@dataclass(frozen=True)
class Swizzle:
    """Swizzle ``Swizzle<B,M,S>``: XORs the B bits of an offset from bit M+S onto the B bits from bit M.

    With S at least B it is its own inverse, and linear over F2. ``Swizzle<3,4,3>`` of the byte offset permutes the
    16-byte units of a 128-byte line.

    Raises:
        ValueError: a negative number, or S below B, where the two groups of bits would overlap.
    """

    bits: int
    base: int
    shift: int

    def __post_init__(self) -> None:
        if self.bits < 0 or self.base < 0 or self.shift < self.bits:
            raise ValueError(f"{self} needs B >= 0, M >= 0 and S >= B")

    def __call__(self, offset: int) -> int:
        mask = ((1 << self.bits) - 1) << (self.base + self.shift)
        return offset ^ ((offset & mask) >> self.shift)

    def __str__(self) -> str:
        return f"Swizzle<{self.bits},{self.base},{self.shift}>"


@dataclass(frozen=True)
class ComposedLayout:
    """Layout ``swizzle o layout``: the swizzle applied to a layout's offsets."""

    swizzle: Swizzle
    layout: Layout

    def __call__(self, *coord: IntTuple) -> int:
        return self.swizzle(self.layout(*coord))

    def __str__(self) -> str:
        return f"{self.swizzle} o {self.layout}"


def concatenate(*layouts: Layout) -> Layout:
    """Return the layout with these modes; its offset is the sum of theirs."""
    return Layout(tuple(a.shape for a in layouts), tuple(a._stride for a in layouts))


def _from_flat(modes: list[tuple[int, int]]) -> Layout:
    if not modes:
        return Layout(1, 0)
    if len(modes) == 1:
        return Layout(*modes[0])
    return Layout(tuple(s for s, _ in modes), tuple(d for _, d in modes))


def coalesce(layout: Layout) -> Layout:
    """Return an equal function of the integer coordinate with the fewest modes, at most one level deep.

    ``coalesce(A)(i) == A(i)`` for every ``i < A.size``.
    """
    result: list[tuple[int, int]] = []
    for size, stride in layout.flat():
        if size == 1:
            continue
        if result and result[-1][0] * result[-1][1] == stride:
            result[-1] = (result[-1][0] * size, result[-1][1])
        else:
            result.append((size, stride))
    return _from_flat(result)


def composition(a: Layout, b: Layout | tuple[Layout, ...]) -> Layout:
    """Return the layout ``composition(A, B)(c) == A(B(c))``, with B's shape. A tuple of layouts is applied by mode.

    Raises:
        ValueError: a mode of B and the modes of A do not divide one another, so that in general no layout is that
            function.
    """
    if isinstance(b, tuple):
        modes = a.modes
        if len(b) > len(modes):
            raise ValueError(f"{len(b)} modes cannot be taken of {a}")
        return concatenate(*(composition(m, n) for m, n in zip(modes, b, strict=False)), *modes[len(b) :])
    if isinstance(b.shape, int):
        assert isinstance(b._stride, int)
        return _take(a, b.shape, b._stride)
    return concatenate(*(composition(a, mode) for mode in b.modes))


def _take(a: Layout, size: int, stride: int) -> Layout:
    """Return ``size`` coordinates of A, every ``stride``-th."""
    if size == 1 or stride == 0:
        return Layout(size, 0)
    result: list[tuple[int, int]] = []
    modes = coalesce(a).flat()
    for n, (extent, d) in enumerate(modes):
        if n == len(modes) - 1:
            result.append((size, stride * d))  # the last mode is unbounded
            break
        if stride >= extent:
            if stride % extent:
                raise ValueError(f"stride {stride} and size {extent} in {a} do not divide one another")
            stride //= extent
            continue
        if extent % stride:
            raise ValueError(f"stride {stride} does not divide size {extent} in {a}")
        here = min(size, extent // stride)
        if size % here:
            raise ValueError(f"{size} elements cannot be taken from modes of {here} in {a}")
        result.append((here, stride * d))
        size //= here
        stride = 1
        if size == 1:
            break
    return coalesce(_from_flat(result)) if len(result) > 1 else _from_flat(result)


def complement(layout: Layout, cotarget: int) -> Layout:
    """Return the layout of the offsets between copies of A that fill the integers below ``cotarget``.

    The range is rounded up to whole copies. With ``R = complement(A, M)``: R is ordered, R's offsets and A's have only
    0 in common, and every integer below M is ``A(i) + R(j)`` for one pair (i, j) if A is injective and its cosize
    divides M.

    Raises:
        ValueError: A is not injective, or its strides do not divide one another.
    """
    result: list[tuple[int, int]] = []
    current = 1
    modes = [(d, s) for s, d in layout.flat() if s > 1]
    for stride, size in sorted(modes):
        if stride == 0 or stride % current:
            raise ValueError(f"{layout} has no complement: stride {stride} is no multiple of {current}")
        result.append((stride // current, current))
        current = stride * size
    result.append((-(-cotarget // current), current))
    return coalesce(_from_flat(result))


def logical_divide(a: Layout, b: Layout | tuple[Layout, ...]) -> Layout:
    """Return A divided into tiles: mode 0 runs within a tile B, mode 1 over the tiles. A tuple is applied by mode.

    ``logical_divide(A, B) == composition(A, (B, complement(B, A.size)))``

    Raises:
        ValueError: copies of B do not fill A, or one of the two operations does not exist.
    """
    if isinstance(b, tuple):
        modes = a.modes
        if len(b) > len(modes):
            raise ValueError(f"{a} cannot be divided in {len(b)} modes")
        return concatenate(*(logical_divide(m, n) for m, n in zip(modes, b, strict=False)), *modes[len(b) :])
    rest = complement(b, a.size)
    if b.size * rest.size != a.size:
        raise ValueError(f"{a} has {a.size} elements, which tiles of {b} do not divide")
    return composition(a, concatenate(b, rest))


def logical_product(a: Layout, b: Layout) -> Layout:
    """Return copies of A placed by B: mode 0 runs within a copy, mode 1 over the copies.

    ``logical_product(A, B) == (A, composition(complement(A, A.size * B.cosize), B))``
    """
    return concatenate(a, composition(complement(a, a.size * b.cosize), b))


def right_inverse(layout: Layout) -> Layout:
    """Return R with ``A(R(i)) == i`` for every ``i < R.size``. Its size is that of the gapless offsets from 0."""
    result: list[tuple[int, int]] = []
    position, modes = 1, []
    for size, stride in coalesce(layout).flat():
        modes.append((stride, size, position))
        position *= size
    current = 1
    for stride, size, position in sorted(modes):
        if stride == current and size > 1:
            result.append((size, position))
            current *= size
    return coalesce(_from_flat(result))


def left_inverse(layout: Layout) -> Layout:
    """Return L with ``L(A(i)) == i`` for every ``i < A.size``.

    Raises:
        ValueError: A is not injective.
    """
    return right_inverse(concatenate(layout, complement(layout, layout.cosize)))
