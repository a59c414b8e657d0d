"""What is kept from call to call, on a device: no tensor of a call, nothing that another stream has yet to write, and
what one thread gets eight get."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor

import memory_helpers
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask

from tilewise import attention
from tilewise.bias import t5_bias

BRAIN = torch.bfloat16
LONG = 2_000_000_000  # cycles, more than what the host does meanwhile takes
CALLS = [(backend, name) for backend in (None, "triton") for name in memory_helpers.calls(backend)]
CALLS += [(None, name) for name in memory_helpers.NESTED]


@pytest.mark.filterwarnings("default")  # of nested tensors
@pytest.mark.parametrize(("backend", "name"), CALLS)
def test_no_tensor_outlives_its_call(backend, name):
    n = 200 + CALLS.index((backend, name))  # lengths that no other call has
    functions = memory_helpers.calls(backend) | memory_helpers.NESTED
    assert memory_helpers.leftovers(functions[name], n, "cuda", backend, BRAIN) == []


def test_memory_of_a_cache_that_grows():
    q, cache = (torch.randn(x, device="cuda").to(BRAIN) for x in ((1, 4, 1, 64), (2, 1, 4, 1_200, 64)))

    def decode(begin, end):
        for n in range(begin, end):
            attention(q, *(x[:, :, :n].clone() for x in cache))

    with torch.no_grad():
        decode(100, 200)
        allocated = torch.cuda.memory_allocated()
        decode(200, 1_200)
    assert torch.cuda.memory_allocated() == allocated


def qkv(S=300, heads=2):
    generator = torch.Generator("cuda").manual_seed(0)
    return [torch.randn(2, heads, S, 64, generator=generator, device="cuda").to(BRAIN) for _ in range(3)]


def test_a_table_bias_on_two_streams():
    """The other stream does not read what the first has yet to write."""
    x, table = qkv(), torch.randn(32, 2, device="cuda")

    def run(most):
        leaves = [y.detach().requires_grad_() for y in (*x, table)]
        o = attention(*leaves[:3], bias=t5_bias(leaves[3], True, most))
        return [o.detach(), *torch.autograd.grad(o.sum(), leaves)]

    run(90)  # compiles
    one, other = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(one):  # whose free memory holds one bucket for every distance
        free = [torch.full((n,), 3, device="cuda") for n in range(1, 600)]
        run(90)
        del free
    torch.cuda.synchronize()
    with torch.cuda.stream(one):
        torch.cuda._sleep(LONG)
        first = run(92)
    with torch.cuda.stream(other):
        found = run(92)
    torch.cuda.synchronize()
    torch.testing.assert_close(found[0], first[0], rtol=0, atol=0)
    for a, b in zip(found, first, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2 * float(b.abs().max()))


def block_mask(S, delay=0):
    ids = torch.arange(S, device="cuda") // 70

    def mask_mod(b, h, q, kv):
        if delay and q.dim() > 1:  # asked for the pairs of partial blocks
            torch.cuda._sleep(delay)
        return ids[q] == ids[kv]

    made = create_block_mask(lambda b, h, q, kv: ids[q] == ids[kv], None, None, S, S, device="cuda")
    made.mask_mod = mask_mod
    return made, ids[:, None] == ids


def test_a_block_mask_on_two_streams():
    """What the first stream makes of it the other finds written."""
    x = qkv()
    mask, dense = block_mask(300, LONG)
    expected = attention(*x, mask=dense)
    attention(*x, mask=block_mask(300)[0])  # compiles
    torch.cuda.synchronize()
    one, other = torch.cuda.Stream(), torch.cuda.Stream()
    with torch.cuda.stream(one):
        attention(*x, mask=mask)
    with torch.cuda.stream(other):
        found = attention(*x, mask=mask)
    torch.cuda.synchronize()
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


def test_a_block_mask_that_dies_while_another_stream_reads_it():
    """Its memory is nobody's before."""
    x = qkv()
    mask, dense = block_mask(300)
    expected = attention(*x, mask=dense)
    one, other = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(one):
        attention(*x, mask=mask)
    torch.cuda.synchronize()
    with torch.cuda.stream(other):
        torch.cuda._sleep(LONG)
        found = attention(*x, mask=mask)
    del mask
    gc.collect()
    with torch.cuda.stream(one):
        garbage = [torch.zeros(n * 128, dtype=torch.int32, device="cuda") for n in range(1, 200)]
    torch.cuda.synchronize()
    del garbage
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("backend", [None, "triton"])
def test_threads_get_what_one_gets(backend):
    """Eight, each on a stream of its own, with lengths that grow and of which some are compiled for otherwise."""
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn(2, 4, 800, 64, generator=generator, device="cuda").to(BRAIN) for _ in range(3))

    def run(n):
        x = [y[:, :, :n].detach().requires_grad_() for y in (q, k, v)]
        o = attention(*x, causal=True, backend=backend)
        return [o.detach(), *torch.autograd.grad(o.float().square().sum(), x)]

    for n in (64, 65, 66, 68, 72, 80, 128, 129, 256, 257, 512, 513):  # compiles
        run(n)
    torch.cuda.synchronize()

    def some(thread):
        with torch.cuda.stream(torch.cuda.Stream()):
            found = {n: run(n) for n in range(130 + thread, 800, 8)} | {n: run(n) for n in range(140, 800, 16)}
            torch.cuda.current_stream().synchronize()
        return found

    with ThreadPoolExecutor(8) as pool:
        of_threads = list(pool.map(some, range(8)))
    for found in of_threads:
        for n, results in found.items():
            o, *grads = run(n)
            assert torch.equal(results[0], o), n
            for a, b in zip(results[1:], grads, strict=True):
                torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2 * float(b.abs().max()))
