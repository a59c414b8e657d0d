"""The kernels of tilewise.matmul compiled ahead of time: nothing spills, no wgmma waits for another or races."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
import torch
from aot_child import compile_matmul
from matmul_helpers import Product

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

USUAL = Product(M=4096, N=4096, K=4096, dtype=torch.bfloat16)
# Two warpgroups, four wgmma a step of 64, once for the first step and once in the loop.
DESIGNED = 2 * 4 * 2
# Triton, case, changes to its configuration.
HOPPER = [
    ("installed", replace(USUAL, c="mn"), {}),
    ("3.6.0", replace(USUAL, c="mn"), {"turns": True}),
    ("3.6.0", replace(USUAL, a_layout="transposed", b_layout="transposed", c="n"), {}),
    ("3.6.0", replace(USUAL, c="mn"), {}),
    ("3.6.0", replace(USUAL, c="mn", alpha=0.125), {}),
    ("3.6.0", replace(USUAL, c="mn", c_dtype=torch.float32), {}),
]
TRITON = [
    ("3.6.0", 90, "wgmma", replace(USUAL, c="mn", a_layout="transposed")),
    ("installed", 80, "mma.sync", USUAL),
    ("installed", 80, None, replace(USUAL, dtype=torch.float32, c="mn")),
    ("installed", 100, "tcgen05", USUAL),
    ("installed", 120, "mma.sync", replace(USUAL, c="n", M=799)),
]


def compiled(compilers, triton, target, case, backend, **changes):
    (kernel,) = compilers.run(compile_matmul, triton, target, case, backend, changes)
    print(kernel)
    return kernel


@pytest.mark.parametrize(
    ("triton", "case", "changes"),
    [pytest.param(*run, id=f"{run[1]}{' '.join(['', *run[2]])}, triton {run[0]}") for run in HOPPER],
)
def test_hopper(compilers, triton, case, changes):
    kernel, wgmma, hazards = compiled(compilers, triton, 90, case, "hopper", **changes)
    assert kernel.shared <= kernel.shared_limit
    assert not kernel.spill_stores, f"spills {kernel.spill_stores} bytes"
    assert not kernel.warnings
    assert not hazards
    assert wgmma == DESIGNED


@pytest.mark.parametrize(
    ("triton", "target", "instruction", "case"),
    [pytest.param(*run, id=f"sm_{run[1]}, {run[3]}, triton {run[0]}") for run in TRITON],
)
def test_triton(compilers, triton, target, instruction, case):
    kernel = compiled(compilers, triton, target, case, "triton")
    assert kernel.shared <= kernel.shared_limit
    assert kernel.tensor_memory <= 512
    assert not kernel.spill_stores, f"spills {kernel.spill_stores} bytes"
    assert not kernel.warnings
    assert instruction is None or kernel.instructions[instruction]
