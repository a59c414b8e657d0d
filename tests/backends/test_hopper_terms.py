"""What the Hopper kernels are told of a call, and what they make of a score: the kernels' own functions as Python.

No CPU runs the kernels: a lost scale, a bias of another head or a sum that keeps an old maximum would show on a GPU
only.
"""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import kernel_stubs
import pytest
import torch
from kernel_stubs import as_python, gluon, numbers, replace

from tilewise.spec import reference
from tilewise.spec.operands import TensorSpec
from tilewise.spec.score import Band, Score

pytest.importorskip("triton")

from tilewise.backends import kernels
from tilewise.backends.gluon import score
from tilewise.backends.gluon.sm90.backward import launch as backward_launch
from tilewise.backends.gluon.sm90.backward import m_subtiles
from tilewise.backends.gluon.sm90.common import config, softmax
from tilewise.backends.gluon.sm90.forward import launch
from tilewise.backends.gluon.sm90.forward import small_heads as small_heads_kernel

B, H, KV_HEADS, M, N = 2, 6, 2, 130, 140
BROADCASTS = list(itertools.product((1, B), (1, KV_HEADS, H), (1, M), (1, N)))
CAPS = [None, 1.5]
LEAST = torch.finfo(torch.bfloat16).min


def problem(bias=None, mask=None, scale=0.3, cap=None):
    return kernel_stubs.problem(
        B, H, KV_HEADS, M, N, score=Score(scale, cap, Band()), bias_grad=bias is not None,
        bias=None if bias is None else TensorSpec(torch.bfloat16, *bias),
        mask=None if mask is None else TensorSpec(torch.bool, *mask),
    )  # fmt: skip


def compiled(p):
    """What the forward, the kernel that repairs rows and the backward know of it, in plain numbers."""
    chosen = config.backward_config(p)
    found = (
        launch._compiled(p, config.forward_config(p), False),
        launch._nan_fixup(p, config.forward_config(p)),
        backward_launch._compiled(p, chosen, config.backward_width(p), False),
    )
    return [numbers(c) for c in found]


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    """The functions of the kernels as Python functions, of tensors."""
    gl = gluon(abs=torch.abs, maximum=torch.maximum, max=lambda x, axis: x.amax(axis), constexpr=score.gl.constexpr)
    replace(monkeypatch, score, softmax, m_subtiles, gl=gl)
    monkeypatch.setattr(kernels.score, "tl", gl)
    monkeypatch.setattr(softmax, "REDUCES_IN_TREES", False)
    as_python(monkeypatch, softmax, "SLACK maxima_of_rows sums_of_rows")
    as_python(monkeypatch, score, "softcap softcap_derivative")
    as_python(monkeypatch, score, "score_tile", m_subtiles)


@pytest.mark.parametrize("shape", BROADCASTS, ids=str)
def test_a_bias_and_a_mask_are_those_of_the_head(shape):
    b, h, rows, cols = *shape[:2], shape[2] > 1, shape[3] > 1
    which = torch.arange(b * h).view(b, h)
    expected = (which if h == H else which.repeat_interleave(H // h, 1)).expand(B, H)
    heads = list(itertools.product(range(B), range(H)))
    for c in compiled(problem(bias=shape)):
        of_batches = getattr(c, "BIAS_BATCH", b > 1)
        assert all(which[i if of_batches else 0, j // c.BIAS_GROUP] == expected[i, j] for i, j in heads)
    forward, repair, backward = compiled(problem(mask=shape))
    for c in (forward, backward):
        assert all(score.mask_of.fn(i, j, H, c) == expected[i, j] for i, j in heads)
        assert rows == c.MASK_ROWS
    assert (H // h, cols) == (repair.MASK_GROUP, repair.MASK_COLS)


@pytest.mark.parametrize("cap", CAPS)
@pytest.mark.parametrize("scale", [0.3, 1.0, 40.0])
def test_scores_in_the_units_of_the_kernels(scale, cap):
    """Of a product x and a bias b: 2^(exponent · (x + inverse · b)) is e^(scale · x + b)."""
    terms = score.score_terms(problem(scale=scale, cap=cap))
    assert (terms.scale, terms.cap if cap else None, terms.HAS_CAP.value) == (scale, cap, cap is not None)
    x, bias = 0.7, -1.3
    if cap is None:
        assert terms.exponent * (x + terms.inverse * bias) == pytest.approx((scale * x + bias) / math.log(2))
    else:  # the softcap has applied the scale
        assert terms.exponent * (x + terms.inverse * bias) == pytest.approx((x + bias) / math.log(2))


@pytest.mark.parametrize("lazy", [False, True])
def test_tiles_of_a_row_add_up_to_its_softmax(lazy):
    """Its sum and its output follow the maximum as it grows; a row that sees nothing has a sum of 0."""
    torch.manual_seed(0)
    s = 30 * torch.randn(64, 4, 16)
    s[0] = -math.inf
    s[1, :2] = -math.inf  # what it sees comes late
    exponent = score.score_terms(problem()).exponent
    v = torch.randn(4, 16, 8)
    m, l, o = torch.full((64,), -math.inf), torch.zeros(64), torch.zeros(64, 8)  # noqa: E741
    for tile in range(4):
        p, m, l, alpha, *_ = softmax.online_softmax.fn(s[:, tile], m, l, exponent, lazy, True)  # noqa: E741
        o = o * alpha[:, None] + p @ v[tile]
    exact = (s.flatten(1).double() * exponent * math.log(2))[1:]
    assert (m[0], l[0]) == (-math.inf, 0)
    assert not o[0].any()
    torch.testing.assert_close((m * exponent * math.log(2) + l.log())[1:], exact.logsumexp(1).float())
    expected = exact.softmax(1) @ v.flatten(0, 1).double()
    torch.testing.assert_close((o / l[:, None])[1:], expected.float(), rtol=1e-4, atol=1e-4)


@pytest.fixture
def tiles_together(monkeypatch):
    """`mma_one_n_block` of all tiles of keys of 64 queries: ``(rows, O, P of each, times of maxima)``."""

    def least(x, y):
        return torch.maximum(x, torch.as_tensor(y, dtype=x.dtype))

    def exceeds(sums):
        return int(not (sums <= 2.0**14).all())

    taken, takes = [], small_heads_kernel.with_maxima.fn

    def with_maxima(*arguments):
        taken.append(1)
        return takes(*arguments)

    gl = gluon(maximum=least, zeros=lambda *_: None)
    stubs = {
        "gl": gl, "LOWEST_BASE": small_heads_kernel.LOWEST_BASE.value, "accumulator": lambda *_: None,
        "exceeds": exceeds,
        "online_softmax": softmax.online_softmax.fn, "sums_of_rows": lambda x, _: x.sum(1), "leave": lambda *_: None,
        "rounded": lambda p, *_: p, "rescaled": lambda o, alpha, *_: o * alpha[:, None], "following": lambda x: x,
        "times_v": lambda p, v, o, _: o + p @ v, "warpgroup_mma": lambda q, k, start, **_: k, "widened": lambda x: x,
        "warpgroup_mma_wait": lambda _, deps: deps if len(deps) > 1 else deps[0], "with_maxima": with_maxima,
        "mbarrier": SimpleNamespace(wait=lambda *_, **__: None),
    }  # fmt: skip
    for name, stub in stubs.items():
        monkeypatch.setattr(small_heads_kernel, name, stub)
    monkeypatch.setattr(softmax.gl, "maximum", least)

    def run(products, biases, v, scale):
        def pipeline(tiles):  # of what is read of a slot: its tile
            return SimpleNamespace(
                index=lambda n: SimpleNamespace(
                    reshape=lambda _: SimpleNamespace(permute=lambda _: tiles[n], load=lambda _: tiles[n])
                )
            )

        of_v = SimpleNamespace(index=lambda n: SimpleNamespace(reshape=lambda _: v[n]))
        shared = SimpleNamespace(k=pipeline(products), bias=pipeline(biases), v=of_v, full=pipeline(biases))
        terms = SimpleNamespace(scale=scale, exponent=1 / math.log(2))
        c = SimpleNamespace(BLOCK_N=64, BLOCK_D=32, BLOCK_DV=8, WARPGROUPS=1, HIDES_KEYS=False)
        x, before, probabilities = SimpleNamespace(q=SimpleNamespace(dtype=None)), None, []
        nothing = torch.full((64,), -math.inf)
        rows = small_heads_kernel.HeadRows(nothing, nothing, torch.zeros(64), torch.zeros(64, 8), None)
        for n in range(len(v)):
            here = SimpleNamespace(slot=n, v=n, phase=0)
            rows = small_heads_kernel.mma_one_n_block.fn(None, rows, x, shared, before, here, True, terms, c, 0, n == 0)
            probabilities.append(rows.p)
            before = here
        return rows, rows.o + rows.p @ v[-1], torch.stack(probabilities), len(taken)

    return run


@pytest.mark.parametrize(("step", "maxima"), [(0.0, 1), (1.0, 1), (-40.0, 1), (5.0, 3), (20.0, 6), (300.0, 6)])
def test_a_maximum_stays_until_scores_have_grown(tiles_together, step, maxima):
    """By so much from tile to tile. P then is a float16, and each tile has been counted as much as others."""
    generator = torch.Generator().manual_seed(0)
    x, bias = (torch.randn(6, 64, 64, generator=generator) for _ in range(2))
    bias += (step * torch.arange(6) - max(5 * step, 0.0))[:, None, None]
    v = torch.randn(6, 64, 8, generator=generator)
    rows, o, p, taken = tiles_together(x, bias, v, 0.3)
    assert taken == maxima
    assert p.max() <= 2**14
    exact = (0.3 * x + bias).double().permute(1, 0, 2).flatten(1)
    torch.testing.assert_close((rows.m + rows.l.log()).double(), exact.logsumexp(1), rtol=1e-6, atol=1e-5)
    expected = exact.softmax(1) @ v.flatten(0, 1).double()
    torch.testing.assert_close((o / rows.l[:, None]).double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("first", "last"),
    [(-math.inf, -math.inf), (-math.inf, 0.0), (-math.inf, LEAST), (LEAST, 0.0), (LEAST, LEAST)],
    ids=str,
)
def test_a_row_that_begins_hidden(tiles_together, first, last):
    """One alone, so that no other asks for maxima. Of the least bfloat16 it is the repair's, which its maximum says."""
    generator = torch.Generator().manual_seed(0)
    x, v = torch.zeros(4, 64, 64), torch.randn(4, 64, 8, generator=generator)
    bias = torch.randn(4, 64, 64, generator=generator)
    bias[:2, 5] = first
    bias[2:, 5] += last
    rows, o, _, _ = tiles_together(x, bias, v, 1.0)
    seen = list(range(64))
    if last == -math.inf:
        assert (rows.m[5], rows.l[5]) == (-math.inf, 0)
        assert not o[5].any()
        seen.remove(5)
    elif last == LEAST:
        assert -math.inf < rows.m[5] < -small_heads_kernel.MOST_MAXIMUM.value
        seen.remove(5)
    exact = bias.double().permute(1, 0, 2).flatten(1)[seen]
    torch.testing.assert_close((rows.m + rows.l.log())[seen].double(), exact.logsumexp(1), rtol=1e-6, atol=1e-5)
    expected = exact.softmax(1) @ v.flatten(0, 1).double()
    torch.testing.assert_close((o / rows.l[:, None])[seen].double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cap", CAPS)
@pytest.mark.parametrize("at", [0.0, 100.0, -100.0, -math.inf])
def test_a_sink_is_one_more_score(at, cap, monkeypatch):
    """Beside a maximum that may lag; a row that sees nothing else has its sink as its LSE."""
    monkeypatch.setattr(kernels.score, "_LOG2E", kernels.score.LOG2E)
    monkeypatch.setattr(kernels.score.tl, "float64", torch.float64, raising=False)
    monkeypatch.setattr(kernels.score.tl, "minimum", lambda x, y: x.clamp(max=y), raising=False)
    torch.manual_seed(0)
    units = score.score_terms(problem(cap=cap)).exponent * math.log(2)
    s, sink, v = torch.randn(64, 16) / units, torch.randn(64) + at, torch.randn(16, 8)
    s[0] = -math.inf
    m = s.amax(1) - 2.0 / units
    p = torch.exp((s - m.nan_to_num(0, 0, 0)[:, None]) * units)
    top, l, alpha = kernels.score.with_sink.fn(m, p.sum(1), sink, units / math.log(2))  # noqa: E741
    exact = torch.cat([s * units, sink[:, None]], 1).double()
    torch.testing.assert_close((top * math.log(2) + l.log()).float(), exact.logsumexp(1).float())
    expected = exact.softmax(1).nan_to_num()[:, :16] @ v.double()
    found = (p @ v) * alpha[:, None] / torch.where(l == 0, 1.0, l)[:, None]
    torch.testing.assert_close(found, expected.float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cap", CAPS)
@pytest.mark.parametrize("bias", ["none", "matrix"])
def test_probabilities_of_the_backward(cap, bias):
    """And the derivative of the softcap, of the score before its bias. Without a softcap the product starts from it."""
    torch.manual_seed(0)
    p = problem(cap=cap)
    terms = score.score_terms(p)
    terms = terms._replace(HAS_CAP=terms.HAS_CAP.value)
    product = (4 * torch.randn(16, 64)).requires_grad_()
    added = torch.randn(16, 64) if bias == "matrix" else torch.zeros(16, 64)
    scaled = product * terms.scale
    capped = scaled if cap is None else reference.softcap(scaled, cap)
    exact = (capped + added).softmax(0)
    lse = (capped + added).logsumexp(0).detach() / math.log(2)
    start = added * terms.inverse
    s = product.detach() if cap is not None else product.detach() + start
    found, slope = m_subtiles.probabilities.fn(s, start, lse, None, terms, SimpleNamespace(BIAS=bias))
    torch.testing.assert_close(found, exact.detach())
    (expected,) = torch.autograd.grad(capped.sum(), product)
    torch.testing.assert_close(torch.as_tensor(slope * terms.scale).expand(16, 64), expected)
