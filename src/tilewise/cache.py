"""The two caches: `calls`, what calls prepare once for their layouts, and `kernels`, compiled kernels.

A cached object holds no tensor of a call. Keys begin with the name of what is cached, or the function that made it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any, Generic, NamedTuple, TypeVar

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


class CacheInfo(NamedTuple):
    """Use of a cache.

    Attributes:
        hits, misses: lookups since the process started or `clear_caches`; approximate if several threads call.
        size: number of entries.
        limit: the largest number of entries.
    """

    hits: int
    misses: int
    size: int
    limit: int


class CallCache(Generic[T]):
    """Cache of at most ``limit`` entries, shared by all threads.

    Entries are in two generations. When the recent one has half of the limit, it becomes the older one, and the
    entries that were not used since the last time are dropped.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._changing = threading.Lock()
        self.clear()

    def clear(self) -> None:
        self._recent: dict[tuple, T] = {}
        self._older: dict[tuple, T] = {}
        self.hits = self.misses = 0

    def get(self, key: tuple) -> T | None:
        found = self._recent.get(key)
        if found is None:
            found = self._older.get(key)
            if found is None:
                self.misses += 1
                return None
            self.put(key, found)
        self.hits += 1
        return found

    def put(self, key: tuple, value: T) -> T:
        """Cache ``value``, which is not None, and return it."""
        if len(self._recent) >= self.limit // 2:
            with self._changing:
                if len(self._recent) >= self.limit // 2:
                    self._recent, self._older = {}, self._recent
        self._recent[key] = value
        return value

    def info(self) -> CacheInfo:
        return CacheInfo(self.hits, self.misses, len(self._older | self._recent), self.limit)


calls: CallCache[Any] = CallCache(8192)
kernels: CallCache[Any] = CallCache(4096)


def prepared_once(function: F) -> F:
    """Cache the results of ``function`` in `calls`, by its positional arguments."""

    @wraps(function)
    def found(*arguments: Any) -> Any:
        key = (function, *arguments)
        known = calls.get(key)
        return calls.put(key, function(*arguments)) if known is None else known

    return found  # type: ignore[return-value]


def cache_info() -> dict[str, CacheInfo]:
    """Return the use of both caches, by name: "calls" and "kernels".

    A call with new shapes, strides, dtypes or other arguments adds entries to "calls"; a kernel that is compiled adds
    one to "kernels". Each cache is bounded: the entries that were not used for the longest time go first.

    Example:
        >>> tilewise.clear_caches()
        >>> q = torch.randn(1, 2, 8, 16)
        >>> o = tilewise.attention(q, q, q)
        >>> tilewise.cache_info()["kernels"].size
        0
    """
    return {"calls": calls.info(), "kernels": kernels.info()}


def clear_caches() -> None:
    """Forget all prepared calls and compiled kernels, and set the counters of `cache_info` to 0.

    Results do not change: the next call of each layout is prepared again. Triton has caches of its own, so kernels are
    not compiled again. Other threads may be in calls.

    Example:
        >>> tilewise.clear_caches()
    """
    calls.clear()
    kernels.clear()
