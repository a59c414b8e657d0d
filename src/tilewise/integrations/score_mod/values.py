"""Numbers and views of recorded expressions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilewise.integrations.score_mod.symbols import Affine, Index, affine_of, words

DISTANCE, QUERY, KEY = frozenset(("distance",)), frozenset(("q",)), frozenset(("kv",))
ROW = frozenset(("b", "h"))  # indices that are equal for all pairs of queries and keys
_HALF = (torch.float16, torch.bfloat16)


class ScoreShape(NamedTuple):
    """Sizes of a call, and the device and dtype of its scores."""

    B: int
    H: int
    Hkv: int
    M: int
    N: int
    device: torch.device
    dtype: torch.dtype

    def sizes(self) -> dict[str, int]:
        return {"b": self.B, "h": self.H, "q": self.M, "kv": self.N}

    def indices(self, variables: frozenset[str]) -> dict[str, Tensor]:
        """Return each index as a tensor of four dimensions, (b, h, q, kv); distances are along the last."""
        found = {}
        for axis, (name, size) in enumerate(self.sizes().items()):
            if name in variables:
                found[name] = torch.arange(size, device=self.device).view(*([1] * axis), -1, *([1] * (3 - axis)))
        if "distance" in variables:
            found["distance"] = torch.arange(1 - self.M, self.N, device=self.device).view(1, 1, 1, -1)
        return found


# --- numbers of an expression ---


def computed(x: Any, indices: Mapping[str, Tensor]) -> Any:
    """Return the numbers of an expression for broadcasting indices. Captured 16-bit tensors are read in float32."""
    if not isinstance(x, Index):
        return x
    if x.affine is not None:
        return _affine_numbers(x.affine, indices, x.device)
    args = [computed(y, indices) for y in x.args]
    if x.name == "index":
        table = args[0].float() if args[0].dtype in _HALF else args[0]
        return table[tuple(args[1:])]
    assert x.function is not None
    return x.function(*args, **{name: computed(y, indices) for name, y in x.kwargs.items()})


def _affine_numbers(form: Affine, indices: Mapping[str, Tensor], device: torch.device) -> Tensor:
    total = torch.full((), form.constant, dtype=torch.int64, device=device)
    factors = {"b": form.b, "h": form.h}
    factors |= {"distance": form.kv} if "distance" in indices else {"q": form.q, "kv": form.kv}
    for name, factor in factors.items():
        if factor:
            total = total + factor * indices[name]
    return total.to(form.dtype)


def four_dims(x: Tensor) -> Tensor:
    """Return a tensor of up to four dimensions with four."""
    return x[(None,) * (4 - x.dim())]


class CapturedView(NamedTuple):
    """View of an indexed tensor.

    values: (B|1, H|Hkv|1, M|1, N|1), or (B|1, H|Hkv|1, M|N, entries) with ``distances``.
    axes: of "b", "h", "q", "kv" and "distance", those that it has.
    distances: the index of the entries, if there is one.
    """

    values: Tensor
    axes: tuple[str, ...]
    distances: Index | None


def captured_view(x: Index, shape: ScoreShape) -> CapturedView | None:
    """Return the view of ``table[...]`` by indices that are ranges; None if one is not, but for one by distance."""
    if x.open:
        return None
    values, distances = x.args[0], None
    axes: list[str] = []
    for axis in reversed(range(values.dim())):
        index = x.args[1 + axis]
        if isinstance(index, int):
            values = values.select(axis, index)
            continue
        if not isinstance(index, Index):
            return None
        if index.variables == DISTANCE:
            if distances is not None:
                return None
            distances, name = index, "distance"
        else:
            found = _range_of(index, shape)
            if found is None or found[0] in axes:
                return None
            name, start, size = found
            if values.shape[axis] < start + size:
                raise ValueError(
                    f"score_mod: {words(x)} reads {start + size} entries of axis {axis}, which has {values.shape[axis]}"
                )
            values = values.narrow(axis, start, size)
        axes.insert(0, name)
    lead = ["b", "h"]
    last = ["q", "kv"] if distances is None else ["q" if "q" in axes else "kv", "distance"]
    if set(axes) - {*lead, *last}:
        return None
    values = values.permute([axes.index(name) for name in lead + last if name in axes])
    for place, name in enumerate(lead + last):
        if name not in axes:
            values = values.unsqueeze(place)
    return CapturedView(values, tuple(axes), distances)


def _range_of(index: Index, shape: ScoreShape) -> tuple[str, int, int] | None:
    """Return the variable, start and size of an index that runs over consecutive entries."""
    if len(index.variables) != 1:
        return None
    (name,) = index.variables
    form = index.affine
    if form is not None:
        plain = getattr(form, name) == 1 and form.constant >= 0 and form.dtype == torch.int64
        return (name, form.constant, shape.sizes()[name]) if plain else None
    if index.name != "floordiv" or not isinstance(index.args[1], int):
        return None
    grouped = index.args[1] == shape.H // shape.Hkv and affine_of(index.args[0]) == Affine(0, 1, 0, 0, 0)
    return ("h", 0, shape.Hkv) if grouped else None  # the heads of k and v
