"""The Triton kernels in Triton's interpreter, on the CPU, held to the error rule of helpers.py.

TRITON_INTERPRET is read when triton is imported, so the kernels run in a child process and this one stays as it was.
float16 and float32 only: the interpreter computes bfloat16 products wrongly.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import interpreter_child
import pytest
import torch
from forced import check_split
from helpers import LAYOUTS, Case, Results, check, run, tensors, visible
from hypothesis import given, settings
from hypothesis import strategies as st
from pairwise import each
from torch import Tensor

HALF, FLOAT = torch.float16, torch.float32
LENGTHS = (1, 3, 127, 128, 129, 239)
# Which axes a bias or mask has: all 24 for grouped heads, and half of them, where each combination of three axes is.
BROADCASTS = ["".join(axes) for axes in itertools.product("b1", "hk1", "m1", "n1")]
HALF_OF_THEM = [x for x in BROADCASTS if (x[0] == "1") == (("hk1".index(x[1]) + (x[2] == "1") + (x[3] == "1")) % 2)]


def with_and_without_speed(case: Case) -> tuple[Results, Results]:
    """Results of the triton backend, by Triton's interpreter as it comes and as `interpreter_speed` leaves it."""
    from interpreter_speed import as_it_comes

    with as_it_comes():
        slow = run(case, "triton")
    return slow, run(case, "triton")


def largest_plus(n: int) -> int:
    """2³¹ - 1 + n in 32 bits, by a kernel, where integers that overflow are an error."""
    import triton
    import triton.language as tl
    from interpreter_speed import watch_overflow

    @triton.jit
    def kernel(x, n):
        tl.store(x, tl.load(x) + n)

    kernel[(1,)](torch.zeros(1, dtype=torch.int32), n)  # what is known of an addition now is to be forgotten
    x = torch.tensor([2**31 - 1], dtype=torch.int32)
    watch_overflow(True)
    try:
        kernel[(1,)](x, n)
    finally:
        watch_overflow(False)
    return int(x)


def spoil(case: Case, which: str, where: tuple[int, ...], value: float) -> tuple[Results, Results, Tensor]:
    """Put ``value`` into q, k, v, bias or do: results of the triton backend, of the reference, and who sees what."""
    inputs = tensors(case)
    getattr(inputs, which)[where] = value
    return run(case, "triton", inputs=inputs), run(case, "reference", inputs=inputs), visible(case, inputs)


# B, H, D of most cases are small: the interpreter's time goes by programs and operations, not by elements. Where a
# full cross would take minutes, terms take turns; on a GPU tests/gpu crosses them.
TERMS_OF_LENGTHS = (
    {},
    {"B": 2, "causal": True, "bias": "1hmn", "bias_dtype": FLOAT},
    {"mask": "b1mn", "window": (60, 40), "bias": "1h1n"},
)


@each(Case(**{"B": 1, "H": 1, "M": M, "N": N, "D": 16, **TERMS_OF_LENGTHS[(m + n) % 3]})
      for m, M in enumerate(LENGTHS) for n, N in enumerate(LENGTHS))  # fmt: skip
def test_lengths(interpreter, case):
    interpreter(check, case, "triton")


@each(
    [
        Case(B=1, H=1, M=799, N=1023, D=16, causal=True, bias="11mn"),
        Case(B=1, H=1, M=1023, N=799, D=16, causal=True),
        Case(B=1, H=1, M=300, N=799, D=16, mask="11mn", bias="1111"),
    ]
)
def test_long(interpreter, case):
    interpreter(check, case, "triton")


@each(
    [
        Case(H=4, Hkv=2, M=67, N=140, D=24, bias="1hmn", mask="b1m1", window=(40, 9), deterministic=True),
        Case(H=4, Hkv=2, M=3, N=300, D=40, bias="b1mn", mask="1h1n", causal=True),
        Case(B=1, H=2, M=40, N=33, D=16, bias="1hm1", causal=True, layout="sliced"),
    ]
)
def test_integers_stay_in_range(interpreter, case):
    """Band limits count from far outside int32's middle: no sum or product of the kernels may wrap round."""
    interpreter(interpreter_child.watch_integers, check, case, "triton")


def test_integers_out_of_range_are_found(interpreter):
    assert interpreter(largest_plus, -1) == 2**31 - 2
    with pytest.raises(Exception, match="int32 overflow detected"):
        interpreter(largest_plus, 1)


DIMENSIONS = [
    (1, 1), (3, 5), (8, 8), (16, 24), (24, 16), (40, 40), (64, 64), (40, 96), (96, 40), (96, 96), (128, 128),
    (64, 256), (256, 64), (160, 192), (256, 256), (8, 256),
]  # fmt: skip


@each(
    Case(B=1, H=1, M=20, N=50, D=D, Dv=Dv, dtype=dtype, **terms)
    for n, (D, Dv) in enumerate(DIMENSIONS)
    for dtype, terms in ((HALF, ({"bias": "1hmn"}, {"softcap": 1.5})[n % 2]), (FLOAT, {"causal": True}))
)
def test_head_dimensions(interpreter, case):
    interpreter(check, case, "triton")


@each(
    Case(B=1, H=H, Hkv=Hkv, M=20, N=67, D=16, dtype=dtype, bias=bias, causal=bias is None)
    for H, Hkv in ((4, 2), (3, 1), (6, 3))
    for dtype, bias in ((HALF, None), (FLOAT, None), (HALF, "bkmn"), (FLOAT, "1h1n"))
)
def test_grouped_heads(interpreter, case):
    interpreter(check, case, "triton")


@each(
    Case(H=4 if bias[1] == "k" else 2, Hkv=2, M=20, N=67, D=16, bias=bias, bias_dtype=dtype,
         deterministic=deterministic, **terms)
    for n, bias in enumerate(BROADCASTS)
    for deterministic in (n % 2 == 0,)
    for dtype, terms in (((None, {}), (FLOAT, {"window": (30, 5)}), (torch.bfloat16, {"softcap": 2.0}))[n % 3],)
)  # fmt: skip
def test_bias_broadcasts(interpreter, case):
    interpreter(check, case, "triton")


@each(
    Case(B=1, H=2, Hkv=1, M=67, N=40, D=16, bias=bias, causal=True, lse=False, deterministic=deterministic)
    for bias in ("1hmn", "b11n", "1km1", "1111")
    for deterministic in (False, True)
)
def test_bias_gradient_without_the_lse(interpreter, case):
    interpreter(check, case, "triton")


ORDERED = Case(B=1, M=20, N=67, D=16, deterministic=True)


@each(replace(ORDERED, bias=bias) for bias in (None, "1hmn", "11mn", "11m1", "1h1n", "1111"))
def test_what_has_an_order_has_no_atomics(interpreter, case):
    """Here programs run one after the other, so that sums by atomics repeat bit by bit too."""
    interpreter(interpreter_child.without_atomics, check, case, "triton")


def test_atomics_are_found(interpreter):
    with pytest.raises(Exception, match="an atomic, in whose order nothing is fixed"):
        interpreter(interpreter_child.without_atomics, check, replace(ORDERED, deterministic=False), "triton")


@each(
    Case(H=4 if mask[1] == "k" else 2, Hkv=2, M=20, N=67, D=16, mask=mask, bias=("1hmn", None)[n % 2])
    for n, mask in enumerate(HALF_OF_THEM)
)
def test_mask_broadcasts(interpreter, case):
    interpreter(check, case, "triton")


# Each band, with a softcap and a bias in every second of them: each pair of two options is there.
@each(
    Case(B=1, H=1, M=M, N=N, D=16, causal=causal, window=window, **({}, {"softcap": 1.5, "bias": "1h1n"})[n % 2])
    for n, ((M, N), causal, window) in enumerate(
        itertools.product(((100, 170), (170, 100)), (False, True), (None, (40, None), (None, 9), (33, 7), (0, 0)))
    )
)
def test_terms(interpreter, case):
    interpreter(check, case, "triton")


@each(
    Case(**{"B": 1, "M": 40, "N": 67, "D": 16, "dtype": dtype, "blind": True, **terms})
    for dtype in (HALF, FLOAT)
    for terms in (
        {"mask": "b1mn"},
        {"mask": "11m1", "bias": "1h1n"},
        {"mask": "1hmn", "deterministic": True, "bias": "1hmn"},
        {"bias": "bhmn"},
        {"bias": "1hmn", "bias_hides": True, "deterministic": True},
        {"bias": "1hm1", "softcap": 2.0},
        {"N": 20, "causal": True},
        {"N": 20, "causal": True, "bias": "1h1n", "deterministic": True},
    )
)
def test_rows_that_see_nothing(interpreter, case):
    interpreter(check, case, "triton")


@each(
    Case(B=1, M=40, N=67, D=16, dtype=dtype, bias=bias, bias_hides=True, deterministic=deterministic, **terms)
    for bias, dtype, terms in (
        ("bhmn", HALF, {}), ("b11n", FLOAT, {"softcap": 2.0}), ("1hm1", HALF, {"causal": True}),
    )
    for deterministic in (False, True)
)  # fmt: skip
def test_bias_that_hides(interpreter, case):
    interpreter(check, case, "triton")


HIDERS = (
    {"mask": "b11n"},
    {"mask": "1hmn", "bias": "1hmn"},
    {"mask": "111n", "bias": "bh1n", "softcap": 2.0},
    {"bias": "1hmn"},
    {"bias": "b11n", "softcap": 2.0},
    {"window": (8, None)},
    {"window": (8, 3), "causal": True, "bias": "11mn"},
)


@each(
    Case(B=1, H=2, Hkv=1, M=20, N=90, D=16, dtype=dtype, planted=planted, deterministic=deterministic, **terms)
    for n, terms in enumerate(HIDERS)
    for dtype, planted, deterministic in (
        (HALF, math.nan, False), ((HALF, math.inf, True), (FLOAT, -math.inf, False), (HALF, math.nan, True))[n % 3],
    )
)  # fmt: skip
def test_hidden_keys_that_are_not_finite(interpreter, case):
    interpreter(check, case, "triton")


@each(
    Case(H=2, Hkv=Hkv, M=20, N=67, D=D, layout=layout, **terms)
    for layout in LAYOUTS
    for Hkv, D, terms in (
        (2, 16, {}),
        (1, 24, {"bias": "bhmn", "causal": True}),
        (2, 16, {"bias": "1hmn", "mask": "b1mn", "dtype": FLOAT}),
        (1, 16, {"bias": "bk1n", "mask": "1hm1", "planted": math.nan, "deterministic": True}),
    )
)
def test_layouts(interpreter, case):
    interpreter(check, case, "triton")


@each(
    Case(B=1, M=20, N=67, D=16, bias=bias, grads=grads, lse=lse, deterministic=deterministic)
    for grads, lse, deterministic in (
        ("", True, False), ("q", False, False), ("k", True, False), ("v", False, True), ("b", True, False),
        ("b", False, True), ("qb", True, True), ("kv", False, False), ("kb", True, False), ("q", True, True),
    )
    for bias in ("bhmn", "11mn", "b11n")
)  # fmt: skip
def test_gradients_on_demand(interpreter, case):
    interpreter(check, case, "triton")


SMALL = Case(B=1, M=20, N=67, D=16)
SPOILED = [
    (SMALL, "v", (0, 0, 5, 3), math.inf),
    (SMALL, "k", (0, 1, 66, 3), math.nan),
    (SMALL, "q", (0, 1, 10, 0), math.nan),
    (replace(SMALL, causal=True), "v", (0, 0, 50, 3), math.nan),
    (replace(SMALL, causal=True), "v", (0, 0, 66, 3), -math.inf),
    (replace(SMALL, causal=True), "k", (0, 0, 60), math.nan),
    (replace(SMALL, window=(9, 2)), "k", (0, 0, 55), math.nan),
    (replace(SMALL, mask="1hmn"), "v", (0, 1, 9), math.nan),
    (replace(SMALL, mask="1hmn", bias="1hmn"), "bias", (0, 1, 9, 12), math.nan),
    (replace(SMALL, bias="1hmn", bias_hides=True), "v", (0, 1, 9), math.nan),
    (replace(SMALL, bias="1hmn"), "do", (0, 1, 9, 2), math.nan),
]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("spoiled", SPOILED, ids=lambda x: f"{x[1]}{list(x[2])} {x[3]}, {x[0]}")
def test_what_is_visible_is_not_hidden(interpreter, spoiled, deterministic):
    """A value that is not finite reaches the rows that see it, as it does in the reference, and no other.

    The gradients of what such a row sees are not finite; what it does not see in its own head is left open.
    """
    case, which, where, value = spoiled
    case = replace(case, deterministic=deterministic)
    ours, reference, seen = interpreter(spoil, case, which, where, value)
    for name in ("o", "lse", "dq"):
        assert torch.equal(getattr(ours, name).isfinite(), getattr(reference, name).isfinite()), name
    spoilt = ~reference.dq.isfinite().all(-1)
    assert spoilt.any()
    must = (seen & spoilt[..., None]).any(2)  # keys
    may = spoilt.any(2)  # heads
    for name in ("dk", "dv"):
        broken = ~getattr(ours, name).isfinite().all(-1)
        if name == "dk" or which != "v":  # dV = Pᵀ dO does not read V
            assert broken[must].all(), name
        assert not broken[~may].any(), name
    if ours.dbias is not None:
        broken = ~ours.dbias.isfinite()
        assert broken[seen & spoilt[..., None]].all()
        assert not broken[~may].any()


# Queries of grouped heads in one packed tile or two, of single heads in tiles of their own; 300 keys are three tiles.
FEW = Case(B=2, H=4, Hkv=2, M=1, N=300, D=16, grads="")


@pytest.mark.parametrize("splits", [2, 5])
@each(
    [
        FEW,
        replace(FEW, M=3, dtype=FLOAT, causal=True, bias="bhmn"),
        replace(FEW, B=1, M=16, H=10, Hkv=2, bias="1hmn", bias_dtype=FLOAT, window=(150, 3)),
        replace(FEW, H=2, mask="bh1n", bias="b11n", Dv=24),
        replace(FEW, H=2, M=20, N=330, dtype=FLOAT, mask="1hmn", softcap=2.0),
    ]
)
def test_few_queries(interpreter, case, splits):
    interpreter(check_split, case, splits)


@each(replace(FEW, B=1, M=M, N=N, bias="1h1n") for M, N in ((1, 1), (1, 17), (1, 127), (1, 129), (5, 239), (7, 799)))
def test_lengths_of_few_queries(interpreter, case):
    interpreter(check_split, case, 3)


@each(
    replace(FEW, M=M, N=160, bias=bias, bias_dtype=(None, FLOAT, torch.bfloat16)[n % 3],
            mask=HALF_OF_THEM[-n] if n % 2 else None)
    for n, bias in enumerate(HALF_OF_THEM)
    for M in (1 + 2 * (n % 2),)
)  # fmt: skip
def test_broadcasts_of_few_queries(interpreter, case):
    interpreter(check_split, case, 2)


@each(
    replace(FEW, H=H, M=M, dtype=dtype, planted=math.nan, **terms)
    for H in (2, 4)
    for M, dtype, terms in (
        (1, HALF, {"mask": "b11n", "bias": "b11n"}),
        (3, FLOAT, {"mask": "1hmn", "blind": True, "layout": "sliced"}),
        (3, HALF, {"bias": "1kmn", "softcap": 2.0, "blind": True, "layout": "heads_last"}),
        (2, HALF, {"window": (200, 0), "layout": "padded"}),
    )
)
def test_hidden_keys_of_few_queries(interpreter, case):
    interpreter(check_split, case, 3)


def test_gradients_of_a_split_forward(interpreter):
    interpreter(check_split, replace(FEW, M=5, bias="1h1n", causal=True, grads="qkvb"), 3)


LENGTH = st.integers(1, 100)
MAYBE_AXES = st.none() | st.sampled_from(BROADCASTS)
WIDTH = st.none() | st.integers(0, 60)


@st.composite
def any_case(draw):
    Hkv = draw(st.integers(1, 2))
    return Case(
        B=draw(st.integers(1, 2)), H=Hkv * draw(st.integers(1, 2)), Hkv=Hkv, M=draw(LENGTH), N=draw(LENGTH),
        D=draw(st.integers(1, 40)), Dv=draw(st.integers(1, 40)), dtype=draw(st.sampled_from([HALF, FLOAT])),
        bias=draw(MAYBE_AXES), bias_dtype=draw(st.sampled_from([None, HALF, FLOAT, torch.bfloat16])),
        mask=draw(MAYBE_AXES), causal=draw(st.booleans()), window=draw(st.none() | st.tuples(WIDTH, WIDTH)),
        softcap=draw(st.none() | st.floats(0.5, 5)), scale=draw(st.none() | st.floats(0.05, 1)),
        layout=draw(st.sampled_from(LAYOUTS)), bias_hides=draw(st.booleans()),
        deterministic=draw(st.booleans()), grads=draw(st.sampled_from(["qkvbs", "qkv", "b", "q", "kb"])),
        sink=draw(st.sampled_from([None, None, "h", "bhm", "b1m"])), sink_none=draw(st.booleans()),
    )  # fmt: skip


@settings(max_examples=12, deadline=None, derandomize=True, database=None)
@given(case=any_case())
def test_anything(interpreter, case):
    interpreter(check, case, "triton")


@each(
    [
        Case(H=4, Hkv=2, M=5, N=70, D=24, Dv=40, bias="1hm1", mask="b1mn", window=(40, 9), softcap=2.0, dropout_p=0.2),
        Case(B=1, M=40, N=33, D=8, dtype=FLOAT, bias="b11n", bias_dtype=HALF, causal=True, sink="h", layout="sliced"),
    ]
)
def test_its_speed_changes_no_bit(interpreter, case):
    slow, fast = interpreter(with_and_without_speed, case)
    assert slow._fields == fast._fields
    for name, x, y in zip(slow._fields, slow, fast, strict=True):
        assert (x is None) == (y is None), name
        assert x is None or torch.equal(x, y), name
