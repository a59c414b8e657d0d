"""Model of an operand of a tensor-core instruction in shared memory.

An operand is an M×K tile of A or an N×K tile of B (written MN×K). Its *leading* dimension is contiguous: K if it is
K-major, MN if it is MN-major; the other is the *strided* one. Memory consists of *swizzle atoms*: 8 indices of the
strided dimension by s bytes of the leading one, where s is the width of the swizzle (16 without one), stored in 8·s
contiguous bytes. Within an atom, line i holds strided index i, and its 16-byte units are permuted by XOR with i; units
stay in their atom and are not permuted inside.

Sources: PTX ISA, "Shared memory matrix layout" of wgmma and "Canonical layouts" of tcgen05; CUTLASS's mma_traits; Peng
Chen, "The shared memory layout of Blackwell MMAv5 operands" (2026), for atoms, SBO and LBO as defined here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from functools import cached_property

from tilewise.layouts.convert import cute_to_linear
from tilewise.layouts.cute import ComposedLayout, Layout, Swizzle, concatenate
from tilewise.layouts.linear import LinearLayout

LINES = 8  # strided indices in an atom
UNIT_BYTES = 16  # the smallest unit that a swizzle moves: 128 bits


class LayoutError(ValueError):
    """Error for an operand that the hardware does not support; the message names the broken rule."""


class SwizzleMode(IntEnum):
    """Width of the swizzle in bytes. PTX calls NONE no swizzling or interleaved."""

    NONE = 0
    B32 = 32
    B64 = 64
    B128 = 128

    @staticmethod
    def of(width: int) -> SwizzleMode:
        """Return the mode of this width in bytes; raise LayoutError if there is none."""
        if width not in list(SwizzleMode):
            raise LayoutError(
                f"swizzle: must be one of 0, 32, 64, 128, got {width!r}: the widths that the hardware has"
            )
        return SwizzleMode(width)

    @property
    def width(self) -> int:
        """Bytes of an atom's line: the swizzle's width, or one unit without a swizzle."""
        return max(UNIT_BYTES, self.value)

    @property
    def swizzle(self) -> Swizzle:
        """Permutation of byte offsets: `Swizzle<B,4,3>` with B = 0, 1, 2, 3."""
        return self.of_offsets(8)

    def of_offsets(self, bits: int) -> Swizzle:
        """Return the permutation for offsets in elements of this many bits."""
        return Swizzle((self.width // UNIT_BYTES).bit_length() - 1, 7 - (bits.bit_length() - 1), 3)

    @property
    def alignment(self) -> int:
        """Period of the swizzle's pattern in bytes; an operand must begin at a multiple of it."""
        return LINES * self.width


class Major(StrEnum):
    """Dimension that is contiguous in memory."""

    K = "k"
    MN = "mn"


class AtomOrder(StrEnum):
    """Dimension along which consecutive atoms are neighbours. Triton and a TMA box of s bytes use the strided one."""

    STRIDED_FIRST = "strided"
    LEADING_FIRST = "leading"


WIDTHS = (4, 8, 16, 32)
DTYPES = {
    "float32": 32, "fp32": 32, "f32": 32, "tf32": 32, "float16": 16, "fp16": 16, "f16": 16, "half": 16,
    "bfloat16": 16, "bf16": 16, "float8_e4m3fn": 8, "float8_e5m2": 8, "fp8": 8, "e4m3": 8, "e5m2": 8, "int8": 8,
    "s8": 8, "uint8": 8, "u8": 8, "fp4": 4, "e2m1": 4,
}  # fmt: skip


def element_bits(dtype: object) -> int:
    """Return the bits of an element; ``dtype`` is a name such as ``"bf16"``, a torch dtype, or the number.

    Raises:
        LayoutError: an unknown name, or a width other than 4, 8, 16 and 32 bits.
    """
    if isinstance(dtype, int):
        bits: int | None = dtype
    else:
        bits = DTYPES.get(str(dtype).removeprefix("torch.").lower())
    if bits not in WIDTHS:
        # tcgen05 also takes 4- and 6-bit floats padded to 16 in a unit; their units have the layout of 8-bit elements.
        raise LayoutError(
            f"dtype: must have 4, 8, 16 or 32 bits (one of {', '.join(DTYPES)}), got {dtype!r}: "
            "tensor cores read no other width from shared memory"
        )
    return bits


@dataclass(frozen=True)
class Operand:
    """Tile of one operand in shared memory.

    Args:
        shape: (MN, K), in elements.
        bits: bits of an element: 4, 8, 16 or 32; see `element_bits`.
        swizzle: a `SwizzleMode` or its number of bytes, 0, 32, 64 or 128.
        major: a `Major` or its value: ``"k"`` or ``"mn"``.
        order: an `AtomOrder` or its value: ``"strided"`` or ``"leading"``.

    Raises:
        LayoutError: another value, or a tile that is not a whole number of atoms.
    """

    shape: tuple[int, int]
    bits: int
    swizzle: SwizzleMode = SwizzleMode.B128
    major: Major = Major.K
    order: AtomOrder = AtomOrder.STRIDED_FIRST

    def __post_init__(self) -> None:
        element_bits(self.bits)
        object.__setattr__(self, "swizzle", SwizzleMode.of(self.swizzle))
        for name, kind in (("major", Major), ("order", AtomOrder)):
            value = getattr(self, name)
            if value not in list(kind):
                allowed = ", ".join(member.value for member in kind)
                raise LayoutError(f"{name}: must be one of {allowed}, got {value!r}")
            object.__setattr__(self, name, kind(value))
        object.__setattr__(self, "shape", tuple(self.shape))
        if len(self.shape) != 2 or any(not isinstance(n, int) or n < 1 for n in self.shape):
            raise LayoutError(f"shape: must be (MN, K), two positive sizes, got {self.shape!r}")
        for name, size, step in zip(("MN", "K"), self.shape, self.atom_shape, strict=True):
            if size % step:
                raise LayoutError(
                    f"shape[{name}]: must be a multiple of {step}, got {size}: shared memory holds whole swizzle "
                    f"atoms, {LINES} rows of the strided dimension by {self.swizzle.width} bytes of the leading one"
                )

    # Sizes

    @cached_property
    def unit(self) -> int:
        """Elements in a 16-byte unit: the T of the PTX table."""
        return 8 * UNIT_BYTES // self.bits

    @cached_property
    def line(self) -> int:
        """Elements in an atom's line: its extent in the leading dimension."""
        return 8 * self.swizzle.width // self.bits

    @property
    def atom_shape(self) -> tuple[int, int]:
        """An atom's extents (MN, K), in elements."""
        return (LINES, self.line) if self.major is Major.K else (self.line, LINES)

    @property
    def atom_bytes(self) -> int:
        return LINES * self.swizzle.width

    @cached_property
    def grid(self) -> tuple[int, int]:
        """Number of atoms along (MN, K)."""
        return self.shape[0] // self.atom_shape[0], self.shape[1] // self.atom_shape[1]

    @property
    def bytes(self) -> int:
        """Bytes of the whole operand."""
        return self.shape[0] * self.shape[1] * self.bits // 8

    # Strides between atoms

    def _along(self, pair: tuple[int, int]) -> tuple[int, int]:
        """Return (MN, K) as (strided, leading), and back."""
        return pair if self.major is Major.K else (pair[1], pair[0])

    @cached_property
    def sbo(self) -> int:
        """Stride byte offset: bytes from an atom to its neighbour in the strided dimension."""
        if self.order is AtomOrder.STRIDED_FIRST:
            return self.atom_bytes
        return self.atom_bytes * self._along(self.grid)[1]

    @cached_property
    def lbo(self) -> int:
        """Leading byte offset: bytes from an atom to its neighbour in the leading dimension.

        The hardware ignores it for a swizzled K-major operand, since one instruction reads no second atom along K.
        """
        if self.order is AtomOrder.LEADING_FIRST:
            return self.atom_bytes
        return self.atom_bytes * self._along(self.grid)[0]

    @cached_property
    def _swizzle(self) -> Swizzle:
        """Swizzle of offsets in elements."""
        return self.swizzle.of_offsets(self.bits)

    # Places

    def offset(self, mn: int, k: int) -> int:
        """Return the offset of element (mn, k) from the operand's start, in elements.

        Raises:
            LayoutError: the element is outside the tile.
        """
        if not (0 <= mn < self.shape[0] and 0 <= k < self.shape[1]):
            raise LayoutError(f"element: must be inside the tile {self.shape}, got ({mn}, {k})")
        strided, leading = self._along((mn, k))
        atom = (strided // LINES) * self.sbo + (leading // self.line) * self.lbo
        inside = (strided % LINES) * self.line + leading % self.line
        return 8 * atom // self.bits + self._swizzle(inside)

    def byte_offset(self, mn: int, k: int) -> int:
        """Return the offset of element (mn, k) from the operand's start, in bytes.

        Two 4-bit elements share a byte: an even `offset` is the low half.
        """
        return self.offset(mn, k) * self.bits // 8

    def coordinates(self, offset: int) -> tuple[int, int]:
        """Return the element (mn, k) at ``offset``, in elements: the inverse of `offset`.

        Raises:
            LayoutError: the offset is outside the operand.
        """
        atom, inside = divmod(offset, LINES * self.line)
        strided_atoms, leading_atoms = self._along(self.grid)
        if not 0 <= atom < strided_atoms * leading_atoms:
            elements = self.shape[0] * self.shape[1]
            raise LayoutError(f"offset: must be inside the operand of {elements} elements, got {offset}")
        if self.order is AtomOrder.STRIDED_FIRST:
            leading_atom, strided_atom = divmod(atom, strided_atoms)
        else:
            strided_atom, leading_atom = divmod(atom, leading_atoms)
        line, place = divmod(self._swizzle(inside), self.line)
        return self._along((strided_atom * LINES + line, leading_atom * self.line + place))

    def units(self) -> Iterator[tuple[int, int]]:
        """Yield the first element (mn, k) of each 16-byte unit, strided index slow, leading index fast."""
        strided, leading = self._along(self.shape)
        for s in range(strided):
            for position in range(0, leading, self.unit):
                yield self._along((s, position))

    # Notations

    def cute(self) -> ComposedLayout:
        """Return the CuTe layout from (mn, k) to `offset`: ``Swizzle o ((8, ..), (s, ..))`` in elements."""
        strided_atoms, leading_atoms = self._along(self.grid)
        strided = Layout((LINES, strided_atoms), (self.line, 8 * self.sbo // self.bits))
        leading = Layout((self.line, leading_atoms), (1, 8 * self.lbo // self.bits))
        first, second = (strided, leading) if self.major is Major.K else (leading, strided)
        return ComposedLayout(self._swizzle, concatenate(first, second))

    def linear(self) -> LinearLayout:
        """Return Triton's linear layout from ``offset``, in elements, to (dim0, dim1) = (MN, K).

        Raises:
            LayoutError: a side of the tile is not a power of two; `cute` supports such tiles.
        """
        if any(n & (n - 1) for n in self.shape):
            raise LayoutError(f"shape: must be powers of two to be linear over F2, got {self.shape}")
        return cute_to_linear(self.cute(), ("dim0", "dim1")).invert()

    def atom(self) -> Operand:
        """Return an operand of one atom, with equal width, swizzle and major-ness."""
        return Operand(self.atom_shape, self.bits, self.swizzle, self.major, self.order)

    def __str__(self) -> str:
        mode = "no swizzle (interleaved)" if self.swizzle is SwizzleMode.NONE else f"{self.swizzle.value}-byte swizzle"
        first = "strided" if self.order is AtomOrder.STRIDED_FIRST else "leading"
        return (
            f"{self.shape[0]} x {self.shape[1]}, {self.bits}-bit, {self.major.value.upper()}-major, {mode}, "
            f"atoms {first} dimension first"
        )
