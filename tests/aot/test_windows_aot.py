"""The kernels of windows of atoms, compiled for GPUs that are not here."""

from __future__ import annotations

import pytest
from aot_child import WindowCase, compile_windows


@pytest.mark.parametrize(
    ("triton", "target", "case", "spills"),
    [
        ("3.6.0", 90, WindowCase(), (12, 140)),
        ("3.6.0", 90, WindowCase(samples=16, heads_last=True, length=10241, shift=True), None),
        ("installed", 90, WindowCase(head_dim=48), None),
        ("installed", 80, WindowCase(), None),
    ],
)
def test_compiled_kernels(compilers, triton, target, case, spills):
    """One each way, which fit and spill no more than so many bytes: a ceiling, to be lowered and never raised."""
    kernels = compilers.compile(compile_windows, triton, target, case)
    assert [kernel.name for kernel in kernels] == ["forward_kernel", "backward_kernel"]
    for kernel in kernels:
        print(kernel)
    found = tuple(kernel.spill_stores for kernel in kernels)
    assert all(kernel.shared <= 48 * 1024 and not kernel.warnings for kernel in kernels)
    assert all(kernel.instructions["mma.sync"] for kernel in kernels)
    assert spills is None or all(x <= y for x, y in zip(found, spills, strict=True)), found
