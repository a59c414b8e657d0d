"""What is kept from call to call: no tensor of a call, nothing that another stream has yet to write, and no more under
threads than without."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import memory_helpers
import pytest
import torch

from tilewise import attention
from tilewise.bias import alibi, t5_bias

WITH_BACKENDS = [(backend, name) for backend in ("cpu", "oracle") for name in memory_helpers.calls(backend)]
WITH_BACKENDS += [(None, name) for name in memory_helpers.OTHERS]
without_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")


# --- tensors ---


@pytest.mark.parametrize(("backend", "name"), WITH_BACKENDS)
def test_no_tensor_outlives_its_call(backend, name):
    n = 60 + WITH_BACKENDS.index((backend, name))  # lengths that no other call has
    assert memory_helpers.leftovers_of(name, n, "cpu", backend) == []


@without_triton
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
