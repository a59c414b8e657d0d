"""The Triton backend with a number of splits that a test chooses."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from helpers import Case, check


@contextlib.contextmanager
def forced_splits(splits: int) -> Iterator[None]:
    """Forwards of few queries run in so many splits, whatever their sizes; what was prepared before is forgotten."""
    from tilewise import call, dispatch
    from tilewise.backends.triton import launch

    chosen = launch.splits
    launch.splits = lambda problem, config: splits if problem.few_queries else 1
    dispatch.forwards.clear()
    dispatch.structures.clear()
    call.usual_calls.clear()
    try:
        yield
    finally:
        launch.splits = chosen
        dispatch.forwards.clear()
        dispatch.structures.clear()
        call.usual_calls.clear()


def check_split(case: Case, splits: int, device: str = "cpu") -> dict[str, float]:
    """`helpers.check` of the triton backend in so many splits."""
    with forced_splits(splits):
        return check(case, "triton", device)
