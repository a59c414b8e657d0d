"""Text, terminal drawing and figure of an operand in tensor memory."""

from __future__ import annotations

from tilewise.layouts.figure import (
    FAINT,
    GAP,
    MARGIN,
    SHARE,
    TOP,
    UNIT_COLORS,
    Box,
    Scene,
    Words,
    end_of,
    heading,
)
from tilewise.layouts.linear import is_power_of_two
from tilewise.layouts.mma import Arch
from tilewise.layouts.tensor_memory import COLUMN_BITS, COLUMNS, HALF, LANES, STEP, Cell, TensorMemoryOperand
from tilewise.layouts.text import INSTRUCTIONS

MOST_STEPS = 8  # instructions that a drawing shows
BLOCK = (38, 24)  # 16 lanes by the columns of an instruction, in pixels
COLUMN = (152, 24)  # a column of 32 bits


def tensor_memory_facts(a: TensorMemoryOperand, chosen: int = 0) -> list[str]:
    """Return lines with the facts about an operand, and about one of the instructions that read it."""
    addresses, k = a.addresses(), chosen * a.depth
    if a.shape[0] == LANES:
        lanes = "row m is in lane m"
    else:
        first = a.cell(0, 0).lane
        lanes = f"row m is in lane m + {HALF}·(m // {HALF})" + (f" + {first}" if first else "")
    shared = {1: "one element", 2: "2 elements", 4: "4 elements"}[a.packed]
    column = a.first_column + chosen * STEP
    lines = [
        str(a),
        "",
        f"lanes      {lanes}",
        f"columns    {a.columns} of {COLUMNS}, {shared} in each, the first in the lowest bits",
        f"allocated  {a.allocation} columns of all {LANES} lanes",
        "address    lane << 16 | column",
        "",
    ]
    if is_power_of_two(a.shape[1]):
        lines += [
            "linear layout of the tile, as Triton has it: (lane, element in it), from the address on, to (M, K)",
            *str(a.linear()).splitlines(),
        ]
    else:
        lines += ["no linear layout over F2: K is no power of two"]
    return [
        *lines,
        "",
        f"sm_100, {INSTRUCTIONS[Arch.SM_100]}: operand A in {len(addresses)} instructions of {a.shape[0]} x {a.depth}",
        f"instruction {chosen} reads K {k} to {k + a.depth - 1} in columns {column} to {column + STEP - 1}; "
        f"its address of A: {addresses[chosen]:#x}",
    ]


def tensor_memory_drawing(a: TensorMemoryOperand, chosen: int = 0) -> list[str]:
    """Return two drawings: the rows of A in the lanes, and the columns that an instruction reads of each lane.

    The second gives the indices of K in each column, the lowest bits first.
    """
    lines = [f"lanes of tensor memory, {HALF} in a line, and the rows of A in them"]
    for first in range(0, LANES, HALF):
        rows = _rows(a, first)
        text = "." if rows is None else f"{rows[0]} ~ {rows[1]}"
        lines.append(f"  {f'{first} ~ {first + HALF - 1}':>12}   {text}")
    lines += ["", f"columns that instruction {chosen} reads, and the indices of K in them, the lowest bits first"]
    size = len(str(a.shape[1] - 1))
    for column, indices in _columns(a, chosen):
        lines.append(f"  {column:>12}   " + " ".join(f"{k:>{size}}" for k in indices))
    return lines


def tensor_memory_figure(a: TensorMemoryOperand, chosen: int = 0) -> Scene:
    """Return the scene of an operand, with the share of instruction ``chosen`` marked."""
    scene = Scene(0, 0, str(a))
    add = scene.shapes.append
    add(Words(MARGIN, 34, f"{a.shape[0]} × {a.shape[1]}, {a.bits}-bit, operand A in tensor memory", 17, bold=True))
    note = Words(
        MARGIN, 56, f"{LANES} lanes × {COLUMNS} columns of {COLUMN_BITS} bits · {a.columns} columns from "
        f"{a.first_column}, {a.packed} element{'s' if a.packed > 1 else ''} in each", 12, color=FAINT,
    )  # fmt: skip
    add(note)
    y = TOP + 36
    steps = min(len(a.addresses()), MOST_STEPS)
    right, bottom = _tile(scene, a, steps, chosen, MARGIN + 66, y)
    right, below = _lanes(scene, a, steps, chosen, right + GAP + 66, y)
    bottom = max(bottom, below)
    right, below = _one_lane(scene, a, chosen, right + GAP + 44, y)
    bottom = max(bottom, below)
    read = f"K {chosen * a.depth}–{(chosen + 1) * a.depth - 1}, all {a.shape[0]} rows"
    add(Box(MARGIN, bottom + 22, 14, 14, "none", SHARE, 2.5))
    add(Words(MARGIN + 22, bottom + 34, f"read by one tcgen05.mma (sm_100, not verified on hardware): {read}", 12))
    scene.width, scene.height = max(right, end_of(note)) + MARGIN, bottom + 54
    scene.shapes.insert(0, Box(0, 0, scene.width, scene.height, "#ffffff", "none"))
    return scene


def _rows(a: TensorMemoryOperand, lane: int) -> tuple[int, int] | None:
    """Return the first and last row in 16 lanes from ``lane``, None if they are not used."""
    first = a.coordinates(Cell(lane, a.first_column, 0))
    return None if first is None else (first[0], first[0] + HALF - 1)


def _columns(a: TensorMemoryOperand, chosen: int) -> list[tuple[int, list[int]]]:
    """Return each column that an instruction reads with the indices of K in it."""
    first, lane = a.first_column + chosen * STEP, a.cell(0, 0).lane
    bits = range(0, COLUMN_BITS, a.bits)
    found = []
    for column in range(first, first + STEP):
        elements = [a.coordinates(Cell(lane, column, bit)) for bit in bits]
        found.append((column, [element[1] for element in elements if element is not None]))
    return found


def _block(scene: Scene, x: float, y: float, fill: str) -> None:
    scene.shapes.append(Box(x, y, *BLOCK, fill, "#ffffff"))


def _mark(scene: Scene, x: float, y: float, width: float, height: float) -> None:
    scene.shapes.append(Box(x, y, width, height, "none", SHARE, 2.5))


def _label(scene: Scene, x: float, y: float, first: int) -> None:
    words = f"{first}–{first + HALF - 1}"
    scene.shapes.append(Words(x - 8, y + BLOCK[1] / 2 + 4, words, 10, "end", FAINT))


def _tile(scene: Scene, a: TensorMemoryOperand, steps: int, chosen: int, x: float, y: float) -> tuple[float, float]:
    """Add the tile in blocks of 16 rows by one instruction's K; return the right and bottom end."""
    width, height = BLOCK
    cut = "" if steps * a.depth == a.shape[1] else f", the first {steps * a.depth} of {a.shape[1]}"
    words = heading(scene, x, y, "The tile, M down, K across", f"16 rows × {a.depth} indices of K{cut}")
    for row in range(0, a.shape[0], HALF):
        _label(scene, x, y + row // HALF * height, row)
        for step in range(steps):
            _block(scene, x + step * width, y + row // HALF * height, UNIT_COLORS[row // HALF])
    if chosen < steps:
        _mark(scene, x + chosen * width, y, width, a.shape[0] // HALF * height)
    return max(x + steps * width, words), y + a.shape[0] // HALF * height


def _lanes(scene: Scene, a: TensorMemoryOperand, steps: int, chosen: int, x: float, y: float) -> tuple[float, float]:
    """Add the lanes in blocks of 16 by 8 columns, with the rows of A in them; return the right and bottom end."""
    width, height = BLOCK
    words = heading(scene, x, y, "Tensor memory, lanes down", f"16 lanes × {STEP} columns")
    for lane in range(0, LANES, HALF):
        top, rows = y + lane // HALF * height, _rows(a, lane)
        _label(scene, x, top, lane)
        for step in range(steps):
            _block(scene, x + step * width, top, "#f8fafc" if rows is None else UNIT_COLORS[rows[0] // HALF])
            if rows is not None and chosen == step:
                _mark(scene, x + step * width + 1.5, top + 1.5, width - 3, height - 3)
    return max(x + steps * width, words), y + LANES // HALF * height


def _one_lane(scene: Scene, a: TensorMemoryOperand, chosen: int, x: float, y: float) -> tuple[float, float]:
    """Add the columns that an instruction reads of one lane, with indices of K; return the right and bottom end."""
    lane, width, height = a.cell(0, 0).lane, COLUMN[0] / a.packed, COLUMN[1]
    words = heading(
        scene, x, y, f"Lane {lane}, a column per line", "indices of K of row 0, the lowest bits on the left"
    )
    for line, (column, indices) in enumerate(_columns(a, chosen)):
        top = y + line * height
        scene.shapes.append(Words(x - 8, top + height / 2 + 4, str(column), 10, "end", FAINT))
        for place, k in enumerate(indices):
            scene.shapes.append(Box(x + place * width, top, width, height, UNIT_COLORS[0], "#ffffff"))
            scene.shapes.append(Words(x + (place + 0.5) * width, top + height / 2 + 4, str(k), 11, "middle"))
    _mark(scene, x, y, COLUMN[0], STEP * height)
    return max(x + COLUMN[0], words), y + STEP * height
