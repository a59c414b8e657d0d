"""The error rule itself: it accepts what is right and rejects what is slightly wrong."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace

import helpers
import pytest
import torch
from helpers import LAYOUTS, NAMES, SLACK, Case, check, hold, poisoned_memory, run, tensors, unfused_results, visible

BIASED = Case(H=4, Hkv=2, M=40, N=50, D=16, bias="1hmn")
CASES = [
    Case(),
    BIASED,
    replace(BIASED, dtype=torch.bfloat16, bias="bk1n", bias_dtype=torch.float32, causal=True, softcap=2.0),
    replace(BIASED, dtype=torch.float32, mask="b1mn", blind=True, window=(9, 4)),
    replace(BIASED, bias="1111", lse=False),
    replace(BIASED, mask="b11n", planted=math.nan, bias_hides=True),
    *(replace(BIASED, layout=layout, mask="11mn") for layout in LAYOUTS),
    replace(BIASED, mask="11mn", blind=True, sink="bhm", sink_none=True),
    replace(BIASED, bias=None, sink="h", sink_at=5.0, layout="sliced"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_right_results_pass(case, backend):
    ratios = check(case, backend)
    absent = {"dbias" if case.bias is None else "", "dsink" if case.sink is None else ""}
    assert list(ratios) == [name for name in NAMES if name not in absent]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_result_fails(name, dtype):
    """One element off by a few roundings, or all by a little; NaN; a result that nobody asked for."""
    case = replace(BIASED, dtype=dtype, sink="bhm")
    inputs = tensors(case)
    right = unfused_results(case, inputs)
    x = getattr(right, name)
    little = max(16 * torch.finfo(dtype).eps, 3 * SLACK)
    one = x.clone().flatten()
    one[7] += little * x.abs().max()
    for wrong in (one.view_as(x), x * (1 + little)):
        with pytest.raises(AssertionError, match=f"{name} is off by"):
            hold(case, right._replace(**{name: wrong}))
    one[7] = math.nan
    with pytest.raises(AssertionError, match="finite"):
        hold(case, right._replace(**{name: one.view_as(x)}))
    if name.startswith("d"):
        fewer = replace(case, grads="qkvbs".replace(name[1], ""))
        with pytest.raises(AssertionError, match="nobody asked for"):
            hold(fewer, unfused_results(fewer, inputs)._replace(**{name: x}), inputs=inputs)


@pytest.mark.parametrize("name", ["dq", "dk", "dbias"])
def test_what_cancels_has_room_for_its_rounding_alone(name):
    """Every row sees one key, so that these gradients are 0 and unfused torch has no error."""
    case = replace(BIASED, M=50, causal=True, window=(0, None), dtype=torch.float32, lse=False)
    inputs = tensors(case)
    right, one = unfused_results(case, inputs), visible(case, inputs)[:1]
    x = getattr(right, name)
    assert not x.any()
    for off, wrong in ((2e-7, False), (2e-4, True)):
        found = torch.full_like(x, off) * (one if name == "dbias" else 1)
        with pytest.raises(AssertionError, match=f"{name} is off by") if wrong else nullcontext():
            hold(case, right._replace(**{name: found}))


@pytest.mark.parametrize("few", [True, False])
def test_few_elements_are_held_to_more_draws(monkeypatch, few):
    """The result of which a band leaves few alone, once it is off by more than one draw allows; and what is wrong still
    fails."""
    case = Case(H=4, Hkv=2, M=80, N=3 if few else 50, D=16, bias="1hmn", causal=True, dtype=torch.bfloat16)
    asked = []
    drawn = helpers._errors

    def errors(*arguments):
        found = drawn(*arguments)
        asked.append(found)
        return found

    monkeypatch.setattr(helpers, "_errors", errors)
    inputs = tensors(case)
    right, exact = unfused_results(case, inputs), helpers.reference(case, inputs)
    ratios = hold(case, right)
    assert len(asked) == 2  # the yardstick's, and the result's own
    for name in ("o", "lse", "dq", "dk", "dv", "dbias"):
        assert 0.4 < ratios[name] <= 0.5, "held to a yardstick that is not its own"
    largest = max(
        helpers._largest(unfused_results(case, x).dbias - helpers.reference(case, x).dbias)
        for x in (tensors(case, draw=draw) for draw in range(1, 8))
    )
    assert (largest > 1.2 * asked[0]["dbias"]) or not few
    asked.clear()
    off = exact.dbias + (right.dbias - exact.dbias) * 1.9 * largest / helpers._largest(right.dbias - exact.dbias)
    with nullcontext() if few else pytest.raises(AssertionError, match="dbias is off by"):
        hold(case, right._replace(dbias=off.to(right.dbias.dtype)))
    assert len(asked) == (8 if few else 1)  # seven more; the yardstick's is kept
    for name in ("dbias", "dq") if few else ("dbias",):
        x = getattr(right, name)
        with pytest.raises(AssertionError, match=f"{name} is off by"):
            hold(case, right._replace(**{name: x * 1.1}))


@pytest.mark.parametrize("name", NAMES)
def test_what_is_exact_is_compared_exactly(name):
    """A row that sees nothing and a key that nobody sees: not one bit but zero."""
    case = replace(BIASED, dtype=torch.float32, mask="11mn", blind=True, planted=math.nan, sink="bhm", sink_none=True)
    right = run(case, "reference")
    hold(case, right)
    x = getattr(right, name).clone()
    x[:, :, -1 if name in ("dk", "dv") else 0] = 1e-30
    with pytest.raises(AssertionError, match=name):
        hold(case, right._replace(**{name: x}))


def test_layouts_are_what_they_say():
    case = Case(H=4, Hkv=2, M=40, N=50, D=16, bias="bhmn", mask="bhmn")
    for layout in LAYOUTS:
        x = tensors(replace(case, layout=layout))
        strides = {name: getattr(x, name).stride() for name in ("q", "k", "bias", "do")}
        assert x.q.is_contiguous() == (layout == "contiguous")
        assert (0 in strides["q"] and 0 in strides["k"] and 0 in strides["do"]) == (layout == "expanded")
        assert (x.q.data_ptr() % 16 != 0) == (layout == "sliced")
        assert (strides["bias"][2] == 1) == (layout == "heads_last")
        if layout == "padded":
            assert all(s * 2 % 16 == 0 for s in strides["q"][:3] + strides["bias"][:3])


def test_planted_values_are_hidden_and_differ_by_nothing_else():
    case = replace(BIASED, bias="1h1n", mask="b1mn", planted=math.inf)
    planted, clean = tensors(case), tensors(case, planted=False)
    made = [pair for pair in zip(planted, clean, strict=True) if pair[0] is not None]
    for x, y in made:
        assert torch.equal(x.masked_fill(x == math.inf, 0.0), y.masked_fill(x == math.inf, 0.0))
    assert sum((x == math.inf).any() for x, _ in made) == 3  # k, v, bias
    assert all(x.isfinite().all() for _, x in made)


def test_poisoned_memory():
    with poisoned_memory():
        assert torch.empty_like(torch.zeros(2, 3).T).isnan().all()
        assert torch.zeros(3).new_empty(2, dtype=torch.float16).isnan().all()
    assert not torch.are_deterministic_algorithms_enabled()
