"""The Triton kernels compiled ahead of time for GPUs that are not here: do they compile, fit, use tensor cores, spill?

With the installed triton, and with Triton 3.6.0 where `make test` has put it, because torch 2.11 pins that one. Child
processes compile (see aot_child.py): a target that a compiler cannot handle ends its process.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import descriptor_lint
import pytest
import torch
from aot_child import compile_case
from aot_compilers import minor_version
from helpers import Case
from ledger import covering
from relative_helpers import Term
from torch import Tensor

pytest.importorskip("triton")

# What each target's main kernels have to be made of.
TENSOR_CORES = {80: "mma.sync", 86: "mma.sync", 90: "wgmma", 100: "tcgen05", 120: "mma.sync"}
MAIN_KERNELS = ("forward_kernel", "backward_kernel", "query_gradient_kernel", "bias_gradient_kernel")
ONE_TILE_KERNELS = ("one_tile_forward_kernel", "one_tile_backward_kernel")
BY_DISTANCE_KERNELS = ("diagonal_gradient_kernel", "distance_gradient_kernel")

USUAL = Case(B=4, H=16, M=4096, N=4096, dtype=torch.bfloat16, lse=False)
TERMS = {
    "dense": {},
    "causal": {"causal": True},
    "full bias": {"bias": "bhmn"},
    "shared bias": {"bias": "1hmn"},
    "bias of keys": {"bias": "b11n"},
    "softcap, window": {"softcap": 20.0, "window": (512, 0)},
    "deterministic, shared bias": {"deterministic": True, "bias": "1hmn"},
    "mask": {"mask": "b1mn"},
    "shared bias, mask": {"bias": "1hmn", "mask": "b1mn"},
    "by pointers, causal, shared bias": {"causal": True, "bias": "1hmn", "layout": "sliced"},
}
# (triton, target) -> head dimension -> terms. Few of each, for a compiler takes seconds a kernel: what training uses
# most on Hopper with either Triton, and on each other target what fills its shared memory or registers.
GRID = {
    ("installed", 90): {64: ["dense"], 128: ["causal", "full bias", "deterministic, shared bias"]},
    ("3.6.0", 90): {
        64: ["softcap, window", "bias of keys", "mask"],
        128: ["dense", "shared bias", "by pointers, causal, shared bias", "mask"],
        256: ["shared bias, mask"],
    },
    ("installed", 80): {64: ["shared bias"], 128: ["causal"]},
    ("installed", 100): {128: ["causal"], 256: ["shared bias"]},
    ("3.6.0", 120): {128: ["causal"]},
}
RUNS = [
    (triton, target, D, terms)
    for (triton, target), columns in GRID.items()
    for D, rows in columns.items()
    for terms in rows
]

# Bytes of register spills, (triton, target, head dimension, terms) -> kernel, 0 where there is no entry. These are
# ceilings: to be lowered when a kernel gets better, never raised.
SPILLS: dict[tuple[str, int, int, str], dict[str, int]] = {
    ("installed", 90, 128, "causal"): {"backward_kernel": 360},
    ("installed", 90, 128, "full bias"): {"backward_kernel": 224},
    ("3.6.0", 90, 64, "softcap, window"): {"backward_kernel": 36},
    ("3.6.0", 90, 128, "dense"): {"backward_kernel": 428},
    ("3.6.0", 90, 128, "shared bias"): {"backward_kernel": 216},
    ("3.6.0", 90, 64, "bias of keys"): {"backward_kernel": 12},
    ("3.6.0", 90, 64, "mask"): {"backward_kernel": 8},
    ("3.6.0", 90, 128, "mask"): {"backward_kernel": 200},
    ("3.6.0", 90, 128, "by pointers, causal, shared bias"): {"forward_kernel": 288, "backward_kernel": 380},
    ("3.6.0", 90, 256, "shared bias, mask"): {"forward_kernel": 96, "backward_kernel": 152},
    ("3.6.0", 120, 128, "causal"): {"forward_kernel": 84, "backward_kernel": 488},
    ("installed", 80, 64, "shared bias"): {"backward_kernel": 4},
    ("installed", 100, 256, "shared bias"): {"forward_kernel": 284},
}

# The same with Triton 3.8 and with 3.9, where they need more: the IR of these kernels is for any compiler, and 3.9
# assembles it by ptxas 13.4.
MORE: dict[tuple[str, int, int, str], dict[str, dict[str, int]]] = {
    ("installed", 90, 128, "causal"): {"3.9": {"forward_kernel": 8}},
    ("installed", 90, 128, "deterministic, shared bias"): {"3.9": {"query_gradient_kernel": 96}},
    ("3.6.0", 90, 128, "by pointers, causal, shared bias"): {"3.9": {"backward_kernel": 464}},
    ("3.6.0", 90, 256, "shared bias, mask"): {"3.8": {"forward_kernel": 168}, "3.9": {"backward_kernel": 884}},
    ("installed", 80, 64, "shared bias"): {"3.8": {"backward_kernel": 8}, "3.9": {"backward_kernel": 8}},
    ("installed", 80, 128, "causal"): {"3.8": {"backward_kernel": 80}, "3.9": {"backward_kernel": 80}},
    ("3.6.0", 90, 128, "sixteen queries, causal, mask"): {"3.8": {"forward_kernel": 16}},
}


def compile_vectors(heads: int, dtype: torch.dtype) -> list[Any]:
    """The four kernels at 4,096 queries and keys."""
    import aot_child

    def meta(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    from tilewise.backends.kernels import vectors

    aot_child._launched.clear()
    padded = meta(1, heads, 1, 8703, dtype=torch.float32)[..., 256:-256]
    vectors.table_vector(meta(32, heads), meta(191, dtype=torch.int64), -95, -4095, 8191)
    vectors.table_gradient(padded, meta(32, 2, dtype=torch.int32), -4095, meta(32, heads))
    vectors.slopes_vector(meta(1, heads), -4095, 8191, False)
    vectors.slopes_gradient(padded, -4095, meta(1, heads), False)
    return [aot_child._report(launched, 227 * 1024) for launched in aot_child._launched]


def ceilings(allowed: dict[str, int], run: tuple[str, int, int, str]) -> dict[str, int]:
    """Bytes that may spill with the Triton that compiles a run: ``allowed``, or what `MORE` says."""
    return allowed | MORE.get(run, {}).get(minor_version(run[0]), {})


# Few queries: the forward alone, and the kernel that merges its splits. (triton, target) -> head dimension -> terms.
DECODE = replace(USUAL, B=4, H=32, Hkv=8, M=1, N=32768)
DECODE_TERMS = {
    "one query": {},
    "bias of keys": {"bias": "b11n"},
    "bias of heads": {"bias": "1h1n", "bias_dtype": torch.float32},
    "sixteen queries, causal, mask": {"M": 16, "causal": True, "mask": "b1mn"},
}
DECODE_GRID = {
    ("3.6.0", 90): {128: ["one query", "sixteen queries, causal, mask"]},
    ("installed", 90): {256: ["bias of heads"]},
    ("installed", 80): {128: ["bias of keys"]},
    ("installed", 100): {128: ["sixteen queries, causal, mask"]},
    ("3.6.0", 120): {128: ["one query"]},
}
DECODE_RUNS = [
    (triton, target, D, terms)
    for (triton, target), columns in DECODE_GRID.items()
    for D, rows in columns.items()
    for terms in rows
]


def training(D, terms):
    return replace(USUAL, D=D, **TERMS[terms])


def decoding(D, terms):
    return replace(DECODE, D=D, **DECODE_TERMS[terms])


# Those that are compiled also where the ledger has them.
AGAIN = dict(
    zip(
        [*RUNS, *DECODE_RUNS],
        covering(
            [(*run[:2], training(*run[2:])) for run in RUNS] + [(*run[:2], decoding(*run[2:])) for run in DECODE_RUNS]
        ),
        strict=True,
    )
)


def each(runs):
    """With whether a run is one of `AGAIN`."""
    return pytest.mark.parametrize(
        ("triton", "target", "D", "terms", "again"),
        [pytest.param(*run, AGAIN[run], id="sm_{1}, D{2}, {3}, triton {0}".format(*run)) for run in runs],
    )


@each(RUNS)
def test_compiled_kernels(compilers, triton, target, D, terms, again):
    kernels = compilers.compile(compile_case, triton, target, training(D, terms), again=again)
    names = [kernel.name for kernel in kernels]
    assert {"forward_kernel", "backward_kernel"} <= set(names)
    assert ("query_gradient_kernel" in names) == ("deterministic" in terms)
    assert ("bias_gradient_kernel" in names) == (terms == "deterministic, shared bias")
    run = (triton, target, D, terms)
    allowed = ceilings(SPILLS.get(run, {}), run)
    assert set(allowed) <= set(names)
    hold(kernels, TENSOR_CORES[target], allowed)


def test_three_programs_of_a_masked_forward_share_a_multiprocessor(compilers):
    """At 64 dimensions. There are 65536 registers, handed out in eights to a thread, and 228 KiB; a program takes 1."""
    case = replace(USUAL, D=64, **TERMS["mask"])
    kernel = compilers.compile(compile_case, "3.6.0", 90, case, False)[-1]
    assert kernel.name == "forward_kernel"
    assert 3 * 128 * -(-kernel.registers // 8) * 8 <= 65536
    assert 3 * (kernel.shared + 1024) <= 228 * 1024


@each(DECODE_RUNS)
def test_compiled_decoding(compilers, triton, target, D, terms, again):
    """Up to 16 rows, where a product of Hopper or Blackwell would compute 64, take Ampere's."""
    case = decoding(D, terms)
    kernels = compilers.compile(compile_case, triton, target, case, False, again=again)
    assert [kernel.name for kernel in kernels] == ["forward_kernel", "merge_kernel"]
    allowed = {"forward_kernel": 12} if (target, terms) == (90, "sixteen queries, causal, mask") else {}
    allowed = ceilings(allowed, (triton, target, D, terms))
    hold(kernels, TENSOR_CORES[target] if 4 * case.M > 16 else "mma.sync", allowed)


def test_tf32_operands_are_rounded(compilers):
    """In float32 alone: those of 16 bits are read as they are."""
    case = replace(USUAL, D=64, dtype=torch.float32, bias="1hmn", deterministic=True)
    kernels = compilers.compile(compile_case, "3.6.0", 90, case, True, True)
    assert {kernel.name for kernel in kernels if kernel.instructions["to tf32"]} == set(MAIN_KERNELS)
    hold(kernels[:1], "wgmma", {})
    hold(kernels[1:], "mma.sync", {})
    kernels = compilers.compile(compile_case, "3.6.0", 90, replace(case, dtype=torch.bfloat16), False, True)
    assert not kernels[0].instructions["to tf32"]


# Values narrower than the head dimension, or wider, beside hidden keys: see descriptor_lint.py.
NARROW = [
    ("3.6.0", replace(USUAL, D=64, Dv=8, bias="bhmn")),
    ("3.6.0", replace(USUAL, D=128, Dv=32, mask="b11n")),
    ("installed", replace(USUAL, D=32, Dv=8, causal=True)),
    ("installed", replace(USUAL, D=8, Dv=64, bias="b11n")),
    ("3.6.0", replace(DECODE, D=72, Dv=8, M=23, bias="b11n")),
    # by pointers: neighbouring rows, and rows that no pipeline takes
    ("3.6.0", replace(USUAL, D=1, Dv=24, M=239, N=432, dtype=torch.float16, bias="b11n", causal=True)),
    ("3.6.0", replace(USUAL, D=128, Dv=32, layout="sliced")),
    ("installed", replace(USUAL, D=256, Dv=16, layout="sliced", bias="b11n")),
    ("installed", replace(DECODE, D=128, Dv=8, M=23, mask="b1mn")),
]


@pytest.mark.parametrize(("triton", "case"), [pytest.param(*run, id=f"{run[1]}, triton {run[0]}") for run in NARROW])
def test_narrow_values_beside_hidden_keys(compilers, triton, case):
    hold(compilers.compile(compile_case, triton, 90, case, False), "wgmma", {})


def test_a_mask_beside_narrow_values(compilers):
    """From Triton 3.7 on, its flags alone went to shared memory for the product that finds NaN, and did not compile."""
    case = replace(USUAL, D=256, Dv=8, M=239, N=432, mask="1hmn", bias="1hmn")
    kernels = compilers.compile(compile_case, "installed", 90, case, False)
    assert [x.instructions["wgmma"] > 0 for x in kernels if x.name == "forward_kernel"] == [True]


def test_a_bias_whose_rows_begin_anywhere(compilers):
    """Added after the product, it would have the softmax in the layout of its loads, and 1,532 bytes spill."""
    case = replace(USUAL, D=32, M=511, N=511, bias="bhmn")
    hold(compilers.compile(compile_case, "3.6.0", 90, case, False), "wgmma", {})


# With a sink: added by the forward kernel, or by the kernel that merges splits.
SINKS = [
    ("3.6.0", 90, replace(USUAL, D=128, causal=True, sink="h")),
    ("installed", 90, replace(USUAL, D=64, bias="1hmn", sink="bhm", sink_dtype=torch.float32)),
    ("installed", 80, replace(DECODE, D=128, sink="h")),
    ("3.6.0", 120, replace(DECODE, D=128, M=4, mask="b1mn", sink="bhm")),
]


@pytest.mark.parametrize(
    ("triton", "target", "case"), [pytest.param(*run, id=f"sm_{run[1]}, {run[2]}, triton {run[0]}") for run in SINKS]
)
def test_sinks(compilers, triton, target, case):
    hold(compilers.compile(compile_case, triton, target, case, False), TENSOR_CORES[target], {})


# Of more than 256 dimensions, with the bytes that may spill; one query, like above, forward alone.
WIDE = [
    ("installed", 90, replace(USUAL, D=512, causal=True), {"forward_kernel": 148}),
    ("installed", 90, replace(USUAL, D=576, Dv=512, Hkv=1), {}),
    ("3.6.0", 90, replace(USUAL, D=512, bias="1hmn"), {"forward_kernel": 36, "backward_kernel": 12}),
    ("installed", 90, replace(USUAL, D=320, Dv=512, mask="b1mn", dropout_p=0.1), {"forward_kernel": 244}),
    ("installed", 90, replace(USUAL, D=320, bias="bhmn", deterministic=True, window=(512, 0)),
     {"forward_kernel": 36, "backward_kernel": 204}),
    ("installed", 90, replace(USUAL, D=512, causal=True, layout="sliced"),
     {"forward_kernel": 248, "backward_kernel": 64}),
    ("installed", 80, replace(USUAL, D=512, causal=True), {"forward_kernel": 4, "backward_kernel": 1348}),
    ("installed", 100, replace(USUAL, D=512, Hkv=4, causal=True), {}),
    ("3.6.0", 120, replace(USUAL, D=512, bias="1hmn"), {"backward_kernel": 1664}),
    ("3.6.0", 90, replace(DECODE, D=576, Dv=512, Hkv=1), {}),
    ("installed", 80, replace(DECODE, D=512, M=4, mask="b1mn"), {}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("triton", "target", "case", "allowed"),
    [pytest.param(*run, id=f"sm_{run[1]}, {run[2]}, triton {run[0]}") for run in WIDE],
)
def test_wide_heads(compilers, triton, target, case, allowed):
    kernels = compilers.compile(compile_case, triton, target, case, case.M == USUAL.M)
    rows = case.M * case.H // case.kv_heads
    hold(kernels, "mma.sync" if rows <= 16 else TENSOR_CORES[target], allowed)


def is_run(triton, target):
    """Of what comes below, the other compilers and targets by `make ledger` alone: to start one takes seconds."""
    return (triton, target) == ("3.6.0", 90) or "TILEWISE_LEDGER" in os.environ


# Many short sequences, each in one tile: bytes that may spill in both passes, by any of the compilers.
WINDOWS = replace(USUAL, B=8192, H=3, M=49, N=49, D=32, bias="1hmn")
ONE_TILE = [
    ("3.6.0", 90, WINDOWS, 32, 448),
    ("3.6.0", 90, replace(WINDOWS, B=2048, H=8, M=24, N=24, D=16), 0, 40),
    ("3.6.0", 90, replace(WINDOWS, H=6, D=64, lse=True), 92, 172),
    ("installed", 90, replace(WINDOWS, mask="b1mn"), 324, 792),
    ("installed", 80, WINDOWS, 92, 364),
    ("installed", 100, WINDOWS, 0, 408),
    ("3.6.0", 120, replace(WINDOWS, bias=None), 0, 120),
]


@pytest.mark.parametrize(
    ("triton", "target", "case", "forward", "backward"),
    [pytest.param(*run, id=f"sm_{run[1]}, {run[2]}, triton {run[0]}") for run in ONE_TILE if is_run(*run[:2])],
)
def test_one_tile(compilers, triton, target, case, forward, backward):
    kernels = compilers.compile(compile_case, triton, target, case)
    assert tuple(kernel.name for kernel in kernels) == ONE_TILE_KERNELS
    spills = {kernel.name: most for kernel, most in zip(kernels, (forward, backward), strict=True) if most}
    hold(kernels, TENSOR_CORES[target] if case.M > 32 else "mma.sync", spills)
    if target == 90 and case.D <= 32:
        assert all(3 * 128 * kernel.registers <= 65536 for kernel in kernels)
        assert all(3 * (kernel.shared + 1024) <= 228 * 1024 for kernel in kernels)


@pytest.mark.parametrize("grads", ["b", "qb", "kv", "q"])
def test_one_tile_with_some_gradients(compilers, grads):
    """Triton fails where it compares a field of a record with None and another one is None."""
    case = replace(WINDOWS, grads=grads)
    forward, backward = compilers.compile(compile_case, "3.6.0", 90, case)
    assert (forward.name, backward.name) == ONE_TILE_KERNELS
    assert backward.instructions["wgmma"]


# With dropout: bytes that spill, and products for the words of forward and backward. Of the 64 scores that a thread has
# in a tile of the forward at 64 dimensions 8 groups of eight, with six products of their own: 48 in each of two bodies.
# On Blackwell a thread has a row, so that of each word half is made for nothing.
DROPOUT = [
    ("3.6.0", 90, replace(USUAL, D=64, dropout_p=0.1), 0, (109, 112)),
    ("installed", 90, replace(USUAL, D=128, causal=True, dropout_p=0.1), 592, (73, 152)),
    ("3.6.0", 80, replace(USUAL, D=128, causal=True, dropout_p=0.1), 0, (76, 38)),
    ("installed", 100, replace(USUAL, D=128, causal=True, dropout_p=0.1), 88, (505, 608)),
    ("3.6.0", 90, replace(DECODE, D=128, M=4, dropout_p=0.1), 0, (98,)),
]


@pytest.mark.parametrize(
    ("triton", "target", "case", "spills", "words"),
    [pytest.param(*run, id=f"sm_{run[1]}, {run[2]}, triton {run[0]}") for run in DROPOUT if is_run(*run[:2])],
)
def test_dropout(compilers, triton, target, case, spills, words):
    kernels = compilers.compile(compile_case, triton, target, case, case.M > 4)
    hold(kernels, TENSOR_CORES[target] if case.M > 4 else "mma.sync", {"backward_kernel": spills} if spills else {})
    found = [n for x in kernels if (n := x.instructions["words of dropout"])]
    assert len(found) == len(words)
    assert all(n <= most for n, most in zip(found, words, strict=True))


def test_dropout_of_a_part(compilers):
    """Of queries and keys that begin at multiples of 16 in the whole, words are made as often."""
    case = replace(USUAL, D=64, dropout_p=0.1)
    kernels = compilers.compile(compile_case, "3.6.0", 90, case, True, False, (), "", (48, 16, 8))
    hold(kernels, TENSOR_CORES[90], {"backward_kernel": 16})
    found = [n for x in kernels if (n := x.instructions["words of dropout"])]
    assert len(found) == 2
    assert all(n <= most for n, most in zip(found, (193, 112), strict=True))


# Bias terms: Inkling's values per query, T5's along diagonals, DeBERTa's per query and per key.
INKLING = replace(USUAL, B=1, Hkv=4, D=128, causal=True)
TERMS_BY_DISTANCE = {
    "inkling": (INKLING, (Term(R=1024, lo=-1023),)),
    "t5": (replace(USUAL, D=64), (Term("t5", R=32, axes="1h", dtype=torch.float32),)),
    "t5, deterministic": (
        replace(USUAL, D=64, deterministic=True), (Term("t5", R=32, axes="1h", dtype=torch.float32),),
    ),
    "deberta": (
        replace(USUAL, D=64, M=512, N=512),
        tuple(Term(on, R=512, lo=-256, outside="clamp", reverse=True) for on in ("query", "key")),
    ),
    "deberta, deterministic": (
        replace(USUAL, D=64, M=512, N=512, deterministic=True),
        tuple(Term(on, R=512, lo=-256, outside="clamp", reverse=True) for on in ("query", "key")),
    ),
    "decoding": (replace(DECODE, D=128, M=4, causal=True), (Term(R=1024, lo=-1023, starts="batch"),)),
}  # fmt: skip
# (triton, target, terms) -> bytes that may spill: ceilings, as above.
BY_DISTANCE: dict[tuple[str, int, str], dict[str, int]] = {
    ("3.6.0", 90, "inkling"): {"forward_kernel": 28, "backward_kernel": 1288},
    ("3.6.0", 90, "deberta"): {"backward_kernel": 76},
    ("3.6.0", 90, "deberta, deterministic"): {},
    ("3.6.0", 90, "decoding"): {},
    ("installed", 90, "t5"): {},
    ("installed", 90, "t5, deterministic"): {},
    ("installed", 80, "t5"): {"backward_kernel": 64},
    ("installed", 100, "inkling"): {"forward_kernel": 264, "backward_kernel": 848},
}


@pytest.mark.parametrize(
    ("triton", "target", "terms"),
    [pytest.param(*run, id="sm_{1}, {2}, triton {0}".format(*run)) for run in BY_DISTANCE if is_run(*run[:2])],
)
def test_terms_by_distance(compilers, triton, target, terms):
    case, made = TERMS_BY_DISTANCE[terms]
    backward = terms != "decoding"
    kernels = compilers.compile(compile_case, triton, target, case, backward, False, made)
    names = {kernel.name for kernel in kernels}
    if backward:
        assert bool(names & {*BY_DISTANCE_KERNELS}) == case.deterministic
    allowed = ceilings(BY_DISTANCE[triton, target, terms], (triton, target, case.D, terms))
    hold(kernels, TENSOR_CORES[target] if backward else "mma.sync", allowed)


# Constants and registers that wgmma reads as descriptors: UR6, UR7, whose upper half has swizzle and stride.
DESCRIPTOR = """
        /*0100*/                   {} ;
        /*0110*/              @!P0 BRA 0x130 ;
        /*0120*/                   {} ;
        /*0130*/                   {} ;
        /*0140*/                   HGMMA.64x16x16.F32.BF16 R24, R8, gdesc[UR4].tnspB, R24, gsb0 ;
        /*0150*/                   {} ;
        /*0160*/               @P1 BRA 0x130 ;
        /*0170*/                   EXIT ;
"""


@pytest.mark.parametrize(
    ("before", "perhaps", "then", "after", "lost"),
    [
        ("UMOV UR7, 0xc0000010", "NOP", "NOP", "NOP", []),
        ("UMOV UR7, 0x40", "NOP", "UIADD3.X UR7, UR7, 0x40000000, URZ, UP0, !UPT", "UMOV UR7, 0x40", []),
        ("UMOV UR7, 0xc0000010", "UMOV UR7, 0x40000040", "NOP", "NOP", [0x140]),  # two ways, two halves
        ("UMOV UR7, 0xc0000010", "NOP", "NOP", "R2UR UR7, R24", [0x140]),  # round the loop: the product itself
        ("UMOV UR7, 0xc0000060", "NOP", "NOP", "NOP", [0x140]),  # the program makes none with these bits
        ("NOP", "NOP", "UIADD3.X UR7, UR9, -0x3ffffff0, URZ, UP0, !UPT", "NOP", [0x140]),  # UR9 was never set
        ("STL.64 [R1+0x8], R2", "NOP", "LDL R5, [R1+0xc]", "NOP", [0x140]),
    ],
)
def test_the_lint_finds_lost_descriptors(before, perhaps, then, after, lost):
    found = descriptor_lint.lint(DESCRIPTOR.format(before, perhaps, then, after), (0xC0000010, 0x40000040))
    assert [x.address for x in found] == lost


def test_the_lint_follows_spills_and_swaps():
    through = """
        /*0100*/                   CS2R R4, SRZ ;
        /*0110*/                   IADD3.X R5, R5, 0x40000040, RZ, P1, !PT ;
        /*0120*/                   STL.64 [R1+0x10], R4 ;
        /*0130*/                   LDL R9, [R1+0x14] ;
        /*0140*/                   R2UR UR8, R9 ;
        /*0150*/                   ULDC.64 UR10, c[0x0][0x210] ;
        /*0160*/                   ULOP3.LUT UR8, UR8, UR10, URZ, 0x3c, !UPT ;
        /*0170*/                   ULOP3.LUT UR10, UR8, UR10, URZ, 0x3c, !UPT ;
        /*0180*/                   ULOP3.LUT UR8, UR8, UR10, URZ, 0x3c, !UPT ;
        /*0190*/                   UIADD3.64 UR6, UR{}, 0x20, URZ ;
        /*01a0*/                   HGMMA.64x16x16.F32.BF16 R24, R8, gdesc[UR4].tnspB, R24, gsb0 ;
    """
    assert not descriptor_lint.lint(through.format(9), (0x40000040,))  # its upper half is UR10
    assert [x.address for x in descriptor_lint.lint(through.format(7), (0x40000040,))] == [0x1A0]  # UR8


PTX = """
    or.b64 	%rd1, %rd9, 4611686293305294848;
    add.s64 	%rd2, %rd9, -9223371899415822272;
    wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%r1, %r2}, %rd1, %rd2, 0, 1, 1, 1, 1;
    wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%r1, %r2}, {%r3, %r4}, %rd2, %p153, 1, 1, 1;
"""


def test_the_lint_compares_with_the_program():
    assert descriptor_lint.uppers(PTX) == [0x40000040, 0x80000020, 0x80000020]
    sass = """
        /*0100*/                   UMOV UR5, 0x40000040 ;
        /*0110*/                   UMOV UR7, 0x80000020 ;
        /*0120*/                   HGMMA.64x16x16.F32.BF16 R24, gdesc[UR4], RZ, !UPT ;
        /*0130*/                   UMOV UR11, {} ;
        /*0140*/                   HGMMA.64x16x16.F32.BF16 R24, R8, gdesc[UR8].tnspB, R24, gsb0 ;
    """
    assert not descriptor_lint.check(sass.format("0x80000020"), PTX)
    assert descriptor_lint.check(sass.format("0x40000040"), PTX)  # another's
    assert [x.upper for x in descriptor_lint.check(sass.format("0xc0000060"), PTX)] == [0xC0000060]


def hold(kernels, tensor_cores, allowed):
    """What every compiled kernel has to be; ``allowed``: bytes that may spill."""
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
        main = kernel.name in (*MAIN_KERNELS, *ONE_TILE_KERNELS, *BY_DISTANCE_KERNELS)
        if main and not kernel.instructions[tensor_cores]:
            faults.append(f"{kernel.name}: no {tensor_cores}, but {kernel.instructions}")
    assert not faults, "\n".join(faults)


def test_kernels_of_vectors(compilers):
    """Of T5's table and ALiBi's slopes."""
    kernels = compilers.compile(compile_vectors, "installed", 90, 16, torch.bfloat16)
    assert [kernel.name for kernel in kernels] == [
        "table_vector_kernel", "table_gradient_kernel", "slopes_vector_kernel", "slopes_gradient_kernel",
    ]  # fmt: skip
    assert not any(kernel.spill_stores for kernel in kernels)


@pytest.mark.parametrize(
    ("triton", "target", "case", "spilled"),
    [
        ("3.6.0", 90, replace(USUAL, D=128, bias="1hmn", causal=True), 0),
        ("installed", 90, replace(USUAL, D=64, mask="b1mn", sink="h"), 0),
        ("installed", 80, replace(DECODE, D=128, bias="b11n"), 0),
    ],
    ids=str,
)
def test_statistics(compilers, triton, target, case, spilled):
    none: tuple[Term, ...] = ()
    statistics = (True, True, True)
    kernels = compilers.compile(compile_case, triton, target, case, False, False, none, "", (0, 0, 0), statistics)
    hold(kernels, TENSOR_CORES[target], {"forward_kernel": spilled})
