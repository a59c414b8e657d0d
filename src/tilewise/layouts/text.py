"""Text and terminal drawing of an operand."""

from __future__ import annotations

from tilewise.layouts.checks import matrix_addresses, wavefronts
from tilewise.layouts.linear import LinearLayout
from tilewise.layouts.mma import Arch, Instruction, Role, canonical, descriptor_strides
from tilewise.layouts.operand import LINES, UNIT_BYTES, Major, Operand, SwizzleMode

INSTRUCTIONS = {Arch.SM_90: "wgmma (Hopper)", Arch.SM_100: "tcgen05.mma (Blackwell, not verified on hardware)"}
MOST_ATOMS = 16  # per side, in a drawing


def facts(operand: Operand, shares: list[Instruction], role: Role, chosen: int = 0) -> list[str]:
    """Return lines with the facts about an operand, and about one of the instructions that read it."""
    o, share = operand, shares[chosen]
    arch = share.descriptor.arch
    return [
        str(o),
        "",
        *_table(
            [
                ("atom", f"{o.atom_shape[0]} x {o.atom_shape[1]} elements: {LINES} lines of {o.swizzle.width} bytes"),
                ("atoms", f"{o.grid[0]} x {o.grid[1]}, {o.atom_bytes} bytes each, {o.bytes} bytes in all"),
                ("unit", f"{UNIT_BYTES} bytes, T = {o.unit} elements"),
                *_strides(o),
                ("address", f"a multiple of {o.swizzle.alignment}"),
                ("CuTe", f"(mn, k) -> element: {o.cute()}"),
                ("canonical", f"{o.swizzle.swizzle} o {canonical(o)}, T = {o.unit}"),
                *_bank_line(o),
            ]
        ),
        "",
        *_linear(o),
        "",
        f"{arch.value}, {INSTRUCTIONS[arch]}: operand {role.value.upper()} in {len(shares)} instructions "
        f"of {share.rows} x {share.depth}",
        f"instruction {chosen} reads MN {share.mn} to {share.mn + share.rows - 1}, "
        f"K {share.k} to {share.k + share.depth - 1}; its descriptor for an operand at {share.base:#x}:",
        f"{share.descriptor.encode():#018x}",
        *(
            f"  {f'{field.low}-{field.high}':>5}  {field.name:<20} {field.value:>5}  {field.meaning}"
            for field in share.descriptor.fields()
        ),
    ]


def _table(rows: list[tuple[str, str]]) -> list[str]:
    return [f"{name:<10} {value}" for name, value in rows]


def _strides(o: Operand) -> list[tuple[str, str]]:
    strided, leading = ("MN", "K") if o.major is Major.K else ("K", "MN")
    note = ""
    if o.major is Major.K and o.swizzle:
        note = "; the instructions do not use it"
    rows = [
        ("SBO", f"{o.sbo} bytes between atoms {LINES} indices of {strided} apart"),
        ("LBO", f"{o.lbo} bytes between atoms {o.line} elements of {leading} apart{note}"),
    ]
    if o.major is Major.MN and o.swizzle is SwizzleMode.NONE:
        lbo, sbo = descriptor_strides(o)
        rows.append(("", f"in the descriptor the other way round: SBO {sbo}, along MN, and LBO {lbo}, along K"))
    return rows


def _bank_line(o: Operand) -> list[tuple[str, str]]:
    if o.bits != 16:  # ldmatrix and stmatrix move 16-bit elements
        return []
    matrices = 4 if min(o.shape) >= 16 else 1
    access = wavefronts(matrix_addresses(o, 0, 0, matrices), UNIT_BYTES)
    verdict = "no conflicts" if access.conflict_free else f"{access.ideal} would do"
    return [("ldmatrix", f".x{matrices} and stmatrix: {access.wavefronts} wavefronts, {verdict}")]


def _linear(o: Operand) -> list[str]:
    if any(n & (n - 1) for n in o.shape):
        return ["no linear layout over F2: a side is no power of two"]
    linear = o.linear()
    return ["linear layout of the tile, as Triton prints it:", *_with_block(linear).splitlines()]


def _with_block(linear: LinearLayout) -> str:
    """Return the layout's text with Triton's second input ``block``, the CTA, of size 1."""
    return str(LinearLayout((*linear.inputs, ("block", ())), linear.outputs))


def drawing(operand: Operand, share: Instruction) -> list[str]:
    """Return two drawings: the atoms in the tile, and the lines of the first atom that an instruction reads.

    Atoms are numbered by their position in memory. Within the atom, the instruction's 16-byte units are numbered within
    its share, strided index slow, leading index fast; other units are dots.
    """
    return [*_atoms(operand), "", *_atom(operand, share)]


def _atoms(o: Operand) -> list[str]:
    rows, columns = (min(n, MOST_ATOMS) for n in o.grid)
    size = len(str(o.grid[0] * o.grid[1] - 1))
    cut = "" if (rows, columns) == o.grid else f" (the first {rows} x {columns})"
    lines = [f"the tile, MN down, K across: atoms of {o.atom_shape[0]} x {o.atom_shape[1]}, numbered in memory{cut}"]
    for i in range(rows):
        numbers = (o.byte_offset(i * o.atom_shape[0], j * o.atom_shape[1]) // o.atom_bytes for j in range(columns))
        lines.append("  " + " ".join(f"{n:>{size}}" for n in numbers))
    return lines


def _atom(o: Operand, share: Instruction) -> list[str]:
    units = share.units()
    first = min(units) // o.atom_bytes * o.atom_bytes
    numbers = {place: number for number, place in enumerate(units)}
    width = o.swizzle.width
    size = max(2, len(str(max(n for place, n in numbers.items() if first <= place < first + o.atom_bytes))))
    lines = [f"atom {first // o.atom_bytes} in memory: numbers are the 16-byte units that the instruction reads there"]
    for line in range(LINES):
        start = first + line * width
        cells = [numbers.get(start + unit) for unit in range(0, width, UNIT_BYTES)]
        shown = " ".join(".".rjust(size) if n is None else f"{n:>{size}}" for n in cells)
        lines.append(f"  {f'{start} ~ {start + width - 1}':>15}  {shown}")
    return lines
