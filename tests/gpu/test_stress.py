"""What only a device has: offsets past 2³¹ elements, bits that may differ, memory, streams, graphs, a compiler."""

from __future__ import annotations

import math
import threading
from dataclasses import replace

import pytest
import torch
from helpers import NAMES, Case, Results, Tensors, call, differentiate, hold, poisoned_memory, run, tensors

from tilewise import attention, explain, matmul, plan
from tilewise.backends import Inputs, Needs
from tilewise.spec.score import Band, Score, ScoreNumbers

BRAIN = torch.bfloat16
FULL = Case(B=4, H=16, M=2048, N=2048, D=128, dtype=BRAIN)
SMALL = Case(B=2, H=4, M=239, N=432, D=64, dtype=BRAIN, bias="1hmn", causal=True)

# More tiles of queries than multiprocessors, taken from a counter.
LARGE = replace(SMALL, B=8, H=16, M=700, N=712)

HOPPER = pytest.param(
    "hopper",
    marks=pytest.mark.skipif(torch.cuda.get_device_capability() != (9, 0), reason="needs compute capability 9.0"),
)
BACKENDS = ["triton", HOPPER]


def normal(*shape, dtype=BRAIN):
    return torch.randn(shape, device="cuda", dtype=dtype)


def heads(x, which):
    return None if x is None else x if x.shape[1] == 1 else x[:, which]


def of_heads(results, which):
    return Results(*(heads(x, which) for x in results))


# --- element offsets past 2³¹ ---


@pytest.mark.parametrize("backend", BACKENDS)
def test_queries_past_two_to_the_31(backend):
    """q, o and their gradients pass 2³¹ elements; rows near both ends and at the border have a cotangent."""
    M, N, D = 2**23 + 200, 64, 128
    rows = torch.cat([torch.arange(n, n + 100, device="cuda") for n in (0, 2**23 - 50, M - 100)])
    q, k, v = normal(1, 2, M, D), normal(1, 2, N, D), normal(1, 2, N, D)
    do, dlse = torch.zeros_like(q), torch.zeros(1, 2, M, device="cuda")
    do[:, :, rows] = normal(1, 2, len(rows), D)
    dlse[:, :, rows] = normal(1, 2, len(rows), dtype=torch.float32)
    case = Case(B=1, H=2, M=M, N=N, D=D, dtype=BRAIN)
    assert q.numel() > 2**31
    assert explain(q, k, v, backend=backend).plan.backward == backend
    o, lse, dq, dk, dv, *_ = run(case, backend, "cuda", Tensors(q, k, v, None, None, do, dlse))
    assert o.isfinite().all()
    part = Tensors(q[:, :, rows], k, v, None, None, do[:, :, rows], dlse[:, :, rows])
    results = Results(o[:, :, rows], lse[:, :, rows], dq[:, :, rows], dk, dv, None)
    hold(replace(case, M=len(rows)), results, "cuda", part)
    dq[:, :, rows] = 0
    assert not dq.any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_keys_past_two_to_the_31(backend):
    M = 64 if backend == "triton" else 128  # so few beside many keys are not for hopper
    case = Case(B=1, H=32, M=M, N=2**19 + 200, D=128, dtype=BRAIN)
    inputs = tensors(case, "cuda")
    assert inputs.k.numel() > 2**31
    assert explain(*inputs[:3], backend=backend).plan.backward == backend
    results = run(case, backend, "cuda", inputs)
    assert all(x.isfinite().all() for x in results if x is not None)
    for head in (0, 31):
        part = slice(head, head + 1)
        hold(replace(case, H=1), of_heads(results, part), "cuda", Tensors(*(heads(x, part) for x in inputs)))


@pytest.mark.parametrize("bias", ["bhmn", "11mn"])
@pytest.mark.parametrize("transposed", [False, True])
def test_strides_past_two_to_the_31(bias, transposed):
    """Rows 2²³ elements apart (transposed: columns of the bias and the mask): offsets inside a tile need 64 bits."""
    case = Case(B=1, H=2, M=300, N=300, D=64, dtype=BRAIN, bias=bias, mask="1hmn")
    small = tensors(case, "cuda")
    numbers = torch.full((300, 2**23), math.nan, dtype=BRAIN, device="cuda")
    flags = torch.ones((300, 2**23), dtype=torch.bool, device="cuda")
    spread, at = [], 8
    for name, x in zip(small._fields[:5], small, strict=False):
        _, count, rows, cols = x.shape
        view = (flags if name == "mask" else numbers)[:rows, at : at + count * cols]
        view = view.unflatten(1, (count, cols)).transpose(0, 1)[None]
        if transposed and name in ("bias", "mask"):
            view = view.mT
        spread.append(view.copy_(x))
        at += count * cols
    assert 299 * spread[3].stride(3 if transposed else 2) > 2**31
    hold(case, run(case, "triton", "cuda", Tensors(*spread, small.do, small.dlse)), "cuda")


@HOPPER.marks[0]
def test_a_bias_of_keys_far_apart():
    """Columns 2²⁵ elements apart, read by pointer: offsets inside a tile of keys need 64 bits."""
    case = Case(B=1, H=2, M=130, N=130, D=64, dtype=BRAIN, bias="111n")
    small = tensors(case, "cuda")
    spread = torch.full((130, 2**25), math.nan, dtype=BRAIN, device="cuda")
    bias = spread[:, :1].T[None, None].copy_(small.bias)
    assert 127 * bias.stride(3) > 2**31
    assert explain(*small[:3], bias=bias, backend="hopper").plan.backward == "hopper"
    hold(case, run(case, "hopper", "cuda", small._replace(bias=bias)), "cuda")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_bias_past_two_to_the_31(backend):
    """Heads of a bias 2³¹ elements apart, and one whose own elements are more than that."""
    case = Case(B=1, H=2, M=512, N=512, D=64, dtype=BRAIN, bias="1hmn")
    small = tensors(case, "cuda")
    buffer = torch.full((2**31 + 512 * 512,), math.nan, dtype=BRAIN, device="cuda")
    bias = buffer.as_strided(small.bias.shape, (0, 2**31, 512, 1)).copy_(small.bias)
    assert explain(*small[:3], bias=bias.detach().requires_grad_(), backend=backend).plan.backward == backend
    for deterministic in (False, True):
        case = replace(case, deterministic=deterministic)
        hold(case, run(case, backend, "cuda", small._replace(bias=bias)), "cuda", small)
    del buffer, bias

    case = Case(B=1, H=9, M=16384, N=16384, D=64, dtype=BRAIN, bias="bhmn", lse=False, grads="qb")
    inputs = tensors(case, "cuda")
    assert inputs.bias.numel() > 2**31
    results = run(case, backend, "cuda", inputs)
    rows = torch.cat([torch.arange(n, n + 32, device="cuda") for n in (0, 8000, 16384 - 32)])
    for head in (0, 8):
        q, k, v, bias, _, do, dlse, _ = (heads(x, slice(head, head + 1)) for x in inputs)
        some = Tensors(q[:, :, rows], k, v, bias[:, :, rows], None, do[:, :, rows], dlse[:, :, rows])
        o, lse, dq, dbias = (x[:, :, rows] for x in of_heads(results, slice(head, head + 1)) if x is not None)
        hold(replace(case, H=1, M=len(rows), grads="qb"), Results(o, lse, dq, None, None, dbias), "cuda", some)


# --- bits ---


REPEATED = [
    replace(FULL, grads="", **terms)
    for terms in (
        {}, {"causal": True}, {"bias": "1hmn"}, {"bias": "bhmn"}, {"bias": "1hmn", "causal": True},
        {"D": 64, "bias": "1hmn"}, {"D": 64, "causal": True}, {"D": 256, "bias": "1hmn"}, {"bias": "b11n"},
    )
]  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", REPEATED, ids=str)
def test_forward_repeats_bit_by_bit(case, backend):
    """A pipeline whose slot is filled too early shows here, and at small sizes it may not."""
    inputs = tensors(case, "cuda")
    first = run(case, backend, "cuda", inputs)
    for _ in range(200):
        again = run(case, backend, "cuda", inputs)
        assert torch.equal(again.o, first.o)
        assert torch.equal(again.lse, first.lse)


BACKWARDS = [
    replace(FULL, **terms)
    for terms in (
        {}, {"causal": True}, {"bias": "1hmn"}, {"bias": "bhmn"}, {"bias": "1hmn", "causal": True},
        {"D": 64, "bias": "bhmn"}, {"D": 64, "bias": "1hmn"}, {"D": 64, "causal": True}, {"Hkv": 4, "causal": True},
        {"D": 256}, {"D": 256, "causal": True}, {"D": 256, "bias": "1hmn"}, {"D": 256, "bias": "bhmn"},
        {"D": 256, "Hkv": 4, "bias": "b11n"},
    )
]  # fmt: skip


@HOPPER.marks[0]
@pytest.mark.parametrize("case", BACKWARDS, ids=str)
def test_hopper_backward_repeats(case):
    """What one program sums in one order repeats bit by bit; dQ and a shared dBias to the rounding of their sums."""
    inputs = tensors(case, "cuda")
    x = inputs.q, inputs.k, inputs.v
    bias = None if inputs.bias is None else inputs.bias.detach().requires_grad_()
    assert explain(*x, bias=bias, **case.terms, backend="hopper").plan.backward == "hopper"
    first = run(case, "hopper", "cuda", inputs)
    least, most = (None, None) if case.bias != "1hmn" else sums_of_dbias(case, inputs)
    for _ in range(100):
        again = run(case, "hopper", "cuda", inputs)
        assert torch.equal(again.dk, first.dk)
        assert torch.equal(again.dv, first.dv)
        torch.testing.assert_close(again.dq, first.dq, rtol=2e-2, atol=1e-4)
        if case.bias == "bhmn":
            assert torch.equal(again.dbias, first.dbias)
        elif least is not None:
            assert ((least <= again.dbias) & (again.dbias <= most)).all()
        elif case.bias is not None:
            torch.testing.assert_close(again.dbias, first.dbias, rtol=2e-2, atol=1e-4)


def sums_of_dbias(case, inputs):
    """The least and the most that the dBias of single batch elements can add up to, in any order, where each addition
    rounds: B - 1 unit roundoffs of the sum of their sizes (Higham, Accuracy and Stability of Numerical Algorithms)."""
    of_each = inputs._replace(bias=inputs.bias.expand(case.B, -1, -1, -1).contiguous())
    each = run(replace(case, bias="bhmn"), "hopper", "cuda", of_each).dbias
    n = (case.B - 1) * torch.finfo(each.dtype).eps / 2
    each = each.float()
    off = n / (1 - n) * each.abs().sum(0, keepdim=True) + 1e-6
    total = each.sum(0, keepdim=True)
    return total - off, total + off


@pytest.mark.parametrize("terms", [{}, {"bias": "1hmn"}, {"bias": "b11n", "causal": True}, {"D": 256}], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_deterministic_backward_repeats_bit_by_bit(terms, backend):
    case = replace(FULL, deterministic=True, **terms)
    inputs = tensors(case, "cuda")
    first = run(case, backend, "cuda", inputs)
    for _ in range(100):
        for name, x, y in zip(NAMES, run(case, backend, "cuda", inputs), first, strict=True):
            assert y is None or torch.equal(x, y), name


def test_a_second_call_elsewhere_in_memory():
    """Equal shapes and strides, once at an address of 16 bytes' alignment and once not, in both orders."""
    for first in (0, 1):
        case = replace(SMALL, scale=0.1 + first)
        inputs = tensors(case, "cuda")
        for offset in (first, 1 - first, first):
            moved = []
            for x in inputs:
                buffer = None if x is None else x.new_empty(x.numel() + 8)
                moved.append(None if x is None else buffer[offset : offset + x.numel()].view_as(x).copy_(x))
            hold(case, run(case, "triton", "cuda", Tensors(*moved)), "cuda", inputs)


# --- memory ---


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("bias", ["1hmn", "b11n", "11mn"])
def test_no_buffer_of_all_scores(bias, deterministic):
    """Peak memory is results, the float32 sums of dQ and dBias, dO times a factor of each row (`unrounding`), and a
    little: no B·H·M·N anywhere."""
    case = Case(B=16, H=16, M=2048, N=2048, D=64, dtype=BRAIN, bias=bias, deterministic=deterministic)
    inputs = tensors(case, "cuda")
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = differentiate(case, inputs, lambda x: call(case, "triton", x))
    torch.cuda.synchronize()
    used = torch.cuda.max_memory_allocated() - before
    buffers = 4 * (results.dq.numel() + results.dbias.numel()) + 2 * results.o.numel()
    expected = sum(x.numel() * x.element_size() for x in results if x is not None) + buffers
    scores = case.B * case.H * case.M * case.N
    assert used < expected + 32 * 2**20
    assert used < scores, "bytes: half of what the scores would take in 16 bits"


# --- streams, graphs, compilers ---


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", [SMALL, LARGE], ids=["small", "large"])
def test_another_stream(case, backend):
    """Inputs arrive late, on the stream that is current: a kernel on any other stream would read NaN."""
    inputs = tensors(case, "cuda")
    late = Tensors(*(None if x is None else torch.full_like(x, math.nan) for x in inputs))
    run(case, backend, "cuda", inputs)  # compiled, so that the launches come at once
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(500_000_000)
        for x, y in zip(late, inputs, strict=True):
            if x is not None:
                x.copy_(y)
        results = differentiate(case, late, lambda x: call(case, backend, x))
    stream.synchronize()
    hold(case, results, "cuda")


@HOPPER.marks[0]
@pytest.mark.parametrize("terms", [{}, {"D": 128}, {"D": 128, "deterministic": True}], ids=str)
def test_beside_another_stream(terms):
    """Programs wait for each other, and some of them begin only when another stream's kernels let them."""
    case = replace(LARGE, bias=None, **terms)
    x = tensors(case, "cuda")
    first = run(case, "hopper", "cuda", x)
    a = normal(8192, 8192)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    for _ in range(20):
        with torch.cuda.stream(stream):
            a @ a
        again = run(case, "hopper", "cuda", x)
        for name in ("dq", "dk", "dv") if case.deterministic else ("dk", "dv"):
            assert torch.equal(getattr(again, name), getattr(first, name)), name


@pytest.mark.parametrize("operator", [matmul, lambda a, b: attention(a, b, b)], ids=["matmul", "attention"])
def test_a_thread_without_a_context(operator):
    """As autograd's are, where the allocator has all memory that they ask for: descriptors of new tensors are made."""
    first, second = ((normal(2, 4, 256, 256), normal(2, 4, 256, 256)) for _ in range(2))
    operator(*first)  # compiled; the memory of its result is free
    found = []
    thread = threading.Thread(target=lambda: found.append(operator(*second)))
    thread.start()
    thread.join()
    assert torch.equal(found[0], operator(*second))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("case", [SMALL, LARGE], ids=["small", "large"])
def test_cuda_graph(case, deterministic, backend):
    """Forward and backward captured once, replayed with other numbers."""
    case = replace(case, deterministic=deterministic)
    static = tensors(case, "cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        differentiate(case, static, lambda x: call(case, backend, x))
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = differentiate(case, static, lambda x: call(case, backend, x))
    for draw in (1, 2):
        fresh = tensors(case, "cuda", draw=draw)
        for x, y in zip(static, fresh, strict=True):
            if x is not None:
                x.copy_(y)
        for x in results:
            if x is not None:
                x.fill_(math.nan)
        graph.replay()
        torch.cuda.synchronize()
        hold(case, results, "cuda", fresh)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_plan_in_a_cuda_graph(backend):
    q, k, v = (torch.randn(2, 4, 200, 64, device="cuda", dtype=BRAIN) for _ in range(3))
    bias = torch.randn(1, 4, 200, 200, device="cuda", dtype=BRAIN)
    planned = plan(q, k, v, bias=bias, causal=True, backend=backend)
    planned.run(q, k, v, bias=bias)  # compiles the kernels
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = planned.run(q, k, v, bias=bias)
    for x in (q, k, v, bias):
        x.normal_()
    graph.replay()
    assert torch.equal(o, attention(q, k, v, bias=bias, causal=True, backend=backend))


# PyTorch's compiler warns of its own doings, differently in each release.
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(dynamic, backend):
    """The operator stays opaque: the same bits, without a graph break."""
    torch._dynamo.reset()

    def around(x):
        o, lse = attention(2 * x.q, x.k, x.v, bias=x.bias, causal=True, return_lse=True, deterministic=True,
                           backend=backend)  # fmt: skip
        return o.transpose(1, 2).contiguous().transpose(1, 2), lse + 1.0

    compiled = torch.compile(around, fullgraph=True, dynamic=dynamic)
    for M, N in ((239, 432), (431, 584)):
        case = replace(SMALL, M=M, N=N)
        inputs = tensors(case, "cuda")
        eager, graph = (differentiate(case, inputs, function) for function in (around, compiled))
        for name, x, y in zip(NAMES, graph, eager, strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=0, msg=lambda message, name=name: f"{name}: {message}")
    torch._dynamo.reset()


OPERATOR_CASES = [
    replace(SMALL, dtype=torch.float32),
    replace(SMALL, bias="b11n", mask="b1mn", causal=False, layout="heads_last"),
]


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("case", OPERATOR_CASES, ids=str)
def test_opcheck(case):
    """Shapes, dtypes and strides of the fake kernels; autograd; no input written."""
    x = tensors(case, "cuda")
    band = Band(None, case.N - case.M if case.causal else None)
    terms = ScoreNumbers.of(Score(0.125, None, band), True, "triton")
    leaves = [y.detach().requires_grad_() for y in x[:4]]
    torch.library.opcheck(torch.ops.tilewise.attention.default, (*Inputs(*leaves, x.mask).flat(), *terms))
    inputs = Inputs(*(y.detach() for y in leaves), x.mask).flat()
    o, lse, o_low, _ = torch.ops.tilewise.attention(*inputs, *terms)
    torch.library.opcheck(
        torch.ops.tilewise.attention_backward.default,
        (x.do, x.dlse, *inputs, o, lse, o_low, *terms, [*Needs(True, True, True, True)]),
    )


def test_poisoned_memory_on_the_device():
    with poisoned_memory("cuda"):
        assert torch.empty(3, 5, device="cuda").isnan().all()
