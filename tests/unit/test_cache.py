"""The caches of prepared calls and compiled kernels: bounded, safe under threads, without tensors."""

from __future__ import annotations

import contextlib
import gc
import sys
import types
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import memory_helpers
import pytest
import torch
from helpers import cached, empty_cache
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import tilewise
from tilewise import attention
from tilewise.backends import Inputs, Needs, Outputs
from tilewise.bias import t5_bias
from tilewise.cache import CallCache, calls, prepared_once
from tilewise.integrations.evoformer import attention_pair_bias, triangle_attention
from tilewise.operator.dispatch import backward_of, forward_of
from tilewise.operator.structure import restored_layouts
from tilewise.spec.score import Band, Score, ScoreNumbers

ELSEWHERE = (type, types.ModuleType, types.FrameType, types.CodeType)  # not what a cached object holds


def test_the_least_recently_used_go_first():
    cache: CallCache[int] = CallCache(8)
    for n in range(100):
        assert cache.put((n,), n) == n
        assert cache.get((n,)) == n
        assert cache.get((0,)) == 0, "used between all others"
        assert cache.info().size <= 8
    assert [cache.get((n,)) for n in (99, 98, 97)] == [99, 98, 97]
    assert cache.get((50,)) is None
    assert cache.info()[:2] == (203, 1)
    cache.clear()
    assert cache.info() == (0, 0, 0, 8)


def test_threads_share_a_cache():
    cache: CallCache[int] = CallCache(16)

    def use(thread: int) -> bool:
        found = ((n, cache.get((n % 40,))) for n in range(thread, 5000))
        return all((x is None and cache.put((n % 40,), n % 40) == n % 40) or x == n % 40 for n, x in found)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(use, range(8)))
    finally:
        sys.setswitchinterval(before)
    assert cache.info().size <= 16 + 8, "one more for each thread that was about to add it"


def test_a_function_is_computed_once(monkeypatch):
    empty_cache(monkeypatch)
    seen = []

    @prepared_once
    def double(x):
        seen.append(x)
        return 2 * x

    @prepared_once
    def triple(x):
        return 3 * x

    assert [double(3), double(3), double(4), triple(3)] == [6, 6, 8, 9]
    assert seen == [3, 4]


def test_caches_are_counted_and_cleared():
    tilewise.clear_caches()
    q = torch.randn(1, 2, 13, 16)
    o = attention(q, q, q)
    first = tilewise.cache_info()["calls"]
    assert first.size > 0
    assert first.misses > 0
    assert torch.equal(attention(q, q, q), o)
    again = tilewise.cache_info()["calls"]
    assert (again.size, again.misses, again.hits) == (first.size, first.misses, first.hits + 1), "one look-up"
    tilewise.clear_caches()
    assert tilewise.cache_info()["calls"][:3] == (0, 0, 0)
    assert torch.equal(attention(q, q, q), o)


def test_caches_are_cleared_while_others_call():
    leaves = [torch.randn(1, 2, 9, 16, requires_grad=True) for _ in range(3)]
    expected = torch.autograd.grad(attention(*leaves).sum(), leaves)

    def call(n: int) -> bool:
        if n % 8 == 0:
            tilewise.clear_caches()
        found = torch.autograd.grad(attention(*leaves).sum(), leaves)
        return all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(call, range(200)))


# --- what a cached call reads besides its key ---


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def threads(n):
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


CONTEXTS = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "deterministic": deterministic,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "one thread": lambda: threads(1),
    "default device": lambda: torch.device("meta"),
    "profiler": lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
    "saved tensors": lambda: torch.autograd.graph.save_on_cpu(),
    "dispatch mode": lambda: FlopCounterMode(display=False),
}
ENDS = torch.tensor([0, 4, 9], dtype=torch.int32)
CALLS = {
    "attention": lambda q, k, v: attention(q, k, v, causal=True),
    "numbers": lambda q, k, v: attention(q, k, v, window=(3, 1), scale=0.3, softcap=2.0),
    "bias": lambda q, k, v: attention(q, k, v, bias=q[:, :1, :, :1] + k[:, :1, :, 0, None].mT),
    "t5": lambda q, k, v: attention(q, k, v, bias=t5_bias(torch.ones(8, 2, device="cpu"), True)),
    "sdpa": lambda q, k, v: tilewise.scaled_dot_product_attention(q, k, v, is_causal=True),
    "leading": lambda q, k, v: attention(*(x.expand(2, 3, *x.shape[1:]) for x in (q, k, v))),
    "packed": lambda q, k, v: tilewise.varlen_attention(*(x[0].transpose(0, 1) for x in (q, k, v)), ENDS, ENDS, 5, 5),
}


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("name", CALLS)
def test_a_cached_call_sees_what_is_around_it(name, context):
    """After a call without the context, one within it is what it would be alone, and so is the next one without."""
    leaves = [torch.randn(1, 2, 9, 16, requires_grad=True) for _ in range(3)]

    def run():
        o = CALLS[name](*leaves)
        grads = torch.autograd.grad(o.float().square().sum(), leaves) if o.requires_grad else ()
        return [o.dtype, o.device, o.requires_grad, o.is_inference(), *(x.detach().clone() for x in (o, *grads))]

    def check(found, expected):
        for x, y in zip(found, expected, strict=True):
            assert torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y

    tilewise.clear_caches()
    with CONTEXTS[context]():
        within = run()
    tilewise.clear_caches()
    without = run()
    check(run(), without)
    for _ in range(2):
        with CONTEXTS[context]():
            check(run(), within)
    check(run(), without)


@pytest.mark.parametrize(
    ("cached", "wrong"),
    [
        ({"scale": 1.0}, {"scale": True}),
        ({"softcap": 1.0}, {"softcap": True}),
        ({"window": (1, 0)}, {"window": (True, False)}),
        ({"dropout_p": 0.0}, {"dropout_p": False}),
        ({"causal": True}, {"causal": 1}),
    ],
)
def test_an_equal_number_of_another_type_is_still_an_error(cached, wrong):
    x = torch.randn(1, 2, 9, 16)
    for _ in range(2):
        attention(x, x, x, **cached)
        with pytest.raises(TypeError):
            attention(x, x, x, **wrong)


@pytest.mark.parametrize("numbers", [{}, {"scale": 0.3}, {"softcap": 2.0}, {"window": (3, None)}, {"causal": True}])
def test_calls_with_other_numbers_are_other_calls(numbers):
    q, k, v = (torch.randn(1, 2, 9, 16) for _ in range(3))
    before = {"scale": 0.4, "softcap": 3.0, "window": (None, 3), "causal": False}
    tilewise.clear_caches()
    for _ in range(2):
        o = attention(q, k, v, **numbers)
        torch.testing.assert_close(o, attention(q, k, v, **numbers, backend="reference"))
        attention(q, k, v, **{name: before[name] for name in numbers})
    info = tilewise.cache_info()["calls"]
    hits = info.hits
    attention(q, k, v, **numbers)
    assert tilewise.cache_info()["calls"] == info._replace(hits=hits + 1)


def packed(q, k, v, **options):
    rows = (x[0].transpose(0, 1) for x in (q, k, v))
    return tilewise.varlen_attention(*rows, ENDS, ENDS, 5, 5, **options)


def leading(q, k, v, **options):
    return attention(*(x.expand(2, 3, *x.shape[1:]) for x in (q, k, v)), **options)


PAIR, SEEN = torch.randn(1, 2, 9, 9), torch.ones(9, 9, dtype=torch.bool)
CHECKPOINTED = {
    **CALLS,
    "bias of heads": lambda q, k, v: attention(q, k, v, bias=PAIR[0], sink=PAIR[0, :, 0, 0]),
    "t5 and mask": lambda q, k, v: attention(q, k, v, bias=t5_bias(torch.ones(8, 2), True), mask=SEEN),
    "two terms": lambda q, k, v: attention(q, k, v, bias=(PAIR, PAIR[:, :, :1])),
    "dropout": lambda q, k, v: attention(q, k, v, dropout_p=0.5),
    "sdpa with a mask": lambda q, k, v: tilewise.scaled_dot_product_attention(q, k, v, SEEN),
    "leading with a bias": lambda q, k, v: leading(q, k, v, bias=PAIR),
    "leading with a repeated mask": lambda q, k, v: leading(q, k, v, mask=SEEN.expand(1, 3, 1, 9, 9)),
    "leading in two calls": lambda q, k, v: leading(q, k, v, bias=PAIR.expand(2, 1, 2, 9, 9)),
    "packed with a sink": lambda q, k, v: packed(q, k, v, bias=PAIR[:, :, :5, :5], sink=PAIR[0, :, 0, 0]),
    "packed with dropout": lambda q, k, v: packed(q, k, v, dropout_p=0.5),
    "varlen_attn": lambda q, k, v: tilewise.varlen_attn(
        *(x[0].transpose(0, 1) for x in (q, k, v)), ENDS, ENDS, 5, 5, window_size=(2, 0)
    ),
    "pair bias": lambda q, k, v: attention_pair_bias(
        *(x[:, None].expand(1, 3, *x.shape[1:]) for x in (q, k, v)), PAIR, SEEN[:1]
    ),
    "triangle": lambda q, k, v: triangle_attention(
        *(x[:, None].expand(1, 9, *x.shape[1:]) for x in (q, k, v)), PAIR[:, None], SEEN[None, :, None, None]
    ),
}


@pytest.mark.parametrize("name", CHECKPOINTED)
def test_a_first_call_can_be_checkpointed(name):
    """PyTorch compares the tensors that a call saves for its backward with those of the call that recomputes it."""
    leaves = [torch.randn(1, 2, 9, 16, requires_grad=True) for _ in range(3)]

    def gradients(function):
        torch.manual_seed(1)
        return torch.autograd.grad(function().square().sum(), leaves)

    tilewise.clear_caches()
    found = gradients(lambda: checkpoint(CHECKPOINTED[name], *leaves, use_reentrant=False))
    for x, y in zip(found, gradients(lambda: CHECKPOINTED[name](*leaves)), strict=True):
        assert torch.equal(x, y)


# Shapes of bias, mask and sink with fewer dimensions than q.
FEWER = {
    "bias of heads": {"bias": (4, 5, 7)},
    "bias of pairs": {"bias": (5, 7), "mask": (1, 1, 7)},
    "bias of keys": {"bias": (7,), "sink": (4,)},
    "mask of pairs": {"mask": (5, 7)},
    "dropout": {"bias": (5, 7), "dropout_p": 0.5},
    "sink": {"sink": (4,)},
    "t5": {"bias": "t5", "mask": (5, 7)},
}


@pytest.mark.parametrize(
    ("name", "lead"),
    [*((name, (3,)) for name in FEWER), *((name, lead) for name in FEWER if name != "t5" for lead in ((2, 3), (1, 1)))],
)
def test_operands_with_fewer_dimensions_are_cached(name, lead, monkeypatch):
    """Values, and gradients in the caller's shapes, are those of a call that is read."""

    def drawn():
        q, k, v = (torch.randn(*lead, 4, n, 8, requires_grad=True) for n in (5, 7, 7))
        more = dict(FEWER[name])
        leaves = [q, k, v]
        for key, shape in FEWER[name].items():
            if key == "mask":
                more[key] = torch.rand(shape) < 0.8
            elif key in ("bias", "sink"):
                leaves.append(torch.randn(*((8, 4) if shape == "t5" else shape), requires_grad=True))
                more[key] = t5_bias(leaves[-1], True) if shape == "t5" else leaves[-1]
        return leaves, more

    def results(leaves, more):
        torch.manual_seed(1)
        o = attention(*leaves[:3], **more)
        return o, *torch.autograd.grad(o.square().sum(), leaves)

    tilewise.clear_caches()
    results(*drawn())
    leaves, more = drawn()
    tilewise.clear_caches()
    wanted = results(leaves, more)
    monkeypatch.setattr(tilewise.api, "read_call", None)
    monkeypatch.setattr(tilewise.api, "attention_of_leading", None)
    for x, y in zip(results(leaves, more), wanted, strict=True):
        assert x.shape == y.shape
        torch.testing.assert_close(x, y)
    assert all(x.shape == leaf.shape for x, leaf in zip(wanted[1:], leaves, strict=True))


# --- tensors ---


def reachable(found: object) -> Iterator[object]:
    """All objects that ``found`` holds, also in closures, but not by way of a module or a function's globals."""
    seen, left = set(), [found]
    while left:
        x = left.pop()
        if id(x) in seen or isinstance(x, ELSEWHERE):
            continue
        seen.add(id(x))
        yield x
        if isinstance(x, types.FunctionType):
            left += [x.__closure__, x.__defaults__, x.__kwdefaults__]
        else:
            left += gc.get_referents(x)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_no_cached_object_holds_a_tensor(monkeypatch, backend):
    empty_cache(monkeypatch)
    for name, function in {**memory_helpers.calls(backend), **memory_helpers.OTHERS}.items():
        call = memory_helpers.Call(23, "cpu", backend, torch.float32)
        for _ in range(2):
            memory_helpers._differentiated(function, call)
        assert not any(isinstance(x, torch.Tensor) for x in reachable((calls._recent, calls._older))), name
    assert all(map(cached, ("call", "packed", "forward", "backward")))
    calls.put(("planted",), lambda: call)
    assert any(isinstance(x, torch.Tensor) for x in reachable((calls._recent, calls._older)))


@pytest.mark.parametrize("known", [False, True])
def test_a_backward_is_found_by_what_it_reads(monkeypatch, known):
    """Whether its forward is known or not: gradients that are required, and strides, which a hook may change."""
    empty_cache(monkeypatch)
    q, k, v = (torch.randn(2, 3, 5, 8) for _ in range(3))
    inputs, terms = Inputs(q, k, v, None, None), ScoreNumbers.of(Score.of(Band(), 8), False, "cpu")
    forward = forward_of(inputs, terms)
    outputs = forward(inputs)

    def found(inputs, needs=(True, True, True, False)):
        cotangents = Outputs(torch.ones_like(q), None)
        return backward_of(inputs, outputs, cotangents, terms, Needs(*needs), forward if known else None)

    first = found(inputs)
    assert found(inputs._replace(q=q.clone())) is first
    assert found(inputs, (True, False, True, False)) is not first
    assert found(inputs._replace(q=q.transpose(1, 2).contiguous().transpose(1, 2))) is not first
    with pytest.raises(TypeError, match=r"^v: dtype must equal q's"):
        found(inputs._replace(v=v.double()))


def test_restored_tensors_of_a_gpu_differ_by_device_and_alignment():
    """A tensor that a hook leaves on the CPU beside others on a GPU is not read there."""

    def on(device, address=64, columns=3):
        x = torch.empty(2, columns)
        return types.SimpleNamespace(
            is_cuda=device >= 0, dtype=x.dtype, stride=x.stride, numel=x.numel, get_device=lambda: device,
            data_ptr=lambda: address,
        )  # fmt: skip

    saved = restored_layouts((on(0), on(0)))
    assert restored_layouts((on(0), on(0, 128))) == saved
    for other in (on(-1), on(1), on(0, 72), on(0, 64, 4), None):
        assert restored_layouts((on(0), other)) != saved
