"""Calls of packed batches like an earlier one, which are not read again and of whose views autograd knows nothing."""

from __future__ import annotations

import pytest
import torch
from helpers import cached
from varlen_biases import BIASES
from varlen_helpers import DOUBLE, FLOAT, HALF, SMALL, USED, H, Lengths, New, call, gradients, tensors

import tilewise.varlen as public
from tilewise import varlen_attention
from tilewise.bias import RaggedBias
from tilewise.cache import calls
from tilewise.frontend import varlen
from tilewise.frontend.varlen import shared_longest

REMEMBERED = (
    None,
    "ragged",
    "ragged, shared",
    "along the keys",
    "along the queries",
    "padded bhmn",
    "padded 1111",
    "t5",
    "alibi",
    "alibi, start",
)
READ = ("query", "everything")


@pytest.fixture(autouse=True)
def forgotten():
    calls.clear()
    yield
    calls.clear()


def twice(monkeypatch, lengths, name, remembered, **options):
    """(o, lse, gradients) of the first call, and of another one of the same kind with other numbers, and of that one
    without the cache; the second is not read."""
    found = []
    for n in range(3):
        if n == 2:
            calls.clear()
        qkv, do, dlse = tensors(lengths, DOUBLE, seed=1 if n == 0 else 2)
        new = New(lengths, DOUBLE, 3 if n == 0 else 4)
        bias = None if name is None else BIASES[name](new)[0]
        with monkeypatch.context() as patch:
            if n == 1 and remembered:
                patch.setattr(varlen, "read_packed", None)
            if n == 2:
                for module in (varlen, public):
                    patch.setattr(module, "cached_packed", lambda *_: None)
            outputs = call(qkv, lengths, bias=bias, **options)
        assert bool(cached("packed")) == (remembered and n < 2)
        found.append((*outputs, *gradients(outputs, (*qkv, *new.leaves), do, dlse)))
    return found


@pytest.mark.parametrize("name", REMEMBERED + READ)
@pytest.mark.parametrize("options", [{}, {"causal": True, "scale": 0.3}], ids=str)
def test_a_call_again(monkeypatch, name, options):
    first, again, anew = twice(monkeypatch, USED, name, name in REMEMBERED, **options)
    assert len(again) == len(anew)
    for x, y in zip(again, anew, strict=True):
        assert x.shape == y.shape
        assert x.stride() == y.stride() or not x.numel()
        assert torch.equal(x, y)
    assert not torch.equal(first[0], again[0])


@pytest.mark.parametrize("name", ["t5", "alibi"])
def test_distances_again(monkeypatch, name):
    """They count from the last query and key, of which there are not equally many."""
    _, again, alone = twice(monkeypatch, Lengths((3, 5, 1), (7, 11, 2)), name, True)
    assert all(torch.equal(x, y) for x, y in zip(again, alone, strict=True))


def test_a_mask_again(monkeypatch):
    mask = torch.rand(USED.B, 1, USED.max_q, USED.max_k) < 0.6
    _, again, anew = twice(monkeypatch, USED, "ragged", True, mask=mask)
    assert all(torch.equal(x, y) for x, y in zip(again, anew, strict=True))


def test_longest_lengths_in_common():
    """They are no shorter, are few, and stay where something has their shape or checks them."""
    for n in range(1, 5000):
        (m, _) = shared_longest((n, 7))
        assert n <= m <= max(n + 15, n * 9 // 8 + 1, n + 127 if n > 128 else 0)
        assert (m <= 64) == (n <= 64)
        assert (m == 1) == (n == 1)
    assert len({shared_longest((n, n)) for n in range(4097, 8193)}) == 8
    bias = torch.zeros(1, 1, 1, 50)
    for options in ({"bias": bias}, {"mask": bias > 0}, {"validate": True}, {"bias": (bias,)}):
        assert shared_longest((50, 50), **options) == (50, 50)
    assert shared_longest((50, 50), bias=bias[0, 0]) == (64, 64)
    assert shared_longest((50, True)) == (50, True)


CHANGES = [
    {"causal": True}, {"scale": 0.1}, {"softcap": 2.0}, {"window": (1, 0)}, {"mask": "other"}, {"dtype": FLOAT},
    {"offsets_dtype": torch.int64}, {"longer": True}, {"deterministic": True},
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda x: str(*x))
def test_what_a_call_depends_on(change):
    """A call that differs from an earlier one in one thing is as if that had not been."""
    options = dict(change)
    lengths = SMALL._replace(longer=3) if options.pop("longer", False) else SMALL
    dtype = options.pop("dtype", DOUBLE)
    if options.get("mask") == "other":
        options["mask"] = torch.rand(1, 1, SMALL.max_q, SMALL.max_k) < 0.5
    call(tensors(SMALL, DOUBLE)[0], SMALL)
    after = call(tensors(lengths, dtype)[0], lengths, **options)
    calls.clear()
    alone = call(tensors(lengths, dtype)[0], lengths, **options)
    assert all(torch.equal(x, y) for x, y in zip(after, alone, strict=True))


def test_deterministic_algorithms_are_part_of_a_call():
    call(tensors(SMALL)[0], SMALL)
    torch.use_deterministic_algorithms(True)
    try:
        call(tensors(SMALL)[0], SMALL)
    finally:
        torch.use_deterministic_algorithms(False)
    assert {known[0].deterministic for known in cached("packed").values()} == {False, True}


def test_what_the_offsets_of_a_ragged_bias_say():
    """Of single queries a matrix has as many numbers as a sequence has keys."""
    lengths = Lengths((1, 1, 1), (3, 3, 3))
    qkv, values = tensors(lengths, DOUBLE)[0], torch.randn(H, 9, dtype=DOUBLE)
    along, _ = call(qkv, lengths, bias=values)
    same, _ = call(qkv, lengths, bias=RaggedBias(values, torch.tensor([0, 3, 6, 9])))
    other, _ = call(qkv, lengths, bias=RaggedBias(values, torch.tensor([6, 0, 3, 9])))
    torch.testing.assert_close(along, same)
    torch.testing.assert_close(other, call(qkv, lengths, bias=values[:, [6, 7, 8, 0, 1, 2, 3, 4, 5]])[0])
    assert len(cached("packed")) == 2


def test_errors_stay():
    """What an equal number of another type, or a check that was not asked for, would let through."""
    qkv = tensors(SMALL)[0]
    call(qkv, SMALL, causal=True)
    with pytest.raises(TypeError, match="causal"):
        call(qkv, SMALL, causal=1)
    with pytest.raises(TypeError, match="scale"):
        call(qkv, SMALL, causal=True, scale=[1.0])
    with pytest.raises(TypeError, match="max_seqlen_q"):
        varlen_attention(*qkv, *SMALL.arguments()[:2], [3], SMALL.max_k)
    assert torch.equal(call(qkv, SMALL, window=[1, 0])[0], call(qkv, SMALL, window=(1, 0))[0])
    one = Lengths((1,), (1,))
    call(tensors(one)[0], one)
    with pytest.raises(TypeError, match="max_seqlen_k: expected an int, got bool"):
        varlen_attention(*tensors(one)[0], *one.arguments()[:2], 1, True, return_lse=True)
    cu_q, cu_k, *longest = SMALL.arguments()
    with pytest.raises(ValueError, match="cu_seqlens_q"):
        varlen_attention(*qkv, cu_q.flip(0), cu_k, *longest, causal=True, return_lse=True, validate=True)


def test_under_autocast():
    q, k, v = (x.detach() for x in tensors(SMALL)[0])
    call((q, k, v), SMALL)
    with torch.autocast("cpu", HALF):
        o, _ = call((q, k, v), SMALL)
    assert o.dtype == HALF


def test_only_what_is_asked_for_gets_a_gradient():
    qkv, do, _ = tensors(SMALL, DOUBLE)
    new = New(SMALL, DOUBLE)
    bias, _ = BIASES["ragged"](new)
    qkv = [x.detach() for x in qkv]
    found = []
    for _ in range(2):
        o, lse = call(qkv, SMALL, bias=bias)
        found.append((*torch.autograd.grad((o * do).sum(), new.leaves, retain_graph=True),
                      *torch.autograd.grad(lse[lse.isfinite()].sum(), new.leaves)))  # fmt: skip
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))
    with torch.no_grad():
        assert not call(qkv, SMALL, bias=bias)[0].requires_grad
    assert len(cached("packed")) == 1


def test_in_place_changes_are_noticed():
    for _ in range(2):
        (q, k, v), _, _ = tensors(SMALL, DOUBLE)
        o, _ = call((q, k, v), SMALL)
        with torch.no_grad():
            k.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            o.sum().backward()
