"""Cache of what calls prepare once per layout."""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")
LIMIT = 4096


class Prepared(dict[tuple, T]):
    """Cache of at most `LIMIT` entries, cleared when full; a lookup is a plain dictionary lookup. Threads share it, and
    values stay alive: docs/architecture.md says what they may hold."""

    def keep(self, key: tuple, value: T) -> T:
        if len(self) >= LIMIT:
            self.clear()
        self[key] = value
        return value
