"""Checks of layouts: bank conflicts of an access, and the first difference of two layouts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tilewise.layouts.cute import ComposedLayout, Layout
from tilewise.layouts.linear import LinearLayout
from tilewise.layouts.operand import LINES, UNIT_BYTES, LayoutError, Major, Operand

BANKS = 32
BANK_BYTES = 4
WARP = 32


# Bank conflicts


@dataclass(frozen=True)
class Access:
    """Cost of one instruction of a warp: wavefronts (passes over the banks), and the fewest for its bytes."""

    wavefronts: int
    ideal: int

    @property
    def conflict_free(self) -> bool:
        return self.wavefronts == self.ideal


def wavefronts(addresses: Sequence[int | None], width: int) -> Access:
    """Return the wavefronts of an access of a warp: passes over the 32 banks of 4 bytes each.

    A pass serves 128 bytes: 32, 16 or 8 threads at a time for accesses of up to 4, of 8 and of 16 bytes. Threads that
    access the same 4-byte word share it; different words in one bank are serialized. This is the model of the CUDA
    programming guide and of the profilers; it counts data passes, not the issue of the instruction.

    Args:
        addresses: byte addresses of threads 0, 1, ... of the warp; None for an inactive thread.
        width: bytes per thread: 1, 2, 4, 8 or 16.

    Raises:
        LayoutError: too many threads, another width, or an address that is not a multiple of it.
    """
    if width not in (1, 2, 4, 8, 16):
        raise LayoutError(f"width: must be 1, 2, 4, 8 or 16 bytes, got {width}: a thread has no other access")
    if len(addresses) > WARP:
        raise LayoutError(f"addresses: must be at most {WARP}, got {len(addresses)}: a warp has no more threads")
    for thread, address in enumerate(addresses):
        if address is not None and address % width:
            raise LayoutError(
                f"addresses[{thread}]: must be a multiple of {width}, got {address}: an access is aligned to its width"
            )
    threads = WARP if width <= BANK_BYTES else WARP * BANK_BYTES // width
    total = ideal = 0
    for first in range(0, len(addresses), threads):
        words = {
            (address + byte) // BANK_BYTES
            for address in addresses[first : first + threads]
            if address is not None
            for byte in range(0, width, BANK_BYTES)
        }
        in_bank = [0] * BANKS
        for word in words:
            in_bank[word % BANKS] += 1
        total += max(in_bank)
        ideal += -(-len(words) // BANKS)
    return Access(total, ideal)


def element_addresses(operand: Operand, elements: Sequence[tuple[int, int] | None]) -> list[int | None]:
    """Return the byte offsets of elements (mn, k), one per thread of a warp; None for an inactive thread."""
    return [None if element is None else operand.byte_offset(*element) for element in elements]


def matrix_addresses(operand: Operand, mn: int, k: int, matrices: int = 4) -> list[int | None]:
    """Return the byte offsets for ldmatrix and stmatrix of 1, 2 or 4 matrices of 8 rows by 16 bytes.

    A row runs along the leading dimension: an MN-major operand needs the instruction with ``.trans``. Matrices 0 and 1
    are consecutive in the strided dimension from element (mn, k), 2 and 3 are next to them, as in the fragments of
    mma.sync's A. `wavefronts` of these addresses, with width 16, tells if they conflict.

    Raises:
        LayoutError: another number of matrices, or rows that do not begin at a 16-byte unit.
    """
    if matrices not in (1, 2, 4):
        raise LayoutError(f"matrices: must be 1, 2 or 4, got {matrices}: ldmatrix and stmatrix have .x1, .x2 and .x4")
    strided, leading = (mn, k) if operand.major is Major.K else (k, mn)
    if leading % operand.unit:
        name = "k" if operand.major is Major.K else "mn"
        raise LayoutError(
            f"{name}: must be a multiple of {operand.unit}, got {leading}: a matrix row is {UNIT_BYTES} aligned bytes"
        )
    result: list[int | None] = []
    for matrix in range(matrices):
        for row in range(LINES):
            s, position = strided + LINES * (matrix % 2) + row, leading + operand.unit * (matrix // 2)
            result.append(operand.byte_offset(*((s, position) if operand.major is Major.K else (position, s))))
    return result


# Agreement

Places = Operand | Layout | ComposedLayout | LinearLayout | Callable[[int, int], int]


@dataclass(frozen=True)
class Difference:
    """First element at which two layouts differ, and its two offsets."""

    element: tuple[int, int]
    first: int
    second: int

    def __str__(self) -> str:
        return f"element {self.element} is at offset {self.first} in the first layout, {self.second} in the second"


def first_difference(a: Places, b: Places, shape: tuple[int, int]) -> Difference | None:
    """Return the first difference of two layouts of a tile, the last dimension fastest. None if they are equal.

    Offsets are in elements. A layout is an `Operand`, a CuTe layout from (mn, k), a linear layout from ``offset`` to
    two dimensions, as in Triton, or a function of (mn, k).

    Raises:
        LayoutError: a layout whose tile has another shape.
    """
    first, second = _places(a, shape), _places(b, shape)
    for mn in range(shape[0]):
        for k in range(shape[1]):
            x, y = first(mn, k), second(mn, k)
            if x != y:
                return Difference((mn, k), x, y)
    return None


def _places(layout: Places, shape: tuple[int, int]) -> Callable[[int, int], int]:
    found: tuple[int, ...]
    function: Callable[[int, int], int]
    if isinstance(layout, Operand):
        found, function = layout.shape, layout.offset
    elif isinstance(layout, LinearLayout):
        found, function = tuple(size for _, size in layout.outputs), _inverse(layout)
    elif isinstance(layout, (Layout, ComposedLayout)):
        plain = layout if isinstance(layout, Layout) else layout.layout
        found, function = tuple(mode.size for mode in plain.modes), layout.__call__
    else:
        return layout
    if found != shape:
        raise LayoutError(f"shape: must be that of both layouts, got {shape} for a layout of {found}")
    return function


def _inverse(layout: LinearLayout) -> Callable[[int, int], int]:
    """Return the function from two coordinates to the offset. Inputs of size 1 (Triton's ``block``) are left out."""
    inverse = LinearLayout(tuple((name, bases) for name, bases in layout.inputs if bases), layout.outputs).invert()
    names = [name for name, _ in layout.outputs]
    return lambda *element: inverse(**dict(zip(names, element, strict=True)))[0]
