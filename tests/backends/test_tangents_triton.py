"""Tangents (JVP) by Triton's kernel, in Triton's interpreter, by the error rule of helpers.py."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from derivative_helpers import LargestTensor, hold_tangents, jvp, runs_kernel, tangents_like
from helpers import Case, rows_of, tensors
from pairwise import each

from tilewise import TileMask, attention, cache_info

HALF, FLOAT = torch.float16, torch.float32
SMALL = Case(B=1, H=2, M=33, N=70, D=16)
LENGTHS = (1, 3, 127, 129)
TERMS_OF_LENGTHS = ({}, {"causal": True, "bias": "1hmn"}, {"mask": "b1mn", "window": (60, 40), "bias": "1h1n"})
BROADCASTS = ("bhmn", "1kmn", "11mn", "b11n", "1h1n", "1hm1", "b1m1", "1111")


@each(replace(SMALL, M=M, N=N, **TERMS_OF_LENGTHS[(m + n) % 3])
      for m, M in enumerate(LENGTHS) for n, N in enumerate(LENGTHS))  # fmt: skip
def test_lengths(interpreter, case):
    interpreter(hold_tangents, case)


@each(replace(SMALL, M=M, N=N, bias=bias, window=window)
      for M, N, bias, window in ((33, 1, None, None), (1, 1, "1hmn", None), (33, 33, None, (0, 0))))  # fmt: skip
def test_one_key(interpreter, case):
    """A query that sees one key has o = v, whatever the score: its tangent is exactly that of v, 0 for the others."""
    interpreter(moves_by_values, case)


def moves_by_values(case: Case) -> None:
    x = tensors(case)
    leaves = [y for y in x[:4] if y is not None]
    given = tangents_like(leaves)
    terms = {"return_lse": True, **case.terms}
    with runs_kernel():
        o, _ = jvp(lambda q, k, v, bias=None: attention(q, k, v, bias=bias, **terms), leaves, given)
    assert torch.equal(o, given[2].expand_as(o))


@each(replace(SMALL, H=4, Hkv=2, bias=bias, dtype=(HALF, FLOAT)[n % 2], causal=n % 3 == 0)
      for n, bias in enumerate(BROADCASTS))  # fmt: skip
def test_biases(interpreter, case):
    interpreter(hold_tangents, case)


@each(
    [
        replace(SMALL, B=2, H=6, Hkv=2, softcap=1.5, scale=0.3),
        replace(SMALL, B=2, H=4, Hkv=1, bias="bkmn", softcap=2.0, causal=True),
        replace(SMALL, bias="1hmn", bias_dtype=FLOAT),
        replace(SMALL, mask="b1mn", blind=True),
        replace(SMALL, mask="1h1n", sink="h"),
        replace(SMALL, mask="11m1", M=129),
        replace(SMALL, bias="11mn", bias_hides=True, blind=True),
        replace(SMALL, mask="bhmn", blind=True, sink="bhm", M=130, N=300),
        replace(SMALL, sink="1hm", sink_none=True, window=(20, 3)),
        replace(SMALL, bias="1hmn", sink="h", sink_at=1e4, dtype=FLOAT),
        replace(SMALL, causal=True, M=70, N=33, blind=True),
        replace(SMALL, layout="heads_last", bias="bhmn", mask="bhmn", sink="bhm", causal=True),
        replace(SMALL, layout="sliced", bias="1hmn", mask="b1mn"),
        replace(SMALL, layout="padded", D=24, Dv=40),
    ]
)
def test_terms(interpreter, case):
    interpreter(hold_tangents, case)


@each(
    replace(SMALL, H=1, M=20, N=40, D=D, Dv=Dv, dtype=dtype, softcap=softcap)
    for D, Dv, dtype, softcap in (
        (1, 1, HALF, None), (3, 5, HALF, 1.5), (40, 96, HALF, None), (96, 40, HALF, None), (128, 128, FLOAT, None),
        (64, 256, HALF, None), (256, 256, HALF, 2.0),
    )
)  # fmt: skip
def test_head_dimensions(interpreter, case):
    interpreter(hold_tangents, case)


@pytest.mark.parametrize("given", ["q", "k", "v", "b", "s", "qk", "vb"])
def test_absent_tangents(interpreter, given):
    case = replace(SMALL, bias="1hmn", sink="h", softcap=2.0, causal=True)
    interpreter(hold_tangents, case, given)


@each(
    [
        replace(SMALL, mask="b11n", planted=math.nan, softcap=1.0),
        replace(SMALL, mask="b1mn", bias="b11n", planted=math.inf),
        replace(SMALL, bias="11mn", planted=math.nan),
        replace(SMALL, causal=True, M=20, N=40, window=(2, 0), planted=math.nan),
    ]
)
def test_hidden_keys_that_are_not_finite(interpreter, case):
    interpreter(hold_tangents, case)


@each(replace(SMALL, bias=bias, bias_scale=scale, dtype=FLOAT)
      for bias, scale in (("1hmn", 1e6), ("b11n", -1e6), ("1hm1", 1e6)))  # fmt: skip
def test_large_biases(interpreter, case):
    interpreter(hold_tangents, case)


def every_key_has(bias: float) -> None:
    """Rows whose keys have one large bias have the tangents of rows without it."""
    x = tensors(replace(SMALL, dtype=FLOAT))

    given = tangents_like(x[:3])
    with runs_kernel():
        found, expected = (
            jvp(lambda *qkv, b=b: attention(*qkv, bias=b), x[:3], given)
            for b in (torch.full((1, 1, 33, 70), bias), torch.zeros(1, 1, 33, 70))
        )
    torch.testing.assert_close(found, expected, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("bias", [1e4, -1e4])
def test_one_bias_for_every_key(interpreter, bias):
    interpreter(every_key_has, bias)


def spoilt_in_sight(which: str) -> None:
    """NaN in a visible key's tangent reaches the rows that see it, and no others."""

    x = tensors(replace(SMALL, M=40, N=40))
    given = [*tangents_like(x[:3])]
    given["qkv".index(which)][:, :, 20] = math.nan
    with runs_kernel():
        o, _ = jvp(lambda *qkv: attention(*qkv, causal=True, return_lse=True), x[:3], given)
    spoilt = o.isnan().all(-1)
    assert not o[:, :, :20].isnan().any()
    assert spoilt[:, :, 20].all()
    assert spoilt[:, :, 21:].any() == (which != "q")


@pytest.mark.parametrize("which", "qkv")
def test_visible_tangents_that_are_not_finite(interpreter, which):
    interpreter(spoilt_in_sight, which)


def tile_masks() -> None:
    x = tensors(replace(SMALL, M=200, N=200))
    documents = torch.arange(200) // 60
    given = tangents_like(x[:3])
    for mask in (
        TileMask.documents(documents, block=64),
        TileMask.from_mask_mod(lambda b, h, i, j: (i - j).abs() < 50, 200, 200, block=64),
    ):
        found, expected = (
            jvp(lambda *qkv, m=m: attention(*qkv, mask=m, return_lse=True), x[:3], given) for m in (mask, mask.dense())
        )
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=2e-3)


def test_tile_masks(interpreter):
    interpreter(tile_masks)


def biases_of_runs() -> None:
    """Of a bias that three batch elements share each, and of a mask that repeats."""

    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, 2, 33, 16) for _ in range(3))
    bias, mask = torch.randn(2, 1, 2, 33, 33), torch.rand(1, 3, 1, 1, 33) < 0.6
    mask[..., 0] = True
    leaves = q, k, v, bias
    given = tangents_like(leaves)

    def f(q, k, v, bias, backend):
        return attention(q, k, v, bias=bias, mask=mask, return_lse=True, backend=backend)

    with runs_kernel():
        found = jvp(lambda *x: f(*x, "triton"), leaves, given)
    expected = jvp(lambda *x: f(*x, "reference"), leaves, given)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_biases_of_runs(interpreter):
    interpreter(biases_of_runs)


def strides() -> None:
    """Tangents lie as they like: forward AD copies them, a caller of the operator does not."""
    from tilewise.backends import Inputs, Outputs
    from tilewise.backends.protocol import Tangents
    from tilewise.operator.dispatch import forward_of, tangents_of
    from tilewise.spec.score import Band, Score, ScoreNumbers

    x = tensors(replace(SMALL, bias="1hmn", sink="h"))
    inputs, terms = Inputs(*x[:4], None, rows_of(x.sink)), ScoreNumbers.of(Score.of(Band(), 16), False, "auto")
    o, lse, *_ = forward_of(inputs, terms)(inputs)
    given = Tangents(*tangents_like([*x[:4], inputs.sink]))
    others = Tangents(*[None if t is None else t.mT.contiguous().mT for t in given])
    expanded = others._replace(q=torch.ones(1, dtype=HALF).expand_as(x.q))
    same = given._replace(q=torch.ones_like(x.q))
    for one, other in ((given, others), (same, expanded)):
        found = [tangents_of(inputs, Outputs(o, lse), t, terms)(inputs, Outputs(o, lse), t) for t in (one, other)]
        assert torch.equal(found[0].o, found[1].o)
        assert torch.equal(found[0].lse, found[1].lse)


def test_strides_of_tangents(interpreter):
    interpreter(strides)


@each([replace(SMALL, dropout_p=0.3), replace(SMALL, D=264), replace(SMALL, D=136, dtype=FLOAT)])
def test_what_the_kernel_declines(interpreter, case):
    """These are tiles in PyTorch's operators."""
    interpreter(hold_tangents, case, "qkv", "cpu", None, False)


def other_dtypes() -> None:
    x = tensors(SMALL)
    given = [t.float() for t in tangents_like(x[:3])]

    with runs_kernel(False):
        found = jvp(lambda *qkv: attention(*qkv, return_lse=True), x[:3], given)
    expected = jvp(lambda *qkv: attention(*qkv, return_lse=True), x[:3], [t.half() for t in given])
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=2e-3)


def test_tangents_of_another_dtype(interpreter):
    interpreter(other_dtypes)


def largest_tensor(case: Case) -> int:

    x = tensors(case)
    with LargestTensor() as found, runs_kernel():
        jvp(lambda *qkv: attention(*qkv, return_lse=True), x[:3], tangents_like(x[:3]))
    return found.elements


def test_no_matrix_of_scores(interpreter):
    assert interpreter(largest_tensor, replace(SMALL, H=1, M=300, N=300, D=8)) < 300 * 300 / 8


def twice() -> None:
    """A call of an equal layout takes what is prepared; other layouts, or other absent tangents, do not."""

    x = tensors(SMALL)
    given = tangents_like(x[:3])
    for _ in range(2):
        jvp(lambda *qkv: attention(*qkv, return_lse=True), x[:3], given)
    before = cache_info()["calls"].size
    jvp(lambda *qkv: attention(*qkv, return_lse=True), x[:3], given)
    assert cache_info()["calls"].size == before
    jvp(lambda *qkv: attention(*qkv, x.k, x.v, return_lse=True), x[:1], given[:1])
    assert cache_info()["calls"].size > before


def test_tangents_are_prepared_once(interpreter):
    interpreter(twice)
