"""The two operators as PyTorch sees them: opcheck, torch.compile, gradients on demand, layouts, empty calls."""

import itertools
import math

import pytest
import torch
import torch._inductor.config as inductor
from helpers import cached, compute_by, empty_cache, opcheck
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from tilewise import attention
from tilewise.backends import INPUT_NAMES, Gradients, Inputs, Needs, cpu
from tilewise.frontend import call_cache
from tilewise.operator import autograd
from tilewise.spec.bias_components import Parts
from tilewise.spec.score import Band, Score, ScoreNumbers

TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}


def tensors(B=2, H=4, Hkv=2, M=5, N=7, D=8, Dv=6, dtype=torch.float32, requires_grad=True):
    torch.manual_seed(0)
    return [
        torch.randn(shape, dtype=dtype, requires_grad=requires_grad)
        for shape in ((B, H, M, D), (B, Hkv, N, D), (B, Hkv, N, Dv))
    ]


# --- the operators ---

OPERATOR_CASES = {
    "plain": {},
    "causal with a bias": {"bias": (1, 4, 5, 7), "hi": 2},
    "mask and window": {"mask": (2, 1, 5, 7), "lo": -2, "hi": 3},
    "bias of key/value heads, softcap": {"bias": (2, 2, 1, 7), "softcap": 3.0, "deterministic": True},
    "float64": {"dtype": torch.float64, "bias": (1, 1, 1, 1), "mask": (1, 1, 1, 7)},
    "half with a float32 bias": {"dtype": torch.float16, "bias": (1, 4, 5, 7)},
    "values as wide as keys": {"Dv": 8},
    "values as wide as keys, heads last": {"Dv": 8, "M": 7, "Hkv": 4, "hi": 0, "heads_last": True},
    "heads last": {"heads_last": True, "bias": (1, 1, 5, 7)},
    "sliced and expanded": {"sliced": True, "bias": (1, 4, 5, 7)},
    "sink of heads": {"sink": (1, 4, 1), "hi": 2},
    "sink of queries, bias and mask": {"sink": (2, 4, 5), "bias": (1, 4, 5, 7), "mask": (1, 1, 5, 7), "softcap": 3.0},
    "one sink in half": {"dtype": torch.float16, "sink": (1, 1, 1)},
    "sink without keys": {"N": 0, "sink": (2, 1, 5)},
    "dropout": {"dropped": 6554, "hi": 2, "bias": (1, 4, 5, 7)},
    "no queries": {"M": 0, "bias": (1, 4, 1, 7)},
    "statistics": {"bias": (1, 4, 5, 7), "statistics": 7},
    "no keys": {"N": 0},
}


def operator_arguments(case, requires_grad):
    case = dict(case)
    bias, mask, sink = (case.pop(name, None) for name in ("bias", "mask", "sink"))
    terms = [case.pop(name, default) for name, default in
             (("lo", None), ("hi", None), ("scale", 0.4), ("softcap", None), ("deterministic", False))]  # fmt: skip
    dropped, statistics = case.pop("dropped", 0), case.pop("statistics", 0)
    heads_last, sliced = case.pop("heads_last", False), case.pop("sliced", False)
    q, k, v = tensors(**case, requires_grad=False)
    if heads_last:
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    if sliced:
        q, k, v = torch.cat([q, q], -1)[..., : q.shape[3]], k[:, :1].expand_as(k), v.repeat(1, 1, 2, 1)[:, :, ::2]
    for x in (q, k, v):
        x.requires_grad_(requires_grad)
    bias_dtype = torch.float32 if q.dtype == torch.float16 else q.dtype
    return (
        q, k, v,
        None if bias is None else torch.randn(bias, dtype=bias_dtype, requires_grad=requires_grad),
        None if mask is None else torch.rand(mask) < 0.7,
        None if sink is None else torch.randn(sink, dtype=bias_dtype, requires_grad=requires_grad),
        *[None] * len(Parts._fields), torch.tensor([1, 2]) if dropped else None, *[None] * (len(INPUT_NAMES) - 16),
        *terms, False, "auto", *(None, None, "") * 2, dropped, None, None, "", *[5 * (dropped > 0)] * 3, None, None, "",
        statistics,
    )  # fmt: skip


# Those that are traced with symbols for sizes as well, which is nearly all of opcheck's time: between them every
# optional tensor, every layout, and no elements.
TRACED = {
    "plain", "bias of key/value heads, softcap", "values as wide as keys, heads last", "sliced and expanded",
    "sink of queries, bias and mask", "dropout", "no keys",
}  # fmt: skip
each_operator_case = pytest.mark.parametrize("name", OPERATOR_CASES)


@each_operator_case
def test_opcheck_forward(name):
    arguments = operator_arguments(OPERATOR_CASES[name], requires_grad=True)
    opcheck(torch.ops.tilewise.attention.default, arguments, name in TRACED)


@each_operator_case
@pytest.mark.parametrize("use_lse", [False, True])
def test_opcheck_backward(name, use_lse):
    arguments = operator_arguments(OPERATOR_CASES[name], requires_grad=False)
    inputs, terms = arguments[: len(INPUT_NAMES)], arguments[len(INPUT_NAMES) :]
    o, lse, o_low, _ = torch.ops.tilewise.attention(*inputs, *terms)
    dlse = torch.randn_like(lse) if use_lse else None
    needs = [*Needs(True, use_lse, True, inputs[3] is not None, inputs[5] is not None)]
    opcheck(
        torch.ops.tilewise.attention_backward.default,
        (torch.randn_like(o), dlse, *inputs, o, lse, o_low, *terms, needs),
        traced=name in TRACED and use_lse == (name != "plain"),
    )


# --- torch.compile ---


@pytest.fixture
def fresh_dynamo():
    """Nothing compiled before counts, nor what is on disk: Inductor's cache does not see a change of a fake kernel."""
    torch._dynamo.reset()
    counters.clear()
    with inductor.patch(fx_graph_cache=False):
        yield
    torch._dynamo.reset()


def biased(q, k, v, bias, mask):
    """What a model does around the call as well: transposes before and after."""
    o, lse = attention(q, k, v, bias=bias, mask=mask, causal=True, window=(6, None), softcap=9.0, return_lse=True)
    return o.transpose(1, 2).flatten(2), lse


def biased_inputs(length):
    """Lengths that are no other dimension: dynamic shapes take equal sizes for one size."""
    q, k, v = tensors(M=length, N=length + 1)
    bias = torch.randn(1, 4, length, length + 1, requires_grad=True)
    return q, k, v, bias, torch.rand(2, 1, 1, length + 1) < 0.8


def values_and_gradients(function, inputs):
    leaves = [x for x in inputs if x.requires_grad]
    o, lse = function(*inputs)
    loss = o.square().sum() + lse.masked_fill(lse == -math.inf, 0.0).sin().sum()
    return o, lse, *torch.autograd.grad(loss, leaves)


def check_compiled(compiled, length, function=biased, more=()):
    inputs = *biased_inputs(length), *more
    for x, expected in zip(values_and_gradients(compiled, inputs), values_and_gradients(function, inputs), strict=True):
        torch.testing.assert_close(x, expected, **TOLERANCE)


@pytest.mark.parametrize(("dynamic", "more_graphs"), [(True, 0), (None, 1), (False, 2)])
def test_compile_makes_no_graph_for_each_length(fresh_dynamo, dynamic, more_graphs):
    """dynamic=True: one graph for all lengths. By default: one for the first length, one for all others."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(biased, backend=counter, fullgraph=True, dynamic=dynamic)
    check_compiled(compiled, 11)
    before = counter.frame_count
    for length in (17, 9):
        check_compiled(compiled, length)
    assert counter.frame_count == before + more_graphs
    assert not counters["graph_break"]


@pytest.mark.parametrize("dynamic", [True, None])
def test_compile_with_numbers_made_from_shapes(fresh_dynamo, dynamic):
    """A scale and a window that a model computes from sizes are symbols in a graph."""

    def from_sizes(q, k, v):
        return attention(q, k, v, scale=q.shape[3] ** -0.5, window=(q.shape[2] // 2, None))

    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(from_sizes, backend=counter, fullgraph=True, dynamic=dynamic)
    with torch.no_grad():
        for length in (11, 17, 30):
            inputs = tensors(M=length, N=length)
            torch.testing.assert_close(compiled(*inputs), from_sizes(*inputs), **TOLERANCE)
    assert counter.frame_count <= 2


def test_compile_for_inference_and_a_changing_number_of_keys(fresh_dynamo):
    """Decoding: one query, ever more keys, the cache grows; no length compiles anew after the second."""
    counter = CompileCounterWithBackend("eager")

    @torch.compile(backend=counter, fullgraph=True)
    def step(q, k, v):
        return attention(q, k, v, causal=True)

    with torch.no_grad():
        for keys in (11, 12, 13, 30, 64):
            q, k, v = tensors(M=1, N=keys, requires_grad=False)
            torch.testing.assert_close(step(q, k, v), attention(q, k, v, causal=True), **TOLERANCE)
    assert counter.frame_count == 2


def beside_products(q, k, v, bias, mask, weight, other):
    """Products and views, which Inductor leaves to PyTorch: what it writes in C++ takes a compiler 20 seconds."""
    o, lse = attention(q @ weight, k, v @ other, bias=bias, mask=mask, causal=True, return_lse=True)
    return o.transpose(1, 2), lse


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # PyTorch's own use
def test_compile_with_inductor(fresh_dynamo):
    """The default backend: the operator stays opaque, strides of its outputs are what the fake kernel said."""
    compiled = torch.compile(beside_products, fullgraph=True, dynamic=True)
    for length in (11, 17):
        weights = [torch.randn(size, size, requires_grad=True) for size in (8, 6)]
        check_compiled(compiled, length, beside_products, weights)


# --- which gradients ---


class Spy:
    """Stands in for a backend's two functions, keeps what they were asked for, and calls them."""

    def __init__(self, monkeypatch):
        self.needs, self.cotangents, self.problems = [], [], []
        forward, backward = cpu.forward, cpu.backward

        def spied_forward(problem, inputs):
            self.problems.append(problem)
            return forward(problem, inputs)

        def spied_backward(problem, inputs, outputs, cotangents, needs):
            self.problems.append(problem)
            self.needs.append(tuple(needs))
            self.cotangents.append(cotangents)
            gradients = backward(problem, inputs, outputs, cotangents, needs)
            assert isinstance(gradients, Gradients)
            assert tuple(g is not None for g in gradients) == tuple(needs)
            return gradients

        compute_by(monkeypatch, cpu, forward=spied_forward, backward=spied_backward)


@pytest.fixture
def spy(monkeypatch):
    return Spy(monkeypatch)


@pytest.mark.parametrize("wanted", [(3,), (0,), (1,), (2,), (4,), (0, 3), (1, 2), (0, 1, 2), (0, 1, 2, 3, 4)])
@pytest.mark.parametrize("Dv", [6, 8])
def test_gradients_only_for_what_asks_for_one(spy, wanted, Dv):
    inputs = [*tensors(Dv=Dv, requires_grad=False), torch.randn(1, 4, 5, 7), torch.randn(4)]
    everything = [x.clone().requires_grad_() for x in inputs]
    o = attention(*everything[:3], bias=everything[3], sink=everything[4])
    expected = torch.autograd.grad(o.square().sum(), everything)
    for n in wanted:
        inputs[n].requires_grad_()
    q, k, v, bias, sink = inputs
    attention(q, k, v, bias=bias, sink=sink).square().sum().backward()
    assert spy.needs[-1] == Needs(*(n in wanted for n in range(5)))
    assert (spy.problems[-1].bias_grad, spy.problems[-1].sink_grad) == (3 in wanted, 4 in wanted)
    for n, x in enumerate(inputs):
        if n in wanted:
            torch.testing.assert_close(x.grad, expected[n], **TOLERANCE)
        else:
            assert x.grad is None


def test_only_the_lse_is_used(spy):
    """do is zero then, and dlse alone gives what autograd gives for a plain logsumexp."""
    q, k, v = tensors(Hkv=4, dtype=torch.float64)
    _, lse = attention(q, k, v, return_lse=True)
    cotangent = torch.randn_like(lse)
    grads = torch.autograd.grad(lse, (q, k, v), cotangent)
    expected = torch.autograd.grad(torch.logsumexp(q @ k.mT / math.sqrt(8), -1), (q, k), cotangent)
    assert (spy.cotangents[-1].o == 0).all()
    for x, y in zip(grads, expected, strict=False):
        torch.testing.assert_close(x, y, rtol=1e-10, atol=1e-12)
    assert (grads[2] == 0).all()


def test_only_the_output_is_used(spy):
    """The cotangent of an LSE that nothing uses is None, not zeros."""
    q, k, v = tensors()
    o, _ = attention(q, k, v, return_lse=True)
    o.sum().backward()
    assert spy.cotangents[-1].lse is None


class Stop(torch.autograd.Function):
    """Has a place in the graph and no gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return None


def test_nothing_is_computed_where_no_gradient_arrives(spy):
    q, k, v = tensors()
    o, lse = attention(q, k, v, return_lse=True)
    (Stop.apply(o).sum() + Stop.apply(lse).sum()).backward()
    assert [x.grad for x in (q, k, v)] == [None] * 3
    assert spy.needs == []


def test_no_graph_without_a_need_for_one():
    q, k, v = tensors(requires_grad=False)
    assert not attention(q, k, v).requires_grad
    q, k, v = tensors()
    with torch.no_grad():
        assert not attention(q, k, v).requires_grad


def test_an_expanded_bias_gets_its_gradient_through_autograd():
    """A bias that the caller expanded is a full one here; autograd sums its gradient over the expansion."""
    q, k, v = tensors()
    bias = torch.randn(4, 1, 7, requires_grad=True)
    (expected,) = torch.autograd.grad(attention(q, k, v, bias=bias).square().sum(), bias)
    (grad,) = torch.autograd.grad(attention(q, k, v, bias=bias.expand(2, 4, 5, 7)).square().sum(), bias)
    torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-5)


def test_backward_twice_and_in_place_changes():
    """What is saved is guarded: an input changed in place between forward and backward is an error."""
    q, k, v = tensors()
    o = attention(q, k, v)
    first = torch.autograd.grad(o.sum(), q, retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(o.sum(), q, retain_graph=True), first, rtol=0, atol=0)
    with torch.no_grad():
        k.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(o.sum(), q)


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("by_default", [True, False])
def test_deterministic_reaches_the_problem(spy, deterministic, by_default):
    was = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(deterministic if by_default else not deterministic)
    try:
        attention(*tensors(), deterministic=None if by_default else deterministic).sum().backward()
    finally:
        torch.use_deterministic_algorithms(was)
    assert [problem.deterministic for problem in spy.problems] == [deterministic] * 2  # forward and backward


# --- eager calls, and who looks on ---


def test_an_eager_call_is_the_operator():
    """An eager call takes a shorter way: the same numbers, bit for bit."""
    inputs = [*tensors(), torch.randn(1, 4, 5, 7, requires_grad=True), torch.rand(1, 1, 5, 7) < 0.7]
    inputs.append(torch.randn(1, 4, 1, requires_grad=True))
    score = Score(0.4, 5.0, Band(-3, 2))
    leaves = [x for x in inputs if x.requires_grad]

    def loss_of(o, lse):
        return o.square().sum() + lse.masked_fill(lse == -math.inf, 0.0).sum()

    *eager, _ = autograd.attention_op(Inputs(*inputs), score, False, "auto")
    operator = torch.ops.tilewise.attention(*Inputs(*inputs).flat(), *ScoreNumbers.of(score, False, "auto"))[:2]
    pairs = [*zip(eager, operator, strict=True)]
    pairs += zip(*(torch.autograd.grad(loss_of(*out), leaves) for out in (eager, operator)), strict=True)
    for x, expected in pairs:
        torch.testing.assert_close(x, expected, rtol=0, atol=0)


def test_tracers_see_the_operator():
    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    seen = []
    with Log():
        attention(*tensors()).sum().backward()
    assert "tilewise.attention.default" in seen
    assert "tilewise.attention_backward.default" in seen


def test_tensors_that_outlive_their_transform():
    """Wrapped by torch.func.grad and leaked from it: as the tensor inside."""

    def leak(x):
        leaked.append(x)
        return x.sum()

    leaked = []
    q, k, v = tensors()
    torch.func.grad(leak)(q.detach())
    assert torch.equal(attention(leaked[0], k, v), attention(q, k, v))
    with torch.no_grad():
        assert torch.equal(attention(leaked[0], k, v), attention(q, k, v))


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:Converting a tensor to a Python:torch.jit.TracerWarning")
def test_a_traced_call_is_the_operator():
    """Not the products of which the call with these very tensors was made: here the mask leaves nothing to do."""
    q, k, v = tensors(requires_grad=False)

    def call(q, mask):
        return attention(q, k, v, mask=mask, softcap=3.0)

    traced = torch.jit.trace(call, (q, torch.zeros(1, 1, 5, 7, dtype=torch.bool)), check_trace=False)
    assert "tilewise::attention" in str(traced.graph)
    mask = torch.rand(1, 1, 5, 7) < 0.6
    assert torch.equal(traced(q, mask), call(q, mask))


def test_without_the_lse_gradients_are_the_same():
    """The lse is no output then; what is saved of it serves the backward all the same."""
    leaves = tensors()
    o, _ = attention(*leaves, return_lse=True)
    expected = torch.autograd.grad(o.square().sum(), leaves)
    for x, y in zip(torch.autograd.grad(attention(*leaves).square().sum(), leaves), expected, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("return_lse", [True, False])
def test_saved_tensors_may_come_back_in_another_layout(return_lse):
    """Hooks on what is saved (offloading, compression) decide its strides and addresses."""
    leaves = tensors()
    inputs = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in leaves]

    def loss(q, k, v):
        out = attention(q, k, v, causal=True, return_lse=return_lse)
        return out[0].square().sum() + out[1].square().sum() if return_lse else out.square().sum()

    expected = torch.autograd.grad(loss(*inputs), inputs)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: x.clone(memory_format=torch.contiguous_format), lambda x: x
    ):
        found = torch.autograd.grad(loss(*inputs), inputs)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, **TOLERANCE)


def test_fake_and_meta_tensors_give_shapes():
    q, k, v = tensors(requires_grad=False)
    with FakeTensorMode() as mode:
        o, lse = attention(*(mode.from_tensor(x) for x in (q, k, v)), return_lse=True)
    meta = attention(*(x.to("meta").requires_grad_() for x in (q, k, v)), return_lse=True)
    for out in ((o, lse), meta):
        assert [tuple(x.shape) for x in out] == [(2, 4, 5, 6), (2, 4, 5)]
    assert meta[0].is_meta


def test_what_a_call_leaves_behind_does_not_answer_another():
    """Plans are kept by all that they depend on: another dtype or another term is another call."""
    q, k, v = tensors(requires_grad=False)
    mask = torch.rand(1, 1, 5, 7) < 0.6
    calls = [{}, {"causal": True}, {"scale": 0.1}, {"softcap": 1.0}, {"window": (1, 1)}, {"mask": mask}]
    results = [attention(q, k, v, **terms) for terms in calls]
    for i, j in itertools.combinations(range(len(calls)), 2):
        assert not torch.equal(results[i], results[j])
    for terms, expected in zip(calls, results, strict=True):
        assert torch.equal(attention(q, k, v, **terms), expected)
        torch.testing.assert_close(attention(*(x.double() for x in (q, k, v)), **terms).float(), expected, **TOLERANCE)
    with pytest.raises(TypeError, match=r"^mask: dtype must be bool"):
        attention(q, k, v, mask=mask.float())


# --- layouts and dtypes ---


@pytest.mark.parametrize("heads_first", [True, False])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_the_output_has_the_layout_of_q(heads_first, backend):
    """Data laid out (B, M, H, D) comes by a transpose and goes back by one, without a copy."""
    q, k, v = tensors()
    if not heads_first:
        q = q.detach().transpose(1, 2).contiguous().transpose(1, 2)
    o, lse = attention(q, k, v, return_lse=True, backend=backend)
    assert (o if heads_first else o.transpose(1, 2)).is_contiguous()
    assert lse.is_contiguous()
    meta = [x.detach().to("meta") for x in (q, k, v)]
    meta[0] = torch.empty_strided(q.shape, q.stride(), device="meta")
    assert attention(*meta).stride() == o.stride()


@pytest.mark.parametrize(
    ("dtype", "statistics"),
    [
        (torch.float16, torch.float32), (torch.bfloat16, torch.float32), (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)  # fmt: skip
def test_dtypes_of_outputs_and_gradients(dtype, statistics):
    q, k, v = tensors(dtype=dtype)
    bias = torch.randn(4, 5, 7, dtype=torch.float32, requires_grad=True)
    o, lse = attention(q, k, v, bias=bias, return_lse=True)
    assert (o.dtype, lse.dtype) == (dtype, statistics)
    (o.sum() + lse.sum()).backward()
    assert [x.grad.dtype for x in (q, k, v, bias)] == [dtype, dtype, dtype, torch.float32]
    assert [x.grad.shape for x in (q, k, v, bias)] == [x.shape for x in (q, k, v, bias)]


def test_backends_get_numbers_not_their_negatives(monkeypatch):
    """The memory of ``z.conj().imag`` holds what has to be negated, which a kernel that gets a pointer does not see."""
    seen = []
    forward, backward = cpu.forward, cpu.backward
    compute_by(
        monkeypatch,
        cpu,
        forward=lambda problem, inputs: seen.extend(inputs[:4]) or forward(problem, inputs),
        backward=lambda *call: seen.extend([*call[1][:4], *call[2][:2], *call[3][:2]]) or backward(*call),
    )

    def negative(x):
        return torch.complex(torch.zeros_like(x), -x).conj().imag

    plain = [*tensors(requires_grad=False), torch.randn(1, 4, 5, 7)]
    cotangents = torch.randn(2, 4, 5, 6), torch.randn(2, 4, 5)
    found = []
    for change in (torch.clone, negative):
        inputs = [change(x).requires_grad_() for x in plain]
        outputs = attention(*inputs[:3], bias=inputs[3], return_lse=True)
        found.append([*outputs, *torch.autograd.grad(outputs, inputs, [change(x) for x in cotangents])])
    assert inputs[0].is_neg()
    assert len(seen) == 2 * (4 + 8)
    assert not any(x.is_neg() for x in seen)
    for x, y in zip(*found, strict=True):
        assert torch.equal(x, y)


# --- a call like an earlier one ---


def test_a_usual_call_is_not_read_again(monkeypatch):
    """Equal layouts and other arguments: what the first call was read as holds, for other numbers and for gradients."""
    q, k, v = (x.detach() for x in tensors())
    bias = torch.randn(1, 1, q.shape[2], k.shape[2])
    attention(q, k, v, bias=bias, causal=True)
    others = [torch.randn_like(x) for x in (q, k, v, bias)]
    wanted = attention(*others[:3], bias=others[3], causal=True, scale=q.shape[-1] ** -0.5)
    monkeypatch.setattr(call_cache, "forward_of", None)
    assert torch.equal(attention(*others[:3], bias=others[3], causal=True), wanted)
    o, _ = attention(*(x.requires_grad_() for x in others[:3]), bias=others[3], causal=True, return_lse=True)
    assert torch.equal(o, wanted)
    assert all(x.any() for x in torch.autograd.grad(o.sum(), others[:3]))
    for unusual in (
        {"causal": False},
        {"deterministic": True},
        {"backend": "cpu"},
        {"bias": bias[0]},
        {"softcap": 1.0},
    ):
        with pytest.raises(TypeError, match="NoneType"):
            attention(q, k, v, **{"bias": bias, "causal": True, **unusual})


def test_errors_after_a_usual_call():
    q, k, v = (x.detach() for x in tensors())
    for _ in range(2):
        attention(q, k, v, causal=True)
    for arguments, error, message in (
        ({"causal": 1}, TypeError, "causal: "), ({"deterministic": 0}, TypeError, "deterministic: "),
        ({"backend": "fast"}, ValueError, "backend: "), ({"backend": []}, (TypeError, ValueError), ""),
        ({"dropout_p": 1.5}, ValueError, "dropout_p: "), ({"window": (-1, 0)}, ValueError, "window: "),
        ({"q": None}, TypeError, "q: "), ({"k": k.to_sparse()}, TypeError, "k: "),
        ({"v": v.double()}, TypeError, "v: "),
        ({"bias": torch.zeros(1, 1, 1, 2)}, ValueError, "bias: "), ({"return_lse": 1}, TypeError, "return_lse: "),
    ):  # fmt: skip
        with pytest.raises(error, match=f"^{message}"):
            attention(**{"q": q, "k": k, "v": v, "causal": True, **arguments})


def test_a_usual_call_follows_the_determinism_that_is_asked_for(monkeypatch):
    empty_cache(monkeypatch)
    q, k, v = (x.detach() for x in tensors())
    attention(q, k, v)
    torch.use_deterministic_algorithms(True)
    try:
        attention(q, k, v)
    finally:
        torch.use_deterministic_algorithms(False)
    assert [key[-1][:2] for key in cached("call")] == [(False, False), (False, True)]


# --- nothing to compute ---


@pytest.mark.parametrize("sizes", [{"M": 0}, {"N": 0}, {"B": 0}, {"M": 0, "N": 0}, {"H": 0, "Hkv": 0}])
@pytest.mark.parametrize("use_lse", [False, True])
def test_zero_sizes(sizes, use_lse):
    """No query: empty outputs. No key: outputs 0, lse -inf. Gradients are zeros of the right shape either way."""
    q, k, v = tensors(**sizes)
    bias = torch.randn(1, 1, q.shape[2], 1, requires_grad=True)
    o, lse = attention(q, k, v, bias=bias, return_lse=True)
    assert o.shape == (*q.shape[:3], 6)
    assert lse.shape == q.shape[:3]
    assert (o == 0).all()
    assert (lse == -math.inf).all()
    loss = o.sum() + (lse.exp().sum() if use_lse else 0.0)
    for x, grad in zip((q, k, v, bias), torch.autograd.grad(loss, (q, k, v, bias)), strict=True):
        assert grad.shape == x.shape
        assert (grad == 0).all()
