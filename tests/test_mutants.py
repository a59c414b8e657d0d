"""The list of planted faults is true of the source: it can be planted, and the test that should notice exists.

Whether it does notice, `make mutants` finds out, in some minutes.
"""

from __future__ import annotations

import ast

from faults import FAULTS
from mutants import ROOT


def test_each_text_occurs_once():
    counts = {x.text: (ROOT / "tilewise" / x.file).read_text(encoding="utf-8").count(x.text) for x in FAULTS}
    assert {text: count for text, count in counts.items() if count != 1} == {}


def test_each_fault_is_a_program():
    """Not one that cannot be read: that would be noticed by anything."""
    for fault in FAULTS:
        source = (ROOT / "tilewise" / fault.file).read_text(encoding="utf-8")
        planted = ast.parse(source.replace(fault.text, fault.becomes), fault.file)
        assert ast.dump(planted) != ast.dump(ast.parse(source)), fault


def test_each_test_exists():
    for fault in FAULTS:
        path, _, name = fault.test.partition("::")
        assert not path.startswith("gpu")
        found = ast.parse((ROOT / "tests" / path).read_text(encoding="utf-8"))
        functions = {node.name for node in ast.walk(found) if isinstance(node, ast.FunctionDef)}
        assert name in functions if name else any(function.startswith("test_") for function in functions), fault


def test_no_fault_comes_twice():
    assert len({(fault.file, fault.text) for fault in FAULTS}) == len(FAULTS) >= 30
