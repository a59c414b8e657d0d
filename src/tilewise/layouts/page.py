"""Interactive page of an operand: one HTML file that loads nothing else.

The page computes positions from the bases of the linear layout of one atom.
"""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from string import Template

from tilewise.layouts.figure import UNIT_COLORS
from tilewise.layouts.mma import Instruction, Role
from tilewise.layouts.operand import AtomOrder, Major, Operand
from tilewise.layouts.text import facts


def to_html(operand: Operand, shares: list[Instruction], role: Role, chosen: int = 0) -> str:
    """Return the HTML text; the share of instruction ``chosen`` is marked at first."""
    template = Template((Path(__file__).parent / "page.html").read_text(encoding="utf-8"))
    return template.substitute(
        title=escape(str(operand)),
        facts=escape("\n".join(facts(operand, shares, role, chosen))),
        data=json.dumps(_data(operand, shares, chosen)),
    )


def _data(o: Operand, shares: list[Instruction], chosen: int) -> dict[str, object]:
    linear = o.atom().linear()  # offset -> (MN, K)
    inverse = linear.invert()
    bases = {name: [offset for (offset,) in images] for name, images in inverse.inputs}
    back = [basis if o.major is Major.K else basis[::-1] for basis in dict(linear.inputs)["offset"]]
    strided, leading = ("dim0", "dim1") if o.major is Major.K else ("dim1", "dim0")
    atoms = o.grid if o.major is Major.K else o.grid[::-1]
    strided_first = o.order is AtomOrder.STRIDED_FIRST
    return {
        "shape": o.shape,
        "bits": o.bits,
        "major": o.major.value,
        "line": o.line,
        "unit": o.unit,
        "stridedAtoms": atoms[0],
        "leadingAtoms": atoms[1],
        "stridedStep": 1 if strided_first else atoms[1],  # number of atoms in memory from one to its neighbour
        "leadingStep": atoms[0] if strided_first else 1,
        "strided": bases[strided],
        "leading": bases[leading],
        "lineOf": [line for line, _ in back],
        "placeOf": [place for _, place in back],
        "instructions": [(share.mn, share.k) for share in shares],
        "rows": shares[0].rows,
        "depth": shares[0].depth,
        "chosen": chosen,
        "colors": UNIT_COLORS,
    }
