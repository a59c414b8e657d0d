"""Attention sinks: one more logit in each row's softmax, without a value. On the CPU, in Triton's interpreter, and
through everything that a call meets on its way; of Hopper test_hopper_rows.py and test_hopper_aot.py have cases."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from forced import check_split
from helpers import Case, check, hold, run, tensors
from pairwise import each

import tilewise
from tilewise import attention, explain
from tilewise.backends.gluon import sm90
from tilewise.spec.operands import TensorSpec

BRAIN, HALF, FLOAT, DOUBLE = torch.bfloat16, torch.float16, torch.float32, torch.float64
SMALL = Case(B=2, H=4, Hkv=2, M=37, N=70, D=16, sink="h")


def check_sink_gradient(shape: tuple[int, ...], M: int, tile: int, between: int, first: int) -> None:
    """`SinkGradient` beside `backends.sink_gradient`; first: 0 of delta, else of -delta, behind the LSE."""
    from tilewise.backends import sink_gradient
    from tilewise.backends.kernels.sinks import SinkGradient

    generator = torch.Generator().manual_seed(0)
    sink, lse, minus_delta = (torch.randn(x, generator=generator) for x in (shape, (2, 3, M), (2, 3, M)))
    sink[:, 0, 0] = lse[:, : 3 // shape[1], 0] = -torch.inf  # rows that see nothing, no sink either
    laid = torch.full((2, 2, 3, -(-M // tile), between), torch.nan)
    stored = (lse / math.log(2)).masked_fill(lse.isinf(), torch.inf), minus_delta if first else -minus_delta
    for into, at, x in zip(laid, (0, first), stored, strict=True):
        padded = torch.nn.functional.pad(x, (0, -M % tile), value=torch.nan)
        into[..., at : at + tile] = padded.unflatten(-1, (-1, tile))
    found = SinkGradient(sink, lse.shape, tile, between, first, negated=first > 0)(sink, *laid)
    torch.testing.assert_close(found, sink_gradient(sink, lse, minus_delta), rtol=1e-4, atol=1e-4)


# --- every backend against the error rule ---

# What a sink meets: its shapes and dtypes, every term, rows that see nothing, sinks far from the scores on either side.
MEETS = [
    {},
    {"dtype": FLOAT, "sink_dtype": HALF},
    {"sink": "bhm", "sink_dtype": FLOAT, "causal": True},
    {"sink": "1hm", "sink_none": True, "layout": "sliced", "mask": "b1mn", "blind": True},
    {"sink": "b11", "bias": "1hmn", "bias_hides": True, "blind": True, "deterministic": True},
    {"sink": "11m", "M": 70, "N": 37, "causal": True, "dtype": FLOAT, "layout": "heads_last"},  # rows see it alone
    {"softcap": 2.0, "scale": 0.7, "window": (9, 3), "sink_dtype": BRAIN},
    {"bias": "bhm1", "dtype": FLOAT},  # does not cancel any more
    {"bias": "1111", "lse": False},
    {"bias": "1k1n", "planted": math.nan, "sink_none": True},
    {"sink_at": 30.0, "grads": "s"},
    {"sink_at": 3000.0, "dtype": FLOAT},
    {"sink_at": -30.0, "dtype": FLOAT, "lse": False},
    {"sink_at": -3000.0, "dtype": FLOAT, "sink": "bhm"},
    {"mask": "b11n", "grads": "qs", "layout": "expanded", "sink": "111"},
]


@each(replace(SMALL, **terms) for terms in MEETS)
def test_cpu(case):
    check(case, "cpu")


@each(
    replace(SMALL, B=1, H=2, M=130, N=600, sink=sink, dtype=dtype) for sink in ("h", "bhm") for dtype in (FLOAT, BRAIN)
)
def test_tiles_of_the_cpu(case):
    """More than one tile, and the fused kernel's forward."""
    check(case, "cpu")
    check(replace(case, softcap=3.0), "cpu")


@each(replace(SMALL, B=1 if "b" not in terms.get("mask", "") else 2, **terms) for terms in MEETS)
def test_triton(interpreter, case):
    interpreter(check, case, "triton")


FEW = Case(B=2, H=4, Hkv=2, M=1, N=300, D=16, grads="", sink="h")


@pytest.mark.parametrize("splits", [1, 3])
@each(
    [
        FEW,
        replace(FEW, M=3, sink="bhm", dtype=FLOAT, causal=True, bias="bhmn", sink_none=True),
        replace(FEW, M=3, sink="1hm", sink_dtype=FLOAT, mask="1hmn", blind=True, sink_at=20.0, grads="qkvs"),
        replace(FEW, M=2, sink="h", sink_at=-20.0, window=(200, 0), layout="padded"),
    ]
)
def test_few_queries(interpreter, case, splits):
    """Added once, and not by each of those who share the keys."""
    interpreter(check_split, case, splits)


@pytest.mark.parametrize(
    ("shape", "M", "tile", "between", "first"),
    [
        ((1, 3, 1), 4100, 4160, 4160, 0),  # more queries than a block has, of all heads and of each query
        ((2, 3, 1), 4100, 64, 128, 64),
        ((1, 1, 2050), 2050, 2112, 2112, 0),
        ((2, 3, 2050), 2050, 64, 128, 64),
        ((1, 3, 1), 1, 64, 64, 0),
    ],
)
def test_the_kernel_of_the_gradient_is_its_twin(interpreter, shape, M, tile, between, first):
    """Of delta and of -delta, where the backends leave them; NaN is between them, and where a row sees nothing."""
    interpreter(check_sink_gradient, shape, M, tile, between, first)


# --- the definition ---


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_a_sink_is_a_key_of_zeros_without_a_value(backend):
    """A key that gives one score everywhere and has no value, said in a bias."""
    q, k, v = (torch.randn(2, 3, n, 8, dtype=DOUBLE, requires_grad=True) for n in (5, 7, 7))
    sink = torch.randn(2, 3, 5, dtype=DOUBLE, requires_grad=True)
    cotangents = torch.randn(2, 3, 5, 8, dtype=DOUBLE), torch.randn(2, 3, 5, dtype=DOUBLE)
    more_k, more_v = (torch.cat([x, x.new_zeros(2, 3, 1, 8)], 2) for x in (k, v))
    bias = torch.cat([q.new_zeros(2, 3, 5, 7), sink[..., None]], -1)
    found = attention(q, k, v, sink=sink, return_lse=True, backend=backend)
    expected = attention(q, more_k, more_v, bias=bias, return_lse=True, backend="reference")
    torch.testing.assert_close(found, expected)
    gradients = (torch.autograd.grad(x, (q, k, v, sink), cotangents) for x in (found, expected))
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize(
    ("shape", "terms"), [((2,), {}), ((2, 2, 5), {"causal": True}), ((1, 1, 5), {"softcap": 2.0}), ((1,), {})]
)
def test_gradcheck(shape, terms):
    q, k, v = (torch.randn(2, 2, n, 3, dtype=DOUBLE, requires_grad=True) for n in (5, 4, 4))
    sink = torch.randn(shape, dtype=DOUBLE, requires_grad=True)
    torch.autograd.gradcheck(
        lambda *x: attention(*x[:3], sink=x[3], return_lse=True, backend="cpu", **terms), (q, k, v, sink)
    )


@pytest.mark.parametrize("dtype", [HALF, BRAIN, FLOAT, DOUBLE])
@pytest.mark.parametrize("hidden", ["mask", "bias", "no keys"])
def test_a_row_that_sees_its_sink_alone(dtype, hidden):
    """O = 0, LSE = sink, dSink = dLSE, and nothing of it in any other gradient."""
    N = 0 if hidden == "no keys" else 7
    q, k, v = (torch.randn(1, 2, n, 8, dtype=dtype, requires_grad=True) for n in (3, N, N))
    sink = torch.tensor([[[0.5, -math.inf, -2.0]]], dtype=FLOAT, requires_grad=True)
    terms = {"mask": {"mask": torch.zeros(1, 1, 3, N, dtype=torch.bool)},
             "bias": {"bias": torch.full((1, 1, 3, N), -math.inf, dtype=FLOAT)}, "no keys": {}}[hidden]  # fmt: skip
    o, lse = attention(q, k, v, sink=sink, return_lse=True, **terms)
    assert (o == 0).all()
    assert torch.equal(lse, sink.to(lse.dtype).expand(1, 2, 3))
    dlse = torch.randn(1, 2, 3, dtype=lse.dtype)
    *gradients, dsink = torch.autograd.grad((o, lse), (q, k, v, sink), (torch.randn_like(o), dlse))
    assert all((x == 0).all() for x in gradients)
    torch.testing.assert_close(dsink, dlse.sum(1, keepdim=True).float() * torch.tensor([1.0, 0.0, 1.0]))


def test_minus_infinity_is_no_sink():
    q, k, v = (torch.randn(2, 4, n, 8, requires_grad=True) for n in (5, 7, 7))
    sink = torch.full((4,), -math.inf, requires_grad=True)
    found, expected = (attention(q, k, v, causal=True, return_lse=True, sink=x) for x in (sink, None))
    torch.testing.assert_close(found, expected)
    *gradients, dsink = torch.autograd.grad(found[0].sum(), (q, k, v, sink))
    torch.testing.assert_close(gradients, list(torch.autograd.grad(expected[0].sum(), (q, k, v))))
    assert (dsink == 0).all()


def test_a_bias_that_hides_by_a_large_number():
    """All keys of a row at -1e9: beside a sink they weigh 0, and the LSE has lost nothing."""
    case = Case(B=1, H=2, M=5, N=9, D=8, bias="11mn", sink="h", dtype=FLOAT)
    x = tensors(case)
    x.bias[:, :, [1, 3]] = -1e9
    results = run(case, "cpu", inputs=x)
    hold(case, results, inputs=x)
    torch.testing.assert_close(results.lse[:, :, [1, 3]], x.sink[None, :, None].expand(1, 2, 2))


# --- what a call meets on its way ---


def inputs(*shape, **options):
    q, k, v = (torch.randn(2, 4, n, 8, requires_grad=True) for n in (5, 7, 7))
    return q, k, v, torch.randn(*shape, requires_grad=True, **options)


@pytest.mark.parametrize("shape", [(4,), (2, 4, 5), (1, 4, 1), (2, 1, 5), (1,), (1, 1, 1)])
@pytest.mark.parametrize("dtype", [HALF, BRAIN, FLOAT, DOUBLE])
def test_gradient_has_the_shape_and_dtype(shape, dtype):
    q, k, v, sink = inputs(*shape, dtype=dtype)
    for _ in range(2):  # the second call takes what the first prepared
        sink.grad = None
        attention(q, k, v, sink=sink).square().sum().backward()
        assert (sink.grad.shape, sink.grad.dtype) == (sink.shape, dtype)
    expected = torch.autograd.grad(attention(q, k, v, sink=sink, backend="reference").square().sum(), sink)[0]
    torch.testing.assert_close(sink.grad, expected, rtol=2e-2 if dtype in (HALF, BRAIN) else 1e-4, atol=1e-5)


def test_a_call_that_is_remembered_is_that_of_its_sink():
    q, k, v, sink = inputs(4)
    first = attention(q, k, v, sink=sink)
    for other in (sink + 1, sink[None, :, None].expand(2, 4, 5) - 1, None, sink.to(HALF), sink):
        found = attention(q, k, v, sink=other)
        torch.testing.assert_close(found, attention(q, k, v, sink=other, backend="reference"))
    torch.testing.assert_close(found, first, rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(4,), (2, 4, 5)])
def test_compile(shape):
    q, k, v, sink = inputs(*shape)

    def f(q, k, v, sink):
        return attention(q, k, v, sink=sink, causal=True, return_lse=True)

    torch._dynamo.reset()
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    for x in ((q, k, v, sink), (q, k, v, sink.detach().half().requires_grad_())):
        outputs = [g(*x) for g in (compiled, f)]
        torch.testing.assert_close(*outputs)
        torch.testing.assert_close(*(torch.autograd.grad((o.sum() + lse.sin().sum()), x) for o, lse in outputs))


@pytest.mark.parametrize("in_dims", [(0, 0, 0, 0), (None, None, None, 0), (0, None, None, None)])
def test_transforms(in_dims):
    stacked = [torch.randn(3, 2, 4, n, 6, dtype=DOUBLE) for n in (5, 7, 7)] + [torch.randn(3, 4, dtype=DOUBLE)]
    given = [x[0] if dim is None else x for x, dim in zip(stacked, in_dims, strict=True)]

    def loss(backend):
        return lambda q, k, v, sink: attention(q, k, v, sink=sink, backend=backend).square().sum()

    found, expected = (
        torch.vmap(torch.func.grad(loss(backend), argnums=(0, 1, 2, 3)), in_dims)(*given)
        for backend in ("cpu", "reference")
    )
    torch.testing.assert_close(found, expected)


def test_autocast_leaves_its_dtype():
    q, k, v, sink = inputs(4)
    with torch.autocast("cpu", BRAIN):
        o = attention(q, k, v, sink=sink)
    assert o.dtype == BRAIN
    (dsink,) = torch.autograd.grad(o.float().sum(), sink)
    assert dsink.dtype == FLOAT


def test_deterministic_repeats_bit_by_bit():
    q, k, v, sink = inputs(4)

    def gradients():
        return torch.autograd.grad(attention(q, k, v, sink=sink, deterministic=True).square().sum(), (q, k, v, sink))

    assert all(map(torch.equal, gradients(), gradients()))


def test_flops_and_explanation():
    q, k, v, sink = inputs(2, 4, 5)
    e, without = explain(q, k, v, sink=sink), explain(q, k, v)
    assert "sink (2, 4, 5) float32, with its gradient: one more logit in each row's softmax" in str(e)
    assert "sink (1, 4, 1) float32: one more" in str(explain(q, k, v, sink=torch.zeros(4)))
    assert (e.forward.flops, e.backward.flops) == (without.forward.flops, without.backward.flops)
    assert (e.forward.bytes - without.forward.bytes, e.backward.bytes - without.backward.bytes) == (160, 2 * 160)
    assert e.problem.sink == TensorSpec(FLOAT, 2, 4, 5, 1)
    assert "o is 0 and lse the sink" in str(explain(q, k[:, :, :0], v[:, :, :0], sink=sink))


def test_hopper_takes_it():
    meta = {"device": "meta", "dtype": BRAIN}
    q, k, v = (torch.empty(2, 4, 4096, 128, **meta) for _ in range(3))
    plan = explain(q, k, v, sink=torch.empty(4, **meta), device="sm_90").plan
    assert (plan.backend, plan.backward) == ("hopper", "hopper")
    for bias in ((1, 4, 4096, 1), (1, 1, 1, 1)):
        plan = explain(q, k, v, sink=torch.empty(4, **meta), bias=torch.empty(bias, **meta), device="sm_90").plan
        assert plan.backend == "triton"
        assert ("hopper", "takes no sink beside a bias that is constant along the keys") in plan.declined
    wide = explain(q, k, v, sink=torch.empty(4, device="meta", dtype=BRAIN), device="sm_90").problem
    wide = replace(wide, sink=TensorSpec(DOUBLE, 1, 4, 1, 1))
    assert sm90.declines(wide) == "reads a sink in float16, bfloat16 or float32, not float64"


SHAPES = "sink: expected one logit for each head, (4|1,), or for each query, (2|1, 4|1, 5|1), got shape "
BAD = [
    (0.5, TypeError, "sink: expected a torch.Tensor, got float"),
    (torch.zeros(4, dtype=torch.int32), TypeError,
     "sink: dtype must be float16, bfloat16, float32 or float64, got torch.int32"),
    (torch.zeros(4, device="meta"), ValueError, "sink: must be on q's device cpu, got meta"),
    (torch.zeros(3), ValueError, SHAPES + "(3,)"),
    (torch.zeros(()), ValueError, SHAPES + "()"),
    (torch.zeros(4, 1), ValueError, SHAPES + "(4, 1)"),
    (torch.zeros(2, 4, 7), ValueError, SHAPES + "(2, 4, 7)"),
    (torch.zeros(2, 4, 5, 1), ValueError, SHAPES + "(2, 4, 5, 1)"),
]  # fmt: skip


@pytest.mark.parametrize(("sink", "error", "message"), BAD, ids=lambda x: str(getattr(x, "shape", x))[:40])
def test_errors(sink, error, message):
    q, k, v, _ = inputs(4)
    for function in (attention, explain):
        with pytest.raises(error) as found:
            function(q, k, v, sink=sink)
        assert str(found.value) == message


def test_errors_of_other_arguments_come_first():
    q, k, v, sink = inputs(4)
    with pytest.raises(ValueError, match=r"^q: expected 4 dimensions"):
        attention(q[0], k, v, sink=sink)
    with pytest.raises(ValueError, match=r"^k: batch size"):
        attention(q, k[:1], v, sink=torch.zeros(9))


@pytest.mark.parametrize("name", ["s_aux", "sinks", "learnable_sink"])
def test_names_that_others_have(name):
    q, k, v, sink = inputs(4)
    with pytest.raises(TypeError, match=rf"unexpected keyword argument '{name}'; tilewise.attention takes sink="):
        attention(q, k, v, **{name: sink})


def test_the_door_of_pytorch_has_none():
    q, k, v, sink = inputs(4)
    with pytest.raises(TypeError, match="unexpected keyword argument 'sink'"):
        tilewise.scaled_dot_product_attention(q, k, v, sink=sink)
