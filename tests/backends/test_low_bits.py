"""Dropout beside few visible keys: the bits that rounding to 16 bits takes of O are kept, and D is made with them.

A row that sees one key has dS = 0, whatever dropout does. Without these bits D is off by O's rounding times dO, and dQ
by a tenth.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from forced import check_split
from helpers import Case, check, opcheck
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tilewise import TileMask, attention, explain, merge_attention, varlen_attention
from tilewise.backends import Inputs
from tilewise.spec.rounding import low_bits, with_low_bits
from tilewise.spec.score import Band, Score, ScoreNumbers

BRAIN, HALF, FLOAT = torch.bfloat16, torch.float16, torch.float32
ONE = Case(B=2, H=4, Hkv=2, M=37, N=37, D=16, dtype=HALF, window=(0, 0), dropout_p=0.9, lse=False)


def low_bits_and_back(exact: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """By the twins in Triton: the low bits of float32 numbers, and what becomes of those of ``dtype`` with them."""
    from probe_kernels import low_bits_kernel

    low, found = torch.empty_like(exact, dtype=torch.int16), torch.empty_like(exact)
    low_bits_kernel[(1,)](exact, exact.to(dtype), low, found, len(exact), 32768)
    return low, found


def one_key_of_packed(tokens: int) -> tuple[Tensor, ...]:
    """Gradients of a packed batch by the triton backend, in which each query sees one key, beside dropout 0.9."""
    from tilewise import varlen_attention

    generator = torch.Generator().manual_seed(0)
    x = [torch.randn(tokens, 4, 16, generator=generator).half().requires_grad_() for _ in range(3)]
    offsets = torch.tensor([0, 7, 7, 40, tokens - 5], dtype=torch.int32)
    o = varlen_attention(
        *x, offsets, offsets, tokens, tokens, window=(0, 0), dropout_p=0.9, dropout_seed=(1, 2), backend="triton"
    )  # fmt: skip
    return torch.autograd.grad((o.float() * torch.arange(16.0)).sum(), x)


def numbers(dtype: torch.dtype) -> Tensor:
    """float32, of many sizes; with what is between two of dtype, at its ends, and beyond them."""
    x = torch.randn(20000, generator=torch.Generator().manual_seed(0)) * 2.0 ** torch.arange(-8, 8).repeat(1250)
    half = 2.0**-12 if dtype == HALF else 2.0**-9
    special = [0.0, -0.0, 1.0, 1 + half, 1 + 3 * half, -1 - half, 65504.0, 65519.9, 1e-8, -1e-8, 4e-8, 3e38, -3e38]
    return torch.cat([x, torch.tensor([*special, math.inf, -math.inf, math.nan])])


def hold_numbers(dtype: torch.dtype, exact: Tensor, low: Tensor, found: Tensor) -> None:
    rounded = exact.to(dtype)
    assert low.dtype == torch.int16
    assert torch.equal(found.isfinite(), rounded.isfinite())
    usual = rounded.isfinite() & ((rounded.abs() >= 2.0**-14) | (rounded == exact))
    steps = (found[usual].view(torch.int32) - exact[usual].view(torch.int32)).abs()
    assert steps.max() <= 1
    assert steps.sum() <= 3  # ties
    rest = rounded.isfinite() & ~usual
    assert (found - exact)[rest].abs().max() <= 2.0**-24


@pytest.mark.parametrize("dtype", [HALF, BRAIN])
def test_numbers_come_back(dtype):
    exact = numbers(dtype)
    low = low_bits(exact, exact.to(dtype))
    hold_numbers(dtype, exact, low, with_low_bits(exact.to(dtype), low))


def test_numbers_come_back_in_triton(interpreter):
    exact = numbers(HALF)
    hold_numbers(HALF, exact, *interpreter(low_bits_and_back, exact, HALF))


# --- every backend against the error rule; of hopper preprocess and repair in test_hopper_rows.py ---

MEETS = [
    {},
    {"N": 90, "M": 70, "layout": "heads_last", "bias": "1hmn"},
    {"deterministic": True, "D": 24, "Dv": 40},
    {"window": (1, 0), "lse": True, "dropout_p": 0.3},
    {"mask": "b1mn", "planted": math.nan, "sink": "h"},
]


@pytest.mark.parametrize("dtype", [HALF, BRAIN])
@pytest.mark.parametrize("terms", MEETS, ids=str)
def test_cpu(dtype, terms):
    check(replace(ONE, dtype=dtype, **terms), "cpu")


@pytest.mark.parametrize("terms", MEETS, ids=str)
def test_triton(interpreter, terms):
    interpreter(check, replace(ONE, **terms), "triton")


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("M", [1, 3])
def test_splits(interpreter, splits, M):
    """Few queries, whose outputs are merged in float32 and then rounded."""
    interpreter(check_split, replace(ONE, M=M, N=300), splits)


# --- whoever calls ---


def of_one_key(n: int = 48, heads: int = 4) -> list[Tensor]:
    return [torch.randn(2, heads, n, 16, dtype=HALF, requires_grad=True) for _ in range(3)]


def f(q: Tensor, k: Tensor, v: Tensor, **terms) -> Tensor:
    return attention(q, k, v, window=(0, 0), dropout_p=0.9, dropout_seed=(1, 2), **terms)


def loss(*x: Tensor) -> Tensor:
    return (f(*x).float() * torch.arange(16.0)).sum()


def differentiated(function, x: list[Tensor]) -> list[Tensor]:
    o = function(*x)
    return list(torch.autograd.grad((o.float() * torch.arange(16.0)).sum(), x))


def hold(dq: Tensor, dk: Tensor, dv: Tensor) -> None:
    """0 but for the order of float32 sums, of products around 10^4."""
    assert dv.abs().max() > 100
    assert max(dq.abs().max(), dk.abs().max()) < 1e-2


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint(use_reentrant):
    x = of_one_key()
    checkpoint(loss, *x, use_reentrant=use_reentrant).backward()
    hold(*(y.grad for y in x))


def test_compile():
    torch._dynamo.reset()
    hold(*differentiated(torch.compile(f, fullgraph=True, backend="aot_eager"), of_one_key()))


def test_transforms():
    x = [y.detach() for y in of_one_key()]
    hold(*torch.func.grad(loss, argnums=(0, 1, 2))(*x))
    stacked = [torch.stack([y, y]) for y in x]
    hold(*torch.vmap(torch.func.grad(loss, argnums=(0, 1, 2)))(*stacked))


@pytest.mark.parametrize("dtype", [HALF, FLOAT])
@pytest.mark.parametrize("heads_last", [False, True])
def test_the_operator(dtype, heads_last):
    """Its fake kernel promises what the real one returns, and its backward takes it."""
    x = [y.detach().to(dtype).requires_grad_() for y in of_one_key(9)]
    if heads_last:
        x = [y.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for y in x]
    inputs = Inputs(*x, None, None, seed=torch.tensor([1, 2]))
    terms = ScoreNumbers.of(Score.of(Band(0, 0), 16, dropout_p=0.9), False, "cpu")
    opcheck(torch.ops.tilewise.attention.default, (*inputs.flat(), *terms), traced=heads_last)
    o, lse, o_low, _ = torch.ops.tilewise.attention(*inputs.flat(), *terms)
    assert o_low.dtype == torch.int16
    assert not o_low.requires_grad
    assert o_low.shape == (o.shape if dtype == HALF else (0,))
    assert dtype == FLOAT or o_low.stride() == o.stride()
    without = Inputs(*x, None, None).flat(), ScoreNumbers.of(Score.of(Band(0, 0), 16), False, "cpu")
    assert torch.ops.tilewise.attention(*without[0], *without[1])[2].shape == (0,)
    torch.library.opcheck(
        torch.ops.tilewise.attention_backward.default,
        (o, None, *(y.detach() if y is not None else y for y in inputs.flat()), o.detach(), lse, o_low, *terms,
         [True] * 3 + [False] * 7),
        test_utils=("test_schema", "test_faketensor"),
    )  # fmt: skip


def test_packed_batches():
    x = [torch.randn(90, 4, 16, dtype=HALF, requires_grad=True) for _ in range(3)]
    offsets = torch.tensor([0, 7, 7, 40, 85], dtype=torch.int32)
    terms = {"window": (0, 0), "dropout_p": 0.9, "dropout_seed": (1, 2)}
    hold(*differentiated(lambda *x: varlen_attention(*x, offsets, offsets, 45, 45, **terms), x))


def test_packed_batches_in_triton(interpreter):
    hold(*interpreter(one_key_of_packed, 90))


def test_masks_by_tiles():
    mask = TileMask.from_rows(lambda rows: torch.eye(100, dtype=torch.bool)[None, None, rows], 100, 100, block=64)
    hold(*differentiated(lambda *x: attention(*x, mask=mask, dropout_p=0.9, dropout_seed=(1, 2)), of_one_key(100)))


def test_parts_of_the_keys():
    """Merged by their LSEs: of a row's parts one sees its key, and the others nothing."""
    x = of_one_key()

    def merged(q, k, v):
        parts = [
            attention(q, k[:, :, n:m], v[:, :, n:m], mask=torch.eye(48, dtype=torch.bool)[:, n:m], return_lse=True,
                      dropout_p=0.9, dropout_seed=(1, n))
            for n, m in ((0, 16), (16, 48))
        ]  # fmt: skip
        return merge_attention(*zip(*parts, strict=True))[0]

    hold(*differentiated(merged, x))


def test_explanation():
    """Two bytes of an element of o more, in each pass; none of float32, or without dropout."""
    x = of_one_key()
    e, without = explain(*x, dropout_p=0.9), explain(*x)
    assert e.forward.bytes - without.forward.bytes == 2 * 2 * 4 * 48 * 16
    assert e.backward.bytes - without.backward.bytes == 2 * 2 * 4 * 48 * 16
    assert "in 2 bytes an element" in str(e)
    x = [y.float() for y in x]
    assert explain(*x, dropout_p=0.9).forward == explain(*x).forward
