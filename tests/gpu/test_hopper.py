"""The hopper backend where it differs from the others: what it repairs, what it saturates, problems at random."""

from __future__ import annotations

import math
import os
import random
from dataclasses import replace

import pytest
import torch
from helpers import Case, check, hold, reference, run, tensors

from tilewise import attention, explain
from tilewise.backends import Inputs
from tilewise.backends.gluon.sm90.backward.launch import _sizes
from tilewise.backends.gluon.sm90.common.config import backward_config, forward_config
from tilewise.backends.gluon.sm90.common.traits import multiprocessors
from tilewise.backends.gluon.sm90.forward.launch import HopperForward
from tilewise.spec.problem import Problem
from tilewise.spec.score import Band, Score

BRAIN, HALF, FLOAT = torch.bfloat16, torch.float16, torch.float32
USUAL = Case(B=2, H=4, Hkv=2, M=239, N=432, D=64, dtype=BRAIN, grads="")
# How many problems the soak draws; a long one is asked for by the environment.
SOAK = int(os.environ.get("TILEWISE_SOAK", "64"))

if torch.cuda.get_device_capability() != (9, 0):
    pytest.skip("needs compute capability 9.0", allow_module_level=True)


def problem_of(case, x):
    score = Score(case.D**-0.5, case.softcap, Band.aligned(case.causal, case.window, case.N - case.M))
    return Problem.of(
        x.q,
        x.k,
        x.v,
        x.bias,
        x.mask,
        *(None,) * 5,
        score,
        bias_grad="b" in case.grads,
        deterministic=case.deterministic,
    )


@pytest.mark.parametrize("terms", [{}, {"causal": True}, {"bias": "1hmn"}, {"bias": "bh1n"}], ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_and_visible_shows(terms, value):
    """In the rows that see it, and in no other."""
    case = replace(USUAL, **terms)
    for name in "kv":
        x = tensors(case, "cuda")
        x.k.nan_to_num_() if name == "k" else x.v.nan_to_num_()
        key = case.N - 20
        getattr(x, name)[0, 0, key, 3] = value
        o, lse = attention(x.q, x.k, x.v, bias=x.bias, **case.terms, return_lse=True, backend="hopper")
        touched = torch.zeros(case.B, case.H, case.M, dtype=torch.bool, device="cuda")
        first = case.M - 20 if case.causal else 0  # query i sees the keys up to i + N - M
        touched[0, : case.H // case.kv_heads, first:] = True
        assert torch.equal(o.isfinite().all(-1), ~touched) or (name == "k" and value == math.inf)
        assert o[~touched].isfinite().all()
        assert lse[~touched].isfinite().all()


@pytest.mark.parametrize(
    "terms",
    [{"D": D} for D in (32, 64, 128, 256)]
    + [{"D": 128, "causal": True}, {"D": 64, "bias": "1hmn"}, {"D": 64, "bias": "b11n"}, {"D": 128, "grads": "qkv"},
       {"D": 32, "bias": "1hmn", "grads": "qkvb"}],
    ids=str,
)  # fmt: skip
def test_maxima_that_grow(terms):
    """From tile to tile, which are walked from the last key, in each row by another factor: O is rescaled in some rows
    of a warp and not in others, and where the maximum grows by little it is not at all."""
    case = replace(USUAL, N=1504, M=500, **terms)
    x = tensors(case, "cuda")
    x.k.mul_(torch.linspace(8, 0.1, case.N, device="cuda")[:, None])
    x.q.mul_(torch.rand(case.M, 1, device="cuda"))
    hold(case, run(case, "hopper", "cuda", x), "cuda", x)


@pytest.mark.parametrize("dtype", [BRAIN, HALF, FLOAT])
@pytest.mark.parametrize("scale", [0.05, 3.0])
def test_a_row_of_the_lowest_bias_is_not_blind(dtype, scale):
    """The most negative finite number as a mask: where all keys have it, they share the row, as in plain torch."""
    case = replace(USUAL, bias="1hmn", bias_dtype=dtype, scale=scale)
    x = tensors(case, "cuda")
    lowest = torch.finfo(dtype).min
    x.bias[:, :, 5] = lowest
    x.bias[:, :, 6, ::2] = lowest
    results, exact = run(case, "hopper", "cuda", x), reference(case, x)
    assert torch.allclose(results.o[:, :, :5].double(), exact.o[:, :, :5], atol=2e-2)
    assert torch.allclose(results.o[:, :, 6:].double(), exact.o[:, :, 6:], atol=2e-2)
    assert results.o[:, :, 5].isfinite().all()
    assert results.o[:, :, 5].any()
    torch.testing.assert_close(results.lse.double(), exact.lse, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("lowest", [-1e9, -1e10, -1e38, None], ids=str)
@pytest.mark.parametrize(
    "terms",
    [
        {"bias": "bhmn"},
        {"bias": "1hmn", "D": 128, "causal": True, "deterministic": True},
        {"bias": "b1mn", "softcap": 2.0},
        {"bias": "b11n", "causal": True, "M": 432},
        {"bias": "b11n", "causal": True, "M": 432, "bias_dtype": FLOAT},
        {"bias": "b1m1"},
    ],
    ids=str,
)
def test_a_row_of_the_lowest_bias_harms_no_gradient(terms, lowest):
    """Padding that nothing but a large negative number hides, and of which no loss knows: its rows have no gradient,
    and the keys have that of the other rows."""
    case = replace(USUAL, grads="qkvb", **terms)
    x = tensors(case, "cuda")
    padding = slice(0, 40)
    value = torch.finfo(x.bias.dtype).min if lowest is None else lowest
    (x.bias[..., padding] if case.bias == "b11n" else x.bias[:, :, padding])[:] = value
    x.do[:, :, padding], x.dlse[:, :, padding] = 0, 0
    results, exact = run(case, "hopper", "cuda", x), reference(case, x)
    for name in ("dq", "dk", "dv", "dbias"):
        found, expected = getattr(results, name).double(), getattr(exact, name).double()
        # plain torch in bfloat16 is off by up to 1.3% of the largest
        assert (found - expected).abs().max() <= 0.03 * expected.abs().max(), name
    assert not results.dq[:, :, padding].any()


@pytest.mark.parametrize(
    "terms",
    [
        {"bias": "b11n", "D": 128, "causal": True},
        {"bias": "bk1n", "softcap": 2.0, "bias_dtype": FLOAT},
        {"bias": "1h1n", "window": (100, 30), "bias_hides": True},
        {"bias": "bkm1", "softcap": 2.0, "bias_dtype": FLOAT},
        {"bias": "1hm1", "M": 1023, "N": 129},
        {"bias": "1111", "lse": False},
        {"D": 8, "causal": True},
        {"D": 32, "N": 129},
    ],
    ids=str,
)
def test_gradients_without_a_bias_tile(terms):
    """A bias over keys or queries alone, and heads of at most 32, with grouped heads and lengths of no tile."""
    case = replace(USUAL, grads="qkvb", **terms)
    x = tensors(case, "cuda")
    bias = None if x.bias is None else x.bias.requires_grad_()
    assert explain(x.q.requires_grad_(), x.k, x.v, bias=bias, **case.terms).plan.backward == "hopper"
    check(case, "hopper", "cuda")


@pytest.mark.parametrize(
    "terms",
    [
        {"B": 8, "H": 8, "Hkv": 8, "M": 1023, "N": 1024},  # more groups of programs than their pipeline has places
        {"B": 16, "H": 8, "Hkv": 8, "M": 500, "N": 512, "deterministic": True},  # two groups share an element
        {"B": 3, "H": 4, "Hkv": 2, "causal": True},  # as many as broadcast_size
        {"B": 2, "H": 8, "Hkv": 2, "bias": "11mn", "window": (100, 30), "deterministic": True},
        {"B": 2, "H": 8, "Hkv": 2, "bias": "bkmn", "causal": True},
        {"B": 4, "D": 32, "causal": True},
        {"B": 4, "D": 128, "softcap": 2.0},
    ],
    ids=str,
)
def test_gradient_of_a_shared_bias(terms):
    case = replace(USUAL, grads="qkvb", **{"bias": "1hmn", **terms})
    check(case, "hopper", "cuda")


@pytest.mark.parametrize(
    "terms",
    [
        {},
        {"M": 64, "N": 64},  # one step of one tile of keys
        {"M": 65, "N": 129, "grads": "qkv", "lse": False},
        {"M": 1023, "N": 1000, "causal": True},
        {"M": 432, "N": 1000, "causal": True, "Hkv": 4, "dtype": HALF},
        {"window": (100, 30)},
        {"window": (20, 300), "softcap": 2.0},
        {"D": 192, "Dv": 128, "causal": True},
        {"D": 136, "Dv": 248},
        {"D": 72, "Dv": 200, "bias": "bhmn"},  # the second part of dQ has no column
        {"bias": "bhmn"},
        {"bias": "bhmn", "causal": True, "bias_hides": True},
        {"bias": "bhmn", "softcap": 2.0, "window": (100, 30)},
        {"bias": "1hmn", "grads": "qkv", "softcap": 2.0},
        {"bias": "1hmn", "B": 8, "H": 8, "Hkv": 8, "M": 1023, "N": 1024},
        {"bias": "1hmn", "B": 16, "H": 8, "Hkv": 8, "M": 500, "N": 512, "deterministic": True},
        {"bias": "bkmn", "causal": True},
        {"bias": "11mn", "window": (100, 30), "deterministic": True},
        {"bias": "b11n"},
        {"bias": "bk1n", "causal": True, "softcap": 2.0, "bias_dtype": FLOAT},
        {"bias": "1hm1"},
        {"deterministic": True},
        {"deterministic": True, "bias": "bhmn", "causal": True},
        {"window": (100, 30), "planted": math.nan},
        {"bias": "bhmn", "planted": math.inf, "deterministic": True},
        {"mask": "b1mn"},
        {"mask": "bhmn", "causal": True, "Hkv": 4, "dtype": HALF, "M": 799},
        {"mask": "b11n", "bias": "b11n", "planted": math.nan},
        {"mask": "11mn", "bias": "1hmn", "B": 8, "blind": True},
        {"mask": "1kmn", "bias": "1hmn", "window": (100, 30), "deterministic": True},
        {"mask": "1hm1", "bias": "bhmn", "softcap": 2.0},
        {"mask": "b1mn", "bias": "1hmn", "bias_dtype": FLOAT, "softcap": 2.0, "causal": True, "B": 8},
        {"bias": "bhmn", "bias_dtype": FLOAT, "causal": True},
        {"bias": "1hmn", "bias_dtype": FLOAT, "B": 8, "H": 8, "Hkv": 8},
        {"bias": "bkmn", "bias_dtype": HALF, "softcap": 2.0},
        {"bias": "1hmn", "softcap": 2.0, "B": 8, "window": (100, 30)},
    ],
    ids=str,
)
def test_gradients_past_128_dimensions(terms):
    """Both warpgroups have the same keys there, and dQ leaves in two parts."""
    case = replace(USUAL, **{"D": 256, "layout": "padded", "grads": "qkvb", **terms})
    x = tensors(case, "cuda")
    bias = None if x.bias is None or "b" not in case.grads else x.bias.detach().requires_grad_()
    assert explain(x.q.requires_grad_(), x.k, x.v, bias=bias, **case.terms).plan.backward == "hopper"
    check(case, "hopper", "cuda")


@pytest.mark.parametrize(
    "terms",
    [
        {"D": 64, "Dv": 128},
        {"D": 128, "Dv": 64, "causal": True, "Hkv": 4},
        {"D": 32, "Dv": 128, "bias": "1hmn", "B": 8},
        {"D": 40, "Dv": 256, "deterministic": True},
        {"D": 192, "Dv": 8, "mask": "b1mn"},
        {"D": 256, "Dv": 64, "bias": "bhmn", "window": (100, 30)},
    ],
    ids=str,
)
def test_gradients_of_unlike_dimensions(terms):
    """Tiles are as wide as the greater of the two; what lies past the end of the other is zero."""
    case = replace(USUAL, **{"layout": "padded", "grads": "qkvb", **terms})
    x = tensors(case, "cuda")
    bias = None if x.bias is None else x.bias.detach().requires_grad_()
    assert explain(x.q.requires_grad_(), x.k, x.v, bias=bias, **case.terms).plan.backward == "hopper"
    check(case, "hopper", "cuda")


def drawn(n: int) -> Case:
    """A problem of any size and terms; equal n, equal problem."""
    r = random.Random(n)
    group = r.choice((1, 1, 2, 4))
    kv_heads = r.choice((1, 2, 3))
    D = r.choice((8, 32, 40, 64, 64, 72, 128, 128, 192, 256))
    M, N = (r.choice((1, 3, 64, 127, 128, 129, 239, 799, 1023, r.randint(1, 1500))) for _ in range(2))
    bias = r.choice((None, None, "bhmn", "1hmn", "b1mn", "11mn", "bkmn", "b11n", "1h1n", "1hm1", "1111"))
    hides = bias is not None and bias[3] == "n" and r.random() < 0.5
    mask = r.choice((None, None, None, "bhmn", "1kmn", "b1mn", "11mn", "b11n", "1h1n", "1hm1", "1111"))
    causal = r.random() < 0.4
    window = r.choice((None, None, (r.randint(0, 300), None), (r.randint(0, 300), r.randint(0, 300))))
    return Case(
        B=r.choice((1, 2, 3)), H=group * kv_heads, Hkv=kv_heads, M=M, N=N, D=D, Dv=r.choice((D, D, 8, 64, 128)),
        dtype=r.choice((BRAIN, HALF)), bias=bias, bias_dtype=r.choice((None, BRAIN, HALF, FLOAT)), mask=mask,
        causal=causal, window=window, softcap=r.choice((None, None, None, 5.0)),
        scale=r.choice((None, None, 0.02, 0.7)),
        layout=r.choice(("padded", "padded", "contiguous", "heads_last")) if bias is None or bias[2:] != "mn"
        else "padded", bias_hides=hides,
    )  # fmt: skip


@pytest.mark.parametrize(
    "case",
    [
        replace(USUAL, mask="bhmn", causal=True),
        replace(USUAL, mask="1kmn", bias="1hmn", D=128, blind=True),
        replace(USUAL, mask="b1mn", window=(100, 30), D=256, dtype=HALF),
        replace(USUAL, mask="bh1n", planted=math.nan, D=128),
        replace(USUAL, mask="11mn", bias="b11n", planted=math.inf),
        replace(USUAL, mask="1hm1", softcap=5.0),
        # column by column, which the repair of rows once did not compile for
        replace(USUAL, mask="11mn", bias="b11n", bias_dtype=FLOAT, layout="heads_last", planted=math.nan),
        replace(USUAL, mask="bhmn", bias="1hm1", D=128, dtype=HALF, layout="heads_last", causal=True, planted=math.nan),
    ],
    ids=str,
)
def test_masks(case):
    check(case, "hopper", "cuda")


@pytest.mark.parametrize(
    "terms",
    [
        {"D": 64, "M": 300, "N": 5000},
        {"D": 64, "M": 4200, "N": 4300, "Hkv": 4},
        {"D": 64, "M": 2300, "N": 2100, "causal": False, "window": (None, 4000)},  # nothing is hidden
        {"D": 64, "M": 200, "N": 2400, "causal": False, "window": (None, 2150), "dtype": HALF},
        {"D": 32, "M": 1023, "N": 3500, "dtype": HALF},
        {"D": 32, "bias": "1hmn", "M": 500, "N": 792},
        {"D": 32, "bias": "bhmn", "bias_dtype": HALF, "M": 799, "N": 504},  # the first queries see nothing
        {"D": 128, "M": 799, "N": 1016},
        {"D": 128, "M": 500, "N": 564, "softcap": 5.0},
        {"D": 128, "bias": "bh1n", "M": 239, "N": 1023},
        {"D": 128, "bias": "bhmn", "bias_hides": True, "M": 1023, "N": 1016},
        {"D": 256, "M": 500, "N": 564},
        {"D": 256, "M": 799, "N": 504, "bias": "1hmn"},
        {"D": 256, "M": 129, "N": 1, "causal": False, "window": (None, 70)},
        {"D": 256, "M": 432, "N": 300},
    ],
    ids=str,
)
def test_tiles_of_keys_at_a_band(terms):
    """What a band without a lower limit cuts has a loop of its own, and a warpgroup leaves out what it sees nothing of:
    many tiles of queries a program, so that the warpgroups' pipelines and turns go on from one to the next."""
    case = replace(USUAL, **{"causal": True, **terms})
    x = tensors(case, "cuda")
    assert forward_config(problem_of(case, x)).peeled
    check(case, "hopper", "cuda")


@pytest.mark.parametrize(
    "terms",
    [
        {},
        {"M": 129, "N": 1},
        {"M": 70, "N": 799},
        {"M": 64, "Dv": 40},
        {"bias": "bhmn", "M": 799, "N": 1016},
        {"bias": "bhmn", "window": (100, 30)},
        {"bias": "bhmn", "bias_dtype": HALF, "causal": True, "M": 65},
        {"bias": "bhm1", "causal": False, "N": 239},
        {"deterministic": True, "causal": True, "M": 1023, "N": 799},
        {"deterministic": True, "window": (100, 30), "Hkv": 4},
    ],
    ids=str,
)
def test_tiles_in_two_subtiles(terms):
    """At 64 dimensions, of the queries; lengths that end in either strip, bands that cut either."""
    case = replace(USUAL, D=64, grads="qkvb", **terms)
    x = tensors(case, "cuda")
    problem = problem_of(case, x)
    assert backward_config(problem).m_subtiles == 2
    check(case, "hopper", "cuda")


MANY = replace(USUAL, B=5, H=40, Hkv=40, M=700, N=712, grads="")  # more tiles of queries than multiprocessors


@pytest.mark.parametrize(
    "terms",
    [
        {"D": 64},
        {"D": 64, "Hkv": 8, "N": 3000, "B": 3},
        {"D": 64, "mask": "b1mn"},
        {"D": 64, "deterministic": True},
        {"D": 128, "causal": True},
        {"D": 128, "bias": "bhmn", "B": 3},
        {"D": 256, "B": 3, "bias": "b11n"},
        {"D": 256, "B": 3, "causal": True, "deterministic": True},
        {"D": 32, "N": 129, "B": 16, "window": (100, 30)},
    ],
    ids=str,
)
def test_sums_between_programs(terms):
    """The sum of dQ is zeroed by programs of earlier heads, and finished while the last programs run."""
    case = replace(MANY, grads="qkvb", **terms)
    x = tensors(case, "cuda")
    problem = problem_of(case, x)
    sizes, _ = _sizes(problem, backward_config(problem), x.q.device)
    assert sizes.zeroed < case.B * case.kv_heads
    first = run(case, "hopper", "cuda", x)
    hold(case, first, "cuda")
    for _ in range(20):
        again = run(case, "hopper", "cuda", x)
        for name in ("dq", "dk", "dv", "dbias"):
            found, before = getattr(again, name), getattr(first, name)
            if found is not None:
                assert (found - before).abs().max() <= (0 if case.deterministic else 0.01 * before.abs().max()), name


@pytest.mark.parametrize(
    "terms",
    [
        {"D": 32},
        {"D": 64},
        {"D": 128, "Hkv": 16},
        {"D": 256},
        {"D": 64, "causal": True, "M": 520},
        {"D": 32, "mask": "b1mn", "window": (50, 0), "Hkv": 16},
        {"D": 64, "mask": "b11n", "causal": True, "planted": math.nan},
        {"D": 128, "window": (50, 0), "planted": math.nan},
        {"D": 128, "mask": "bhmn", "blind": True},
        {"D": 256, "window": (50, 0), "Hkv": 16},
        {"D": 64, "bias": "bhmn"},
        {"D": 64, "bias": "b11n"},
        {"D": 128, "bias": "bhmn", "causal": True},
        {"D": 128, "bias": "bhmn", "bias_dtype": FLOAT, "softcap": 5.0},
        {"D": 64, "deterministic": True, "M": 700},
        {"D": 128, "deterministic": True, "Hkv": 16},
        {"D": 256, "deterministic": True, "causal": True},
    ],
    ids=str,
)
def test_programs_of_the_backward_that_stay(terms):
    """Each has more than one tile of keys, of which no query sees some: dK and dV have equal bits."""
    case = replace(USUAL, **{"B": 12, "H": 16, "Hkv": 8, "M": 300, "N": 520, "grads": "qkvb", **terms})
    x = tensors(case, "cuda")
    problem = problem_of(case, x)
    config = backward_config(problem)
    tiles = -(-case.N // config.block_n) * case.B * case.kv_heads
    assert config.dynamic
    assert tiles > config.programs * multiprocessors(x.q.device)
    first = run(case, "hopper", "cuda", x)
    hold(case, first, "cuda")
    for _ in range(20):
        again = run(case, "hopper", "cuda", x)
        assert torch.equal(again.dk, first.dk)
        assert torch.equal(again.dv, first.dv)
        assert not case.deterministic or torch.equal(again.dq, first.dq)


@pytest.mark.parametrize(
    "case",
    [
        replace(MANY, causal=True),
        replace(MANY, causal=True, D=128, Hkv=8),
        replace(MANY, causal=True, D=256, B=2),
        replace(MANY, causal=True, D=32, bias="1hmn"),
        replace(MANY, window=(100, 30), D=128, bias="b1mn", softcap=5.0),
        replace(MANY, window=(100, None)),
        replace(MANY, mask="b1mn", bias="b11n", blind=True),
        replace(MANY, mask="b11n", D=128, bias="1hmn", planted=math.nan, Hkv=8),
        replace(MANY, causal=True, B=1, H=8, Hkv=8, M=5000, N=5000),
    ],
    ids=str,
)
def test_programs_that_take_tiles_as_they_are_done(case):
    """Each tile is computed once, whichever program takes it: equal bits."""
    x = tensors(case, "cuda")
    assert HopperForward(problem_of(case, x), Inputs(x.q, x.k, x.v, x.bias, x.mask)).dynamic
    first = run(case, "hopper", "cuda", x)
    hold(case, first, "cuda")
    for _ in range(20):
        again = run(case, "hopper", "cuda", x)
        assert torch.equal(again.o, first.o)
        assert torch.equal(again.lse, first.lse)


@pytest.mark.parametrize(
    "case",
    [
        replace(USUAL, mask="bhmn", causal=True, D=128),
        replace(USUAL, mask="bhmn", causal=True, deterministic=True),
        replace(USUAL, mask="b1mn", D=128, M=1000, N=1000, blind=True),
        replace(USUAL, mask="b1mn", D=32, window=(100, 30)),
        replace(USUAL, mask="11mn", D=8, planted=math.inf),
        replace(USUAL, mask="bk1n", planted=math.nan, D=128),
        replace(USUAL, mask="1h1n", planted=math.nan, bias="b11n", softcap=5.0),
        replace(USUAL, mask="1hm1", D=128, window=(100, 30), deterministic=True),
        replace(USUAL, mask="b111", bias="b1m1"),
        replace(USUAL, mask="1kmn", bias="bhmn", D=128, causal=True, M=500),
        # of a bias that is shared, by programs that see different tiles
        replace(USUAL, mask="b1mn", bias="1hmn", B=4, D=128, softcap=5.0, blind=True),
        replace(USUAL, mask="bhmn", bias="1kmn", B=3, H=6, causal=True, M=700, N=704),
        replace(USUAL, mask="b11n", bias="11mn", B=8, H=8, deterministic=True, planted=math.nan),
    ],
    ids=str,
)
def test_gradients_under_a_mask(case):
    case = replace(case, grads="qkvb")
    x = tensors(case, "cuda")
    bias = None if x.bias is None else x.bias.requires_grad_()
    plan = explain(x.q.requires_grad_(), x.k, x.v, bias=bias, mask=x.mask, **case.terms, backend="hopper").plan
    assert plan.backward == "hopper"
    check(case, "hopper", "cuda")


@pytest.mark.parametrize(
    "terms",
    [
        {"D": 128},
        {"D": 64, "causal": True, "deterministic": True},
        {"D": 128, "bias": "1hmn"},
        {"D": 64, "bias": "1hmn", "B": 4, "deterministic": True},
        {"D": 128, "bias": "bhmn"},
    ],
    ids=str,
)
def test_a_sparse_mask(terms):
    """Tiles that are hidden, mixed and visible: blocks of 64 along the diagonal, and every eighth tile of keys. Each
    batch element has its own, some keys are seen by nobody, and a row of tiles of queries sees nothing."""
    case = replace(USUAL, M=1023, N=1032, mask="b1mn", H=2, grads="qkvb", **terms)
    x = tensors(case, "cuda")
    i, j = torch.arange(case.M, device="cuda")[:, None] // 64, torch.arange(case.N, device="cuda")[None, :] // 64
    for b in range(case.B):
        x.mask[b] = ((i == j) | (j % 8 == 5 + b % 2)) & (j // 2 != 5) & (i // 2 != 3 + b)
    results = [run(case, "hopper", "cuda", x) for _ in range(3)]
    for found in results:
        hold(case, found, "cuda", x)
        for name in ("dq", "dk", "dv", "dbias") if case.deterministic else ("dk", "dv"):
            first, again = getattr(results[0], name), getattr(found, name)
            assert first is None or torch.equal(first, again), name


@pytest.mark.parametrize(
    "terms",
    [
        {"bias": "bhmn", "D": 128},
        {"bias": "bhmn", "D": 64, "softcap": 2.0, "bias_hides": True},
        {"bias": "bhmn", "D": 32, "causal": True, "bias_dtype": HALF},
        {"bias": "bhmn", "D": 128, "causal": True, "deterministic": True, "M": 1000, "N": 1004},
        {"bias": "1hmn", "D": 128, "causal": True, "B": 4},
        {"bias": "1hmn", "D": 64, "B": 16, "H": 8, "Hkv": 8, "deterministic": True},
        {"bias": "1hmn", "D": 32, "B": 4, "window": (100, 30)},
        {"bias": "bkmn", "D": 128, "softcap": 2.0, "mask": "b1mn", "blind": True},
        {"bias": "1hmn", "D": 128, "softcap": 2.0, "mask": "b1mn", "bias_dtype": HALF, "B": 4},
        {"bias": "11mn", "D": 64, "B": 3, "dtype": HALF, "bias_dtype": BRAIN},
        {"bias": "1hmn", "D": 8, "lse": False, "grads": "qkv"},
    ],
    ids=str,
)
def test_gradients_beside_a_bias_of_another_dtype(terms):
    case = replace(USUAL, **{"bias_dtype": FLOAT, "grads": "qkvb", **terms})
    x = tensors(case, "cuda")
    bias = x.bias.requires_grad_("b" in case.grads)
    plan = explain(x.q.requires_grad_(), x.k, x.v, bias=bias, mask=x.mask, **case.terms, backend="hopper").plan
    assert plan.backward == "hopper"
    check(case, "hopper", "cuda")


@pytest.mark.parametrize("part", range(32))
def test_soak(part):
    for case in map(drawn, range(part, SOAK, 32)):
        if case.M > 64 or 16 * case.M > case.N:  # few queries beside many keys are not for hopper
            check(case, "hopper", "cuda")
