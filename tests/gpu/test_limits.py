"""What only a GPU shows: offsets past 2³¹, repeats, memory, streams, graphs, torch.compile."""

from __future__ import annotations

import pytest
import torch
from torch.library import opcheck

import tilewise


def rows(b: int, h: int, s: int, d: int, **options) -> torch.Tensor:
    return torch.randn(b, s, h, d, device="cuda", dtype=torch.bfloat16).transpose(1, 2).requires_grad_(**options)


def gradients(o: torch.Tensor, inputs: list[torch.Tensor], do: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(o, inputs, do))


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a.float(), b.float(), rtol=2e-2, atol=2e-2 * b.abs().max().item())


def test_offsets_past_two_to_the_31():
    """q, k and v of more than 2³¹ elements; the last batch element equals the same call on it alone."""
    b, h, s, d = 9, 16, 131072, 128
    assert b * h * s * d > 2**31
    q = torch.randn(b, h, s, d, device="cuda", dtype=torch.bfloat16)
    o, lse = tilewise.attention(q, q, q, window=(200, 0), return_lse=True)
    alone, lse_alone = tilewise.attention(q[-1:], q[-1:], q[-1:], window=(200, 0), return_lse=True)
    assert torch.equal(o[-1:], alone)
    assert torch.equal(lse[-1:], lse_alone)
    part = slice(s - 512, s)
    tail = q[-1:, -1:, part]
    expected = tilewise.attention(tail, tail, tail, window=(200, 0), backend="oracle")
    close(o[-1:, -1:, s - 256 :], expected[:, :, 256:])


def test_bias_offsets_past_two_to_the_31():
    """A bias whose rows lie 2²⁴ elements apart, so that offsets inside one tile pass 2³¹; forward and backward."""
    m = n = 192
    wide = torch.randn(m, 1 << 24, device="cuda", dtype=torch.bfloat16)
    bias = wide[None, None, :, :n]
    q, k, v = (rows(1, 2, m, 64) for _ in range(3))
    do = torch.randn_like(q)
    results = []
    for b in (bias, bias.contiguous()):
        b = b.detach().requires_grad_()
        o = tilewise.attention(q, k, v, bias=b)
        results.append([o, *gradients(o, [q, k, v, b], do)])
    for x, y in zip(*results, strict=True):
        close(x, y)


@pytest.mark.parametrize("bias_batch", [None, 1, 4])
@pytest.mark.parametrize("causal", [False, True])
def test_a_hundred_repeats_are_equal(bias_batch, causal):
    b, h, s, d = 4, 16, 2048, 128
    q, k, v = (rows(b, h, s, d) for _ in range(3))
    inputs = [q, k, v]
    bias = None
    if bias_batch is not None:
        bias = torch.randn(bias_batch, h, s, s, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        inputs.append(bias)
    do = torch.randn_like(q)
    first = None
    for _ in range(100):
        o, lse = tilewise.attention(q, k, v, bias=bias, causal=causal, return_lse=True, deterministic=True)
        results = [o, lse, *gradients(o, inputs, do)]
        first = results if first is None else first
        assert all(torch.equal(x, y) for x, y in zip(first, results, strict=True))


def test_default_gradients_agree_with_the_deterministic_ones():
    b, h, s, d = 4, 16, 2048, 128
    q, k, v = (rows(b, h, s, d) for _ in range(3))
    bias = torch.randn(1, h, s, s, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    do = torch.randn_like(q)
    results = []
    for deterministic in (False, True):
        o = tilewise.attention(q, k, v, bias=bias, deterministic=deterministic)
        results.append(gradients(o, [q, k, v, bias], do))
    for x, y in zip(*results, strict=True):
        close(x, y)


@pytest.mark.parametrize(("bias_batch", "buffers"), [(1, 6), (8, 0)])
def test_no_buffer_of_the_score_matrix(bias_batch, buffers):
    """Beyond gradients, the backward may take a float32 sum of a shared dBias; never anything of B·H·M·N."""
    b, h, s, d = 8, 8, 2048, 64
    q, k, v = (rows(b, h, s, d) for _ in range(3))
    bias = torch.randn(bias_batch, h, s, s, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    inputs = [q, k, v, bias]
    o = tilewise.attention(q, k, v, bias=bias)
    do = torch.randn_like(o)
    gradients(tilewise.attention(q, k, v, bias=bias), inputs, do)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.autograd.grad(o, inputs, do)
    extra = torch.cuda.max_memory_allocated() - before
    own = sum(2 * x.numel() for x in inputs) + 4 * q.numel()  # gradients and the float32 sum of dQ
    shared_sum = buffers * h * s * s  # the float32 sum, and the cast beside it
    assert extra < own + shared_sum + 16 * 2**20
    assert bias_batch > 1 or extra < 2 * b * h * s * s


def test_other_streams():
    q, k, v = (rows(2, 4, 512, 64) for _ in range(3))
    expected = tilewise.attention(q, k, v, causal=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        o = tilewise.attention(q, k, v, causal=True)
    stream.synchronize()
    assert torch.equal(o, expected)


def test_cuda_graphs():
    q, k, v = (rows(2, 4, 512, 64) for _ in range(3))
    bias = torch.randn(1, 4, 512, 512, device="cuda", requires_grad=True)
    do = torch.randn_like(q)

    def step() -> list[torch.Tensor]:
        o = tilewise.attention(q, k, v, bias=bias, deterministic=True)
        return [o, *gradients(o, [q, k, v, bias], do)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        q.copy_(torch.randn_like(q))
    graph.replay()
    torch.cuda.synchronize()
    for x, y in zip(captured, step(), strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(dynamic):
    def f(q, k, v, bias):
        return tilewise.attention(q, k, v, bias=bias, causal=True)

    torch._dynamo.reset()
    compiled = torch.compile(f, fullgraph=True, dynamic=dynamic)
    for s in (256, 384, 200) if dynamic else (256,):
        q, k, v = (rows(1, 4, s, 64) for _ in range(3))
        bias = torch.randn(1, 4, s, s, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        do = torch.randn_like(q)
        o, expected = compiled(q, k, v, bias), f(q, k, v, bias)
        assert torch.equal(o, expected)
        for x, y in zip(gradients(o, [q, k, v, bias], do), gradients(expected, [q, k, v, bias], do), strict=True):
            close(x, y)


def test_opcheck():
    q, k, v = (rows(1, 4, 130, 64) for _ in range(3))
    bias = torch.randn(1, 4, 130, 130, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    terms = (None, 0, 0.125, None, True, "triton")
    opcheck(torch.ops.tilewise.attention.default, (q, k, v, bias, None, *terms))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_device():
    q, k, v = (rows(1, 2, 256, 64).to("cuda:1") for _ in range(3))
    o = tilewise.attention(q, k, v)
    expected = tilewise.attention(*(x.to("cuda:0") for x in (q, k, v)))
    assert torch.equal(o.cpu(), expected.cpu())
