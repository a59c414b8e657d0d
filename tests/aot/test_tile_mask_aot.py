"""Kernels with a mask by tiles, compiled ahead of time: see test_triton_aot.py and test_hopper_aot.py."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from aot_child import compile_case, compile_hopper_case, compile_kept_keys
from aot_compilers import minor_version
from helpers import Case

USUAL = Case(B=4, H=16, M=4096, N=4096, D=128, dtype=torch.bfloat16, lse=False)


@pytest.mark.parametrize(
    ("triton", "case", "tiles", "spills"),
    [
        ("3.6.0", USUAL, "bits 128", 8),
        ("installed", USUAL, "intervals 128", 224),
    ],
)
def test_compiled_kernels(compilers, triton, case, tiles, spills):
    """They fit, and spill no more than this many bytes: a ceiling, to be lowered and never raised."""
    kernels = compilers.compile(compile_case, triton, 90, case, True, False, (), tiles)
    for kernel in kernels:
        print(kernel)
        assert kernel.shared <= kernel.shared_limit
        assert kernel.spill_stores <= spills, f"{kernel.name} spills {kernel.spill_stores} bytes"
        if kernel.name in ("forward_kernel", "backward_kernel"):
            assert kernel.instructions["wgmma"]


# Bytes that may spill with Triton 3.6, 3.7, 3.8 and 3.9: of the second, four and eight from one line table to another.
FORWARDS = [
    ("installed", USUAL, "bits 128", (0, 8, 0, 4)),
    ("3.6.0", dataclasses.replace(USUAL, mask="b1mn", layout="sliced"), "", (232, 324, 264, 372)),
]


@pytest.mark.parametrize(("triton", "case", "tiles", "spills"), FORWARDS)
def test_a_forward_whose_mask_is_read_by_pointers(compilers, triton, case, tiles, spills):
    """Triton computes its softmax once, in the layout of the product, and not in that of the mask too."""
    kernel = compilers.compile(compile_case, triton, 90, case, False, False, (), tiles)[-1]
    print(kernel)
    assert kernel.name == "forward_kernel"
    assert kernel.spill_stores <= spills[int(minor_version(triton)[2:]) - 6]


@pytest.mark.parametrize(("triton", "tiles"), [("3.6.0", "bits 128"), ("installed", "intervals 64")])
def test_compiled_hopper_kernels(compilers, triton, tiles):
    """Those that read tiles; the others are those of a bool mask."""
    for backward in (False, True):
        codes = compilers.compile(compile_hopper_case, triton, 90, USUAL, backward, tiles)
        names = [code.kernel.name for code in codes]
        assert names[backward : backward + 2] == ["tile_summary_kernel", "tile_list_kernel"]
        for kernel, _, hazards in codes:
            print(kernel)
            assert kernel.shared <= kernel.shared_limit
            assert not kernel.spill_stores, f"{kernel.name} spills {kernel.spill_stores} bytes"
            assert not hazards


def test_compiled_kernels_of_documents(compilers):
    """Both forwards, the mask's and the packed batch's, of which the lists give one something to do."""
    case = dataclasses.replace(USUAL, B=1, causal=True)
    codes = compilers.compile(compile_hopper_case, "3.6.0", 90, case, False, "documents 128")
    names = [code.kernel.name for code in codes]
    assert names == [
        "tile_summary_kernel", "tile_list_kernel", "documents_kernel", "forward_kernel", "forward_kernel",
        "nan_fixup_kernel",
    ]  # fmt: skip
    for kernel, _, hazards in codes:
        print(kernel)
        assert kernel.shared <= kernel.shared_limit
        assert not kernel.spill_stores, f"{kernel.name} spills {kernel.spill_stores} bytes"
        assert not hazards


@pytest.mark.parametrize("triton", ["3.6.0", "installed"])
def test_compiled_kernels_of_a_shared_dbias(compilers, triton):
    """More share it than a group of programs has: its sum is zeroed and read tile by tile."""
    case = dataclasses.replace(USUAL, bias="11mn")
    codes = compilers.compile(compile_hopper_case, triton, 90, case, True, "bits 128")
    names = [code.kernel.name for code in codes]
    assert names == [
        "preprocess_kernel", "tile_summary_kernel", "tile_list_kernel", "group_list_kernel", "sparse_sum_kernel",
        "backward_kernel", "postprocess_kernel", "dbias_reduce_kernel", "sparse_sum_kernel",
    ]  # fmt: skip
    for kernel, _, _ in codes:
        print(kernel)
        assert kernel.name == "backward_kernel" or not kernel.spill_stores, f"{kernel.name} spills"


def test_compiled_kernels_of_a_dbias_of_sixteen_heads(compilers):
    """They add to its two sums, and work tiles come the longest first."""
    case = dataclasses.replace(USUAL, B=1, bias="11mn")
    codes = compilers.compile(compile_hopper_case, "3.6.0", 90, case, True, "bits 128")
    names = [code.kernel.name for code in codes]
    assert names == [
        "preprocess_kernel", "tile_summary_kernel", "tile_list_kernel", "longest_first_kernel", "sparse_sum_kernel",
        "backward_kernel", "postprocess_kernel", "sparse_sum_kernel",
    ]  # fmt: skip
    for kernel, _, hazards in codes:
        print(kernel)
        most = 12 if kernel.name == "backward_kernel" else 0  # of the warps that load
        assert kernel.spill_stores <= most, f"{kernel.name} spills {kernel.spill_stores} bytes"
        assert not hazards


@pytest.mark.parametrize(("shape", "chunks"), [((1, 16, 4096, 128), 4), ((1, 1, 4096, 1), 1)])
def test_compiled_kernels_of_dynamic_masks(compilers, shape, chunks):
    """Each level of 4,096 keys, of which Triton makes few kernels; none spills. One head, chunk and column: numbers of
    1 are constants."""
    kernels = compilers.compile(compile_kept_keys, "installed", 90, shape, chunks)
    levels = ["smallest_counts_kernel", "smallest_level_kernel"] * 12
    assert [kernel.name for kernel in kernels] == [
        "smallest_start_kernel",
        *levels,
        "selected_intervals_kernel",
        "interval_tiles_kernel",
        "chosen_keys_kernel",
        "ordered_keys_kernel",
        "places_kernel",
        "sum_rows_kernel",
        "take_rows_kernel",
    ]
    for kernel in kernels:
        print(kernel)
        assert not kernel.spill_stores, f"{kernel.name} spills {kernel.spill_stores} bytes"
