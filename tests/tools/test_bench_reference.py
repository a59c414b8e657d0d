"""The bench's right answer is right, and its measure of an error sees what others hide."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from tilewise.bias.canonical import dense
from tilewise_tools.bench import reference, terms
from tilewise_tools.bench.cases import Case

CPU = torch.device("cpu")
CAUSAL = Case("dense causal", 2, 4, 2, 40, 40, 16, causal=True, dtype="float32")
BIASED = Case("bias", 2, 2, 2, 24, 24, 16, bias=(1, 2, 24, 24), dtype="float32")
DECODE = Case("decode", 2, 4, 2, 1, 64, 16, dtype="float32", backward=False)


@pytest.mark.parametrize("at_once", [1, 100, 1 << 20])
@pytest.mark.parametrize(
    "case",
    [
        CAUSAL,
        replace(CAUSAL, queries=7, keys=19),
        replace(BIASED, bias=(2, 2, 24, 24)),
        BIASED,
        replace(BIASED, bias=(2, 1, 1, 24)),
        replace(BIASED, bias=(1, 4, 1, 24), heads=4),
        DECODE,
        replace(CAUSAL, sink=True),
        replace(BIASED, sink=True),
        *(replace(BIASED, bias=None, term=name) for name in terms.NAMES),
        replace(CAUSAL, queries=7, keys=19, term="inkling"),
    ],
    ids=str,
)
def test_the_reference_is_attention(case, at_once, monkeypatch):
    """Against PyTorch's own in float64, in chunks of any size."""
    monkeypatch.setitem(reference._SCORES_AT_ONCE, "cpu", at_once)
    case = replace(case, dtype="float64")
    x = case.inputs(CPU)
    bias = torch.zeros(case.queries, case.keys, dtype=torch.float64) if x.bias is None else x.bias
    if x.term is not None:
        term = terms.term(case.term, x.term)
        bias = dense(term, case.batch, case.heads, case.queries, case.keys)
    if case.causal:
        future = torch.ones(case.queries, case.keys, dtype=torch.bool).triu(1 + case.keys - case.queries)
        bias = bias.masked_fill(future, -torch.inf)
    k, v = x.k, x.v
    if x.sink is not None:  # a key of zeros, whose score is said in the bias
        k, v = (F.pad(y, (0, 0, 0, 1)) for y in (k, v))
        rows = bias.expand(case.batch, case.heads, *bias.shape[-2:])
        bias = torch.cat([rows, x.sink[:, None, None].expand(*rows.shape[:3], 1)], -1)
    o = F.scaled_dot_product_attention(x.q, k, v, attn_mask=bias, enable_gqa=True)
    expected = {"o": o}
    if case.backward:
        names = [f"d{name}" for name in x.names]
        expected |= dict(zip(names, torch.autograd.grad(o, x.leaves, x.do), strict=True))
    exact = reference.exact(case, x)
    assert set(exact) == set(expected)
    for name, value in expected.items():
        torch.testing.assert_close(exact[name], value.detach(), msg=name)


def test_errors_see_what_a_norm_of_everything_hides():
    """One wrong row among many large ones, one wrong head, a NaN."""
    right = {"o": torch.ones(2, 2, 500, 8), "dq": torch.ones(2, 2, 500, 8)}
    right["o"][:, :, 400:] = 1e-3
    assert reference.errors(right, right) == {"o": 0.0, "dq": 0.0}
    for name, place in (("o", (1, 1, 499)), ("dq", (1, 1))):
        found = {key: x.clone() for key, x in right.items()}
        found[name][place] *= 1.5
        errors = reference.errors(found, right)
        assert errors.pop(name) == pytest.approx(0.5)
        assert set(errors.values()) == {0.0}
    nan = right | {"dq": right["dq"].clone()}
    nan["dq"][0, 0, 0, 0] = math.nan
    errors = reference.errors(nan, right)
    assert math.isnan(errors["dq"])
    assert reference.wrong(errors, CAUSAL) == "dq is off by nan of its norm"
    with pytest.raises(ValueError, match=r"^the shape is \(2, 1, 500, 8\), not \(2, 2, 500, 8\)$"):
        reference.errors(right | {"o": right["o"][:, :1]}, right)
