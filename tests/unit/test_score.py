"""The score terms: each derivative against autograd, the band against its definition."""

import dataclasses
import itertools
import math

import pytest
import torch

from tilewise.spec import reference
from tilewise.spec.score import Band, Score

EXACT = {"rtol": 1e-12, "atol": 1e-14}


def derivative(function, x):
    x = x.detach().requires_grad_()
    (gradient,) = torch.autograd.grad(function(x).sum(), x)
    return gradient


@pytest.mark.parametrize("cap", [0.5, 1.0, 30.0])
def test_softcap_is_bounded_and_the_identity_near_zero(cap):
    s = torch.linspace(-100 * cap, 100 * cap, 201, dtype=torch.float64)
    capped = reference.softcap(s, cap)
    assert capped.abs().max() <= cap
    assert (capped.diff() >= 0).all()
    small = torch.tensor([-1e-6, 0.0, 1e-6], dtype=torch.float64) * cap
    torch.testing.assert_close(reference.softcap(small, cap), small, rtol=1e-11, atol=0)
    torch.testing.assert_close(reference.softcap(torch.tensor(cap).double(), cap).item(), cap * math.tanh(1.0))


@pytest.mark.parametrize("cap", [0.5, 1.0, 30.0])
def test_softcap_derivative(cap):
    s = torch.linspace(-4 * cap, 4 * cap, 101, dtype=torch.float64)
    expected = derivative(lambda s: reference.softcap(s, cap), s)
    torch.testing.assert_close(reference.softcap_derivative(reference.softcap(s, cap), cap), expected, **EXACT)


def test_softmax_derivative():
    """dS from dP and D = rowsum(dP∘P), and the same from D = rowsum(dO∘O) when P multiplies a V."""
    s, dp = torch.randn(2, 5, 7, dtype=torch.float64), torch.randn(2, 5, 7, dtype=torch.float64)
    p = torch.softmax(s, -1)
    expected = derivative(lambda s: torch.softmax(s, -1) * dp, s)
    delta = (dp * p).sum(-1, keepdim=True)
    torch.testing.assert_close(reference.softmax_derivative(p, dp, delta), expected, **EXACT)

    v, do = torch.randn(2, 7, 3, dtype=torch.float64), torch.randn(2, 5, 3, dtype=torch.float64)
    expected = derivative(lambda s: torch.softmax(s, -1) @ v * do, s)
    delta = (do * (p @ v)).sum(-1, keepdim=True)
    torch.testing.assert_close(reference.softmax_derivative(p, do @ v.mT, delta), expected, **EXACT)


def test_softmax_derivative_through_the_lse():
    """The cotangent of the LSE is subtracted from D."""
    s, dlse = torch.randn(5, 7, dtype=torch.float64), torch.randn(5, 1, dtype=torch.float64)
    expected = derivative(lambda s: torch.logsumexp(s, -1, keepdim=True) * dlse, s)
    p = torch.softmax(s, -1)
    torch.testing.assert_close(reference.softmax_derivative(p, torch.zeros_like(s), -dlse), expected, **EXACT)


@pytest.mark.parametrize("transposed", [False, True])
def test_in_band(transposed):
    """The indices are arguments: one function serves an [M, N] tile, its transpose and any offset."""
    rows, cols = torch.arange(3, 9), torch.arange(2, 7)
    grid = (rows[None, :], cols[:, None]) if transposed else (rows[:, None], cols[None, :])
    for lo, hi in itertools.product((None, -4, -1, 0, 2), (None, -2, 0, 1, 3)):
        seen = reference.in_band(*grid, Band(lo, hi))
        assert seen.dtype == torch.bool
        assert seen.shape == ((5, 6) if transposed else (6, 5))
        expected = [
            [(lo is None or j - i >= lo) and (hi is None or j - i <= hi) for j in cols.tolist()] for i in rows.tolist()
        ]
        assert (seen.T if transposed else seen).tolist() == expected


def test_visible_product_is_a_product():
    p, x = torch.rand(2, 4, 5, dtype=torch.float64), torch.randn(2, 5, 3, dtype=torch.float64)
    visible = torch.ones(2, 4, 5, dtype=torch.bool)
    torch.testing.assert_close(reference.visible_product(p, visible, x), p @ x, **EXACT)


def test_visible_product_of_what_is_not_finite():
    """Row 0 sees everything, row 1 the finite part, row 2 sees it with a probability that has become 0."""
    p = torch.tensor([[0.5, 0.25, 0.25], [1.0, 0.0, 0.0], [1.0, 0.0, 0.0]], dtype=torch.float64)
    visible = torch.tensor([[True, True, True], [True, False, False], [True, True, True]])
    x = torch.tensor([[1.0, 2.0, 3.0], [math.nan, math.inf, 4.0], [5.0, 6.0, -math.inf]], dtype=torch.float64)
    expected = [
        [math.nan, math.inf, -math.inf],
        [1.0, 2.0, 3.0],
        [math.nan, math.inf, -math.inf],
    ]
    got = reference.visible_product(p, visible, x)
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64), equal_nan=True, rtol=0, atol=0)
    both = torch.tensor([[math.inf], [-math.inf], [0.0]], dtype=torch.float64)
    assert reference.visible_product(p, visible, both)[:, 0].isnan().tolist() == [True, False, True]


@pytest.mark.parametrize(("M", "N"), [(4, 4), (3, 6), (6, 3)])
@pytest.mark.parametrize("bottom_right", [True, False])
def test_band_of_causal_and_window(M, N, bottom_right):
    diagonal = N - M if bottom_right else 0
    widths = (None, 0, 1, 3, 100)
    for causal, left, right in itertools.product((False, True), widths, widths):
        band = Band.aligned(causal, (left, right), diagonal)
        for i, j in itertools.product(range(M), range(N)):
            offset = j - (i + diagonal)
            seen = (
                (not causal or offset <= 0)
                and (left is None or offset >= -left)
                and (right is None or offset <= right)
            )  # fmt: skip
            assert ((band.lo is None or j - i >= band.lo) and (band.hi is None or j - i <= band.hi)) == seen
    assert Band.aligned(False, None, diagonal) == Band()
    assert Band.aligned(True, None, diagonal) == Band(None, diagonal)


def test_terms_are_values():
    """Plans are cached by them."""
    assert Band().unlimited
    assert not Band(0, None).unlimited
    assert not Band(None, 0).unlimited
    assert hash(Score(0.5, None, Band(1, 2))) == hash(Score(0.5, None, Band(1, 2)))
    assert Score(0.5, None, Band(1, 2)) != Score(0.5, None, Band(1, 3))
    with pytest.raises(dataclasses.FrozenInstanceError):
        Band().lo = 3  # type: ignore[misc]
