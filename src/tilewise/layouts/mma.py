"""Operands of tensor-core instructions: their descriptors, and the share that an instruction reads.

One instruction reads 32 bytes of K (16 elements of 16 bits, 32 of 8) by M or N rows. A 64-bit descriptor in a register
has the start address, two strides and the swizzle. ``sm_90`` is wgmma (Hopper, MMAv3); ``sm_100`` is tcgen05.mma
(Blackwell, MMAv5), written from the PTX ISA and not tested on hardware.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from tilewise.layouts.cute import ComposedLayout, Layout, concatenate
from tilewise.layouts.operand import LINES, UNIT_BYTES, LayoutError, Major, Operand, SwizzleMode

K_BYTES = 32  # bytes of K per instruction, for every element type
REACH = 1 << 18  # descriptor fields count 16-byte units in 14 bits
NOT_USED = UNIT_BYTES  # the LBO of a swizzled K-major operand: "not used, assumed to be 1", a field of 1


class Arch(StrEnum):
    """GPU architecture with instructions that read operands from shared memory by descriptor."""

    SM_90 = "sm_90"
    SM_100 = "sm_100"


class Role(StrEnum):
    """Operand of D = A·B: A has M rows, B has N."""

    A = "a"
    B = "b"


# Name, lowest bit and number of bits of each field, and the value if it is constant.
_FIELDS: dict[Arch, list[tuple[str, int, int, int | None]]] = {
    Arch.SM_90: [
        ("start address", 0, 14, None),
        ("leading byte offset", 16, 14, None),
        ("stride byte offset", 32, 14, None),
        ("base offset", 49, 3, None),
        ("swizzle mode", 62, 2, None),
    ],
    Arch.SM_100: [
        ("start address", 0, 14, None),
        ("leading byte offset", 16, 14, None),
        ("stride byte offset", 32, 14, None),
        ("constant", 46, 3, 0b001),
        ("base offset", 49, 3, None),
        ("leading offset mode", 52, 1, 0),  # 0: relative, 1: absolute address (sm_103a only)
        ("reserved", 53, 8, 0),
        ("swizzle mode", 61, 3, None),
    ],
}
_SWIZZLE_CODES = {
    Arch.SM_90: {SwizzleMode.NONE: 0, SwizzleMode.B128: 1, SwizzleMode.B64: 2, SwizzleMode.B32: 3},
    Arch.SM_100: {SwizzleMode.NONE: 0, SwizzleMode.B128: 2, SwizzleMode.B64: 4, SwizzleMode.B32: 6},
}


class Field(NamedTuple):
    """Field of a descriptor: lowest and highest bit, value, and its meaning."""

    name: str
    low: int
    high: int
    value: int
    meaning: str


@dataclass(frozen=True)
class Descriptor:
    """Matrix descriptor, sizes in bytes.

    Source: PTX ISA, "Matrix descriptor format" (wgmma) and "Shared memory descriptor" (tcgen05).

    Raises:
        LayoutError: a size that is not a multiple of 16 bytes or does not fit its 14 bits.
    """

    arch: Arch
    start_address: int
    leading_byte_offset: int
    stride_byte_offset: int
    swizzle: SwizzleMode
    base_offset: int = 0

    def __post_init__(self) -> None:
        for name in ("start_address", "leading_byte_offset", "stride_byte_offset"):
            value = getattr(self, name)
            if value % UNIT_BYTES:
                raise LayoutError(
                    f"{name}: must be a multiple of 16, got {value}: a descriptor leaves out the 4 lowest bits"
                )
            if not 0 <= value < REACH:
                raise LayoutError(
                    f"{name}: must be below {REACH}, got {value}: a descriptor has 14 bits for it, over 4"
                )
        if not 0 <= self.base_offset < 8:
            raise LayoutError(f"base_offset: must be below 8, got {self.base_offset}: a descriptor has 3 bits for it")

    def fields(self) -> list[Field]:
        """Return all fields, the lowest bits first."""
        sizes = {
            "start address": self.start_address,
            "leading byte offset": self.leading_byte_offset,
            "stride byte offset": self.stride_byte_offset,
        }
        result = []
        for name, low, width, constant in _FIELDS[self.arch]:
            if constant is not None:
                value, meaning = constant, "always"
            elif name == "swizzle mode":
                value = _SWIZZLE_CODES[self.arch][self.swizzle]
                meaning = "none" if self.swizzle is SwizzleMode.NONE else f"{self.swizzle.value} bytes"
            elif name == "base offset":
                value, meaning = self.base_offset, "the swizzle's pattern begins at an aligned address"
            else:
                value, meaning = sizes[name] // UNIT_BYTES, f"{sizes[name]} bytes"
            result.append(Field(name, low, low + width - 1, value, meaning))
        return result

    def encode(self) -> int:
        """Return the 64 bits."""
        result = 0
        for field in self.fields():
            result |= field.value << field.low
        return result

    @staticmethod
    def decode(value: int, arch: Arch) -> Descriptor:
        """Return the descriptor with these 64 bits, the inverse of `encode`.

        Raises:
            LayoutError: a bit outside every field, a wrong constant, or an unknown swizzle mode.
        """
        found, known = {}, 0
        for name, low, width, constant in _FIELDS[arch]:
            found[name] = value >> low & ((1 << width) - 1)
            known |= ((1 << width) - 1) << low
            if constant is not None and found[name] != constant:
                raise LayoutError(f"value: bits {low} to {low + width - 1} must be {constant}, got {found[name]}")
        if value & ~known:
            raise LayoutError(f"value: has bits that no field of a descriptor for {arch.value} has, got {value:#x}")
        modes = {code: mode for mode, code in _SWIZZLE_CODES[arch].items()}
        if found["swizzle mode"] not in modes:
            raise LayoutError(f"value: swizzle mode {found['swizzle mode']} has no 16-byte units on {arch.value}")
        return Descriptor(
            arch,
            found["start address"] * UNIT_BYTES,
            found["leading byte offset"] * UNIT_BYTES,
            found["stride byte offset"] * UNIT_BYTES,
            modes[found["swizzle mode"]],
            found["base offset"],
        )


def descriptor_strides(operand: Operand) -> tuple[int, int]:
    """Return (LBO, SBO) for a descriptor, in bytes.

    They are the operand's `lbo` and `sbo`, with two exceptions: a swizzled K-major operand does not use LBO, and an
    MN-major operand without a swizzle exchanges them: SBO along MN, LBO along K (PTX ISA, "Major-ness supported by
    strides").
    """
    if operand.swizzle is SwizzleMode.NONE:
        return (operand.lbo, operand.sbo) if operand.major is Major.K else (operand.sbo, operand.lbo)
    return (NOT_USED, operand.sbo) if operand.major is Major.K else (operand.lbo, operand.sbo)


def check(operand: Operand, arch: Arch) -> None:
    """Check that the architecture's instructions can read the operand.

    Raises:
        LayoutError: they cannot; the message says why.
    """
    if operand.bits == 4 and arch is Arch.SM_90:
        raise LayoutError("bits: must be 8, 16 or 32 for wgmma (sm_90), got 4; sm_100 has 4-bit operands")
    if operand.major is Major.MN:
        if arch is Arch.SM_90 and operand.bits != 16:
            raise LayoutError(
                f"major: must be 'k' with bits={operand.bits}, got 'mn': wgmma (sm_90) transposes 16-bit operands only "
                "(PTX ISA, wgmma.mma_async, imm-trans-a and imm-trans-b)"
            )
        if arch is Arch.SM_100 and operand.bits == 32:
            raise LayoutError(
                "major: must be 'k' with bits=32, got 'mn': tcgen05 (sm_100) transposes tf32 only under the 128-byte "
                "swizzle that moves 32-byte units, which is not modelled here "
                "(PTX ISA, tcgen05, Transpose and negate operations)"
            )
        if arch is Arch.SM_100 and operand.bits == 4:
            raise LayoutError(
                "major: must be 'k' with bits=4, got 'mn': tcgen05 (sm_100) does not transpose packed 4-bit operands "
                "(kind::mxf4)"
            )
    step = 8 * K_BYTES // operand.bits
    if operand.shape[1] % step:
        raise LayoutError(
            f"shape[K]: must be a multiple of {step}, got {operand.shape[1]}: one instruction reads 32 bytes of K"
        )
    if operand.bytes > REACH:
        raise LayoutError(f"shape: must take at most {REACH} bytes, got {operand.bytes}: descriptors reach no further")


def check_base(operand: Operand, address: int) -> None:
    """Check that the operand may begin at this shared-memory address.

    Raises:
        LayoutError: it may not, because the swizzle's pattern depends on address bits, not on the operand.
    """
    needed = operand.swizzle.alignment
    if address % needed:
        raise LayoutError(
            f"address: must be a multiple of {needed}, got {address}: the pattern of the swizzle follows the address "
            "bits and repeats after 8 lines (elsewhere a descriptor needs a base offset, which is not supported here)"
        )


@dataclass(frozen=True)
class Instruction:
    """Share of an operand that one instruction reads: elements ``mn`` to ``mn + rows``, ``k`` to ``k + depth``.

    The start address in ``descriptor`` includes ``base``, the address of the operand.
    """

    operand: Operand
    descriptor: Descriptor
    mn: int
    k: int
    rows: int
    depth: int
    base: int = 0

    def units(self) -> list[int]:
        """Return the byte offsets in the operand of the 16-byte units that are read, leading index fastest.

        They follow from the descriptor alone, as in hardware: the canonical layout from the start address on, then the
        swizzle of the address bits.
        """
        o, d = self.operand, self.descriptor
        layout = canonical_layout(o, self.rows, self.depth, d.leading_byte_offset, d.stride_byte_offset).layout
        swizzle = d.swizzle.swizzle
        if o.major is Major.K:
            pairs = [(mn, k) for mn in range(self.rows) for k in range(0, self.depth, o.unit)]
        else:
            pairs = [(mn, k) for k in range(self.depth) for mn in range(0, self.rows, o.unit)]
        return [swizzle(d.start_address + layout(mn, k) // 8) - self.base for mn, k in pairs]


def instructions(
    operand: Operand, arch: Arch = Arch.SM_90, role: Role = Role.A, rows: int | None = None, base: int = 0
) -> Iterator[Instruction]:
    """Yield the instructions that together read the operand once, K fastest.

    Args:
        operand: the operand to read.
        arch: architecture of the instructions.
        role: A or B of the product.
        rows: M or N of one instruction. Default: 64 for A on sm_90, 128 (64 for a smaller tile) on sm_100; for B as
            many as possible up to 256.
        base: shared-memory address of the operand, in bytes.

    Raises:
        LayoutError: the hardware cannot read the operand this way; the message says why.
    """
    arch, role = Arch(arch), Role(role)
    check(operand, arch)
    check_base(operand, base)
    mn, k = operand.shape
    rows = _rows(operand, arch, role) if rows is None else rows
    allowed = ((64,) if arch is Arch.SM_90 else (64, 128)) if role is Role.A else range(8, 257, 8)
    if rows not in allowed:
        words = " or ".join(map(str, allowed)) if role is Role.A else "a multiple of 8 up to 256"
        raise LayoutError(f"rows: must be {words}, got {rows}: the sizes of the instructions of {arch.value}")
    extent = operand.atom_shape[0]
    if mn % rows or (rows % extent and extent % rows):
        raise LayoutError(
            f"rows: must divide shape[MN]={mn} and be whole atoms, or a whole part of one, of {extent}, got {rows}: an "
            "instruction's share begins at an atom or is inside one"
        )
    depth = 8 * K_BYTES // operand.bits
    lbo, sbo = descriptor_strides(operand)
    for row in range(0, mn, rows):
        for column in range(0, k, depth):
            # Both are on the first line of an atom, which the swizzle does not permute.
            start = base + operand.byte_offset(row, column)
            yield Instruction(
                operand, Descriptor(arch, start, lbo, sbo, operand.swizzle), row, column, rows, depth, base
            )


def _rows(operand: Operand, arch: Arch, role: Role) -> int:
    mn, extent = operand.shape[0], operand.atom_shape[0]
    if role is Role.A:
        return 128 if arch is Arch.SM_100 and mn % 128 == 0 else 64
    return max((n for n in range(8, 257, 8) if mn % n == 0 and not (n % extent and extent % n)), default=8)


def canonical(operand: Operand) -> str:
    """Return the operand's row of PTX's table of canonical layouts, without the swizzle, in elements.

    T is the number of elements in 16 bytes. K-major rows omit PTX's factor k, as in CUTLASS: an instruction reads two
    units along K.
    """
    w = operand.swizzle.width // UNIT_BYTES
    none = operand.swizzle is SwizzleMode.NONE
    if operand.major is Major.K:
        return f"((8,m),(T,2)):(({w}T,SBO),(1,{'LBO' if none else 'T'}))"
    along, across = ("SBO", "LBO") if none else ("LBO", "SBO")
    return f"((T,{w},m),(8,k)):((1,T,{along}),({w}T,{across}))"


def canonical_layout(operand: Operand, rows: int, depth: int, lbo: int, sbo: int) -> ComposedLayout:
    """Return the canonical layout with its numbers, for a share of ``rows`` × ``depth`` elements.

    ``lbo`` and ``sbo`` are the descriptor's. Offsets and `cute.Swizzle` are in bits, so one formula serves all
    elements.
    """
    w, unit = operand.swizzle.width // UNIT_BYTES, 8 * UNIT_BYTES
    none = operand.swizzle is SwizzleMode.NONE
    if operand.major is Major.K:
        first = Layout((LINES, rows // LINES), (w * unit, 8 * sbo))
        second = Layout((operand.unit, depth // operand.unit), (operand.bits, 8 * lbo if none else unit))
    else:
        along, across = (sbo, lbo) if none else (lbo, sbo)
        units = min(w, rows // operand.unit)
        first = Layout((operand.unit, units, rows // (operand.unit * units)), (operand.bits, unit, 8 * along))
        second = Layout((LINES, depth // LINES), (w * unit, 8 * across))
    return ComposedLayout(operand.swizzle.of_offsets(1), concatenate(first, second))
