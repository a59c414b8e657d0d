"""Planner: chooses the backend of a problem and says why the others do not run it."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from typing import cast

from tilewise.backends.protocol import Backend
from tilewise.spec.problem import Problem
from tilewise.spec.statistics import NO_STATISTICS

# In order of preference. The reference is for tests, chosen by an explicit backend= only.
AUTOMATIC = ("hopper", "triton", "cpu")
BACKENDS = (*AUTOMATIC, "reference")
ALIASES = {"oracle": "reference"}  # earlier names
# Modules of backends in tilewise.backends with another name.
_MODULES = {"hopper": "gluon.sm90"}
# Backend for the backward if a backend does not support it; a backward needs only o and the LSE of the forward.
GRADIENTS = {"hopper": "triton"}
# Backend with a kernel for the tangents; the tangents of other backends are `tilewise.derivatives`.
TANGENTS = {"hopper": "triton", "triton": "triton"}


@dataclass(frozen=True)
class Plan:
    """Backends of the forward and backward of ``problem``, and for each other backend the reason against it."""

    problem: Problem
    backend: str
    declined: tuple[tuple[str, str], ...]
    asked: str = "auto"  # the argument ``backend``

    @cached_property
    def _without_statistics(self) -> Plan:
        """Plan without statistics of the scores, which the forward alone computes: whose backward runs."""
        score = self.problem.score
        if not any(score.statistics):
            return self
        return make_plan(replace(self.problem, score=replace(score, statistics=NO_STATISTICS)), self.asked)

    @cached_property
    def backward_declined(self) -> str | None:
        """Return why the backend does not support the backward; None if it does."""
        plan = self._without_statistics
        return backend_module(plan.backend).declines(plan.problem, "backward")

    @cached_property
    def backward(self) -> str:
        backend = self._without_statistics.backend
        return backend if self.backward_declined is None else GRADIENTS[backend]

    @cached_property
    def tangents_declined(self) -> str | None:
        """Return why no kernel computes the tangents; None if that of `TANGENTS` does."""
        name = TANGENTS.get(self.backend)
        if name is None:
            return f"{self.backend} has no kernel for tangents"
        reason = backend_module(name).declines(self.problem, "tangents")
        return None if reason is None else f"{name} {reason}"

    @property
    def tangents_module(self) -> Backend:
        return backend_module(TANGENTS[self.backend])

    @property
    def module(self) -> Backend:
        return backend_module(self.backend)

    @property
    def backward_module(self) -> Backend:
        return backend_module(self.backward)


def check_backend(name: str | None) -> str:
    """Return the name of the backend for ``backend=``, "auto" for None; raise ValueError for an unknown name."""
    found = "auto" if name is None else ALIASES.get(name, name) if isinstance(name, str) else name
    if found != "auto" and found not in BACKENDS:
        raise ValueError(f"backend: must be one of {', '.join(BACKENDS)}, auto or None, got {name!r}")
    return found


@cache
def backend_module(name: str) -> Backend:
    return cast(Backend, importlib.import_module(f"tilewise.backends.{_MODULES.get(name, name)}"))


def declines(name: str, problem: Problem) -> str | None:
    """Return why the backend cannot run forward and backward of the problem; None if it can."""
    backend = backend_module(name)
    reason = backend.declines(problem)
    if reason is not None:
        return reason
    reason = backend.declines(problem, "backward")
    if reason is None:
        return None
    other = GRADIENTS.get(name)
    if other is None:
        return f"its backward does not support the call: {reason}"
    reason = backend_module(other).declines(problem, "backward")
    return None if reason is None else f"takes its gradients from {other}, which does not support the call: {reason}"


@lru_cache(maxsize=4096)
def make_plan(problem: Problem, backend: str = "auto") -> Plan:
    """Choose the backend of ``problem``; raise if an explicit ``backend`` does not support it.

    No other forward takes its place; the gradients may come from the backend that `GRADIENTS` names.
    """
    backend = check_backend(backend)
    if backend != "auto":
        reason = declines(backend, problem)
        if reason is not None:
            raise ValueError(f"backend: {backend!r} cannot run this call: {reason}")
        others = tuple((b, "another backend was asked for") for b in AUTOMATIC if b != backend)
        return Plan(problem, backend, others, backend)
    declined: list[tuple[str, str]] = []
    for name in AUTOMATIC:
        reason = declines(name, problem) or backend_module(name).prefers(problem)
        if reason is None:
            later = AUTOMATIC[len(declined) + 1 :]
            rest = [(b, declines(b, problem) or f"{name} comes before it") for b in later]
            return Plan(problem, name, (*declined, *rest))
        declined.append((name, reason))
    raise ValueError("no backend can run this call: " + "; ".join(f"{b}: {why}" for b, why in declined))
