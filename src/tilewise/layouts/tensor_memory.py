"""Model of operand A of tcgen05.mma in tensor memory (Blackwell, MMAv5).

Tensor memory has 128 lanes by 512 columns of 32 bits. A lane holds a row of A, its K along the columns: 32 / bits
consecutive elements share a column, the first in the lowest bits. With M = 128, row m is in lane m. With M = 64, rows
are in 16 of each 32 lanes: a warp reaches 32, and so each of four warps holds a quarter of A. One instruction reads 32
bytes of K, which are 8 columns.

Written from documents and not tested on hardware, for `cta_group::1` without `.ws`. Sources: PTX ISA, "Tensor Memory
Addressing", "Packing formats of elements in Tensor and Shared memory", "Data Path Layout Organization" (layouts D and
F); CUTLASS's tmem_frg_1sm; Triton's TensorMemoryEncodingAttr.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from tilewise.layouts.linear import LinearLayout, is_power_of_two
from tilewise.layouts.mma import K_BYTES
from tilewise.layouts.operand import LayoutError, element_bits

LANES = 128
COLUMNS = 512
COLUMN_BITS = 32
HALF = 16  # lanes that M = 64 uses of the 32 of a warp
STEP = 8 * K_BYTES // COLUMN_BITS  # columns that one instruction reads
LEAST = 32  # columns of the smallest allocation


class Cell(NamedTuple):
    """Place in tensor memory: lane, column of 32 bits, and the lowest bit of the element in it."""

    lane: int
    column: int
    bit: int


@dataclass(frozen=True)
class TensorMemoryOperand:
    """Operand A of one tcgen05.mma after another along K, in tensor memory.

    Args:
        shape: (M, K), in elements: M is 64 or 128, K a multiple of 32 bytes.
        bits: bits of an element: 8, 16 or 32; see `element_bits`.
        address: where the operand begins, lane << 16 | column. The lane is 0, or with M = 64 also 16.

    Raises:
        LayoutError: another value, or an operand that ends past column 512.

    Example:
        >>> TensorMemoryOperand((64, 64), 16).cell(17, 5)
        Cell(lane=33, column=2, bit=16)
    """

    shape: tuple[int, int]
    bits: int
    address: int = 0

    def __post_init__(self) -> None:
        if element_bits(self.bits) == 4:
            raise LayoutError(
                "bits: must be 8, 16 or 32 for tensor memory, got 4: packed 4-bit elements are not modelled"
            )
        object.__setattr__(self, "shape", tuple(self.shape))
        if len(self.shape) != 2 or any(not isinstance(n, int) or n < 1 for n in self.shape):
            raise LayoutError(f"shape: must be (M, K), two positive sizes, got {self.shape!r}")
        if self.shape[0] not in (64, 128):
            raise LayoutError(
                f"shape[M]: must be 64 or 128 in tensor memory, got {self.shape[0]}: the rows of one instruction"
            )
        if self.shape[1] % self.depth:
            raise LayoutError(
                f"shape[K]: must be a multiple of {self.depth}, got {self.shape[1]}: "
                "one instruction reads 32 bytes of K"
            )
        lanes = (0,) if self.shape[0] == LANES else (0, HALF)
        if self.address >> 16 not in lanes:
            raise LayoutError(
                f"address: must have lane {' or '.join(map(str, lanes))} in its upper 16 bits, got {self.address:#x}: "
                f"{self.shape[0]} rows of A begin in no other"
            )
        if self.first_column + self.columns > COLUMNS:
            raise LayoutError(
                f"address: must leave {self.columns} of {COLUMNS} columns, got {self.address:#x}: K={self.shape[1]} of "
                f"{self.bits} bits takes {self.columns}, and tensor memory has no more"
            )

    @property
    def first_column(self) -> int:
        return self.address & 0xFFFF

    @property
    def packed(self) -> int:
        """Elements in a column of 32 bits."""
        return COLUMN_BITS // self.bits

    @property
    def depth(self) -> int:
        """Indices of K that one instruction reads."""
        return STEP * self.packed

    @property
    def columns(self) -> int:
        """Columns of 32 bits that the operand takes."""
        return self.shape[1] // self.packed

    @property
    def allocation(self) -> int:
        """Columns that tcgen05.alloc gives for it: a power of two from 32; an allocation has all lanes."""
        return max(LEAST, 1 << (self.columns - 1).bit_length())

    def cell(self, m: int, k: int) -> Cell:
        """Return the place of element (m, k).

        Raises:
            LayoutError: the element is outside the tile.
        """
        if not (0 <= m < self.shape[0] and 0 <= k < self.shape[1]):
            raise LayoutError(f"element: must be inside the tile {self.shape}, got ({m}, {k})")
        lane = m if self.shape[0] == LANES else m + m // HALF * HALF
        column, place = divmod(k, self.packed)
        return Cell((self.address >> 16) + lane, self.first_column + column, place * self.bits)

    def coordinates(self, cell: Cell) -> tuple[int, int] | None:
        """Return the element (m, k) with its lowest bit at ``cell``, the inverse of `cell`; None if there is none."""
        lane, column = cell.lane - (self.address >> 16), cell.column - self.first_column
        if not (0 <= lane < LANES and 0 <= column < self.columns and cell.bit in range(0, COLUMN_BITS, self.bits)):
            return None
        if self.shape[0] != LANES:
            if lane // HALF % 2:
                return None
            lane -= lane // (2 * HALF) * HALF
        return lane, column * self.packed + cell.bit // self.bits

    def addresses(self) -> list[int]:
        """Return the address of A in each instruction along K: 8 columns further each."""
        return [self.address + column for column in range(0, self.columns, STEP)]

    def linear(self) -> LinearLayout:
        """Return Triton's linear layout of the operand, as of Gluon's ``TensorMemoryLayout((M, K), 1)``.

        Its inputs are ``row``, a lane, and ``col``, an element in it: the column of 32 bits is col · bits // 32. Its
        outputs are dim0 = m and dim1 = k. With M = 64 the basis of the unused lanes is (0, 0). Lanes and columns are
        counted from `address`.

        Raises:
            LayoutError: K is not a power of two.
        """
        rows, k = self.shape
        if not is_power_of_two(k):
            raise LayoutError(f"shape: must be powers of two to be linear over F2, got {self.shape}")
        lanes = [1 << bit for bit in range(rows.bit_length() - 1)]
        if rows != LANES:
            lanes.insert(HALF.bit_length() - 1, 0)
        return LinearLayout.of(
            {"row": [(m, 0) for m in lanes], "col": [(0, 1 << bit) for bit in range(k.bit_length() - 1)]},
            {"dim0": rows, "dim1": k},
        )

    def __str__(self) -> str:
        return f"{self.shape[0]} x {self.shape[1]}, {self.bits}-bit, operand A in tensor memory"
