"""The ledger of compiled kernels: what it takes for the same program, and which cases are compiled all the same."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

import ledger
from helpers import Case
from source_trees import tree

import tilewise


def test_a_program_is_what_a_compiler_reads():
    program = "def f(x):\n    return x + 1\n"
    same = 'def f(x):\n    """Adds one."""\n    # to x\n    return (x\n            + 1)\n'
    assert ledger.program(program) == ledger.program(same)
    assert ledger.program(program) != ledger.program(program.replace("1", "2"))


def test_a_constant_of_kernels_has_one_value():
    """Triton hashes the constants that a kernel reads in the order of their names and then of their modules' addresses:
    two of one name and different values would make another fingerprint in another process."""
    found = defaultdict(set)
    for path in Path(tilewise.__file__).parent.rglob("*.py"):
        for x in tree(path).body:
            if isinstance(x, ast.Assign) and isinstance(x.value, ast.Call) and "constexpr" in ast.unparse(x.value.func):
                for target in x.targets:
                    found[ast.unparse(target)].add(ast.unparse(x.value.args[0]))
    assert len(found) > 10
    assert not {name: values for name, values in found.items() if len(values) > 1}


def test_covering_runs_have_every_compiler_with_every_target():
    """One run each, of cases that differ: a bias is there or not, also where a size is another."""
    runs = [("3.6.0", 90, Case(D=D, bias=bias)) for D in (32, 64, 128) for bias in (None, "1hmn", "bhmn")]
    runs += [("installed", 90, Case(D=64, bias="1hmn", M=M)) for M in (4000, 4096)]
    runs += [("installed", 80, Case(D=128, causal=causal)) for causal in (False, True)]
    chosen = [run for run, again in zip(runs, ledger.covering(runs), strict=True) if again]
    assert sorted(run[:2] for run in chosen) == [("3.6.0", 90), ("installed", 80), ("installed", 90)]
    assert len({case.D for *_, case in chosen}) == 3
    assert {case.bias is None for *_, case in chosen} == {True, False}
    assert {case.causal for *_, case in chosen} == {True, False}


def test_what_is_committed_can_be_read_and_written_again():
    known = ledger.load()
    assert ledger.dump(known) == ledger.PATH.read_text()
    assert all(key in known.kernels for keys in known.cases.values() for key in keys)


def test_a_comparison_names_what_has_other_instructions():
    entry = ledger.Entry("forward_kernel", 1, 0, 168, 0, {}, [], 0, [], "old", "")
    old = ledger.Ledger({"a": entry}, {"case": ["a"]}, {})
    assert not ledger.compare(old, ledger.Ledger({"b": entry._replace(name="other")}, {"case": ["b"]}, {}))
    slower = ledger.Ledger({"b": entry._replace(ptx="new", registers=255)}, {"case": ["b"]}, {})
    assert ledger.compare(old, slower) == ["case: forward_kernel has other instructions: registers 168 -> 255"]


def test_instructions_have_no_names_and_no_lines():
    ptx = "// by LLVM\n.entry {0}(\n.param .u64 {0}_param_0)\n{1}\tadd.s32 %r1, %r2, 1; // added\n\t.section .debug {0}"
    one = ledger.ptx_instructions("f", ptx.format("f", "$L__tmp1:\n\t.loc 1 2 3\n"))
    assert one == ledger.ptx_instructions("longer", ptx.format("longer", ""))
    assert one != ledger.ptx_instructions("f", ptx.replace("1;", "2;").format("f", ""))
