"""Formatting of numbers: three digits, thousands separators, units with prefixes."""

from __future__ import annotations

import math
from decimal import Decimal

_PREFIXES = ("n", "µ", "m", "", "k", "M", "G", "T", "P", "E", "Z")
_NONE = _PREFIXES.index("")
# (unit, its seconds, seconds from which on it is used), largest first.
_LONG = (("days", 86400.0, 172800.0), ("h", 3600.0, 7200.0), ("min", 60.0, 120.0))


def number(x: float) -> str:
    """Format a number: 0.00123, 45.6, 2,040; below 1e-6 or from 1e9 on with an exponent, 1e-12, 5.5e26."""
    x = float(f"{x:.3g}")
    if x == 0 or 1e-6 <= abs(x) < 1e9:
        return f"{Decimal(f'{x:.3g}'):,f}"
    mantissa, exponent = f"{x:.2e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def quantity(x: float, unit: str) -> str:
    """Format a number with a unit and its prefix: 1.23 GFLOP, 45.6 µs."""
    x = float(f"{x:.3g}")
    least, most = -_NONE, len(_PREFIXES) - _NONE - 1
    exponent = min(max(math.floor(math.log10(x) / 3), least), most) if x > 0 else 0
    return f"{number(x / 1000.0**exponent)} {_PREFIXES[exponent + _NONE]}{unit}"


def duration(seconds: float) -> str:
    """Format a time: 45.6 µs, 1.5 s, 40 min, 31.1 days."""
    for unit, size, least in _LONG:
        if seconds >= least:
            return f"{number(seconds / size)} {unit}"
    return quantity(seconds, "s")


def percent(share: float) -> str:
    """Format a share between 0 and 1: 50%, 0.308%, less than 0.001%."""
    return "less than 0.001%" if 0 < share < 1e-5 else f"{number(100 * share)}%"


def count(n: int, one: str) -> str:
    """Format a count with its noun: 1 warp, 4 warps."""
    return f"{n} {one}" if n == 1 else f"{n} {one}s"
