"""Python's collector of garbage in the processes of tests, where hardly anything needs it."""

from __future__ import annotations

import gc


def collect_seldom() -> None:
    """Keep what is imported out of its sight, and have it look after 50,000 new objects instead of 700."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)
