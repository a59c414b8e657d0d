"""The backends that have kernels, on the device, held to the error rule of helpers.py, in poisoned memory.

Compiling takes longer than running, so cases share what a kernel is compiled for (dtype, head dimensions, terms and
which lengths are multiples of 16 or of a tile), and one test runs several lengths.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch
from empty_helpers import check_attention, check_calls, of_sizes
from helpers import LAYOUTS, Case, check, tensors
from pairwise import each

from tilewise import explain, scaled_dot_product_attention

BRAIN, HALF, FLOAT = torch.bfloat16, torch.float16, torch.float32
LENGTHS = (1, 3, 127, 128, 129, 239, 799, 1023, 2048)
BROADCASTS = ["".join(axes) for axes in itertools.product("b1", "hk1", "m1", "n1")]
USUAL = Case(B=2, H=4, Hkv=4, M=239, N=432, D=64, dtype=BRAIN)


def plan_of(case, backend):
    """The plan of the case, or why the backend cannot run it."""
    x = tensors(case, "cuda")
    bias = None if x.bias is None else x.bias.detach().requires_grad_("b" in case.grads)
    terms = {**case.terms, "deterministic": case.deterministic, "backend": backend}
    try:
        return explain(x.q, x.k, x.v, bias=bias, mask=x.mask, sink=x.sink, **terms).plan
    except ValueError as error:
        assert "cannot run this call" in str(error)  # noqa: PT017
        return str(error)


@pytest.fixture(params=["triton", "hopper"])
def hold(request):
    """Hold a backend to cases: hopper to those that it does not decline, and without gradients that are not its own,
    unless a test wants them."""
    backend = request.param
    if backend == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")

    def hold(*cases, gradients=False):
        if backend == "hopper":
            plans = [plan_of(case, backend) for case in cases]
            runs = [(case, plan) for case, plan in zip(cases, plans, strict=True) if not isinstance(plan, str)]
            if not runs:
                pytest.skip(plans[0])
            own = [gradients or plan.backward == backend for _, plan in runs]
            cases = dict.fromkeys(
                case if keep else replace(case, grads="", deterministic=False)
                for (case, _), keep in zip(runs, own, strict=True)
            )
        for case in cases:
            check(case, backend, "cuda")

    return hold


TERMS_OF_LENGTHS = [
    {},
    {"bias": "1hmn", "causal": True},
    {"bias": "1hmn", "causal": True, "layout": "padded"},  # every length by TMA
]


@pytest.mark.parametrize("terms", TERMS_OF_LENGTHS, ids=str)
@pytest.mark.parametrize("M", LENGTHS)
def test_lengths(hold, M, terms):
    hold(*(replace(USUAL, H=2, Hkv=2, M=M, N=N, **terms) for N in LENGTHS))


@pytest.mark.parametrize("terms", TERMS_OF_LENGTHS, ids=str)
@pytest.mark.parametrize("quarter", range(4))
def test_every_remainder(hold, terms, quarter):
    """Every M mod 128, each with another N mod 128."""
    lengths = range(128 + 32 * quarter, 160 + 32 * quarter)
    hold(*(replace(USUAL, H=2, Hkv=2, M=M, N=128 + (37 * M) % 128, **terms) for M in lengths))


@each(
    replace(USUAL, dtype=dtype, D=D, M=431, N=577, causal=causal, window=window, softcap=softcap, bias=bias)
    for dtype, D in ((BRAIN, 64), (BRAIN, 128), (HALF, 128))
    for causal, window, softcap, bias in (
        (False, None, None, None), (False, None, None, "bhmn"), (False, None, None, "1hmn"), (False, None, 2.0, None),
        (True, None, None, None), (True, None, None, "1hmn"), (True, (100, None), 2.0, "b11n"),
        (False, (60, 20), None, "1hm1"), (False, (0, 0), None, None), (False, (None, 30), 2.0, "bhmn"),
    )
)  # fmt: skip
def test_terms(hold, case):
    hold(case)


@pytest.mark.parametrize("bias", BROADCASTS)
@pytest.mark.parametrize("deterministic", [False, True])
def test_bias_broadcasts(hold, bias, deterministic):
    """In q's dtype by TMA (rows of a multiple of 16 bytes) and in float32 by pointers, several key and query tiles."""
    case = replace(USUAL, Hkv=2, bias=bias, deterministic=deterministic)
    hold(case, replace(case, N=433, bias_dtype=FLOAT))


@each(
    replace(USUAL, Hkv=2, mask=mask, bias=bias)
    for mask, bias in (
        ("bhmn", None), ("1hmn", "1hmn"), ("b1mn", None), ("bkmn", None), ("b11n", "bhmn"), ("1hm1", None),
        ("1k1n", None), ("11mn", "b11n"), ("1111", None),
    )
)  # fmt: skip
def test_mask_broadcasts(hold, case):
    hold(case, replace(case, N=433))


@each(
    replace(USUAL, D=D, Dv=Dv, dtype=dtype, **terms)
    for D, Dv, dtype, terms in (
        (8, 8, BRAIN, {}),
        (40, 40, BRAIN, {"bias": "1hmn"}),
        (72, 200, BRAIN, {"causal": True}),
        (96, 96, HALF, {"bias": "bhmn"}),  # products of 64 and 32 columns, dQ of 128
        (80, 80, BRAIN, {"causal": True, "Hkv": 2, "deterministic": True}),  # of 64 and 16
        (112, 96, BRAIN, {"bias": "1hmn", "mask": "b1mn", "planted": math.nan}),
        (96, 80, HALF, {"window": (100, 20), "dropout_p": 0.1}),
        (40, 96, BRAIN, {"bias": "b11n", "softcap": 2.0}),  # dQ of 64 columns
        (160, 160, BRAIN, {"causal": True, "bias": "1hmn"}),  # dQ of 128 and 32
        (160, 144, HALF, {"mask": "b1mn", "deterministic": True}),
        (64, 128, BRAIN, {"bias": "1hmn", "deterministic": True}),
        (192, 128, BRAIN, {"causal": True}),  # Q and K of the forward in three panels
        (192, 128, BRAIN, {"Hkv": 2, "window": (100, 20), "deterministic": True}),
        (192, 128, HALF, {"bias": "1hmn", "mask": "b1mn", "planted": math.nan}),
        (192, 128, BRAIN, {"bias": "bhmn", "bias_dtype": FLOAT, "softcap": 2.0}),
        (192, 128, BRAIN, {"bias": "b11n", "mask": "b11n", "planted": math.inf}),
        (192, 128, BRAIN, {"bias": "1hmn", "deterministic": True, "causal": True, "sink": "h"}),
        (160, 64, HALF, {"dropout_p": 0.1, "causal": True}),
        (136, 16, BRAIN, {"sink": "bhm", "mask": "1hmn"}),
        (192, 200, BRAIN, {"causal": True, "dropout_p": 0.1}),
        (256, 64, BRAIN, {"bias": "bhmn", "mask": "b1mn", "planted": math.nan}),
        (256, 256, BRAIN, {}),
        (256, 256, BRAIN, {"causal": True, "bias": "1hmn"}),
        (256, 256, BRAIN, {"bias": "bhmn", "bias_dtype": FLOAT}),
        (256, 256, HALF, {"mask": "b1mn", "deterministic": True, "bias": "1hmn"}),
        (13, 7, HALF, {"bias": "b11n"}),
        (32, 32, BRAIN, {"bias": "bhmn", "softcap": 2.0}),
        (512, 512, BRAIN, {}),  # from here on in blocks of columns
        (512, 512, BRAIN, {"causal": True, "dropout_p": 0.1}),
        (512, 512, HALF, {"bias": "1hmn", "mask": "b1mn", "Hkv": 2}),
        (512, 512, BRAIN, {"bias": "bhmn", "deterministic": True, "sink": "h"}),
        (576, 512, BRAIN, {"Hkv": 1, "causal": True}),
        (576, 512, BRAIN, {"mask": "1hmn", "planted": math.nan}),
        (320, 320, HALF, {"window": (100, 20), "softcap": 2.0}),
        (264, 64, BRAIN, {"bias": "b11n", "deterministic": True}),
        (257, 300, HALF, {"bias": "1hm1", "causal": True}),
        (64, 512, FLOAT, {"mask": "b11n", "planted": math.inf}),
    )
)
def test_head_dimensions(hold, case):
    hold(case)


@each(
    replace(USUAL, D=D, Dv=D, dtype=dtype, M=299, N=433, bias="bhmn", **terms)
    for D, dtype in ((8, BRAIN), (16, HALF), (32, BRAIN), (64, HALF), (128, BRAIN), (256, BRAIN))
    for terms in (
        {},
        {"causal": True, "sink": "h"},
        {"mask": "b1mn", "planted": math.nan},
        {"bias_hides": True, "blind": True},
        {"Hkv": 2, "window": (90, 10), "deterministic": True},
    )
)
def test_a_bias_whose_rows_begin_anywhere(hold, case):
    hold(case, gradients=True)


@each(
    replace(USUAL, dtype=FLOAT, M=150, D=D, **terms)
    for D, terms in (
        (64, {"bias": "1hmn"}),
        (64, {"causal": True, "deterministic": True, "bias": "b11n"}),
        (128, {"mask": "b1mn"}),
        (256, {"bias": "bhmn"}),
    )
)
def test_float32(hold, case):
    hold(case)


@each(
    replace(USUAL, H=H, Hkv=Hkv, bias=bias, causal=True, deterministic=deterministic)
    for H, Hkv in ((8, 2), (4, 1), (6, 3))
    for bias, deterministic in ((None, False), ("1kmn", False), ("bk1n", True))
)
def test_grouped_heads(hold, case):
    hold(case, gradients=True)


@each(
    replace(USUAL, Hkv=Hkv, **terms)
    for Hkv, terms in (
        (4, {}),
        (2, {"bias": "bhmn", "causal": True}),
        (4, {"bias": "1hmn", "mask": "b1mn", "bias_dtype": FLOAT}),
        (2, {"bias": "bk1n", "mask": "1hm1", "planted": math.nan, "deterministic": True}),
    )
)
def test_layouts(hold, case):
    """One after the other in one process: what is kept of one call must not serve the next."""
    hold(*(replace(case, layout=layout) for layout in (*LAYOUTS, *reversed(LAYOUTS))), gradients=True)


@each(
    replace(USUAL, Hkv=2, planted=planted, deterministic=deterministic, **terms)
    for terms in (
        {"mask": "b11n"},
        {"mask": "1hmn", "bias": "1hmn"},
        {"mask": "111n", "bias": "bh1n", "softcap": 2.0},
        {"bias": "1hmn"},
        {"bias": "b11n"},
        {"window": (50, None)},
        {"window": (50, 20), "causal": True, "bias": "bhmn"},
    )
    for planted, deterministic in ((math.nan, False), (math.inf, True))
)
def test_hidden_keys_that_are_not_finite(hold, case):
    hold(case, gradients=True)


@each(
    replace(USUAL, blind=True, **terms)
    for terms in (
        {"mask": "b1mn"},
        {"mask": "1hmn", "bias": "1hmn", "deterministic": True},
        {"bias": "bhmn", "bias_hides": True},
        {"bias": "1hm1", "softcap": 2.0},
        {"N": 128, "causal": True, "bias": "1h1n"},
    )
)
def test_rows_that_see_nothing(hold, case):
    hold(case, gradients=True)


@pytest.mark.parametrize("grads", ["", "q", "k", "v", "b", "qb", "kv"])
def test_gradients_on_demand(hold, grads):
    case = replace(USUAL, grads=grads, bias="1hmn")
    hold(case, replace(case, deterministic=True, lse=False), gradients=True)


@pytest.mark.parametrize(
    ("M", "N", "D", "bias"),
    [(1024, 8, 8, False), (1024, 256, 64, False), (1, 1024, 128, True), (300, 300, 200, True)],
)
@pytest.mark.parametrize("tf32", [False, True])
def test_the_drop_in_is_as_exact_as_float32(tf32, M, N, D, bias):
    """PyTorch's function is, whatever the setting for matrix products says."""
    q, k, v = (torch.randn(2, 4, n, D, device="cuda", requires_grad=True) for n in (M, N, N))
    added = torch.randn(2, 4, M, N, device="cuda", requires_grad=True) if bias else None
    do = torch.randn_like(q)
    leaves = [x for x in (q, k, v, added) if x is not None]
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = tf32
    try:
        o = scaled_dot_product_attention(q, k, v, added)
        found = (o, *torch.autograd.grad(o, leaves, do))
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    wide = [x.detach().double().requires_grad_() for x in leaves]
    s = wide[0] @ wide[1].mT / math.sqrt(D)
    o = torch.softmax(s + wide[3] if bias else s, -1) @ wide[2]
    for x, exact in zip(found, (o, *torch.autograd.grad(o, wide, do.double())), strict=True):
        torch.testing.assert_close(x.double(), exact, rtol=1e-5, atol=1e-5)


@of_sizes
def test_empty(empty):
    """Without batch elements, heads, queries or keys."""
    with torch.device("cuda"):
        for dtype in (BRAIN, FLOAT):
            check_attention(empty, dtype)
        check_calls(empty)
