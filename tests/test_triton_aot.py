"""The Triton kernels compiled ahead of time for GPUs that are not here: do they compile, fit, use tensor cores, spill?

With the installed triton, and with Triton 3.6.0 where `make test` has put it, because torch 2.11 pins that one. Child
processes compile (see aot_child.py): a target that a compiler cannot handle ends its process.
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
import torch
from aot_child import compile_case
from aot_compilers import TRITON_360, Compilers
from helpers import Case

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")

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
    "ragged, shared bias": {"bias": "1hmn", "M": 4033, "N": 4001},
    "by pointers, causal": {"causal": True, "layout": "sliced"},
    "by pointers, causal, shared bias": {"causal": True, "bias": "1hmn", "layout": "sliced"},
    "float32, shared bias": {"dtype": torch.float32, "bias": "1hmn"},
}
# (triton, target) -> head dimension -> terms. Broad where the numbers matter most, narrow elsewhere.
GRID = {
    ("installed", 90): {
        32: ["dense", "shared bias"],
        64: ["dense", "causal", "full bias", "shared bias", "bias of keys", "mask", "softcap, window",
             "by pointers, causal, shared bias", "deterministic, shared bias", "float32, shared bias"],
        128: ["dense", "causal", "full bias", "full float32 bias", "shared bias", "bias of keys", "mask",
              "softcap, window", "ragged, shared bias", "by pointers, causal", "by pointers, causal, shared bias",
              "deterministic", "deterministic, shared bias"],
        256: ["dense", "causal", "shared bias", "deterministic, shared bias"],
    },
    ("3.6.0", 90): {
        64: ["dense", "full bias", "shared bias"],
        128: ["dense", "causal", "full bias", "shared bias", "ragged, shared bias", "by pointers, causal",
              "by pointers, causal, shared bias", "deterministic"],
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
SPILLS: dict[tuple[int, int, str], dict[str, int]] = {
    (90, 64, "causal"): {"backward_kernel": 16},
    (90, 64, "full bias"): {"backward_kernel": 336},
    (90, 64, "shared bias"): {"backward_kernel": 412},
    (90, 64, "bias of keys"): {"forward_kernel": 3284, "backward_kernel": 4},
    (90, 64, "mask"): {"forward_kernel": 4, "backward_kernel": 44},
    (90, 64, "softcap, window"): {"backward_kernel": 28},
    (90, 64, "by pointers, causal, shared bias"): {"forward_kernel": 1800},
    (90, 64, "deterministic, shared bias"): {"backward_kernel": 28},
    (90, 64, "float32, shared bias"): {"forward_kernel": 3216, "backward_kernel": 1012},
    (90, 128, "dense"): {"backward_kernel": 428},
    (90, 128, "causal"): {"backward_kernel": 360},
    (90, 128, "full bias"): {"backward_kernel": 224},
    (90, 128, "full float32 bias"): {"backward_kernel": 268},
    (90, 128, "shared bias"): {"backward_kernel": 216},
    (90, 128, "bias of keys"): {"backward_kernel": 824},
    (90, 128, "mask"): {"backward_kernel": 576},
    (90, 128, "softcap, window"): {"forward_kernel": 20, "backward_kernel": 736},
    (90, 128, "ragged, shared bias"): {"forward_kernel": 2672, "backward_kernel": 540},
    (90, 128, "by pointers, causal"): {"finite_kernel": 4, "backward_kernel": 44},
    (90, 128, "by pointers, causal, shared bias"): {"forward_kernel": 3352, "backward_kernel": 76},
    (90, 128, "deterministic"): {"backward_kernel": 64},
    (90, 256, "dense"): {"backward_kernel": 172},
    (90, 256, "causal"): {"forward_kernel": 112, "backward_kernel": 244},
    (90, 256, "shared bias"): {"forward_kernel": 120, "backward_kernel": 328},
    (90, 256, "deterministic, shared bias"): {
        "forward_kernel": 116,
        "backward_kernel": 88,
        "query_gradient_kernel": 700,
    },
    (80, 64, "shared bias"): {"forward_kernel": 984, "backward_kernel": 680},
    (80, 128, "causal"): {"backward_kernel": 9224},
    (80, 128, "deterministic, shared bias"): {"query_gradient_kernel": 136},
    (80, 256, "full float32 bias"): {"backward_kernel": 2324, "forward_kernel": 44},
    (86, 64, "shared bias"): {"forward_kernel": 932, "backward_kernel": 104},
    (86, 128, "causal"): {"backward_kernel": 148},
    (86, 128, "deterministic, shared bias"): {"query_gradient_kernel": 140},
    (86, 256, "full float32 bias"): {"forward_kernel": 36, "backward_kernel": 2216},
    (120, 64, "shared bias"): {"forward_kernel": 212, "backward_kernel": 140},
    (120, 128, "causal"): {"forward_kernel": 756, "backward_kernel": 1696},
    (120, 128, "deterministic, shared bias"): {"forward_kernel": 288, "query_gradient_kernel": 48},
    (120, 256, "full float32 bias"): {"forward_kernel": 2128, "backward_kernel": 11060},
}


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
    kernels = compilers.run(compile_case, triton, target, replace(USUAL, D=D, **TERMS[terms]))
    names = [kernel.name for kernel in kernels]
    assert {"forward_kernel", "backward_kernel"} <= set(names)
    assert ("query_gradient_kernel" in names) == ("deterministic" in terms)
    assert ("bias_gradient_kernel" in names) == (terms == "deterministic, shared bias")
    allowed = SPILLS.get((target, D, terms), {})
    assert set(allowed) <= set(names)

    faults = []
    for kernel in kernels:
        print(kernel)  # pytest -rP shows what a ceiling can be lowered to
        if kernel.shared > kernel.shared_limit:
            faults.append(f"{kernel.name}: {kernel.shared} bytes of shared memory of {kernel.shared_limit}")
        if kernel.tensor_memory > 512:
            faults.append(f"{kernel.name}: {kernel.tensor_memory} columns of tensor memory of 512")
        if kernel.spill_stores > allowed.get(kernel.name, 0):
            faults.append(f"{kernel.name}: spills {kernel.spill_stores} bytes of {allowed.get(kernel.name, 0)}")
        faults += [f"{kernel.name}: {warning}" for warning in kernel.warnings]
        if kernel.name in MAIN_KERNELS and "float32, " not in terms and not kernel.instructions[TENSOR_CORES[target]]:
            faults.append(f"{kernel.name}: no {TENSOR_CORES[target]}, but {kernel.instructions}")
    assert not faults, "\n".join(faults)
