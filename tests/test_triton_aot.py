"""The Triton kernels compiled ahead of time for GPUs that are not here: do they compile, fit, use tensor cores, spill?

With the installed triton, and with Triton 3.6.0 where `make test` has put it, because torch 2.11 pins that one. Child
processes compile (see aot_child.py): a target that a compiler cannot handle ends its process.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import aot_child
import pytest
import torch
from helpers import Case

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

TRITON_360 = Path(sys.prefix) / "triton-3.6.0"
# What each target's main kernels have to be made of.
TENSOR_CORES = {80: "mma.sync", 86: "mma.sync", 90: "wgmma", 100: "tcgen05", 120: "mma.sync"}
MAIN_KERNELS = ("forward_kernel", "backward_kernel", "query_gradient_kernel", "bias_gradient_kernel")

USUAL = Case(B=4, H=16, M=4096, N=4096, dtype=torch.bfloat16, lse=False)
TERMS = {
    "dense": {},
    "causal": {"causal": True},
    "full bias": {"bias": "bhmn"},
    "full float32 bias": {"bias": "bhmn", "bias_dtype": torch.float32},
    "shared bias": {"bias": "1hmn"},
    "bias of keys": {"bias": "b11n"},
    "mask": {"mask": "b1mn"},
    "softcap, window": {"softcap": 20.0, "window": (512, 0)},
    "deterministic": {"deterministic": True},
    "deterministic, shared bias": {"deterministic": True, "bias": "1hmn"},
    "float32, shared bias": {"dtype": torch.float32, "bias": "1hmn"},
}
# (triton, target) -> head dimension -> terms. Broad where the numbers matter most, narrow elsewhere.
GRID = {
    ("installed", 90): {
        32: ["dense", "shared bias"],
        64: ["dense", "causal", "full bias", "shared bias", "bias of keys", "mask", "softcap, window",
             "deterministic, shared bias", "float32, shared bias"],
        128: ["dense", "causal", "full bias", "full float32 bias", "shared bias", "bias of keys", "mask",
              "softcap, window", "deterministic", "deterministic, shared bias"],
        256: ["dense", "causal", "shared bias", "deterministic, shared bias"],
    },
    ("3.6.0", 90): {
        64: ["dense", "full bias", "shared bias"],
        128: ["dense", "causal", "full bias", "shared bias", "deterministic"],
        256: ["shared bias"],
    },
    **{
        ("installed", target): {
            64: ["shared bias"], 128: ["causal", "deterministic, shared bias"], 256: ["full float32 bias"],
        }
        for target in (80, 86, 100, 120)
    },
    **{("3.6.0", target): {128: ["causal"], 256: ["full float32 bias"]} for target in (80, 86, 100, 120)},
}  # fmt: skip
RUNS = [
    (triton, target, D, terms)
    for (triton, target), columns in GRID.items()
    for D, rows in columns.items()
    for terms in rows
]

# Bytes of register spills, (target, head dimension, terms) -> kernel, 0 where there is no entry. These are ceilings:
# to be lowered when a kernel gets better, never raised.
SPILLS: dict[tuple[int, int, str], dict[str, int]] = {}


class Compilers:
    """Child processes, one at a time: each holds a compiler for one triton and one target."""

    def __init__(self, cache: Path):
        self.cache, self.current, self.pool = cache, None, None

    def compile(self, triton: str, target: int, case: Case) -> list[aot_child.Kernel]:
        if self.current != (triton, target):
            self.close()
            path = str(TRITON_360) if triton == "3.6.0" else None
            self.current = (triton, target)
            self.pool = ProcessPoolExecutor(
                1, multiprocessing.get_context("spawn"), aot_child.start, (divmod(target, 10), path, str(self.cache))
            )
        try:
            return self.pool.submit(aot_child.compile_case, case).result()
        except BaseException:
            self.close()  # whatever a failed compilation leaves behind, the next one starts afresh
            raise

    def close(self) -> None:
        if self.pool is not None:
            self.pool.shutdown()
        self.current = self.pool = None


@pytest.fixture(scope="module")
def compilers(tmp_path_factory):
    compilers = Compilers(tmp_path_factory.mktemp("triton-cache"))
    yield compilers
    compilers.close()


@pytest.mark.parametrize(
    ("triton", "target", "D", "terms"),
    [pytest.param(*run, id="sm_{1}, D{2}, {3}, triton {0}".format(*run)) for run in RUNS],
)
def test_compiled_kernels(compilers, triton, target, D, terms):
    if triton == "3.6.0" and not TRITON_360.is_dir():
        pytest.skip(f"no Triton 3.6.0 in {TRITON_360}: `make test` puts it there")
    kernels = compilers.compile(triton, target, replace(USUAL, D=D, **TERMS[terms]))
    names = [kernel.name for kernel in kernels]
    assert {"forward_kernel", "backward_kernel"} <= set(names)
    assert ("query_gradient_kernel" in names) == ("deterministic" in terms)
    assert ("bias_gradient_kernel" in names) == (terms == "deterministic, shared bias")
    allowed = SPILLS.get((target, D, terms), {})
    assert set(allowed) <= set(names)

    faults = []
    for kernel in kernels:
        if kernel.shared > kernel.shared_limit:
            faults.append(f"{kernel.name}: {kernel.shared} bytes of shared memory of {kernel.shared_limit}")
        if kernel.spill_stores > allowed.get(kernel.name, 0):
            faults.append(f"{kernel.name}: spills {kernel.spill_stores} bytes of {allowed.get(kernel.name, 0)}")
        faults += [f"{kernel.name}: {warning}" for warning in kernel.warnings]
        if kernel.name in MAIN_KERNELS and "float32, " not in terms and not kernel.instructions[TENSOR_CORES[target]]:
            faults.append(f"{kernel.name}: no {TENSOR_CORES[target]}, but {kernel.instructions}")
    assert not faults, "\n".join(faults)
