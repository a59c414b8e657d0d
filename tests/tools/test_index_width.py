"""Offsets past 2³¹ elements: a lint of all kernels, and calls of some in the interpreter."""

from __future__ import annotations

import ast
import importlib.util
import textwrap
from pathlib import Path

import far_child
import pytest
import torch
from index_lint import Lint, kernels_of

import tilewise

NARROW = "the host sets WIDE where 256 rows or columns may pass 2³¹, and here the index has 64 bits then"
OURS = "of a sum that the backward has made, whose columns are neighbours"
# Function: product, and why 32 bits are enough.
JUSTIFIED = {
    "backends/triton/tensors.py: load_rows": {"rows[:, None] * x.stride2": NARROW, "cols[None, :] * x.stride3": NARROW},
    "backends/triton/tensors.py: load_operand": {"r * stride2": NARROW, "n * stride3": NARROW},
    "backends/triton/tensors.py: flat_place": {"r * stride2": NARROW},
    "backends/triton/relative.py: entries_at": {
        f"{index} * x.{stride}": NARROW
        for index, stride in (
            ("rows", "stride2"), ("rows", "stride3"), ("columns", "stride2"), ("columns", "stride3"),
            ("entry", "stride3"),
        )
    },
    "backends/triton/relative.py: _give_diagonals": {"distance * x.stride3": OURS},
    "backends/triton/forward.py: forward_kernel": {"sizes.queries * sizes.group": "rows that are packed, few"},
    "ops/gemm/triton_kernel.py: _offsets": {"(x.to(tl.int64) if k.WIDE else x) * stride": NARROW},
    "ops/row_softmax/triton/rows.py: elements": {"cols[None, :] * x[1]": NARROW},
    "windows/forward.py: load_rows": {
        "_wide(rows, c)[:, None] * x.stride2": NARROW, "_wide(d, c)[None, :] * x.stride3": NARROW,
    },
    "windows/forward.py: store_rows": {
        "_wide(rows, c)[:, None] * x.stride2": NARROW, "_wide(d, c)[None, :] * x.stride3": NARROW,
    },
    "windows/forward.py: bias_place": {
        "_wide(rows, c) * bias.stride2": NARROW, "_wide(places, c) * bias.stride3": NARROW,
    },
    "backends/kernels/vectors.py: table_vector_kernel": {"row * table.stride2": "rows come as int64"},
    "backends/kernels/vectors.py: table_gradient_kernel": {"place * gradient.stride3": OURS},
    "backends/kernels/vectors.py: slopes_gradient_kernel": {"place * gradient.stride3": OURS},
    "backends/gluon/sm90/backward/sparse_sum.py: sparse_sum_kernel": {
        "col[None, :] * total.stride3": OURS,
        "col[None, :] * dbias.stride3": "TMA reads the bias, or a copy, whose columns are neighbours, and so dBias's",
    },
    "backends/gluon/sm90/backward/batched.py: add_pieces": {"PIECE_ROWS * stride": "sixteen rows of a sum of ours"},
    "backends/gluon/sm90/backward/dq.py: finish_heads": {
        "element * (dq.stride0 // 8 * 8)": "element is 2 at most, of 32 batch elements or more: dQ would take 64 GB",
    },
    "backends/gluon/sm90/common/softmax.py: rescaled": {"parts * alpha": "numbers, no offsets"},
}  # fmt: skip


def test_an_index_that_is_multiplied_by_a_stride_has_64_bits():
    lint = Lint(kernels_of(Path(tilewise.__file__).parent))
    assert len(lint.functions) > 500
    justified = {(place, text) for place, products in JUSTIFIED.items() for text in products}
    assert set(lint.products) == justified


def products(source: str) -> list[str]:
    found = Lint({"backends/x.py": ast.parse(textwrap.dedent(source))}).products
    return [x.text for x in found]


def test_the_lint_finds_what_wraps_around():
    """By itself, through a name, a tuple, a call, a branch, and a length in place of a stride."""
    found = products(
        """
        @triton.jit
        def of_rows(x, key, d, stride, sizes):
            at = x.pointer + key[:, None] * x.stride2 + d.to(tl.int64)[None, :] * x.stride3
            row, (place, step) = key, strides_of(x)
            step = x.stride0 // 8 * 8
            if sizes.WIDE:
                row = row.to(tl.int64)
            at += row * step
            at += tl.cast(row, tl.int64) * step
            return inner(at, row, stride) + wide(tl.cast(row, tl.int64), stride) + row * sizes.queries

        @gluon.jit
        def inner(at, row, step):
            return at + row * step

        @gluon.jit
        def wide(row, step):
            return row * step + tl.program_id(0) // sizes.keys * 8

        @triton.jit(do_not_specialize=["x"])
        def kernel(x):
            of_rows(x, 0, 0, x.stride1, 0)
            inner(x, tl.program_id(0), x.stride1)
        """
    )
    assert found == ["key[:, None] * x.stride2", "row * step", "row * sizes.queries", "row * step"]


# --- in the interpreter ---

CALLS = [
    *((far_child.taken, axis) for axis in (2, 3)),
    (far_child.summed,),
    *((far_child.windows, at) for at in (0, 2)),
    (far_child.values,),
    *((far_child.attention, at) for at in (1, 3)),
]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("call", CALLS, ids=lambda call: " ".join([call[0].__name__, *map(str, call[1:])]))
def test_elements_past_an_int32(call, interpreter):
    for got, expected in interpreter(*call):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)
