"""Faults of short sequences in one tile: see faults.py."""

from __future__ import annotations

from fault import Fault

TESTS = "backends/test_one_tile.py::"
KERNELS = "tilewise/backends/triton/one_tile/kernels.py"

ONE_TILE = [
    Fault(
        KERNELS, "added = tl.where(seen, added, -float(\"inf\"))", "added = tl.where(seen, added, added)",
        "a mask of each sequence hides nothing",
        f"{TESTS}test_several_sequences_for_a_program",
    ),
    Fault(
        KERNELS, "if spoilt != 0:", "if spoilt > 1:",
        "NaN in a hidden value reaches the output",
        f"{TESTS}test_hidden_pairs",
    ),
    Fault(
        KERNELS, "tile = tl.where((finite != 0)[:, None], tile, 0.0).to(tile.dtype)", "tile = tile * 1.0",
        "NaN in a hidden key reaches dQ",
        f"{TESTS}test_hidden_pairs",
    ),
    Fault(
        KERNELS, "dbias_sum += db", "dbias_sum = db",
        "dBias is that of a program's last sequence",
        f"{TESTS}test_several_sequences_for_a_program",
    ),
    Fault(
        KERNELS, "matrix_b + i // heads * sizes.matrix_batch", "matrix_b + i // heads",
        "sequences have the masks of others",
        f"{TESTS}test_a_mask_that_repeats",
    ),
    Fault(
        KERNELS, "delta = tl.where(left_out, 0.0, tl.sum(o_tile.to(tl.float32) * do_tile.to(tl.float32), 1)) - dl",
        "delta = tl.where(left_out, 0.0, tl.sum(o_tile.to(tl.float32) * do_tile.to(tl.float32), 1))",
        "the LSE has no gradient",
        f"{TESTS}test_terms",
    ),
    Fault(
        KERNELS, "* terms.exponent + low[:, None])", "* terms.exponent)",
        "P is made from a rounded LSE",
        f"{TESTS}test_p_has_no_rounding_of_a_large_lse",
    ),
    Fault(
        "tilewise/backends/triton/one_tile/launch.py", "WANT_K=needs.k", "WANT_K=needs.q",
        "k has no gradient beside a frozen q",
        f"{TESTS}test_terms",
    ),
    Fault(
        "tilewise/backends/short_sequences.py", "        or p.score.dropout\n", "",
        "dropout is left out without a word",
        f"{TESTS}test_other_problems_take_the_general_kernels",
    ),
]  # fmt: skip
