"""Parameters of tests: rows in which each two values of different options meet, where all rows would be too many, and
cases by their names."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations, product
from typing import Any

import pytest

Pair = tuple[int, int, int, int]  # option, which of its values, another option, which of its values


def pairwise(*options: Iterable[Any]) -> list[tuple]:
    """Some rows of ``itertools.product(*options)`` such that each pair of values of two options is in one of them.

    A fault that shows by itself, or where two options meet, is found by these rows as by all. Greedy, and the same each
    time: a row begins with the first pair that is missing, and each other option takes the value that adds most.
    """
    values = [list(option) for option in options]
    if len(values) < 2:
        return list(product(*values))
    missing = dict.fromkeys(
        (m, a, n, b)
        for m, n in combinations(range(len(values)), 2)
        for a in range(len(values[m]))
        for b in range(len(values[n]))
    )
    rows = []
    while missing:
        m, a, n, b = next(iter(missing))
        row = {m: a, n: b}
        for option in range(len(values)):
            if option not in row:
                row[option] = max(range(len(values[option])), key=lambda value: _added(row, option, value, missing))
        for first, second in combinations(range(len(values)), 2):
            missing.pop((first, row[first], second, row[second]), None)
        rows.append(tuple(values[option][row[option]] for option in range(len(values))))
    return rows


def _added(row: dict[int, int], option: int, value: int, missing: dict[Pair, None]) -> int:
    """How many missing pairs a row has with one more value."""
    pairs = ((m, a, option, value) if m < option else (option, value, m, a) for m, a in row.items())
    return sum(pair in missing for pair in pairs)


def each(cases: Iterable[Any]) -> Any:
    """A parameter ``case``, by the name of each."""
    return pytest.mark.parametrize("case", list(cases), ids=str)


def each_run(runs: Iterable[tuple[Any, Iterable[Any]]]) -> Any:
    """Parameters ``case`` and ``terms``, by the names of both."""
    return pytest.mark.parametrize(
        ("case", "terms"), [pytest.param(c, t, id=f"{c}; {'; '.join(map(str, t))}") for c, t in runs]
    )
