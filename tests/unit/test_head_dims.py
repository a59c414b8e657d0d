"""Heads of 512 dimensions, through each function that takes q, k and v."""

import pytest
import torch

import tilewise
from tilewise.bias import low_rank_bias
from tilewise.integrations import flash_attn
from tilewise.integrations.evoformer import DS4Sci_EvoformerAttention
from tilewise.varlen import varlen_attn

D, H, S = 512, 2, 6
OFFSETS = torch.tensor([0, S, 2 * S], dtype=torch.int32)


def packed(x):
    return x.transpose(1, 2).flatten(0, 1)


def dense(x):
    return x.unflatten(0, (2, S)).transpose(1, 2)


def jagged(x):
    parts = list(x.transpose(1, 2))
    return torch.nested.as_nested_tensor(parts, layout=torch.jagged).transpose(1, 2)


def of_flash(function):
    """A function of tensors (batch, length, heads, head_dim)."""
    return lambda q, k, v: function(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


FUNCTIONS = {
    "attention": tilewise.attention,
    "low_rank_bias": lambda q, k, v: tilewise.attention(
        q, k, v, bias=low_rank_bias(torch.ones(1, 1, S, 2), torch.ones(1, 1, S, 2))
    ),
    "plan": lambda q, k, v: tilewise.plan(q, k, v).run(q, k, v),
    "scaled_dot_product_attention": tilewise.scaled_dot_product_attention,
    "varlen_attention": lambda *x: dense(tilewise.varlen_attention(*map(packed, x), OFFSETS, OFFSETS, S, S)),
    "varlen_attn": lambda *x: dense(varlen_attn(*map(packed, x), OFFSETS, OFFSETS, S, S)),
    "jagged": lambda *x: torch.stack(tilewise.attention(*map(jagged, x)).transpose(1, 2).unbind()).transpose(1, 2),
    "flash_attn_func": of_flash(flash_attn.flash_attn_func),
    "flash_attn_kvpacked_func": of_flash(
        lambda q, k, v: flash_attn.flash_attn_kvpacked_func(q, torch.stack([k, v], 2))
    ),
    "flash_attn_qkvpacked_func": of_flash(
        lambda *x: flash_attn.flash_attn_qkvpacked_func(torch.stack(x, 2))
    ),
    "flash_attn_varlen_func": lambda *x: dense(
        flash_attn.flash_attn_varlen_func(*map(packed, x), OFFSETS, OFFSETS, S, S)
    ),
    "DS4Sci_EvoformerAttention": lambda *x: DS4Sci_EvoformerAttention(
        *(y.transpose(1, 2)[:, None] for y in x), [None, None]
    )[:, 0].transpose(1, 2),
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name):
    generator = torch.Generator().manual_seed(3)
    q, k, v, do = (torch.randn(2, H, S, D, generator=generator) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o = FUNCTIONS[name](*leaves)
    found = (o, *torch.autograd.grad(o, leaves, do))
    o = torch.softmax(q.double() @ k.double().mT / D**0.5, -1) @ v.double()
    for x, exact in zip(found, (o, *torch.autograd.grad(o, leaves, do.double())), strict=True):
        torch.testing.assert_close(x.double(), exact.double(), rtol=1e-4, atol=1e-5)


def test_explain():
    """FLOPs that a GPU computes again for the second tile of columns: Q Kᵀ, and in the backward dO Vᵀ too."""
    q, v = (torch.empty(2, 4, 1024, size, dtype=torch.bfloat16, device="meta") for size in (576, 512))
    text = str(tilewise.explain(q, q, v, device="sm_90"))
    once, again = (2 * 576 + 512) / (576 + 512), (2 * (576 + 512) + 2 * 576 + 512) / (3 * 576 + 2 * 512)
    assert f"computes the scores anew, {once:.2f} times the FLOPs, {again:.1f} times in the backward" in text
    assert "not hopper: has kernels up to 256 dimensions, not for 576" in text
    assert "backend cpu" in str(tilewise.explain(q, q, v, device="cpu"))
    few = str(tilewise.explain(q[:, :, :1], q, v, device="sm_90"))
    assert f"computes the scores anew, {again:.1f} times in the backward" in few
    assert "anew" not in str(tilewise.explain(v[..., :256], v[..., :256], v[..., :256], device="sm_80"))
