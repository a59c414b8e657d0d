"""The CPU's tiles by several workers: the same error rule and equal bits, however a call is divided, and who calls."""

import threading
from pathlib import Path

import pytest
import relative_helpers
import torch
from helpers import Case, check, run
from processes import python
from relative_helpers import Term

import tilewise
from tilewise import attention
from tilewise.backends.cpu import fused, jobs, tiled, workers
from tilewise.bias import RelativeBias, t5_bias

F32 = torch.float32
SMALL = {"B": 2, "H": 2, "M": 53, "N": 61, "D": 8, "dtype": F32}


@pytest.fixture
def threads(request, monkeypatch):
    """Two workers, or as many as the test says; everything goes by tiles, so small that each worker has some.

    PyTorch keeps its one thread, for with more its own short operators wait for each other.
    """
    threads = getattr(request, "param", 2)
    for name, size in (("BLOCK_M", 16), ("MAX_BLOCK_M", 16), ("BLOCK_N", 24), ("SMALL", 1)):
        monkeypatch.setattr(tiled, name, size)
    for name in ("declines", "declines_backward"):
        monkeypatch.setattr(fused, name, lambda problem: "the test wants tiles")
    monkeypatch.setattr(workers, "count", lambda: threads)
    monkeypatch.setattr(workers, "threads_each", lambda: 1)
    monkeypatch.setattr(workers, "_queues", {})


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def divisions(monkeypatch):
    """Whether jobs of a backward have blocks of rows in turn, and whether heads that share a gradient are divided."""
    seen, pieces = [], jobs.pieces

    def watched(*arguments):
        found = pieces(*arguments)
        every = [job for turns in found for job in turns]
        seen.append((any(job.turns > 1 for job in every), any(job.shared for job in every)))
        return found

    monkeypatch.setattr(jobs, "pieces", watched)
    return seen


@pytest.mark.parametrize(
    ("fields", "division"),
    [
        ({"bias": "bhmn"}, (False, False)),
        ({"bias": "bhmn", "B": 1, "H": 1, "causal": True}, (True, False)),
        ({"bias": "11mn"}, (True, False)),
        ({"bias": "111n"}, (True, False)),
        ({"bias": "11m1", "dtype": torch.bfloat16}, (True, False)),
        ({"bias": "11mn", "dtype": torch.bfloat16, "window": (20, 5)}, (True, False)),
        ({"bias": "11mn", "B": 20, "M": 7, "N": 9}, (False, True)),
        ({"bias": "1111", "B": 20, "M": 7, "N": 9, "dtype": torch.bfloat16}, (False, True)),
        ({"bias": "111n", "B": 3, "M": 31}, (True, None)),
        ({"mask": "b1mn", "sink": "h", "B": 1, "H": 4, "Hkv": 1, "softcap": 2.0}, (True, False)),
        ({"dropout_p": 0.2, "bias": "1hmn", "H": 1}, (True, False)),
        ({"bias": "11mn", "planted": torch.inf, "mask": "11mn", "blind": True}, (True, False)),
    ],
    ids=str,
)
def test_every_division(monkeypatch, threads, fields, division):
    seen = divisions(monkeypatch)
    c = Case(**{**SMALL, **fields})
    check(c, "cpu")
    for found in seen:
        assert all(x is None or x == y for x, y in zip(division, found, strict=True)), seen
    for x, y in zip(run(c, "cpu"), run(c, "cpu"), strict=True):
        assert x is y is None or torch.equal(x, y)


@pytest.mark.parametrize("threads", [3, 5], indirect=True)
@pytest.mark.parametrize("fields", [{"bias": "1hmn", "H": 3}, {"bias": "11mn", "B": 7, "M": 20}], ids=str)
def test_more_threads(threads, fields):
    check(Case(**{**SMALL, **fields}), "cpu")


@pytest.mark.parametrize("largest", [jobs.LARGEST_SUM, 0])
@pytest.mark.parametrize(
    ("case", "terms"),
    [
        (Case(**{**SMALL, "B": 1, "H": 1}), (Term("query"), Term("key"), Term("cols"))),
        (Case(**{**SMALL, "bias": "b1mn"}), (Term("query", "11"), Term("rows", "11"))),
        (
            Case(**{**SMALL, "B": 9, "M": 15, "N": 22, "bias": "11mn"}),
            (Term("query", "11"), Term("t5", "1h")),
        ),
        (Case(**{**SMALL, "H": 1}), (Term("t5", "1h"), Term("key", "1h"))),
    ],
    ids=["a head", "rows", "windows", "t5"],
)
def test_gradients_of_bias_terms(monkeypatch, threads, case, terms, largest):
    monkeypatch.setattr(jobs, "LARGEST_SUM", largest)
    relative_helpers.check(case, terms, "cpu")


@pytest.mark.parametrize("masked", [False, True])
def test_jobs_of_the_same_heads_share_the_tiles_of_keys(monkeypatch, threads, masked):
    """K and V are prepared once each way, in tiles of all heads that have the same block mask."""
    heads, mask, made = 1, None, []
    if masked:
        heads, mask = (
            4,
            tilewise.TileMask.from_tiles(torch.ones(1, 1, 4, 4, dtype=torch.bool).tril(), 256, 256, block=64),
        )
        for name, size in (("BLOCK_M", 256), ("MAX_BLOCK_M", 256), ("BLOCK_N", 64)):
            monkeypatch.setattr(tiled, name, size)
    q, k, v = (torch.randn(1, heads, 256, 8, requires_grad=True) for _ in range(3))

    class Heads(tiled._Heads):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            made.append(self.kv)

    monkeypatch.setattr(tiled, "_Heads", Heads)
    attention(q, k, v, mask=mask, backend="cpu").sum().backward()
    assert made == [(slice(0, 1), slice(0, heads))] * 2


@pytest.mark.parametrize("threads", [5], indirect=True)
@pytest.mark.parametrize(("B", "S"), [(1, 96), (9, 15)])
def test_sums_do_not_depend_on_who_is_first(monkeypatch, threads, B, S):
    """Jobs that add to the same elements have sums of their own, whose order is that of the jobs."""
    x = [torch.randn(B, 1, S, 8, requires_grad=True) for _ in range(3)]
    leaves = [torch.randn(*shape, requires_grad=True) for shape in ((1, 1, 1, S), (1, 1, S, 9), (1, 1, S, 9), (32, 1))]
    query, key = (RelativeBias(y, lo=-4, on=on) for y, on in zip(leaves[1:3], ("query", "key"), strict=True))

    def call():
        o = attention(*x, bias=(leaves[0], query, key, t5_bias(leaves[3], bidirectional=True)))
        return torch.autograd.grad(o.square().sum(), (*x, *leaves))

    found = [call()]
    monkeypatch.setattr(workers, "run", lambda parts: [part() for part in reversed(parts)][::-1])
    found.append(call())
    for y, z in zip(*found, strict=True):
        assert torch.equal(y, z)


def inputs(S=96, H=2, **settings):
    q, k, v = (torch.randn(1, H, S, 8, requires_grad=True, **settings) for _ in range(3))
    return q, k, v, torch.randn(1, 1, S, S, requires_grad=True, **settings)


def gradients(q, k, v, bias):
    o = attention(q, k, v, bias=bias)
    return o, *torch.autograd.grad(o.square().sum(), (q, k, v, bias))


def products(call):
    """How many products the calling thread makes."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    names = "aten::bmm", "aten::baddbmm", "mkldnn::_linear_pointwise"  # the last on AMD CPUs
    return sum(event.name in names for event in profile.events())


@pytest.mark.filterwarnings("ignore:Profiler won't be using warmup")
def test_workers_compute_the_tiles(two_threads):
    """Not PyTorch's threads, an operator at a time, each of which waits where another process has a core."""
    qkv = [torch.randn(2, 2, 512, 16, requires_grad=True) for _ in range(3)]
    bias = torch.zeros(1, 2, 512, 512, requires_grad=True)
    o = attention(*qkv, bias=bias)
    assert products(lambda: torch.autograd.grad(o.sum(), (*qkv, bias))) == 0
    torch.set_num_threads(1)
    o = attention(*qkv, bias=bias)
    assert products(lambda: torch.autograd.grad(o.sum(), (*qkv, bias))) >= 20


def test_float64_gradients(threads):
    torch.autograd.gradcheck(
        lambda *x: attention(*x[:3], bias=x[3]), inputs(20, 1, dtype=torch.float64), fast_mode=True
    )


def test_one_thread_has_no_workers(monkeypatch):
    monkeypatch.setattr(workers, "_queue", None)
    gradients(*inputs())


def test_threads_of_others_are_as_they_were(monkeypatch, two_threads):
    def fresh():
        found = []
        thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        return found[0]

    monkeypatch.setattr(tiled, "SMALL", 1)
    monkeypatch.setattr(workers, "_queues", {})
    gradients(*inputs())
    assert workers._queues.keys() == {2}
    assert torch.get_num_threads() == fresh() == 2


def test_an_error_reaches_the_caller_and_the_next_call_works(monkeypatch, threads):
    x = inputs()
    expected = gradients(*x)
    with monkeypatch.context() as patch:
        patch.setattr(tiled, "_attend", lambda *_, careful: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            attention(*x[:3], bias=x[3])
    torch.testing.assert_close(gradients(*x), expected, rtol=0, atol=0)


def test_modes_of_the_calling_thread(threads):
    x = inputs()
    expected = gradients(*x)
    with torch.inference_mode():
        assert torch.equal(attention(*(y.clone() for y in x[:3]), bias=x[3].clone()), expected[0])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.isfinite(attention(*x[:3], bias=x[3])).all()
    o = torch.compile(lambda *y: attention(*y[:3], bias=y[3]), backend="eager", fullgraph=True)(*x)
    torch.testing.assert_close(torch.autograd.grad(o.square().sum(), x), expected[1:], rtol=0, atol=0)


def test_several_threads_call_at_once(threads):
    every = [inputs(S) for S in (60, 70, 80, 90)]
    expected = [gradients(*x) for x in every]
    found = [None] * len(every)

    def call(n):
        for _ in range(3):
            found[n] = gradients(*every[n])

    callers = [threading.Thread(target=call, args=(n,)) for n in range(len(every))]
    for thread in callers:
        thread.start()
    for thread in callers:
        thread.join()
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


SCRIPT = """
import atexit, os, sys, threading, torch, tilewise
from tilewise.backends.cpu import fused, tiled, workers
torch.set_num_threads(2)
tiled.SMALL = 1
fused.declines = lambda problem: "its threads do not outlive a fork"
x = [torch.randn(2, 2, 40, 8, requires_grad=True) for _ in range(3)]
bias = torch.randn(1, 2, 40, 40, requires_grad=True)
def call():
    o = tilewise.attention(*x, bias=bias)
    return torch.autograd.grad(o.square().sum(), (*x, bias))
expected = call()
assert workers._queues
def same():
    assert all(torch.equal(a, b) for a, b in zip(call(), expected, strict=True))
child = os.fork()
if child == 0:
    same()
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
atexit.register(lambda: (same(), print("at exit")))
def late():
    threading.main_thread().join()
    same()
    print("after the main thread")
threading.Thread(target=late).start()
"""


@pytest.mark.skipif(not hasattr(__import__("os"), "fork"), reason="this system has no fork")
def test_a_fork_and_the_end_of_a_process():
    root = Path(tilewise.__file__).parents[1]
    done = python("-c", SCRIPT, cwd=root, timeout=60)
    assert done.stdout.split("\n") == ["after the main thread", "at exit", ""]
