"""Reads machine code of sm_90a for wgmma whose shared-memory descriptor is not the one that the program made.

ptxas of CUDA 12.8 has a fault: where two operands begin at one address and their descriptors differ in the upper half
(swizzle and stride), it may compute those of one from registers that it never set. The wgmma then read whatever these
held, or the sum of both upper halves. That half is a constant in every descriptor that Triton makes, so constants are
followed here through moves, sums, spills and swaps, along every branch; a descriptor whose upper half is none, or none
of those that the PTX makes, is lost. Where machine code has as many wgmma as the PTX, each half must be read as often.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection
from typing import NamedTuple

from wgmma_lint import Instruction, parse, width

_MASK = 0xFFFFFFFF
_MOVES = ("UMOV", "MOV", "R2UR", "IMAD.MOV.U32", "IMAD.U32", "IMAD.X")
_WRITES_NO_REGISTER = re.compile(r"ST|RED|SYNCS|UTMA|BAR|WARP|MEMBAR|FENCE|BRA|EXIT|RET|NOP")


class Unknown(NamedTuple):
    """Not a constant; of an exclusive or: its operands, because ptxas swaps registers by three of them."""

    operands: tuple[object, ...] = ()


Value = int | Unknown
State = dict[str, Value]  # by register, or by address of a spill


class Lost(NamedTuple):
    address: int
    instruction: str
    upper: Value | None  # None: no way here sets it


def uppers(ptx: str) -> list[int]:
    """The upper halves of the descriptors that the wgmma of a kernel's PTX read, of each of them one or two."""
    constants = {m[1]: int(m[2]) for m in re.finditer(r"(?:or\.b64|add\.s64)\s+(%rd\d+), %rd\d+, (-?\d+);", ptx)}
    read = [
        register
        for operands in re.findall(r"wgmma\.mma_async\S* \{[^}]*\}, ([^;]*);", ptx)
        for register in re.findall(r"%rd\d+", operands)
    ]
    return [constants[register] >> 32 & _MASK for register in read]


def check(sass: str, ptx: str) -> list[Lost]:
    """`lint` of a kernel's machine code, with what its PTX makes."""
    made = Counter(uppers(ptx))
    lost, found = _scan(sass, made)
    if not lost and found.total() == made.total() and found != made:
        lost = [Lost(0, f"{found} in place of {made}", None)]
    return lost


def lint(sass: str, made: Collection[int]) -> list[Lost]:
    """Every wgmma that reads a lost descriptor, in order of address; `sass` is the code of one kernel, ``made`` are the
    upper halves of its descriptors."""
    return _scan(sass, made)[0]


def _scan(sass: str, made: Collection[int]) -> tuple[list[Lost], Counter[int]]:
    code = parse(sass)
    at = {x.address: n for n, x in enumerate(code)}
    starts = sorted({0} | {n for n, x in enumerate(code) if n and code[n - 1].name[:4] in ("BRA", "EXIT")}
                    | {at[t] for x in code if (t := _target(x)) in at})  # fmt: skip
    ends = dict(zip(starts, [*starts[1:], len(code)], strict=True))
    states: dict[int, State] = {0: {}}
    waiting = [0]
    while waiting:
        start = waiting.pop()
        state = dict(states[start])
        for x in code[start : ends[start]]:
            _step(state, x)
        for block in _successors(code[ends[start] - 1], ends[start], at):
            known = states.get(block)
            merged = state if known is None else _merge(known, state)
            if merged != known:
                states[block] = dict(merged)
                waiting.append(block)
    lost, found = [], Counter[int]()
    for start, entry in states.items():
        state = dict(entry)
        for x in code[start : ends[start]]:
            for upper in _uppers(state, x):
                if isinstance(upper, int) and upper in made:
                    found[upper] += 1
                else:
                    lost.append(Lost(x.address, f"{x.name} {', '.join(x.operands)}", upper))
            _step(state, x)
    return sorted(lost, key=lambda x: x.address), found


def _target(x: Instruction) -> int | None:
    found = re.search(r"0x([0-9a-f]+)", x.operands[-1]) if x.name.startswith("BRA") and x.operands else None
    return int(found[1], 16) if found else None


def _successors(last: Instruction, following: int, at: dict[int, int]) -> list[int]:
    blocks = [at[_target(last)]] if _target(last) in at else []  # type: ignore[index]
    always = not last.predicate and len(last.operands) <= 1
    if not (always and last.name.startswith(("BRA", "EXIT", "RET"))) and following < len(at):
        blocks.append(following)
    return blocks


def _merge(a: State, b: State) -> State:
    """What holds after either. A register that one way does not set is not read by what follows."""
    return {r: a[r] if r not in b else b[r] if r not in a or a[r] == b[r] else Unknown() for r in a.keys() | b.keys()}


def _uppers(state: State, x: Instruction) -> list[Value | None]:
    """Upper halves of the descriptors that a wgmma reads: gdesc[URn] is A's in n, n+1 and B's in n+2, n+3."""
    if not x.name.startswith("HGMMA"):
        return []
    first = next(int(m[1]) for o in x.operands if (m := re.search(r"gdesc\[UR(\d+)\]", o)))
    return [state.get(f"UR{n}") for n in ([first + 1] if "gdesc" in x.operands[1] else []) + [first + 3]]


def _step(state: State, x: Instruction) -> None:
    operands = [o.replace(".reuse", "") for o in x.operands if not re.fullmatch(r"!?U?P[T\d]", o)]
    if x.name.startswith("STL"):
        address = _spill(operands[0])
        for n in range(width(x.name)):
            _set(state, f"[{address + 4 * n}]", _get(state, _next(operands[1], n)), x)
        return
    if not operands or _WRITES_NO_REGISTER.match(x.name) or not re.fullmatch(r"U?R\d+", operands[0]):
        return
    target, sources = operands[0], operands[1:]
    if x.name.startswith("LDL"):
        values = [state.get(f"[{_spill(sources[0]) + 4 * n}]", Unknown()) for n in range(width(x.name))]
    elif x.name.startswith("HGMMA"):
        values = [Unknown()] * (int(re.search(r"64x(\d+)x", x.name)[1]) // 2)  # type: ignore[index]
    elif x.name.startswith("CS2R") and sources == ["SRZ"]:
        values = [0] * width(x.name)
    elif x.name in _MOVES and all(o == "RZ" for o in sources[:-1]):
        values = [_get(state, sources[-1])]
    elif x.name == "UIADD3.64":
        values = [_sum([_half(state, o, n) for o in sources]) for n in range(2)]
    elif x.name in ("UIADD3", "UIADD3.X", "IADD3", "IADD3.X", "VIADD"):  # no carry comes out of a lower half
        values = [_sum([_get(state, o) for o in sources])]
    elif "LOP3" in x.name and sources[2:4] in (["URZ", "0x3c"], ["RZ", "0x3c"]):
        values = [_exclusive_or(_get(state, sources[0]), _get(state, sources[1]))]
    else:
        values = [Unknown()] * width(x.name)
    for n, value in enumerate(values):
        _set(state, _next(target, n), value, x)


def _set(state: State, place: str, value: Value, x: Instruction) -> None:
    if x.predicate and place in state and state[place] != value:
        value = Unknown()
    state[place] = value


def _get(state: State, operand: str) -> Value:
    """A register's value, or an immediate's."""
    sign, name = (operand[0], operand[1:]) if operand[0] in "-~" else ("", operand)
    value: Value = Unknown()
    if name in ("RZ", "URZ"):
        value = 0
    elif re.fullmatch(r"0x[0-9a-f]+|\d+", name):
        value = int(name, 0)
    elif re.fullmatch(r"U?R\d+", name):
        value = state.get(name, Unknown())
    if not sign:
        return value
    return (-value if sign == "-" else ~value) & _MASK if isinstance(value, int) else Unknown()


def _sum(values: list[Value]) -> Value:
    numbers = [value for value in values if isinstance(value, int)]
    return sum(numbers) & _MASK if len(numbers) == len(values) else Unknown()


def _exclusive_or(a: Value, b: Value) -> Value:
    if isinstance(a, int) and isinstance(b, int):
        return a ^ b
    for value, other in ((a, b), (b, a)):
        if isinstance(value, Unknown) and other in value.operands:
            rest = list(value.operands)
            rest.remove(other)
            return rest[0]  # type: ignore[return-value]
    return Unknown((a, b)) if a != b else Unknown()


def _half(state: State, operand: str, n: int) -> Value:
    """The lower or upper half of a source of 64 bits; an immediate has no upper one."""
    register = operand.lstrip("-")
    if not register.startswith("UR"):
        return _get(state, operand) if n == 0 else 0
    lower, upper = _get(state, register), _get(state, _next(register, 1))
    if register != operand and isinstance(lower, int):
        lower, upper = -lower & _MASK, ~upper + (lower == 0) & _MASK if isinstance(upper, int) else upper
    elif register != operand:
        lower = upper = Unknown()
    return (lower, upper)[n]


def _next(register: str, n: int) -> str:
    match = re.fullmatch(r"(U?R)(\d+)", register)
    return f"{match[1]}{int(match[2]) + n}" if match else register


def _spill(operand: str) -> int:
    """The address of [R1+0x10]."""
    match = re.search(r"R1\+(0x[0-9a-f]+)", operand)
    return int(match[1], 16) if match else 0
