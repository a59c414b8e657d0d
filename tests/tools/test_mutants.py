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


@cache
def statements(path: Path) -> list[ast.stmt]:
    return ast.parse(read(path)).body


def parsed(source: str) -> list[str]:
    return [ast.dump(x) for x in ast.parse(source).body]


@cache
def functions(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(read(path))) if isinstance(node, ast.FunctionDef)}


def test_each_text_occurs_once():
    counts = {x.text: read(ROOT / "src" / x.file).count(x.text) for x in FAULTS}
    assert {text: count for text, count in counts.items() if count != 1} == {}


def test_each_fault_is_a_program():
    """Not one that cannot be read: that would be noticed by anything. Of the module, the statements that have the text
    are parsed, and the next one."""
    for fault in FAULTS:
        path = ROOT / "src" / fault.file
        source = read(path)
        first = 1 + source[: source.index(fault.text)].count("\n")
        last = first + fault.text.count("\n")
        ends = [x.end_lineno or 0 for x in statements(path)]
        begin = max((end for end in ends if end < first), default=0)
        after = sorted(end for end in ends if end >= last)[:2]
        text = "\n".join(source.split("\n")[begin : after[-1]])
        assert text.count(fault.text) == 1, fault
        assert parsed(text.replace(fault.text, fault.becomes)) != parsed(text), fault


def test_each_test_exists():
    for fault in FAULTS:
        path, _, name = fault.test.partition("::")
        assert not path.startswith("gpu")
        found = functions(ROOT / "tests" / path)
        assert name in found if name else any(function.startswith("test_") for function in found), fault


def test_no_fault_comes_twice():
    assert len({(fault.file, fault.text) for fault in FAULTS}) == len(FAULTS) >= 30
