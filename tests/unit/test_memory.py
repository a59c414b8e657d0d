"""What is kept from call to call: no tensor of a call, nothing that another stream has yet to write, and no more under
threads than without."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import memory_helpers
import pytest
import torch

import tilewise
from tilewise import TileMask, attention
from tilewise.bias import alibi, t5_bias

WITH_BACKENDS = [(backend, name) for backend in ("cpu", "reference") for name in memory_helpers.calls(backend)]
WITH_BACKENDS += [(None, name) for name in memory_helpers.OTHERS]
without_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


# --- tensors ---


@pytest.mark.parametrize(("backend", "name"), WITH_BACKENDS)
def test_no_tensor_outlives_its_call(backend, name):
    n = 60 + WITH_BACKENDS.index((backend, name))  # lengths that no other call has
    assert memory_helpers.leftovers_of(name, n, "cpu", backend) == []


@pytest.mark.parametrize("name", memory_helpers.calls("triton"))
def test_no_tensor_outlives_its_call_in_the_interpreter(interpreter, name):
    assert interpreter(memory_helpers.leftovers_of, name, 21, "cpu", "triton") == []


def test_what_is_left_over_is_found():
    kept = []

    def keeps(c):
        o = attention(*c.qkv())
        kept.append(o[:, :1].detach())
        return o

    found = memory_helpers.leftovers(keeps, 50, "cpu")
    assert [x for x in found if x.startswith("output")] == ["output 0", "output 0, again"]
    assert any(x.startswith("a tensor (2, 1, 50") for x in found)


def resident() -> float:
    """MiB."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * 4096 / 2**20


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_memory_of_a_cache_that_grows():
    """5,000 steps, of which each has a new length: what is kept of them are numbers. With their keys and values it was
    530 MiB."""
    q, cache = torch.randn(1, 1, 1, 8), torch.randn(2, 1, 1, 5_100, 8)

    def decode(begin: int, end: int) -> None:
        for n in range(begin, end):
            attention(q, *(x[:, :, :n].clone() for x in cache), backend="cpu")

    with torch.no_grad():
        decode(1, 100)
        before = resident()
        decode(100, 5_100)
    assert resident() - before < 64


# --- streams ---


def test_constants_are_of_one_stream(monkeypatch):
    """No stream reads what another may not have written yet."""
    from tilewise.bias import constants

    q, k, v, table = torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8), torch.randn(32, 2)
    streams, made = iter((1, 2, 1, 2)), []
    monkeypatch.setattr(constants, "_kept", {})
    for stream in streams:
        monkeypatch.setattr(constants, "stream_of", lambda device, stream=stream: stream)
        attention(q, k, v, bias=t5_bias(table, True))
        made.append([x.data_ptr() for x in constants._kept.values()])
    assert [len(x) for x in made] == [1, 2, 2, 2]
    assert made[1] == made[3]


def test_biases_by_lengths_keep_nothing(monkeypatch):
    from tilewise.bias import constants

    monkeypatch.setattr(constants, "_kept", {})
    for n in (9, 10, 11):
        slopes = torch.randn(2).requires_grad_()
        attention(*(torch.randn(1, 2, n, 8) for _ in range(3)), bias=alibi(slopes)).sum().backward()
    assert constants._kept == {}


# --- threads ---


@pytest.fixture
def often():
    """Threads take turns after each few steps."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def test_threads_get_what_one_gets(often):
    """Eight threads make the same calls in other orders, with all that they share: layouts that are new to all, terms,
    and masks by tiles."""
    gen = torch.Generator().manual_seed(0)
    masks = {n: TileMask.documents(torch.arange(n) // 7, block=64) for n in range(20, 23)}
    table, slopes = torch.randn(16, 2, generator=gen), torch.randn(2, generator=gen)

    def inputs(n):
        gen = torch.Generator().manual_seed(n)
        return [torch.randn(3, 2, n, 8, generator=gen).requires_grad_() for _ in range(3)]

    def packed(*x):
        offsets = torch.arange(4, dtype=torch.int32) * x[0].shape[2]
        rows = [y.transpose(1, 2).flatten(0, 1) for y in x]
        return tilewise.varlen_attention(*rows, offsets, offsets, x[0].shape[2], x[0].shape[2], causal=True)

    calls = {
        "attention": lambda *x: attention(*x, causal=True),
        "reference": lambda *x: attention(*x, causal=True, backend="reference"),
        "t5": lambda *x: attention(*x, bias=t5_bias(table, True, 40)),
        "alibi": lambda *x: attention(*x, bias=alibi(slopes)),
        "tiles": lambda *x: attention(*x, mask=masks[x[0].shape[2]]),
        "leading": lambda *x: attention(*(y[None] for y in x)),
        "sdpa": tilewise.scaled_dot_product_attention,
        "packed": packed,
        "matmul": lambda q, k, v: tilewise.matmul(tilewise.softmax(tilewise.matmul(q, k.mT)), v),
    }
    work = [(name, n) for n in masks for name in calls]

    def run(name, n):
        x = inputs(n)
        o = calls[name](*x)
        return [o, *torch.autograd.grad(o.sum(), x)]

    def some(thread):
        begin = thread * len(work) // 8
        return {key: run(*key) for key in work[begin:] + work[:begin]}

    with ThreadPoolExecutor(8) as pool:
        of_threads = list(pool.map(some, range(8)))
    for key in work:
        alone = run(*key)
        for found in of_threads:
            for x, y in zip(found[key], alone, strict=True):
                torch.testing.assert_close(x, y)


@without_triton
def test_a_launch_of_two_threads_keeps_a_kernel_for_its_addresses(monkeypatch):
    """One that was compiled for multiples of 16 bytes must not read others."""
    from tilewise.backends.launch import launcher

    monkeypatch.setattr(launcher, "knows_launcher", lambda compiled: False)

    class Met(launcher.Launch):
        met = None

        @property
        def _aligned(self):
            return self.__dict__["aligned"]

        @_aligned.setter
        def _aligned(self, value):
            self.__dict__["aligned"] = value
            if value:
                with contextlib.suppress(threading.BrokenBarrierError):
                    self.met.wait(0.02)

    for _ in range(8):
        launch = Met(mock.Mock(params=()), 1, (), ())
        launch.met = threading.Barrier(2)
        pairs = [((aligned,), mock.Mock()) for aligned in (True, False)]
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda pair, launch=launch: launch._keep(pair[1], pair[0], ()), pairs))
        assert (launch._aligned, launch._compiled) in pairs
