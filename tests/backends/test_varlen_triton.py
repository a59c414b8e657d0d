"""Packed batches in the Triton kernels, in Triton's interpreter, by the error rule: see varlen_helpers.py."""

from __future__ import annotations

from typing import Any

import interpreter_child
import pytest
import torch
import varlen_helpers
from helpers import poisoned_memory
from varlen_biases import BIASES
from varlen_helpers import ONES, USED, H, Lengths, call, hold, tensors

from tilewise import varlen_attention
from tilewise.bias import RaggedBias

HALF = torch.float16
# More queries than keys, and fewer; some tiles.
TILES = {
    "TILES": Lengths((70, 0, 3, 40, 1), (33, 1, 0, 80, 64), past=1),
    "FEW_TILES": Lengths((40, 0, 3, 20, 1), (17, 1, 0, 50, 33), past=1),
}


def run(lengths: str, bias: str | None, options: dict[str, Any]) -> None:
    """Hold lengths and a bias, by their names, to the error rule, in the interpreter's process."""
    found: Any = TILES[lengths] if lengths in TILES else getattr(varlen_helpers, lengths)
    generator = torch.Generator().manual_seed(2)
    if (shape := options.pop("mask_shape", None)) is not None:
        options["mask"] = torch.rand(shape, generator=generator) < 0.6
    if (shape := options.pop("sink_shape", None)) is not None:
        options["sink"] = torch.randn(shape, generator=generator).requires_grad_()
    hold(found, None if bias is None else BIASES[bias], backend="triton", **options)


def same_drops(dropout_p: float) -> None:
    """A packed batch drops what the CPU does."""
    qkv, do, _ = tensors(USED)
    found = []
    for backend in ("cpu", "triton"):
        o, _ = call(qkv, USED, dropout_p=dropout_p, dropout_seed=(5, 6), backend=backend)
        found.append((o, *torch.autograd.grad((o * do).sum(), qkv)))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


def stays_inside() -> None:
    """Offsets that are none: without validate= nobody is told of an error, but nothing outside is read or written. NaN
    lies around all inputs, and a ragged bias's gradient is that of the sequence whose offset is one."""

    def leaf(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
        whole = torch.full((shape[0] + 256, *shape[1:]), float("nan"))
        whole[128:-128] = 0.5
        whole.requires_grad_()
        return whole, whole[128:-128]

    total = 40
    for offsets in ([0, 90, 20, 40], [-5, 10, 10, 400], [7, 3, 50, 2]):
        (whole, q), (_, k), (_, v) = (leaf(total, 2, 16) for _ in range(3))
        cu = torch.tensor(offsets)
        o = varlen_attention(q, k, v, cu, cu, total, total, causal=True, backend="triton")
        o.sum().backward()
        assert o.isfinite().all()
        assert whole.grad is not None
        assert whole.grad.isfinite().all()

    cu = torch.tensor([0, 4, 8, 12])
    for begin in (-3, 30, 10**12, 2**63 - 2):
        q, k, v = (torch.rand(12, 1, 16) for _ in range(3))
        whole, values = leaf(40, 1)
        bias = RaggedBias(values.T, torch.tensor([0, begin, 20, 36]))
        o, lse = varlen_attention(q, k, v, cu, cu, 4, 4, bias=bias, backend="triton", return_lse=True)
        assert (lse == -float("inf")).tolist() == [4 * [False] + 4 * [True] + 4 * [False]]
        o.square().sum().backward()
        assert whole.grad is not None
        found = whole.grad[128:-128, 0]
        assert (found[:16] != 0).all()
        assert (found[20:36] != 0).all()
        assert (found[16:20] == 0).all()
        assert (found[36:] == 0).all()


def clears_what_no_matrix_has() -> None:
    """A ragged bias's gradient is 0 between matrices: in chunks that these fill in part, or not at all."""
    from tilewise.backends.triton.varlen_preprocess import CHUNK

    chunk, cu = CHUNK.value, torch.tensor([0, 64, 128, 133])
    q, k, v = (torch.rand(133, 1, 16) for _ in range(3))
    values = torch.rand(1, 5 * chunk - 7, requires_grad=True)
    begins = (chunk, 3 * chunk + 50, chunk - 30)  # fills the second chunk; ends past the fourth; 25 before the second
    bias = RaggedBias(values, torch.tensor([*begins, 0]))
    o = varlen_attention(q, k, v, cu, cu, 64, 64, bias=bias, backend="triton")
    with poisoned_memory():
        o.square().sum().backward()
    there = torch.zeros(values.shape[1], dtype=torch.bool)
    for begin, pairs in zip(begins, (64 * 64, 64 * 64, 25), strict=True):
        there[begin : begin + pairs] = True
    assert values.grad is not None
    assert ((values.grad[0] != 0) == there).all()  # and no NaN
    assert values.grad.isfinite().all()


def clears_rows_that_no_sequence_has(D: int = 16, longest: int = 97) -> None:
    """Before the first sequence, past the last one, and of one past the longest that was named: 0, and their gradients
    too."""
    first, last = 3 + longest, 26 + 2 * longest  # where the second sequence begins, and the third
    cu, total = torch.tensor([3, first, last, last + 1]), last + 80
    q, k, v = (torch.rand(total, 1, D, requires_grad=True) for _ in range(3))
    with poisoned_memory():
        o, lse = varlen_attention(q, k, v, cu, cu, longest, longest, backend="triton", return_lse=True)
        o.square().sum().backward()
    own = torch.zeros(total, dtype=torch.bool)
    own[3 : first + longest] = own[last] = True
    for x in (o, q.grad, k.grad, v.grad):
        assert x is not None
        assert (x[:, 0] != 0).any(1)[:first][3:].all()
        assert (x[~own] == 0).all()  # and no NaN
        assert x.isfinite().all()
    assert (lse[0, ~own] == -float("inf")).all()
    assert lse[0, own].isfinite().all()


def reads_rows_of_two_bytes() -> None:
    """A bias in tiles of 64 keys, which come row after row, and its gradient, against the reference: calls of the same
    backend would have the same fault."""
    cu, pairs = torch.tensor([0, 70, 109]), torch.tensor([0, 70 * 70, 70 * 70 + 39 * 39])
    inputs = [torch.randn(109, 1, 16, dtype=torch.float16, requires_grad=True) for _ in range(3)]
    inputs.append(torch.randn(1, 70 * 70 + 39 * 39, dtype=torch.float16, requires_grad=True))
    found = []
    for backend in ("triton", "reference"):
        q, k, v, values = inputs
        o = varlen_attention(q, k, v, cu, cu, 70, 70, bias=RaggedBias(values, pairs), backend=backend)
        found.append((o, *torch.autograd.grad(o.float().square().sum(), inputs)))
    torch.testing.assert_close(found[0], found[1], rtol=1e-2, atol=4e-3)


@pytest.mark.parametrize("lengths", ["SMALL", "USED"])
@pytest.mark.parametrize(
    "options",
    [{}, {"causal": True}, {"window": (2, 1), "softcap": 3.0, "scale": 0.4}, {"dtype": HALF, "causal": True}],
    ids=str,
)
def test_lengths(interpreter, lengths, options):
    interpreter(run, lengths, None, options)


def test_lengths_about_those_of_tiles(interpreter):
    interpreter(run, "TILES", None, {"window": (30, 20), "dtype": HALF, "heads": (2, 1), "dims": (16, 16)})


# Of the rest nothing else is computed by the kernels.
LEFT_OUT = (
    "padded bh11", "padded 11mn", "padded 1111", "padded 11m1", "along the keys, one head",
    "along the keys, one dimension", "along the queries, one head", "ragged, shared", "ragged, groups",
    "query, start of all", "query, a start of all on the device", "query, starts of keys", "key, hidden outside",
    "all, start", "all, start of keys", "t5, starts", "alibi", "alibi, start", "several by distance",
    "several with starts", "low rank", "padded, along both",
)  # fmt: skip


@pytest.mark.parametrize("bias", [x for x in BIASES if x not in LEFT_OUT])
def test_bias(interpreter, bias):
    """By turns causal or not, with softcap or without one."""
    n = [*BIASES].index(bias)
    causal = {"causal": True} if n % 2 else {}
    interpreter(run, "USED", bias, causal if bias == "everything" or n % 3 else causal | CAP)


CAP = {"softcap": 3.0}
# Ways in which a gradient is summed; the rest are below, across tiles.
SUMMED = (
    "padded bkm1", "padded 1111", "query, clamped and reversed", "query, buckets", "all, of each sequence",
    "t5, starts", "padded, along both", "everything",
)  # fmt: skip


@pytest.mark.parametrize("bias", SUMMED)
def test_what_has_an_order_has_no_atomics(interpreter, bias):
    """With deterministic=True, whose backward once refused a sum that its forward had let pass."""
    causal = {"causal": True} if SUMMED.index(bias) % 2 else {}
    options = {"deterministic": True, **causal, **({} if bias == "everything" else CAP)}
    interpreter(interpreter_child.without_atomics, run, "USED", bias, options)


@pytest.mark.parametrize("bias", ["padded 11mn", "ragged, shared", "t5", "key, buckets and starts"])
def test_what_has_an_order_across_tiles(interpreter, bias):
    options = {"heads": (H, 2), "dims": (16, 8), "deterministic": True}
    interpreter(interpreter_child.without_atomics, run, "TILES", bias, options)


@pytest.mark.parametrize("bias", ["ragged", "t5", "query", "key"])
def test_bias_across_tiles(interpreter, bias):
    interpreter(run, "TILES", bias, {"heads": (H, 2), "dims": (16, 8)})


def test_a_bias_of_two_bytes(interpreter):
    interpreter(reads_rows_of_two_bytes)


@pytest.mark.parametrize(
    "options",
    [
        {"mask_shape": (USED.B, 1, USED.max_q, USED.max_k), "causal": True},
        {"mask_shape": (1, H, 1, USED.max_k)},
        {"sink_shape": (H,)},
        {"sink_shape": (H, USED.total_q), "causal": True},
        {"offsets_dtype": torch.int64, "deterministic": True, "causal": True},
    ],
    ids=str,
)
def test_options(interpreter, options):
    interpreter(run, "USED", None, options)


@pytest.mark.parametrize("bias", ["along the queries", "ragged, along the keys and alibi", "query"])
def test_one_query_of_each_sequence(interpreter, bias):
    """An axis of all queries is one of numbers of their own, though no sequence has two."""
    interpreter(run, "ONES", bias, {"sink_shape": (H, ONES.total_q), "causal": True})


def test_dropout(interpreter):
    interpreter(same_drops, 0.3)


def test_offsets_that_are_none_write_nothing_outside(interpreter):
    interpreter(stays_inside)


def test_rows_that_no_sequence_has(interpreter):
    interpreter(clears_rows_that_no_sequence_has)


def test_what_no_matrix_of_a_ragged_bias_has(interpreter):
    interpreter(clears_what_no_matrix_has)
