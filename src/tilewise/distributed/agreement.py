"""Agreement of all ranks on a call: they compare it before the first call of each kind.

A rank that raises alone leaves the others waiting in a collective, so an error of one rank is raised on all.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist

from tilewise.cache import CallCache
from tilewise.distributed.layout import Ranks

T = TypeVar("T")
Description = tuple[tuple[str, Hashable], ...]
_KINDS: dict[str, type[Exception]] = {x.__name__: x for x in (ValueError, TypeError, NotImplementedError)}
# Not in `calls`: ranks that agree make the same calls in the same order, so they drop an entry at the same call.
_LIMIT = 4096
_agreed: WeakKeyDictionary[Any, CallCache[str]] = WeakKeyDictionary()


def settled(
    ranks: Ranks, validate: bool, read: Callable[[], tuple[Description, Description, T]], choose: Callable[[T], str]
) -> tuple[str, T]:  # fmt: skip
    """Return the method that all ranks use, and the call that ``read`` returns after its description and what is
    compared beside. ``choose`` checks the first call of each kind. An error of one rank is raised on all."""
    failure: Exception | None = None
    description: Description | None = None
    beside: Description = ()
    chosen: str | None = None
    try:
        description, beside, found = read()
        chosen = _known(ranks.axes[0] if ranks.axes else ranks).get(description)
        known = chosen is not None
        if not known or validate:
            chosen = choose(found)
    except tuple(_KINDS.values()) as error:
        failure, known = error, False
    if not known or validate:
        agree(ranks, description, chosen, failure, beside=beside)
    assert chosen is not None
    return chosen, found


def agree(
    ranks: Ranks, description: Description | None, method: str | None, failure: Exception | None,
    *, beside: Description = (),
) -> None:  # fmt: skip
    """Compare this rank's call with the other ranks' and remember its method; raise on all ranks if they differ.
    ``failure``: this rank's error, raised on all ranks, of a mesh of two axes first on those of its row. ``beside``:
    compared, but not remembered."""
    if ranks.axes:
        across, inside = ranks.axes
        try:
            agree(inside, description, method, failure)
        except tuple(_KINDS.values()) as error:
            failure = error
        agree(across, description, method, failure)
        return
    mine = (*(description or ()), *beside) if failure is None else (type(failure).__name__, str(failure))
    everybody: list[Any] = [None] * ranks.size
    try:
        dist.all_gather_object(everybody, (failure is None, mine), group=ranks.group)
    except RuntimeError as error:
        if failure is not None:  # the other ranks knew such calls and were in another collective
            raise failure from error
        raise
    if failure is not None:
        raise failure
    for rank, (fine, found) in enumerate(everybody):
        if not fine:
            kind, message = found
            raise _KINDS[kind](f"rank {rank}: {message}")
    first, *others = (dict(found) for _, found in everybody)
    for rank, other in enumerate(others, 1):
        for name in (*first, *other):
            one, two = first.get(name), other.get(name)
            if one != two:
                raise ValueError(f"{name}: must be alike on all ranks, got {one} on rank 0 and {two} on rank {rank}")
    assert description is not None
    assert method is not None
    _known(ranks).put(description, method)


def _known(ranks: Ranks) -> CallCache[str]:
    """Return the method of each kind of call that this rank has made with these ranks."""
    return _agreed.setdefault(ranks.group, CallCache(_LIMIT))
