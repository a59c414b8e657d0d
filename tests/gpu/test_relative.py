"""Bias terms on the device, in the Triton kernels, by the error rule: see relative_helpers.py."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from helpers import Case, tensors
from pairwise import each_run as each
from relative_helpers import Term, check, check_split, made

from tilewise import attention, explain
from tilewise.bias import RelativeBias, alibi, t5_bias

BRAIN, HALF, FLOAT = torch.bfloat16, torch.float16, torch.float32
HIDDEN = -math.inf
USUAL = Case(B=2, H=4, Hkv=2, M=239, N=432, D=64, dtype=BRAIN)
LARGE = replace(USUAL, M=800, N=1023, D=128, causal=True)


TERMS = [
    Term(R=100, lo=-99),
    Term(R=64, lo=-20, reverse=True, axes="bk"),
    Term(R=1000, lo=-600, axes="11", hides=True),
    Term(R=90, lo=-60, outside=HIDDEN, axes="1h"),
    Term(R=90, lo=-60, outside=HIDDEN, starts="batch", axes="bk"),
    Term(R=90, lo=-60, starts="batch", axes="1k"),
    Term(R=33, lo=-16, outside="clamp"),
    Term(R=33, lo=-16, outside="clamp", reverse=True, axes="1h", starts="one"),
    Term(R=20, buckets=200, lo=-100, outside="clamp"),
    Term(R=20, buckets=200, lo=-100, axes="bk", dtype=FLOAT),
    Term("key", R=100, lo=-50),
    Term("key", R=100, lo=-50, reverse=True, axes="1k", outside="clamp"),
    Term("key", R=100, lo=-50, outside=HIDDEN, starts="batch", axes="b1"),
    Term("key", R=20, buckets=200, lo=-100, outside="clamp", dtype=FLOAT),
    Term("all", R=150, lo=-90, axes="bk"),
    Term("all", R=150, lo=-90, outside=HIDDEN, starts="batch", axes="1h"),
    Term("t5", R=32, axes="1h", dtype=FLOAT),
    Term("alibi", dtype=FLOAT),
]


@each(
    (replace(case, dtype=dtype), (term,))
    for n, term in enumerate(TERMS)
    for case, dtype in ((USUAL, (BRAIN, HALF)[n % 2]), (LARGE, (HALF, BRAIN)[n % 2]))
)
def test_terms(case, terms):
    check(case, terms, "triton", "cuda")


@each(
    (replace(USUAL, D=D, dtype=dtype, **more), terms)
    for D, dtype, more in (
        (256, BRAIN, {"causal": True}), (200, HALF, {}), (96, BRAIN, {"softcap": 3.0}), (33, HALF, {"causal": True}),
        (64, FLOAT, {}), (128, FLOAT, {"causal": True}), (64, BRAIN, {"layout": "sliced"}),
        (128, HALF, {"layout": "sliced", "causal": True}), (128, BRAIN, {"layout": "heads_last", "window": (150, 20)}),
    )
    for terms in ((Term(R=100, lo=-99), Term("t5", R=16, axes="1h")), (Term("key", R=80, lo=-40, outside="clamp"),))
)  # fmt: skip
def test_dimensions(case, terms):
    check(case, terms, "triton", "cuda")


@pytest.mark.parametrize("M", [1, 3, 127, 129, 799])
@pytest.mark.parametrize("N", [1, 3, 127, 128, 1023])
def test_lengths(M, N):
    for n, terms in enumerate(((Term(R=100, lo=-70),), (Term("all", R=300, lo=-100),), (Term("key", R=50, lo=-20),))):
        check(Case(B=2, H=2, Hkv=1, M=M, N=N, D=(64, 128)[n % 2], dtype=BRAIN, causal=n == 0), terms, "triton", "cuda")


@each(
    [
        (replace(USUAL, mask="b1mn", bias="1hmn", sink="h", softcap=2.0, window=(200, 100)),
         (Term(R=99, lo=-70), Term("key", axes="11", outside="clamp"), Term("t5", R=8, axes="1h"),
          Term("cols", axes="b1"), Term("rows", axes="1h"))),
        (replace(LARGE, mask="bhmn", bias="bhmn", sink="bhm"),
         (Term(R=99, lo=-70), Term("key", axes="bk"), Term("alibi"), Term("cols", axes="1k"))),
        (replace(USUAL, mask="1hm1", blind=True), (Term(hides=True), Term("cols", axes="1k"))),
        (replace(USUAL, mask="b11n", planted=math.nan, bias="11mn"), (Term(hides=True), Term("rows", axes="bh"))),
        (replace(LARGE, mask="b11n", planted=math.inf), (Term(R=300, lo=-250, hides=True, axes="1h"), Term("key"))),
        (replace(LARGE, dtype=FLOAT), (Term(dtype=HALF), Term("key", dtype=BRAIN))),
        (replace(LARGE, lse=False), (Term(dtype=FLOAT), Term("alibi", dtype=FLOAT))),
        (replace(USUAL, layout="padded", scale=0.3), (Term(layout="padded"), Term("key", layout="heads_last"))),
        (replace(LARGE, layout="heads_last"), (Term(layout="sliced"), Term("key", layout="expanded"))),
        (USUAL, (Term(R=900, lo=-450, planted=math.nan),)),
        (LARGE, (Term("key", R=3000, lo=-1500, planted=math.nan, starts="batch"),)),
        (replace(LARGE, window=(100, 0)), (Term(R=300, lo=-200),)),  # the window is shorter than the entries
        (replace(LARGE, window=(300, 0)), (Term(R=100, lo=-100),)),  # and longer
        (replace(LARGE, M=1023, N=799), (Term(R=100, lo=-99, outside=HIDDEN), Term("all", R=50, lo=-20))),
        (replace(LARGE, causal=False), (Term(R=5, lo=90000), Term("key", R=1, lo=0, outside="clamp"))),
    ]
)  # fmt: skip
def test_together(case, terms):
    check(case, terms, "triton", "cuda")


@pytest.mark.parametrize("wanted", ["terms", ""])
@each([(LARGE, (Term(), Term("key"), Term("t5", R=8), Term("cols"), Term("rows")))])
def test_gradients_on_demand(case, terms, wanted):
    check(case, terms, "triton", "cuda", wanted)


FEW = Case(B=2, H=8, Hkv=2, M=1, N=1023, D=128, dtype=BRAIN)


@pytest.mark.parametrize("splits", [1, 2, 5, 40])
@each(
    [
        (FEW, (Term(R=200, lo=-199, starts="batch"),)),
        (FEW, (Term(R=20, lo=-19, axes="bk", outside="clamp"), Term("t5", R=32, axes="1h", dtype=FLOAT))),
        (replace(FEW, M=3, causal=True, dtype=HALF), (Term(R=60, lo=-59, outside=HIDDEN, starts="batch"), Term("all"))),
        (replace(FEW, M=5, causal=True, dtype=FLOAT), (Term(axes="1k", outside="clamp"), Term("key", axes="11"))),
        (replace(FEW, M=17, N=2048, D=64), (Term(R=300, lo=-150, reverse=True), Term("alibi", dtype=FLOAT))),
        (replace(FEW, M=2, mask="b11n", sink="h"), (Term("alibi"), Term("cols", axes="b1"), Term("rows", axes="1h"))),
    ]
)  # fmt: skip
def test_few_queries(case, terms, splits):
    check_split(case, terms, splits, "cuda")


def test_decoding_is_the_last_row():
    """With causal attention's default start, an int and a tensor on the device."""
    x = tensors(replace(LARGE, M=1023), "cuda")
    values = torch.randn(2, 4, 1023, 200, device="cuda", dtype=BRAIN)
    table = torch.randn(32, 4, device="cuda")

    def call(n, start):
        last = slice(1023 - n, None)
        bias = (RelativeBias(values[:, :, last], lo=-199, query_start=start), t5_bias(table, False, query_start=start))
        return attention(x.q[:, :, last], x.k, x.v, causal=True, bias=bias, backend="triton")

    full = call(1023, None)
    for n in (1, 4):
        for start in (None, 1023 - n, torch.tensor([1023 - n] * 2, device="cuda")):
            torch.testing.assert_close(call(n, start), full[:, :, -n:], rtol=2e-2, atol=2e-2)


# --- what has an order ---

ORDERED = replace(LARGE, deterministic=True)


@each(
    [
        (ORDERED, (Term(R=100, lo=-99), Term("key", R=60, lo=-80))),
        (ORDERED, (Term(axes="1k"), Term("all", axes="1h"), Term("cols", axes="b1"), Term("rows", axes="1h"))),
        (replace(ORDERED, causal=False, D=64), (Term("t5", R=32, axes="1h", dtype=FLOAT), Term("key", axes="1k"))),
        (replace(ORDERED, mask="b1mn", N=799), (Term("all", R=300, lo=-200, axes="1h"), Term(axes="11"))),
        (ORDERED, (Term(R=100, lo=-60, outside="clamp"), Term("key", R=33, lo=-20, outside="clamp", axes="1k"))),
        (replace(ORDERED, causal=False, D=64, mask="1hm1"),
         (Term(R=20, buckets=200, lo=-100, outside="clamp"), Term("key", R=90, buckets=150, lo=-60, reverse=True))),
        (replace(ORDERED, dtype=FLOAT, D=64), (Term(axes="1h", starts="batch", outside="clamp", reverse=True),)),
    ]
)  # fmt: skip
def test_gradients_repeat_bit_by_bit(case, terms):
    check(case, terms, "triton", "cuda")
    x = tensors(case, "cuda")
    inputs = [y.detach().requires_grad_() for y in (x.q, x.k, x.v)]
    leaves = [y.detach().requires_grad_() for y in made(case, terms, "cuda")]

    def gradients():
        bias = tuple(term.of(leaf, case) for term, leaf in zip(terms, leaves, strict=True))
        o, lse = attention(*inputs, bias=bias, mask=x.mask, causal=case.causal, deterministic=True, return_lse=True,
                           backend="triton")  # fmt: skip
        return torch.autograd.grad((o, lse), [*inputs, *leaves], (x.do, x.dlse))

    first = gradients()
    for _ in range(100):
        assert all(map(torch.equal, gradients(), first))


# --- long sequences ---


def test_131072_tokens():
    """Nothing of M·N: memory for the values, their gradient and what the inputs have. The last queries are held to
    attention with the bias as a matrix, by themselves."""
    S, R, D, rows = 131072, 1024, 128, 256
    make = {"device": "cuda", "dtype": BRAIN}
    generator = torch.Generator("cuda").manual_seed(0)
    q = torch.randn(1, 2, S, D, generator=generator, **make).requires_grad_()
    k, v = (torch.randn(1, 1, S, D, generator=generator, **make).requires_grad_() for _ in range(2))
    values = torch.randn(1, 2, S, R, generator=generator, **make).requires_grad_()
    do = torch.zeros(1, 2, S, D, **make)
    do[:, :, -rows:] = torch.randn(1, 2, rows, D, generator=generator, **make)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    bias = RelativeBias(values, lo=1 - R)
    o = attention(q, k, v, bias=bias, causal=True, backend="triton")
    found = torch.autograd.grad(o, (q, k, v, values), do)
    torch.cuda.synchronize()
    used = torch.cuda.max_memory_allocated() - before
    assert used < values.nbytes + 12 * q.nbytes

    last = slice(S - rows, None)
    part = RelativeBias(values.detach()[:, :, last].double(), lo=1 - R)
    double = [x.detach().double().requires_grad_() for x in (q[:, :, last], k, v)]
    dense = part.values.new_zeros(1, 2, rows, S)
    for i in range(rows):
        dense[:, :, i, S - rows + i - R + 1 : S - rows + i + 1] = part.values[:, :, i]
    dense.requires_grad_()
    expected = attention(*double, bias=dense, causal=True, backend="reference")
    dq, dk, dv, dbias = torch.autograd.grad(expected, (*double, dense), do[:, :, last].double())
    for ours, truth in (
        (o.detach()[:, :, last], expected.detach()),
        (found[0][:, :, last], dq),
        (found[1], dk),
        (found[2], dv),
    ):
        torch.testing.assert_close(ours.double(), truth, rtol=5e-2, atol=5e-2 * float(truth.abs().max()))
    assert (found[3][:, :, : S - rows] == 0).all()
    for i in (0, 100, rows - 1):
        truth = dbias[:, :, i, S - rows + i - R + 1 : S - rows + i + 1]
        ours = found[3][:, :, S - rows + i].double()
        torch.testing.assert_close(ours, truth, rtol=5e-2, atol=2e-2 * float(truth.abs().max()))


def test_values_past_two_to_the_31():
    """Values of 2³¹ elements and more; the last queries are what they are by themselves."""
    S, R, D = 2**21 + 300, 1032, 64
    make = {"device": "cuda", "dtype": HALF}
    q, values = torch.randn(1, 1, S, D, **make), torch.empty(1, 1, S, R, **make)
    k, v = (torch.randn(1, 1, 200, D, **make) for _ in range(2))
    values.normal_()
    assert values.numel() > 2**31
    values.requires_grad_()
    do = torch.zeros_like(q)
    last = slice(S - 300, None)
    do[:, :, last] = torch.randn(1, 1, 300, D, **make)

    def results(q, values, do, **start):
        o = attention(q, k, v, bias=RelativeBias(values, lo=-500, **start), backend="triton")
        return o, *torch.autograd.grad(o, values, do)

    o, dvalues = results(q, values, do, query_start=200 - S)  # the last query stands at the last key
    part = values.detach()[:, :, last].clone().requires_grad_()
    expected, dpart = results(q[:, :, last], part, do[:, :, last], query_start=-100)
    torch.testing.assert_close(o[:, :, last], expected)
    torch.testing.assert_close(dvalues[:, :, last], dpart)
    assert not dvalues[:, :, : S - 300].any()


# --- graphs, compilers, plans ---


def test_cuda_graph():
    """Captured with starts on the device, replayed with others: nothing reads them back."""
    case = replace(USUAL, M=3, N=1000, causal=False)
    x = tensors(case, "cuda")
    values = torch.randn(2, 4, 3, 100, device="cuda", dtype=BRAIN, requires_grad=True)
    slopes = torch.rand(4, device="cuda")
    start = torch.tensor([500, 300], device="cuda")

    def call():
        bias = (RelativeBias(values, lo=-99, query_start=start), alibi(slopes, query_start=start))
        o = attention(x.q, x.k, x.v, bias=bias, backend="triton")
        return o.detach(), *torch.autograd.grad(o, values, x.do)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    for other in ([997, 997], [5, 600]):
        start.copy_(torch.tensor(other, device="cuda"))
        for y in results:
            y.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        torch.testing.assert_close(results, call())


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    "dynamic",
    [
        pytest.param(
            False,
            marks=pytest.mark.xfail(
                torch.__version__.startswith("2.11."), strict=True,
                reason="Inductor of torch 2.11 fails at the second shape: 'Abs' is not comparable",
            ),
        ),
        True,
    ],
)  # fmt: skip
def test_compile(dynamic):
    """A term is an argument; the same bits, without a graph break."""
    torch._dynamo.reset()

    def around(q, k, v, values, table):
        bias = (RelativeBias(values, lo=-99), t5_bias(table, True))
        return attention(q, k, v, bias=bias, causal=True, deterministic=True, backend="triton")

    compiled = torch.compile(around, fullgraph=True, dynamic=dynamic)
    for M, N in ((239, 432), (431, 584)):
        x = tensors(replace(USUAL, M=M, N=N), "cuda")
        values = torch.randn(2, 4, M, 100, device="cuda", dtype=BRAIN)
        leaves = [y.detach().requires_grad_() for y in (x.q, x.k, x.v, values, torch.randn(32, 4, device="cuda"))]
        outputs = [f(*leaves) for f in (compiled, around)]
        torch.testing.assert_close(*outputs, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(*(torch.autograd.grad(o, leaves, x.do) for o in outputs), rtol=1e-2, atol=1e-2)
    torch._dynamo.reset()


def test_triton_is_chosen():
    x = tensors(replace(LARGE, layout="padded"), "cuda")
    values = torch.randn(2, 4, 800, 100, device="cuda", dtype=BRAIN, requires_grad=True)
    e = explain(x.q, x.k, x.v, bias=RelativeBias(values, lo=-99), causal=True, backend="triton")
    assert (e.plan.backend, e.plan.backward) == ("triton", "triton")
    assert "a bias by distance with values per query (2, 4, 800, 100) bfloat16" in str(e)
