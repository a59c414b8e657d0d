"""Reads machine code of sm_90a for registers of a wgmma that are touched while it is in flight.

A wgmma is asynchronous: until a WARPGROUP.DEPBAR has retired its group, nothing may write the registers of its operand
A, nor read or write its accumulator. ptxas of CUDA 12.8 and 12.9 has been reported to reuse those of A too early. The
scan follows addresses, and goes once more round each loop that a group enters again at its end; other branches count as
not taken, which is what happens in code whose only forward branches lead to waits that spin elsewhere.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NamedTuple

_LINE = re.compile(r"\s+/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+)\s+)?(.*?)\s*;")
# Instructions whose first operand is no register that they write.
_WRITES_NOTHING = re.compile(
    r"ST|RED|BRA|BAR|EXIT|SYNCS|UTMA|MEMBAR|FENCE|WARP|DEPBAR|NOP|BSYNC|BSSY|R2UR|ISETP|FSETP|PLOP3|USETMAXREG|CCTL"
    r"|ERRBAR|R2P|VOTE|ELECT"
)


class Instruction(NamedTuple):
    address: int
    name: str
    operands: list[str]
    predicate: str = ""


@dataclass
class Group:
    """The wgmma between two commits: registers it writes, and those it reads as operand A."""

    address: int
    accumulator: set[int] = field(default_factory=set)
    operand: set[int] = field(default_factory=set)


class Hazard(NamedTuple):
    address: int
    instruction: str
    registers: list[int]
    wgmma: int  # address of the first one of its group


def parse(sass: str) -> list[Instruction]:
    found = []
    for line in sass.splitlines():
        match = _LINE.match(line)
        if match:
            name, _, rest = match[3].partition(" ")
            operands = [x.strip() for x in rest.split(",") if x.strip()]
            found.append(Instruction(int(match[1], 16), name, operands, match[2] or ""))
    return found


def count(sass: str) -> int:
    """How many wgmma there are."""
    return sum(x.name.startswith("HGMMA") for x in parse(sass))


def lint(sass: str) -> list[Hazard]:
    """Every hazard, in order of address; `sass` is the code of one kernel."""
    code = parse(sass)
    hazards, again = _scan(code, [])
    for first, last, groups in again:
        hazards += _scan([x for x in code if first <= x.address <= last], groups)[0]
    return sorted(set(map(_hashable, hazards)))


def _hashable(hazard: Hazard) -> Hazard:
    return hazard._replace(registers=tuple(hazard.registers))  # type: ignore[arg-type]


def _scan(code: list[Instruction], groups: list[Group]) -> tuple[list[Hazard], list[tuple[int, int, list[Group]]]]:
    """Hazards, and loops whose end is reached with groups in flight: (first address, last address, groups)."""
    flying, issued = list(groups), None
    hazards, loops = [], []
    for x in code:
        if x.name.startswith("HGMMA"):
            issued = issued or Group(x.address)
            _issue(issued, x)
            if any(operand.startswith("gsb") for operand in x.operands):
                flying.append(issued)
                issued = None
            continue
        retired = re.fullmatch(r"gsb0, 0x([0-9a-f]+)", ", ".join(x.operands)) if "DEPBAR" in x.name else None
        if retired and x.name.startswith("WARPGROUP"):
            keep = int(retired[1], 16)
            flying = flying[-keep:] if keep else []
            continue
        live = flying + ([issued] if issued else [])
        if not live:
            continue
        if x.name == "BRA":
            target = re.search(r"0x([0-9a-f]+)", " ".join(x.operands))
            if target and int(target[1], 16) < x.address and flying:
                loops.append((int(target[1], 16), x.address, list(flying)))
            continue
        written, read = _registers(x)
        for group in live:
            touched = (written & group.operand) | ((written | read) & group.accumulator)
            if touched:
                words = f"{x.name} {', '.join(x.operands)}"
                hazards.append(Hazard(x.address, words, sorted(touched), group.address))
    return hazards, loops


def _issue(group: Group, x: Instruction) -> None:
    """Add one wgmma, D[64, n] = A[64, 16] · B[16, n], to its group: n/2 registers of D, four of A."""
    columns = int(re.search(r"64x(\d+)x", x.name)[1])  # type: ignore[index]
    first = int(re.match(r"R(\d+)", x.operands[0])[1])  # type: ignore[index]
    group.accumulator |= set(range(first, first + columns // 2))
    operand = re.match(r"R(\d+)\b", x.operands[1])
    if operand:
        group.operand |= set(range(int(operand[1]), int(operand[1]) + 4))


def _registers(x: Instruction) -> tuple[set[int], set[int]]:
    """Registers written and read. Of a wide read only the first is known, which is enough: it is in the same tile."""
    operands = [o for o in x.operands if not re.fullmatch(r"U?P[T\d]", o)]
    written: set[int] = set()
    if operands and not _WRITES_NOTHING.match(x.name):
        match = re.match(r"R(\d+)", operands.pop(0))
        if match:
            written = set(range(int(match[1]), int(match[1]) + width(x.name)))
    return written, {int(r) for operand in operands for r in re.findall(r"\bR(\d+)\b", operand)}


def width(name: str) -> int:
    """Registers that an instruction writes."""
    if name.startswith("LDSM"):
        return 4 if name.endswith(".4") else 2 if name.endswith(".2") else 1
    if ".128" in name:
        return 4
    wide = (".64" in name or name.startswith(("CS2R", "IMAD.WIDE", "DADD", "DMUL", "DFMA"))) and ".32" not in name
    return 2 if wide else 1
