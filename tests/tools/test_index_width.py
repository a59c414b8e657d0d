"""Offsets past 2³¹ elements: a lint of all kernels, and calls of some in the interpreter."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from index_lint import Lint, kernels_of
from torch import Tensor

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

STEP = 2**30  # an int32, of which the double is none
Compared = list[tuple[Tensor, Tensor]]


def far(x: Tensor, axis: int, step: int = STEP) -> Tensor:
    """The same numbers, with neighbours along an axis ``step`` elements apart."""
    strides = list(x.movedim(axis, -1)[..., 0].contiguous().stride())
    strides.insert(axis, step)
    size = 1 + sum((n - 1) * stride for n, stride in zip(x.shape, strides, strict=True))
    return torch.empty(size, dtype=x.dtype).as_strided(x.shape, strides).copy_(x)


def compared(call: Callable[..., Tensor], inputs: Sequence[Tensor], at: int, *place: int) -> Compared:
    """Results and gradients of a call with input ``at`` far along an axis, and with it as it is."""
    moved = [far(x, *place) if n == at else x for n, x in enumerate(inputs)]
    return list(zip(_results(call, moved), _results(call, inputs), strict=True))


def _results(call: Callable[..., Tensor], inputs: Sequence[Tensor]) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    o = call(*leaves)
    return [o.detach(), *torch.autograd.grad(o.float().square().sum(), leaves)]


def _normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).half()


def attention(at: int) -> Compared:
    """q, k, v or a bias, along the head dimension or the keys."""
    D = 3 if at < 3 else 8
    inputs = _normal(1, 2, 9, D), _normal(1, 2, 3, D), _normal(1, 2, 3, D) + 1, _normal(1, 2, 9, 3)
    return compared(lambda q, k, v, b: tilewise.attention(q, k, v, bias=b, backend="triton"), inputs, at, 3)


def values() -> Compared:
    """Of a bias by distance so many entries that the last are far, though neighbours are not."""
    import tilewise
    from tilewise.bias import RelativeBias

    def call(q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> Tensor:
        return tilewise.attention(q, k, v, bias=RelativeBias(x, lo=-1090, outside="clamp"), backend="triton")

    return compared(call, [*(_normal(1, 1, 9, 8) for _ in range(3)), _normal(1, 1, 9, 1100)], 3, 3, 2**21)


def windows(at: int) -> Compared:
    """q, k, v along the head dimension."""
    from tilewise.integrations.evoformer import window_pair_attention

    def call(*tensors: Tensor) -> Tensor:
        found: Any = window_pair_attention(*tensors, None, 4, 8, backend="triton")
        return found

    return compared(call, [*(_normal(1, 1, 8, 3) for _ in range(3)), _normal(1, 1, 2, 4, 8)], at, 3)


def taken(axis: int) -> Compared:
    """Rows by an index."""
    from tilewise.topk.kernels import take_rows

    x, keys = torch.arange(9, dtype=torch.int8).view(1, 1, 3, 3), torch.tensor([2, 0], dtype=torch.int32)
    expected = x.index_select(2, keys)
    return [(take_rows(far(x, axis), keys.view(1, 1, 1, 2)), expected)]


def summed() -> Compared:
    """Gradients of rows by an index, along the head dimension."""
    from tilewise.topk.kernels import places_of, sum_rows

    grad, keys = torch.arange(6.0).view(1, 1, 2, 3).half(), torch.tensor([[[[2, 0]]]], dtype=torch.int32)
    expected = torch.zeros(1, 1, 3, 3).index_copy(2, keys.flatten().long(), grad.float())
    return [(sum_rows(far(grad, 3), places_of(keys, 3), (1, 1, 3, 3), torch.float32, False), expected)]


CALLS = [
    *((taken, axis) for axis in (2, 3)), (summed,), *((windows, at) for at in (0, 2)), (values,),
    *((attention, at) for at in (1, 3)),
]  # fmt: skip


@pytest.mark.parametrize("call", CALLS, ids=lambda call: " ".join([call[0].__name__, *map(str, call[1:])]))
def test_elements_past_an_int32(call, interpreter):
    for got, expected in interpreter(*call):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)
