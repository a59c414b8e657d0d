"""Problem -> Plan: which backend runs a call, and why the others do not."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import cache, lru_cache
from types import ModuleType

from tilewise.problem import Problem

# In order of preference. The oracle is for tests: only an explicit backend= reaches it.
AUTOMATIC = ("triton", "cpu")
BACKENDS = (*AUTOMATIC, "oracle")


@dataclass(frozen=True)
class Plan:
    """The backend that runs ``problem`` and, for each other one, its name and why not."""

    problem: Problem
    backend: str
    declined: tuple[tuple[str, str], ...]

    @property
    def module(self) -> ModuleType:
        return backend_module(self.backend)


def check_backend(name: str | None) -> None:
    """Raise for a backend= that does not exist; None is the plan's own choice."""
    if name is not None and name not in BACKENDS:
        raise ValueError(f"backend: must be one of {', '.join(BACKENDS)} or None, got {name!r}")


@cache
def backend_module(name: str) -> ModuleType:
    """The backend's module: ``declines(problem)``, ``tiles(problem)``, ``forward(...)``, ``backward(...)``."""
    return importlib.import_module(f"tilewise.backends.{name}")


@lru_cache(maxsize=4096)
def make_plan(problem: Problem, backend: str = "auto") -> Plan:
    """Choose the backend of ``problem``; an explicit ``backend`` that declines it is an error, never a fallback."""
    if backend != "auto":
        if backend not in BACKENDS:
            raise ValueError(f"backend: must be one of {', '.join(BACKENDS)} or None, got {backend!r}")
        reason = backend_module(backend).declines(problem)
        if reason is not None:
            raise ValueError(f"backend: {backend!r} cannot run this call: {reason}")
        others = tuple((b, "another backend was asked for") for b in AUTOMATIC if b != backend)
        return Plan(problem, backend, others)
    declined: list[tuple[str, str]] = []
    for name in AUTOMATIC:
        reason = backend_module(name).declines(problem)
        if reason is None:
            later = AUTOMATIC[len(declined) + 1 :]
            rest = [(b, backend_module(b).declines(problem) or f"{name} comes before it") for b in later]
            return Plan(problem, name, (*declined, *rest))
        declined.append((name, reason))
    raise ValueError("no backend can run this call: " + "; ".join(f"{b}: {why}" for b, why in declined))
