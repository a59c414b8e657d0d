"""What each kernel that is compiled ahead of time came to, so that it is compiled again only where something changed.

`aot_ledger.json` has an entry for each kernel, under a fingerprint of all that its machine code is made from: the
program without its comments, docstrings and line numbers, that of every function that it calls, constants, types,
options, and the versions of Triton and ptxas. And it has, for each case of the tests, the kernels that it launched.

    make ledger                            compile every case, and write the ledger anew
    python tests/ledger.py update FOLDER   take over what some tests have left with TILEWISE_LEDGER=FOLDER
    python tests/ledger.py compare HEAD    which kernels have other machine code than in that commit's ledger

The last is how a change of names and rooms shows that it is one: equal instructions in PTX, without symbols, line
tables and the labels of these, which is what ptxas reads. The bytes that it makes of them are there too, and are equal
nearly always: ptxas 12.8 may order them anew for a label, and for the largest kernel from one run to the next.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import re
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, NamedTuple

PATH = Path(__file__).parent / "aot_ledger.json"
DIGITS = 16  # of a hash
ROOM = "room"  # in the place of a case
SIZES = ("B", "H", "M", "N", "K", "shape")
OPTIONAL = ("window", "softcap", "scale", "bias", "mask", "sink")


class Entry(NamedTuple):
    """A compiled kernel: sizes in bytes, `instructions` a count of each of aot_child.INSTRUCTIONS that there is."""

    name: str
    shared: int
    tensor_memory: int
    registers: int
    spill_stores: int
    instructions: dict[str, int]
    warnings: list[str]
    wgmma: int  # in machine code
    hazards: list[list[Any]]  # see wgmma_lint.Hazard
    ptx: str  # hash of what ptxas reads, see `ptx_instructions`
    code: str  # of what it makes, see `instructions`

    def agrees(self, other: Entry) -> bool:
        """But for the order of its machine code."""
        return self._replace(code="") == other._replace(code="")


class Ledger(NamedTuple):
    kernels: dict[str, Entry]  # by fingerprint
    cases: dict[str, list[str]]  # fingerprints of what a case launches, in order
    rooms: dict[str, list[int]]  # shared and tensor memory of kernels that were compiled no further than to know these

    @classmethod
    def empty(cls) -> Ledger:
        return cls({}, {}, {})


def parse(text: str) -> Ledger:
    read = json.loads(text)
    return Ledger({key: Entry(**x) for key, x in read["kernels"].items()}, read["cases"], read.get("rooms", {}))


@functools.cache
def load() -> Ledger:
    """What is committed."""
    return parse(PATH.read_text()) if PATH.exists() else Ledger.empty()


def dump(ledger: Ledger) -> str:
    """A line for each entry, in an order of its own, so that a difference of two ledgers can be read."""

    def block(name: str, values: dict[str, Any]) -> str:
        lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(values[key])}" for key in sorted(values))
        return f'"{name}": {{\n{lines}\n}}'

    used = {key for keys in ledger.cases.values() for key in keys}
    kernels = {key: x._asdict() for key, x in ledger.kernels.items() if key in used}
    blocks = {"cases": ledger.cases, "kernels": kernels, "rooms": ledger.rooms}
    return "{\n" + ",\n".join(block(*x) for x in blocks.items()) + "\n}\n"


def program(source: str) -> str:
    """A function's source without what no compiler reads: comments, docstring, the way that it is laid out."""
    tree = ast.parse(source)
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef) and ast.get_docstring(function) is not None:
            function.body = function.body[1:] or [ast.Pass()]
    return ast.unparse(tree)


def digest(*parts: object) -> str:
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:DIGITS]


def instructions(cubin: bytes) -> str:
    """A hash of what a kernel's sections of code hold: neither symbols nor line tables nor their order."""
    offset, names = struct.unpack_from("<Q", cubin, 0x28)[0], struct.unpack_from("<HHH", cubin, 0x3A)
    size, count, strings = names
    sections = [struct.unpack_from("<IIQQQQ", cubin, offset + size * i) for i in range(count)]
    texts = sections[strings][4]

    def name(section: Sequence[int]) -> bytes:
        start = texts + section[0]
        return cubin[start : cubin.index(b"\0", start)]

    code = [cubin[x[4] : x[4] + x[5]] for x in sections if name(x).startswith(b".text.")]
    assert all(code or [b""])
    return hashlib.sha256(b"".join(sorted(code))).hexdigest()[:DIGITS]


def ptx_instructions(name: str, ptx: str) -> str:
    """A hash of a kernel's PTX without its name, line tables and debug information."""
    lines = (line.split("//")[0].strip() for line in ptx.partition("\t.section")[0].splitlines())
    kept = [line for line in lines if line and not re.match(r"\.loc|\.file|\$L__tmp\d+:", line)]
    return digest(*(re.sub(rf"\b{name}(?=\b|_param)", "kernel", line) for line in kept))


def covering(runs: Sequence[Sequence[Any]]) -> list[bool]:
    """Whether a run is one of few that have each compiler with each target, and whatever else stands beside the case.
    Of cases they have many values: all of these come to constants, types and options, which a fingerprint treats
    alike."""
    left = {n: set(_values(run)) for n, run in enumerate(runs)}
    beside = [repr([x for x in run if not is_dataclass(x)]) for run in runs]
    missing, unseen = set().union(*left.values()), set(beside)
    while unseen:
        best = max((n for n in left if beside[n] in unseen), key=lambda n: len(left[n] & missing))
        unseen.remove(beside[best])
        missing -= left.pop(best)
    return [n not in left for n in range(len(runs))]


def _values(run: Sequence[Any]) -> Iterator[tuple[str, str]]:
    """Of the case's fields, but for sizes, which are no constants of a kernel; of what may be left out whether it is
    there."""
    for x in filter(is_dataclass, run):
        for name, value in vars(x).items():
            if name in OPTIONAL:
                ends = value if isinstance(value, tuple) else (value,)
                yield name, repr([end is not None for end in ends if value is not None])
            elif name not in SIZES:
                yield name, repr(value)


def read(folder: Path) -> Ledger:
    """What compilers have left in ``folder``, a file each."""
    found = Ledger.empty()
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            case, kernels = json.loads(line)
            if case == ROOM:
                found.rooms.update(kernels)
                continue
            found.cases[case] = [key for key, _ in kernels]
            for key, entry in kernels:
                assert found.kernels.setdefault(key, Entry(*entry)).agrees(Entry(*entry)), f"{case}: not as before"
    assert found.cases or found.rooms, f"{folder}: no compiler has left anything"
    return found


def compare(old: Ledger, new: Ledger) -> list[str]:
    """What differs, a line for each kernel of a case that both have."""
    lines = []
    for case in sorted(old.cases.keys() & new.cases.keys()):
        before, after = ([ledger.kernels[key] for key in ledger.cases[case]] for ledger in (old, new))
        if len(before) != len(after):
            lines.append(f"{case}: {[x.name for x in before]} became {[x.name for x in after]}")
            continue
        for a, b in zip(before, after, strict=True):
            if a.ptx != b.ptx:
                numbers = ", ".join(
                    f"{field} {getattr(a, field)} -> {getattr(b, field)}"
                    for field in ("registers", "spill_stores", "shared")
                    if getattr(a, field) != getattr(b, field)
                )
                lines.append(f"{case}: {b.name} has other instructions{numbers and ': ' + numbers}")
    return lines


def main(command: str, argument: str) -> int:
    if command in ("renew", "update"):
        old, found = load() if command == "update" else Ledger.empty(), read(Path(argument))
        PATH.write_text(dump(Ledger(*({**a, **b} for a, b in zip(old, found, strict=True)))))
        print(f"{PATH.name}: {len(found.cases)} cases, {len(found.kernels)} kernels")
        return 0
    assert command == "compare", command
    where = ["git", "show", f"{argument}:./{PATH.name}"]
    old = parse(subprocess.run(where, cwd=PATH.parent, capture_output=True, text=True, check=True).stdout)
    new = load()
    lines = compare(old, new)
    alone = [f"{case}: in one of them alone" for case in sorted(old.cases.keys() ^ new.cases.keys())]
    both = [case for case in old.cases if len(old.cases[case]) == len(new.cases.get(case, []))]
    pairs = {key for case in both for key in zip(old.cases[case], new.cases[case], strict=True)}
    ordered = sum(old.kernels[a].code != new.kernels[b].code for a, b in pairs)
    print("\n".join([*lines, *alone, f"{len(both)} cases, {len(pairs)} kernels, {ordered} with other machine code"]))
    return bool(lines)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
