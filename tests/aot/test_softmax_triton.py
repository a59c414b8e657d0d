"""The softmax's Triton kernels in Triton's interpreter, held to the error rule, and compiled for GPUs not here.

Programs that wait for each other do not run in the interpreter, where one comes after the other: what they share with
the others is tested here, they themselves in tests/gpu.
"""

from __future__ import annotations

import math

import pytest
import torch
from aot_child import compile_softmax
from aot_compilers import minor_version
from ledger import covering
from pairwise import each
from softmax_helpers import Case, by_kernels, check

pytest.importorskip("triton")
BRAIN, HALF, FLOAT = torch.bfloat16, torch.float16, torch.float32
AXES = ["11n", "1nn", "n1n", "nn1", "n11", "nnn", "111"]


def check_kernels(case):
    check(case, by_kernels)


@each(
    Case((3, 5, 37), dim=dim, dtype=dtype, bias=bias, mask=mask, layout=layout)
    for n, (dim, dtype) in enumerate((d, t) for d in (-1, 1, 0) for t in (HALF, FLOAT))
    for bias, mask, layout in (
        (None, None, "contiguous"), (AXES[n], None, "transposed"), (AXES[n + 1], AXES[n], "sliced"),
        (AXES[-1 - n], AXES[n + 1], "expanded"),
    )
)  # fmt: skip
def test_axes_and_layouts(interpreter, case):
    interpreter(check_kernels, case)


@each(
    [
        Case((5,)),
        Case((300, 1)),
        Case((2, 3, 1, 5, 6), dim=3, bias="1n1n1", mask="n1111"),
        Case((3, 129), bias="1n", bias_dtype=FLOAT, hidden=True),
        Case((3, 127), mask="nn", bias="nn", planted=math.nan),
        Case((3, 128), mask="nn", planted=math.inf, dtype=FLOAT),
        Case((3, 40), mask="nn", blind=True, bias="1n"),
        Case((3, 40), blind=True),
        # rows that are walked
        Case((2, 20001), bias="1n", mask="nn", dtype=FLOAT),
        Case((2, 20001), bias="nn", blind=True),
        Case((2, 17000), mask="1n", planted=math.nan, layout="sliced"),
        Case((600, 35), dim=0, bias="n1", blind=True, dtype=FLOAT),
        Case((40, 64, 3), dim=0, bias="1n1", layout="transposed"),
    ]
)
def test_special_cases(interpreter, case):
    interpreter(check_kernels, case)


def in_parts(case):
    """As on a GPU that has too few multiprocessors for its programs to wait for each other."""
    from tilewise import clear_caches
    from tilewise.ops.row_softmax.triton import config, launch

    was, launch.softmax_config = launch.softmax_config, lambda *a: config.SoftmaxConfig(False, 1, 64, 8, 192, 1)
    clear_caches()
    try:
        check(case, by_kernels)
    finally:
        launch.softmax_config = was
        clear_caches()


@each([Case((3, 1400), bias="1n", mask="nn", blind=True), Case((2, 1100), dtype=FLOAT, mask="nn", planted=math.nan)])
def test_rows_split_over_programs(interpreter, case):
    """The last of 8 parts has few columns, or none."""
    interpreter(in_parts, case)


def on_an_old_gpu():
    from types import SimpleNamespace

    from tilewise.ops.row_softmax.triton import launch

    was = torch.cuda.get_device_properties
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(major=7, minor=5, name="T4")
    try:
        launch._processors(SimpleNamespace(is_cuda=True, device="cuda"))
    finally:
        torch.cuda.get_device_properties = was


def test_an_old_gpu_is_an_error(interpreter):
    with pytest.raises(ValueError, match=r"^x: needs compute capability 8\.0 or later, T4 has 7\.5$"):
        interpreter(on_an_old_gpu)


# --- ahead of time ---

COMPILED = {
    "16k, mask, shared bias": Case((8, 512, 16384), dtype=BRAIN, bias="1nn", mask="n1n"),
    "16k": Case((4096, 16384), dtype=BRAIN),
    "32k": Case((2048, 32768), dtype=BRAIN),
    "64k": Case((1024, 65536), dtype=BRAIN),
    "128k": Case((512, 131072), dtype=BRAIN),
    "128k, full bias": Case((256, 131072), dtype=FLOAT, bias="nn"),
    "few rows of 1M": Case((2, 1 << 20), dtype=BRAIN, bias="1n"),
    "along the first axis": Case((4096, 4096), dtype=BRAIN, dim=0),
}
# All where torch 2.11 would run them on Hopper; elsewhere what takes most registers, or programs that wait.
RUNS = [
    *(("3.6.0", 90, name) for name in COMPILED),
    ("installed", 90, "64k"),
    ("installed", 80, "16k, mask, shared bias"),
    ("installed", 100, "64k"),
    ("3.6.0", 120, "16k"),
]


# Bytes that spill of the forward and of the backward with Triton 3.8 and with 3.9, where registers are bounded so that
# more programs fit.
MORE = {("3.8", 90, "32k"): (100, 0), ("3.9", 90, "32k"): (156, 0), ("3.8", 90, "128k"): (44, 28)}


@pytest.mark.parametrize(
    ("triton", "target", "name", "again"),
    [
        pytest.param(*run, again, id="{}-sm_{}-{}".format(*run))
        for run, again in zip(RUNS, covering([(run[0], COMPILED[run[2]]) for run in RUNS]), strict=True)
    ],
)
def test_compiled_kernels(compilers, triton, target, name, again):
    """Nothing spills, and nothing takes shared memory that a multiprocessor does not have."""
    kernels = compilers.compile(compile_softmax, triton, target, COMPILED[name], 132, again=again)
    for kernel in kernels:
        print(kernel)
    assert len(kernels) >= 2
    assert not any(kernel.warnings for kernel in kernels)
    ceilings = MORE.get((minor_version(triton), target, name), (0,) * len(kernels))
    assert all(kernel.spill_stores <= most for kernel, most in zip(kernels, ceilings, strict=True))
    assert all(kernel.shared <= 48 * 1024 for kernel in kernels)


@pytest.mark.parametrize(
    ("rows", "length", "processors", "parts"),
    [
        (1 << 20, 16384, 132, (1, 2, 1, 1)),
        (1 << 10, 65536, 132, (16, 16, 16, 16)),
        (1 << 10, 1 << 17, 132, (8, 64, 64, 32)),
        (1 << 10, 1 << 17, 120, (8, 32, 32, 32)),
        (1 << 10, 1 << 18, 132, (64, 64, 64, 64)),
        (1 << 10, 65536, 16, None),  # 16 programs that wait for each other, and room for 16: not half of it
        (8, 65536, 132, None),  # too few rows to keep the device busy
        (1 << 10, 65536, 0, None),
        (1, 1 << 21, 132, None),
    ],
)
def test_programs_wait_for_each_other_only_where_they_fit(rows, length, processors, parts):
    """Else rows are walked: in the interpreter (no processors) by one program each, elsewhere by enough of them."""
    from tilewise.ops.row_softmax.triton.config import softmax_config

    for n, (itemsize, backward) in enumerate(((2, False), (2, True), (4, False), (4, True))):
        config = softmax_config(rows, rows, length, False, itemsize, backward, processors)
        assert config.on_chip == (parts is not None)
        if parts is not None:
            assert config.parts == parts[n]
            assert 2 * config.parts <= processors or config.parts == 1
        else:
            assert (config.parts > 1) == (rows < processors)
        assert config.parts * config.span >= length
