"""The kernels of tilewise.matmul compiled ahead of time: nothing spills, no wgmma waits for another or races."""

from __future__ import annotations

from dataclasses import is_dataclass, replace

import pytest
import torch
from aot_child import compile_matmul
from ledger import covering
from matmul_helpers import Product

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


def compiled(compilers, triton, target, case, backend, again, **changes):
    (kernel,) = compilers.compile(compile_matmul, triton, target, case, backend, changes, again=again)
    print(kernel)
    return kernel


def each(runs, names, name):
    """With whether a run is compiled also where the ledger has it: of each compiler one, as test_triton_aot.py compiles
    for every target again."""
    params = zip(runs, covering([(run[0], *filter(is_dataclass, run)) for run in runs]), strict=True)
    return pytest.mark.parametrize((*names, "again"), [pytest.param(*run, more, id=name(run)) for run, more in params])


@each(HOPPER, ("triton", "case", "changes"), lambda run: f"{run[1]}{' '.join(['', *run[2]])}, triton {run[0]}")
def test_hopper(compilers, triton, case, changes, again):
    kernel, wgmma, hazards = compiled(compilers, triton, 90, case, "hopper", again, **changes)
    assert kernel.shared <= kernel.shared_limit
    assert not kernel.spill_stores, f"spills {kernel.spill_stores} bytes"
    assert not kernel.warnings
    assert not hazards
    assert wgmma == DESIGNED


@each(TRITON, ("triton", "target", "instruction", "case"), lambda run: f"sm_{run[1]}, {run[3]}, triton {run[0]}")
def test_triton(compilers, triton, target, instruction, case, again):
    kernel = compiled(compilers, triton, target, case, "triton", again)
    assert kernel.shared <= kernel.shared_limit
    assert kernel.tensor_memory <= 512
    assert not kernel.spill_stores, f"spills {kernel.spill_stores} bytes"
    assert not kernel.warnings
    assert instruction is None or kernel.instructions[instruction]
