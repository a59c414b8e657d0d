"""The doors on a device: autocast, a compiled call, PyTorch's CausalBias."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from tilewise import attention, scaled_dot_product_attention

BRAIN, FLOAT = torch.bfloat16, torch.float32
WITHIN = {"rtol": 2e-2, "atol": 2e-2}  # of bfloat16


def drawn(*dtypes, M=64, N=96, D=64):
    sizes = (M, N, N)
    return [
        torch.randn(2, 4, n, D, device="cuda", dtype=dtype, requires_grad=True)
        for n, dtype in zip(sizes, dtypes, strict=True)
    ]


def gradients(o, leaves):
    return torch.autograd.grad(o.float().square().sum(), leaves)


def test_autocast_takes_what_rotary_embeddings_leave():
    q, k, v = drawn(FLOAT, FLOAT, BRAIN)
    seen = torch.ones(64, 96, dtype=torch.bool, device="cuda").tril(96 - 64)
    with torch.autocast("cuda", BRAIN):
        for _ in range(2):  # the second call is one like an earlier one
            o = attention(q, k, v, causal=True)
            theirs = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
    assert o.dtype == theirs.dtype == BRAIN
    torch.testing.assert_close(o, theirs, **WITHIN)
    for x, y, leaf in zip(gradients(o, (q, k, v)), gradients(theirs, (q, k, v)), (q, k, v), strict=True):
        assert x.dtype == y.dtype == leaf.dtype
        torch.testing.assert_close(x, y, **WITHIN)
    with pytest.raises(TypeError, match="v: dtype must equal q's"):
        attention(q, k, v, causal=True)


@pytest.mark.parametrize("bias", [causal_upper_left(64, 96), causal_lower_right(64, 96)], ids=repr)
def test_causal_biases(bias):
    q, k, v = drawn(BRAIN, BRAIN, BRAIN)
    theirs = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    for o in (scaled_dot_product_attention(q, k, v, attn_mask=bias), attention(q, k, v, bias=bias)):
        torch.testing.assert_close(o, theirs, **WITHIN)


# PyTorch's compiler warns of its own doings, differently in each release.
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("autocast", [False, True])
def test_a_compiled_call_is_one_graph(autocast):
    torch._dynamo.reset()

    def call(q, k, v):
        with torch.autocast("cuda", BRAIN, enabled=autocast):
            return scaled_dot_product_attention(2 * q, k, v, is_causal=True)

    q, k, v = drawn(*(3 * [FLOAT if autocast else BRAIN]))
    o, eager = torch.compile(call, fullgraph=True)(q, k, v), call(q, k, v)
    torch.testing.assert_close(o, eager, rtol=0, atol=0)
    for x, y in zip(gradients(o, (q, k, v)), gradients(eager, (q, k, v)), strict=True):
        torch.testing.assert_close(x, y, **WITHIN)
    torch._dynamo.reset()
