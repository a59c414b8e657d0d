"""What `pairwise` promises of its rows."""

from __future__ import annotations

from itertools import combinations, product

import pytest
from pairwise import pairwise


@pytest.mark.parametrize("sizes", [(), (3,), (2, 3), (3, 3, 3), (3, 3, 3, 10), (2,) * 10, (1, 5, 1, 4), (7, 3)])
def test_each_pair_is_in_a_row(sizes):
    rows = pairwise(*map(range, sizes))
    assert set(rows) <= set(product(*map(range, sizes)))
    assert len(set(rows)) == len(rows)
    for m, n in combinations(range(len(sizes)), 2):
        assert {(row[m], row[n]) for row in rows} == set(product(range(sizes[m]), range(sizes[n])))
    assert rows == pairwise(*map(range, sizes))


def test_few_rows():
    """Of two options all rows; of more about as many as the two with most values have."""
    assert pairwise("ab", "xyz") == list(product("ab", "xyz"))
    assert len(pairwise(*[range(3)] * 3, range(10))) <= 33
    assert len(pairwise(*[range(2)] * 10)) <= 12


def test_values_need_no_hash():
    assert pairwise([{}, {"causal": True}], ["q", "k"], [None]) == [
        ({}, "q", None), ({}, "k", None), ({"causal": True}, "q", None), ({"causal": True}, "k", None),
    ]  # fmt: skip
