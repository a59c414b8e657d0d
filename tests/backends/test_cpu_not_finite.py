"""NaN and infinity on the CPU backend where nothing hides them, or where a query sees nothing; see docs/maths.md."""

import itertools
import math

import pytest
import torch
from helpers import Case, check, run, tensors, visible
from pairwise import pairwise

from tilewise.backends.cpu import fused, tiled

SMALL = {"B": 2, "H": 2, "M": 37, "N": 53, "D": 8, "dtype": torch.float32}


ROUTES = ("as chosen", "tiles", "small tiles")


@pytest.fixture
def route(request, monkeypatch):
    """PyTorch's kernel where it serves, tiles for everything, and tiles so small that short rows need many."""
    if request.param != "as chosen":
        for name in ("declines", "declines_backward"):
            monkeypatch.setattr(fused, name, lambda problem: "the test wants tiles")
    if request.param == "small tiles":
        for name, size in (("BLOCK_M", 16), ("MAX_BLOCK_M", 16), ("BLOCK_N", 24)):
            monkeypatch.setattr(tiled, name, size)


@pytest.mark.parametrize("route", ROUTES, indirect=True)
@pytest.mark.parametrize("terms", [{}, {"mask": "b1mn"}, {"bias": "1hmn"}, {"causal": True, "M": 53}], ids=str)
def test_an_infinite_key_whose_score_is_minus_infinity_weighs_nothing(route, terms):
    """As a hidden one, but for dQ = dS K, where the key is seen: 0 · inf is not finite, as it is not in PyTorch."""
    c = Case(**{**SMALL, **terms})
    t = tensors(c)
    k, others = t.k.clone(), torch.ones(1, 1, 1, c.N, dtype=torch.bool)
    k[:, :, 20] = -math.inf
    others[..., 20] = False
    t = t._replace(q=t.q.abs() + 0.1, k=k)
    seen = visible(c, t)[..., 20]
    got = run(c, "cpu", inputs=t)
    hidden = Case(**{**SMALL, **terms, "mask": terms.get("mask", "11mn")})
    mask = others.expand(1, 1, c.M, c.N) if t.mask is None else t.mask & others
    expected = run(hidden, "cpu", inputs=t._replace(mask=mask))
    for name in ("o", "lse", "dk", "dv", "dbias"):
        if getattr(got, name) is not None:
            torch.testing.assert_close(getattr(got, name), getattr(expected, name))
    assert not got.dq[seen].isfinite().any()
    torch.testing.assert_close(got.dq[~seen], expected.dq[~seen])


BLIND = [
    {"mask": "b1mn"},
    {"mask": "bhmn", "bias": "1hmn"},
    {"mask": "b11n"},
    {"bias": "bhmn", "bias_hides": True},
    {"bias": "b11n", "bias_hides": True},
    {"M": 70, "N": 30, "causal": True},
    {"bias": "bhmn", "bias_hides": True, "softcap": 2.0},
]


PLANTED = (math.nan, math.inf, -math.inf)


@pytest.mark.parametrize(("route", "terms", "planted"), pairwise(ROUTES, BLIND, PLANTED), indirect=["route"], ids=str)
def test_nothing_comes_from_a_row_that_sees_nothing(route, terms, planted):
    """Neither its query nor the gradient of its output reaches a gradient, whatever stands there: 0 · NaN is NaN."""
    nothing_comes_from_blind_rows(terms, planted, "cpu")


@pytest.mark.parametrize(("terms", "planted"), list(itertools.product(BLIND, PLANTED)), ids=str)
def test_nothing_comes_from_such_a_row_in_the_reference(terms, planted):
    nothing_comes_from_blind_rows(terms, planted, "reference")


def nothing_comes_from_blind_rows(terms, planted, backend):
    for more in ({}, {"lse": False, "grads": "qkv"}):
        of_batches = "b11n" in terms.values()
        c = Case(**{**SMALL, **terms, **more, "blind": not of_batches and "causal" not in terms})
        t = tensors(c)
        if of_batches:  # the first batch element sees nothing
            (t.bias if t.mask is None else t.mask)[0] = -math.inf if t.mask is None else False
        blind = ~visible(c, t).any(-1)
        assert blind.any()
        clean = run(c, backend, inputs=t)
        q, do = (x.masked_fill(blind[..., None], planted) for x in (t.q, t.do))
        got = run(c, backend, inputs=t._replace(q=q, do=do))
        for a, b in zip(got, clean, strict=True):
            torch.testing.assert_close(a, b)
        assert not got.dq[blind].any()


@pytest.mark.parametrize("terms", [{"softcap": 3.0}, {"bias": "1hmn"}], ids=str)
def test_a_transposed_mask_beside_what_is_not_finite(terms):
    """Careful tiles that are laid out as the mask is."""
    more = {"H": 4, "Hkv": 2, "mask": "11mn", "layout": "heads_last", "planted": math.nan}
    check(Case(**{**SMALL, **more, **terms}), "cpu")
