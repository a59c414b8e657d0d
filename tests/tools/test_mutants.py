"""The list of planted faults is true of the source: it can be planted, and the test that should notice exists.

Whether it does notice, `make mutants` finds out, in some minutes.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

from faults import FAULTS
from mutants import ROOT


@cache
def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def program(source: str, line: int) -> list[str]:
    """The statement of the module that has a line, and the next one, as they are parsed."""
    statements = [x for x in ast.parse(source).body if (x.end_lineno or 0) >= line]
    return [ast.dump(x) for x in statements[:2]]


@cache
def functions(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(read(path))) if isinstance(node, ast.FunctionDef)}


def test_each_text_occurs_once():
    counts = {x.text: read(ROOT / "src" / x.file).count(x.text) for x in FAULTS}
    assert {text: count for text, count in counts.items() if count != 1} == {}


def test_each_fault_is_a_program():
    """Not one that cannot be read: that would be noticed by anything."""
    for fault in FAULTS:
        path = ROOT / "src" / fault.file
        source = read(path)
        line = 1 + source[: source.index(fault.text)].count("\n")
        assert program(source.replace(fault.text, fault.becomes), line) != program(source, line), fault


def test_each_test_exists():
    for fault in FAULTS:
        path, _, name = fault.test.partition("::")
        assert not path.startswith("gpu")
        found = functions(ROOT / "tests" / path)
        assert name in found if name else any(function.startswith("test_") for function in found), fault


def test_no_fault_comes_twice():
    assert len({(fault.file, fault.text) for fault in FAULTS}) == len(FAULTS) >= 30
