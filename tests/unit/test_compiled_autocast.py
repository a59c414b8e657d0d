"""Every public call by torch.compile, under torch.autocast: one graph, and none anew for a second length."""

from __future__ import annotations

import pytest
import torch

from tilewise import attention, matmul, scaled_dot_product_attention, softmax

D = 4


def by_sdpa(x, weight, bias):
    q, k, v = (x @ weight).unflatten(-1, (3, 2, D)).permute(2, 0, 3, 1, 4)
    return scaled_dot_product_attention(q, k, v, attn_mask=bias)


def by_attention(x, weight, bias):
    q, k, v = (x @ weight).unflatten(-1, (3, 2, D)).permute(2, 0, 3, 1, 4)
    return attention(q, k, v, bias=bias, causal=True)


def by_parts(x, weight, bias):
    """Matrix products of autocast, and tilewise's, which it leaves alone."""
    q, k, v = (x @ weight).unflatten(-1, (3, 2, D)).permute(2, 0, 3, 1, 4)
    p = softmax(matmul(q, k.mT, alpha=0.5), bias=bias)
    return matmul(p, v)


def cast(function):
    """The function in a region of autocast of its own."""

    def run(*inputs):
        with torch.autocast("cpu", torch.bfloat16):
            return function(*inputs)

    return run


@pytest.mark.parametrize(
    ("function", "region"),
    [(by_sdpa, "around"), (by_sdpa, "inside"), (by_attention, "around"), (by_parts, "around")],
)
def test_full_graph(function, region):
    torch._dynamo.reset()
    function = cast(function) if region == "inside" else function
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager", dynamic=True)
    for stance, length in (("default", 5), ("fail_on_recompile", 9)):
        leaves = torch.randn(2, length, 7), torch.randn(7, 3 * 2 * D), torch.randn(2, length, length)
        leaves = [x.requires_grad_() for x in leaves]
        ours, theirs = [], []
        with torch.compiler.set_stance(stance):
            for results, call in ((ours, compiled), (theirs, function)):
                o = (cast(call) if region == "around" else call)(*leaves)
                results += [o, *torch.autograd.grad(o.float().square().sum(), leaves)]
        for a, b in zip(ours, theirs, strict=True):
            assert a.dtype == b.dtype
            torch.testing.assert_close(a, b)
    assert ours[0].dtype == torch.bfloat16
    torch._dynamo.reset()
