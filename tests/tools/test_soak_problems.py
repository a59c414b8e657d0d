"""What the soak of tests/gpu draws: problems that can be made, in few kernels, and a call that repeats a failure."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import soak
import torch
from helpers import Case, tensors
from relative_helpers import Term, made

DRAWN = [drawn for n in range(60) for drawn in soak.problems(n, 3)]


def test_equal_numbers_draw_equal_problems():
    assert list(map(str, soak.problems(7, 5))) == list(map(str, soak.problems(7, 5)))
    assert list(map(str, soak.problems(7, 5))) != list(map(str, soak.problems(7, 5, seed=1)))


def test_every_feature_is_drawn():
    cases = [drawn.case for drawn in DRAWN]
    assert {case.dtype for case in cases} == {torch.float16, torch.bfloat16, torch.float32}
    assert {drawn.backend for drawn in DRAWN} == {None, "triton"}
    for name in (
        "bias", "bias_dtype", "mask", "window", "softcap", "scale", "layout", "planted", "grads", "D", "Dv", "sink",
        "dropout_p",
    ):  # fmt: skip
        assert len({str(getattr(case, name)) for case in cases}) > 2, name
    for name in ("causal", "bias_hides", "blind", "lse", "deterministic", "sink_none"):
        assert Counter(getattr(case, name) for case in cases)[True] > 5, name
    assert min(case.M for case in cases) == 1
    assert any(case.M > 64 for case in cases)
    assert any(1 < case.M <= 64 and case.N >= 16 * case.M for case in cases)


def test_decoding_is_drawn_with_everything():
    """Trainable biases of many shapes, with and without a mask and a band, some along the keys of a single query."""
    decoding = [drawn.case for drawn in DRAWN if drawn.case.M <= 64 and drawn.case.N >= 16 * drawn.case.M]
    trained = [case for case in decoding if case.bias is not None and "b" in case.grads]
    assert len({case.bias for case in trained}) >= 5
    assert {case.mask is None for case in trained} == {True, False}
    assert any(case.M == 1 and case.mask is not None and case.bias[2:] == "1n" for case in trained)
    assert {case.causal or case.window is not None for case in trained} == {True, False}


@pytest.mark.parametrize("n", range(0, 60, 6))
def test_problems_can_be_made(n):
    for drawn in soak.problems(n, 1):
        assert tensors(drawn.case).q.shape == (drawn.case.B, drawn.case.H, drawn.case.M, drawn.case.D)


def test_a_problem_is_told_as_a_call():
    told = {"check": lambda case, *rest: (case, (), *rest), "check_terms": lambda *args: args}
    scope = {**told, "Case": Case, "Term": Term, "torch": torch, "nan": math.nan, "inf": math.inf}
    for drawn in DRAWN:
        case, terms, backend, device = eval(str(drawn), scope)
        assert (str(case), terms, backend, device) == (str(drawn.case), drawn.bias_terms, drawn.backend, "cuda")


def test_bias_terms_are_drawn():
    terms = [term for drawn in DRAWN for term in drawn.bias_terms]
    assert {term.kind for term in terms} >= {"query", "key", "t5"}
    for name in ("axes", "R", "lo", "outside", "starts", "dtype"):
        assert len({str(getattr(term, name)) for term in terms}) > 2, name
    assert any(drawn.bias_terms and drawn.case.deterministic for drawn in DRAWN)
    for drawn in DRAWN[::7]:
        made(drawn.case, drawn.bias_terms, "cpu")
