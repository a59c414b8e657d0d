"""The Hopper kernels compiled ahead of time for sm_90a: nothing spills, no wgmma waits for another or races.

With the installed triton, and with Triton 3.6.0, because torch 2.11 pins that one; see `aot_compilers` for others.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import wgmma_lint
from aot_child import compile_hopper_case, idle_barriers
from aot_compilers import hold_hopper, minor_version
from helpers import Case
from ledger import covering

pytest.importorskip("triton")

USUAL = Case(B=4, H=16, M=4096, N=4096, D=128, dtype=torch.bfloat16)
# Triton, case, wgmma in the forward kernel, bytes that may spill. A product of Q and K takes D/16 of them, one of P and
# V block_n/16; each of two warpgroups, three at up to 64 dimensions without a bias or a short band, has one of either
# outside its loop and one of either in it. There are two loops under a band without a lower limit or a mask.
DESIGNED = [
    ("installed", USUAL, 2 * (8 + 8) * 2, 0),
    ("3.6.0", replace(USUAL, causal=True), 2 * (8 + 8) * 3, 0),
    ("3.6.0", replace(USUAL, bias="1hmn"), 2 * (8 + 8) * 2, 0),
    ("3.6.0", replace(USUAL, D=64, bias="bhmn", causal=True), 2 * (4 + 8) * 3, 0),
    ("3.6.0", replace(USUAL, D=64, window=(300, 20)), 2 * (4 + 8) * 2, 0),
    ("3.6.0", replace(USUAL, D=64, M=16384, N=16384, causal=True), 3 * (4 + 8) * 3, 0),
    ("installed", replace(USUAL, D=64, causal=True), 3 * (4 + 8) * 3, 0),
    ("3.6.0", replace(USUAL, D=64, window=(3000, None)), 3 * (4 + 8) * 2, 0),
    ("3.6.0", replace(USUAL, D=256), 2 * (16 + 4) * 2, 0),
    ("3.6.0", replace(USUAL, D=256, causal=True), 2 * (16 + 4) * 3, 0),
    # Q and K in three panels, so that K leaves space for 128 keys; 24 bytes spill in the NaN fix-up, 12 here
    ("3.6.0", replace(USUAL, D=192, Dv=128), 2 * (12 + 8) * 2, 0),
    ("installed", replace(USUAL, D=192, Dv=128, causal=True), 2 * (12 + 8) * 3, 24),
    ("3.6.0", replace(USUAL, D=160, Dv=64, bias="1hmn"), 2 * (12 + 4) * 2, 0),
    # Q·Kᵀ of 64 + 32, 64 + 16 and 128 + 32 columns
    ("3.6.0", replace(USUAL, D=96), 2 * (6 + 8) * 2, 0),
    ("installed", replace(USUAL, D=80, causal=True, bias="1hmn"), 2 * (5 + 8) * 3, 0),
    ("3.6.0", replace(USUAL, D=160), 2 * (10 + 4) * 2, 0),
    ("3.6.0", replace(USUAL, mask="b1mn", bias="1hmn", causal=True), 2 * (8 + 8) * 2, 0),
    ("3.6.0", replace(USUAL, D=64, mask="11m1", bias="1111"), 2 * (4 + 8) * 2, 0),
    # the mask transposed
    (
        "3.6.0",
        replace(USUAL, D=64, mask="11mn", bias="b11n", bias_dtype=torch.float32, layout="heads_last"),
        2 * (4 + 8) * 2,
        0,
    ),
    # two programs on a multiprocessor, tiles of 64 keys; what spills is a number of the whole walk, outside its loops
    ("3.6.0", replace(USUAL, D=32, bias="1hmn", causal=True), 2 * (2 + 4) * 3, 4),
    ("installed", replace(USUAL, D=32, bias="bhmn", bias_dtype=torch.float32), 2 * (2 + 4) * 2, 0),
]
# The same with a sink, which is an epilogue of its own; at 256 dimensions what spills is the sink itself, under the
# last product. Compiled where the ledger does not have it.
SINKS = [
    ("3.6.0", replace(USUAL, sink="h"), 2 * (8 + 8) * 2, 0, False),
    ("3.6.0", replace(USUAL, D=64, causal=True, sink="bhm"), 3 * (4 + 8) * 3, 0, False),
    ("installed", replace(USUAL, D=256, causal=True, sink="h"), 2 * (16 + 4) * 3, 16, False),
    (
        "installed",
        replace(USUAL, mask="b1mn", bias="1hmn", sink="h", sink_dtype=torch.float32),
        2 * (8 + 8) * 2,
        0,
        False,
    ),
]
# And with dropout, for which two warpgroups are enough at any number of dimensions. Beside a bias two numbers wait in
# memory, outside the loop over full tiles, since O leaves twice.
DROPOUT = [
    ("3.6.0", replace(USUAL, dropout_p=0.1), 2 * (8 + 8) * 2, 0, False),
    ("3.6.0", replace(USUAL, D=64, dropout_p=0.1, causal=True), 2 * (4 + 8) * 3, 0, False),
    ("3.6.0", replace(USUAL, D=256, dropout_p=0.1, causal=True), 2 * (16 + 4) * 3, 48, False),
    ("3.6.0", replace(USUAL, dropout_p=0.1, mask="b11n"), 2 * (8 + 8) * 2, 0, False),
    ("3.6.0", replace(USUAL, dropout_p=0.1, bias="1hmn"), 2 * (8 + 8) * 2, 8, False),
]
# Triton, case, wgmma in the backward kernel, bytes that may spill. A step takes D/16 of them for each of S and dP, four
# for each of dV and dK (of 64 queries) and eight for dQ (of 128 keys; four where programs share a multiprocessor and
# have 64; twice four where it leaves in two parts), twice as many of all but dQ for two subtiles of queries. At 32 and
# 128 dimensions without a mask there is a body for each side of a band and one for the full tiles, else one for all.
# Where QK comes ahead there is one more of it before the loops. Beside a float32 bias of 128 dimensions there is room
# for 64 keys.
BACKWARDS = [
    ("installed", USUAL, 2 * 8 + 2 * 4 + 8, 0),
    ("3.6.0", USUAL, 2 * 8 + 2 * 4 + 8, 0),
    ("3.6.0", replace(USUAL, bias="bhmn"), 2 * 8 + 2 * 4 + 8, 0),
    ("3.6.0", replace(USUAL, Hkv=4, causal=True), 2 * (2 * 8 + 2 * 4 + 8), 0),
    # Q·Kᵀ of 192 of 256 columns, dP of 128
    ("3.6.0", replace(USUAL, D=192, Dv=128), 2 * 12 + 8 + 2 * 4 + 2 * 4, 0),
    ("installed", replace(USUAL, D=192, Dv=128, bias="1hmn", deterministic=True), 2 * 12 + 8 + 2 * 4 + 2 * 4, 4),
    ("3.6.0", replace(USUAL, D=96), 2 * 6 + 2 * 4 + 8, 0),
    ("installed", replace(USUAL, D=80, Hkv=4, causal=True), 2 * (2 * 5 + 2 * 4 + 8), 0),
    ("3.6.0", replace(USUAL, D=64, Dv=128, bias="1hmn"), 4 + 8 + 2 * 4 + 8, 0),
    ("3.6.0", replace(USUAL, D=64), 2 * (2 * 4 + 2 * 4) + 8 + 4, 0),
    ("installed", replace(USUAL, D=64), 2 * (2 * 4 + 2 * 4) + 8 + 4, 0),
    ("3.6.0", replace(USUAL, D=64, Hkv=4, M=4000, N=4000), 2 * (2 * 4 + 2 * 4) + 8 + 4, 56),
    ("3.6.0", replace(USUAL, D=64, deterministic=True), 2 * (2 * 4 + 2 * 4) + 8 + 4, 0),
    ("3.6.0", replace(USUAL, D=64, deterministic=True, causal=True), 2 * (2 * (2 * 4 + 2 * 4) + 8) + 4, 0),
    ("3.6.0", replace(USUAL, D=64, bias="bhmn"), 2 * (2 * 4 + 2 * 4) + 8, 0),
    ("3.6.0", replace(USUAL, D=64, Hkv=4, bias="bhmn", causal=True), 2 * (2 * 4 + 2 * 4) + 8, 16),
    ("installed", replace(USUAL, D=64, bias="bhmn", M=4000, N=4000), 2 * (2 * 4 + 2 * 4) + 8, 0),
    ("3.6.0", replace(USUAL, D=64, bias="bhmn", bias_dtype=torch.float16), 2 * (2 * 4 + 2 * 4) + 8, 0),
    ("3.6.0", replace(USUAL, D=64, softcap=5.0), 2 * 4 + 2 * 4 + 4 + 4, 0),
    ("3.6.0", replace(USUAL, D=64, bias="b11n"), 2 * 4 + 2 * 4 + 4, 0),
    ("3.6.0", replace(USUAL, D=64, causal=True), 2 * (2 * (2 * 4 + 2 * 4) + 8) + 4, 0),
    ("3.6.0", replace(USUAL, D=64, bias="b11n", deterministic=True), 2 * 4 + 2 * 4 + 8 + 4, 0),
    ("installed", replace(USUAL, D=64, Hkv=4, window=(300, 20)), 2 * 4 + 2 * 4 + 4 + 4, 0),
    ("3.6.0", replace(USUAL, D=64, causal=True, bias="b11n"), 2 * 4 + 2 * 4 + 4, 0),
    # What spills is the number of a tile whose dO may be another, see `unrounding`: as fast on an H200 as without.
    ("3.6.0", replace(USUAL, D=64, bias="1hmn"), 2 * (2 * 4 + 2 * 4) + 8, 4),
    ("3.6.0", replace(USUAL, bias="b11n"), 2 * 8 + 2 * 4 + 8, 0),
    ("installed", replace(USUAL, bias="b11n"), 2 * 8 + 2 * 4 + 8, 0),
    ("3.6.0", replace(USUAL, D=32), 2 * 2 + 2 * 4 + 4, 4),  # stored before the loop, read after it
    ("3.6.0", replace(USUAL, D=32, causal=True, bias="b11n"), 2 * (2 * 2 + 2 * 4 + 4), 0),
    # What spills is an address of the warps that add up a shared bias, before their loop.
    ("installed", replace(USUAL, D=32, B=24, H=4, M=256, N=256, bias="1hmn"), 2 * 2 + 2 * 4 + 4, 0),
    ("3.6.0", replace(USUAL, bias="1hmn"), 2 * 8 + 2 * 4 + 8, 4),
    ("3.6.0", replace(USUAL, B=16, bias="1hmn", deterministic=True), 2 * 8 + 2 * 4 + 8, 8),
    ("3.6.0", replace(USUAL, mask="b1mn"), 2 * 8 + 2 * 4 + 8, 0),
    ("installed", replace(USUAL, mask="b1mn"), 2 * 8 + 2 * 4 + 8, 0),
    ("3.6.0", replace(USUAL, Hkv=4, mask="bhmn", causal=True), 2 * 8 + 2 * 4 + 8, 0),
    ("3.6.0", replace(USUAL, D=64, mask="1hm1"), 2 * 4 + 2 * 4 + 4 + 4, 0),
    ("3.6.0", replace(USUAL, D=64, mask="b1mn", causal=True), 2 * 4 + 2 * 4 + 4 + 4, 0),
    ("3.6.0", replace(USUAL, mask="b11n", bias="b11n"), 2 * 8 + 2 * 4 + 8, 0),
    ("3.6.0", replace(USUAL, D=32, mask="b11n", bias="1hmn"), 2 * 2 + 2 * 4 + 4, 0),
    # What spills is addresses again, before the loops; with a softcap some of a tile does.
    ("3.6.0", replace(USUAL, mask="b1mn", bias="1hmn"), 2 * 8 + 2 * 4 + 8, 16),
    ("3.6.0", replace(USUAL, mask="b1mn", window=(300, 20), deterministic=True), 2 * 8 + 2 * 4 + 8, 0),
    ("3.6.0", replace(USUAL, mask="b1mn", bias="1hmn", softcap=5.0), 2 * 8 + 2 * 4 + 8, 108),
    ("3.6.0", replace(USUAL, bias="bhmn", bias_dtype=torch.float32), 2 * 8 + 2 * 4 + 4, 0),
    ("installed", replace(USUAL, bias="1hmn", bias_dtype=torch.float32), 2 * 8 + 2 * 4 + 4, 4),
    ("3.6.0", replace(USUAL, bias="1hmn", bias_dtype=torch.float32, causal=True), 2 * (2 * 8 + 2 * 4 + 4), 8),
    ("3.6.0", replace(USUAL, D=64, bias="bhmn", bias_dtype=torch.float32), 2 * 4 + 2 * 4 + 8, 0),
    ("3.6.0", replace(USUAL, D=64, mask="b1mn", bias="1hmn", bias_dtype=torch.float32), 2 * 4 + 2 * 4 + 8, 24),
    ("3.6.0", replace(USUAL, D=32, bias="1hmn", bias_dtype=torch.float32), 2 * 2 + 2 * 4 + 4, 0),
    ("3.6.0", replace(USUAL, mask="b1mn", bias="1hmn", bias_dtype=torch.float16), 2 * 8 + 2 * 4 + 8, 24),
    # The most of everything: what spills, and by how little shared memory is enough.
    (
        "3.6.0",
        replace(USUAL, B=16, bias="1hmn", softcap=5.0, window=(300, 20), deterministic=True),
        3 * (2 * 8 + 2 * 4 + 8),
        656,
    ),
    # few steps
    ("3.6.0", replace(USUAL, D=32, M=1024, N=1024), 2 * 2 + 2 * 4 + 4, 0),
    ("3.6.0", replace(USUAL, D=64, M=1024, N=1024), 2 * (2 * 4 + 2 * 4) + 8 + 4, 0),
    ("installed", replace(USUAL, D=64, M=1024, N=1024, causal=True), 2 * (2 * (2 * 4 + 2 * 4) + 8) + 4, 0),
    ("3.6.0", replace(USUAL, D=64, Hkv=4, M=1000, N=1000, causal=True), 2 * (2 * (2 * 4 + 2 * 4) + 8) + 4, 0),
    (
        "3.6.0",
        replace(USUAL, D=64, M=1024, N=1024, causal=True, deterministic=True),
        2 * (2 * (2 * 4 + 2 * 4) + 8) + 4,
        0,
    ),
    ("3.6.0", replace(USUAL, D=64, M=1024, N=1024, deterministic=True), 2 * (2 * 4 + 2 * 4) + 8 + 4, 0),
    # both warpgroups have the same keys
    ("3.6.0", replace(USUAL, D=256), 2 * 16 + 2 * 4 + 2 * 4 + 16, 0),
    ("installed", replace(USUAL, D=256), 2 * 16 + 2 * 4 + 2 * 4 + 16, 0),
    # read between the loops of two heads
    ("3.6.0", replace(USUAL, D=256, Hkv=4, causal=True), 2 * 16 + 2 * 4 + 2 * 4 + 16, 8),
    ("3.6.0", replace(USUAL, D=256, bias="bhmn"), 2 * 16 + 2 * 4 + 2 * 4 + 16, 0),
    ("3.6.0", replace(USUAL, D=256, bias="1hmn"), 2 * 16 + 2 * 4 + 2 * 4 + 16, 0),
    ("installed", replace(USUAL, D=256, bias="1hmn", causal=True), 2 * 16 + 2 * 4 + 2 * 4 + 16, 4),
    ("3.6.0", replace(USUAL, D=256, bias="b11n"), 2 * 16 + 2 * 4 + 2 * 4 + 16, 0),
    ("3.6.0", replace(USUAL, D=256, deterministic=True), 2 * 16 + 2 * 4 + 2 * 4 + 16, 0),
    ("3.6.0", replace(USUAL, B=16, D=256, bias="1hmn", deterministic=True), 2 * 16 + 2 * 4 + 2 * 4 + 16, 4),
    (
        "3.6.0",
        replace(USUAL, B=16, D=256, bias="1hmn", window=(300, 20), deterministic=True),
        2 * 16 + 2 * 4 + 2 * 4 + 16,
        4,  # outside its loops
    ),
    # softcap, a band on both sides, a bias and dBias apart from dS: the most shared memory
    ("3.6.0", replace(USUAL, D=256, bias="bhmn", softcap=20.0, window=(300, 20)), 2 * 16 + 2 * 4 + 2 * 4 + 16, 0),
    ("3.6.0", replace(USUAL, D=256, bias="bhmn", mask="b1mn", softcap=20.0), 2 * 16 + 2 * 4 + 2 * 4 + 16, 0),
    ("3.6.0", replace(USUAL, D=256, bias="1hmn", mask="b1mn", causal=True, softcap=5.0), 2 * 16 + 4 * 4 + 16, 24),
    ("3.6.0", replace(USUAL, D=256, mask="b1mn", B=16, bias="1hmn", deterministic=True), 2 * 16 + 4 * 4 + 16, 40),
    ("3.6.0", replace(USUAL, D=256, Hkv=4, mask="b1mn", causal=True), 2 * 16 + 2 * 4 + 2 * 4 + 16, 88),
    ("3.6.0", replace(USUAL, D=256, mask="b11n", bias="b11n"), 2 * 16 + 2 * 4 + 2 * 4 + 16, 52),
    ("3.6.0", replace(USUAL, D=256, bias="bhmn", bias_dtype=torch.float32), 2 * 16 + 2 * 4 + 2 * 4 + 16, 0),
    (
        "installed",
        replace(USUAL, B=8, D=256, bias="1hmn", bias_dtype=torch.float32, mask="b1mn", softcap=5.0),
        2 * 16 + 2 * 4 + 2 * 4 + 16,
        52,
    ),
    # tiles are as wide as the greater of two head dimensions
    ("3.6.0", replace(USUAL, D=40, Dv=128), 3 + 8 + 2 * 4 + 8, 0),
]
# With dropout: delta of a subtile's queries stays beside dP, and the numbers of its words in the loop.
DROPOUT_BACKWARDS = [
    ("3.6.0", replace(USUAL, dropout_p=0.1), 2 * 8 + 2 * 4 + 8, 0),
    ("3.6.0", replace(USUAL, dropout_p=0.1, causal=True), 2 * (2 * 8 + 2 * 4 + 8), 24),
    ("3.6.0", replace(USUAL, D=64, dropout_p=0.1), 2 * (2 * 4 + 2 * 4) + 8 + 4, 0),
    ("3.6.0", replace(USUAL, D=64, dropout_p=0.1, causal=True), 2 * (2 * (2 * 4 + 2 * 4) + 8) + 4, 0),
    ("3.6.0", replace(USUAL, D=32, dropout_p=0.1), 2 * 2 + 2 * 4 + 4, 8),
    ("3.6.0", replace(USUAL, D=256, dropout_p=0.1), 2 * 16 + 2 * 4 + 2 * 4 + 16, 0),
    ("3.6.0", replace(USUAL, D=64, dropout_p=0.1, bias="1hmn"), 2 * (2 * 4 + 2 * 4) + 8, 0),
    ("3.6.0", replace(USUAL, dropout_p=0.1, mask="b11n"), 2 * 8 + 2 * 4 + 8, 0),
]
# Case, bytes that may spill with Triton 3.8 and with 3.9, where they need more. They are numbers of the warps that move
# data, which have no product in their loops, or are read once a tile; beside a softcap some of a tile spills, as it
# does with 3.6.
MORE = [
    (replace(USUAL, D=64, window=(3000, None)), 32, 0),
    (replace(USUAL, B=16, bias="1hmn", deterministic=True), 12, 12),
    (replace(USUAL, D=64, mask="b1mn", causal=True), 0, 8),
    (replace(USUAL, mask="b1mn", bias="1hmn"), 0, 24),
    (replace(USUAL, mask="b1mn", window=(300, 20), deterministic=True), 4, 4),
    (replace(USUAL, mask="b1mn", bias="1hmn", softcap=5.0), 144, 128),
    (replace(USUAL, D=64, mask="b1mn", bias="1hmn", bias_dtype=torch.float32), 0, 28),
    (replace(USUAL, mask="b1mn", bias="1hmn", bias_dtype=torch.float16), 20, 20),
    (replace(USUAL, B=16, bias="1hmn", softcap=5.0, window=(300, 20), deterministic=True), 748, 884),
    (replace(USUAL, D=256, bias="1hmn"), 4, 4),
    (replace(USUAL, D=256, bias="bhmn", mask="b1mn", softcap=20.0), 4, 4),
    (replace(USUAL, D=256, bias="1hmn", mask="b1mn", causal=True, softcap=5.0), 28, 0),
]


def ceiling(triton: str, case: Case, spilled: int) -> int:
    """Bytes that may spill with the Triton that compiles a case: ``spilled``, or what `MORE` says."""
    version = minor_version(triton)
    columns = {"3.8": 1, "3.9": 2}
    return max([spilled, *(more[columns[version]] for more in MORE if version in columns and more[0] == case)])


def by_triton(runs):
    """In this order a compiler starts once for each triton, not whenever the triton changes. Each run, with whether it
    is compiled also where the ledger has it."""
    runs = sorted(runs, key=lambda run: run[0])
    again = covering([run[:2] for run in runs])
    return [pytest.param(*run, more, id=f"{run[1]}, triton {run[0]}") for run, more in zip(runs, again, strict=True)]


def as_they_are(runs):
    """Runs that are compiled where the ledger does not have them."""
    return [pytest.param(*run, id=f"{run[1]}, triton {run[0]}") for run in runs]


@pytest.mark.parametrize(
    ("triton", "case", "designed", "spilled", "again"),
    [*by_triton(DESIGNED), *as_they_are(SINKS + DROPOUT)],
)
def test_compiled_kernels(compilers, triton, case, designed, spilled, again):
    codes = compilers.compile(compile_hopper_case, triton, 90, case, again=again)
    spilled = ceiling(triton, case, spilled)
    hides = case.bias or case.causal or case.window or case.mask
    mask = ["summary_kernel", "tile_list_kernel"] if case.mask else []
    if case.mask == "b11n":  # the same for all queries
        mask = ["key_summary_kernel"]
    names = [*mask, "forward_kernel"]
    assert [code.kernel.name for code in codes] == [*names, *(["nan_fixup_kernel"] if hides else [])]
    hold_hopper(codes, spilled)
    assert {code.wgmma for code in codes if code.kernel.name == "forward_kernel"} == {designed}


@pytest.mark.parametrize(
    ("triton", "case", "designed", "spilled"),
    as_they_are([*sorted(BACKWARDS, key=lambda run: run[0]), *DROPOUT_BACKWARDS]),
)
def test_compiled_backward(compilers, triton, case, designed, spilled):
    codes = compilers.compile(compile_hopper_case, triton, 90, case, True)
    spilled = ceiling(triton, case, spilled)
    mask = ["summary_kernel", "tile_list_kernel"] if case.mask else []
    other = case.bias_dtype not in (None, case.dtype, torch.float32)  # dBias is rounded once
    shared = ["dbias_reduce_kernel"] if case.bias == "1hmn" and (case.deterministic or case.B > 16 or other) else []
    groups = ["group_list_kernel"] if case.mask and shared else []
    sparse = ["sparse_sum_kernel"] if case.mask and case.bias == "1hmn" and case.B > 8 else []  # of dBias
    names = ["preprocess_kernel", *mask, *groups, *sparse, "backward_kernel", "postprocess_kernel", *shared, *sparse]
    assert [code.kernel.name for code in codes] == names
    hold_hopper(codes, spilled)
    for kernel, wgmma, _ in codes:
        # what is launched early reads nothing, or has not ended, before the kernel before it has
        early = kernel.name in ("backward_kernel", "postprocess_kernel")
        assert kernel.instructions["waits for the previous"] == early
        assert kernel.instructions["lets the next begin"] == (kernel.name == "backward_kernel")
        if kernel.name == "backward_kernel":
            assert wgmma == designed
            assert not kernel.instructions["stored in pairs"], "dQ in the order of rows: its banks conflict"
            counted = [kernel.instructions[way] for way in ("added by TMA", "added in fours")]
            assert any(counted), "dQ is added in pieces of less than four"
            assert counted[0] or not case.deterministic


# Beside a mask two numbers of a thread are in memory until a role begins; by Triton 3.7 five.
@pytest.mark.parametrize(
    ("triton", "bias", "mask", "spilled"),
    [
        ("3.6.0", "1hmn", None, 0), ("3.6.0", "1hmn", "b11n", 8), ("installed", "1hmn", None, 20),
        ("3.6.0", "rhmn", "b11n", 8), ("installed", "rhmn", None, 20),
    ],
)  # fmt: skip
def test_batch_elements_side_by_side(compilers, triton, bias, mask, spilled):
    """A program of the pair bias has three: no dS buffer, and no sum of dQ for all heads."""
    case = replace(USUAL, B=64, H=4, M=768, N=768, D=32, bias=bias, mask=mask)
    codes = compilers.compile(compile_hopper_case, triton, 90, case, True)
    lists = ["summary_kernel", "tile_list_kernel"] if mask else []
    assert [code.kernel.name for code in codes] == ["preprocess_kernel", *lists, "batched_kernel", "last_heads_kernel"]
    hold_hopper(codes, spilled)
    elements = codes[-2]
    assert elements.wgmma == 3 * (2 * 2 + 2 * 4 + 4 + bool(mask))
    assert elements.kernel.registers == 128  # of all 512 threads, before they are handed out
    assert elements.kernel.instructions["added in fours"] == 3 * 4 + 2 * 4  # of dS in a loop, another for fewer


def test_dbias_is_added_in_fours(compilers):
    """Where rows have a multiple of eight elements and not of sixteen, too."""
    case = replace(USUAL, B=32, M=4104, N=4104, D=64, bias="1hmn")
    codes = compilers.compile(compile_hopper_case, "3.6.0", 90, case, True)
    hold_hopper(codes, 0)
    added = {code.kernel.name: code.kernel.instructions["added in fours"] for code in codes}
    assert added["backward_kernel"] == added["dbias_reduce_kernel"] == 2


@pytest.mark.parametrize("terms", [{}, {"bias": "1hmn"}], ids=str)
def test_a_backward_whose_keys_are_one_tile(compilers, terms):
    """dQ leaves as what it is: no sum, and nothing after it."""
    case = replace(USUAL, B=1, H=8, M=128, N=128, D=64, **terms)
    codes = compilers.compile(compile_hopper_case, "3.6.0", 90, case, True)
    assert [code.kernel.name for code in codes] == ["preprocess_kernel", "backward_kernel"]
    hold_hopper(codes, 0)
    assert not any(codes[1].kernel.instructions[way] for way in ("added by TMA", "added in fours"))


@pytest.mark.parametrize(
    ("case", "multiplied"),
    [
        (replace(USUAL, D=64, bias="1hmn"), False),  # 1/8
        (replace(USUAL, D=64, bias="1hmn", dtype=torch.float16), True),  # small elements of Q would be rounded
        (replace(USUAL, D=64, bias="1hmn", softcap=5.0), True),  # the softcap needs the scores scaled before
        (replace(USUAL, bias="1hmn"), True),  # 1/sqrt(128)
    ],
    ids=str,
)
def test_a_scale_that_is_a_power_of_two_goes_into_q(compilers, case, multiplied):
    (forward,) = (
        code.kernel
        for code in compilers.compile(compile_hopper_case, "3.6.0", 90, case)
        if code.kernel.name == "forward_kernel"
    )
    assert bool(forward.instructions["scaled bias"]) == multiplied


BARRIERS = """
    %full = ttg.local_alloc : () -> !ttg.memdesc<2x1xi64, #shared3, #smem, mutable> loc(#loc1)
    %empty_1 = ttg.local_alloc : () -> !ttg.memdesc<1x1xi64, #shared3, #smem, mutable> loc(#loc1)
    %full_2 = ttg.memdesc_index %empty_1[%c0_i32] : !ttg.memdesc<1x1xi64, #shared3, #smem, mutable>
    ttg.warp_specialize(%q, {}) {{
"""


@pytest.mark.parametrize(("roles", "idle"), [("%full, %empty_1", []), ("%full, %empty_12", ["%empty_1"])])
def test_idle_barriers_are_found(roles, idle):
    assert idle_barriers(BARRIERS.format(roles)) == idle


WGMMA = """
        /*0100*/                   HGMMA.64x64x16.F32.BF16 R24, R8, gdesc[UR4].tnspB, R24, gsb0 ;
        /*0110*/                   {} ;
        /*0120*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0130*/                   {} ;
        /*0140*/              @!P0 BRA 0x130 ;
        /*0150*/                   HGMMA.64x64x16.F32.BF16 R24, R8, gdesc[UR4].tnspB, R24, gsb0 ;
        /*0160*/              @!P0 BRA 0x130 ;
"""


@pytest.mark.parametrize(
    ("during", "after", "hazards"),
    [
        ("IADD3 R4, R5, R6, RZ", "FADD R24, R24, R8", [0x130]),  # round the last loop the second is in flight
        ("IADD3 R11, R5, R6, RZ", "NOP", [0x110]),  # writes operand A
        ("IADD3 R12, R5, R11, RZ", "NOP", []),  # only reads it
        ("STS [R4], R55", "NOP", [0x110]),  # reads the accumulator
        ("LDS.128 R20, [R5]", "NOP", []),  # ends just below it
        ("LDS.128 R21, [R5]", "NOP", [0x110]),  # reaches into it
    ],
)
def test_the_lint_finds_hazards(during, after, hazards):
    code = WGMMA.format(during, after)
    assert wgmma_lint.count(code) == 2
    assert [hazard.address for hazard in wgmma_lint.lint(code)] == hazards


# With the entropy two warpgroups are enough under a band; at 256 dimensions twenty bytes spill.
@pytest.mark.parametrize(
    ("triton", "case", "statistics", "designed", "spilled"),
    [
        ("installed", USUAL, (True, False, True), 2 * (8 + 8) * 2, 0),
        ("3.6.0", replace(USUAL, causal=True, sink="h"), (True, False, False), 2 * (8 + 8) * 3, 0),
        ("3.6.0", replace(USUAL, D=64, causal=True), (True, False, True), 2 * (4 + 8) * 3, 0),
        ("3.6.0", replace(USUAL, D=64), (True, False, True), 3 * (4 + 8) * 2, 0),
        ("3.6.0", replace(USUAL, D=64, bias="bhmn", causal=True), (True, False, True), 2 * (4 + 8) * 3, 0),
        ("3.6.0", replace(USUAL, D=256, causal=True), (True, False, True), 2 * (16 + 4) * 3, 20),
        ("3.6.0", replace(USUAL, mask="b1mn", bias="1hmn"), (True, False, True), 2 * (8 + 8) * 2, 0),
    ],
    ids=str,
)
def test_statistics(compilers, triton, case, statistics, designed, spilled):
    codes = compilers.compile(compile_hopper_case, triton, 90, case, False, "", statistics)
    hold_hopper(codes, spilled)
    assert {code.wgmma for code in codes if code.kernel.name == "forward_kernel"} == {designed}
