"""The table of operands: a row more in a copy of the package is an operand of the schema, the gradients, the checks."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch
from processes import python

import tilewise
from tilewise.backends.protocol import INPUT_NAMES, OPERANDS, Gradients, Inputs, Needs
from tilewise.spec.bias_components import DIFFERENTIABLE
from tilewise.spec.operands import PartOperands

BEFORE = '    query_shift: Annotated[Maybe, Axes("B|1")] = None\n'
DUMMY = '    dummy: Annotated[Maybe, Axes("B|1 H 2 R", True, words="a dummy bias")] = None\n'
CHILD = Path(__file__).parents[1] / "operand_table_child.py"


def test_one_row_adds_an_operand(tmp_path):
    package = Path(tilewise.__file__).parent
    shutil.copytree(package, tmp_path / "tilewise", ignore=shutil.ignore_patterns("__pycache__"))
    file = tmp_path / "tilewise/spec/bias_components.py"
    source = file.read_text(encoding="utf-8")
    assert source.count(BEFORE) == 1
    file.write_text(source.replace(BEFORE, DUMMY + BEFORE), encoding="utf-8")
    python(CHILD, env=os.environ | {"PYTHONPATH": str(tmp_path)})


def test_order_and_words():
    """Positions that callers of the operators rely on, and the names in messages."""
    assert INPUT_NAMES[:8] == ("q", "k", "v", "bias", "mask", "sink", "cols", "rows")
    assert Needs._fields == Gradients._fields == ("q", "k", "v", "bias", "sink", *DIFFERENTIABLE)
    assert Needs(True, False, True, False) == (True, False, True, False, *[False] * 6)
    assert Gradients(None, None, None, None).toeplitz is None
    assert all(OPERANDS[name].words for name in DIFFERENTIABLE)
    assert PartOperands().named() == []


def test_records_and_flat_tensors():
    x = [torch.tensor(n) for n in range(len(INPUT_NAMES))]
    inputs = Inputs.of(x)
    assert all(a is b for a, b in zip(inputs.flat(), x, strict=True))
    named = dict(zip(INPUT_NAMES, x, strict=True))
    assert all(named[name] is y for name, y in zip(Needs._fields, inputs.differentiable(), strict=True))
    few = inputs._replace(parts=None)
    assert few.to_differentiate() == few.differentiable()[:5]
    assert inputs.to_differentiate() == inputs.differentiable()
