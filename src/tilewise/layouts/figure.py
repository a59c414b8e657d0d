"""Figure of an operand: its atoms in the tile, and one atom in the matrix and in memory.

A `Scene` is boxes, words and lines in pixels, y downwards; `tilewise.layouts.svg` and `tilewise.layouts.png` write it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from tilewise.layouts.mma import Instruction
from tilewise.layouts.operand import LINES, UNIT_BYTES, Major, Operand, SwizzleMode

INK, FAINT, LINE, SHARE = "#1f2937", "#6b7280", "#cbd5e1", "#c2410c"
# One color per 16-byte unit of a line, to follow a column through the swizzle.
UNIT_COLORS = ("#dbeafe", "#fef3c7", "#dcfce7", "#fce7f3", "#ede9fe", "#ffedd5", "#cffafe", "#e5e7eb")
MARGIN, GAP, TOP = 24, 36, 92
CELL = (38, 24)  # a 16-byte unit
TILE = (400, 400)  # largest size of the panel of the tile


class Box(NamedTuple):
    x: float
    y: float
    width: float
    height: float
    fill: str = "none"
    stroke: str = LINE
    stroke_width: float = 1
    opacity: float = 1


class Words(NamedTuple):
    """Text; ``anchor`` is start, middle or end; ``y`` is the baseline."""

    x: float
    y: float
    text: str
    size: float = 12
    anchor: str = "start"
    color: str = INK
    bold: bool = False


class Arrow(NamedTuple):
    x1: float
    y1: float
    x2: float
    y2: float
    color: str = FAINT


@dataclass
class Scene:
    width: float
    height: float
    title: str
    shapes: list[Box | Words | Arrow] = field(default_factory=list)


def figure(operand: Operand, share: Instruction) -> Scene:
    """Return the scene of an operand, with the share of one instruction marked."""
    o = operand
    scene = Scene(0, 0, str(o))
    add = scene.shapes.append
    add(Words(MARGIN, 34, f"{o.shape[0]} × {o.shape[1]}, {_mode(o)}", 17, bold=True))
    strides = Words(MARGIN, 56, _strides(o), 12, color=FAINT)
    add(strides)
    right, bottom = _tile(scene, share, MARGIN + 66, TOP + 36)
    atom = tuple(start // size * size for start, size in zip((share.mn, share.k), o.atom_shape, strict=True))
    left = right + GAP
    right, below = _meant(scene, share, atom, left, TOP + 36)
    bottom = max(bottom, below)
    left = right + GAP
    right, below = _stored(scene, share, atom, left + 44, TOP + 36)
    bottom = max(bottom, below)
    read = f"MN {share.mn}–{share.mn + share.rows - 1}, K {share.k}–{share.k + share.depth - 1}"
    add(Box(MARGIN, bottom + 22, 14, 14, "none", SHARE, 2.5))
    add(Words(MARGIN + 22, bottom + 34, f"read by one instruction of {share.descriptor.arch.value}: {read}", 12))
    scene.width, scene.height = max(right, end_of(strides)) + MARGIN, bottom + 54
    scene.shapes.insert(0, Box(0, 0, scene.width, scene.height, "#ffffff", "none"))
    return scene


def _mode(o: Operand) -> str:
    mode = "no swizzle" if o.swizzle is SwizzleMode.NONE else f"{o.swizzle.value}-byte swizzle"
    return f"{o.bits}-bit, {o.major.value.upper()}-major, {mode}"


def _strides(o: Operand) -> str:
    unused = " (not used by the instructions)" if o.major is Major.K and o.swizzle else ""
    return (
        f"swizzle atom {o.atom_shape[0]} × {o.atom_shape[1]} elements, {o.atom_bytes} bytes · SBO {o.sbo} bytes · "
        f"LBO {o.lbo} bytes{unused} · atoms {'strided' if o.order == 'strided' else 'leading'} dimension first"
    )


def heading(scene: Scene, x: float, y: float, text: str, note: str) -> float:
    """Add two lines above a panel; return an estimate of their right end."""
    words = [Words(x, y - 38, text, 13, bold=True), Words(x, y - 22, note, 11, color=FAINT)]
    scene.shapes += words
    return max(map(end_of, words))


def end_of(words: Words) -> float:
    """Return an upper estimate of the right end of left-aligned words, because the font is unknown."""
    return words.x + (0.66 if words.bold else 0.6) * words.size * len(words.text)


def _tile(scene: Scene, share: Instruction, x: float, y: float) -> tuple[float, float]:
    """Add the first atoms, with their numbers in memory; return the right and bottom end."""
    o, add = share.operand, scene.shapes.append
    width, height = (64, 22) if o.major is Major.K else (26, 44)
    rows, columns = min(o.grid[0], TILE[1] // height), min(o.grid[1], TILE[0] // width)
    cut = "" if (rows, columns) == o.grid else f", the first {rows} × {columns} of {o.grid[0]} × {o.grid[1]}"
    words = heading(scene, x, y, "The tile, MN down, K across", f"atoms, numbered in memory order{cut}")
    for i in range(rows):
        for j in range(columns):
            number = o.byte_offset(i * o.atom_shape[0], j * o.atom_shape[1]) // o.atom_bytes
            add(Box(x + j * width, y + i * height, width, height, "#f8fafc"))
            add(Words(x + (j + 0.5) * width, y + (i + 0.5) * height + 4, str(number), 10, "middle", FAINT))
    down, across = ("SBO", "LBO") if o.major is Major.K else ("LBO", "SBO")
    if rows > 1:
        add(Arrow(x - 10, y + height / 2, x - 10, y + 1.5 * height))
        add(Words(x - 18, y + height + 4, down, 11, "end", FAINT))
    if columns > 1:
        add(Arrow(x + width / 2, y - 6, x + 1.5 * width, y - 6))
        add(Words(x + 1.5 * width + 6, y - 2, across, 11, "start", FAINT))
    # The share, in elements, within the part that is shown.
    scale = width / o.atom_shape[1], height / o.atom_shape[0]
    end_mn = min(share.mn + share.rows, rows * o.atom_shape[0])
    end_k = min(share.k + share.depth, columns * o.atom_shape[1])
    if end_mn > share.mn and end_k > share.k:
        box = (x + share.k * scale[0], y + share.mn * scale[1])
        size = ((end_k - share.k) * scale[0], (end_mn - share.mn) * scale[1])
        add(Box(*box, *size, SHARE, "none", 0, 0.18))
        add(Box(*box, *size, "none", SHARE, 2.5))
    return max(x + columns * width, words), y + rows * height


def _units(share: Instruction, atom: tuple[int, ...]) -> list[tuple[int, int, int, bool]]:
    """Return (strided index, unit in the line, byte offset in the atom, True if read) of an atom's units."""
    o = share.operand
    base, read = o.byte_offset(*atom), set(share.units())
    found = []
    for strided in range(LINES):
        for unit in range(o.swizzle.width // UNIT_BYTES):
            step = (strided, unit * o.unit) if o.major is Major.K else (unit * o.unit, strided)
            place = o.byte_offset(atom[0] + step[0], atom[1] + step[1])
            found.append((strided, unit, place - base, place in read))
    return found


def _cell(scene: Scene, x: float, y: float, number: int, color: str, read: bool) -> None:
    width, height = CELL
    scene.shapes.append(Box(x, y, width, height, color, "#ffffff"))
    if read:
        scene.shapes.append(Box(x + 1.5, y + 1.5, width - 3, height - 3, "none", SHARE, 2.5))
    color = INK if read else FAINT
    scene.shapes.append(Words(x + width / 2, y + height / 2 + 4, str(number), 11, "middle", color, read))


def _meant(scene: Scene, share: Instruction, atom: tuple[int, ...], x: float, y: float) -> tuple[float, float]:
    """Add an atom's units at their positions in the matrix; return the right and bottom end."""
    o = share.operand
    units = o.swizzle.width // UNIT_BYTES
    note = "16-byte units along K" if o.major is Major.K else "16-byte units along MN"
    words = heading(scene, x, y, "One atom in the matrix", note)
    for strided, unit, _, read in _units(share, atom):
        column, row = (unit, strided) if o.major is Major.K else (strided, unit)
        place = (x + column * CELL[0], y + row * CELL[1])
        _cell(scene, *place, strided * units + unit, UNIT_COLORS[unit], read)
    columns, rows = (units, LINES) if o.major is Major.K else (LINES, units)
    return max(x + columns * CELL[0], words), y + rows * CELL[1]


def _stored(scene: Scene, share: Instruction, atom: tuple[int, ...], x: float, y: float) -> tuple[float, float]:
    """Add an atom's units at their positions in memory, one line of the swizzle's width per row."""
    o = share.operand
    width = o.swizzle.width
    units = width // UNIT_BYTES
    base = o.byte_offset(*atom)
    words = heading(scene, x, y, f"Atom {base // o.atom_bytes} in memory", f"lines of {width} bytes, from byte {base}")
    for line in range(LINES):
        label = str(base + line * width)
        scene.shapes.append(Words(x - 8, y + (line + 0.5) * CELL[1] + 4, label, 10, "end", FAINT))
    for strided, unit, place, read in _units(share, atom):
        column, row = place % width // UNIT_BYTES, place // width
        where = (x + column * CELL[0], y + row * CELL[1])
        _cell(scene, *where, strided * units + unit, UNIT_COLORS[unit], read)
    return max(x + units * CELL[0], words), y + LINES * CELL[1]
