"""A fault that a careless hand could make: faults.py and faults_hopper.py list them."""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    """file: below src. text: occurs once in it. becomes: the fault. wrong: what goes wrong. test: below tests."""

    file: str
    text: str
    becomes: str
    wrong: str
    test: str
