"""Linear layouts of Gluon's `NVMMASharedLayout`.

They are operands of `tilewise.layouts.operand`, atoms strided dimension first, with three differences: dimensions
before the last two join the strided one; a TMA box has at most 256 indices per side, and boxes are ordered dimension 0
first; without a swizzle a tile is row-major up to a box, which an instruction can read only if a row has 16 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from tilewise.layouts.linear import LinearLayout, is_power_of_two
from tilewise.layouts.operand import LINES, LayoutError, SwizzleMode, element_bits

BOX = 256  # the longest side of a TMA box


def default_swizzle(shape: Sequence[int], dtype: object, transposed: bool = False) -> SwizzleMode:
    """Return the swizzle of ``NVMMASharedLayout.get_default_for``: the widest that divides a contiguous row.

    NONE for a tile of fewer than 8 rows.
    """
    rows, row = _collapsed(shape, transposed)
    width = row * element_bits(dtype) // 8
    fits = [mode for mode in SwizzleMode if mode and width % mode == 0]
    return max(fits, default=SwizzleMode.NONE) if len(shape) > 1 and rows >= LINES else SwizzleMode.NONE


def nvmma_shared_layout(
    shape: Sequence[int], dtype: object, swizzle: int | None = None, transposed: bool = False
) -> LinearLayout:
    """Return the linear layout of ``gl.NVMMASharedLayout(swizzle, bits, len(shape), transposed)``, for one CTA.

    Args:
        shape: of the tile in elements, powers of two, the last dimension contiguous.
        dtype: a name, a torch dtype or a number of bits, 8 to 32, as for `element_bits`.
        swizzle: 0, 32, 64 or 128 bytes; None for `default_swizzle`.
        transposed: if True, dimension 0 of two is the contiguous one. Triton ignores it without a swizzle.

    Returns:
        Layout from ``offset``, in elements (and ``block``, of size 1), to ``dim0``, ``dim1``, ...

    Raises:
        LayoutError: a size that is not a power of two, a tile smaller than an atom, or three dimensions transposed.
    """
    bits = element_bits(dtype)
    if bits == 4:
        raise LayoutError("dtype: must have 8 bits or more, got 4: Triton stores 4-bit elements in pairs, as bytes")
    if any(not is_power_of_two(size) for size in shape):
        raise LayoutError(f"shape: must be powers of two, as Triton's tiles are, got {tuple(shape)}")
    rank = len(shape)
    if transposed and rank != 2:
        raise LayoutError(f"transposed: must be False for {rank} dimensions, got True: Triton transposes matrices only")
    mode = default_swizzle(shape, bits, transposed) if swizzle is None else SwizzleMode.of(swizzle)
    names = [f"dim{d}" for d in range(rank)]
    # Order of the dimensions: the contiguous one first, then the strided ones from the last.
    order = list(range(rank))[::-1]
    if transposed and mode:
        order = [0, 1]
    box = [min(size, BOX) for size in shape]
    if mode:
        line = 8 * mode.width // bits
        box[order[0]] = line
        rows = math.prod(box[d] for d in order[1:])
        if shape[order[0]] < line or rows < LINES:
            raise LayoutError(
                f"shape: must have {LINES} rows of {line} elements or more, got {tuple(shape)}: shared memory holds "
                f"whole swizzle atoms, {LINES} rows by {mode.width} bytes"
            )
    bases = []
    for d in order:
        bases += [[1 << bit if axis == d else 0 for axis in range(rank)] for bit in range(box[d].bit_length() - 1)]
    if mode:
        # Units of line i of an atom are permuted by XOR with i, or with its higher bits if lines are shorter than 128
        # bytes.
        swizzle_of = mode.of_offsets(bits)
        first = line.bit_length() - 1
        for bit in range(first, first + 3):
            bases[bit][order[0]] = swizzle_of(1 << bit) & (line - 1)
    for d in range(rank) if mode else order:  # further boxes
        bases += [
            [1 << bit if axis == d else 0 for axis in range(rank)]
            for bit in range(box[d].bit_length() - 1, shape[d].bit_length() - 1)
        ]
    return LinearLayout.of({"offset": bases, "block": []}, dict(zip(names, shape, strict=True)))


def _collapsed(shape: Sequence[int], transposed: bool) -> tuple[int, int]:
    """Return (rows, row): the product of the strided dimensions, and the contiguous one."""
    sizes = [*shape[1:], shape[0]] if transposed else list(shape)
    return math.prod(sizes[:-1]), sizes[-1]
