"""The table of operands: each tensor of a call is one row, the annotation of its field in `backends.protocol.Inputs`.

Names and order, the operator's schema, gradients, checks, DTensor placements and words are made of the rows at import.
"""

from __future__ import annotations

from typing import Any, NamedTuple, get_args, get_type_hints

from torch import Tensor

Maybe = Tensor | None


SCORES = "B|1 H|Hkv|1 M|1 N|1"  # axes that broadcast to the scores


class Axes(NamedTuple):
    """A row of the table.

    axes: allowed sizes of each axis, joined by "|". Names are those of `Sizes`; another name is any size.
    grad: True if the tensor can have a gradient.
    packed: True if a packed batch concatenates its queries or keys, as those of q. `Packed.forms` names others.
    words: name in explanations and in a backend's reasons.
    """

    axes: str = ""
    grad: bool = False
    packed: bool = False
    words: str = ""

    def sizes(self, axis: int) -> list[str]:
        """Return the names of the sizes that an axis may have; none if there is no such axis."""
        axes = self.axes.split()
        return axes[axis].split("|") if axis < len(axes) else []

    @property
    def broadcasts(self) -> bool:
        """True if the axes broadcast to the scores."""
        pairs = zip(self.axes.split(), SCORES.split(), strict=False)
        return len(self.axes.split()) == 4 and all(set(x.split("|")) <= set(y.split("|")) for x, y in pairs)


def rows_of(record: type) -> dict[str, Axes]:
    """Return the rows of a record by name, in order; a record within it is replaced by its rows."""
    found: dict[str, Axes] = {}
    for name, kind in get_type_hints(record, include_extras=True).items():
        inner = inner_record(kind)
        found |= {name: kind.__metadata__[0]} if inner is None else rows_of(inner)
    return found


def inner_record(kind: Any) -> type | None:
    """Return the record type of a field that is a record or None; None for other fields."""
    return next((x for x in get_args(kind) if isinstance(x, type) and hasattr(x, "_fields")), None)
