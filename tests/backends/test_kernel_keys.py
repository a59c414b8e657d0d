"""The key of a kernel, by which Triton keeps what it has compiled, is the same in every process."""

from __future__ import annotations

import importlib
import pkgutil
from collections import defaultdict

import pytest

import tilewise.backends
import tilewise.operator.autograd  # the operators, which some of what follows asks for
import tilewise.ops

pytest.importorskip("triton")

from triton.language.core import constexpr
from triton.runtime.jit import JITCallable


def test_equal_names_have_equal_values():
    """A key lists constants of a kernel and of all that it calls by name, and orders equal names by where modules lie
    in memory: of two values one process has the one first, and another the other, and compiles again."""
    kernels = {}
    for package in (tilewise.backends, tilewise.ops):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            found = vars(importlib.import_module(module.name)).values()
            kernels |= {id(x): x for x in found if isinstance(x, JITCallable)}
    assert len(kernels) > 400
    for kernel in kernels.values():
        assert kernel.cache_key
        values = defaultdict(set)
        for (name, _), (value, _) in kernel.used_global_vals.items():
            if isinstance(value, constexpr):
                values[name].add(repr(value))
        assert not {name: x for name, x in values.items() if len(x) > 1}, f"{kernel.__module__}.{kernel.__name__}"
