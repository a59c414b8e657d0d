"""What calls need once and not each time, kept by all that it depends on."""

from __future__ import annotations

from typing import TypeVar

T = TypeVar("T")
LIMIT = 4096


class Prepared(dict[tuple, T]):
    """At most `LIMIT` of them: one more, and all are forgotten. A look-up is a dictionary's own.

    Threads share it, and values live on: docs/architecture.md says what these may hold.
    """

    def keep(self, key: tuple, value: T) -> T:
        if len(self) >= LIMIT:
            self.clear()
        self[key] = value
        return value
